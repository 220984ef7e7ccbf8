"""Launches of a package's plans: its devices, streams, lists of masks and counters."""

from __future__ import annotations

import logging
from typing import Any

import torch

from .dispatch import Choice
from .driver import BoundLaunches, Device, DriverError, cuda_driver
from .mask_lists import MaskLists
from .table import PackageError, Table

# Without PyTorch's Python around them, where this build has them.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
is_capturing = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# Reasons that say nothing is wrong with the caller's tensors.
_EXPECTED = frozenset(
    {
        *("not_faster", "short_training", "short_scan", "far", "not_tuned", "mask", "dropout"),
        "head_dim",
    }
)


class Launcher:
    """Launches plans on a package's devices, and counts who served the calls.

    namespace: of the logger. cuda: the driver's binding (default: cuda.bindings.driver). devices:
    the device types that are served. forked: whether this process was forked after CUDA was used.
    """

    def __init__(self, table: Table, namespace: str, cuda: Any, devices: tuple[str, ...]) -> None:
        self.table, self.device_types = table, devices
        self._cuda = cuda
        self._log = logging.getLogger(namespace)
        self._said: set[str] = set()
        self.counts = {"kernel": 0}  # not a Counter, which takes four times as long
        self.masks = MaskLists(self.capture_of)
        self._devices: dict[int, Device] = {}
        self.forked = False
        self._on_cuda = "cuda" in devices
        self.current_device = current_device
        self.stream = raw_stream if self._on_cuda else lambda _: 0

    def after_fork(self) -> None:
        """Launch nothing any more in this process, if the one before has used CUDA."""
        self.forked = bool(self._devices)
        self.masks.forget()

    def bound(self, plan: Any) -> BoundLaunches | None:
        """The launches of a plan, loaded now or before; None if the plan was given up meanwhile.

        Raises DriverError or PackageError.
        """
        calls, index = plan.calls, plan.index  # once: another thread may take the calls away
        if plan.launches is not None or not calls:
            return plan.launches  # type: ignore[no-any-return]
        if index not in self._devices:
            self._devices[index] = Device(self.table, self._cuda or cuda_driver(), index)
        return plan.load(self._devices[index], calls)  # type: ignore[no-any-return]

    def gave_up(self, plan: Any, error: Exception) -> None:
        """Leave the calls of a plan to PyTorch from now on, and say why."""
        code = "damaged" if isinstance(error, PackageError) else "driver"
        plan.choice = Choice(None, code, str(error), plan.choice.gain)
        plan.calls, plan.launches = {}, None
        self.fell_back(plan.choice)

    def count(self, kind: str) -> None:
        """Count a call by what served it."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def fell_back(self, choice: Choice) -> None:
        """Count a call that PyTorch gets, and say why if it is the first of its reason."""
        self.count(choice.code)
        if choice.code not in self._said:
            self._said.add(choice.code)
            level = logging.INFO if choice.code in _EXPECTED else logging.WARNING
            self._log.log(level, "scaled_dot_product_attention: %s (said once)", choice.reason)

    def is_scanned_alone(self, mask: Any, keep: bool) -> bool:
        """Whether a mask's scan is of one call: nothing of it is kept, and no graph replays it."""
        return (not keep or mask.is_inference()) and not (self._on_cuda and is_capturing())

    def capture_of(self, stream: int) -> int | None:
        """The number of the CUDA graph that a stream is capturing, 0 if none, None if unknown."""
        if not self._on_cuda or not is_capturing():
            return 0
        try:
            cuda = self._cuda or cuda_driver()
            status, _, number, *_ = cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream))
        except (AttributeError, TypeError, ValueError, DriverError):
            return None
        return None if int(status) else int(number)

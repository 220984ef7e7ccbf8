"""A card that is not there: tensors without memory, and what launchers ask of a card."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "bool": torch.bool,
    "int32": torch.int32,
}


def cannot_be_traced(error: BaseException | None) -> bool:
    """Whether a call asked for values of tensors, which have none here: that is no fault of it."""
    while error is not None:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Digests the tensor operations of a call: what the host does beside launching."""

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take an operation down, and do it."""
        said = [
            func.name(),
            *map(_said, args),
            *(f"{n}={_said(v)}" for n, v in (kwargs or {}).items()),
        ]
        self._digest.update("\0".join(said).encode())
        return func(*args, **(kwargs or {}))

    @property
    def digest(self) -> str:
        """SHA-256 of the operations so far."""
        return self._digest.hexdigest()


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_said, value))}]"
    return repr(value)


class _NoCard(FakeTensorMode):  # type: ignore[misc]
    """FakeTensorMode as it is without a card, though `is_available` says that there is one.

    Indexing and `contiguous` ask CUDA for the current device otherwise.
    """

    avoid_device_init = True


@contextmanager
def no_card(arch: Arch, *, real: bool = False) -> Iterator[None]:
    """PyTorch as it is on a card of this architecture, as far as launchers ask before a launch.

    real: tensors have memory, of the host.
    """
    major, minor = arch.compute_capability
    facts = SimpleNamespace(
        name=f"a card of {arch.name}",
        major=major,
        minor=minor,
        multi_processor_count=arch.sm_count,
        max_threads_per_multi_processor=arch.max_threads_per_sm,
        regs_per_multiprocessor=arch.registers_per_sm,
        shared_memory_per_block_optin=arch.smem_per_block,
        shared_memory_per_multiprocessor=arch.smem_per_sm,
        warp_size=32,
        total_memory=1 << 36,
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: facts,  # noqa: ARG005
        "get_device_capability": lambda device=None: (major, minor),  # noqa: ARG005
        "get_device_name": lambda device=None: facts.name,  # noqa: ARG005
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),  # noqa: ARG005
        "synchronize": lambda device=None: None,  # noqa: ARG005
        "set_device": lambda device: None,  # noqa: ARG005
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Which has a build for CUDA ask for a tensor of the card's own memory.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        if not real:
            stack.enter_context(_NoCard(allow_non_fake_inputs=True))
        yield


def inputs_of(problem: Problem) -> list[FakeTensor]:
    """A call's inputs in the order of `problem.values`: contiguous, without memory."""
    tensors = {tensor.name: tensor for tensor in problem.op.inputs(problem)}
    return [
        torch.empty(problem.shape_of(name), dtype=DTYPES[tensors[name].dtype], device="cuda")
        for name in problem.values
    ]


def warm_up(arch: Arch) -> None:
    """Import what PyTorch imports when it first makes such a tensor: 2 s, that each fork spares."""
    with no_card(arch):
        torch.empty_like(
            torch.empty(1, 2, 3, 4, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        )

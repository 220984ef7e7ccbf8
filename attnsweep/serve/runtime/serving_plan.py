"""What is known of a call before it is made, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnsweep.family.launch import Launch

from .dispatch import Choice
from .driver import BoundLaunches, Tensor
from .intervals import Diagonals
from .table import Code


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a call is served as it is. kernel: its config, or None for PyTorch's own attention.

    code: the reason's short name, as in the counters. gain: expected time of PyTorch's attention
    over the kernel's, 0 if nothing is known. backward: the config that computes gradients, of a
    call that records them, if a kernel does.
    """

    kernel: str | None
    code: str
    reason: str
    gain: float
    gpu: str | None
    backward: str | None = None

    def __str__(self) -> str:
        by = self.kernel or "scaled_dot_product_attention"
        gain = f", expected gain {self.gain:.3f}" if self.gain else ""
        own = f"; gradients by {self.backward}" if self.backward else ""
        return f"{by}: {self.reason}{gain}{own} [{self.gpu or 'no known GPU'}]"


@dataclass(slots=True, eq=False)
class Plan:
    """All of a call that does not depend on addresses. calls is empty if PyTorch serves it.

    index: the device's, -1 for the CPU's. lse: whether the log-sum-exp is an output. floats:
    elements of the workspaces. names: of the buffers. causal, scale, grouped: as PyTorch's own
    attention would get them, enable_gqa last. rows: sizes of the log-sum-exp. launches: once the
    kernels are loaded. met: how often it was looked up by shapes and strides. by_pytorch: PyTorch's
    own backward: the settings on which it depends, its function, causal and scale; once asked.
    scan: the launches that make the list of a mask, with names of what they write, and its places
    and end in memory of 32-bit words; scans: once they are loaded. scan_reads: the names of what
    they read. short_scan: whether they outlast the call. biased: whether a call reads its mask
    itself, as numbers that are added to scores.
    copied: whether it reads a copy of that, since no tensor map can describe the mask.
    of_rows: the plan of the call with a contiguous query, by which it is served, if the rows of its
    groups are not equally far apart. limits: the mask by diagonals, if the call has it so. out:
    sizes and strides of the output, if it is not like q.
    """

    choice: Choice
    calls: Mapping[str, Launch] = field(default_factory=dict)
    stages: Mapping[str, Code] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    index: int = -1
    lse: bool = False
    floats: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    causal: bool = False
    scale: float = 0.0
    grouped: bool = False
    rows: tuple[int, ...] = ()
    launches: BoundLaunches | None = None
    met: int = 0
    by_pytorch: tuple[Any, ...] | None = None
    scan: Mapping[str, Launch] = field(default_factory=dict)
    scan_names: tuple[str, ...] = ()
    scan_places: tuple[int, ...] = ()
    scan_reads: tuple[str, ...] = ()
    scans: BoundLaunches | None = None
    short_scan: bool = False
    biased: bool = False
    copied: bool = False
    of_rows: Plan | None = None
    limits: Diagonals | None = None
    out: tuple[tuple[int, ...], tuple[int, ...]] | None = None


MOST_PLANS = 4096
"""Entries of a cache: more are met only by calls whose shapes keep changing, and then the cache
starts anew, so that it never grows."""
UNALIGNED = Choice(None, "alignment", "a tensor does not begin at a multiple of 16 bytes")
FORKED = Plan(Choice(None, "fork", "this process was forked after CUDA was used"))
TRANSFORMED = Plan(
    Choice(None, "transform", "in torch.func, torch.jit.trace, or with forward derivatives")
)
SUBCLASS = Plan(
    Choice(None, "subclass", "an argument is no plain tensor, or a dispatch mode is on")
)

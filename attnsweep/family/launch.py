"""What a family launches: one kernel with its grid, threads, memory and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor of a 16-bit tensor, passed by value (`const __grid_constant__`, 128 bytes).

    buffer: its name. dims: elements, innermost first. strides: bytes between neighbours of every
    dimension but the first, multiples of 16. box: elements that one copy moves. swizzle_bytes: 0,
    32, 64 or 128. Reads outside `dims` return zeros; writes outside are dropped.
    """

    buffer: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128


def l2_bytes_at_once(strides: Sequence[int]) -> int:
    """Bytes that the L2 fetches for a read through a tensor map: its promotion, 128 or 256.

    strides: as of a TensorMap, from row to row first. 256 only if all rows begin with lines of 128
    bytes, or rows that lie one behind the other share one: on an H100, 256 took (2,16,4096,136),
    whose rows are 272 bytes apart, 663 µs, and 128 559; rows of 144 bytes 58.5 and 56.1, of 80
    116.9 and 114.5, of 160 56.2 and 55.4, of 288 as long.
    """
    share = strides and strides[0] and 128 % strides[0] == 0
    return 256 if share or all(stride % 128 == 0 for stride in strides) else 128


Arg = str | int | float | TensorMap


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a stage, fully determined.

    args: a str names a buffer (`q`, `k`, `v`, `o`, or a workspace) and passes its pointer; of a
    problem in FP8 also `q_scale`, `k_scale` or `v_scale`, float32 (see Problem). An int passes as
    int32, a float as float32, a TensorMap by value. `defines` are extra compile-time integers that
    follow from the problem. `min_blocks_per_sm` is the occupancy that the family plans for.
    `programmatic`: the launch uses programmatic stream serialization, so that it may
    begin before the launch ahead of it ends (sm_90; the template must wait with
    griddepcontrol.wait). `carveout`: percentage of the memory shared with L1 that the launch asks
    for as shared memory; -1 leaves it to the driver, which decides by what each launch needs.
    `once`: it reads only what calls have in common, such as a mask, and so runs before the first
    of them. Its time is shown, and is no part of a call's. Configs share workspaces of one name and
    size, so what it writes needs a name of its own for each thing that it may be.
    """

    function: str
    grid: tuple[int, int, int]
    threads: int
    args: tuple[Arg, ...]
    smem_bytes: int = 0
    defines: Mapping[str, int] = field(default_factory=dict)
    min_blocks_per_sm: int = 1
    programmatic: bool = False
    carveout: int = -1
    once: bool = field(default=False, repr=False)  # fingerprints of rows are of the others

    @property
    def arg_bytes(self) -> tuple[int, ...]:
        """Bytes of each argument as the kernel receives it."""
        return tuple(
            8 if isinstance(arg, str) else 128 if isinstance(arg, TensorMap) else 4
            for arg in self.args
        )

"""A case on the host: its inputs, which heads are negated, and expected rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attnsweep.verify.encoding import Float, Tensor

# Mixes of inputs: as they were made, and with k and v negated, or dO of a backward, which negates
# all gradients. Other numbers negate some heads.
PLAIN, OPPOSITE = 0, 1


def negated_heads(mix: int, heads_kv: int) -> npt.NDArray[np.bool_]:
    """The heads of keys that are negated in a mix; the same function as compare.cu's."""
    if mix in (PLAIN, OPPOSITE):
        return np.full(heads_kv, bool(mix))
    x = np.uint64(mix) ^ np.arange(heads_kv, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.bool_] = (x ^ x >> np.uint64(31)) >> np.uint64(63) != 0
    return found


def contents_of(first: int, digests: Sequence[int]) -> list[int]:
    """The input contents of each call in a chain, from the digests of the outputs before it.

    compare.cu computes the same on the device.
    """

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    found = [first]
    for digest in digests[:-1]:
        found.append(mixed(found[-1] ^ mixed((digest + 0x9E3779B97F4A7C15) % 2**64)) or 1)
    return found


@dataclass(frozen=True, slots=True)
class ExpectedCase:
    """A case computed by NumPy: its inputs, and expected rows of every head."""

    inputs: Mapping[str, Tensor]
    rows: Mapping[str, npt.NDArray[np.int64]]
    """Row numbers compared, of each output and any log-sum-exp: the same in every head."""
    sides: Sequence[Mapping[str, Float]]
    """What these rows are, on the inputs as they were made and on their opposite."""
    least: Mapping[str, float] = field(default_factory=dict)
    """How long a row of an output counts at least."""
    drawn: Mapping[str, npt.NDArray[np.float32]] | None = None
    """q, k, v before they were rounded, of a timed case in FP8."""
    exact: Mapping[str, Float] | None = None
    """What the rows are on them."""

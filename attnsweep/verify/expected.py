"""What the host knows of a case: its inputs, which heads of them are negated, and some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import Case
from attnsweep.core.ops import BACKWARD
from attnsweep.verify import backward, encoding, reference
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.encoding import stored
from attnsweep.verify.sample import ALL, Sample

# Mixes of inputs: as they were made, and with k and v negated, or dO of a backward, which negates
# all gradients. Other numbers negate some heads.
PLAIN, OPPOSITE = 0, 1


def negated_heads(mix: int, heads_kv: int) -> npt.NDArray[np.bool_]:
    """Which of all heads of keys are negated in a mix; the same function as compare.cu's."""
    if mix in (PLAIN, OPPOSITE):
        return np.full(heads_kv, bool(mix))
    x = np.uint64(mix) ^ np.arange(heads_kv, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.bool_] = (x ^ x >> np.uint64(31)) >> np.uint64(63) != 0
    return found


def contents_of(first: int, digests: Sequence[int]) -> list[int]:
    """The contents of a chain of calls whose outputs have these digests; as compare.cu's chain."""

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
    """What NumPy knows of a case: its inputs and, on some rows of every head, what is right."""

    inputs: Mapping[str, encoding.Tensor]
    rows: npt.NDArray[np.int64]
    sides: list[tuple[encoding.Float, encoding.Float]]
    """Output and log-sum-exp of the rows, on the inputs as they were made and on their opposite."""
    drawn: Mapping[str, npt.NDArray[np.float32]] | None = None
    """q, k, v before they were rounded, of a timed case in FP8."""
    exact: tuple[encoding.Float, encoding.Float] | None = None
    """Output and log-sum-exp of the rows on them."""
    keys: npt.NDArray[np.int64] | None = None
    """For a backward, the keys that are compared, the same in each head; `sides` is then empty."""
    gradients: Mapping[str, encoding.Float] | None = None
    """dq of the rows, dk and dv of the keys; on the opposite they are negated."""
    least: Mapping[str, float] = field(default_factory=dict)
    """How long a row of an output counts at least."""

    @classmethod
    def of(
        cls,
        case: Case,
        seed: int,
        *,
        two_sided: bool = False,
        sample: Sample = ALL,
        given: Mapping[str, encoding.Tensor] | None = None,
    ) -> ExpectedCase:
        """Compute it on the host. two_sided: as is timed; see DeviceCase. sample: of the rows.

        given: the inputs, if they are known.
        """
        problem = case.problem
        if problem.op == BACKWARD:
            return cls._of_backward(case, seed)
        drawn = verify_inputs.draw(case, seed) if two_sided and problem.scaled else None
        inputs: Mapping[str, encoding.Tensor] = (
            {**stored(drawn, problem), **verify_inputs.beside(case, seed)}
            if drawn
            else given or verify_inputs.make_inputs(case, seed)
        )
        rows = sample.moved(reference.sampled_rows(problem, seed), problem)
        sides = reference.exact_rows(inputs, problem, rows, (1, -1) if two_sided else (1,))
        if drawn is None:
            return cls(inputs, rows, sides)
        (exact,) = reference.exact_rows(drawn, replace(problem, dtype="fp32"), rows)
        return cls(inputs, rows, sides, drawn, exact)

    @classmethod
    def _of_backward(cls, case: Case, seed: int, flops: float | None = None) -> ExpectedCase:
        inputs = verify_inputs.make_inputs(case, seed)
        rows, keys = backward.sampled(case.problem, seed, flops)
        (found,) = backward.gradients(inputs, case.problem, rows, keys)
        least = backward.least_lengths(inputs, case.problem)
        return cls(inputs, rows, [], keys=keys, gradients=found, least=least)

    @classmethod
    def of_turns(cls, case: Case, seed: int) -> ExpectedCase:
        """Compute both sides of short turns, whose many heads need few rows each."""
        if case.problem.op == BACKWARD:
            return cls._of_backward(case, seed, flops=0)
        inputs = verify_inputs.make_inputs(case, seed)
        rows = reference.sampled_rows(case.problem, seed, flops=0)
        return cls(inputs, rows, reference.exact_rows(inputs, case.problem, rows, (1, -1)))

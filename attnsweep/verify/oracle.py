"""The oracle of each op: its inputs, expected outputs and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnsweep.core.cases import Case
from attnsweep.core.ops import BACKWARD, FORWARD
from attnsweep.core.problem import Problem
from attnsweep.verify import backward, backward_limits, inputs, limits, reference, rounded
from attnsweep.verify.encoding import Float, Tensor, stored
from attnsweep.verify.expected import ExpectedCase
from attnsweep.verify.measures import Measures, Same
from attnsweep.verify.sample import ALL, Sample

if TYPE_CHECKING:
    from attnsweep.device.buffers import Buffer
    from attnsweep.verify.device_case import DeviceCase

Inputs = Mapping[str, Tensor]
# Shared memory that a block has on every card that is swept.
_MOST_ROW_BYTES = 96 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Oracle:
    """Inputs, expected outputs and limits of an op; outputs and measures go by their names."""

    make_inputs: Callable[..., Inputs]
    """The inputs of a case by a seed, in storage form: see inputs.make_inputs."""
    expected: Callable[..., ExpectedCase]
    """What NumPy knows of a case by a seed: of both sides if `two_sided`, as DeviceCase has it, of
    rows of a `sample`, on `given` inputs if they are known, or of `few` rows of many heads."""
    exact: Callable[[Inputs, Problem], tuple[Mapping[str, Float], Mapping[str, float]]]
    """The outputs in float64, by NumPy, and how long a row of each counts at least."""
    same_maths: Callable[[Case, int], Same]
    """Largest errors of the rounded maths with scores rounded 0, 1 or 2 times."""
    each_draw: Callable[[Case, int], Iterator[Same]]
    """The same after some draws of inputs, then after more: the last is same_maths."""
    limits: Callable[[Case, int, Same | None], Mapping[str, Measures]]
    """The largest measures of right outputs, from `same_maths`, if that is known."""
    rows_of: Callable[[Problem, str, Sample], int]
    """Rows of an output that are compared with float64, and are not 0 in any case."""
    write: Callable[[DeviceCase, dict[str, Buffer], float], None]
    """Writes what is right in float64, on the device; the softmax scale is (1 + tilt) times it."""
    judge_rows: Callable[[DeviceCase, Sequence[Mapping[str, Buffer]], int, int], None]
    """Compares rows of calls, drawn by a seed, with float64: findings go to a slot and on."""
    negated: tuple[str, ...]
    """Inputs, if there are such, that give other outputs when they are negated: see DeviceCase."""
    can_redraw: Callable[[Problem], bool]
    """Whether timed inputs can be drawn anew, and rows of their outputs judged."""
    can_chain: Callable[[Problem], bool]
    """Whether a chain of calls can be judged, whose inputs are drawn anew."""
    tilts: bool
    """Whether small cases show the softmax scale: see Measures.scale."""


def oracle_of(problem: Problem) -> Oracle:
    """The oracle of a problem's op."""
    return _ORACLES[problem.op.name]


# -- forward ----------------------------------------------------------------------------------


def _expected(
    case: Case,
    seed: int,
    given: Inputs | None = None,
    sample: Sample = ALL,
    *,
    two_sided: bool = False,
    few: bool = False,
) -> ExpectedCase:
    problem = case.problem
    drawn = inputs.draw(case, seed) if two_sided and problem.format.lossy and not few else None
    if drawn is not None:
        given = {**stored(drawn, problem), **inputs.beside(case, seed)}
    given = given or inputs.make_inputs(case, seed)
    most = {"flops": 0.0} if few else {}
    rows = sample.moved(reference.sampled_rows(problem, seed, **most), problem)
    names = [tensor.name for tensor in problem.op.written(problem)]

    def right(of: Inputs, problem: Problem, *signs: int) -> list[dict[str, Float]]:
        sides = reference.exact_rows(of, problem, rows, signs)
        return [dict(zip(names, side, strict=True)) for side in sides]

    known = dict.fromkeys(names, rows), right(given, problem, *(1, -1)[: 1 + two_sided])
    if drawn is None:
        return ExpectedCase(given, *known)
    (exact,) = right(drawn, replace(problem, dtype="fp32"), 1)
    return ExpectedCase(given, *known, drawn=drawn, exact=exact)


def _exact(given: Inputs, problem: Problem) -> tuple[dict[str, Float], dict[str, float]]:
    (o,) = problem.outputs
    return {o: rounded.reference(given, problem, np.arange(problem.seqlen_q))}, {o: 0.0}


def _same_maths(case: Case, rounds_scores: int) -> Same:
    return dict.fromkeys(case.problem.outputs, limits.same_maths(case, rounds_scores))


def _each_draw(case: Case, rounds_scores: int) -> Iterator[Same]:
    draws = limits.each_draw(case, rounds_scores)
    return (dict.fromkeys(case.problem.outputs, same) for same in draws)


def _limits(case: Case, rounds_scores: int, same: Same | None) -> dict[str, Measures]:
    (o,) = case.problem.outputs
    return {o: limits.limits(case, rounds_scores, None if same is None else same[o])}


def _rows_of(problem: Problem, _output: str, sample: Sample) -> int:
    return problem.heads * problem.rows_with_keys if sample == ALL else sample.rows(problem)


def _row_fits(problem: Problem) -> bool:
    """Whether shared memory has room for what is right for a row."""
    from attnsweep.verify.compare import row_bytes  # which brings the compiler: not beside

    return row_bytes(problem) <= _MOST_ROW_BYTES


def _write(of: DeviceCase, to: dict[str, Buffer], tilt: float) -> None:
    o, lse = to.values()
    of.comparer.reference(of.buffers, of.case.problem, o, lse, tilt, of.sample)


def _judge_rows(
    of: DeviceCase, every: Sequence[Mapping[str, Buffer]], seed: int, slot: int
) -> None:
    (floor,) = of.floor.values()
    of.comparer.judge_rows(every, of.case.problem, floor, seed, slot)


# -- backward ---------------------------------------------------------------------------------


def _expected_gradients(
    case: Case, seed: int, sample: Sample = ALL, *, two_sided: bool = False, few: bool = False
) -> ExpectedCase:
    assert sample == ALL
    problem, given = case.problem, backward.make_inputs(case, seed)
    rows, keys = backward.sampled(problem, seed, 0 if few else None)
    (found,) = backward.gradients(given, problem, rows, keys)
    sides = [found, {name: -exact for name, exact in found.items()}][: 1 + two_sided]
    of_rows = {name: rows if name == "dq" else keys for name in found}
    return ExpectedCase(given, of_rows, sides, backward.least_lengths(given, problem))


def _exact_gradients(given: Inputs, problem: Problem) -> tuple[dict[str, Float], dict[str, float]]:
    every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    (found,) = backward.gradients(given, problem, *every)
    return found, backward.least_lengths(given, problem)


def _draws_of_gradients(case: Case, _rounds_scores: int) -> Iterator[Same]:
    yield next(backward_limits.each_draw(case))  # in a fraction of the time of all, which are kept
    yield backward_limits.same_maths(case)


def _limits_of_gradients(case: Case, _rounds: int, same: Same | None) -> dict[str, Measures]:
    return backward_limits.limits(case, same or backward_limits.same_maths(case))


def _write_gradients(of: DeviceCase, to: dict[str, Buffer], _tilt: float) -> None:
    of.comparer.gradients(of.buffers, of.case.problem, to)


def _judge_gradients(
    of: DeviceCase, every: Sequence[Mapping[str, Buffer]], seed: int, slot: int
) -> None:
    for number, at in enumerate(every):
        own = (seed + number) % 2**64, slot + number * len(of.outputs)
        of.comparer.judge_gradient_rows(at, of.case.problem, of.floor, *own)


_ORACLES = {
    FORWARD.name: Oracle(
        inputs.make_inputs,
        _expected,
        _exact,
        _same_maths,
        _each_draw,
        _limits,
        _rows_of,
        _write,
        _judge_rows,
        negated=("k", "v"),
        can_redraw=_row_fits,
        can_chain=_row_fits,
        tilts=True,
    ),
    BACKWARD.name: Oracle(
        backward.make_inputs,
        _expected_gradients,
        _exact_gradients,
        lambda case, _: backward_limits.same_maths(case),  # no scores are stored
        _draws_of_gradients,
        _limits_of_gradients,
        lambda problem, output, _: backward.rows_of(problem, output),
        _write_gradients,
        _judge_gradients,
        negated=("do",),
        can_redraw=lambda _: False,  # o and lse would have to follow
        can_chain=lambda _: True,  # where they are taken as they are
        tilts=False,
    ),
}

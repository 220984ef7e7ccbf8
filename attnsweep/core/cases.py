"""The cases that a candidate must get right: which shapes with which kind of input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from attnsweep.core.errors import ProblemError
from attnsweep.core.layouts import DENSE, Packed, Padded, Paged
from attnsweep.core.long_problems import is_long
from attnsweep.core.masks import CAUSAL, Boolean, Mask, pattern
from attnsweep.core.problem import Problem, ceil_div

TILE = 64
"""Query rows of a tile of checks: compare.cu takes gains of this many rows together."""

Inputs = Literal[
    "normal",
    "large_scores",
    "huge_scores",
    "equal_keys",
    "far_below",
    "far_above",
    "tiny_ends",
    "one_hot",
    "wide",
    "sink",
    "huge_padding",
    "nan_padding",
    "finite_mask",
    "exact",
]
# Short turns: queries and keys of a sequence, and of a causal one. 100 keys are two tiles of 64 or
# one of 128, and end in a tail; a causal sequence has turns of other lengths too.
_SHORT, _SHORT_CAUSAL = (300, 100), (150, 150)
# Tiles of 64 queries for an SM, which has room for the accumulators of four: three turns.
_TURNS_OF_AN_SM = 3 * 4
# Boolean masks of cases, beside that of the problem: kernels learn a mask on the device.
_MASKS: tuple[Mask, ...] = (
    *(pattern("blocks", 1), pattern("documents", 3), pattern("holes", 50), pattern("padding", 0)),
    *(CAUSAL.as_boolean(), pattern("holes", 1, 1)),
)
# Requests of a case of many short ones.
_MOST_REQUESTS = 600
# Elements of an output at most: 256 MB in float64.
_MOST_ELEMENTS = 2**25
# Pairs of a query and a key of a case that was made larger for a family.
_MOST_PAIRS = 2**23


@dataclass(frozen=True, slots=True)
class Case:
    """One shape with one kind of input that a candidate must get right."""

    problem: Problem
    inputs: Inputs = "normal"

    @property
    def label(self) -> str:
        """`(1,16,1024,64) fp16 full, normal`."""
        return f"{self.problem.label}, {self.inputs}"


@lru_cache(maxsize=64)  # each of a problem's candidates asks for them
def small_cases(problem: Problem) -> tuple[Case, ...]:
    """Small, odd and hard cases with the compile-time facts of `problem`, none with more keys.

    Of a boolean mask of one query, each has one, and more heads instead.
    Of a padded problem, each has padding, and there are items with no key, one, and all of them.

    Tails in both directions, one query, one key, grouped heads, seqlen_q != seqlen_k; and every
    kind of hard input that make_inputs has.
    """

    def case(
        heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int, inputs: Any, batch: int = 1
    ) -> Case:
        seqlen_k = min(seqlen_k, problem.seqlen_k)
        shape = _shaped(alike, seqlen_q, seqlen_k)
        if _of_one_query(problem):
            heads *= seqlen_q  # as many rows
        if problem.layout.one_item:
            batch = 1
        return Case(replace(shape, batch=batch, heads=heads, heads_kv=heads_kv), inputs)

    alike = _of_one_length(problem)
    cases: tuple[Case, ...] = tuple(case(*each) for each in problem.op.small_cases)
    if problem.scores.bias is not None:
        cases = (*cases, case(2, 1, 130, 321, "finite_mask", batch=3))
    layout, mask = problem.layout, problem.mask
    if mask.as_tensor:
        masks = ((mask, layout), *((other, DENSE) for other in _MASKS))

        def masked(number: int, case: Case) -> Case:
            own, padding = masks[number % len(masks)]
            return replace(case, problem=replace(case.problem, batch=2, mask=own, layout=padding))

        every = (*cases, case(2, 2, 200, 400, "normal"), *cases[3:5])
        padding = case(2, 2, 130, 321, "nan_padding", batch=2)
        of_items = replace(padding.problem, mask=pattern("padding", 31), layout=DENSE)
        drawn = tuple(masked(number, case) for number, case in enumerate(every))
        return (*drawn, replace(padding, problem=of_items))
    if isinstance(layout, Packed):
        return tuple(_packed(case, number) for number, case in enumerate((*cases, *cases[2:5])))
    if isinstance(layout, Paged):
        return tuple(_paged(case, problem, number) for number, case in enumerate((*cases, *cases)))
    if not isinstance(layout, Padded):
        return cases
    more = (
        case(2, 1, 130, 321, "huge_padding", batch=3),
        case(2, 1, 70, 321, "huge_padding", batch=3),
        case(2, 1, 130, 322, "nan_padding", batch=3),
        case(2, 1, 70, 322, "nan_padding", batch=3),
        case(1, 1, 200, 400, "normal", batch=5),
        case(2, 2, 200, 400, "normal", batch=5),
        case(1, 1, 66, 130, "normal", batch=1),
        case(1, 1, 66, 130, "normal", batch=1),
    )
    # A pair of cases for each, as padding lies on either side in turns.
    least = (*(layout.least,) * len(cases), 0, 0, 0, 0, 0, 0, 1, 1)
    return tuple(
        _padded(case, number, percent)
        for number, (case, percent) in enumerate(zip((*cases, *more), least, strict=True))
    )


def called_cases(problem: Problem) -> tuple[Case, ...]:
    """The small cases of a callable of the user's.

    It may do with NaN under a boolean mask what PyTorch does, whose outputs are NaN then.
    """
    return tuple(
        case
        for case in small_cases(problem)
        if case.inputs != "nan_padding" or not case.problem.mask.as_tensor
    )


def hard_case(problem: Problem) -> Case:
    """The problem itself with hard inputs: as hard where mantissas and signs are drawn anew."""
    return Case(problem, problem.format.hard_inputs)


def whole_cases(problem: Problem) -> tuple[Case, ...]:
    """The problem, and its hard case if our own candidates are judged on it too.

    Gradients are not, and neither are long calls, nor FP8.
    """
    ours = problem.op.judged_on_hard and problem.format.judged_on_hard
    hard = ours and not is_long(problem)
    return (Case(problem), hard_case(problem)) if hard else (Case(problem),)


def served_cases(
    cases: Iterable[Case], problem: Problem, serves: Callable[[Problem], bool]
) -> tuple[Case, ...]:
    """The cases, each at the smallest nearby shape that the family serves.

    The nearest have as many heads as key heads or as the problem, its batch, and lengths that are
    multiples of 8 to 512 or equal. A case that has none is left out.
    """
    nearest = (
        next(filter(lambda c: serves(c.problem), _near(case, problem)), None) for case in cases
    )
    return tuple(dict.fromkeys(case for case in nearest if case is not None))


def _near(case: Case, whole: Problem) -> Iterator[Case]:
    """Yield the case, then cases of other sizes, smallest first, none with more keys."""
    yield case
    own, group = case.problem, whole.heads // whole.heads_kv
    heads = [(own.heads, own.heads_kv), (own.heads, own.heads), (group, 1), (2 * group, 2)]
    heads.append((whole.heads, whole.heads_kv))
    longest = max(own.seqlen_q, own.seqlen_k)
    most = max(_MOST_PAIRS, 4 * own.batch * own.heads * own.seqlen_q * own.seqlen_k)
    lengths = [(own.seqlen_q, own.seqlen_k), (longest, longest), (whole.seqlen_q, whole.seqlen_k)]
    for unit in (8, 16, 32, 64, 128, 256, 512):
        q, k = (ceil_div(n, unit) * unit for n in (own.seqlen_q, own.seqlen_k))
        lengths += [(q, k), (max(q, k), max(q, k))]
    sizes = product(dict.fromkeys((own.batch, whole.batch)), dict.fromkeys(heads), lengths)
    for batch, (h, kv), (q, k) in sorted(
        sizes, key=lambda s: (s[0] * s[1][0] * s[2][0] * s[2][1], s)
    ):
        if k <= whole.seqlen_k and batch * h * q * k <= most:
            with suppress(ProblemError):
                sized = {"batch": batch, "heads": h, "heads_kv": kv, "seqlen_q": q, "seqlen_k": k}
                yield replace(case, problem=replace(own, **sized))


def _packed(case: Case, number: int) -> Case:
    """A case with one to five sequences in the place of the batch, some of them empty.

    Kernels learn where sequences begin on the device, so that those of a case may be any.
    """
    layout = Packed(1 + number % 5, (0, 40)[number % 2], seed=number)
    return replace(case, problem=replace(case.problem, batch=1, layout=layout))


def _paged(case: Case, whole: Problem, number: int) -> Case:
    """A case with requests of many lengths: none, one key, one past a page, a tile, or a block.

    It has no more queries than the problem, and more requests instead. Kernels learn lengths and
    tables on the device, so that those of a case may be any; some share their first pages.
    """
    problem, layout = case.problem, whole.layout
    assert isinstance(layout, Paged)
    page, most = layout.page_size, problem.seqlen_k
    edges = (most, page + 1, 0, 65, 1, 257, page, 2 * page, 17, 129, 33, 513)
    lengths = [min(most, edges[(at + number) % len(edges)]) for at in range(1 + 3 * (number % 4))]
    own = replace(
        layout,
        lengths=(most, *lengths[1:]),
        # A shared page holds the first request's keys, with which the others' rows are not as hard.
        shared=number % 3 if case.inputs == "normal" and most > 2 * page else 0,
        seed=number,
    )
    queries = min(problem.seqlen_q, whole.seqlen_q)
    own_problem = replace(problem, batch=len(lengths), seqlen_q=queries, layout=own)
    return replace(case, problem=own_problem)


def _padded(case: Case, number: int, least: int) -> Case:
    """The case with padding, right and left alternating, whose items have unequal lengths.

    Kernels learn the ranges on the device, so that those of a case may be any. The item with all
    keys keeps hard inputs hard.
    """
    problem = case.problem
    batch = problem.batch if least == 1 else max(2, problem.batch)
    layout = Padded(("right", "left")[number % 2], least, seed=number // 2)
    return replace(case, problem=replace(problem, batch=batch, layout=layout))


def short_turns(problem: Problem, sm_count: int) -> Case | None:
    """A case of many short sequences, compiled as `problem` is, with no more keys than it has.

    Blocks that take turns at tiles of queries reuse shared memory soonest where a turn has few
    tiles of keys. There are 12 tiles of 64 queries for each SM, so that every block has three turns
    or more, as long as an SM holds at most 256 queries at once. Sequences are short in queries too:
    successive turns of a block then read different keys, and keys of another turn show. Wide heads
    get fewer turns, and None is returned if one group of heads is too large.
    """
    problem = _of_one_length(problem)
    seqlen_q, seqlen_k = _SHORT if problem.mask.interval.right is None else _SHORT_CAUSAL
    of_one = _shaped(problem, seqlen_q, min(seqlen_k, problem.seqlen_k))
    seqlen_q = of_one.seqlen_q
    group = problem.heads // problem.heads_kv
    wanted = ceil_div(_TURNS_OF_AN_SM * sm_count, group * ceil_div(seqlen_q, TILE))
    batch = min(wanted, _MOST_ELEMENTS // (group * seqlen_q * problem.value_dim))
    if batch == 0:
        return None
    layout = problem.layout
    if isinstance(layout, Padded):
        layout = replace(layout, least=0)
    if isinstance(layout, Paged):
        batch, most = min(batch, _MOST_REQUESTS), of_one.seqlen_k
        edges = (most, 1, layout.page_size + 1, 0, 33, 65)
        lengths = tuple(min(most, edges[at % len(edges)]) for at in range(batch))
        layout = replace(layout, lengths=lengths, shared=0)
        of_one = replace(of_one, seqlen_q=min(of_one.seqlen_q, problem.seqlen_q))
    if isinstance(layout, Packed):  # heads in the place of the batch
        heads, heads_kv = group * batch, batch
        packed = replace(of_one, batch=1, heads=heads, heads_kv=heads_kv, layout=Packed(3))
        return Case(packed)
    return Case(replace(of_one, batch=batch, heads=group, heads_kv=1, layout=layout))


def _of_one_length(problem: Problem) -> Problem:
    """The problem; a paged one gets equal lengths."""
    if not isinstance(problem.layout, Paged):
        return problem
    return replace(problem, layout=replace(problem.layout, lengths=(), shared=0))


def _of_one_query(problem: Problem) -> bool:
    """Whether the mask is a row of keys: a kernel may take it for that, so its cases are such."""
    return problem.mask.as_tensor and problem.seqlen_q == 1


def _shaped(problem: Problem, seqlen_q: int, seqlen_k: int) -> Problem:
    """The problem with other lengths, which has empty rows if and only if a dense problem has some.

    A window becomes so narrow that it hides keys on both of its sides.
    """
    mask, interval = problem.mask, problem.mask.interval
    if interval.left is not None:
        left, right = (None if s is None else min(s, seqlen_k // 3) for s in interval.sides)
        interval = replace(interval, left=left, right=right)
        mask = replace(mask, shows=interval) if isinstance(mask, Boolean) else interval
    if _of_one_query(problem):
        seqlen_q = 1
    if problem.layout != DENSE or mask.as_tensor:
        return replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)
    if not problem.has_empty_rows and interval.empty_rows(seqlen_q, seqlen_k):
        seqlen_q = min(seqlen_q, seqlen_k)
    while problem.has_empty_rows and not interval.empty_rows(seqlen_q, seqlen_k):
        seqlen_q += seqlen_k
    return replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask)

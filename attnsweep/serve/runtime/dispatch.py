"""Chooses the kernel for a shape, if it beats PyTorch's own attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnsweep.core.problem import Problem

from .cost_model import (
    FEW_QUERIES,
    SDPA,
    Learned,
    Prediction,
    as_cut,
    costs_of,
    learn,
    memory_us,
    nearness,
    tiling,
)
from .families import arch_of, beyond_limits, kind_of_code
from .table import CompiledKernel, TunedGpu, Winner

# By how much slower a kernel is taken to be for each octave to the nearest shape of its times.
_DOUBT = 0.01
# What the rows of another GPU say counts only if PyTorch's own attention is expected to take longer
# by this factor, and so much of its time at most to be that of bytes beyond the L2, since memory is
# what differs between such GPUs. Chosen on 39 recorded shapes of an H200 and 172 of an H100, by the
# rows of the other card; 190 later ones of the H200 bear them out (benchmarks/dispatch.py, and the
# tutorial docs/tutorials/your-model.md).
STAND_IN_GAIN, STAND_IN_MEMORY = 1.10, 0.3
# Keys for each query. With more, divided among the SMs, predicted gains were up to twice the
# measured ones, also on one GPU.
_MANY_KEYS = 4
# If there are too few tiles of queries for all SMs, PyTorch's own attention may divide the keys
# among them, which the prediction knows badly. A kernel must then be predicted to be faster by
# this factor: predicted 1.29 times as fast, one was 8 % slower on an H200, (1,8,485x3107,256). With
# few queries, of 135 shapes on an H100, none was 3 % slower at 1.2, and one at 1.17.
DIVIDED_GAIN, DIVIDED_GAIN_FEW = 1.3, 1.2
# What a predicted backward, or a call of few queries, must gain besides. Few queries wait for
# memory most: predicted 1.03 times as fast, (17,40/8,1x7486,128) was 10 % slower, by the last 4 of
# its 136 blocks.
_MORE_MARGIN = 0.04


@dataclass(frozen=True, slots=True)
class Choice:
    """kernel: which serves the shape, or None. code: a short name of the reason, of few.

    gain: expected time of PyTorch's own attention over the kernel's; 0 if nothing is known.
    sdpa_us: that time of PyTorch's own.
    """

    kernel: CompiledKernel | None
    code: str
    reason: str
    gain: float = 0.0
    sdpa_us: float = 0.0


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
    gain: float = 0.0
    gpu: str | None = None
    backward: str | None = None

    def __str__(self) -> str:
        by = self.kernel or "scaled_dot_product_attention"
        gain = f", expected gain {self.gain:.3f}" if self.gain else ""
        own = f"; gradients by {self.backward}" if self.backward else ""
        return f"{by}: {self.reason}{gain}{own} [{self.gpu or 'no known GPU'}]"


@dataclass(frozen=True, slots=True)
class CallKind:
    """Timed calls of one head_dim, dtype and mask, with few queries or with more.

    winners: also of the other dtype. sdpa: PyTorch's own, by whether there is one query.
    """

    winners: Mapping[Problem, Winner]
    kernels: tuple[tuple[CompiledKernel, Learned], ...]
    sdpa: Mapping[bool, Learned]


def choose(gpu: TunedGpu, problem: Problem, *, gradients: bool = False) -> Choice:
    """The kernel for a shape, or why there is none.

    A tuned shape gets its winner if the lower end of its gain is at least 1. Any other gets the
    kernel that is predicted to be the fastest, if it is predicted to beat PyTorch's own attention
    by the guard's share and the nearest shape where it was timed is within the guard's reach.
    Where the GPU's own rows have nothing to say of a shape, those of its stand-in are asked.
    gradients: whether the call records them; then PyTorch's own serves short ones.
    """
    choice = _forward(gpu, problem)
    if not gradients or choice.kernel is None or choice.sdpa_us >= gpu.guard.short_us:
        return choice
    why = (
        f"{choice.reason}; a step with gradients this short takes as long as the host's part of it"
    )
    return Choice(None, "short_training", why, choice.gain, choice.sdpa_us)


def exactly(gpu: TunedGpu, problem: Problem) -> Choice:
    """The kernel that won on the very shape, of padding whatever its lengths, or why there is none.

    Nothing is predicted: the recorded gradients of windows and lengths are too few to say how well.
    Times in fp16 and bf16 are taken as equal.
    """
    kind = _kind_of(gpu, problem)
    asked: Any = {"layout": problem.layout, "dtype": problem.dtype}
    won = [w for p, w in kind.winners.items() if replace(p, **asked) == problem]
    for winner in sorted(won, key=lambda each: each.problem.dtype != problem.dtype):
        if winner.gain_low < 1:
            return Choice(None, "not_faster", "PyTorch's own attention is as fast", winner.gain)
        for kernel, _ in kind.kernels:
            if kernel.config == winner.kernel.config:
                why = "this shape was tuned"
                return Choice(kernel, "tuned", why, winner.gain, winner.sdpa_us)
    return Choice(None, "not_tuned", f"{problem.label} was not tuned")


def _forward(gpu: TunedGpu, problem: Problem) -> Choice:
    own = _by_rows(gpu, problem)
    if gpu.stand_in is None or own.code not in _SILENT:
        return own
    return _by_stand_in(gpu, gpu.stand_in, problem, own)


# Codes of choices that say nothing of how fast a kernel would be.
_SILENT = ("far", "not_tuned")


def _by_stand_in(gpu: TunedGpu, other: TunedGpu, problem: Problem, own: Choice) -> Choice:
    """The choice by another GPU's rows, if clear enough; otherwise `own`."""
    why = own.reason if gpu.winners else "this GPU was not tuned"
    runs = f"the runs of {', '.join(other.names) or other.key.label}"
    if problem.seqlen_q < FEW_QUERIES or problem.seqlen_k > _MANY_KEYS * problem.seqlen_q:
        return Choice(None, own.code, f"{why}; {runs} do not stand in for it: too few queries")
    found = _by_rows(other, problem)
    told = f"{why}; by {runs}: {found.reason}"
    if found.kernel is None:
        return Choice(None, own.code, told, found.gain)
    if memory_us(SDPA, problem, other.card) > STAND_IN_MEMORY * found.sdpa_us:
        told += ", but too much of that is memory's time, which differs here"
        return Choice(None, own.code, told, found.gain)
    if found.gain < max(STAND_IN_GAIN, 1 + other.guard.margin):
        return Choice(None, own.code, f"{told}: too little for another GPU's", found.gain)
    told = f"by {runs}, which stand in for this GPU's: {found.reason}"
    return Choice(found.kernel, "stand_in", told, found.gain, found.sdpa_us)


def _by_rows(gpu: TunedGpu, problem: Problem) -> Choice:
    """The choice by the rows of one GPU."""
    kind = _kind_of(gpu, problem)
    if not kind.kernels:
        few = f", fewer than {FEW_QUERIES} queries" if problem.seqlen_q < FEW_QUERIES else ""
        of_v = f" and {problem.head_dim_v} of v" if problem.head_dim_v else ""
        what = f"head_dim {problem.head_dim}{of_v}, {problem.dtype}, {problem.mask.label}{few}"
        return Choice(None, "not_tuned", f"no shape with {what} was tuned")
    winner = kind.winners.get(problem)
    if winner is None:
        return _predicted(gpu, problem, kind)
    if winner.gain_low >= 1:
        why = "this shape was tuned"
        return Choice(winner.kernel, "tuned", why, winner.gain, winner.sdpa_us)
    why = "this shape was tuned, and PyTorch's own attention is as fast"
    return Choice(None, "not_faster", why, winner.gain)


def _kind_of(gpu: TunedGpu, problem: Problem) -> CallKind:
    """The CallKind of the shape's head_dim, dtype, mask and number of queries, made once."""
    few = problem.seqlen_q < FEW_QUERIES
    asked = (problem.head_dim, problem.dtype, problem.variant, few)
    found: CallKind | None = gpu.kinds.get(asked)
    if found is not None:
        return found
    alike = (problem.head_dim, problem.variant)
    known = [
        winner
        for winner in gpu.winners
        if (winner.problem.head_dim, winner.problem.variant) == alike
        and (winner.problem.seqlen_q < FEW_QUERIES) == few
    ]
    winners = {winner.problem: winner for winner in reversed(known)}
    numbers = {problem: number for number, problem in enumerate(winners)}
    timed: dict[str, list[tuple[int, Problem, float]]] = defaultdict(list)
    # Nobody has read a call's mask. A kernel that was timed on 8 documents alone, which have an
    # eighth of the pairs, was taken for every mask, and lost up to 10 %.
    told = [winner for winner in known if winner.problem.mask.pattern is None]
    for winner in told or known:
        for kernel, time_us in ((winner.kernel, winner.time_us), *winner.others):
            timed[kernel.config].append((numbers[winner.problem], winner.problem, time_us))
    kernels = _kernels(gpu, known, problem)
    sdpa = costs_of(problem).sdpa
    theirs: dict[bool, list[tuple[int, Problem, float]]] = {True: [], False: []}
    for w in known:
        theirs[w.problem.seqlen_q == 1].append((numbers[w.problem], w.problem, w.sdpa_us))
    kind = CallKind(
        winners,
        tuple((kernel, learn(tiling(kernel), timed[name], gpu.card)) for name, kernel in kernels),
        {one: learn(sdpa, times, gpu.card) for one, times in theirs.items()},
    )
    if kernels:  # only then is their number bounded by the table's
        gpu.kinds[asked] = kind
    return kind


def _kernels(
    gpu: TunedGpu, known: Sequence[Winner], problem: Problem
) -> list[tuple[str, CompiledKernel]]:
    """The kernels of the shape's head_dim, dtype and mask by their configs, in a fixed order."""
    kernels = [winner.kernel for winner in known]
    kernels += [kernel for winner in known for kernel, _ in winner.others]
    code = kind_of_code(problem)
    made = {each.config: each for each in (*kernels, *gpu.twins) if each.kind == code}
    return sorted(made.items())


def _predicted(gpu: TunedGpu, problem: Problem, kind: CallKind) -> Choice:
    """The kernel for a shape that was not tuned. Times in fp16 and bf16 are taken as equal."""
    guard = gpu.guard
    nearby = nearness(problem, kind.winners, gpu.card)
    found: list[tuple[Prediction, CompiledKernel]] = []
    arch = arch_of(gpu.key.sm_count)
    for kernel, learned in kind.kernels:
        if kernel.declaration.kernel.refused_on(kernel.values, problem, arch) is None:
            prediction = learned.predict(problem, nearby, gpu.card)
            if prediction is not None:
                found.append((prediction, kernel))
    near = [each for each in found if each[0].octaves <= guard.reach]
    near.sort(key=lambda each: each[0].time_us * (1 + _DOUBT * each[0].octaves))
    fits = (
        (prediction, kernel)
        for prediction, kernel in near
        if not beyond_limits(kernel.declaration, kernel.values, problem)
    )
    best = next(fits, None)
    if best is None:
        why = "no tuned shape is near enough whose kernel may run here"
        if found:
            nearest = min(found, key=lambda each: each[0].octaves)[0]
            why += f"; the nearest is {nearest.nearest.label} ({nearest.octaves:.1f} octaves)"
        return Choice(None, "far", why)
    ours, kernel = best
    one = problem.seqlen_q == 1
    theirs = kind.sdpa[one].predict(problem, nearby, gpu.card) or kind.sdpa[not one].predict(
        problem, nearby, gpu.card
    )
    if theirs is None:  # there are winners, and each has a time of PyTorch's
        raise AssertionError
    gain = theirs.time_us / ours.time_us
    tiles = as_cut(SDPA, problem).query_tiles(64)
    divided = tiles < gpu.key.sm_count and problem.seqlen_k > _MANY_KEYS * problem.seqlen_q
    least = 1 + guard.margin + guard.per_octave * ours.octaves
    few = problem.seqlen_q < FEW_QUERIES
    # Where blocks look up what a cache holds, a full one takes us the longest; PyTorch's own
    # attention always takes as long.
    cached = kernel.values.get("ITEM_KEYS") == 1
    if costs_of(problem).is_guessed or (few and not divided and not cached):
        least += _MORE_MARGIN
    elif divided and not cached:
        least = DIVIDED_GAIN_FEW if few else DIVIDED_GAIN
    why = (
        f"predicted {ours.time_us:.4g} µs from {ours.nearest.label} ({ours.octaves:.1f} octaves)"
        f"{f' and {ours.shapes - 1} more' if ours.shapes > 1 else ''}, "
        f"PyTorch's own {theirs.time_us:.4g} µs"
    )
    if gain < least:
        return Choice(None, "not_faster", f"{why}: we gain too little to be sure", gain)
    return Choice(kernel, "near", why, gain, theirs.time_us)

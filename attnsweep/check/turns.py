"""Two candidates in turns, in one process after the other, until their ratio is known."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from attnsweep.build.launches import Candidate
from attnsweep.check.processes import (
    FEWEST,
    MOST,
    Decision,
    Interval,
    PairedRounds,
    enough,
    together,
)
from attnsweep.check.verdicts import Verdict, at_least, change
from attnsweep.gpu.worker import Gpu, WorkerError
from attnsweep.trial import Status

# Rounds before the first that counts: clocks rise and caches fill.
_WARMUP_ROUNDS = 2
# Calls of the new code that are compared one by one when all is timed: as many as a winner's.
_CONFIRM_US = 200_000.0
RECORD = "record a baseline: attnsweep run SPEC --fresh, then attnsweep accept"


@dataclass(frozen=True, slots=True)
class PairResult:
    """The rounds of one process, or of all; medians in microseconds.

    enough: whether more rounds in this process would tell little; otherwise its time was up.
    """

    interval: Interval | None
    old_us: float
    new_us: float
    spent_s: float
    enough: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on two candidates. shown: all processes together. each: one after the other."""

    verdict: Verdict
    why: str
    shown: PairResult
    each: tuple[PairResult, ...]

    @property
    def processes(self) -> int:
        """The number of processes in which they were compared."""
        return len(self.each)


class Ended(Exception):
    """A comparison that ends without timing: its verdict and the reason."""

    def __init__(self, verdict: Verdict, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


def compare(
    gpu: Gpu,
    another: Callable[[], Gpu],
    old: Candidate,
    new: Candidate,
    *,
    slower: float,
    budget_s: float,
    seed: str,
    watch: Callable[[float], None] | None = None,
) -> Outcome:
    """Time two candidates in turns, in several processes, until their ratio is known.

    gpu: has their problem open. another: returns a new process with the problem open; it is called
    at least once, because the places of code and buffers can make one process slower than the next.
    budget_s: seconds of rounds in one process; all of them together take at most twice as many.
    Raises Ended if one of them does not run, or if repeated calls of the new one differ.
    """
    each: list[PairResult] = []
    left_s = FEWEST * budget_s
    decision = Decision.OPEN
    while decision is Decision.OPEN and len(each) < MOST:
        process = another() if each else gpu
        before = [one.interval for one in each if one.interval is not None]
        limit_s = min(budget_s, left_s)
        each.append(
            _turns(process, old, new, slower, limit_s, f"{seed} {len(each) + 1}", watch, before)
        )
        left_s -= each[-1].spent_s
        known = [*before, *(one for one in [each[-1].interval] if one is not None)]
        if len(known) >= FEWEST:
            decision = together(known).shows(slower)
        if not each[-1].enough:
            break
    with _blamed_on("new"):
        process.confirm("new", _CONFIRM_US)
    shown = PairResult(
        together(known) if known else None,
        statistics.median(one.old_us for one in each),
        statistics.median(one.new_us for one in each),
        sum(one.spent_s for one in each),
        each[-1].enough,
    )
    verdict, why = _verdict(decision, shown, each)
    return Outcome(verdict, why, shown, tuple(each))


def _verdict(
    decision: Decision, shown: PairResult, each: Sequence[PairResult]
) -> tuple[Verdict, str]:
    interval = shown.interval
    if interval is not None and decision is Decision.SLOWER:
        return Verdict.REGRESSION, f"{at_least(interval.low)}, in {len(each)} processes"
    if interval is not None and decision is Decision.FASTER:
        return Verdict.IMPROVEMENT, f"{at_least(interval.high)}, in {len(each)} processes"
    if decision is Decision.SAME:
        return Verdict.PASS, ""
    if not shown.enough:
        reached = f"{_spoken(shown)} after {round(shown.spent_s, 1):g} s"
        return Verdict.INCONCLUSIVE, f"{reached}: raise --budget-s, or use a quieter machine"
    ratios = [one.interval.median for one in each if one.interval is not None]
    apart = f"{change(min(ratios))} to {change(max(ratios))} in {len(each)} processes"
    return Verdict.INCONCLUSIVE, f"{apart}, together {_spoken(shown)}: too close to tell"


def _turns(
    gpu: Gpu,
    old: Candidate,
    new: Candidate,
    slower: float,
    budget_s: float,
    seed: str,
    watch: Callable[[float], None] | None,
    before: Sequence[Interval],
) -> PairResult:
    """Time both in turns, in random order, until it is enough or the time is up.

    before: the intervals of earlier processes.
    """
    rng = random.Random(seed)
    sides = {"old": old, "new": new}
    for side in rng.sample(["old", "new"], 2):
        gpu.forget(side)
        with _blamed_on(side):
            gpu.add(side, sides[side], cold=False)
    for _ in range(_WARMUP_ROUNDS):
        for side in rng.sample(["old", "new"], 2):
            with _blamed_on(side):
                gpu.replay(side, "warm")
    paired = PairedRounds()
    times: dict[str, list[float]] = {"old": [], "new": []}
    known, spent_s, begin = False, 0.0, time.monotonic()
    while not known:
        order = rng.sample(["old", "new"], 2)
        # Both ran alone before, so a failure from here on counts as the new one's.
        with _blamed_on("new"):
            turn = dict(zip(order, gpu.pair(*order), strict=True))
        for side, time_us in turn.items():
            times[side].append(time_us)
        looked = paired.add(turn["old"], turn["new"])
        spent_s = time.monotonic() - begin
        if watch is not None:
            watch(spent_s)
        if not looked and spent_s >= budget_s:
            paired.look()
            looked = True
        if looked and paired.interval is not None:
            known = enough(before, paired.interval, slower)
        if spent_s >= budget_s:
            break
    medians = {side: statistics.median(values) for side, values in times.items()}
    return PairResult(paired.interval, medians["old"], medians["new"], spent_s, known)


@contextmanager
def _blamed_on(side: str) -> Iterator[None]:
    """A failing call in here ends the comparison: new code is wrong, old code cannot run here."""
    try:
        yield
    except WorkerError as error:
        fault = said(error.status, f"while timing: {error.detail}")
        if side == "new":
            raise Ended(Verdict.WRONG, fault) from error
        what = f"the baseline's code does not run here: {fault}; {RECORD}"
        raise Ended(Verdict.INCONCLUSIVE, what) from error


def said(status: Status, detail: str | None) -> str:
    """`compile error: naive.cu(3): error: …`, with the detail's first line only."""
    lines = [line for line in (detail or "").splitlines() if line.strip()]
    return f"{status.value.replace('_', ' ')}: {lines[0] if lines else 'no detail'}"


def _spoken(turns: PairResult) -> str:
    interval = turns.interval
    if interval is None:
        return "too few rounds for an interval"
    return f"{change(interval.low)} to {change(interval.high)} in {interval.rounds} rounds"

"""Two candidates in turns, in one process after the other, until their ratio is known."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.compile.launches import Candidate
from attnsweep.core.trial import Status
from attnsweep.regress.sequential_test import (
    FEWEST,
    MOST,
    Decision,
    PairedRounds,
    RatioInterval,
    enough,
    together,
)
from attnsweep.regress.verdicts import Verdict, at_least, change

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

    interval: RatioInterval | None
    old_us: float
    new_us: float
    spent_s: float
    enough: bool


@dataclass(frozen=True, slots=True)
class AbTestResult:
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


class Series:
    """Times two candidates in turns, in one process after another, until their ratio is decided.

    each: the result of each process. decision: what they show together.
    """

    def __init__(self, old: Candidate, new: Candidate, *, slower: float, seed: str) -> None:
        self._old, self._new, self._slower, self._seed = old, new, slower, seed
        self.each: list[PairResult] = []
        self.decision = Decision.OPEN

    @property
    def over(self) -> bool:
        """Whether it is decided, or as many processes as may be did not decide it."""
        return self.decision is not Decision.OPEN or len(self.each) >= MOST

    @property
    def _known(self) -> list[RatioInterval]:
        return [one.interval for one in self.each if one.interval is not None]

    def take(self, gpu: Gpu, limit_s: float, watch: Callable[[float], None] | None = None) -> None:
        """The rounds of one more process, which has the problem open and has timed none of it.

        limit_s: seconds of rounds. Raises Ended if one of the two does not run.
        """
        seed = f"{self._seed} {len(self.each) + 1}"
        sides = {"old": self._old, "new": self._new}
        self.each.append(_turns(gpu, sides, self._slower, limit_s, seed, watch, self._known))
        known = self._known
        if len(known) >= FEWEST:
            self.decision = together(known).shows(self._slower)

    def confirm(self, gpu: Gpu) -> None:
        """Call the new one again and again, in the last process. Raises Ended if calls differ."""
        with _blamed_on("new"):
            gpu.confirm("new", _CONFIRM_US)

    def outcome(self, ended: str = "") -> AbTestResult:
        """The verdict of at least one process. ended: why there are no more, if it is not over."""
        known, each = self._known, self.each
        shown = PairResult(
            together(known) if known else None,
            statistics.median(one.old_us for one in each),
            statistics.median(one.new_us for one in each),
            sum(one.spent_s for one in each),
            each[-1].enough,
        )
        verdict, why = _verdict(self.decision, shown, each, ended)
        return AbTestResult(verdict, why, shown, tuple(each))


def compare(
    gpu: Gpu,
    another: Callable[[], Gpu],
    old: Candidate,
    new: Candidate,
    *,
    slower: float,
    budget_s: float,
    seed: str,
) -> AbTestResult:
    """Time two candidates in turns, in several processes, until their ratio is known.

    gpu: has their problem open. another: returns a new process with the problem open; it is called
    at least once, because the places of code and buffers can make one process slower than the next.
    budget_s: seconds of rounds in one process; all of them together take at most twice as many.
    Raises Ended if one of them does not run, or if repeated calls of the new one differ.
    """
    series = Series(old, new, slower=slower, seed=seed)
    process, left_s = gpu, FEWEST * budget_s
    series.take(process, budget_s)
    while series.each[-1].enough and not series.over:
        left_s -= series.each[-1].spent_s
        process = another()
        series.take(process, min(budget_s, left_s))
    series.confirm(process)
    return series.outcome()


def _verdict(
    decision: Decision, shown: PairResult, each: Sequence[PairResult], ended: str
) -> tuple[Verdict, str]:
    interval = shown.interval
    if interval is not None and decision is Decision.SLOWER:
        return Verdict.REGRESSION, f"{at_least(interval.low)}, in {len(each)} processes"
    if interval is not None and decision is Decision.FASTER:
        return Verdict.IMPROVEMENT, f"{at_least(interval.high)}, in {len(each)} processes"
    if decision is Decision.SAME:
        return Verdict.PASS, ""
    if ended:
        processes = "1 process" if len(each) == 1 else f"{len(each)} processes"
        return Verdict.INCONCLUSIVE, f"{_spoken(shown)} of {processes} {ended}"
    if len(each) < MOST:
        reached = f"{_spoken(shown)} after {round(shown.spent_s, 1):g} s"
        return Verdict.INCONCLUSIVE, f"{reached}: raise budget_s, or use a quieter machine"
    ratios = [one.interval.median for one in each if one.interval is not None]
    apart = f"{change(min(ratios))} to {change(max(ratios))} in {len(each)} processes"
    return Verdict.INCONCLUSIVE, f"{apart}, together {_spoken(shown)}: too close to tell"


def _turns(
    gpu: Gpu,
    sides: Mapping[str, Candidate],
    slower: float,
    budget_s: float,
    seed: str,
    watch: Callable[[float], None] | None,
    before: Sequence[RatioInterval],
) -> PairResult:
    """Time `old` and `new` in turns, in random order, until it is enough or the time is up.

    before: the intervals of earlier processes.
    """
    rng = random.Random(seed)
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

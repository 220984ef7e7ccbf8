"""Recorded runs as they arrived: when each problem began, each candidate was tried, and each ended.

A row says how many seconds after its problem's beginning it was tried (`tried_s`). No row says when
races and finals ended; `proof.txt` has what each whole run took. What candidates leave of that is
shared by the problems, in proportion to the samples that their rounds took.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnsweep.core.trial import OURS
from attnsweep.store.run import open_run

RESULTS = Path(__file__).parent.parent.parent / "results"
CARDS = ("h100-80gb-hbm3", "h200")
_TOOK = re.compile(r"\$ attnsweep run configs/(\w+)\.yaml --exhaustive\ntook (\d+) s;")


@dataclass
class Arrived:
    """One problem: seconds from its beginning to each candidate, and those of race and finals."""

    tried_s: list[float]
    finals_s: float

    @property
    def took_s(self) -> float:
        return self.tried_s[-1] + self.finals_s


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def took() -> dict[tuple[str, str], int]:
    """Seconds that each recorded run took, by card and spec, of the runs that were kept."""
    found: dict[tuple[str, str], int] = {}
    for card in CARDS:
        text = (RESULTS / card / "proof.txt").read_text()
        text = text.partition("\n# Later that day, on another card")[0]
        found |= {(card, spec): int(seconds) for spec, seconds in _TOOK.findall(text)}
    return found


def arrived(card: str, spec: str, seconds: float, first: float = 1.0) -> list[Arrived]:
    """The problems of a run. first: how many times its share the finals of the first one took."""
    tried: dict[object, list[float]] = {}
    samples: dict[object, float] = {}
    for trial in open_run(RESULTS / card / spec).trials:
        times = tried.setdefault(trial.problem, [])
        if trial.provider == OURS and trial.tried_s is not None:
            times.append(trial.tried_s)
        if (time := trial.time_us) is not None and time.rounds:
            taken = len(time.rounds) + len(time.discarded)
            samples[trial.problem] = samples.get(trial.problem, 0.0) + taken
    samples[next(iter(tried))] *= first
    left = seconds - sum(times[-1] for times in tried.values())
    each = left / sum(samples.values())
    return [Arrived(times, each * samples[problem]) for problem, times in tried.items()]


def told(problems: list[Arrived], clock: Clock) -> Iterator[str]:
    """What happens, in order, each at its time: `opening`, `tried` for each candidate, `finals`."""
    for problem in problems:
        began = clock.now
        yield "opening"
        for seconds in problem.tried_s:
            clock.now = began + seconds
            yield "tried"
        yield "finals"
        clock.now += problem.finals_s

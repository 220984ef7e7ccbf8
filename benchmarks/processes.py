"""Simulate how often `attnsweep check` errs, if every process adds an offset to the ratio.

It needs no GPU. New code takes 1 + slowdown times as long as old code. A round of a process
scatters by NOISE, a process adds an offset that stays the same in all of its rounds. The verdicts
are those of `compare_candidates`, on a stand-in for the GPU; each has 95 % bounds of its share.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from setting import options, write_rows

from attnsweep import Verdict, compare_candidates, proportion_interval

TRIALS, SLOWER = 2000, 0.02
SLOWDOWNS = (0.0, 0.01, 0.02, 0.03, 0.05)
OFFSETS = (0.0, 0.0025, 0.005)
NOISE, TIME_US = 0.002, 20.0


class Card:
    """A GPU whose processes differ: what `compare_candidates` asks of a Worker."""

    def __init__(self, ratio: float, offset: float, seed: str) -> None:
        self._ratio, self._offset = ratio, offset
        self._random = random.Random(seed)
        self.another()

    def another(self) -> Card:
        """Start a new process, with an offset of its own."""
        self._own = self._ratio * math.exp(self._random.gauss(0, self._offset))
        return self

    def pair(self, first: str, second: str) -> tuple[float, ...]:
        """One round: both times, in the order asked for."""
        times = {"old": TIME_US, "new": TIME_US * self._own}
        return tuple(times[n] * self._random.gauss(1, NOISE) for n in (first, second))

    def nothing(self, *_: object, **__: object) -> int:
        """Nothing is loaded, and every call is right."""
        return 0

    replay = confirm = add = forget = nothing


def simulate(slowdown: float, offset: float, trials: int) -> dict[str, Any]:
    """Verdicts of `trials` comparisons, the bounds of their shares, and what they cost."""
    found = []
    for number in range(trials):
        card: Any = Card(1 + slowdown, offset, f"{slowdown} {offset} {number}")
        how = {"slower": SLOWER, "budget_s": 600, "seed": str(number)}
        found.append(compare_candidates(None, None, card, card.another, **how))
    counts = Counter(each.verdict for each in found)
    verdicts = {}
    for verdict in (each for each in Verdict if each is not Verdict.WRONG):
        bounds = [round(p, 5) for p in proportion_interval(counts[verdict], trials)]
        verdicts[verdict.value] = {"count": counts[verdict], "bounds": bounds}
    rounds = (each.shown.interval.rounds if each.shown.interval else 0 for each in found)
    return {
        "slowdown": slowdown,
        "offset": offset,
        "trials": trials,
        "verdicts": verdicts,
        "processes_mean": round(sum(each.processes for each in found) / trials, 2),
        "rounds_mean": round(sum(rounds) / trials),
    }


if __name__ == "__main__":
    rows = (simulate(slower, offset, TRIALS) for slower in SLOWDOWNS for offset in OFFSETS)
    write_rows(options(__doc__).parse_args().file, None, rows, slower=SLOWER, noise=NOISE)

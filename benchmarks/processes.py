"""Simulate how often `attnsweep check` errs, if every process adds an offset to the ratio.

Usage: python benchmarks/processes.py [FILE.json]. It needs no GPU.

New code takes 1 + slowdown times as long as old code. A round of a process scatters by NOISE, a
process adds an offset that stays the same in all of its rounds. The verdicts are those of
`compare_candidates`, on a stand-in for the GPU. It prints a row for every slowdown and offset, with
the 95 % bounds of each share in percent.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from setting import console, options, write

from attnsweep import Verdict, compare_candidates, proportion_interval

TRIALS, SLOWER = 2000, 0.02
SLOWDOWNS = (0.0, 0.01, 0.02, 0.03, 0.05)
OFFSETS = (0.0, 0.0025, 0.005)
NOISE = 0.002
TIME_US = 20.0


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

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """One round: both times, in the order asked for."""
        times = {"old": TIME_US, "new": TIME_US * self._own}
        one, other = (times[n] * self._random.gauss(1, NOISE) for n in (first, second))
        return one, other

    def replay(self, *_: str) -> float:
        """A round that does not count."""
        return TIME_US

    def confirm(self, *_: object) -> int:
        """Every call is right."""
        return 0

    def add(self, name: str, candidate: object, *, cold: bool) -> None:
        """Nothing is loaded."""

    def forget(self, name: str) -> None:
        """Nothing was loaded."""


def simulate(slowdown: float, offset: float, trials: int) -> dict[str, Any]:
    """Verdicts of `trials` comparisons, the bounds of their shares, and what they cost."""
    verdicts: Counter[str] = Counter()
    processes: list[int] = []
    rounds: list[int] = []
    for number in range(trials):
        card: Any = Card(1 + slowdown, offset, f"{slowdown} {offset} {number}")
        found = compare_candidates(None, None, card, card.another, slower=SLOWER, budget_s=600, seed=str(number))
        verdicts[found.verdict.value] += 1
        processes.append(found.processes)
        rounds.append(found.shown.interval.rounds if found.shown.interval else 0)
    return {
        "slowdown": slowdown,
        "offset": offset,
        "trials": trials,
        "verdicts": {
            verdict.value: {
                "count": verdicts[verdict.value],
                "bounds": [round(p, 5) for p in proportion_interval(verdicts[verdict.value], trials)],
            }
            for verdict in Verdict
            if verdict is not Verdict.WRONG
        },
        "processes_mean": round(sum(processes) / trials, 2),
        "rounds_mean": round(sum(rounds) / trials),
    }


if __name__ == "__main__":
    file = options(__doc__).parse_args().file
    shown = ("pass", "regression", "inconclusive")
    console.print(f"| slower by | offset of a process | {' | '.join(shown)} | processes |")
    console.print("|---:|---:|" + "---:|" * (len(shown) + 1))
    rows = []
    for slowdown in SLOWDOWNS:
        for offset in OFFSETS:
            rows.append(row := simulate(slowdown, offset, TRIALS))
            cells = [f"{100 * slowdown:g} %", f"{100 * offset:g} %"]
            for of in map(row["verdicts"].get, shown):
                low, high = (100 * limit for limit in of["bounds"])
                cells.append(f"{100 * of['count'] / TRIALS:.2f} ({low:.2f} to {high:.2f})")
            console.print(f"| {' | '.join(cells)} | {row['processes_mean']:.1f} |")
    write(file, None, {"slower": SLOWER, "noise": NOISE, "rows": rows})

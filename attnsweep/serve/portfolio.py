"""Chooses few configs for many shapes: those with which the shapes lose the least time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.ranking import middle_ratio
from attnsweep.core.errors import SpecError
from attnsweep.core.trial import Trial, race_ratio

OFF = 1.05
"""A shape that takes this many times as long as with its winner is marked."""

# A shape that nothing serves counts as if it took this many times as long: serving one more shape
# is worth more than all that the others could gain.
_UNSERVED = 1e3
# Decides among equal choices alone: recorded times are not as exact. Sums are exact to the second.
_PRICE, _EXACT = 1e-8, 1e-11
# From how many of the next choices exchanges are tried. On 49 shapes of the forward on an H100, 4
# find the least mean that there is, for each number of configs; 1 is up to 0.2 % above it.
_TRIALS = 4


def times_as_long(trial: Trial, winner: Trial, rows: Mapping[str, Trial]) -> float | None:
    """How many times as long a candidate took as the winner, or None if that is not known.

    Known is what was timed in the same rounds: the median ratio of the final rounds, or for a
    candidate that the race put out, the most that its rounds allow. A single time is a rough one,
    by which the search left it alone. rows: of the problem, by their labels.
    """
    own, others = common_rounds(trial, winner)
    if own:
        return middle_ratio(own, others)
    _, most = race_ratio(trial.race)
    better = rows.get(str(trial.race.get("against")))
    if most is None or better is None:
        return None
    own, others = common_rounds(better, winner)
    return float(most) * middle_ratio(own, others) if own else None


@dataclass(frozen=True)
class Portfolio:
    """Configs that were kept for some shapes.

    own: for each shape, the one it gets; None where none serves it, or something else does sooner.
    longer: how many times as long it takes so as with its winner; None if nothing serves it.
    """

    kept: list[str]
    own: list[str | None]
    longer: list[float | None]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The portfolio's size, and how much longer shapes take with it than with their winners."""
        known = [longer for longer in self.longer if longer is not None]
        return {
            "configs": len(self.kept),
            "mean": round(geometric_mean(known), 4) if known else None,
            "worst": round(max(known), 4) if known else None,
            "off": sum(map(_is_off, self.longer)),
            "without": self.own.count(None),
        }


def _is_off(longer: float | None) -> bool:
    return longer is None or round(longer, 4) >= OFF


def of_size(found: Sequence[Portfolio], at_most: int) -> Portfolio:
    """The largest portfolio of at most this many configs. Raises SpecError."""
    if type(at_most) is not int or at_most < 1:
        raise SpecError(f"at most {at_most!r} configs; it is a number from 1 on", where="--at-most")
    return found[min(at_most, len(found)) - 1]


def facts_of(
    found: Sequence[Portfolio], portfolio: Portfolio, names: Sequence[str]
) -> dict[str, Any]:
    """The configs that were kept, what each shape loses, and what other numbers of configs lose.

    names: of the shapes.
    """
    return {
        "kept": portfolio.kept,
        "shapes": [
            {
                "problem": name,
                "config": own,
                "times_as_long": longer and round(longer, 4),
                "off": _is_off(longer),
            }
            for name, own, longer in zip(names, portfolio.own, portfolio.longer, strict=True)
        ],
        "curve": [each.facts for each in found],
    }


def lines_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines that print a portfolio: how much longer each shape takes, and other sizes' cost."""
    yield f"times as long as with its winner ({OFF - 1:.0%} off or more: *)"
    for shape in facts["shapes"]:
        longer = "–" if shape["times_as_long"] is None else f"{shape['times_as_long']:.3f}"
        rest = "" if shape["config"] else ", without a config"
        yield f"{longer:>6} {'*' if shape['off'] else ' '} {shape['problem']}{rest}"
    yield "configs   mean  worst   *  without"
    for row in facts["curve"]:
        mean, worst = (f"{row[name]:.3f}" if row[name] else "–" for name in ("mean", "worst"))
        yield f"{row['configs']:>7} {mean:>6} {worst:>6} {row['off']:>3}  {row['without']:>7}"


def portfolios(
    shapes: Sequence[Mapping[str, float]], otherwise: Sequence[float | None] = ()
) -> list[Portfolio]:
    """The best portfolio of one config, of two, and so on, up to that with which no shape loses.

    shapes: for each, how many times as long as its winner the configs take that may serve it.
    otherwise: how many times as long it takes without any; by default, nothing else serves it.

    The best serves the most shapes, and of those that do, has the least geometric mean; of equal
    ones it has configs that win on more shapes. Configs are added one by one and then taken away
    one by one, each time exchanged as long as that helps.
    """
    wins: dict[str, int] = {}
    for shape in shapes:
        for key, longer in shape.items():
            wins[key] = wins.get(key, 0) + (longer <= 1)
    keys = sorted(wins, key=lambda key: (-wins[key], key))
    places = {key: at for at, key in enumerate(keys)}
    spare = [*otherwise] or [None] * len(shapes)
    costs = np.empty((len(keys) + 1, len(shapes)))
    for at, shape in enumerate(shapes):
        costs[-1, at] = math.log(spare[at] or _UNSERVED)
        costs[:-1, at] = costs[-1, at] + 1  # never taken
        for key, longer in shape.items():
            costs[places[key], at] = math.log(longer)
    search = _Search(costs)
    found = search.of_each_size()

    def portfolio(kept: list[int]) -> Portfolio:
        rows = [*sorted(kept), len(keys)]
        fastest = [rows[at] for at in costs[rows].argmin(axis=0)]
        own = [keys[row] if row < len(keys) else None for row in fastest]
        longer = [
            None if key is None and other is None else math.exp(costs[row, at])
            for at, (row, key, other) in enumerate(zip(fastest, own, spare, strict=True))
        ]
        return Portfolio([keys[row] for row in rows[:-1]], own, longer)

    return [portfolio(kept) for kept in found]


class _Search:
    """Rows to keep of costs, whose last row is of what is there anyway."""

    def __init__(self, costs: NDArray[np.float64]) -> None:
        self._costs, self._anyway = costs[:-1], costs[-1:]
        self._prices = np.linspace(0, _PRICE, len(costs) - 1)

    def of_each_size(self) -> list[list[int]]:
        """The best rows of each number from 1 on, the last with all columns at their least."""
        least = np.vstack([self._costs, self._anyway]).min(axis=0).sum()
        found = [list[int]()]
        while self._total(found[-1]) > least + len(found[-1]) * _PRICE + _EXACT:
            more = np.minimum(self._costs, self._own(found[-1]).min(axis=0)).sum(axis=1)
            order = np.argsort(more + self._prices)[:_TRIALS]
            found.append(self._best([[*found[-1], int(row)] for row in order]))
        for size in range(len(found) - 2, 0, -1):
            larger = found[size + 1]
            less = [larger[:at] + larger[at + 1 :] for at in range(len(larger))]
            fewer = self._best(sorted(less, key=self._total)[:_TRIALS])
            found[size] = min(found[size], fewer, key=self._total)
        return found[1:]

    def _own(self, kept: list[int]) -> NDArray[np.float64]:
        return np.vstack([self._costs[kept], self._anyway])

    def _total(self, kept: list[int]) -> float:
        return float(self._own(kept).min(axis=0).sum() + self._prices[kept].sum())

    def _best(self, every: list[list[int]]) -> list[int]:
        return min(map(self._exchanged, every), key=self._total)

    def _exchanged(self, kept: list[int]) -> list[int]:
        """The rows after every exchange of one for another that lowers the total."""
        kept, total = [*kept], self._total(kept)
        while True:
            own = self._own(kept)
            order = np.argsort(own, axis=0, kind="stable")
            first, second = np.take_along_axis(own, order[:2], axis=0)
            with_both = np.minimum(self._costs, first)
            alone = (np.minimum(self._costs, second) - with_both) @ (
                order[0][:, None] == np.arange(len(kept))
            )
            totals = with_both.sum(axis=1)[:, None] + alone + self._prices[:, None]
            totals += self._prices[kept].sum() - self._prices[kept]
            new, old = np.unravel_index(int(totals.argmin()), totals.shape)
            if totals[new, old] >= total - _EXACT:
                return kept
            kept[old], total = int(new), float(totals[new, old])

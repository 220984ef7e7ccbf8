"""Two recorded runs side by side: the same problems, their winners, and what changed around them.

Needs no GPU. Times are microseconds of one call. Nothing here is a verdict on a regression: times
of two cards differ for many reasons, so only ratios to baselines of the same rounds are comparable;
`attnsweep check` judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from attnsweep.choose.columns import named
from attnsweep.core.errors import SpecError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment
from attnsweep.family.chunks import row_of_today
from attnsweep.family.family import Family
from attnsweep.reports.terminal import aligned, counted, wrap
from attnsweep.reports.text import Row, Section, by_problem, figure
from attnsweep.store.run import Run

# What of an environment is told if it differs, in this order.
_FACTS = (
    *("gpu", "uuid", "driver", "cuda", "nvrtc", "attnsweep", "protocol", "power_limit_w", "host"),
    "date",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One run's part of a problem. winner: its best of ours. baselines: name to time_us of those
    that compute in the problem's format."""

    winner: Row
    baselines: Mapping[str, float]
    of_the_others: float | None
    """How many times as long as the winner the other run's winner takes here; None if it has no
    ranked row."""
    tied: bool
    """Whether the other run's winner shares the best rank here."""

    @property
    def us(self) -> float:
        """Median of the winner."""
        return float(self.winner["time_us"])


@dataclass(frozen=True, slots=True)
class Pair:
    """One problem in both runs."""

    problem: Problem
    first: Side
    second: Side

    @property
    def same_winner(self) -> bool:
        """Whether both runs chose the same config of the same family."""
        return _key(self.first.winner) == _key(self.second.winner)

    @property
    def agree(self) -> bool:
        """Whether the winners are the same, or each is in the other's tie for the first place."""
        return self.same_winner or (self.first.tied and self.second.tied)

    @property
    def over_baselines(self) -> dict[str, tuple[float, float]]:
        """Baseline to its time over the winner's, in the first run and in the second."""
        shared = [name for name in self.first.baselines if name in self.second.baselines]
        return {
            name: (
                self.first.baselines[name] / self.first.us,
                self.second.baselines[name] / self.second.us,
            )
            for name in shared
        }

    def to_json(self) -> dict[str, Any]:
        """The pair as plain data."""

        def side(one: Side) -> dict[str, Any]:
            trial = one.winner["trial"]
            return {
                "kernel": trial.kernel,
                "config": dict(trial.config),
                "time_us": one.us,
                "baselines_us": dict(one.baselines),
                "others_winner_ratio": one.of_the_others,
                "others_winner_tied": one.tied,
            }

        return {
            "problem": self.problem.label,
            "same_winner": self.same_winner,
            "agree": self.agree,
            "first": side(self.first),
            "second": side(self.second),
            "over_baselines": {name: list(both) for name, both in self.over_baselines.items()},
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs. only: labels of problems that one run alone has timed, by run."""

    first: Run
    second: Run
    pairs: tuple[Pair, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Fact of the environments to its value in each run, where they differ."""
        one, other = _facts(self.first.environment), _facts(self.second.environment)
        names = [name for name in (*_FACTS, *one, *other) if one.get(name) != other.get(name)]
        return {name: (one.get(name), other.get(name)) for name in dict.fromkeys(names)}

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "first": str(self.first.directory),
            "second": str(self.second.directory),
            "differences": {name: list(both) for name, both in self.differences.items()},
            "problems": [pair.to_json() for pair in self.pairs],
            "only_first": list(self.only[0]),
            "only_second": list(self.only[1]),
        }


def compare(first: Run, second: Run, families: Mapping[str, Family] | None = None) -> Comparison:
    """Set two runs side by side. Raises SpecError if no problem was timed in both.

    families: what says how configs recorded before a parameter read today; see Param.absent.
    """
    one, other = _sections(first, families or {}), _sections(second, families or {})
    shared = [problem for problem in one if problem in other]
    if not shared:
        raise SpecError(
            "the runs have no timed problem in common",
            where=f"{first.directory}, {second.directory}",
            hint=f"the first has {_some(one)}; the second has {_some(other)}",
        )
    pairs = tuple(
        Pair(p, _side(one[p], other[p].winner), _side(other[p], one[p].winner)) for p in shared
    )
    only = tuple(
        tuple(problem.label for problem in mine if problem not in shared) for mine in (one, other)
    )
    return Comparison(first, second, pairs, (only[0], only[1]))


def _sections(run: Run, families: Mapping[str, Family]) -> dict[Problem, Section]:
    """The problems that have a winner."""
    trials = [row_of_today(families, trial) for trial in run.trials]
    sections = by_problem(trials, run.environment, run.spaces)
    return {each.problem: each for each in sections if each.winner is not None}


def _side(section: Section, others: Row | None) -> Side:
    winner = section.winner
    assert winner is not None
    assert others is not None
    there = next(
        (row for row in section.rows if row["rank"] and _key(row) == _key(others)),
        None,
    )
    baselines = {
        str(row["provider"]): float(row["time_us"])
        for row in section.rows
        if row["baseline"] and row["rank"]
    }
    return Side(
        winner,
        baselines,
        None if there is None else float(there["time_us"]) / float(winner["time_us"]),
        there is not None and there["rank"] == winner["rank"],
    )


def _key(row: Row) -> tuple[object, ...]:
    trial = row["trial"]
    return (trial.kernel, *sorted(trial.config.items()))


def _some(sections: Mapping[Problem, Section]) -> str:
    labels = [problem.label for problem in sections]
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return (", ".join(labels[:3]) + more) or "none"


def _facts(environment: Environment | None) -> dict[str, Any]:
    if environment is None:
        return {}
    facts = {name: getattr(environment, name) for name in _FACTS}
    facts["date"] = environment.date[:10]
    return facts | dict(environment.packages)


def config_changes(pair: Pair) -> Sequence[str]:
    """`BLOCK_N 64 → 128`: parameters in which the second winner differs from the first."""
    one, other = pair.first.winner["trial"], pair.second.winner["trial"]
    if one.kernel != other.kernel:
        return [f"{one.kernel} → {other.kernel} {named(other.config)}"]
    names = dict.fromkeys((*one.config, *other.config))
    return [
        f"{name} {one.config.get(name, '–')} → {other.config.get(name, '–')}"
        for name in names
        if one.config.get(name) != other.config.get(name)
    ]


LEGEND = (
    "first, second: µs of each run's best candidate · second/first: above 1, the second run is "
    "slower; on two cards that is the card as much as the kernel · × baseline: time of the fastest "
    "baseline of both runs over the best candidate's, in each run · winner: same, tied (each "
    "is in the other's tie for the first place), or how much slower the first run's winner is in "
    "the second run, and the second's in the first (– if not ranked there)"
)


def lines(found: Comparison, width: int) -> list[Text]:
    """The comparison, no line wider than `width` unless names need it."""
    out: list[Text] = []

    def say(text: str, style: str = "") -> None:
        out.extend(Text(line, style) for line in wrap(text, width))

    say(f"first:  {found.first.directory}")
    say(f"second: {found.second.directory}")
    for name, (one, other) in found.differences.items():
        say(f"{name}: {_fact(one)} → {_fact(other)}", "dim")
    out.append(Text())
    header = ["problem", "first", "second", "second/first", "× baseline", "baseline", "winner"]
    rows = [_row(pair) for pair in found.pairs]
    table = aligned([header, *rows], "lrrrrll", width, shrink=(0, 5, 6))
    out += [Text(line, "" if number else "bold") for number, line in enumerate(table)]
    changed = [pair for pair in found.pairs if not pair.same_winner]
    if changed:
        out.append(Text())
    for pair in changed:
        say(f"{pair.problem.label}: {', '.join(config_changes(pair))}")
    out.append(Text())
    say(verdict(found), "bold")
    for labels, which in zip(found.only, ("first", "second"), strict=True):
        if labels:
            say(f"only in the {which} run: {', '.join(labels)}", "dim")
    say(LEGEND, "dim")
    return out


def verdict(found: Comparison) -> str:
    """`4 problems: the winners agree on 3; the second run's times are 1.02 times the first's …`."""
    pairs = found.pairs
    agree = sum(pair.agree for pair in pairs)
    ratios = [pair.second.us / pair.first.us for pair in pairs]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    said = f"{counted(len(pairs), 'problem')}: the winners agree on {agree}"
    if agree < len(pairs):
        lost = [side.of_the_others for pair in pairs for side in (pair.first, pair.second)]
        known = [ratio for ratio in lost if ratio is not None]
        if known:
            said += f" (elsewhere, the other's winner costs up to {100 * (max(known) - 1):.1f} %)"
    return (
        f"{said}; the second run's times are {mean:.3f} times the first's in the geometric mean"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def _row(pair: Pair) -> list[str]:
    baselines = pair.over_baselines
    name = min(baselines, key=lambda baseline: pair.first.baselines[baseline], default=None)
    both = "–" if name is None else f"{baselines[name][0]:.2f} → {baselines[name][1]:.2f}"
    return [
        pair.problem.label,
        figure(pair.first.us, 4),
        figure(pair.second.us, 4),
        f"{pair.second.us / pair.first.us:.3f}",
        both,
        name or "–",
        "same" if pair.same_winner else "tied" if pair.agree else _lost(pair),
    ]


def _lost(pair: Pair) -> str:
    def share(side: Side) -> str:
        ratio = side.of_the_others
        return "–" if ratio is None else f"{100 * (ratio - 1):+.1f} %"

    return f"{share(pair.second)}, {share(pair.first)}"


def _fact(value: object) -> str:
    return "unknown" if value is None else str(value)

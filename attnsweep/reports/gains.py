"""What a program gains from the winners: the calls of each problem × (fastest baseline − winner).

A run has this if its spec says how often a program makes its calls. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from attnsweep.choose.baseline_ratio import fastest_round
from attnsweep.core.problem import FACTS, Problem
from attnsweep.core.trial import Status
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import Section, figure, who

NONE = "–"


@dataclass(frozen=True)
class Gain:
    """The gain of one problem. A time is None where it is unknown, and the gain is then 0.

    baseline_us, winner_us: of one call. gain_us: of all calls, never below 0, because the baseline
    stays where it is as fast. why: why the gain is 0, or is only a lower bound, or None.
    """

    label: str
    calls: int
    baseline: str | None
    baseline_us: float | None
    winner: str | None
    winner_us: float | None
    gain_us: float
    why: str | None


@dataclass(frozen=True)
class Gains:
    """The gain of a whole program. unserved: its calls that are no problem, as in the spec."""

    problems: Sequence[Gain]
    unserved: Sequence[dict[str, Any]]

    @property
    def calls(self) -> int:
        """Calls of the problems whose baseline's time is known."""
        return sum(each.calls for each in self.problems if each.baseline_us is not None)

    @property
    def baseline_us(self) -> float:
        """Time of these calls with the fastest baselines."""
        return sum(
            each.calls * each.baseline_us for each in self.problems if each.baseline_us is not None
        )

    @property
    def gain_us(self) -> float:
        """Time that the winners save."""
        return sum(each.gain_us for each in self.problems)

    @property
    def others(self) -> int:
        """Calls without a problem, or without a baseline's time."""
        unknown = sum(each.calls for each in self.problems if each.baseline_us is None)
        return unknown + sum(int(each["calls"]) for each in self.unserved)


def gains(sections: Sequence[Section], spec_text: str | None) -> Gains | None:
    """The gains of a run with this resolved spec; None if the spec has no calls."""
    calls, unserved = _calls_of(spec_text)
    known = {section.problem: section for section in sections}
    each = [_gain(problem, count, known.get(problem)) for problem, count in calls.items()]
    return Gains(each, unserved) if each else None


def _calls_of(spec_text: str | None) -> tuple[dict[Problem, int], list[dict[str, Any]]]:
    """Calls by problem, and the unserved ones; empty if the spec cannot be read."""
    try:
        data = yaml.safe_load(spec_text or "")
        entries = [dict(entry) for entry in data["problems"]]
        calls = {
            Problem.of({name: entry[name] for name in entry.keys() & FACTS}): int(entry["calls"])
            for entry in entries
            if "calls" in entry
        }
        unserved = [
            {"call": str(u["call"]), "calls": int(u["calls"]), "reason": str(u["reason"])}
            for u in data.get("unserved") or ()
        ]
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError):
        return {}, []
    return calls, unserved


def _gain(problem: Problem, calls: int, section: Section | None) -> Gain:
    won = None if section is None else section.winner
    best = None if section is None else section.best_baseline
    row: Mapping[str, Any] = won or {}
    baseline_us = None
    if best is not None:
        # A noisy baseline counts with its fastest round, as × base does.
        noisy = best["status"] == Status.NOISY
        baseline_us = fastest_round(best["trial"]) if noisy else best["time_us"]
    winner_us = row.get("time_us")
    gain, why = 0.0, None
    low, high = row.get("ratio_low"), row.get("ratio_high")
    if section is None:
        why = "not measured"
    elif baseline_us is None:
        why = "no baseline was timed"
    elif winner_us is None:
        why = "no candidate is ok"
    elif winner_us >= baseline_us:
        why = "the baseline is as fast, and stays"
    elif low is not None and high is not None and low <= 1 <= high:
        why = "no difference was shown"
    else:
        gain = calls * (baseline_us - winner_us)
        why = {
            "bound": "at least: the baseline was noisy",
            "medians": "not in the same rounds",
        }.get(row.get("ratio_of") or "")
    return Gain(
        problem.label,
        calls,
        who(best) if best is not None else None,
        baseline_us,
        who(won) if won is not None else None,
        winner_us,
        gain,
        why,
    )


# -- how it is shown ------------------------------------------------------------------------

ALIGN = "lrrrrll"
SHRINK = (6, 5, 0)
"""Columns of a table that may be cut, in this order."""


def table(found: Gains) -> list[list[str]]:
    """Header and cells: a line for each problem, the largest gain first, and the total."""
    lines = [["problem", "calls", "baseline µs", "ours µs", "gain ms", "baseline", "note"]]
    for each in sorted(found.problems, key=lambda each: (-each.gain_us, each.label)):
        lines.append(
            [
                each.label,
                f"{each.calls:,}",
                NONE if each.baseline_us is None else figure(each.baseline_us, 4),
                NONE if each.winner_us is None else figure(each.winner_us, 4),
                _ms(each.gain_us),
                each.baseline or NONE,
                each.why or "",
            ]
        )
    total = sum(each.calls for each in found.problems)
    return [*lines, ["in all", f"{total:,}", "", "", _ms(found.gain_us), "", ""]]


def sentences(found: Gains) -> list[str]:
    """The total, then the calls that it does not hold."""
    baseline_ms, ours_ms = found.baseline_us / 1e3, (found.baseline_us - found.gain_us) / 1e3
    share = found.gain_us / found.baseline_us if found.baseline_us else 0.0
    plural = "s" * (found.calls != 1)
    out = [
        f"The program's {found.calls:,} call{plural} take {figure(baseline_ms, 4)}{GLUE}ms with "
        f"the fastest baselines and {figure(ours_ms, 4)}{GLUE}ms where a winner replaces a slower "
        f"baseline: {_ms(found.gain_us)}{GLUE}ms less ({100 * share:.1f}{GLUE}%)."
    ]
    if found.others or found.unserved:
        out.append(
            f"Not in this: {found.others:,} calls that nothing serves, or that have no time."
        )
    out += [
        f"  {each['calls'] or '?'} × {each['call']}: {each['reason']}" for each in found.unserved
    ]
    return out


def to_json(found: Gains) -> dict[str, Any]:
    """As plain data; times in microseconds."""
    return {
        "problems": [asdict(each) for each in found.problems],
        "calls": found.calls,
        "baseline_us": found.baseline_us,
        "gain_us": found.gain_us,
        "unserved_calls": found.others,
        "unserved": list(found.unserved),
    }


def _ms(us: float) -> str:
    return figure(us / 1e3, 3) if us else "0"

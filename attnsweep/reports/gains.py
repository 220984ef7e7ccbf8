"""A program's gain from the winners: calls of each problem × (fastest baseline − winner).

A run has this if its spec says how often a program makes its calls. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnsweep.choose.baseline_ratio import fastest_round
from attnsweep.core.errors import ProblemError
from attnsweep.core.problem import FACTS, Problem
from attnsweep.core.trial import Status
from attnsweep.reports.sections import Section
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import figure, who
from attnsweep.specs.yaml_file import recorded

NONE = "–"


def gains(sections: Sequence[Section], spec_text: str | None) -> dict[str, Any] | None:
    """The gains of a run with this resolved spec, as plain data; None if the spec has no calls.

    problems: see `_gain`. calls, baseline_us: of the problems whose baseline's time is known.
    unserved: calls that are no problem, as in the spec. unserved_calls: those, and the calls of the
    problems without a baseline's time.
    """
    calls, unserved = _calls_of(spec_text)
    if not calls:
        return None
    known = {section.problem: section for section in sections}
    each = [_gain(problem, count, known.get(problem)) for problem, count in calls.items()]
    timed = [one for one in each if one["baseline_us"] is not None]
    served = sum(one["calls"] for one in timed)
    whole = sum(one["calls"] for one in (*each, *unserved))
    return {
        "problems": each,
        "calls": served,
        "baseline_us": sum(one["calls"] * one["baseline_us"] for one in timed),
        "gain_us": sum(one["gain_us"] for one in each),
        "unserved_calls": whole - served,
        "unserved": unserved,
    }


def _calls_of(spec_text: str | None) -> tuple[dict[Problem, int], list[dict[str, Any]]]:
    """Calls by problem, and the unserved ones; empty if the spec cannot be read."""
    try:
        data = recorded(spec_text)
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
    except (ProblemError, TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return {}, []
    return calls, unserved


def _gain(problem: Problem, calls: int, section: Section | None) -> dict[str, Any]:
    """The gain of one problem. A time is None where it is unknown, and the gain is then 0.

    baseline_us, winner_us: of one call. gain_us: of all calls, never below 0, because the baseline
    stays where it is as fast. why: why the gain is 0, or is only a lower bound, or None.
    """
    won, best = (section.winner, section.best_baseline) if section else (None, None)
    lost = section.lost if section else None
    row: Mapping[str, Any] = won or {}
    baseline_us = None
    if best is not None and lost is None:
        # A noisy baseline counts with its fastest round, as × base does.
        noisy = best["status"] == Status.NOISY
        baseline_us = fastest_round(best.facts) if noisy else best["time_us"]
    winner_us = row.get("time_us")
    gain, why = 0.0, None
    low, high = row.get("ratio_low"), row.get("ratio_high")
    if section is None:
        why = "not measured"
    elif baseline_us is None:
        why = lost or "no baseline was timed"
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
    return {
        "label": problem.label,
        "calls": calls,
        "baseline": who(best) if best and lost is None else None,
        "baseline_us": baseline_us,
        "winner": won and who(won),
        "winner_us": winner_us,
        "gain_us": gain,
        "why": why,
    }


# -- how it is shown ------------------------------------------------------------------------

ALIGN = "lrrrrll"
SHRINK = (6, 5, 0)
"""Columns of a table that may be cut, in this order."""


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Header and cells: a line for each problem, the largest gain first, and the total."""
    lines = [["problem", "calls", "baseline µs", "ours µs", "gain ms", "baseline", "note"]]
    each = sorted(found["problems"], key=lambda one: (-one["gain_us"], one["label"]))
    for one in each:
        times = (one["baseline_us"], one["winner_us"])
        us = [NONE if time is None else figure(time, 4) for time in times]
        name, why = one["baseline"] or NONE, one["why"] or ""
        lines.append([one["label"], f"{one['calls']:,}", *us, _ms(one["gain_us"]), name, why])
    total = sum(one["calls"] for one in each)
    return [*lines, ["in all", f"{total:,}", "", "", _ms(found["gain_us"]), "", ""]]


def sentences(found: Mapping[str, Any]) -> list[str]:
    """The total, then the calls that it does not hold."""
    whole_us, gain_us, calls = found["baseline_us"], found["gain_us"], found["calls"]
    share = gain_us / whole_us if whole_us else 0.0
    out = [
        f"The program's {calls:,} call{'s' * (calls != 1)} take {figure(whole_us / 1e3, 4)}{GLUE}ms"
        f" with the fastest baselines and {figure((whole_us - gain_us) / 1e3, 4)}{GLUE}ms where a "
        f"winner replaces a slower baseline: {_ms(gain_us)}{GLUE}ms less "
        f"({100 * share:.1f}{GLUE}%)."
    ]
    others, unserved = found["unserved_calls"], found["unserved"]
    if others or unserved:
        out.append(f"Not in this: {others:,} calls that nothing serves, or that have no time.")
    return out + [f"  {u['calls'] or '?'} × {u['call']}: {u['reason']}" for u in unserved]


def _ms(us: float) -> str:
    return figure(us / 1e3, 3) if us else "0"

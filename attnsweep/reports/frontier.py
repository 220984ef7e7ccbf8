"""Time against error of one problem's candidates: the sentences, and the points of a page's plot.

Only of a problem in FP8, or under a spec's max_error: in other formats right candidates hardly
differ in accuracy.
"""

from __future__ import annotations

from typing import Any

from attnsweep.choose.columns import frontier, named
from attnsweep.core.trial import Accuracy, Status
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import Row, Section, apart, figure, who

# Most candidates named on the frontier.
_MOST = 8


def frontier_lines(section: Section) -> list[str]:
    """What the format costs, what max_error left out, and the candidates that none surpasses."""
    if not _matters(section):
        return []
    return [*_of_format(section), *_left_out(section), *_best(section)]


def frontier_points(section: Section) -> list[dict[str, Any]]:
    """Right candidates and baselines with a time and an error; `on` if on the frontier."""
    if not _matters(section):
        return []
    best = {trial.key for trial in frontier([row["trial"] for row in section.rows])}
    return [
        {
            "who": who(row),
            "kind": "baseline" if row["baseline"] else "kernel" if row["rank"] else "inaccurate",
            "us": float(f"{row['time_us']:.5g}"),
            "error": float(f"{accuracy.error:.4g}"),
            "on": row["trial"].key in best,
            "config": row["config"],
        }
        for row in section.rows
        if row["status"] in (Status.OK, Status.INACCURATE) and row["time_us"] is not None
        if (accuracy := row["trial"].accuracy) is not None and accuracy.error is not None
    ]


def max_error_of(section: Section) -> float | None:
    """The max_error that the problem's candidates were held to, or None."""
    asked = [row["trial"].accuracy for row in section.candidates]
    return next((a.max_error for a in asked if a is not None and a.max_error is not None), None)


def _matters(section: Section) -> bool:
    return section.problem.scaled or max_error_of(section) is not None


def _of_format(section: Section) -> list[str]:
    row = section.winner or next((row for row in section.rows if row["rank"]), None)
    accuracy: Accuracy | None = row["trial"].accuracy if row else None
    if row is None or accuracy is None or accuracy.format_err is None or accuracy.error is None:
        return []
    line = (
        f"errors, of the worst row: the format costs {accuracy.format_err:.1e}, {who(row)} adds "
        f"{accuracy.error:.1e}"
    )
    if accuracy.total_err is not None:
        line += f"; against the inputs before rounding it errs by {accuracy.total_err:.1e}"
    return [line]


def _left_out(section: Section) -> list[str]:
    asked = max_error_of(section)
    if asked is None:
        return []
    out = sum(row["status"] == Status.INACCURATE for row in section.rows)
    over = [
        f"{who(row)} ({row['trial'].accuracy.error:.1e})"
        for row in section.rows
        if row["baseline"] and row["status"] == Status.OK and _error(row) > asked
    ]
    line = f"max_error {asked:.1e}: candidates with a larger error are not ranked ({out} are not)"
    return [line + (f"; baselines with a larger one: {', '.join(over)}" if over else "")]


def _error(row: Row) -> float:
    accuracy: Accuracy | None = row["trial"].accuracy
    return 0.0 if accuracy is None or accuracy.error is None else accuracy.error


def _best(section: Section) -> list[str]:
    by_key = {row["trial"].key: row for row in section.rows}
    rows = [by_key[t.key] for t in frontier([row["trial"] for row in section.rows])]
    if len(rows) < 2:
        return []
    shown = rows[:_MOST]
    more = f" (the fastest {_MOST} of {len(rows)})" if len(rows) > _MOST else ""
    lines = [f"none is both faster and more accurate{more}; ~ not timed in the rounds:"]
    for row in shown:
        config = row["trial"].config
        own = {name: config[name] for name in section.differing.get(row["kernel"], ())}
        us = f"{'~' * apart(row)}{figure(row['time_us'], 4)}"
        mark = "" if row["rank"] else ", over max_error"
        said = f"  {us}{GLUE}µs, error {_error(row):.1e}{mark}: {who(row)} {named(own)}"
        lines.append(said.rstrip())
    return lines

"""What stands below a problem's table: its winner, and what the table leaves out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from attnsweep.core.length import shorter_of
from attnsweep.core.trial import Status
from attnsweep.reports.frontier import frontier_lines
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import (
    Row,
    Section,
    absent_baselines,
    baseline_lines,
    failures,
    first_line,
    recorded_lines,
    served_lines,
    tie_line,
    winner_lines,
)

_NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?(?!\w)")
_LAST_NUMBER = re.compile(r"\s*#(\s*(bytes|[KMG]iB))?(\s*of)?$")


def notes(
    section: Section, shown: Sequence[Row], more: str, legend: Sequence[str] = ()
) -> list[tuple[str, str, list[str] | None]]:
    """Lines with their styles, those of the winner first. legend: of the table's configs.

    more: where all candidates are. A cause of failures has the compiler's errors with it.
    """
    winner = "bold" if section.winner else "bold red"
    lines: list[tuple[str | None, str]] = [
        *((line, winner) for line in winner_lines(section)),
        (tie_line(section, shown), ""),
        *((line, "dim") for line in legend),
        *((line, "") for line in frontier_lines(section)),
        (rest_line(section, shown, more), ""),
        *((line, "yellow") for line in served_lines(section)),
        *((line, "") for line in searched_lines(section)),
        (judged_line(section.candidates), ""),
    ]
    after = [
        *((line, "") for line in baseline_lines(section)),
        *((line, "dim") for line in [*absent_baselines(section), *recorded_lines(section)]),
    ]
    return [
        *((line, style, None) for line, style in lines if line),
        *((line, "yellow", errors) for line, errors in failures(section)),
        *((line, style, None) for line, style in after),
    ]


def _short_reasons(details: Iterable[str | None]) -> Counter[str]:
    """The part of each detail that rows of one cause share, and the number of such rows.

    `spills` of `spills 24 bytes, the spec allows 0`. A figure that does not end the part is a range
    over these rows: `takes at least 31.2–55 us by its stages`.
    """
    groups: dict[str, list[list[str]]] = {}
    for detail in details:
        part = re.split(r"[,:;(]| as ", first_line(detail))[0].strip()
        key = _LAST_NUMBER.sub("", _NUMBER.sub("#", part))
        groups.setdefault(key, []).append(_NUMBER.findall(part))
    said: Counter[str] = Counter()
    for key, figures in groups.items():
        text = key
        for column in range(key.count("#")):
            values = sorted((row[column] for row in figures), key=float)
            span = "–".join(dict.fromkeys([values[0], values[-1]]))
            text = text.replace("#", span, 1)
        said[text] += len(figures)
    return said


def rest_line(section: Section, shown: Sequence[Row], more: str) -> str | None:
    """The number of candidates that are not shown, by status."""
    visible = {id(row) for row in shown}
    rest = [row for row in section.candidates if id(row) not in visible]
    if not rest:
        return None
    counted = []
    for fate, count in Counter(map(_fate, rest)).items():
        words = f"{count}{GLUE}{fate.replace('_', ' ')}"
        if fate == Status.PRUNED:
            why = _short_reasons(row["detail"] for row in rest if _fate(row) == fate)
            named_ones = [f"{reason} {n}" for reason, n in why.most_common(3) if reason]
            named_ones += ["…"] if len(why) > 3 else []
            words += f" ({', '.join(named_ones)})" if named_ones else ""
        counted.append(words)
    if any(not row["baseline"] for row in shown):
        if {row["status"] for row in rest} == {Status.OK}:
            counted = [f"{len(rest)}{GLUE}more{GLUE}ok"]
        elif len(counted) > 1:
            counted[0] = f"{len(rest)}{GLUE}more: {counted[0]}"
    return f"{', '.join(counted)}; {more}"


def _fate(row: Row) -> str:
    """The status of a row, or why a candidate of a long problem is not tried on it."""
    label = shorter_of(row["detail"]) if row["status"] == Status.PRUNED else None
    return str(row["status"]) if label is None else f"not tried: slower on {label}"


def searched_lines(section: Section) -> list[str]:
    """For each family that was searched in part: how many of its candidates were tried, and why."""
    tried = Counter(row["kernel"] for row in section.candidates)
    out = []
    for facts in section.spaces:
        kernel, there, why = facts.get("kernel"), facts.get("candidates"), facts.get("ended")
        if isinstance(there, int) and 0 < tried[kernel] < there:
            left = f"{kernel}: {tried[kernel]} of {there} candidates tried, {there - tried[kernel]}"
            out.append(f"{left} left out" + (f": {why}" if isinstance(why, str) else ""))
    return out


def judged_line(rows: Sequence[Row]) -> str | None:
    """How much of the outputs of these rows float64 judged, if that is not all."""
    found = [row["trial"].accuracy for row in rows if row["time_us"] and not row["baseline"]]
    shares = sorted(a.judged for a in found if a is not None and a.judged is not None)
    if not shares:
        return None
    span = "–".join(dict.fromkeys(f"{100 * share:.2g}" for share in (shares[0], shares[-1])))
    return (
        f"float64 judged {span}{GLUE}% of the rows of every head; of the others it is only known "
        "that they are numbers, the same in all calls"
    )

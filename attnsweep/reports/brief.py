"""A run in at most a screen: its best rows, or a line of each problem, and the answer last.

`tables.print_run` prints all that is known of it: see `--full`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from attnsweep.choose.columns import named
from attnsweep.core.trial import Environment, Trial
from attnsweep.reports import cards, tables
from attnsweep.reports.gains import gains, sentences
from attnsweep.reports.terminal import aligned, counted, cut, wrap
from attnsweep.reports.text import (
    FAILED,
    Row,
    Section,
    absent_baselines,
    baseline_lines,
    by_problem,
    failures,
    faster_baseline,
    heading,
    marks,
    place_of,
    recorded_lines,
    sections_of,
    sentence,
    served_lines,
    tie_line,
    who,
)
from attnsweep.store.run import Run

Line = tuple[str, str]
"""A line and its rich style."""
MANY = 4
"""A run with this many problems prints one line for each instead of a table."""
TOP = 3
# Lines of a run of many problems: the ends of the list if there are more.
_MOST_LINES = 20
_ENDS = 8
_COLUMNS = ("time_us", "ratio_to_best_baseline", "ratio_low", "energy_uj")


def print_brief(
    run: Run, console: Console, *, top: int | None = None, every: bool = False, quiet: bool = False
) -> None:
    """Print a run in short. top: candidates per table, which there then are of each problem.

    every: end in a sentence about each problem, however many there are. quiet: print nothing else.
    """
    sections = sections_of(run)
    few, width = len(sections) < MANY, console.width

    def say(line: str, style: str) -> None:
        console.print(Text(line, style=style), no_wrap=True, overflow="ellipsis", crop=True)

    if not quiet:
        for line, style in _lines(run, sections, width, top, few=few or top is not None):
            say(line, style)
    answers = [sentence(each) for each in sections] if few or every else [overall(sections)]
    if found := gains(sections, run.spec_text):  # then it is the program that asks
        if not quiet:
            tables.print_gains(found, width, say)
            return
        answers = sentences(found)[:1]
    for said in answers:
        console.print(Text(said, "bold"), soft_wrap=True)


def _lines(
    run: Run, sections: Sequence[Section], width: int, top: int | None, *, few: bool
) -> Iterator[Line]:
    if few:
        for number, section in enumerate(sections):
            yield from [("", "")] * bool(number)
            yield from _problem(section, width, top or TOP)
    else:
        yield from _each(sections, width)
        rows = [row for section in sections for row in section.rows if row["status"] in FAILED]
        failed = Counter(row["status"].replace("_", " ") for row in rows if not row["baseline"])
        if failed:
            yield ", ".join(f"{n} {status}" for status, n in failed.most_common()), "yellow"
        lost = [
            f"{who(row)} on {row['trial'].problem.label}: {row['status'].replace('_', ' ')}"
            for row in rows
            if row["baseline"]
        ]
        rest = [f"{len(lost) - TOP} more"] if len(lost) > TOP else []
        yield from ((cut(line, width), "yellow") for line in [*lost[:TOP], *rest])
        served = dict.fromkeys(line for section in sections for line in served_lines(section))
        yield from ((cut(line, width), "yellow") for line in served)
    if several := cards.by_card(run.trials, sections):
        lines = aligned(cards.table(several), cards.ALIGN, width, shrink=(4, 2))
        yield from ((line, "") for line in [*lines, *wrap(cards.UNKNOWN, width)])
    more = "--full: all of them" if few else "tables: --full, report --problem SHAPE"
    for line in wrap(f"{tables.rows_of(run)}: {run.directory} ({more})", width):
        yield line, "dim"


def _problem(section: Section, width: int, top: int) -> Iterator[Line]:
    """Its best candidates and its baselines, and what must be known of them.

    Without a winner it is all that is known, which has the reasons.
    """
    if section.winner is None:
        yield from tables.terminal(section, width, top, "--json has them")
        return
    yield cut(" · ".join(heading(section)[:2]), width), "bold"
    shown = section.shown(top)
    recorded = all(who(row).endswith("†") for row in shown)  # which the heading says
    if shown:
        yield from _rows(section, shown, width, marked=not recorded)
    said: list[Line] = [((tie_line(section, section.rows) or "").split(";")[0], "")]
    failed = [line for line, _ in failures(section)]
    warned = (*served_lines(section), *baseline_lines(section), *failed)
    said += [(line, "yellow") for line in warned]
    if absent := absent_baselines(section):
        names = ", ".join(line.split()[1] for line in absent)
        said.append((f"not timed: {names}", "dim"))
    said += [] if recorded else [(line, "dim") for line in recorded_lines(section)]
    yield from ((cut(line, width), style) for line, style in said if line)


def _rows(section: Section, shown: Sequence[Row], width: int, *, marked: bool) -> Iterator[Line]:
    """The table of some rows, header first. marked: whether recorded ones have their mark."""
    names = [who(row) if marked else who(row).removesuffix("†") for row in shown]
    numbers = [c for c in tables.columns_of(section, shown) if c.name in _COLUMNS]
    places = ["*" * bool(row["winner"]) + place_of(row) for row in shown]
    columns = [places, names, *(c.cells(shown) for c in numbers), _configs(section, shown)]
    lines = [["#", "kernel", *(c.header for c in numbers), "config"]]
    lines += [list(cells) for cells in zip(*columns, strict=True)]
    align, last = "rl" + "r" * len(numbers) + "l", len(columns) - 1
    header, *rest = aligned(lines, align, width, shrink=(last, 1))
    yield header, "bold"
    best = "bold" if faster_baseline(section) else "bold green"
    for row, line in zip(shown, rest, strict=True):
        yield line, best if row["winner"] else "cyan" if row["baseline"] else ""


def first_rows(trials: Sequence[Trial], environment: Environment, width: int) -> list[Line]:
    """The table of one problem's best rows and its baselines; nothing if none is ranked."""
    (section,) = by_problem(trials, environment)
    shown = section.shown(TOP)
    return list(_rows(section, shown, width, marked=True)) if shown else []


def _configs(section: Section, rows: Sequence[Row]) -> list[str]:
    """The parameters in which each row is not as the first of its family; of that, their values."""
    first: dict[str, Row] = {}
    for row in rows:
        if not row["baseline"]:
            first.setdefault(row["kernel"], row)

    def differing(row: Row) -> list[str]:
        own, best = row["trial"].config, first[row["kernel"]]["trial"].config
        return [
            name for name in section.differing[row["kernel"]] if own.get(name) != best.get(name)
        ]

    changed: dict[str, dict[str, None]] = {kernel: {} for kernel in first}
    for row in rows:
        if not row["baseline"]:
            changed[row["kernel"]] |= dict.fromkeys(differing(row))
    cells = []
    for row in rows:
        if row["baseline"]:
            cells.append(", ".join(marks(row)))
            continue
        names = changed[row["kernel"]] if first[row["kernel"]] is row else differing(row)
        cells.append(named({name: row["trial"].config.get(name) for name in names}))
    return cells


def _each(sections: Sequence[Section], width: int) -> Iterator[Line]:
    """A line of each problem, by × base; of many, those at both ends."""

    def gained(section: Section) -> float:
        won = section.winner
        return -1.0 if won is None else won["ratio_to_best_baseline"] or 0.0

    ordered = sorted(sections, key=gained)
    left = len(ordered) - 2 * _ENDS if len(ordered) > _MOST_LINES else 0
    shown = [*ordered[:_ENDS], *ordered[-_ENDS:]] if left else ordered
    header, *rest = aligned(
        tables.summary(shown, intervals=width >= tables.WIDE), "lrrrll", width, shrink=(5, 4, 0)
    )
    yield header, "bold"
    for at, line in enumerate(rest):
        if left and at == _ENDS:
            yield f"… {left} more, between these", "dim"
        yield line, ""


def overall(sections: Sequence[Section]) -> str:
    """One sentence about a run of many problems."""
    won = [(section, section.winner) for section in sections]
    ratios = {
        s.problem.label: row["ratio_to_best_baseline"]
        for s, row in won
        if row is not None and row["ratio_to_best_baseline"]
    }
    none = sum(row is None for _, row in won)
    rest = f" No candidate is right and timed on {none} of {len(sections)}." if none else ""
    if not ratios:
        return f"No baseline was timed with a winner on {counted(len(sections), 'problem')}.{rest}"
    mean = statistics.geometric_mean(ratios.values())
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return (
        f"The best candidates are {mean:.2f} times as fast as the fastest baselines, a geometric "
        f"mean of {counted(len(ratios), 'problem')}: from {ratios[least]:.2f} on {least} to "
        f"{ratios[most]:.2f} on {most}.{rest}"
    )

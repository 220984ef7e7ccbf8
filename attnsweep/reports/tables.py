"""Ranked tables of a run: terminal, Markdown, CSV and JSON, all from the one DataFrame of `rank`.

Needs no GPU and no CUDA. Times are microseconds of one call.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnsweep.choose.columns import Row, named, value_text
from attnsweep.choose.ranking import frame
from attnsweep.core.trial import Environment, Trial
from attnsweep.reports import cards, gains
from attnsweep.reports import text as texts
from attnsweep.reports.sections import Section, Sections, sections_of
from attnsweep.reports.terminal import GLUE, aligned, counted, cut, wrap
from attnsweep.reports.text import heading, who
from attnsweep.store.run import Run

if TYPE_CHECKING:
    import pandas


NONE = "–"
MARKDOWN_TOP = 20
# From this width on, the summary of several problems has the intervals of its ratios.
WIDE = 100
LEGENDS = {
    "~": "~ not timed in the rounds of the finals; before × base: of medians",
    "±": "± half the interquartile range of the rounds, – if timed once",
    "× base": "× base: time of the fastest baseline known over this one, paired by rounds",
    "≥": "≥ at least, because that baseline is noisy",
    "95": f"95{GLUE}%: interval of × base, of fewer than 6 rounds their range",
    "regs": "regs, smem: the largest stage",
    "% light": f"%{GLUE}light: share of the speed of light at the clock of the rounds",
    "eager": "eager: host time to issue one call, next to which the device works",
    "#": "ranks follow the paired rounds, so a row with a lower median can rank below another",
}
"""A sign of a table, or how a heading begins, to what it means."""
LEGEND = " · ".join(LEGENDS.values())


def legend_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """What the signs and headings of a table mean, of those that are in it."""
    numbers = "".join(cell for row in rows for cell in row[2:])
    there = {sign for sign in "~≥" if sign in numbers}
    there |= {sign for sign in LEGENDS for cell in header if cell.startswith(sign)}
    return [text.replace(GLUE, " ") for sign, text in LEGENDS.items() if sign in there]


Line = tuple[str, str]
"""A line and its rich style."""
Use = Callable[[Run, Sequence[Section]], str | None]
"""Finds the command that uses the winners of a run, which is of a higher room."""


def _print(console: Console, lines: Iterable[Line]) -> None:
    for line, style in lines:
        console.print(Text(line, style=style), no_wrap=True, overflow="ellipsis", crop=True)


def _wrapped(text: str | None, width: int, style: str = "") -> list[Line]:
    return [(line, style) for line in wrap(text or "", width)]


def _columns(
    rows: Sequence[Sequence[str]], align: str, width: int, shrink: Sequence[int]
) -> list[Line]:
    """Rows in columns, the first one bold."""
    lines = aligned(rows, align, width, shrink=shrink)
    return [(line, "" if number else "bold") for number, line in enumerate(lines)]


def print_run(run: Run, console: Console, *, top: int = 10) -> None:
    """Print every problem's ranked table in the width of `console`; after several, a summary.

    top: candidates per table. Baselines are always shown, and every tie for the first place is
    named. Without a terminal the same text has no ANSI codes.
    """
    csv = run.directory / "ranking.csv"
    more = f"all of them: {csv}" if csv.is_file() else "--top shows more of them, --json all"
    sections, width = sections_of(run), console.width
    _print(console, _wrapped(f"{run.directory}: {rows_of(sections)}", width, "dim"))
    for section in sections:
        _print(console, [*terminal(section, width, top, more), ("", "")])
    if len(sections) > 1:
        _print(console, _summary(sections, width))
    if several := _of_cards(sections, width):
        _print(console, [("", ""), *several])
    if found := gains.gains(sections, run.spec_text):
        _print(console, _of_gains(found, width))
    if any(section.shown(top) for section in sections):
        _print(console, _wrapped(LEGEND, width, "dim"))


def _of_cards(sections: Sequence[Section], width: int) -> list[Line]:
    """A line for each card of a run of several."""
    several = cards.by_card(sections)
    lines = _columns(cards.table(several), cards.ALIGN, width, (4, 2))
    return [*lines, *_wrapped(cards.UNKNOWN, width)] if several else []


def _of_gains(found: dict[str, Any], width: int) -> list[Line]:
    """The lines of a program's gains."""
    *lines, (total, _) = _columns(gains.table(found), gains.ALIGN, width, gains.SHRINK)
    first, *rest = gains.sentences(found)
    said = [line for each in rest for line in _wrapped(each, width)]
    head = [("", ""), ("gain of the program", "bold"), *lines, (total, "bold")]
    return [*head, *_wrapped(first, width, "bold"), *said]


def ranked_rows(trials: Sequence[Trial], environment: Environment) -> list[dict[str, Any]]:
    """One problem's three best rows and its baselines as plain data."""
    (section,) = Sections(trials, environment)
    return [_json_row(row) for row in section.shown(3)]


def rows_of(sections: Sequence[Section]) -> str:
    """`99 candidates, 5 baselines`: the rows of a run."""
    of = Counter(row["baseline"] for section in sections for row in section.rows)
    return f"{counted(of[False], 'candidate')}, {counted(of[True], 'baseline')}"


def files(run: Run) -> dict[str, str]:
    """Names and texts of the files that a finished run keeps: ranking.csv and ranking.md."""
    sections = sections_of(run)
    return {
        "ranking.csv": to_csv(frame([row for section in sections for row in section.rows])),
        "ranking.md": to_markdown(sections, run.spec_text),
    }


def to_csv(ranking: pandas.DataFrame) -> str:
    """Every row, ranked or not, in full precision; chained_us stands behind the other times."""
    plain = ranking.drop(columns="trial")
    chained = [trial.chained_us for trial in ranking["trial"]]
    plain.insert(list(plain.columns).index("eager_us") + 1, "chained_us", chained)
    return plain.to_csv(index=False, lineterminator="\n")


def to_json(run: Run) -> dict[str, Any]:
    """The run as plain data: stable keys, None for unknown values. Times in microseconds.

    {"run", "environment", "problems": [{"problem", "label", "bounds_us", "winner", "ranking",
    "counts"}], "warnings"}; ranking holds every row, with rank None for a row without one. A run
    whose spec counts a program's calls has "gains" too, and one of several cards "by_card".
    """
    parts = dict(json_parts(run))
    return parts | {"problems": list(parts["problems"])}


def json_parts(run: Run) -> Iterator[tuple[str, Any]]:
    """The members of `to_json`, with an iterator of problems, as they are asked for.

    So a large run's problems are not all in memory, and each is ranked while its rows are at hand.
    """
    sections = sections_of(run)
    yield "run", str(run.directory)
    yield "environment", run.environment.model_dump(mode="json") if run.environment else None
    yield (
        "problems",
        (
            {
                "problem": section.problem.facts,
                "label": section.problem.label,
                "bounds_us": section.bounds_us,
                "winner": _json_row(section.winner) if section.winner else None,
                "ranking": [_json_row(row) for row in section.rows],
                "counts": dict(Counter(row["status"] for row in section.rows)),
                **({"frontier": points} if (points := texts.frontier_points(section)) else {}),
            }
            for section in sections
        ),
    )
    lost = [f"{section.problem.label}: {section.lost}" for section in sections if section.lost]
    yield "warnings", [*run.warnings, *lost]
    if (found := gains.gains(sections, run.spec_text)) is not None:
        yield "gains", found
    if several := cards.by_card(sections):
        yield "by_card", {"cards": several}


def _json_row(row: Row) -> dict[str, Any]:
    trial = row.facts
    plain = row.columns(trial.config)
    del plain["problem"], plain["trial"]
    plain["chained_us"] = trial.chained_us
    plain["judged"] = trial.accuracy.judged if trial.accuracy else None
    for name in ("variant", "stages_us", "schedule"):
        plain[name] = getattr(trial, name)
    return plain


# -- one problem ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of numbers. digits: significant digits of its best rows (0: `form` writes the cell).

    The fastest rows, which matter most, set the number of decimals for all. A slow row may have
    more digits than it needs.
    """

    name: str
    header: str
    digits: int = 0
    form: Callable[[Any], str] = "{}".format
    mark: Callable[[Row], str] = lambda _: ""
    """What stands before a value."""
    after: Callable[[Row], str] = lambda _: ""
    most: int = 3
    """Most decimals. A time has no more than its clock resolves."""

    def cells(self, rows: Sequence[Row]) -> list[str]:
        values = [row[self.name] for row in rows]
        form = self.form
        by_time = sorted((row for row in rows if row[self.name]), key=lambda row: row["time_us"])
        best = [row[self.name] for row in by_time[:_BEST]]
        if self.digits:
            decimals = texts.decimals_for(min(best, default=None), self.digits, self.most)
            form = f"{{:.{decimals}f}}".format
        return [
            NONE if value is None else self.mark(row) + form(value) + self.after(row)
            for row, value in zip(rows, values, strict=True)
        ]


# The smallest value among this many of the fastest rows sets the decimals.
_BEST = 3
# In order of need: on a narrow terminal the last columns go first. Rates and shares are the time in
# other units, so other facts (spread, registers, memory) stay longer than most of them.
_BY_NEED = [
    _Column("time_us", "µs", 4, mark=lambda row: "~" * texts.apart(row)),
    _Column(
        *("ratio_to_best_baseline", "× base"),
        form="{:.2f}".format,
        mark=lambda row: {"bound": "≥", "medians": "~"}.get(row["ratio_of"], ""),
    ),
    _Column("spread_us", "±", 2),
    _Column("energy_uj", "mJ", form=lambda uj: f"{uj / 1e3:.4g}"),
    _Column("power_w", "W", form="{:.0f}".format),
    _Column(
        *("ratio_low", f"95{GLUE}%"),
        form="{:.2f}".format,
        after=lambda row: f"–{row['ratio_high']:.2f}",
    ),
    _Column("tflops", "TFLOP/s", 4),
    _Column("registers", "regs"),
    _Column("smem_bytes", "smem", form=lambda nbytes: f"{nbytes / 1024:.0f}K"),
    _Column("us_per_head", "µs/head", 3, most=5),
    _Column("light", "% light", form=lambda share: f"{100 * share:.0f}"),
    _Column("rel_err", "error", form="{:.1e}".format),
    _Column("spill_bytes", "spill B"),
    _Column("warm_us", "warm µs", 4),
    _Column("cold_us", "cold µs", 4),
    _Column("eager_us", "eager µs", 3),
    _Column("occupancy", "occ %", form=lambda share: f"{100 * share:.0f}"),
]
_LESS_THAN_NAMES = ("spill_bytes", "warm_us", "cold_us", "eager_us", "occupancy")
_ORDER = [
    "time_us", "spread_us", "ratio_to_best_baseline", "ratio_low", "us_per_head", "tflops",
    "light", "rel_err", "registers", "smem_bytes", "spill_bytes", "warm_us",
    "cold_us", "eager_us", "energy_uj", "power_w", "occupancy",
]  # fmt: skip


def columns_of(section: Section, rows: Sequence[Row]) -> list[_Column]:
    """The columns that say something of these rows, in order of need."""
    present = {c.name for c in _BY_NEED if any(row[c.name] is not None for row in rows)}
    present -= set() if any(row["spill_bytes"] for row in rows) else {"spill_bytes"}
    kinds = {row["timed_as"] for row in section.rows if row["rounds"]} - {"chain"} or {"warm"}
    present -= {f"{min(kinds)}_us"} if len(kinds) == 1 else set()  # time_us shows this kind
    return [column for column in _BY_NEED if column.name in present]


def _configs(section: Section, rows: Sequence[Row], *, names: bool) -> tuple[list[str], list[str]]:
    """The config cells, with only the differing parameters, and a legend line per family.

    Which parameters differ does not depend on the rows shown, so that a label means the same in
    every table. Only a family with a single row here has its whole config in the legend.
    """
    families: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        if not row["baseline"]:
            families.setdefault(row["kernel"], []).append(row.facts.config)
    differing = {
        kernel: section.differing[kernel] if len(configs) > 1 else []
        for kernel, configs in families.items()
    }
    cells = []
    for row in rows:
        config = row.facts.config
        if row["baseline"]:
            cells.append(", ".join(texts.marks(row)) or "baseline")
            continue
        own = {name: config.get(name, NONE) for name in differing[row["kernel"]]}
        cell = named(own) if names else "/".join(map(value_text, own.values()))
        cells.append(cell or ("(below)" if config else NONE))
    legend = []
    for kernel, configs in families.items():
        always = named({n: v for n, v in configs[0].items() if n not in differing[kernel]})
        parts = [] if names or not differing[kernel] else [" / ".join(differing[kernel])]
        if always:
            parts.append(f"all {always}" if len(configs) > 1 else always)
        if parts:
            legend.append(f"{kernel}: {'; '.join(parts)}")
    return cells, legend


def _table(section: Section, rows: Sequence[Row], width: int) -> tuple[list[str], list[str]]:
    """The table's lines, header first, no wider than `width`, and the legend of its configs."""
    present = columns_of(section, rows)
    needed = len(present)
    while needed and present[needed - 1].name in _LESS_THAN_NAMES:
        needed -= 1
    forms = [(True, most) for most in range(len(present), needed - 1, -1)]
    forms += [(False, most) for most in range(len(present), 0, -1)]
    for names, most in forms:  # the first that fits
        lines, align, legend = table(section, rows, names=names, columns=present[:most])
        for row, cells in zip(rows, lines[1:], strict=True):
            cells[0] = "*" * bool(row["winner"]) + cells[0]
        columns = [max(map(cell_len, column)) + 2 for column in zip(*lines, strict=True)]
        if sum(columns) - 2 <= width:
            break
    return aligned(lines, align, width, shrink=(2, 1)), legend


def summary(sections: Sequence[Section], *, intervals: bool) -> list[list[str]]:
    """Header and one line per problem: the best of ours, its time, × the fastest baseline.

    intervals: whether the ratios have theirs, for which a narrow terminal has no room.
    """
    lines = [["problem", "µs", "µs/head", "× base", "base", "best of ours"]]
    for section in sections:
        won, best = section.winner, section.best_baseline
        ours = [NONE] * 4
        if won is not None:
            times = texts.figure(won["time_us"], 4), texts.figure(won["us_per_head"], 3)
            ratio = NONE if section.lost else texts.ratio_text(won, name=False, interval=intervals)
            ours = [*times, ratio, who(won)]
        base = who(best) if best and not section.lost else NONE
        lines.append([section.problem.label, *ours[:3], base, ours[3]])
    return lines


def _summary(sections: Sequence[Section], width: int) -> list[Line]:
    """The summary's lines. A narrow terminal has fewer columns: names that are cut say little."""
    rows, align = summary(sections, intervals=width >= WIDE), "lrrrll"
    for column in (2, 4, 4):  # µs/head, base, best of ours
        if max(map(cell_len, aligned(rows, align, 0))) <= width:
            break
        rows = [row[:column] + row[column + 1 :] for row in rows]
        align = align[:column] + align[column + 1 :]
    return _columns(rows, align, width, (0,))


# -- terminal and Markdown ------------------------------------------------------------------


def _styled(
    section: Section, rows: Sequence[Row], lines: Sequence[str]
) -> Iterator[tuple[str, str]]:
    best = "bold" if texts.faster_baseline(section) else "bold green"
    for row, line in zip(rows, lines, strict=True):
        yield line, best if row["winner"] else "cyan" if row["baseline"] else ""


def terminal(section: Section, width: int, top: int, more: str) -> list[tuple[str, str]]:
    """The section's lines with their rich styles; each line is no wider than `width`."""
    out = _wrapped(" · ".join(heading(section)), width, "bold")
    for line in (texts.bound_line(section), texts.conditions_line(section)):
        out += _wrapped(line, width, "dim")
    shown = section.shown(top)
    legend: list[str] = []
    if shown:
        (header, *lines), legend = _table(section, shown, width)
        out += [(header, "bold"), *_styled(section, shown, lines)]
    for line, style, errors in texts.notes(section, shown, more, legend):
        out += _wrapped(line, width, style) if errors is None else [(cut(line, width), style)]
        out += [(cut(f"    {text}", width), "") for text in errors or ()]
    return out


def to_markdown(sections: Sequence[Section], spec_text: str | None = None) -> str:
    """Write a run's ranked tables as Markdown, with recorded rows marked.

    spec_text: the run's spec, which may count a program's calls.
    """
    out = ["# Ranking", ""]
    if len(sections) > 1:
        out += [*_pipes(summary(sections, intervals=True), "lrrrll"), ""]
    found = gains.gains(sections, spec_text)
    if found is not None:
        first, *rest = map(_escaped, gains.sentences(found))
        out += ["## Gain of the program", "", *_pipes(gains.table(found), gains.ALIGN), ""]
        out += [first, "", *(f"- {line.strip()}" for line in rest), ""]
    if several := cards.by_card(sections):
        out += ["## Cards", "", *_pipes(cards.table(several), cards.ALIGN), "", cards.UNKNOWN, ""]
    for section in sections:
        label, *facts = heading(section)
        out += [f"## {label}", "", " · ".join(facts), ""]
        for line in (texts.bound_line(section), texts.conditions_line(section)):
            out += [line, ""] if line else []
        shown = section.shown(MARKDOWN_TOP)
        legend: list[str] = []
        if shown:
            rows, align, legend = table(section, shown)
            for row, cells in zip(shown, rows[1:], strict=True):
                cells[1] = f"**{cells[1]}**" if row["winner"] else cells[1]
            out += [*_pipes(rows, align), ""]
        below = texts.notes(section, shown, "all of them: ranking.csv", legend)
        out += [f"- {_escaped(note.lstrip('*= '))}" for note, *_ in below]
        out.append("")
    out.append(LEGEND)
    return "\n".join(out).replace(GLUE, " ").rstrip() + "\n"


def table(
    section: Section,
    rows: Sequence[Row],
    *,
    names: bool = True,
    columns: Sequence[_Column] | None = None,
) -> tuple[list[list[str]], str, list[str]]:
    """Header and cells of each column with a value, `l` or `r` for each, and the configs' legend.

    names: whether a config's cell names the parameters; otherwise the legend does. columns: of
    numbers (default: all that say something).
    """
    columns = columns_of(section, rows) if columns is None else columns
    columns = sorted(columns, key=lambda column: _ORDER.index(column.name))
    numbers = [column.cells(rows) for column in columns]
    configs, legend = _configs(section, rows, names=names)
    lines = [["#", "kernel", "config", *(column.header for column in columns)]]
    for index, row in enumerate(rows):
        cells = [texts.place_of(row), who(row), configs[index]]
        lines.append([*cells, *(column[index] for column in numbers)])
    return lines, "rll" + "r" * len(columns), legend


def _pipes(lines: Sequence[Sequence[str]], align: str) -> list[str]:
    rule = ["---:" if side == "r" else "---" for side in align]
    header, *body = [[_escaped(cell) for cell in line] for line in lines]
    return [f"| {' | '.join(cells)} |" for cells in [header, rule, *body]]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


MANY = 4
"""A run with this many problems prints one line for each instead of a table."""
TOP = 3
# Lines of a run of many problems: the ends of the list if there are more.
_MOST_LINES = 20
_ENDS = 8
_COLUMNS = ("time_us", "ratio_to_best_baseline", "ratio_low", "energy_uj")


def print_brief(
    run: Run,
    console: Console,
    *,
    top: int | None = None,
    every: bool = False,
    quiet: bool = False,
    use: Use = lambda _run, _sections: None,
) -> None:
    """Print a run in short. top: candidates per table, which there then are of each problem.

    every: end in a sentence about each problem, however many there are, and its winning config.
    quiet: print nothing else. use: what finds the command that uses the winners.
    """
    sections = sections_of(run)
    few, width = len(sections) < MANY, console.width
    if not quiet:
        _print(console, _lines(run, sections, width, top, few=few or top is not None))
    answers: list[Line] = [(overall(sections), "bold")]
    if few or every:
        answers = [line for each in sections for line in _answer(each)]
    if found := gains.gains(sections, run.spec_text):  # then it is the program that asks
        answers = [(line, "bold") for line in gains.sentences(found)[:quiet]]
        _print(console, () if quiet else _of_gains(found, width))
    if (command := use(run, sections)) is not None:
        one = len(sections) == 1 and answers[1:]
        how = f"to {'explain' if ' explain ' in command else 'use'} {'it' if one else 'them'}"
        last, style = answers.pop() if one else ("", "")
        answers.append((f"{last}{'; ' * bool(one)}{how}: {command}", style))
    for said, style in answers:
        console.print(Text(said, style), soft_wrap=True)


def _answer(section: Section) -> Iterator[Line]:
    """The sentence about a problem, and its winning config."""
    yield texts.sentence(section), "bold"
    if config := texts.winning_config(section):
        yield f"config: {config}", ""


def _lines(
    run: Run, sections: Sequence[Section], width: int, top: int | None, *, few: bool
) -> Iterator[Line]:
    if few:
        for number, section in enumerate(sections):
            yield from [("", "")] * bool(number)
            yield from _brief(section, width, top or TOP)
    else:
        yield from _each(sections, width)
        rows = [
            row for section in sections for row in section.rows if row["status"] in texts.FAILED
        ]
        failed = Counter(row["status"].replace("_", " ") for row in rows if not row["baseline"])
        if failed:
            yield ", ".join(f"{n} {status}" for status, n in failed.most_common()), "yellow"
        lost = [
            f"{who(row)} on {row['trial'].problem.label}: {row['status'].replace('_', ' ')}"
            for row in rows
            if row["baseline"]
        ]
        rest = [f"{len(lost) - TOP} more"] if len(lost) > TOP else []
        served = dict.fromkeys(line for section in sections for line in texts.served_lines(section))
        unknown = [f"{s.problem.label}: {s.lost}" for s in sections if s.lost]
        more_of = [f"{len(unknown) - TOP} more problems like it"] if len(unknown) > TOP else []
        warned = [*lost[:TOP], *rest, *unknown[:TOP], *more_of, *served]
        yield from ((cut(line, width), "yellow") for line in warned)
        marks = dict.fromkeys(line for s in sections for line in texts.recorded_lines(s))
        yield from ((cut(line, width), "dim") for line in marks)
    yield from _of_cards(sections, width)
    more = "--full: all of them" if few else "tables: --full, report --problem SHAPE"
    yield from _wrapped(f"{rows_of(sections)}: {run.directory} ({more})", width, "dim")


def _brief(section: Section, width: int, top: int) -> Iterator[Line]:
    """Its best candidates and its baselines, and what must be known of them.

    Without a winner it is all that is known, which has the reasons.
    """
    if section.winner is None:
        yield from terminal(section, width, top, "--json has them")
        return
    yield cut(" · ".join(heading(section)[:2]), width), "bold"
    shown = section.shown(top)
    recorded = texts.all_recorded(section)
    if shown:
        yield from _brief_rows(section, shown, width, marked=not recorded)
    said: list[Line] = [((texts.tie_line(section, section.rows) or "").split(";")[0], "")]
    failed = [line for line, _ in texts.failures(section)]
    warned = (*texts.served_lines(section), *texts.baseline_lines(section), *failed)
    said += [(line, "yellow") for line in warned]
    if absent := texts.absent_baselines(section):
        names = ", ".join(line.split()[1] for line in absent)
        said.append((f"not timed: {names}", "dim"))
    if recorded:
        said = [(line.replace("†", ""), style) for line, style in said]
    else:
        said += [(line, "dim") for line in texts.recorded_lines(section)]
    yield from ((cut(line, width), style) for line, style in said if line)


def _brief_rows(
    section: Section, shown: Sequence[Row], width: int, *, marked: bool
) -> Iterator[Line]:
    """The table of some rows, header first. marked: whether recorded ones have their mark."""
    names = [who(row) if marked else who(row).removesuffix("†") for row in shown]
    numbers = [c for c in columns_of(section, shown) if c.name in _COLUMNS]
    places = ["*" * bool(row["winner"]) + texts.place_of(row) for row in shown]
    columns = [places, names, *(c.cells(shown) for c in numbers), config_changes(section, shown)]
    lines = [["#", "kernel", *(c.header for c in numbers), "config"]]
    lines += [list(cells) for cells in zip(*columns, strict=True)]
    align, last = "rl" + "r" * len(numbers) + "l", len(columns) - 1
    header, *rest = aligned(lines, align, width, shrink=(last, 1))
    yield header, "bold"
    yield from _styled(section, shown, rest)


def first_rows(trials: Sequence[Trial], environment: Environment, width: int) -> list[Line]:
    """The table of one problem's best rows and its baselines; nothing if none is ranked."""
    (section,) = Sections(trials, environment)
    shown = section.shown(TOP)
    return list(_brief_rows(section, shown, width, marked=True)) if shown else []


def config_changes(section: Section, rows: Sequence[Row]) -> list[str]:
    """The parameters in which each row is not as the first of its family; of that, their values."""
    first: dict[str, Row] = {}
    for row in rows:
        if not row["baseline"]:
            first.setdefault(row["kernel"], row)

    def differing(row: Row) -> list[str]:
        own, best = row.facts.config, first[row["kernel"]].facts.config
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
            cells.append(", ".join(texts.marks(row)))
            continue
        names = changed[row["kernel"]] if first[row["kernel"]] is row else differing(row)
        cells.append(named({name: row.facts.config.get(name) for name in names}))
    return cells


def _each(sections: Sequence[Section], width: int) -> list[Line]:
    """A line of each problem, by × base; of many, those at both ends."""

    def gained(section: Section) -> float:
        won = section.winner
        unknown = won is None or section.lost is not None
        return -1.0 if unknown else won["ratio_to_best_baseline"] or 0.0  # type: ignore[index]

    ordered = sorted(sections, key=gained)
    left = len(ordered) - 2 * _ENDS if len(ordered) > _MOST_LINES else 0
    shown = [*ordered[:_ENDS], *ordered[-_ENDS:]] if left else ordered
    lines = _summary(shown, width)
    if left:
        lines.insert(1 + _ENDS, (f"… {left} more, between these", "dim"))
    return lines


def overall(sections: Sequence[Section]) -> str:
    """One sentence about a run of many problems."""
    won = [(section, section.winner) for section in sections]
    ratios = {
        s.problem.label: row["ratio_to_best_baseline"]
        for s, row in won
        if row is not None and row["ratio_to_best_baseline"] and s.lost is None
    }
    none = sum(row is None for _, row in won)
    rest = f" No candidate is right and timed on {none} of {len(sections)}." if none else ""
    if lost := [section for section in sections if section.lost is not None]:
        left = "1 problem is" if len(lost) == 1 else f"{len(lost)} problems are"
        rest += f" {left} left out: {lost[0].lost}."
    if not ratios:
        return f"No baseline was timed with a winner on {counted(len(sections), 'problem')}.{rest}"
    mean = statistics.geometric_mean(ratios.values())
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return (
        f"The best candidates are {mean:.2f} times as fast as the fastest baselines, a geometric "
        f"mean of {counted(len(ratios), 'problem')}: from {ratios[least]:.2f} on {least} to "
        f"{ratios[most]:.2f} on {most}.{rest}"
    )

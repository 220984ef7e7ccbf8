"""Ranked tables of a run: terminal, Markdown, CSV and JSON, all from the one DataFrame of `rank`.

Needs no GPU and no CUDA. Times are microseconds of one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnsweep.choose.columns import named, value_text
from attnsweep.choose.ranking import frame
from attnsweep.core.trial import OURS, Environment, Trial
from attnsweep.reports import cards, gains
from attnsweep.reports.frontier import frontier_points
from attnsweep.reports.notes import notes
from attnsweep.reports.terminal import GLUE, aligned, counted, cut, wrap
from attnsweep.reports.text import (
    Row,
    Section,
    apart,
    bound_line,
    by_problem,
    conditions_line,
    decimals_for,
    faster_baseline,
    figure,
    heading,
    marks,
    place_of,
    ratio_text,
    sections_of,
    who,
)
from attnsweep.store.run import Run

if TYPE_CHECKING:
    import pandas

NONE = "–"
MARKDOWN_TOP = 20
# From this width on, the summary of several problems has the intervals of its ratios.
WIDE = 100
LEGEND = (
    "~ not timed in the rounds of the finals · ± half the interquartile range of the rounds, – if "
    "timed once · × base: time of the fastest baseline known over this one, paired by rounds; ~ of "
    f"medians, ≥ at least, because that one is noisy · 95{GLUE}%: interval of × base, of fewer "
    f"than 6 rounds their range · regs, smem: the largest stage · %{GLUE}bound: 100 is at the bound"
    " · eager: host time to issue one call, next to which the device works · ranks follow the "
    "paired rounds, so a row with a lower median can rank below another"
)


def print_run(run: Run, console: Console, *, top: int = 10) -> None:
    """Print every problem's ranked table as wide as `console`, and a summary of several.

    top: candidates per table. Baselines are always shown, and every tie for the first place is
    named. Without a terminal the same text has no ANSI codes.
    """
    csv = run.directory / "ranking.csv"
    more = f"all of them: {csv}" if csv.is_file() else "--top shows more of them, --json all"
    sections = sections_of(run)
    width = console.width

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), no_wrap=True, overflow="ellipsis", crop=True)

    def say_table(rows: Sequence[Sequence[str]], align: str, shrink: Sequence[int]) -> None:
        for number, line in enumerate(aligned(rows, align, width, shrink=shrink)):
            say(line, "" if number else "bold")

    for line in wrap(f"{run.directory}: {rows_of(run)}", width):
        say(line, "dim")
    for section in sections:
        for text, style in terminal(section, width, top, more):
            say(text, style)
        say("")
    if len(sections) > 1:
        say_table(summary(sections, intervals=width >= WIDE), "lrrrll", (5, 4, 0))
    if several := cards.by_card(run.trials, sections):
        say("")
        say_table(cards.table(several), cards.ALIGN, (4, 2))
        for line in wrap(cards.UNKNOWN, width):
            say(line)
    print_gains(gains.gains(sections, run.spec_text), width, say)
    if any(section.shown(top) for section in sections):
        for line in wrap(LEGEND, width):
            say(line, "dim")


def ranked_rows(trials: Sequence[Trial], environment: Environment) -> list[dict[str, Any]]:
    """One problem's three best rows and its baselines as plain data."""
    (section,) = by_problem(trials, environment)
    return [_json_row(row) for row in section.shown(3)]


def rows_of(run: Run) -> str:
    """`99 candidates, 5 baselines`: the rows of a run."""
    of = Counter(trial.provider == OURS for trial in run.trials)
    return f"{counted(of[True], 'candidate')}, {counted(of[False], 'baseline')}"


def print_gains(found: gains.Gains | None, width: int, say: Callable[[str, str], None]) -> None:
    """Say what a program gains, if the run's spec counts its calls."""
    if found is None:
        return
    say("", "")
    say("gain of the program", "bold")
    lines = aligned(gains.table(found), gains.ALIGN, width, shrink=gains.SHRINK)
    for number, line in enumerate(lines):
        say(line, "bold" if number in (0, len(lines) - 1) else "")
    first, *rest = gains.sentences(found)
    for sentence in (first, *rest):
        for line in wrap(sentence, width):
            say(line, "bold" if sentence is first else "")


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
    parts = json_parts(run)
    return parts | {"problems": list(parts["problems"])}


def json_parts(run: Run) -> dict[str, Any]:
    """The same with an iterator of problems: those of a large run need not be there all at once."""
    sections = sections_of(run)
    found = gains.gains(sections, run.spec_text)
    several = cards.by_card(run.trials, sections)
    return {
        "run": str(run.directory),
        "environment": run.environment.model_dump(mode="json") if run.environment else None,
        "problems": (
            {
                "problem": section.problem.facts,
                "label": section.problem.label,
                "bounds_us": section.bounds_us,
                "winner": _json_row(section.winner) if section.winner else None,
                "ranking": [_json_row(row) for row in section.rows],
                "counts": dict(Counter(row["status"] for row in section.rows)),
                **({"frontier": points} if (points := frontier_points(section)) else {}),
            }
            for section in sections
        ),
        "warnings": list(run.warnings),
        **({} if found is None else {"gains": gains.to_json(found)}),
        **({"by_card": {"cards": [card.to_json() for card in several]}} if several else {}),
    }


def _json_row(row: Row) -> dict[str, Any]:
    trial = row["trial"]
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
            form = f"{{:.{decimals_for(min(best, default=None), self.digits, self.most)}f}}".format
        return [
            NONE if value is None else self.mark(row) + form(value) + self.after(row)
            for row, value in zip(rows, values, strict=True)
        ]


# The smallest value among this many of the fastest rows sets the decimals.
_BEST = 3
# In order of need: on a narrow terminal the last columns go first. Rates and shares are the time in
# other units, so other facts (spread, registers, memory) stay longer than most of them.
_BY_NEED = [
    _Column("time_us", "µs", 4, mark=lambda row: "~" * apart(row)),
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
    _Column("bound_share", "% bound", form=lambda share: f"{100 * share:.0f}"),
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
    "light", "bound_share", "rel_err", "registers", "smem_bytes", "spill_bytes", "warm_us",
    "cold_us", "eager_us", "energy_uj", "power_w", "occupancy",
]  # fmt: skip


def columns_of(section: Section, rows: Sequence[Row]) -> list[_Column]:
    """The columns that say something of these rows, in order of need."""
    present = {c.name for c in _BY_NEED if any(row[c.name] is not None for row in rows)}
    present -= set() if any(row["spill_bytes"] for row in rows) else {"spill_bytes"}
    present -= {"bound_share"} if "light" in present else set()  # the same at another clock
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
            families.setdefault(row["kernel"], []).append(row["trial"].config)
    differing = {
        kernel: section.differing[kernel] if len(configs) > 1 else []
        for kernel, configs in families.items()
    }
    cells = []
    for row in rows:
        config = row["trial"].config
        if row["baseline"]:
            cells.append(", ".join(marks(row)) or "baseline")
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
    number_cells = {column.name: [column.header, *column.cells(rows)] for column in present}
    ranks = ["#", *(("*" if row["winner"] else "") + place_of(row) for row in rows)]
    kernels = ["kernel", *map(who, rows)]

    def room(config: Sequence[str], columns: Sequence[_Column]) -> int:
        cells = [ranks, kernels, config, *(number_cells[c.name] for c in columns)]
        return width - sum(max(map(cell_len, column)) + 2 for column in cells) + 2

    columns = list(present)
    chosen, legend = _configs(section, rows, names=True)
    while room(["config", *chosen], columns) < 0 and columns[-1].name in _LESS_THAN_NAMES:
        columns.pop()
    if room(["config", *chosen], columns) < 0:
        columns = list(present)
        chosen, legend = _configs(section, rows, names=False)
        while room(["config", *chosen], columns) < 0 and len(columns) > 1:
            columns.pop()
    kept = sorted((c.name for c in columns), key=_ORDER.index)
    cells = [ranks, kernels, ["config", *chosen], *(number_cells[name] for name in kept)]
    lines = list(zip(*cells, strict=True))
    return aligned(lines, "rll" + "r" * len(kept), width, shrink=(2, 1)), legend


def summary(sections: Sequence[Section], *, intervals: bool) -> list[list[str]]:
    """Header and one line per problem: the best of ours, its time, × the fastest baseline.

    intervals: whether the ratios have theirs, for which a narrow terminal has no room.
    """
    lines = [["problem", "µs", "µs/head", "× base", "base", "best of ours"]]
    for section in sections:
        won, best = section.winner, section.best_baseline
        ours = [NONE] * 4
        if won is not None:
            times = figure(won["time_us"], 4), figure(won["us_per_head"], 3)
            ours = [*times, ratio_text(won, name=False, interval=intervals), who(won)]
        lines.append([section.problem.label, *ours[:3], who(best) if best else NONE, ours[3]])
    return lines


# -- terminal and Markdown ------------------------------------------------------------------


def _styled(
    section: Section, rows: Sequence[Row], lines: Sequence[str]
) -> Iterator[tuple[str, str]]:
    best = "bold" if faster_baseline(section) else "bold green"
    for row, line in zip(rows, lines, strict=True):
        yield line, best if row["winner"] else "cyan" if row["baseline"] else ""


def terminal(section: Section, width: int, top: int, more: str) -> list[tuple[str, str]]:
    """The section's lines with their rich styles; each line is no wider than `width`."""
    out = [(line, "bold") for line in wrap(" · ".join(heading(section)), width)]

    for line in (bound_line(section), conditions_line(section)):
        out += [(part, "dim") for part in wrap(line or "", width)]
    shown = section.shown(top)
    legend: list[str] = []
    if shown:
        (header, *lines), legend = _table(section, shown, width)
        out += [(header, "bold"), *_styled(section, shown, lines)]
    for line, style, errors in notes(section, shown, more, legend):
        parts = wrap(line, width) if errors is None else [cut(line, width)]
        out += [(part, style) for part in parts]
        out += [(cut(f"    {text}", width), "") for text in errors or ()]
    return out


def to_markdown(sections: Sequence[Section], spec_text: str | None = None) -> str:
    """The same tables in Markdown; recorded rows are marked there too.

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
    trials = [row["trial"] for section in sections for row in section.rows]
    if several := cards.by_card(trials, sections):
        out += ["## Cards", "", *_pipes(cards.table(several), cards.ALIGN), "", cards.UNKNOWN, ""]
    for section in sections:
        label, *facts = heading(section)
        out += [f"## {label}", "", " · ".join(facts), ""]
        for line in (bound_line(section), conditions_line(section)):
            out += [line, ""] if line else []
        shown = section.shown(MARKDOWN_TOP)
        legend: list[str] = []
        if shown:
            rows, align, legend = table(section, shown)
            for row, cells in zip(shown, rows[1:], strict=True):
                cells[1] = f"**{cells[1]}**" if row["winner"] else cells[1]
            out += [*_pipes(rows, align), ""]
        below = notes(section, shown, "all of them: ranking.csv", legend)
        out += [f"- {_escaped(note.lstrip('*= '))}" for note, *_ in below]
        out.append("")
    out.append(LEGEND)
    return "\n".join(out).replace(GLUE, " ").rstrip() + "\n"


def table(
    section: Section, rows: Sequence[Row], *, names: bool = True
) -> tuple[list[list[str]], str, list[str]]:
    """Header and cells of each column with a value, `l` or `r` for each, and the configs' legend.

    names: whether a config's cell names the parameters; otherwise the legend does.
    """
    columns = sorted(columns_of(section, rows), key=lambda column: _ORDER.index(column.name))
    numbers = [column.cells(rows) for column in columns]
    configs, legend = _configs(section, rows, names=names)
    lines = [["#", "kernel", "config", *(column.header for column in columns)]]
    for index, row in enumerate(rows):
        cells = [place_of(row), who(row), configs[index]]
        lines.append([*cells, *(column[index] for column in numbers)])
    return lines, "rll" + "r" * len(columns), legend


def _pipes(lines: Sequence[Sequence[str]], align: str) -> list[str]:
    rule = ["---:" if side == "r" else "---" for side in align]
    header, *body = [[_escaped(cell) for cell in line] for line in lines]
    return [f"| {' | '.join(cells)} |" for cells in [header, rule, *body]]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")

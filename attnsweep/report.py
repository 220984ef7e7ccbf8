"""Ranked tables of a run: terminal, Markdown, CSV and JSON, all from the one DataFrame of `rank`.

Needs no GPU and no CUDA. Times are microseconds of one call.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from attnsweep.console import GLUE, aligned, cut, wrap
from attnsweep.problem import Problem
from attnsweep.ranking import bounds_of, named, rank, value_text
from attnsweep.store import Run
from attnsweep.trial import Environment, Status

Row = dict[str, Any]
NONE = "–"
MARKDOWN_TOP = 20
LEGEND = (
    "± half the interquartile range of the rounds, – if timed once · × base: time of the best "
    "baseline over this one · regs, smem: the largest of the stages · "
    f"%{GLUE}bound: 100 is at the bound"
)
# A reason has one line; a problem at most this many of them.
MAX_REASONS = 6
_FAILED = ("noisy", "wrong", "launch_error", "timeout", "compile_error")


def print_run(run: Run, console: Console, *, top: int = 10) -> None:
    """Print every problem's ranked table as wide as `console`, then a summary of several.

    top: candidates per table. Baselines are always there, and every tie for the first place is
    named. Without a terminal the same text has no ANSI codes.
    """
    csv = run.directory / "ranking.csv"
    more = f"all of them: {csv}" if csv.is_file() else "--top shows more of them, --json all"
    sections = _sections(rank(run.trials, run.environment), run.environment)
    width = console.width

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), no_wrap=True, overflow="ellipsis", crop=True)

    for line in wrap(f"{run.directory}: {len(run.trials)} trials", width):
        say(line, "dim")
    for section in sections:
        for text, style in _terminal(section, width, top, more):
            say(text, style)
        say("")
    if len(sections) > 1:
        header, *body = _summary(sections)
        table = aligned([header, *body], "lrrrll", width, shrink=(5, 4, 0))
        for number, line in enumerate(table):
            say(line, "" if number else "bold")
    for line in wrap(LEGEND, width):
        say(line, "dim")


def files(run: Run) -> dict[str, str]:
    """Names and texts of what a finished run keeps: ranking.csv and ranking.md."""
    ranking = rank(run.trials, run.environment)
    return {
        "ranking.csv": to_csv(ranking),
        "ranking.md": to_markdown(ranking, run.environment),
    }


def to_csv(ranking: pandas.DataFrame) -> str:
    """Every row, ranked or not, in full precision."""
    return ranking.drop(columns="trial").to_csv(index=False, lineterminator="\n")


def to_json(run: Run) -> dict[str, Any]:
    """The run as plain data: stable keys, None for what is not known. Times in microseconds.

    {"run", "environment", "problems": [{"problem", "label", "bounds_us", "winner", "ranking",
    "counts"}]}; ranking holds every row, with rank None where it has none.
    """
    sections = _sections(rank(run.trials, run.environment), run.environment)
    return {
        "run": str(run.directory),
        "environment": run.environment.model_dump(mode="json") if run.environment else None,
        "problems": [
            {
                "problem": asdict(section.problem),
                "label": section.problem.label,
                "bounds_us": section.bounds_us,
                "winner": _json_row(section.winner) if section.winner else None,
                "ranking": [_json_row(row) for row in section.rows],
                "counts": dict(Counter(row["status"] for row in section.rows)),
            }
            for section in sections
        ],
    }


def _json_row(row: Row) -> Row:
    trial = row["trial"]
    plain = {name: value for name, value in row.items() if name not in ("problem", "trial")}
    return plain | {"config": dict(trial.config), "stages_us": dict(trial.stages_us)}


# -- one problem ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """One problem's part of the ranking; None stands for what is not known."""

    problem: Problem
    rows: list[Row]
    environment: Environment | None

    @property
    def winner(self) -> Row | None:
        return next((row for row in self.rows if row["winner"]), None)

    @property
    def best_baseline(self) -> Row | None:
        return next((row for row in self.rows if row["baseline"] and row["rank"]), None)

    @property
    def bounds_us(self) -> dict[str, float]:
        """Empty if the rows come from another GPU than the environment's."""
        return bounds_of(self.rows[0]["trial"], self.environment)

    def shown(self, top: int) -> list[Row]:
        """The table, in order: the best `top`, the best of each family, every ranked baseline."""
        ranked = [row for row in self.rows if row["rank"]]
        best = [row for row in ranked if not row["baseline"]][:top]
        keep = {id(row) for row in (*best, *self.best_of_families)}
        return [row for row in ranked if row["baseline"] or id(row) in keep]

    @property
    def best_of_families(self) -> list[Row]:
        """The first ranked candidate of each kernel family."""
        first: dict[str, Row] = {}
        for row in self.rows:
            if row["rank"] and not row["baseline"]:
                first.setdefault(row["kernel"], row)
        return list(first.values())


def _sections(ranking: pandas.DataFrame, environment: Environment | None) -> list[_Section]:
    plain = ranking.astype(object).where(ranking.notna(), None)
    by_problem: dict[str, list[Row]] = {}
    for row in plain.to_dict("records"):
        by_problem.setdefault(str(row["problem"]), []).append({str(k): v for k, v in row.items()})
    return [_Section(rows[0]["trial"].problem, rows, environment) for rows in by_problem.values()]


def _who(row: Row) -> str:
    """A candidate's family or a baseline's name, marked if its row is recorded."""
    name = row["provider"] if row["baseline"] else row["kernel"]
    return f"{name}†" if row["recorded"] else str(name)


def _origins(section: _Section) -> list[str]:
    """GPU and date of what is recorded."""
    recorded = [row for row in section.rows if row["recorded"]]
    return sorted({str(row["recorded_on"] or "an unknown GPU") for row in recorded})


def _place(row: Row) -> str:
    return f"={row['rank']}" if row["tied"] else str(row["rank"])


def _heading(section: _Section) -> list[str]:
    """The label, then where, with what and when it was measured or recorded."""
    where, origins = section.environment, _origins(section)
    label = section.problem.label
    if origins and all(row["recorded"] for row in section.rows):
        driver = [f"driver {where.driver}"] if where else []
        return [label, f"recorded on {' and '.join(origins)}", *driver]
    if where is None:
        return [label, "no environment.json: GPU and date unknown"]
    return [label, f"measured on {where.gpu}", f"driver {where.driver}", where.date[:10]]


def _bound_line(section: _Section) -> str | None:
    limits = section.bounds_us
    if not limits:
        return None
    where = section.environment
    in_l2 = where is not None and section.problem.min_bytes <= where.l2_bytes
    binds = next((row for row in section.rows if row["bound"]), None)
    first, others = "no bound known", []
    if binds is not None:
        first = f"bound {_figure(binds['bound_us'], 3)}{GLUE}µs by {binds['bound']}"
    for unit, us in limits.items():
        if binds is None or unit != binds["bound"]:
            unless = " if it were not all in L2" if unit == "memory" and in_l2 else ""
            others.append(f"{unit} {_figure(us, 3)}{GLUE}µs{unless}")
    return f"{first} ({', '.join(others)})" if others else first


def _winner_lines(section: _Section) -> list[str]:
    row = section.winner
    if row is None:
        return ["no candidate is ok: see why below"]
    said = [
        f"{_figure(row[name], digits)}{GLUE}{unit}"
        for name, digits, unit in (
            ("time_us", 4, "µs"),
            ("us_per_head", 3, "µs/head"),
            ("us_per_sequence", 3, "µs/sequence"),
            ("tflops", 3, "TFLOP/s"),
        )
        if name != "us_per_sequence" or section.problem.batch > 1
    ]
    if row["bound_share"] is not None:
        said.append(f"{100 * row['bound_share']:.0f}{GLUE}% of the bound")
    best, ratio = section.best_baseline, row["ratio_to_best_baseline"]
    if best is None:
        said.append("no baseline was timed beside it")
    else:
        said.append(f"{ratio:.2f}× {_who(best)}, the best baseline")
    config = f" {row['config']}" if row["config"] else ""
    lines = [f"* winner {_who(row)}{config}: {', '.join(said)}"]
    for row in section.best_of_families:
        stages = row["trial"].stages_us
        if stages:
            rest = row["time_us"] - sum(stages.values())
            each = [f"{name}{GLUE}{us:.1f}" for name, us in stages.items()]
            each.append(f"rest{GLUE}{rest:.1f}{GLUE}µs")
            lines.append(f"  stages of the best {_who(row)}: {' · '.join(each)}")
    return lines


def _tie_line(section: _Section, shown: Sequence[Row]) -> str | None:
    tied = [row for row in section.rows if row["tied"]]
    if not tied:
        return None
    visible = {id(row) for row in shown}
    beyond = [f"{_who(row)} {row['config']}".strip() for row in tied if id(row) not in visible]
    line = "= a shared rank: noise leaves open which is faster"
    if sum(not row["baseline"] for row in tied) > 1:
        line += "; of such candidates the one with least shared memory, then registers, wins"
    return line + (f". Not in the table: {'; '.join(beyond)}" if beyond else "")


def _reason(detail: str | None) -> str:
    """First line of a detail."""
    return next((line.strip() for line in (detail or "").splitlines() if line.strip()), "")


def _short_reason(detail: str | None) -> str:
    """`spills 24 bytes, the spec allows 0` is `spills`: what rows of one cause have in common."""
    cut = re.split(r"[,:;]| as ", _reason(detail))[0]
    return re.sub(r"\s*\b\d[\d.e+-]*\b(\s*(bytes|[KMG]iB)\b)?(\s*of\b)?", "", cut).strip()


def _rest_line(section: _Section, shown: Sequence[Row], more: str) -> str | None:
    visible = {id(row) for row in shown}
    rest = [r for r in section.rows if not r["baseline"] and id(r) not in visible]
    if not rest:
        return None
    counted = []
    for status, count in Counter(row["status"] for row in rest).items():
        words = f"{count}{GLUE}{status.replace('_', ' ')}"
        if status == Status.PRUNED:
            why = Counter(_short_reason(row["detail"]) for row in rest if row["status"] == status)
            named_ones = [f"{reason} {n}" for reason, n in why.most_common(3) if reason]
            named_ones += ["…"] if len(why) > 3 else []
            words += f" ({', '.join(named_ones)})" if named_ones else ""
        counted.append(words)
    return f"{len(rest)}{GLUE}more: {', '.join(counted)}; {more}"


def _failures(section: _Section) -> list[str]:
    """One line a cause, the first of its kind as the example."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in section.rows:
        if row["status"] in _FAILED and not row["baseline"]:
            cause = re.sub(r"\d[\d.e+-]*", "#", _reason(row["detail"]))
            groups.setdefault((row["status"], row["kernel"], cause), []).append(row)
    lines = []
    for (status, kernel, _), rows in groups.items():
        config = f" ({'first: ' * (len(rows) > 1)}{rows[0]['config']})" if rows[0]["config"] else ""
        what = f"{len(rows)} {status.replace('_', ' ')}"
        lines.append(f"{what}: {kernel}: {_reason(rows[0]['detail'])}{config}")
    hidden = len(lines) - MAX_REASONS
    return lines[:MAX_REASONS] + ([f"and {hidden} more causes"] if hidden > 0 else [])


def _absent_baselines(section: _Section) -> list[str]:
    return [
        f"baseline {_who(row)} {row['status'].replace('_', ' ')}: "
        f"{_reason(row['detail']) or 'no reason given'}"
        for row in section.rows
        if row["baseline"] and not row["rank"]
    ]


def _recorded_lines(section: _Section) -> list[str]:
    return [f"† recorded on {origin}, not measured in this run" for origin in _origins(section)]


# -- tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of numbers. digits: significant ones of its smallest value; else `form` decides."""

    name: str
    header: str
    digits: int = 0
    form: Callable[[Any], str] = "{}".format

    def cells(self, rows: Sequence[Row], decimals: int | None = None) -> list[str]:
        values = [row[self.name] for row in rows]
        if self.digits:
            places = _decimals(values, self.digits) if decimals is None else decimals
            return [NONE if value is None else f"{value:.{places}f}" for value in values]
        return [NONE if value is None else self.form(value) for value in values]


def _decimals(values: Iterable[float | None], digits: int) -> int:
    """Decimals that give the smallest value so many significant digits; at most 5."""
    smallest = min((value for value in values if value), default=1.0)
    return min(5, max(0, digits - 1 - math.floor(math.log10(smallest))))


_TIME = _Column("time_us", "µs", 4)
# In order of what is given up last where a terminal is narrow. Rates and shares are the time in
# other units, so what a row knows besides (spread, registers, memory) outlives most of them.
_BY_NEED = [
    _TIME,
    _Column("ratio_to_best_baseline", "× base", form="{:.2f}".format),
    _Column("spread_us", "±", 4),
    _Column("tflops", "TFLOP/s", 3),
    _Column("registers", "regs"),
    _Column("smem_bytes", "smem", form=lambda nbytes: f"{nbytes / 1024:.0f}K"),
    _Column("us_per_head", "µs/head", 3),
    _Column("bound_share", "% bound", form=lambda share: f"{100 * share:.0f}"),
    _Column("rel_err", "error", form="{:.1e}".format),
    _Column("spill_bytes", "spill B"),
    _Column("cold_us", "cold µs", 4),
    _Column("eager_us", "eager µs", 3),
    _Column("occupancy", "occ %", form=lambda share: f"{100 * share:.0f}"),
]
_LESS_THAN_NAMES = ("spill_bytes", "cold_us", "eager_us", "occupancy")
_ORDER = [
    "time_us", "spread_us", "ratio_to_best_baseline", "us_per_head", "tflops", "bound_share",
    "rel_err", "registers", "smem_bytes", "spill_bytes", "cold_us", "eager_us", "occupancy",
]  # fmt: skip


def _configs(rows: Sequence[Row], *, names: bool) -> tuple[list[str], list[str]]:
    """The config cells, with only what differs within a family, and a legend line per family."""
    families: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        if not row["baseline"]:
            families.setdefault(row["kernel"], []).append(row["trial"].config)
    differing = {
        kernel: [name for name in configs[0] if len({str(c.get(name)) for c in configs}) > 1]
        for kernel, configs in families.items()
    }
    cells = []
    for row in rows:
        config = row["trial"].config
        if row["baseline"]:
            cells.append("baseline")
            continue
        own = {name: config.get(name, NONE) for name in differing[row["kernel"]]}
        cell = named(own) if names else "/".join(map(value_text, own.values()))
        cells.append(cell or ("(below)" if config else NONE))
    legend = []
    for kernel, configs in families.items():
        always = named({n: v for n, v in configs[0].items() if n not in differing[kernel]})
        parts = [] if names or not differing[kernel] else ["/".join(differing[kernel])]
        if always:
            parts.append(f"all {always}" if len(configs) > 1 else always)
        if parts:
            legend.append(f"{kernel}: {'; '.join(parts)}")
    return cells, legend


def _table(rows: Sequence[Row], width: int) -> tuple[list[str], list[str]]:
    """Lines of the table, the header first, no wider than `width`; and the legend of configs."""
    present = [c for c in _BY_NEED if any(row[c.name] is not None for row in rows)]
    if not any(row["spill_bytes"] for row in rows):
        present = [column for column in present if column.name != "spill_bytes"]
    decimals = _decimals((row["time_us"] for row in rows), _TIME.digits)
    number_cells = {
        column.name: [column.header, *column.cells(rows, decimals if column.digits == 4 else None)]
        for column in present
    }
    ranks = ["#", *(("*" if row["winner"] else "") + _place(row) for row in rows)]
    kernels = ["kernel", *map(_who, rows)]

    def room(config: Sequence[str], columns: Sequence[_Column]) -> int:
        cells = [ranks, kernels, config, *(number_cells[c.name] for c in columns)]
        return width - sum(max(map(cell_len, column)) + 2 for column in cells) + 2

    columns = list(present)
    chosen, legend = _configs(rows, names=True)
    while room(["config", *chosen], columns) < 0 and columns[-1].name in _LESS_THAN_NAMES:
        columns.pop()
    if room(["config", *chosen], columns) < 0:
        columns = list(present)
        chosen, legend = _configs(rows, names=False)
        while room(["config", *chosen], columns) < 0 and len(columns) > 1:
            columns.pop()
    kept = sorted((c.name for c in columns), key=_ORDER.index)
    cells = [ranks, kernels, ["config", *chosen], *(number_cells[name] for name in kept)]
    lines = list(zip(*cells, strict=True))
    return aligned(lines, "rll" + "r" * len(kept), width, shrink=(2, 1)), legend


def _figure(value: float, digits: int) -> str:
    """At least so many significant digits, never in powers of ten."""
    return f"{value:.{_decimals([value], digits)}f}"


def _summary(sections: Sequence[_Section]) -> list[list[str]]:
    """Header and a line a problem: winner, its time, the best baseline, the ratio."""
    lines = [["problem", "µs", "µs/head", "× base", "best baseline", "winner"]]
    for section in sections:
        won, best = section.winner, section.best_baseline
        lines.append(
            [
                section.problem.label,
                _figure(won["time_us"], 4) if won else NONE,
                _figure(won["us_per_head"], 3) if won else NONE,
                f"{won['ratio_to_best_baseline']:.2f}" if won and best else NONE,
                _who(best) if best else NONE,
                _who(won) if won else NONE,
            ]
        )
    return lines


# -- terminal and Markdown ------------------------------------------------------------------


def _terminal(section: _Section, width: int, top: int, more: str) -> list[tuple[str, str]]:
    """The section's lines, each no wider than `width`, with rich styles."""
    out = [(line, "bold") for line in wrap(" · ".join(_heading(section)), width)]

    def say(line: str | None, style: str = "") -> None:
        out.extend((part, style) for part in wrap(line or "", width))

    say(_bound_line(section), "dim")
    shown = section.shown(top)
    legend: list[str] = []
    if shown:
        (header, *lines), legend = _table(shown, width)
        out.append((header, "bold"))
        for row, line in zip(shown, lines, strict=True):
            style = "bold green" if row["winner"] else "cyan" if row["baseline"] else ""
            out.append((line, style))
    for line in _winner_lines(section):
        say(line, "bold" if section.winner else "bold red")
    say(_tie_line(section, shown))
    for line in legend:
        say(line, "dim")
    say(_rest_line(section, shown, more))
    for line in _failures(section):
        out.append((cut(line, width), "yellow"))
    for line in [*_absent_baselines(section), *_recorded_lines(section)]:
        say(line, "dim")
    return out


def to_markdown(
    ranking: pandas.DataFrame, environment: Environment | None, *, top: int = MARKDOWN_TOP
) -> str:
    """The same tables for reading on a web page; recorded rows are marked there too."""
    sections = _sections(ranking, environment)
    out = ["# Ranking", ""]
    if len(sections) > 1:
        out += [*_pipes(_summary(sections), "lrrrll"), ""]
    for section in sections:
        label, *facts = _heading(section)
        out += [f"## {label}", "", " · ".join(facts), ""]
        bound = _bound_line(section)
        out += [bound, ""] if bound else []
        shown = section.shown(top)
        legend: list[str] = []
        if shown:
            table, legend = _markdown_table(shown)
            out += [*table, ""]
        notes = [
            *_winner_lines(section),
            _tie_line(section, shown),
            *legend,
            _rest_line(section, shown, "all of them: ranking.csv"),
            *_failures(section),
            *_absent_baselines(section),
            *_recorded_lines(section),
        ]
        out += [f"- {_escaped(note.lstrip('*= '))}" for note in notes if note]
        out.append("")
    out.append(LEGEND)
    return "\n".join(out).replace(GLUE, " ").rstrip() + "\n"


def _markdown_table(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    columns = sorted(
        (c for c in _BY_NEED if any(row[c.name] is not None for row in rows)),
        key=lambda column: _ORDER.index(column.name),
    )
    decimals = _decimals((row["time_us"] for row in rows), _TIME.digits)
    numbers = [c.cells(rows, decimals if c.digits == 4 else None) for c in columns]
    configs, legend = _configs(rows, names=True)
    lines = [["#", "kernel", "config", *(column.header for column in columns)]]
    for index, row in enumerate(rows):
        who = f"**{_who(row)}**" if row["winner"] else _who(row)
        lines.append([_place(row), who, configs[index], *(cells[index] for cells in numbers)])
    return _pipes(lines, "rll" + "r" * len(columns)), legend


def _pipes(lines: Sequence[Sequence[str]], align: str) -> list[str]:
    rule = ["---:" if side == "r" else "---" for side in align]
    header, *body = [[_escaped(cell) for cell in line] for line in lines]
    return [f"| {' | '.join(cells)} |" for cells in [header, rule, *body]]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")

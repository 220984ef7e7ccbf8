"""Output of the commands next to the ranked tables: plans, families, compile results."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from attnsweep.baselines.registry import backend_of
from attnsweep.core.errors import errors_of
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Value
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import BLOCK_LIMITS, Family, Param
from attnsweep.family.params import text_of
from attnsweep.reports.terminal import GLUE, aligned, broken, counted, wrap
from attnsweep.specs.plan import PlannedProblem

# -- layout ---------------------------------------------------------------------------------

# A last column narrower than this moves to lines of its own.
_TAIL = 28


def said(text: str, width: int, style: str = "") -> list[Text]:
    """A sentence as lines of at most `width`; its own indent stays."""
    return [Text(line, style) for line in wrap(text, width)]


def _columns(
    rows: Sequence[Sequence[str]], align: str, width: int, drop: Sequence[int] = ()
) -> list[str]:
    """The rows as lines; columns of `drop` are left out, in that order, until the rest fits."""
    kept = list(range(len(align)))

    def lines() -> list[str]:
        picked = [[row[column] for column in kept] for row in rows]
        return aligned(picked, "".join(align[i] for i in kept), width)

    for column in drop:
        if max(map(cell_len, lines())) <= width:
            break
        kept.remove(column)
    return lines()


def with_tails(lines: Sequence[str], tails: Sequence[str], width: int) -> list[list[str]]:
    """Lines with a last column of words next to each, or below it if there is no room.

    What GLUE holds together is broken only where it is wider than the column.
    """
    column = max(map(cell_len, lines)) + 2
    beside = width - column >= min(_TAIL, max(map(cell_len, tails)))
    out = []
    for line, tail in zip(lines, tails, strict=True):
        indent = column if beside else 4
        room = max(8, width - indent)
        if cell_len(tail) > room:
            words = tail.split(" ")
            tail = " ".join(w if cell_len(w) <= room else w.replace(GLUE, " ") for w in words)
        parts = broken(tail, room, break_long_words=False)
        padded = [" " * indent + part for part in parts]
        if beside and padded:
            line, padded = line.ljust(column) + padded[0][column:], padded[1:]
        out.append([line, *padded])
    return out


def table(
    rows: Sequence[Sequence[str]],
    align: str,
    tails: Sequence[str],
    width: int,
    *,
    drop: Sequence[int] = (),
    styles: Sequence[str] = (),
) -> list[Text]:
    """Rows in columns, each with its tail of words. styles: of the first rows."""
    blocks = with_tails(_columns(rows, align, width, drop), tails, width)
    return [
        Text(line, style)
        for block, style in itertools.zip_longest(blocks, styles, fillvalue="")
        for line in block
    ]


# -- run --dry-run --------------------------------------------------------------------------


def planned(
    items: Sequence[PlannedProblem], limit: int | None, width: int, *, values: bool = False
) -> list[Text]:
    """Per problem and family: number of configs and candidates, and what each rule removed.

    values: also those that each parameter has in candidates.
    """
    rows, tails, total = [["kernel", "configs", "candidates"]], ["removed by"], 0
    problems, styles = [], []
    for item in items:
        for space in item.spaces:
            removed = [f"{rule}{GLUE}{n}" for rule, n in space.removed.items() if n]
            if space.excess:  # BLOCK_LIMITS is the last rule
                removed[-1] += f" ({space.excess_text})"
            kept = min(len(space.configs), limit or len(space.configs))
            total += kept
            rows.append([space.kernel.name, str(space.total), str(kept)])
            tails.append(", ".join(removed))
        for name, reason in item.refused.items():
            rows.append([name, "-", "0"])
            tails.append(reason)
        problems += [item.problem.label] * (len(item.spaces) + len(item.refused))
        styles += [""] * len(item.spaces) + ["dim"] * len(item.refused)
    blocks = with_tails(_columns(rows, "lrr", width), tails, width)
    out = _grouped(problems, blocks, width, styles)
    out += said(f"{counted(total, 'candidate')}; nothing was compiled", width)
    every = [space for item in items for space in item.spaces]
    if values:
        of_params: dict[str, dict[str, dict[Value, None]]] = {}
        for space, config in ((s, c) for s in every for c in s.configs[:limit]):
            for name, value in config.items():
                of_params.setdefault(space.kernel.name, {}).setdefault(name, {})[value] = None
        for kernel_name, params in of_params.items():
            told = (f"{name} {', '.join(map(text_of, own))}" for name, own in params.items())
            out += said(f"{kernel_name}: {' · '.join(told)}", width)
    broken = {(s.kernel.name, rule) for s in every for rule, n in s.removed.items() if n}
    for name, kernel in {space.kernel.name: space.kernel for space in every}.items():
        for rule, (description, _) in kernel.rules.items():
            if (name, rule) in broken:
                out += said(f"{name}.{rule}: {description}", width, "dim")
    of_modes = {
        rule: text for s in every for rule, text in s.kernel.mode_rules.items() if rule in s.removed
    }
    for rule, description in of_modes.items():
        out += said(f"{rule}: {description}", width, "dim")
    return out


# -- list -----------------------------------------------------------------------------------


def overview(kernels: Mapping[str, Family], baselines: Iterable[str], width: int) -> list[Text]:
    """A line for each family, then the modes and the baselines, and how to get each."""
    rows = [[kernel.name, kernel.archs_text, kernel.summary] for kernel in kernels.values()]
    out = [Text(line) for line in aligned(rows, "lll", width, shrink=(2,))]
    for text, (first, *_) in zip(out, rows, strict=True):
        text.stylize("bold", 0, len(first))
    out += [Text("attnsweep list NAME: its parameters and rules", "dim"), Text()]
    out += _titled("modes", "for every family, if a spec names them", width)
    out += _parameters(_of_params(_modes(kernels)), width)
    baselines = list(baselines)
    out += [Text(), *_titled("baselines", ", ".join(baselines), width)]
    fixes: dict[str, list[str]] = {}
    for name, fix in _missing(baselines).items():
        fixes.setdefault(fix, []).append(name)
    for fix, names in fixes.items():
        out += said(f"  not installed: {', '.join(names)}: {fix}", width)
    return out


def families(kernels: Mapping[str, Family], width: int) -> list[Text]:
    """Every family with its parameters and rules."""
    out: list[Text] = []
    for kernel in kernels.values():
        out += _titled(kernel.name, kernel.summary, width)
        out += said(
            f"  {kernel.archs_text} · {', '.join(kernel.dtypes)} · "
            f"head_dim {kernel.head_dims_text} · stages {', '.join(kernel.stages)}",
            width,
        )
        rows = _of_params(kernel.params)
        rows += [(f"  {name}", "rule", text) for name, (text, _) in kernel.rules.items()]
        rows += [("  serves only", "rule", text) for text in kernel.served_text]
        out += _parameters(rows, width)
        out.append(Text())
    return out + said(
        f"{BLOCK_LIMITS}: threads, shared memory and grid of every family stay within the "
        "architecture's limits",
        width,
        "dim",
    )


def _of_params(params: Iterable[Param]) -> list[tuple[str, str, str]]:
    return [(f"  {p.name}", ", ".join(map(str, p.values)), p.help) for p in params]


def _parameters(rows: Sequence[tuple[str, str, str]], width: int) -> list[Text]:
    """Name, values and meaning, in columns if there is room."""
    if not rows:
        return []
    names = [row[:2] for row in rows]
    tails = [text for _, _, text in rows]
    if max(map(cell_len, _columns(names, "ll", width))) + 2 + _TAIL <= width:
        return table(names, "ll", tails, width)
    tails = [f"{values}: {text}" for _, values, text in rows]
    return table([row[:1] for row in rows], "l", tails, width)


def _titled(name: str, text: str, width: int) -> list[Text]:
    first, *rest = said(f"{name}  {text}", width)
    first.stylize("bold", 0, len(name))
    return [first, *rest]


def families_json(kernels: Mapping[str, Family], baselines: Iterable[str]) -> dict[str, Any]:
    """The families, modes and baselines as data; missing_baselines: name to how to get it."""
    baselines = list(baselines)
    return {
        "kernels": [
            {
                "name": kernel.name,
                "summary": kernel.summary,
                "source": str(kernel.source),
                "min_arch": kernel.min_arch,
                "dtypes": kernel.dtypes,
                "head_dims": list(kernel.head_dims),
                "head_dims_v": list(kernel.head_dims_v),
                "order": kernel.order,
                "stages": list(kernel.stages),
                "params": [
                    {"name": p.name, "values": p.values, "help": p.help} for p in kernel.params
                ],
                "rules": {name: description for name, (description, _) in kernel.rules.items()},
            }
            for kernel in kernels.values()
        ],
        "modes": [{"name": p.name, "values": p.values, "help": p.help} for p in _modes(kernels)],
        "baselines": list(baselines),
        "missing_baselines": _missing(baselines),
    }


def _modes(kernels: Mapping[str, Family]) -> list[Param]:
    """The modes of the families, each once."""
    return [*dict.fromkeys(mode for kernel in kernels.values() for mode in kernel.modes)]


def _missing(baselines: Iterable[str]) -> dict[str, str]:
    """Each baseline whose package is not installed here, and how to get it."""
    packages = {name: backend_of(name).package for name in baselines}
    return {name: p.fix for name, p in packages.items() if p.names and not p.installed()}


# -- compile --------------------------------------------------------------------------------


def compiled(trials: Sequence[Trial], arch: Arch, every: bool, width: int) -> list[Text]:
    """Resources per family and stage (or per candidate), and reasons of those that are not ok."""
    out = _each(trials, width) if every else _by_stage(trials, width)
    counts = Counter(trial.status.value for trial in trials)
    out += said(
        f"{counted(len(trials), 'candidate')} for {arch.name}: "
        + ", ".join(f"{n} {status}" for status, n in counts.most_common())
        + "; nothing was timed",
        width,
    )
    reasons: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        if trial.status is not Status.OK:
            first = ((trial.detail or "").splitlines() or [""])[0]
            reasons.setdefault((trial.kernel, trial.status.value, first), []).append(trial)
    for (kernel, status, reason), those in sorted(reasons.items(), key=lambda i: -len(i[1]))[:12]:
        lines = []
        if status == Status.COMPILE_ERROR:
            lines = errors_of(trial.detail for trial in those)
        why = "" if reason in lines else f" {reason}"
        out += said(f"  {len(those)} × {kernel} {status}:{why}", width)
        out += [Text(f"    {line}") for line in lines]
    return out


def counters(kept: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    """A heading per candidate and a line per stage: traffic, use of units, why warps waited."""
    out: list[Text] = []
    header = ["stage", "µs", "DRAM MB", "L2 MB", "L2 hit", "tensor", "exp2", "issue"]
    for facts in kept:
        config = " ".join(f"{name}={value}" for name, value in facts["config"].items())
        out += said(f"{facts['problem']} · {facts['kernel']} · {facts['where']}", width, "bold")
        out += said(config, width, "dim")
        rows, tails = [header], ["warps waited for"]
        for stage in facts["stages"]:
            read = partial(_figure, stage["figures"])
            traffic = [
                "+".join(read(f"{of}_{way}_bytes", "{:.1f}", 1e6) for way in ("read", "write"))
                for of in ("dram", "l2")
            ]
            shares = ("l2_hit_percent", "tensor_percent", "exp2_percent", "issue_percent")
            each = (*traffic, *(read(share, "{:.0f} %") for share in shares))
            rows.append([stage["stage"], read("duration_us", "{:.1f}"), *each])
            worst = list(stage["stalls"].items())[:3]
            tails.append(", ".join(f"{why}{GLUE}{warps:.1f}" for why, warps in worst))
        out += table(rows, "l" + "r" * (len(header) - 1), tails, width, drop=(6, 4))
    out += said(
        "traffic is read+written · a launch runs alone here, so its time differs from a sweep's · "
        "warps waited for: warps in that state per instruction issued",
        width,
        "dim",
    )
    return out


def _figure(figures: Mapping[str, float], name: str, form: str, unit: float = 1) -> str:
    return form.format(figures[name] / unit) if name in figures else "–"


def _range(values: Sequence[float], form: str = "{:.0f}") -> str:
    low, high = (form.format(edge) for edge in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _grouped(
    problems: Sequence[str], blocks: Sequence[Sequence[str]], width: int, styles: Sequence[str] = ()
) -> list[Text]:
    """The blocks of lines under a heading per problem; the first block is the header."""
    header, *body = blocks
    out: list[Text] = []
    rows = zip(problems, body, styles or [""] * len(body), strict=True)
    for problem, group in itertools.groupby(rows, key=lambda row: row[0]):
        out += [*said(problem, width, "bold"), *(Text(line, "bold") for line in header)]
        out += [Text(line, style) for _, block, style in group for line in block]
    return out


def _by_stage(trials: Sequence[Trial], width: int) -> list[Text]:
    """A heading and a table per problem: the range of each resource over a stage's candidates."""
    groups: dict[str, dict[tuple[str, str], list[dict[str, float]]]] = {}
    limits: dict[int, str] = {}
    for trial in trials:
        for stage, facts in (trial.resources.stages if trial.resources else {}).items():
            stages = groups.setdefault(trial.problem.label, {})
            stages.setdefault((trial.kernel, stage), []).append(facts)
            used = trial.resources
            limits[id(facts)] = used.limiters.get(stage, "-") if used is not None else "-"
    problems = [problem for problem, stages in groups.items() for _ in stages]
    names = ("registers", "spill_bytes", "smem_bytes", "blocks_per_sm")
    header = "kernel,stage,candidates,registers,spill B,smem B,blocks/SM,occupancy,limited by,cubin"
    rows = [header.split(",")]
    for stages in groups.values():
        for (kernel, stage), facts_ in stages.items():
            ranges = [_range([facts[name] for facts in facts_]) for name in names]
            share = _range([100 * facts["occupancy"] for facts in facts_]) + " %"
            limited = "/".join(dict.fromkeys(limits[id(facts)] for facts in facts_))
            sizes = [facts["cubin_bytes"] / 1024 for facts in facts_ if "cubin_bytes" in facts]
            cubin = f"{_range(sizes)}K" if sizes else "-"
            rows.append([kernel, stage, str(len(facts_)), *ranges, share, limited, cubin])
    lines = _columns(rows, "llrrrrrrlr", width, drop=(6, 9, 2, 8, 5, 7))
    return _grouped(problems, [[line] for line in lines], width)


def _each(trials: Sequence[Trial], width: int) -> list[Text]:
    """A heading per problem, and a line per candidate."""
    order = {problem: n for n, problem in enumerate(dict.fromkeys(t.problem for t in trials))}
    trials = sorted(trials, key=lambda trial: order[trial.problem])  # stable
    header = "kernel,status,registers,spill B,smem B,occupancy,limited by,cubin"
    rows = [header.split(",")]
    for trial in trials:
        used = trial.resources
        facts = ["-"] * 6
        if used is not None:
            facts = [str(used.registers), str(used.spill_bytes), str(used.smem_bytes)]
            facts.append(f"{100 * used.occupancy:.0f} %")
            least = [n for n, s in used.stages.items() if s.get("occupancy") == used.occupancy]
            facts.append(used.limiters.get(least[0], "-") if least else "-")
            sizes = [stage.get("cubin_bytes", 0) for stage in used.stages.values()]
            facts.append(f"{sum(sizes) / 1024:.0f}K")
        rows.append([trial.kernel, trial.status.value, *facts])
    configs = [" ".join(f"{name}={value}" for name, value in t.config.items()) for t in trials]
    lines = _columns(rows, "llrrrrlr", width, drop=(7, 6, 4, 5))
    blocks = with_tails(lines, ["config", *configs], width)
    return _grouped([trial.problem.label for trial in trials], blocks, width)

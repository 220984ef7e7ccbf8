"""One HTML page of a run: tables in its text, plots drawn by Vega-Lite in the reader's browser.

Everything is inside the one file: it opens without a network, and its own security policy forbids
one. Vega-Lite comes from the `vl-convert-python` package; this repository holds no copy. Needs no
GPU and no CUDA. Times are microseconds of one call.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from attnsweep import __version__
from attnsweep.choose.columns import Row, light_text, named, value_text
from attnsweep.choose.effects import axes_of, effects, percents
from attnsweep.compile.nvrtc import default_cache_dir
from attnsweep.core.errors import ToolchainError
from attnsweep.core.files import install_command, write_file
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.reports import gains
from attnsweep.reports import text as texts
from attnsweep.reports.sections import Section, kernels_of, sections_of
from attnsweep.reports.tables import config_changes, legend_of, table
from attnsweep.reports.terminal import GLUE
from attnsweep.reports.text import figure, ratio_text, who
from attnsweep.store.outputs import check_output, write_output
from attnsweep.store.run import Run

ASSETS = Path(__file__).parent / "assets"
# Most rows of all tables together: 0.5 MB of HTML. With many tables, each has fewer rows.
_MAX_ROWS = 1500
# Up to this many problems have their tables in the page's text; the tables of later ones are
# packed, because 1,000 would take 5 MB.
_INLINE = 60
# Columns of numbers before a table's configs: time, its spread, × base, its interval.
_BEFORE = 4
# Most reasons listed per problem.
_MAX_REASONS = 40


def write(run: Run, path: Path, *, top: int = 10, target_us: float | None = None) -> int:
    """Write the page of `run` to `path`, in one step, and return its size in bytes.

    top: candidates per ranked table, fewer if there are many problems. target_us: reference time
    for the ladder (default: each problem's fastest baseline known). Raises ToolchainError if the
    packages of the `html` extra are missing, StoreError if `path` cannot be written.
    """
    check(path)
    write_output(path, render(run, top=top, target_us=target_us))
    return path.stat().st_size


def check(path: Path) -> None:
    """Raise what `write` would raise, before the work that the page is about.

    ToolchainError without the `html` extra, StoreError if `path` cannot be written.
    """
    _jinja()
    _library_at()
    check_output(path)


def _jinja() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ToolchainError("an HTML page needs Jinja2", hint=install_command("html")) from error
    return jinja2


# vl-convert holds a whole JavaScript engine: 80 MB that stay out of this process.
_BUNDLE = """
import sys, vl_convert
bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
sys.stdout.buffer.write(bundle.encode())
"""


def _library_at() -> Path:
    """Where the library of plots is kept, by the version of what makes it."""
    try:
        version = metadata.version("vl-convert-python")
    except metadata.PackageNotFoundError as error:
        what = "an HTML page needs Vega-Lite, from vl-convert-python"
        raise ToolchainError(what, hint=install_command("html")) from error
    return default_cache_dir() / "page" / f"vega-{version}.js"


def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `window.vegaEmbed`."""
    kept = _library_at()
    with suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    made = subprocess.run([sys.executable, "-c", _BUNDLE], capture_output=True, check=False)
    if made.returncode:
        last = made.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        what = f"vl-convert failed: {last[0] if last else 'no message'}"
        raise ToolchainError(what, hint=install_command("html"))
    text = made.stdout.decode().replace("</script", "<\\/script")
    with suppress(OSError):  # a cache only saves time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_file(kept, text.encode())
    return text


def render(run: Run, *, top: int = 10, target_us: float | None = None) -> str:
    """The page's text; the same run gives the same text."""
    jinja2 = _jinja()
    sections = sections_of(run)
    per_problem = max(1, min(top, _MAX_ROWS // max(1, len(sections)) - 8))
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    one = templates.get_template("problem.html")
    # The families of the ladder in the spec's order, then others as they appear.
    families = dict.fromkeys(kernels_of(run.spec_text), False)
    problems: list[dict[str, Any]] = []

    def each() -> Iterator[Section]:
        """The sections; each is told as soon as its data are, while its rows are at hand."""
        for section in sections:
            yield section
            there = (row["kernel"] for row in section.in_order if not row["baseline"])
            families.update(dict.fromkeys(there, True))
            problems.append(_problem(section, per_problem, [*families], target_us))

    with ThreadPoolExecutor(2) as beside:  # zlib leaves the interpreter to the rest of this
        plots = beside.submit(_library)
        pack = zlib.compressobj(6, wbits=31)  # 9 takes four times as long for 8 % less
        data = _json(data_of(each(), run.spec_text))
        packed = beside.submit(pack.compress, b'{"run":' + data)
        rungs = [name for name, tried in families.items() if tried]
        ladder = {"is_ladder": all(name.startswith("ladder_") for name in rungs[1:])}
        problems = [problem | ladder for problem in problems]
        later = [one.render(p=p, index=i) for i, p in enumerate(problems) if i >= _INLINE]
        rest = packed.result() + pack.compress(b',"problems":' + _json(later) + b"}")
    page: str = templates.get_template("page.html").render(
        run=run,
        name=run.directory.resolve().name,
        environment=run.environment,
        facts=_provenance(run),
        counts=Counter(row["status"] for s in sections for row in s.candidates),
        candidates=sum(len(section.candidates) for section in sections),
        problems=problems,
        gains=_gains(sections, run),
        version=__version__,
        styles=(ASSETS / "page.css").read_text(encoding="utf-8"),
        plots=plots.result(),
        script="".join(
            (ASSETS / name).read_text(encoding="utf-8") for name in ("sort.js", "page.js")
        ),
        inline=_INLINE,
        # A tenth of the size for 10,000 candidates, and no `<` to escape.
        packed=base64.b64encode(rest + pack.flush()).decode(),
    )
    return page


def _json(data: object) -> bytes:
    from pydantic_core import to_json  # json.dumps takes six times as long

    return to_json(data, inf_nan_mode="constants")


# -- the template's data --------------------------------------------------------------------


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Name and value of where, with what and when the run was measured."""
    where = run.environment
    if where is None:
        return []
    facts = [
        ("GPU", where.gpu),
        ("architecture", where.arch),
        ("driver", where.driver),
        ("CUDA", where.cuda),
        ("NVRTC", where.nvrtc),
        ("measured", where.date.replace("T", " ").replace("Z", " UTC")),
        ("SMs", f"{where.sm_count}"),
        ("clock", f"{where.clock_hz / 1e6:.0f} MHz"),
        ("memory", f"{where.memory_bytes / 2**30:.0f} GiB"),
        ("memory rate", f"{where.memory_bytes_per_second / 1e12:.2f} TB/s"),
        ("L2", f"{where.l2_bytes / 2**20:.0f} MiB"),
        ("host cores", f"{where.host_cores}"),
        ("attnsweep", where.attnsweep),
        ("Python", where.python),
    ]
    return facts + sorted(where.packages.items())


def _problem(
    section: Section, top: int, rungs: Sequence[str], target_us: float | None
) -> dict[str, Any]:
    label, *facts = texts.heading(section)
    shown = section.shown(top)
    lines, _, legend = table(section, shown) if shown else ([], "", [])
    for cells, changes in zip(lines[1:], config_changes(section, shown), strict=True):
        cells[2] = changes or cells[2]
    won, best = section.winner, section.best_baseline
    below = texts.notes(section, shown, "the list below has all of them")
    said = [note for note, _, errors in below[1 if won else 0 :] if errors is None]
    lines_of_bound = [texts.bound_line(section), texts.conditions_line(section)]
    return {
        "label": label,
        "facts": " · ".join(facts),
        "lines": [_plain(line) for line in lines_of_bound if line],
        "winner": won and {**won, "who": who(won), "key": _key_figures(section, won)},
        "best": best and {**best, "who": who(best)},
        "faster_baseline": texts.faster_baseline(section),
        "ratio": won["ratio_to_best_baseline"] if won and best and not section.lost else None,
        "lost": section.lost,
        "ratio_text": ratio_text(won, name=False) if won else None,
        "header": _in_order(lines[0]) if lines else [],
        "rows": [
            (
                _in_order(cells),
                "winner" if row["winner"] else "baseline" * row["baseline"],
                row["config"],
            )
            for row, cells in zip(shown, lines[1:], strict=True)
        ],
        "legend": [*legend, " · ".join(legend_of(lines[0], lines[1:]))] if lines else [],
        "notes": [_plain(note.lstrip("*= ")) for note in said],
        "candidates": len(section.candidates),
        "reasons": _reasons(section),
        "ladder": _ladder(section, rungs, target_us),
        "ruled_out": _ruled_out(section),
    }


def _gains(sections: Sequence[Section], run: Run) -> dict[str, Any] | None:
    """The table of a program's gains: header, rows and total, and its sentences."""
    found = gains.gains(sections, run.spec_text)
    if found is None:
        return None
    header, *rows, total = gains.table(found)
    said = [_plain(line).strip() for line in gains.sentences(found)]
    sides = ["r" if side == "r" else "" for side in gains.ALIGN]
    return {"header": header, "rows": rows, "total": total, "said": said, "sides": sides}


def _in_order(cells: Sequence[str]) -> list[str]:
    """Rank, kernel, the first numbers, config, the rest: a narrow window shows the first cells."""
    rank, kernel, config, *numbers = cells
    return [rank, kernel, *numbers[:_BEFORE], config, *numbers[_BEFORE:]]


def _plain(line: str) -> str:
    return line.replace(GLUE, " ")


def _key_figures(section: Section, row: Row) -> list[tuple[str, str]]:
    """The figures shown first for a winner: each figure and its meaning."""
    best = section.best_baseline
    out = [(f"{figure(row['time_us'], 4)} µs", "a call")]
    if best is not None and row["ratio_of"] is not None and section.lost is None:
        interval = ratio_text(row, name=False).partition("×")[2]
        shown = ratio_text(row, name=False, interval=False)
        out.append((shown, f"the speed of {who(best)}{interval}"))
    if row["light"] is not None:
        share, _, of = light_text(row).partition(" of ")
        out.append((share, f"of {of}"))
    out += [
        (f"{figure(row['tflops'], 3)} TFLOP/s", "without masked scores"),
        (f"{figure(row['us_per_head'], 3)} µs", "a head"),
    ]
    if section.problem.batch > 1:
        out.append((f"{figure(row['us_per_sequence'], 3)} µs", "a sequence"))
    if row.facts.chained_us is not None:
        out.append((f"{figure(row['trial'].chained_us, 3)} µs", "chained, not ranked"))
    return out


def _reasons(section: Section) -> list[dict[str, Any]]:
    """The reasons why candidates have no rank: one entry per status, family and cause.

    Reasons that differ only in their numbers have one cause, and the first of them stands for it.
    """
    groups = texts.causes([row for row in section.rows if row["status"] != Status.OK])
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    out = [
        {
            "status": status.replace("_", " "),
            "kernel": kernel,
            "reason": reason_of(rows[0]) or "no reason given",
            "count": len(rows),
            "config": named(own_settings(section, rows[0])) or rows[0]["config"],
        }
        for (status, kernel, _), rows in ordered[:_MAX_REASONS]
    ]
    rest = ordered[_MAX_REASONS:]
    if rest:
        count = sum(len(rows) for _, rows in rest)
        reason = f"{len(rest)} more reasons in the list of every candidate"
        out.append({"status": "…", "kernel": "", "reason": reason, "count": count, "config": ""})
    return out


def _ruled_out(section: Section) -> list[dict[str, Any]]:
    """Configs that were no candidates, from the run's spaces: an entry per family, by its rules."""
    out = []
    for facts in section.spaces:
        removed = facts.get("removed") or {}
        words = ", ".join(f"{rule} {count:,}" for rule, count in removed.items() if count)
        refused = facts.get("refused")
        if words or refused:
            out.append(
                {
                    "kernel": facts.get("kernel"),
                    "configs": facts.get("configs"),
                    "candidates": facts.get("candidates"),
                    "why": f"cannot run this: {refused}" if refused else words,
                }
            )
    return out


def _ladder(section: Section, rungs: Sequence[str], target_us: float | None) -> dict[str, Any]:
    """The best of each family in the given order, and its distance to the target."""
    best = section.best_baseline
    target, of = target_us, "the given target"
    if target is None and best is not None:
        fastest = "" if section.lost else ", the fastest baseline known"
        target, of = best["time_us"], f"{who(best)}{fastest}"
    rows = {row["kernel"]: row for row in section.best_of_families}
    steps: list[dict[str, Any]] = []
    before: float | None = None
    for kernel in rungs:
        mine = [row for row in section.candidates if row["kernel"] == kernel]
        if not mine:
            continue
        step: dict[str, Any] = {"who": kernel, "us": None, "tried": len(mine)}
        steps.append(step)
        row = rows.get(kernel)
        if row is None:
            step["failed"] = ", ".join(
                f"{n} {status.replace('_', ' ')}"
                for status, n in Counter(row["status"] for row in mine).most_common()
            )
            continue
        us = row["time_us"]
        used = row.facts.resources
        stages = [*used.stages.values()] if used is not None else []
        size = _sum_of(stages, "cubin_bytes")
        step |= {
            "who": who(row),
            "us": figure(us, 4),
            "config": row["config"],
            "registers": row["registers"],
            "spill_bytes": row["spill_bytes"],
            "cubin": None if size is None else f"{size / 1024:.0f}K",
            "branches": _sum_of(stages, "predicated_branches"),
            "gain": None if before is None else _times(before / us),
            "distance": None if target is None else _distance(us, target),
            "met": target is not None and us <= target,
            "share": None if target is None else min(1.0, target / us),
        }
        before = us if before is None else min(before, us)
    return {
        "steps": steps,
        "has_branches": any(step.get("branches") is not None for step in steps),
        "target": None if target is None else f"{figure(target, 4)} µs",
        "of": of,
    }


def _sum_of(stages: Sequence[Mapping[str, float]], measure: str) -> int | None:
    """Sum of a measure over the stages; None if a stage lacks it."""
    if not stages or any(measure not in stage for stage in stages):
        return None
    return int(sum(stage[measure] for stage in stages))


def _distance(us: float, target: float) -> str:
    """`2.13×`, `3.1 % over`, or a text that the target is met."""
    if us <= target:
        return f"met, {100 * (1 - us / target):.1f} % below"
    return _times(us / target) if us > 1.1 * target else f"{100 * (us / target - 1):.1f} % over"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{figure(ratio, 3)}×"


# Most bars of the stage breakdown; most characters of a reason.
_MAX_STAGES = 10
_REASON_LENGTH = 200


def reason_of(row: Row) -> str:
    """The first line of a row's detail, cut."""
    return texts.first_line(row["detail"])[:_REASON_LENGTH]


Settings = Mapping[str, Value]


def data_of(sections: Iterable[Section], spec_text: str | None = None) -> dict[str, Any]:
    """The run for the page's script: every candidate as one short array.

    The axes of a spec's variants are parameters too, with the name of the variant as value. trials:
    [problem, kernel, status, µs or null, index of its reason or null, [value of each parameter]];
    the first three are indices too. Sections are taken once, one after another.
    """
    families = kernels_of(spec_text)
    kernels: dict[str, dict[str, None]] = {}
    last: dict[str, tuple[str, ...]] = {}
    statuses: dict[str, int] = {}
    reasons: dict[str, int] = {}
    problems, trials = [], []
    # Rows share equal configs, and a family's parameters are known after its last row.
    known: dict[tuple[str, int, int], tuple[Settings, Settings, list[Value | None]]] = {}
    for index, section in enumerate(sections):
        for row in section.candidates:
            trial, kernel, reason = row.facts, row["kernel"], reason_of(row)
            if (names := (*trial.variant, *trial.config)) != last.get(kernel):
                kernels.setdefault(kernel, {}).update(dict.fromkeys(names))
                last[kernel] = names
            key = (kernel, id(trial.variant), id(trial.config))
            if key not in known:
                known[key] = trial.variant, trial.config, []
            trials.append(
                [
                    index,
                    kernel,
                    statuses.setdefault(row["status"], len(statuses)),
                    short(row["time_us"]) if row["rank"] else None,
                    reasons.setdefault(reason, len(reasons)) if reason else None,
                    known[key][-1],
                ]
            )
        in_order = [row.facts for row in section.in_order]
        problems.append(_drawn(section, families) | {"search": best_so_far(in_order)})
    for (kernel, *_), (variant, config, values) in known.items():
        own = {**variant, **config}
        values += [
            value_text(value) if (value := own.get(name)).__class__ is bool else value
            for name in kernels[kernel]
        ]
    number = {kernel: index for index, kernel in enumerate(kernels)}
    for each in trials:
        each[1] = number[each[1]]
    return {
        "problems": problems,
        "kernels": [{"name": name, "params": [*params]} for name, params in kernels.items()],
        "statuses": [*statuses],
        "reasons": [*reasons],
        "trials": trials,
    }


def _drawn(section: Section, families: Mapping[str, Any]) -> dict[str, Any]:
    """One problem: size, bounds, baselines, the stages of its best pipelines, and effects."""
    problem: Problem = section.problem
    bests = {id(row) for row in section.best_of_families}
    in_stages = [row for row in section.ranked if row.facts.stages_us]
    first = [row for row in in_stages if id(row) in bests]
    others = [row for row in in_stages if id(row) not in bests]
    staged = sorted([*first, *others][:_MAX_STAGES], key=lambda row: float(row["time_us"]))
    binds = next((row["bound"] for row in section.rows if row["bound"]), None)
    return {
        "label": problem.label,
        "axes": problem.facts,
        "flops": problem.flops,
        "bytes": problem.min_bytes,
        "bounds": {unit: short(us) for unit, us in section.bounds_us.items()},
        "binds": binds,
        "baselines": [
            _baseline(row) for row in section.ranked if row["baseline"] or id(row) in bests
        ],
        "effects": _effects(section, families),
        "frontier": texts.frontier_points(section),
        "staged": [
            {
                "who": who(row),
                "config": named(own_settings(section, row)) or row["config"],
                "us": short(row["time_us"]),
                "launches": short(row["launch_us"]),
                "stages": {n: short(us) for n, us in row.facts.stages_us.items()},
            }
            for row in staged
        ],
    }


def _effects(section: Section, families: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which parameters of the best family mattered: see choose.effects. None without a winner."""
    won = section.winner
    if won is None:
        return None
    trials = [row.facts for row in section.candidates if row["kernel"] == won["kernel"]]
    found = effects(trials, won.facts, axes_of((families.get(won["kernel"]) or {}).get("variants")))
    *whole, rest = percents(found)
    told = [
        asdict(effect) | {"percent": None if effect.share is None else percent}
        for effect, percent in zip(found, whole, strict=True)
    ]
    return {"kernel": won["kernel"], "parameters": told, "rest": rest}


def own_settings(section: Section, row: Row) -> Mapping[str, object]:
    """The settings in which a config differs from others of its family."""
    config = row.facts.config
    names = section.differing.get(row["kernel"], [])
    return {name: config[name] for name in names if name in config}


def _baseline(row: Row) -> dict[str, Any]:
    time = row.facts.time_us
    return {
        "who": who(row),
        "kind": "winner" if row["winner"] else "baseline" if row["baseline"] else "kernel",
        "us": short(row["time_us"]),
        "low": short(time.low),
        "high": short(time.high),
        "cold": short(row["cold_us"]),
        "eager": short(row["eager_us"]),
        "chained": short(row.facts.chained_us),
        "config": row["config"],
    }


def short(value: float | None) -> float | None:
    """Five significant digits, more than any plot shows."""
    return None if value is None else float(f"{value:.5g}")


def best_so_far(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The falling curve of a family's best first time, ending at its last candidate.

    trials: rows of one problem, in the order of the file, which is the order of first appearance.
    Times are first times in microseconds: those of rounds come after the search. `s`: the seconds
    of the search, unless the row is of before they were kept.
    """
    best: dict[str, float] = {}
    number: dict[str, int] = {}
    points, ends = [], {}
    for trial in trials:
        if trial.provider != OURS:
            continue
        number[trial.kernel] = number.get(trial.kernel, 0) + 1
        us = trial.screened_us
        if us is not None and us < best.get(trial.kernel, float("inf")):
            best[trial.kernel] = us
            points.append(_point(trial, number[trial.kernel], us))
        if trial.kernel in best:
            ends[trial.kernel] = _point(trial, number[trial.kernel], best[trial.kernel])
    return points + [end for end in ends.values() if end not in points]


def _point(trial: Trial, number: int, us: float) -> dict[str, Any]:
    seconds = {} if trial.tried_s is None else {"s": trial.tried_s}
    return {"kernel": trial.kernel, "trial": number, "us": us, **seconds}

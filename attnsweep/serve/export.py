"""`attnsweep export`: the winners of recorded runs as a package that PyTorch can call.

A package is the runtime's modules, cubins, and one table. Equal runs and an equal NVRTC give equal
bytes.
"""

from __future__ import annotations

import itertools
import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from attnsweep import __version__
from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.ranking import rank
from attnsweep.choose.stats import ratio_interval
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import SpecError, StoreError
from attnsweep.core.files import shipped
from attnsweep.core.hardware import Arch, arch_named, arch_on
from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Trial
from attnsweep.family.chunks import changed_since
from attnsweep.family.family import Config, Family
from attnsweep.serve import fp8, target
from attnsweep.serve.export_code import (
    BACKWARD_FAMILY,
    FAMILY,
    Families,
    callable_of,
    compile_for_models,
    config_of,
    gpu_of,
    gpu_row,
    kind_of_mask,
    order_of,
    source_digest,
    time_of,
    why_not_today,
)
from attnsweep.serve.held import Chosen, Kind, kind_of, served, shared
from attnsweep.serve.runtime.table import CUBINS, FORMAT, TABLE, GpuKey, Guard
from attnsweep.store.run import Run, open_run

_RUNTIME = Path(__file__).parent / "runtime"
MODULES = tuple(
    sorted(path.name for path in _RUNTIME.glob("*.py") if path.stem not in ("__init__", "package"))
)
"""The runtime's files that a package has under the same name; package.py is its __init__.py."""
_CARRIED = (
    *("core/__init__.py", "core/errors.py", "core/files.py", "core/hardware.py"),
    *("core/boolean.py", "core/layouts.py", "core/masks.py", "core/ops.py", "core/problem.py"),
    "core/scores.py",
    *("family/__init__.py", "family/family.py", "family/hopper.py"),
    *("family/launch.py", "family/time_limit.py", "family/validate.py"),
)
"""What of attnsweep the declarations import; a package has it under the same names."""
# Providers of PyTorch's own attention: what a call gets without a package.
_SDPA = "torch_"


@dataclass(frozen=True)
class Exported:
    """A package that was written. left_out: a problem and why it is not in the package."""

    directory: Path
    name: str
    winners: int
    kernels: int
    nbytes: int
    gpus: tuple[str, ...]
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def package_name(out: Path, asked: str | None) -> str:
    """The package's import name: the one asked for, or the directory's. Raises SpecError."""
    name = asked if asked is not None else re.sub(r"[-.\s]", "_", out.resolve().name)
    taken = {"torch", "attnsweep", "cuda", "numpy"}
    if not name.isidentifier() or keyword.iskeyword(name) or name in taken or not name.isascii():
        raise SpecError(
            f"{name!r} cannot be the name of a Python package here",
            where="--name" if asked is not None else "--out",
            hint="give another with --name, like --name my_attention",
        )
    return name


def export(
    directories: Sequence[Path],
    out: Path,
    families: Mapping[str, Family],
    *,
    name: str | None = None,
    guard: Guard | None = None,
    slower: float = 0.0,
    compilers: Mapping[str, Compiler] | None = None,
    compiled: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the winners of these runs to `out`, which becomes a project that pip can install.

    out: is made, or replaced if it is an earlier export. guard: default: Guard(). slower: share by
    which a kernel may take longer than a shape's winner and stand in its place, so that fewer
    kernels serve all shapes. compilers: by name of the architecture (default: made here). compiled:
    is told how many kernels have compiled, of how many, from 0 on. Raises StoreError, SpecError,
    ToolchainError or CompileError.
    """
    called = package_name(out, name)
    target.check(out)
    own, of_fp8 = callable_of(families), families.get(fp8.FAMILY)
    selected = _selected(directories, own, of_fp8, slower)
    notes: list[str] = []
    in_all, done = len(selected.codes) + len(selected.fp8.codes), itertools.count()

    def tell() -> None:
        if compiled is not None:
            compiled(next(done), in_all)

    # Any GPU of the families: both are declared for one architecture.
    min_arch = families[FAMILY].min_arch
    given = (compilers or {}).get(min_arch)
    compiler = given or Compiler(arch_named(min_arch))
    try:
        tell()
        stages, files = _compiled(selected, own, compiler, notes, tell)
        table = _table(selected, own, stages, guard or Guard()) | {"nvrtc": compiler.version}
        if of_fp8 is not None and selected.fp8.winners:
            numbers = selected.configs
            in_fp8, more = fp8.compiled(selected.fp8, of_fp8, compiler, notes, numbers, tell)
            table["fp8"], files = fp8.section(selected.fp8, of_fp8, in_fp8), files | more
    finally:
        if given is None:
            compiler.close()
    contents = _contents(called, table_text(table), files)
    target.write(out, contents)
    return Exported(
        out,
        called,
        len(selected.winners) + len(selected.fp8.winners),
        len(selected.codes) + len(selected.fp8.codes),
        sum(map(len, contents.values())),
        tuple(key.label for key in sorted({*selected.names, *selected.fp8.names})),
        selected.left_out,
        notes,
    )


def outline(
    directories: Sequence[Path],
    families: Mapping[str, Family],
    *,
    guard: Guard | None = None,
    slower: float = 0.0,
) -> dict[str, Any]:
    """The table that `export` would write, but for its machine code; needs no compiler.

    The stages of each kernel are empty, `nvrtc` is not there, and FP8 runs have no part in it.
    Raises StoreError.
    """
    own = callable_of(families)
    selected = _selected(directories, own, None, slower)
    stages: list[Any] = [{}] * len(selected.codes)
    made = json.loads(table_text(_table(selected, own, stages, guard or Guard())))
    return dict(made)


@dataclass(frozen=True)
class _Selected:
    """What a package takes of runs.

    served: configs of a GPU by kind and label. names: of the GPUs. codes: config and a problem of
    each machine code, by what tells it from others, in the table's order. fp8: the same of FP8
    problems, and all else of the others.
    """

    winners: list[Chosen]
    served: dict[GpuKey, dict[Kind, dict[str, Config]]]
    names: dict[GpuKey, list[str]]
    codes: dict[tuple[object, ...], tuple[Config, Problem]]
    left_out: list[str]
    fp8: fp8.Selected

    @property
    def configs(self) -> dict[str, int]:
        """The number of each config, by its label."""
        both = (*self.codes.values(), *self.fp8.codes.values())
        return {label: n for n, label in enumerate(sorted({c.label for c, _ in both}))}


def _selected(
    directories: Sequence[Path],
    families: Families,
    of_fp8: Family | None,
    slower: float,
) -> _Selected:
    """of_fp8: the family of FP8 problems; None leaves them out."""
    left_out: list[str] = []
    names: dict[GpuKey, set[str]] = {}
    found: dict[tuple[object, ...], Chosen] = {}
    in_fp8: list[fp8.Winner] = []
    for directory in directories:
        run = open_run(directory)
        key, environment = gpu_of(run)
        names.setdefault(key, set()).add(environment.gpu)
        for chosen in _chosen(run, environment, key, families, left_out, slower):
            of = (key, chosen.trial.problem)
            both = sorted([chosen, *([found[of]] if of in found else [])], key=_order)
            times_us = {label: us for each in both[::-1] for label, us in each.times_us.items()}
            found[of] = replace(both[0], times_us=times_us)
        scaled = any(trial.problem.scaled for trial in run.trials)
        if scaled and of_fp8 is not None:
            in_fp8 += fp8.winners(run, environment, key, of_fp8, left_out)
        elif scaled:
            left_out.append(f"{run.directory.name}: FP8 problems need the family {fp8.FAMILY}")
    if not found and not in_fp8:
        raise StoreError(
            "the runs have no winner that a package could hold",
            where=", ".join(map(str, directories)),
            hint="\n  ".join(left_out) or "run a spec with flash_fwd_wgmma and torch_* baselines",
        )
    won = sorted(found.values(), key=lambda c: (c.gpu, order_of(c.problem)))
    winners = shared(won, families) if slower else won
    held = served(winners, won, families)
    codes: dict[tuple[object, ...], tuple[Config, Problem]] = {}
    for chosen in winners:
        codes.setdefault(_code_key(chosen.config, chosen.problem), (chosen.config, chosen.problem))
    for chosen in winners:
        for config in held[chosen.gpu][kind_of(chosen.problem)].values():
            codes.setdefault(_code_key(config, chosen.problem), (config, chosen.problem))
    for config, problem in [*codes.values()]:  # the same code but for the type of the elements
        twin = replace(problem, dtype="bf16" if problem.dtype == "fp16" else "fp16")
        codes.setdefault(_code_key(config, twin), (config, twin))
    known = {key: sorted(names[key]) for key in sorted({chosen.gpu for chosen in winners})}
    in_order = {key: codes[key] for key in sorted(codes, key=repr)}
    chosen_fp8 = fp8.NOTHING if of_fp8 is None else fp8.select(in_fp8, names, of_fp8)
    return _Selected(winners, held, known, in_order, left_out, chosen_fp8)


def _table(
    selected: _Selected, families: Families, stages: Sequence[Mapping[str, Any]], guard: Guard
) -> dict[str, Any]:
    """The table of a package. source: a digest of the text that its machine code is compiled of."""
    configs = selected.configs
    numbers = {key: number for number, key in enumerate(selected.codes)}
    held, won = selected.served, selected.winners
    used = {problem.op for _, problem in selected.codes.values()} | {FORWARD}
    return {
        "format": FORMAT,
        "attnsweep": __version__,
        "source": source_digest(*(families[op] for op in families if op in used)),
        "configs": list(configs),
        "kernels": [
            {"head_dim": p.head_dim, "dtype": p.dtype, "mask": p.variant}
            | {"config": configs[config.label], "stages": stages[number]}
            | ({} if p.op == FORWARD else {"family": families[p.op].name})
            for number, (config, p) in enumerate(selected.codes.values())
        ],
        "gpus": [
            gpu_row(key, names)
            | {
                "guard": asdict(guard),
                "memory_bytes_per_us": min(c.memory_bytes_per_us for c in won if c.gpu == key),
                "winners": [
                    _row(chosen, held[key], numbers) for chosen in won if chosen.gpu == key
                ],
                "twins": _twins(selected, key, numbers),
            }
            for key, names in selected.names.items()
        ],
    }


def table_text(value: Any, of: str = "table") -> str:
    """A table as JSON, with a row on each line."""
    if isinstance(value, dict) and of in ("table", "gpus", "archives", "fp8"):
        lines = [f"{json.dumps(key)}: {table_text(value[key], key)}" for key in sorted(value)]
        text = "{\n" + ",\n".join(lines) + "\n}"
    elif isinstance(value, list) and of in ("configs", "kernels", "gpus", "winners"):
        rows = (table_text(row, of if of == "gpus" else "row") for row in value)
        text = "[\n" + ",\n".join(rows) + "\n]"
    else:
        return json.dumps(value, sort_keys=True)
    return text + "\n" if of == "table" else text


def _chosen(
    run: Run,
    environment: Environment,
    key: GpuKey,
    families: Families,
    left_out: list[str],
    slower: float = 0.0,
) -> list[Chosen]:
    """The best config of a problem's family, if it can be compared with PyTorch's attention.

    slower: share by which its rivals take longer at most.
    """
    ranking = rank([trial for trial in run.trials if not trial.problem.scaled], environment)
    arch = arch_on(environment)
    chosen = []
    for problem, rows in ranking[ranking["rank"].notna()].groupby("problem", sort=False):
        trials: list[Trial] = list(rows["trial"])
        family = families.get(trials[0].problem.op)
        if family is None:
            left_out.append(f"{problem} ({run.directory.name}): no family computes it here")
            continue
        own = [t for t in trials if t.provider == OURS and t.kernel == family.name]
        baselines = [t for t in trials if t.provider.startswith(_SDPA)]
        # PyTorch's own attention has no softcap and no sinks: without a kernel, a call is unfused.
        # (With FlexAttention's time of one shape beside that of another, 100 times as long, a call
        # between them was not served.)
        baselines = baselines or [t for t in trials if t.provider == "unfused"]
        baseline = min(baselines, key=time_of, default=None)
        won = [t for t in rows.loc[rows["winner"], "trial"] if t.kernel == family.name]
        best = won[0] if won else min(own, key=time_of, default=None)
        reason = _why_not(best, baseline, family, arch)
        if reason is not None or best is None or baseline is None:
            left_out.append(f"{problem} ({run.directory.name}): {reason}")
            continue
        timed = {config_of(t, family).label: t for t in own if _is_kept(t, family)}
        times_us = {label: time_of(trial) for label, trial in timed.items()}
        rate = environment.memory_bytes_per_second / 1e6
        compared = (time_of(baseline), *_ratio(baseline, best))
        winner = Chosen(best, config_of(best, family), key, *compared, times_us, rate)
        rivals = _rivals(winner, timed.values(), baseline, slower, family) if slower else []
        allowed = [c for c in rivals if why_not_today(c.trial, family, arch) is None]
        chosen.append(replace(winner, rivals=allowed))
    return chosen


def _rivals(
    winner: Chosen, timed: Iterable[Trial], baseline: Trial, slower: float, family: Family
) -> list[Chosen]:
    """Those that ran in the winner's rounds and took at most `slower` longer.

    Where the winner is known to be faster than PyTorch's attention, they are too.
    """
    found = []
    for trial in timed:
        ours, _ = common_rounds(trial, winner.trial)
        if ours and trial is not winner.trial:
            longer, (gain, low) = _ratio(trial, winner.trial)[0] - 1, _ratio(baseline, trial)
            if longer <= slower and low >= min(1, winner.gain_low):
                facts: Any = {"config": config_of(trial, family), "gain": gain, "gain_low": low}
                found.append(replace(winner, trial=trial, slower=longer, **facts))
    return found


def _ratio(one: Trial, other: Trial) -> tuple[float, float]:
    """The time of one over that of the other, and the lower end of its interval if it has one."""
    theirs, ours = common_rounds(one, other)
    if not ours or not all(us > 0 for us in ours):
        return (time_of(one) / time_of(other),) * 2
    ratio = median(a / b for a, b in zip(theirs, ours, strict=True))
    return ratio, ratio_interval(theirs, ours)[0]


def _why_not(best: Trial | None, baseline: Trial | None, family: Family, arch: Arch) -> str | None:
    if best is None:
        return f"no correct candidate of {family}, the family that a package can call"
    if baseline is None:
        return "no time of PyTorch's own attention; add baselines: [torch_flash, torch_cudnn]"
    return why_not_today(best, family, arch)


def _is_kept(trial: Trial, family: Family) -> bool:
    """Whether the time of a config is that of one whole call of today's code."""
    whole = trial.time_us is not None and trial.schedule.get("chunks", 1) == 1
    return whole and changed_since(family, Config(trial.config)) is None


def _order(chosen: Chosen) -> tuple[float, str]:
    return time_of(chosen.trial), Config(chosen.trial.config).label


def _code_key(config: Config, problem: Problem) -> tuple[object, ...]:
    values = tuple(sorted((name, str(value)) for name, value in config.items() if name != "LSE"))
    return (problem.head_dim, problem.dtype, kind_of_mask(problem), values)


def _twins(
    selected: _Selected, key: GpuKey, numbers: Mapping[tuple[object, ...], int]
) -> list[int]:
    """Numbers of the kernels that serve on a GPU besides the winners: their code is there."""
    won, twins = set(), set()
    for chosen in selected.winners:
        if chosen.gpu == key:
            problem = chosen.problem
            won.add(numbers[_code_key(chosen.config, problem)])
            for config in selected.served[key][kind_of(problem)].values():
                for dtype in ("fp16", "bf16"):
                    twins.add(numbers[_code_key(config, replace(problem, dtype=dtype))])
    return sorted(twins - won)


def _compiled(
    selected: _Selected,
    families: Families,
    compiler: Compiler,
    notes: list[str],
    tell: Callable[[], None],
) -> tuple[list[dict[str, str]], dict[str, bytes]]:
    """SHA-256 of each kernel's stages, and cubins by file name; spills go to `notes`.

    tell: is called after each kernel.
    """
    rows: list[dict[str, str]] = []
    files: dict[str, bytes] = {}
    asked = [
        compile_for_models(families[problem.op], config, problem, compiler)
        for config, problem in selected.codes.values()
    ]
    for each in asked:
        stages, own, spills = each.done()
        rows.append(stages)
        files |= own
        if spills:
            notes.append(f"{each.config.label}: {spills} bytes of spills")
        tell()
    return rows, files


def _row(
    chosen: Chosen,
    held: Mapping[Kind, Mapping[str, Config]],
    numbers: Mapping[tuple[object, ...], int],
) -> dict[str, Any]:
    """A row of the table. others: the package's other kernels that were timed on the shape."""
    problem, own = chosen.problem, chosen.config
    others = [
        [numbers[_code_key(config, problem)], round(chosen.times_us[label], 4)]
        for label, config in held[kind_of(problem)].items()
        if label in chosen.times_us and label != own.label
    ]
    return {
        "problem": problem.label,
        "kernel": numbers[_code_key(own, problem)],
        "time_us": round(time_of(chosen.trial), 4),
        "sdpa_us": round(chosen.sdpa_us, 4),
        "gain": round(chosen.gain, 4),
        "gain_low": round(chosen.gain_low, 4),
        "others": sorted(others),
    }


def _contents(name: str, table: str, cubins: Mapping[str, bytes]) -> dict[str, bytes]:
    """Every file of the project by its path."""
    project = _PROJECT.format(
        mark=target.MARK, name=name, version=__version__, cubins=CUBINS, table=TABLE
    )
    inside = {path: data.encode() for path, data in sources(name).items()}
    inside |= {TABLE: table.encode(), "py.typed": b""}
    inside |= {f"{CUBINS}/{file}": data for file, data in cubins.items()}
    files = {f"{name}/{path}": data for path, data in inside.items()}
    return {"pyproject.toml": project.encode(), **files}


def sources(name: str) -> dict[str, str]:
    """The package's modules and declarations, which import each other by its name."""
    paths = {"__init__.py": _RUNTIME / "package.py"}
    paths |= {module: _RUNTIME / module for module in MODULES}
    paths |= {path: _RUNTIME.parent.parent / path for path in _CARRIED}
    for family in (FAMILY, BACKWARD_FAMILY, fp8.FAMILY):
        paths[f"kernels/{family}.py"] = shipped("kernels") / f"{family}.py"
    return {
        path: re.sub(r"^( *)from attnsweep\.", rf"\1from {name}.", file.read_text(), flags=re.M)
        for path, file in paths.items()
    }


_PROJECT = """\
{mark}
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Tuned attention kernels for PyTorch, exported by attnsweep"
requires-python = ">=3.10"
dependencies = ["torch>=2.5", "cuda-bindings>=12.9"]

[tool.setuptools]
packages = ["{name}", "{name}.core", "{name}.family"]

[tool.setuptools.package-data]
{name} = ["{table}", "py.typed", "kernels/*.py", "{cubins}/*.cubin"]
"""

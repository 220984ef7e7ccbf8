"""`attnsweep export`: the winners of recorded runs as a package that PyTorch can call.

A package is the runtime's modules, cubins, and one table. Equal runs and an equal NVRTC give equal
bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import keyword
import math
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from attnsweep import __version__
from attnsweep.choose.baseline_ratio import common_rounds
from attnsweep.choose.pace import label_of_row, time_of
from attnsweep.choose.ranking import rank
from attnsweep.choose.stats import ratio_interval
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import SpecError, StoreError
from attnsweep.core.files import shipped
from attnsweep.core.hardware import Arch, arch_named, arch_on
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Status, Trial
from attnsweep.family.family import Config, Family
from attnsweep.reports.sections import Section
from attnsweep.serve.export_code import (
    CODE,
    FAMILY,
    Compiling,
    Families,
    compile_for_models,
    config_of,
    cubin_file,
    gpu_of,
    gpu_row,
    is_one_call,
    kind_of_mask,
    order_of,
    source_digest,
    why_not_today,
)
from attnsweep.serve.package_kernels import (
    Chosen,
    Kind,
    is_sdpa,
    kind_of,
    lost_sdpa,
    portfolios_of,
    served,
    shared,
    spare_kernels,
)
from attnsweep.serve.portfolio import facts_of, of_size, times_as_long
from attnsweep.serve.runtime.families import (
    DECLARED,
    WITHOUT_RIVAL,
    family_of,
    has_rival,
    kind_of_code,
)
from attnsweep.serve.runtime.table import CUBINS, FORMAT, TABLE, GpuKey, Guard
from attnsweep.store.run import Run, open_run

_RUNTIME = Path(__file__).parent / "runtime"
MODULES = tuple(
    sorted(path.name for path in _RUNTIME.glob("*.py") if path.stem not in ("__init__", "package"))
)
"""The runtime's files that a package has under the same name; package.py is its __init__.py."""
_CARRIED = (
    *("core/__init__.py", "core/errors.py", "core/files.py", "core/hardware.py"),
    *("core/formats.py", "core/layouts.py", "core/masks.py", "core/ops.py", "core/problem.py"),
    "core/scores.py",
    *("family/__init__.py", "family/chunks.py", "family/family.py", "family/hopper.py"),
    *("family/launch.py", "family/params.py", "family/time_limit.py", "family/validate.py"),
)
"""What of attnsweep the declarations import; a package has it under the same names."""
Identity = tuple[str, int, str, str, str]
"""Family, head_dim, dtype, kind of mask and config: what tells machine code from any other."""


def identity_of(config: Config, problem: Problem) -> Identity:
    """The Identity of the machine code of a config that serves a problem."""
    return family_of(problem), *kind_of_code(problem), config.label


@dataclass(frozen=True)
class Exported:
    """What was written. left_out: a problem and why it is not in it.

    kernels: of a package. configs: of the function `name`, for a run of calls; the files have them.
    portfolio: of `at_most`, what was kept, what each shape loses, and what other numbers would.
    """

    directory: Path
    name: str
    winners: int
    kernels: int
    nbytes: int
    gpus: tuple[str, ...]
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: tuple[str, ...] = ()
    portfolio: Mapping[str, Any] | None = None
    configs: int = 0


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
    at_most: int | None = None,
    compilers: Mapping[str, Compiler] | None = None,
    compiled: Callable[[int, int], None] | None = None,
    known: Mapping[Identity, Mapping[str, bytes]] | None = None,
) -> Exported:
    """Write the winners of these runs to `out`, which becomes a project that pip can install.

    out: is made, or replaced if it is an earlier export. guard: default: Guard(). slower: share by
    which a kernel may take longer than a shape's winner and stand in its place, so that fewer
    kernels serve all shapes. at_most: the most configs to keep, chosen to lose the least time.
    compilers: by name of the architecture (default: made here). compiled: is told how many kernels
    have compiled, of how many, from 0 on. known: cubins by stage of machine code that is there
    already. Raises StoreError, SpecError, ToolchainError or CompileError.
    """
    called = package_name(out, name)
    _check_target(out)
    selected = _selected(directories, families, slower, at_most)
    notes: list[str] = []
    in_all, done = len(selected.codes), itertools.count()

    def tell() -> None:
        if compiled is not None:
            compiled(next(done), in_all)

    # Any GPU of the families: both are declared for one architecture.
    min_arch = families[FAMILY].min_arch
    given = (compilers or {}).get(min_arch)
    compiler = given or Compiler(arch_named(min_arch))
    try:
        tell()
        stages, files = _compiled(selected, families, compiler, notes, tell, known or {})
        table = _table(selected, families, stages, guard or Guard()) | {"nvrtc": compiler.version}
    finally:
        if given is None:
            compiler.close()
    contents = _contents(called, table_text(table), files)
    _write(out, contents)
    return Exported(
        out,
        called,
        len(selected.winners) + len(selected.in_fp8),
        len(selected.codes),
        sum(map(len, contents.values())),
        tuple(key.label for key in sorted(_by_gpu(selected.winners + selected.in_fp8))),
        selected.left_out,
        notes,
        portfolio=selected.portfolio,
    )


def outline(
    directories: Sequence[Path],
    families: Mapping[str, Family],
    *,
    guard: Guard | None = None,
    slower: float = 0.0,
    at_most: int | None = None,
) -> dict[str, Any]:
    """The table that `export` would write, but for its machine code; needs no compiler.

    The stages of each kernel are empty, `nvrtc` is not there, and FP8 runs have no part in it.
    Raises StoreError.
    """
    own = {name: family for name, family in families.items() if name not in WITHOUT_RIVAL}
    selected = _selected(directories, own, slower, at_most)
    stages: list[Any] = [{}] * len(selected.codes)
    made = json.loads(table_text(_table(selected, own, stages, guard or Guard())))
    return dict(made)


@dataclass(frozen=True)
class _Selected:
    """The winners and spares that a package takes from runs.

    winners: those in 16 bits. served: configs of a GPU by kind and label. names: of the GPUs.
    codes: config and a problem of each machine code, by what tells it from others, in the table's
    order. spare: keys of codes that serve where no winner in FP8 may run.
    """

    winners: list[Chosen]
    in_fp8: list[Chosen]
    served: dict[GpuKey, dict[Kind, dict[str, Config]]]
    names: Mapping[GpuKey, set[str]]
    codes: dict[tuple[object, ...], tuple[Config, Problem]]
    spare: list[tuple[object, ...]]
    left_out: list[str]
    portfolio: Mapping[str, Any] | None

    @property
    def configs(self) -> dict[str, int]:
        """The number of each config, by its label."""
        labels = sorted({config.label for config, _ in self.codes.values()})
        return {label: number for number, label in enumerate(labels)}


def _selected(
    directories: Sequence[Path], families: Families, slower: float, at_most: int | None
) -> _Selected:
    left_out: list[str] = []
    slower = slower if at_most is None else math.inf
    names: dict[GpuKey, set[str]] = {}
    found: dict[tuple[object, ...], Chosen] = {}
    for directory in directories:
        run = open_run(directory)
        if _of_calls(run):
            how = "--format python, triton, vllm or helion writes its configs, as --out NAME.py"
            left_out.append(f"{directory}: a run of calls has no machine code; {how}")
            continue
        key, environment = gpu_of(run)
        names.setdefault(key, set()).add(environment.gpu)
        for chosen in chosen_of(run, environment, key, families, left_out, slower):
            of = (key, chosen.problem)
            both = sorted([chosen, *([found[of]] if of in found else [])], key=_order)
            times_us = {label: us for each in both[::-1] for label, us in each.times_us.items()}
            found[of] = replace(both[0], times_us=times_us)
    if not found:
        raise StoreError(
            "the runs have no winner that a package could hold",
            where=", ".join(map(str, directories)),
            hint="\n  ".join(left_out) or "run a spec with flash_fwd_wgmma and torch_* baselines",
        )
    every = sorted(found.values(), key=lambda c: (c.gpu, order_of(c.problem)))
    portfolio = None
    if at_most is not None:
        every, portfolio = _portfolio(every, at_most, left_out)
    in_fp8 = [chosen for chosen in every if not has_rival(chosen.problem)]
    won = [chosen for chosen in every if has_rival(chosen.problem)]
    winners = shared(won) if slower and at_most is None else won
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
    for chosen in in_fp8:
        codes.setdefault(_code_key(chosen.config, chosen.problem), (chosen.config, chosen.problem))
    spare = {_code_key(*each): each for each in spare_kernels(in_fp8, families)}
    codes = spare | codes
    in_order = {key: codes[key] for key in sorted(codes, key=repr)}
    spares = sorted(spare, key=repr)
    return _Selected(winners, in_fp8, held, names, in_order, spares, left_out, portfolio)


def _portfolio(
    winners: Sequence[Chosen], at_most: int, left_out: list[str]
) -> tuple[list[Chosen], dict[str, Any]]:
    """The configs that serve if there may be at_most of them, and the facts of that choice."""
    found = portfolios_of(winners)
    if not found:
        what = "no winner is faster than PyTorch's own attention, which serves all shapes"
        raise StoreError(what, where="--at-most", hint="leave it out to export the winners")
    portfolio = of_size(found, at_most)
    several = len({chosen.gpu for chosen in winners}) > 1
    names = [f"{c.problem.label}{f' on {c.gpu.label}' * several}" for c in winners]
    pairs = [*zip(winners, portfolio.own, strict=True)]
    for name, (chosen, own) in zip(names, pairs, strict=True):
        if own is None:
            instead = f"PyTorch's takes {chosen.gain:.2f} times as long as its winner"
            rest = instead if has_rival(chosen.problem) else "none of them was timed on it"
            left_out.append(f"{name}: no kept config serves it, {rest}")
    kept = [chosen.by(own) for chosen, own in pairs if own is not None]
    return kept, facts_of(found, portfolio, names)


def _of_calls(run: Run) -> bool:
    """Whether the right candidates of a run are calls of the user's, and none is a template."""
    called = False
    for trial in run.trials:
        if trial.provider == OURS:
            if trial.status is Status.OK and not trial.call:
                return False
            called = called or bool(trial.call)
    return called


def use_of(run: Run, sections: Sequence[Section]) -> str | None:
    """The command that uses the winners of a run, or says why they won if no package can hold one.

    None without a winner.
    """
    won = [each for each in sections if each.winner is not None]
    if not won:
        return None
    of = shlex.quote(str(run.directory))
    if _of_calls(run):
        return f"attnsweep export {of} --out my_configs.py"
    if run.environment is not None and any(map(_is_served, won)):
        return f"attnsweep export {of} --out my_attention"
    return f"attnsweep explain {of}"


def _is_served(section: Section) -> bool:
    """Whether a package can hold the winner of a problem."""
    problem, row = section.problem, section.winner
    if row is None or row["kernel"] != family_of(problem):
        return False
    rivals = (other["trial"] for other in section.ranked)
    compares = not has_rival(problem) or any(map(is_sdpa, rivals))
    return compares and row["trial"].schedule.get("chunks", 1) == 1


def _table(
    selected: _Selected, families: Families, stages: Sequence[Mapping[str, Any]], guard: Guard
) -> dict[str, Any]:
    """The table of a package. source: digests of the text that each family is compiled of."""
    configs = selected.configs
    numbers = {key: number for number, key in enumerate(selected.codes)}
    used = {family_of(problem) for _, problem in selected.codes.values()} | {FAMILY}
    table = {
        "format": FORMAT,
        "code": CODE,
        "attnsweep": __version__,
        "source": {name: source_digest(families[name]) for name in used},
        "configs": list(configs),
        "kernels": [
            dict(zip(("head_dim", "dtype", "mask"), kind_of_code(p), strict=True))
            | {"config": configs[config.label], "stages": stages[number]}
            | ({} if family_of(p) == FAMILY else {"family": family_of(p)})
            for number, (config, p) in enumerate(selected.codes.values())
        ],
        "gpus": [
            gpu_row(key, selected.names[key])
            | {
                "guard": asdict(guard),
                "memory_bytes_per_us": min(c.memory_bytes_per_us for c in own),
                "winners": [_row(c, numbers, selected.served[key]) for c in own],
                "twins": _twins(selected, key, numbers),
            }
            for key, own in _by_gpu(selected.winners).items()
        ],
    }
    in_fp8 = [
        gpu_row(key, selected.names[key])
        | {
            "winners": [_row(chosen, numbers) for chosen in own],
            "spare": [numbers[each] for each in selected.spare],
        }
        for key, own in _by_gpu(selected.in_fp8).items()
    ]
    if selected.portfolio:
        table["portfolio"] = selected.portfolio
    return table | ({"fp8": in_fp8} if in_fp8 else {})


def table_text(value: Any, of: str = "table") -> str:
    """A table as JSON, with a row on each line."""
    if isinstance(value, dict) and of in ("table", "gpus", "fp8", "archives"):
        lines = [f"{json.dumps(key)}: {table_text(value[key], key)}" for key in sorted(value)]
        text = "{\n" + ",\n".join(lines) + "\n}"
    elif isinstance(value, list) and of in ("configs", "kernels", "gpus", "fp8", "winners"):
        rows = (table_text(row, of if of in ("gpus", "fp8") else "row") for row in value)
        text = "[\n" + ",\n".join(rows) + "\n]"
    else:
        return json.dumps(value, sort_keys=True)
    return text + "\n" if of == "table" else text


def chosen_of(
    run: Run,
    environment: Environment,
    key: GpuKey,
    families: Families,
    left_out: list[str],
    slower: float = 0.0,
) -> list[Chosen]:
    """The best config of a problem's family, if it can be compared with PyTorch's attention.

    In FP8 it need not be, since PyTorch's attention cannot do that. slower: share by which rivals
    take longer at most.
    """
    ranking = rank(run.trials, environment)
    arch = arch_on(environment)
    chosen = []
    ranked = ranking[ranking["rank"].notna()]
    timed_sdpa: dict[Problem, list[str]] = {trial.problem: [] for trial in ranked["trial"]}
    for trial in filter(is_sdpa, ranked["trial"]):
        timed_sdpa[trial.problem].append(trial.provider)
    lost = lost_sdpa(run, timed_sdpa)
    for problem, rows in ranked.groupby("problem", sort=False):
        trials: list[Trial] = list(rows["trial"])
        family = families.get(family_of(trials[0].problem))
        if family is None:
            left_out.append(f"{problem} ({run.directory.name}): no family computes it here")
            continue
        own = [t for t in trials if t.provider == OURS and t.kernel == family.name]
        baselines = [t for t in trials if is_sdpa(t)]
        # PyTorch's own attention has no softcap and no sinks: without a kernel, a call is unfused.
        # (With FlexAttention's time of one shape beside that of another, 100 times as long, a call
        # between them was not served.)
        baselines = baselines or [t for t in trials if t.provider == "unfused"]
        compares = has_rival(trials[0].problem)
        baseline = min(baselines, key=time_of, default=None) if compares else None
        won = [t for t in rows.loc[rows["winner"], "trial"] if t.kernel == family.name]
        best = won[0] if won else min(own, key=time_of, default=None)
        reason = _why_not(best, baseline, family, arch)
        if compares and (name := lost.get(trials[0].problem)):
            reason = f"no time of {name}, which PyTorch may call; sweep the problem again"
        if reason is not None or best is None:
            left_out.append(f"{problem} ({run.directory.name}): {reason}")
            continue
        timed = {config_of(t, family).label: t for t in own if is_one_call(t, family)}
        times_us = {label: time_of(trial) for label, trial in timed.items()}
        rate = environment.memory_bytes_per_second / 1e6
        compared, rivals = (0.0, 0.0, 0.0), list[Chosen]()
        if baseline is not None:
            compared = (time_of(baseline), *_ratio(baseline, best))
        winner = Chosen(best, config_of(best, family), key, *compared, times_us, rate)
        if slower:
            rivals = _rivals(winner, timed.values(), baseline, slower, family)
        allowed = [c for c in rivals if why_not_today(c.trial, family, arch) is None]
        chosen.append(replace(winner, rivals=allowed))
    return chosen


def _rivals(
    winner: Chosen, timed: Collection[Trial], baseline: Trial | None, slower: float, family: Family
) -> list[Chosen]:
    """The candidates that are known to take at most `slower` longer than the winner.

    Those that the race put out count only if they may take any time: what is shipped is chosen by
    medians of the final rounds. Where the winner is known to be faster than PyTorch's attention,
    they are too.
    """
    rows = {} if math.isfinite(slower) else {label_of_row(trial): trial for trial in timed}
    found = []
    for trial in timed:
        times = None if trial is winner.trial else times_as_long(trial, winner.trial, rows)
        if times is not None and times - 1 <= slower:
            gain, low = winner.gain / times, winner.gain_low / times
            if baseline is not None and common_rounds(trial, winner.trial)[0]:
                gain, low = _ratio(baseline, trial)
            if low >= min(1, winner.gain_low):
                facts: Any = {"config": config_of(trial, family), "gain": gain, "gain_low": low}
                found.append(replace(winner, trial=trial, slower=times - 1, **facts))
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
    if baseline is None and has_rival(best.problem):
        return "no time of PyTorch's own attention; add baselines: [torch_flash, torch_cudnn]"
    return why_not_today(best, family, arch)


def _order(chosen: Chosen) -> tuple[float, str]:
    return time_of(chosen.trial), Config(chosen.trial.config).label


def _code_key(config: Config, problem: Problem) -> tuple[object, ...]:
    values = tuple(sorted((name, str(value)) for name, value in config.items() if name != "LSE"))
    head_dim, dtype, _ = kind_of_code(problem)
    return (head_dim, dtype, kind_of_mask(problem), values)


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
    known: Mapping[Identity, Mapping[str, bytes]],
) -> tuple[list[dict[str, str]], dict[str, bytes]]:
    """SHA-256 of each kernel's stages, and cubins by file name; spills go to `notes`.

    tell: is called after each kernel. known: what need not be compiled.
    """
    rows: list[dict[str, str]] = []
    files: dict[str, bytes] = {}
    asked = [
        known.get(identity_of(config, problem))
        or compile_for_models(families[family_of(problem)], config, problem, compiler)
        for config, problem in selected.codes.values()
    ]
    for each in asked:
        if not isinstance(each, Compiling):
            rows.append({name: hashlib.sha256(data).hexdigest() for name, data in each.items()})
            files |= {cubin_file(rows[-1][name]): data for name, data in each.items()}
            continue
        stages, own, spills = each.done()
        rows.append(stages)
        files |= own
        if spills:
            notes.append(f"{each.config.label}: {spills} bytes of spills")
        tell()
    return rows, files


def _row(
    chosen: Chosen,
    numbers: Mapping[tuple[object, ...], int],
    held: Mapping[Kind, Mapping[str, Config]] | None = None,
) -> dict[str, Any]:
    """A row of the table, in FP8 without what is compared with PyTorch's attention.

    others: the package's other kernels that were timed on the shape, of those that are held.
    """
    problem, own = chosen.problem, chosen.config
    row: dict[str, Any] = {"problem": problem.label, "kernel": numbers[_code_key(own, problem)]}
    row["time_us"] = round(time_of(chosen.trial), 4)
    if held is None:
        return row
    others = [
        [numbers[_code_key(config, problem)], round(chosen.times_us[label], 4)]
        for label, config in held[kind_of(problem)].items()
        if label in chosen.times_us and label != own.label
    ]
    compared = ("sdpa_us", "gain", "gain_low")
    row |= {name: round(getattr(chosen, name), 4) for name in compared}
    return row | {"others": sorted(others)}


def _by_gpu(winners: Iterable[Chosen]) -> dict[GpuKey, list[Chosen]]:
    """The winners of each GPU, which are in its order."""
    found: dict[GpuKey, list[Chosen]] = {}
    for chosen in winners:
        found.setdefault(chosen.gpu, []).append(chosen)
    return found


def _contents(name: str, table: str, cubins: Mapping[str, bytes]) -> dict[str, bytes]:
    """Every file of the project by its path."""
    project = _PROJECT.format(mark=MARK, name=name, version=__version__, cubins=CUBINS, table=TABLE)
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
    for family in DECLARED:
        paths[f"kernels/{family}.py"] = shipped("kernels") / f"{family}.py"
    return {
        path: re.sub(
            r"^( *)from attnsweep\.",
            rf"\1from {name}.",
            file.read_text(encoding="utf-8"),
            flags=re.M,
        )
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


# ---- the directory ----
MARK = "# Written by attnsweep export."
"""The first line of a project that an export may replace."""
_PROJECT_FILE = "pyproject.toml"
_HINT = "choose an empty or a new directory with --out"


def _check_target(out: Path) -> None:
    """Raise StoreError unless `out` can be written: absent, empty, or an earlier export.

    An export takes minutes, so the system is asked to make a directory there, which is removed.
    """
    whole = out.resolve()
    try:
        if whole == Path.cwd() or whole in Path.cwd().parents:
            raise StoreError("the working directory is in it", where=str(out), hint=_HINT)
        if whole.exists():
            _check_replaceable(whole, out)
        missing = [path for path in (whole, *whole.parents) if not path.exists()]
        probe = missing[-1] if missing[1:] else _aside(whole, "tmp")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        hint = "choose another --out, in a directory that can be written"
        what = f"cannot be written: {error.strerror}"
        raise StoreError(what, where=str(out), hint=hint) from error


def _check_replaceable(whole: Path, out: Path) -> None:
    if not whole.is_dir():
        raise StoreError("is not a directory", where=str(out), hint="choose another --out")
    names = {path.name for path in whole.iterdir()}
    project = whole / _PROJECT_FILE
    earlier = project.name in names and project.read_bytes().startswith(MARK.encode())
    if names and not earlier:
        what = "there are files, and they are no earlier export"
        raise StoreError(what, where=str(out), hint=_HINT)
    made = [project.name, "build", *(n for n in names if n.endswith(".egg-info"))]  # by pip, too
    others = [n for n in sorted(names) if n not in made and not (whole / n / TABLE).is_file()]
    if others:  # such as .git
        what = f"next to an earlier export there is {', '.join(others)}"
        raise StoreError(what, where=str(out), hint="move that away, or choose another --out")


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files next to `out`, then put them in its place. Raises StoreError."""
    whole = out.resolve()
    aside, old = _aside(whole, "tmp"), _aside(whole, "old")
    try:
        for path, data in contents.items():
            (aside / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / path).write_bytes(data)
        if whole.exists():
            whole.rename(old)
        aside.rename(whole)
    except OSError as error:
        with contextlib.suppress(OSError):
            if old.exists() and not whole.exists():
                old.rename(whole)
        raise StoreError(f"cannot be written: {error.strerror}", where=str(out)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _aside(whole: Path, end: str) -> Path:
    return whole.with_name(f".{whole.name}.{secrets.token_hex(4)}.{end}")

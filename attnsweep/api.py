"""The functions of the public API, with the defaults that a script wants; `import attnsweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from attnsweep.core.hardware import Arch
    from attnsweep.core.observer import Observer
    from attnsweep.core.problem import Problem, Value
    from attnsweep.core.trial import Environment, Trial
    from attnsweep.family.family import Config, Family, Rule
    from attnsweep.regress.verdicts import Comparison
    from attnsweep.serve.export import Exported
    from attnsweep.serve.runtime.table import Guard
    from attnsweep.specs.load import SweepSpec
    from attnsweep.specs.plan import PlannedProblem
    from attnsweep.store.run import Run
    from attnsweep.sweep.session import SweepOutcome
    from attnsweep.tools.inline import Given


def families(directory: str | Path | None = None) -> dict[str, Family]:
    """Every kernel family by name: the shipped ones, and those in `directory`.

    Raises KernelError if a declaration is broken or repeated.
    """
    from attnsweep.family.discover import discover

    return discover(Path(directory) if directory is not None else None)


def load_spec(path: str | Path, kernels: Mapping[str, Family] | None = None) -> SweepSpec:
    """Read a YAML sweep spec: a file, or the name of a shipped one.

    kernels: the families (default: the shipped ones, and those in the spec's `kernel_dir`). Raises
    SpecError, which says `file:line:column: what` and how to fix it.
    """
    from attnsweep.family.discover import discover
    from attnsweep.specs import load

    return load.load_spec(Path(path), discover if kernels is None else kernels)


def plan(
    spec: SweepSpec, kernels: Mapping[str, Family] | None = None, arch: Arch | str | None = None
) -> tuple[PlannedProblem, ...]:
    """Each problem of a spec with its spaces: the candidates that the rules leave.

    arch: default: the spec's, its recording's, or that of this machine's GPU. Raises SpaceError if
    a problem has no candidate left.
    """
    from attnsweep.compile.calls import plan_alone

    return plan_alone(_bound(spec, kernels), _target(spec, arch))


def tune(
    source: str | Path | Callable[..., Any],
    problem: str | Problem | Iterable[str | Problem] = (),
    *,
    causal: bool = False,
    dtype: str = "fp16",
    params: Mapping[str, Sequence[Value]] | None = None,
    widen: bool = False,
    args: Sequence[Given] | None = None,
    grid: Sequence[Given] | Callable[[Config, Problem], Any] = (),
    threads: Given = 128,
    smem_bytes: Given = 0,
    rules: Mapping[str, Rule] | None = None,
    kernels: str | Sequence[str] = (),
    budget_s: int | None = None,
    limit: int | None = None,
    replay: str | Path | None = None,
    results: str | Path = "results",
    fresh: bool = False,
    wait: bool = False,
    cache_dir: str | Path | None = None,
    observer: Observer | None = None,
    **declared: Any,
) -> SweepOutcome:
    """Find the fastest config of a kernel of one's own, or the fastest shipped kernel, for shapes.

    source: the kernel, `extern "C" __global__`, as text or as a .cu file; a Python function that
    launches Triton kernels, or its name as `FILE.py:FUNCTION`; without `problem` the shape itself,
    as `attnsweep tune` takes it. causal, dtype: of shapes that do not say their own. params: the
    values of each macro; of each keyword, or parameter of its autotuner, of a function, whose file
    has them where there are none; widen adds combinations of these and of their neighbours. args:
    names of tensors (`q`), of sizes of the problem (`seqlen_k`, `scale`) or of params, numbers, or
    functions of config and problem; default: the names of the kernel's parameters. grid, threads,
    smem_bytes: the same, for the launch. rules: a sentence to a function of config, problem and
    arch, which is False for configs to leave out. declared: what else Family takes, such as
    `supports` or `compile_options`. kernels: shipped families. replay: a recorded run, which needs
    no GPU. Others: see `run`. The run is stored in `results`, and the same call continues there.
    """
    from attnsweep.choose.search import DEFAULT_STRATEGY
    from attnsweep.core.callables import CALLABLE
    from attnsweep.core.errors import SpecError
    from attnsweep.core.problem import Problem
    from attnsweep.family.called import called
    from attnsweep.specs.load import spec_of
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.specs.starter import Request, run_name, starter
    from attnsweep.specs.yaml_file import Document
    from attnsweep.tools import inline, target

    shipped = not problem
    asked: Any = source if shipped else problem
    each = [asked] if isinstance(asked, str | Path | Problem) else [*asked]
    shapes = [str(getattr(one, "label", one)) for one in each]
    problems = read_shapes(shapes, dtype=dtype, causal=causal)
    known = families()
    kernels = (kernels,) if isinstance(kernels, str) else kernels
    own: Family
    if callable(source) or (not shipped and CALLABLE.fullmatch(str(source))):
        own = called(source if callable(source) else str(source), params, widen=widen)
        own.keep_if(*((f"rule_{n}", *rule) for n, rule in enumerate((rules or {}).items())))
        known, kernels = {**known, own.name: own}, (own.name, *kernels)
    elif widen:
        raise SpecError("widen goes with a function that launches Triton kernels")
    elif not shipped:
        own = inline.family_of(
            source,
            problems,
            params=params or {},
            args=args,
            grid=grid,
            threads=threads,
            smem_bytes=smem_bytes,
            rules=rules or {},
            **declared,
        )
        known, kernels = {**known, own.name: own}, (own.name, *kernels)
    recorded = None if replay is None else target.recorded(Path(replay), problems)
    card = recorded or target.here(known, problems)
    search = {"strategy": DEFAULT_STRATEGY} | ({} if budget_s is None else {"budget_s": budget_s})
    request = Request(problems, run_name(problems, kernels), kernels, None, search)
    text = starter(request, card, known)
    document = Document.parse(Path(f"{request.name}.yaml"), text, made=True)
    return run(
        spec_of(document, known),
        known,
        results=results,
        fresh=fresh,
        limit=limit,
        wait=wait,
        cache_dir=cache_dir,
        observer=observer,
    )


def run(
    spec: SweepSpec | str | Path,
    kernels: Mapping[str, Family] | None = None,
    *,
    results: str | Path = "results",
    fresh: bool = False,
    limit: int | None = None,
    gpus: str | None = None,
    wait: bool = False,
    cache_dir: str | Path | None = None,
    observer: Observer | None = None,
) -> SweepOutcome:
    """Sweep: compile, check, time and rank every candidate; stored below `results`.

    spec: as `load_spec` reads it, or its file or name: "quickstart" needs no GPU. The same spec
    again resumes. fresh: set older rows aside. limit: at most this many candidates per family and
    problem. gpus: `all`, or numbers or UUIDs of cards as `0,2`, each of which takes whole problems;
    by default one card takes all. wait: for another run on a card, which otherwise is an error.
    Raises NoGpuError, SpaceError, SpecError, StoreError or ToolchainError.
    """
    from attnsweep.device.cards import chosen, installed
    from attnsweep.sweep import session
    from attnsweep.sweep.fleet import Fleet

    spec = load_spec(spec, kernels) if isinstance(spec, str | Path) else spec
    return session.run(
        _bound(spec, kernels),
        None if gpus is None else Fleet(chosen(gpus, installed())),
        results=Path(results),
        fresh=fresh,
        limit=_at_least_1(limit),
        wait=wait,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        observer=observer,
    )


def compile_spec(
    spec: SweepSpec,
    kernels: Mapping[str, Family] | None = None,
    arch: Arch | str | None = None,
    *,
    limit: int | None = None,
) -> list[Trial]:
    """Compile every candidate of a spec without a GPU; rows with resources and no times.

    arch: see `plan`. limit: at most this many candidates per family and problem. Raises SpaceError
    or ToolchainError.
    """
    from attnsweep.tools.compile import compile_all

    target = _target(spec, arch)
    return compile_all(_bound(spec, kernels), target, limit=_at_least_1(limit))


def open_run(directory: str | Path) -> Run:
    """Read a run as `attnsweep run` stored it. Raises StoreError if there is none."""
    from attnsweep.store import run as stored

    return stored.open_run(Path(directory))


def rank(run: Run | Sequence[Trial], environment: Environment | None = None) -> pandas.DataFrame:
    """One row per trial, ranked within each problem; the columns are those of ranking.csv.

    run: a run, or trials with the environment that measured them.
    """
    from attnsweep.choose.ranking import rank as ranked
    from attnsweep.store.run import Run

    if isinstance(run, Run):
        return ranked(run.trials, run.environment)
    return ranked(run, environment)


def winners(run: Run) -> list[Trial]:
    """The winning candidate of each problem that has one."""
    from attnsweep.choose.ranking import winners as of_ranking

    return of_ranking(rank(run))


def report(run: Run) -> dict[str, str]:
    """The tables of a run by file name: ranking.csv and ranking.md."""
    from attnsweep.reports import tables

    return tables.files(run)


def compare_runs(
    old: Run, new: Run, *, slower: float = 0.03, other_driver: bool = False
) -> Comparison:
    """Compare two recorded runs, problem by problem, without measuring.

    slower: the share by which a winner may have become slower. other_driver: also compare runs that
    were measured with different drivers.
    """
    from attnsweep.core import share
    from attnsweep.core.errors import SpecError
    from attnsweep.regress.recorded import compare

    try:
        slower = share.share(slower)
    except share.ShareError as error:
        raise SpecError(f"slower {error}", hint=error.hint) from None
    return compare(old, new, slower=slower, other_driver=other_driver)


def write_page(run: Run, path: str | Path, *, top: int = 10) -> int:
    """Write a run as one HTML page with tables and plots; returns its size in bytes."""
    from attnsweep.reports import html

    return html.write(run, Path(path), top=top)


def export(
    runs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    name: str | None = None,
    kernels: Mapping[str, Family] | None = None,
    guard: Guard | None = None,
    format: str | None = None,
    axis: str = "seqlen_k",
    kernel: str | None = None,
    at_most: int | None = None,
    force: bool = False,
) -> Exported:
    """Write the winners of recorded runs as a package that PyTorch calls; needs NVRTC, no GPU.

    runs: their directories, of one or several GPUs. out: a directory, made or replaced. name: the
    package's (default: that of `out`). guard: when a shape that was not tuned is served. at_most:
    the most configs to keep, chosen to lose the least time; `Exported.portfolio` says how much.

    Of a run of calls, write configs. format: `python` (default where `out` is NAME.py), `triton`
    (NAME.json), `vllm` (a directory, with tables by `axis`) or `helion` (a directory). kernel: one
    of the spec's, as if the run had no other. force: replace files. Raises StoreError if no winner
    can be exported, SpecError for a bad name, ToolchainError.
    """
    from attnsweep.serve.export import export as write
    from attnsweep.serve.export_configs import PACKAGE, export_configs, format_of

    paths = [*map(Path, (runs,) if isinstance(runs, str | Path) else runs)]
    path = Path(out)
    if (form := format_of(path, format)) != PACKAGE:
        return export_configs(
            paths, path, form, axis=axis, kernel=kernel, at_most=at_most, force=force
        )
    known = families() if kernels is None else kernels
    return write(paths, path, known, name=name, guard=guard, at_most=at_most)


def schema() -> str:
    """The JSON Schema of a sweep spec, as text."""
    from attnsweep.specs.load import schema_text

    return schema_text()


def _at_least_1(limit: int | None) -> int | None:
    """A limit as a whole number, or None. Raises SpecError, or TypeError for what is no number."""
    limit = None if limit is None else index(limit)
    if limit is None or limit >= 1:
        return limit
    from attnsweep.core.errors import SpecError

    raise SpecError(f"limit must be at least 1, not {limit}", hint="None is no limit")


def _bound(spec: SweepSpec, kernels: Mapping[str, Family] | None) -> SweepSpec:
    """The spec with these families, or with its own as their files declare them now."""
    from attnsweep.family.discover import discover
    from attnsweep.specs.load import with_families

    return with_families(spec, discover(spec.kernel_dir) if kernels is None else kernels)


def _target(spec: SweepSpec, arch: Arch | str | None) -> Arch:
    from attnsweep.core.hardware import Arch
    from attnsweep.tools.compile import target_arch

    return arch if isinstance(arch, Arch) else target_arch(spec, arch)

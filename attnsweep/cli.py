"""The commands: each parses, calls one function of a lower layer and prints.

Each command imports what it needs itself, so that `attnsweep --version` takes 0.2 s of CPU instead
of 0.9, most of it for pandas and pydantic.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from attnsweep import __version__
from attnsweep.errors import KernelError, NoGpuError, SpecError
from attnsweep.hardware import ARCHS, arch_named
from attnsweep.show import terminal
from attnsweep.show.terminal import console, errors

if TYPE_CHECKING:
    from attnsweep.family.declare import Kernel
    from attnsweep.spec.load import SweepSpec
    from attnsweep.store.run import Run

app = typer.Typer(
    cls=terminal.Commands,
    help="Find the fastest correct attention kernel for a GPU and a shape, by measuring.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecArgument = Annotated[
    Path, typer.Argument(help="YAML sweep spec, or the name of a shipped one.", show_default=False)
]
KernelsOption = Annotated[
    Path | None, typer.Option("--kernels", help="Directory with kernel families of your own.")
]
ResultsOption = Annotated[Path, typer.Option("--results", help="Directory of the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Most candidates to try per family and problem."),
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", help=f"One of {', '.join(ARCHS)} (default: the spec's).")
]


def main() -> None:
    """Run the command line; every deliberate error becomes its message and exit code."""
    terminal.to_the_end(app)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"attnsweep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _load(spec: Path, kernels: Path | None) -> tuple[SweepSpec, dict[str, Kernel]]:
    from attnsweep.family.declare import discover
    from attnsweep.spec.load import load_spec

    families = discover(kernels)
    return load_spec(spec, families), families


@app.command()
def run(
    spec: SpecArgument,
    json_: JsonOption = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only count the candidates and what each rule removes."),
    ] = False,
    limit: LimitOption = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh/--resume",
            help="Start over, or keep the rows that are still valid.",
        ),
    ] = False,
    kernels: KernelsOption = None,
    results: ResultsOption = Path("results"),
    arch: ArchOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Sweep: compile, check, time and rank every candidate of SPEC.

    An interrupted or repeated run continues where it stopped, unless --fresh is given. Ctrl-C
    prints the ranking so far.
    """
    from attnsweep import sweep
    from attnsweep.show import progress, views
    from attnsweep.spec.plan import plan, plan_facts
    from attnsweep.tools.compile import target_arch
    from attnsweep.tools.doctor import without_gpu

    loaded, families = _load(spec, kernels)
    if dry_run:
        planned = plan(loaded, families, target_arch(loaded, arch))
        shown = views.planned(planned, limit, console.width)
        _print(shown, plan_facts(planned, limit), json_)
        return
    if arch is not None:
        source = "its recording" if loaded.device == "replay" else "the GPU"
        raise SpecError(f"--arch needs --dry-run; this run takes the architecture of {source}")
    try:
        with progress.watch(errors) as observer:
            outcome = sweep.run(
                loaded, families, results=results, fresh=fresh, limit=limit, observer=observer
            )
    except NoGpuError as error:
        raise NoGpuError(
            f"{error.what}. Nothing was measured.",
            hint=without_gpu(error, spec, loaded.arch, kernels, errors.width),
        ) from error
    if outcome.interrupted:
        errors.print("interrupted: all rows are kept; the same command continues from here")
    _print_run(outcome.run, json_, top)
    raise typer.Exit(outcome.exit_code)


@app.command(name="report")
def report_(
    run_: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run's directory (default: the latest)."),
    ] = None,
    json_: JsonOption = False,
    results: ResultsOption = Path("results"),
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a self-contained page to FILE."),
    ] = None,
    target_us: Annotated[
        float | None,
        typer.Option(
            "--target-us",
            min=0.001,
            help="With --html: reference time for the ladder (default: the fastest peer).",
        ),
    ] = None,
) -> None:
    """Print the ranked tables of a stored run, or write them as a page; needs no GPU and no CUDA.

    The page holds tables, plots and provenance in one file that needs no network.
    """
    from attnsweep.show import html as page
    from attnsweep.show.plots import PlotLibrary
    from attnsweep.store.run import latest_run, open_run

    plots = None if html is None else PlotLibrary()
    with _no_collection():
        read = latest_run(results) if run_ is None else open_run(run_)
        if html is None:
            _print_run(read, json_, top)
            return
        size = page.write(read, html, top=top, target_us=target_us, plots=plots)
    text = f"{html}: {size / 1e6:.1f} MB, {len(read.trials)} trials of {read.directory}"
    data = {"page": str(html), "bytes": size, "run": str(read.directory)}
    _print([Text(text)], data, json_)


@app.command()
def check(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC|OLD",
            help="With --against: a spec. With --recorded: the run to compare with.",
            show_default=False,
        ),
    ],
    new: Annotated[
        Path | None, typer.Argument(metavar="[NEW]", help="With --recorded: the run to judge.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Time this run's winners against today's kernels, in turns; needs a GPU.",
        ),
    ] = None,
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="Compare two runs as recorded; nothing is measured."),
    ] = False,
    slower: Annotated[
        float | None,
        typer.Option(
            "--slower",
            min=0.0,
            max=10.0,
            help="Slowdown that counts as a regression: 0.02 is 2 % (default: the spec's; "
            "with --recorded 0.03).",
        ),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            min=0.0,
            help="With --against: seconds of rounds per problem, after which the verdict is "
            "inconclusive (default: the spec's).",
        ),
    ] = None,
    other_driver: Annotated[
        bool,
        typer.Option(
            "--other-driver", help="With --against: accept a run measured with another driver."
        ),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML for a CI job.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Write the table as Markdown (default: add it to $GITHUB_STEP_SUMMARY, if set).",
        ),
    ] = None,
    json_: JsonOption = False,
    kernels: KernelsOption = None,
) -> None:
    """Check whether the best candidate of a problem got slower.

    SPEC --against RUN takes the winners of RUN: their kept machine code and the same configs
    compiled from today's kernels take turns in one process on one GPU. New code must first be right
    on every case; unchanged code passes without timing.

    --recorded OLD NEW compares two recorded runs and needs no GPU.

    Exit code 1 if one regressed or is wrong, 4 if one is inconclusive, 0 otherwise.
    """
    from attnsweep.check import live, verdicts
    from attnsweep.check import recorded as recordings
    from attnsweep.show import progress
    from attnsweep.store.run import open_run

    if recorded == (against is not None) or recorded == (new is None):
        raise SpecError(
            "check needs either a spec and --against RUN, or --recorded and two runs",
            hint="attnsweep check SPEC --against RUN   measures, on a GPU\n  "
            "attnsweep check --recorded OLD NEW   compares what was measured",
        )
    if against is None or new is not None:
        old_run, new_run = open_run(subject), open_run(new or subject)
        compared = recordings.compare(old_run, new_run, slower=0.03 if slower is None else slower)
    else:
        baseline = open_run(against)
        loaded, families = _load(subject, kernels)
        with progress.watch(errors) as observer:
            compared = live.check(
                loaded,
                families,
                baseline,
                slower=slower,
                budget_s=budget_s,
                other_driver=other_driver,
                observer=observer,
            )
    if junit is not None:
        verdicts.write(junit, compared.to_junit())
    if markdown is not None:
        verdicts.write(markdown, compared.to_markdown())
    else:
        verdicts.summarise(compared.to_markdown())
    lines = [Text(line, style) for line, style in compared.lines(console.width)]
    with contextlib.suppress(BrokenPipeError):  # `check … | head`: the exit code is the verdict
        _print(lines, compared.to_json(), json_)
    raise typer.Exit(compared.exit_code)


@app.command()
def accept(
    run_: Annotated[Path, typer.Argument(metavar="RUN", help="The run to accept.")],
    baseline: Annotated[
        Path,
        typer.Argument(metavar="BASELINE", help="The directory to replace or create."),
    ],
    force: Annotated[
        bool,
        typer.Option("--force", help="Accept a run that is unfinished, or of another spec or GPU."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Replace BASELINE with a copy of RUN.

    A run that lacks a winner or its machine code, or that is of another spec or GPU than the
    baseline, is refused with exit code 2.
    """
    from attnsweep.check.accept import accept as accept_run
    from attnsweep.store.run import open_run

    read = open_run(run_)
    _warn(read)
    overridden = accept_run(read, baseline, force=force)
    for objection in overridden:
        errors.print(f"[yellow]warning:[/] accepted although {escape(objection)}")
    data = {"run": str(run_), "baseline": str(baseline), "overridden": overridden}
    _print([Text(f"{baseline} is now {run_}: {len(read.trials)} trials")], data, json_)


@app.command(name="compile")
def compile_(
    spec: SpecArgument,
    arch: ArchOption = None,
    json_: JsonOption = False,
    limit: LimitOption = None,
    kernels: KernelsOption = None,
    every: Annotated[bool, typer.Option("--all", help="List every candidate.")] = False,
) -> None:
    """Compile every candidate of SPEC without a GPU; show spills, fit and occupancy.

    The cubins stay in the cache, where a GPU machine with the same NVRTC finds them. Exit code 1
    if any stage does not compile, or if a problem has no candidate left.
    """
    from attnsweep.show import progress, views
    from attnsweep.tools.compile import compile_all, target_arch, without_candidates

    loaded, families = _load(spec, kernels)
    target = target_arch(loaded, arch)
    with progress.watch(errors) as observer:
        trials = compile_all(loaded, families, target, limit=limit, observer=observer)
    rows = [trial.model_dump(mode="json", exclude_none=True) for trial in trials]
    _print(views.compiled(trials, target, every, console.width), rows, json_)
    for label in (empty := without_candidates(trials)):
        errors.print(f"[red]{escape(label)}: no candidate is left[/]")
    raise typer.Exit(1 if empty or any(t.status == "compile_error" for t in trials) else 0)


@app.command()
def profile(
    run_: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", help="Only 'NAME=value …': a parameter, kernel or variant (_ for a space)."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Candidates per problem.")] = 1,
    json_: JsonOption = False,
    kernels: KernelsOption = None,
) -> None:
    """Read hardware counters of a run's best candidates through Nsight Compute (ncu).

    Per stage: memory and L2 traffic, use of tensor cores and issue slots, why warps waited. The run
    keeps them in counters.json.
    """
    from attnsweep.family.declare import discover
    from attnsweep.gpu.worker import Worker
    from attnsweep.show import views
    from attnsweep.store.run import open_run
    from attnsweep.tools import profile as counters

    stored, families = open_run(run_), discover(kernels)
    picked = counters.chosen(stored, where or (), top)
    counters.check(picked, families)
    if counters.find_ncu() is None:  # checked before it asks for a GPU
        counters.count([])
    with Worker(timeout_s=60) as worker:
        here = worker.describe()
    limit = here.memory_bytes // 4
    built = counters.compiled(picked, families, arch_named(here.arch), limit)
    counted = list(zip(picked, counters.count(built), strict=True))
    kept = counters.write(
        stored.directory, counted, f"{here.gpu}, driver {here.driver}, {here.date[:10]}"
    )
    _print(views.counters(kept, console.width), kept, json_)


@app.command()
def inspect(
    kernel: Annotated[str, typer.Argument(help="A kernel family.", show_default=False)],
    config: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="'BLOCK_M=64 BLOCK_N=128'; other parameters are those of the first valid config.",
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option("--problem", help="'1,16,1024,64' or '(2,32/8,2048,128) bf16 causal'."),
    ] = None,
    arch: Annotated[str, typer.Option("--arch", help=f"One of {', '.join(ARCHS)}.")] = "sm_90a",
    json_: JsonOption = False,
    kernels: KernelsOption = None,
    results: ResultsOption = Path("results"),
) -> None:
    """Analyse one compiled config without a GPU: resources, occupancy, instructions, bound.

    Per stage: registers, spills, shared memory, what limits the occupancy, cubin size, and the
    number of instructions of each kind (this needs nvdisasm: the `inspect` extra).
    """
    from attnsweep.family.declare import discover
    from attnsweep.problem import Problem
    from attnsweep.spec.yaml_file import nearest
    from attnsweep.tools import inspect as inspection

    families = discover(kernels)
    if kernel not in families:
        raise KernelError(f"unknown kernel {kernel!r}", hint=nearest(kernel, families))
    target = arch_named(arch)
    found = inspection.inspect(
        families[kernel],
        " ".join(config or ()),
        Problem.parse(problem) if problem is not None else None,
        target,
        card=inspection.card_of(target, results),
    )
    _print([Text(line) for line in found.lines(console.width)], found.to_json(), json_)


@app.command(name="list")
def list_(kernels: KernelsOption = None, json_: JsonOption = False) -> None:
    """List kernel families with their parameters and rules, and the baselines."""
    from attnsweep.family.declare import discover
    from attnsweep.show import views
    from attnsweep.spec.model import BASELINES

    families = discover(kernels)
    shown = views.families(families, BASELINES, console.width)
    _print(shown, views.families_json(families, BASELINES), json_)


@app.command()
def doctor(json_: JsonOption = False) -> None:
    """Show what this machine can do, what is missing, and how to fix it.

    Exit code 3 if it cannot run a sweep on a GPU.
    """
    from attnsweep.tools.doctor import examine, lines_of, verdict

    findings = examine()
    ready = all(finding.ok for finding in findings if finding.needed)
    data: list[dict[str, Any]] = [
        {name: getattr(f, name) for name in ("name", "ok", "detail", "fix", "needed")}
        for f in findings
    ]
    shown = [*lines_of(findings, console.width), Text(verdict(findings))]
    _print(shown, {"ready": ready, "findings": data}, json_)
    raise typer.Exit(0 if ready else 3)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause collection: rows hold no cycles, and it took 1.0 of 3.1 s of 10,000 trials' report."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _print_run(run_: Run, json_: bool, top: int) -> None:
    from attnsweep.show import tables

    _warn(run_)
    if json_:
        _print([], tables.to_json(run_), True)
    else:
        tables.print_run(run_, console, top=top)


def _warn(*runs: Run) -> None:
    for warning in (warning for each in runs for warning in each.warnings):
        errors.print(f"[yellow]warning:[/] {escape(warning)}")


def _print(lines: list[Text], data: Any, json_: bool) -> None:
    if json_:
        console.file.write(json.dumps(data, indent=2, default=str) + "\n")
        return
    for line in lines:
        console.print(line, soft_wrap=True)

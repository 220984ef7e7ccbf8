"""The commands. No logic: each parses, calls one function of a lower layer and prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from attnsweep import __version__, candidates, report, sweep, view
from attnsweep.arch import ARCHS, Arch, arch_named
from attnsweep.console import console, errors
from attnsweep.errors import AttnsweepError, NoGpuError, SpecError
from attnsweep.fields import BASELINES
from attnsweep.kernel import Kernel, discover
from attnsweep.spec import SweepSpec, load_spec
from attnsweep.store import latest_run, open_run

app = typer.Typer(
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
ResultsOption = Annotated[Path, typer.Option("--results", help="Where runs are kept.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="At most this many candidates per family and problem."),
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", help=f"One of {', '.join(ARCHS)}; else the spec's.")
]


def main() -> None:
    """Run the command line; every deliberate error becomes its message and exit code."""
    try:
        app()
    except AttnsweepError as error:
        errors.print(f"[bold red]error:[/] {view.escaped(error.render())}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # `attnsweep report | head`
        sys.stderr.close()
        sys.exit(0)


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
    families = discover(kernels)
    return load_spec(spec, families), families


@app.command()
def run(
    spec: SpecArgument,
    json_: JsonOption = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Count the candidates and what each rule removed; stop."),
    ] = False,
    limit: LimitOption = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh/--resume", help="Begin anew (older rows are set aside), or keep what holds."
        ),
    ] = False,
    kernels: KernelsOption = None,
    results: ResultsOption = Path("results"),
    arch: ArchOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Sweep: compile, check, time and rank every candidate of SPEC.

    Without --fresh an interrupted or repeated run goes on where it was. Ctrl-C prints the ranking
    of what is measured so far.
    """
    loaded, families = _load(spec, kernels)
    if dry_run:
        planned = candidates.plan(loaded, families, _arch(loaded, arch))
        _print(view.planned(planned, limit), view.planned_json(planned, limit), json_)
        return
    if arch is not None and loaded.device == "cuda":
        raise SpecError("--arch goes with --dry-run; a run takes the architecture of the GPU")
    try:
        with view.watch(errors) as observer:
            outcome = sweep.run(
                loaded, families, results=results, fresh=fresh, limit=limit, observer=observer
            )
    except NoGpuError as error:
        raise NoGpuError(
            f"{error.what}. Nothing was measured.", hint=_without_gpu(error, spec)
        ) from error
    if outcome.interrupted:
        errors.print("interrupted: what was measured is kept; the same command goes on from here")
    _print_run(outcome.run, json_, top)
    raise typer.Exit(outcome.exit_code)


def _without_gpu(error: NoGpuError, spec: Path) -> str:
    lines = [error.hint] if error.hint else []
    lines += [
        "What works here:",
        "  attnsweep run configs/quickstart.yaml".ljust(48) + " replay a recorded run",
        f"  attnsweep compile {spec} --arch sm_90a".ljust(48) + " compile, prune, resources",
        "  attnsweep doctor".ljust(48) + " what is missing, and the command that mends it",
    ]
    return "\n  ".join(lines)


@app.command(name="report")
def report_(
    run_: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run's directory; the latest one unless given."),
    ] = None,
    json_: JsonOption = False,
    results: ResultsOption = Path("results"),
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Print the ranked tables of a stored run; needs no GPU and no CUDA."""
    _print_run(latest_run(results) if run_ is None else open_run(run_), json_, top)


@app.command(name="compile")
def compile_(
    spec: SpecArgument,
    arch: ArchOption = None,
    json_: JsonOption = False,
    limit: LimitOption = None,
    kernels: KernelsOption = None,
    every: Annotated[bool, typer.Option("--all", help="List every candidate.")] = False,
) -> None:
    """Compile every candidate of SPEC without a GPU: what spills, what fits, occupancy.

    The cubins stay in the cache, where a GPU machine with the same NVRTC finds them. Exit code 1
    if any stage does not compile.
    """
    loaded, families = _load(spec, kernels)
    target = _arch(loaded, arch)
    with view.watch(errors) as observer:
        trials = candidates.compile_all(loaded, families, target, limit=limit, observer=observer)
    rows = [trial.model_dump(mode="json", exclude_none=True) for trial in trials]
    _print(view.compiled(trials, target, every), rows, json_)
    raise typer.Exit(1 if any(trial.status == "compile_error" for trial in trials) else 0)


def _arch(spec: SweepSpec, arch: str | None) -> Arch:
    """--arch, the spec's, or that of the recording or the GPU."""
    if arch is not None or spec.arch is not None:
        return arch_named(arch or spec.arch or "")
    if spec.recording is not None:
        environment = open_run(spec.recording).environment
        if environment is not None:
            return arch_named(environment.arch)
    from attnsweep.workers import Worker

    try:
        with Worker(timeout_s=60) as worker:
            return arch_named(worker.describe().arch)
    except NoGpuError as error:
        raise SpecError(
            "for which architecture? The spec names none, and there is no GPU to ask",
            hint=f"add --arch, one of {', '.join(ARCHS)}",
        ) from error


@app.command(name="list")
def list_(kernels: KernelsOption = None, json_: JsonOption = False) -> None:
    """List kernel families with their parameters and rules, and the baselines."""
    families = discover(kernels)
    _print(view.families(families, BASELINES), view.families_json(families, BASELINES), json_)


@app.command()
def doctor(json_: JsonOption = False) -> None:
    """Say what this machine can do, what is missing, and the command that mends it.

    Exit code 3 if it cannot run a sweep on a GPU.
    """
    from attnsweep.doctor import examine

    findings = examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.needed else "-"
        table.add_row(mark, finding.name, view.escaped(finding.detail))
        if finding.fix and not finding.ok:
            table.add_row("", "", f"[cyan]{view.escaped(finding.fix)}[/]")
    ready = all(finding.ok for finding in findings if finding.needed)
    verdict = "ready to measure" if ready else "cannot measure here; compile, report and replay can"
    data: list[dict[str, Any]] = [
        {name: getattr(f, name) for name in ("name", "ok", "detail", "fix", "needed")}
        for f in findings
    ]
    _print([table, verdict], {"ready": ready, "findings": data}, json_)
    raise typer.Exit(0 if ready else 3)


def _print_run(run_: Any, json_: bool, top: int) -> None:
    for warning in run_.warnings:
        errors.print(f"[yellow]warning:[/] {view.escaped(warning)}")
    if json_:
        _print([], report.to_json(run_), True)
    else:
        report.print_run(run_, console, top=top)


def _print(renderables: list[Any], data: Any, json_: bool) -> None:
    if json_:
        console.file.write(json.dumps(data, indent=2, default=str) + "\n")
        return
    for renderable in renderables:
        console.print(renderable)

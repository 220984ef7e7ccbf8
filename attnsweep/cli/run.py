"""`attnsweep run`: sweep a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnsweep.cli import completion
from attnsweep.cli.app import (
    JsonOption,
    KernelsOption,
    LimitOption,
    ProblemsOption,
    ResultsOption,
    SetOption,
    SpecArgument,
    app,
    examples,
    load,
    print_result,
    print_run,
)
from attnsweep.errors import NoGpuError, SpecError
from attnsweep.hardware import ARCHS
from attnsweep.show.terminal import console, errors


@app.command(
    epilog=examples(
        "attnsweep run h100",
        "attnsweep run h100 --dry-run",
        "attnsweep run h100 --problem '4,32,4096,128 bf16 causal'",
        "attnsweep run h100 --set 'kernels.flash_fwd_wgmma.BLOCK_N=[64,128]'",
        "attnsweep run my.yaml --kernels my_kernels --results /data/results",
    )
)
def run(
    spec: SpecArgument,
    problem: ProblemsOption = None,
    set_: SetOption = None,
    json_: JsonOption = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only count the candidates and what each rule removes."),
    ] = False,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive", help="Try every candidate, whatever the spec's search leaves out."
        ),
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
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help=f"With --dry-run: one of {', '.join(ARCHS)} (default: the spec's).",
            autocompletion=completion.archs,
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows per table.")] = 10,
) -> None:
    """Sweep: compile, check, time and rank every candidate of SPEC.

    An interrupted or repeated run continues where it stopped, unless --fresh is given. Ctrl-C
    prints the ranking so far. With --problem or --set the run is stored beside the spec's own, as
    SPEC-<digits>; the same command continues there.
    """
    from attnsweep import sweep
    from attnsweep.show import progress, views
    from attnsweep.spec.load import with_every_candidate
    from attnsweep.spec.plan import plan, plan_facts
    from attnsweep.tools.compile import target_arch
    from attnsweep.tools.doctor import without_gpu

    options = [word for text in problem or () for word in ("--problem", text)]
    options += [word for text in set_ or () for word in ("--set", text)]
    loaded, families = load(spec, kernels, set_ or (), problem or ())
    if exhaustive:
        loaded = with_every_candidate(loaded)
    if dry_run:
        planned = plan(loaded, families, target_arch(loaded, arch))
        shown = views.planned(planned, limit, console.width)
        print_result(shown, plan_facts(planned, limit), json_)
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
            hint=without_gpu(error, spec, loaded.arch, kernels, errors.width, options),
        ) from error
    if outcome.interrupted:
        errors.print("interrupted: all rows are kept; the same command continues from here")
    print_run(outcome.run, json_, top)
    raise typer.Exit(outcome.exit_code)

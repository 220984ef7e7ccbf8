"""`attnsweep profile`: hardware counters of the best candidates of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from attnsweep.cli import completion, options
from attnsweep.cli.app import CODE, app, examples, print_result
from attnsweep.core.hardware import arch_named
from attnsweep.reports.terminal import console, errors


@app.command(
    rich_help_panel=CODE,
    epilog=examples(
        "attnsweep profile results/h200/flash_short",
        "attnsweep profile results/h200/flash_short --top 3 --where BLOCK_N=128",
        "attnsweep profile results/h200/flash_short --problem 1,16,1024,64",
    ),
)
def profile(
    run_: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's directory.", autocompletion=completion.runs),
    ],
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", help="Only 'NAME=value …': a parameter, kernel or variant (_ for a space)."
        ),
    ] = None,
    problem: options.OfProblems = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Candidates per problem.")] = 1,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave ncu's report, which Nsight Compute opens, in the run."),
    ] = False,
    json_: options.Json = False,
    kernels: options.Kernels = None,
    wait: options.Wait = False,
) -> None:
    """Read hardware counters of a run's best candidates through Nsight Compute (ncu).

    The run keeps them in counters.json, of each stage.
    """
    from attnsweep.bench.worker import Worker
    from attnsweep.device.lock import held
    from attnsweep.family.discover import discover
    from attnsweep.reports import views
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.store.run import open_run
    from attnsweep.tools import profile as counters

    shapes = [one for text in problem or () for one in read_shapes([text], option="--problem")]
    stored, families = open_run(run_), discover(kernels)
    picked = counters.chosen(stored, where or (), top, shapes)
    counters.check(picked, families)
    if counters.find_ncu() is None:  # checked before it asks for a GPU
        counters.count([])
    with Worker(timeout_s=60) as worker:
        here = worker.describe()
    limit = here.memory_bytes // 4
    built = counters.compiled(picked, families, arch_named(here.arch), limit)
    report = counters.report_path(stored.directory) if keep else None
    launches = sum(len(candidate.timed.stages) for candidate in built)
    errors.print(f"{launches} launches of {len(built)} candidates, once for each group of counters")
    with held(here.uuid, here.gpu, wait=wait, say=lambda text: errors.print(escape(text))):
        counted = list(zip(picked, counters.count(built, keep=report), strict=True))
    kept = counters.write(
        stored.directory, counted, f"{here.gpu}, driver {here.driver}, {here.date[:10]}"
    )
    print_result(views.counters(kept, console.width), kept, json_)
    if report is not None:
        errors.print(f"kept {escape(str(report))}: ncu-ui opens it", soft_wrap=True)

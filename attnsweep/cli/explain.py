"""`attnsweep explain`: why a candidate won or lost, and which parameters mattered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from attnsweep.cli import options
from attnsweep.cli.app import READ, app, examples, latest_or, no_collection, print_result, warn
from attnsweep.core.errors import ProblemError
from attnsweep.reports.terminal import console, errors


@app.command(
    rich_help_panel=READ,
    epilog=examples(
        "attnsweep explain",
        "attnsweep explain results/h200/flash_short",
        "attnsweep explain results/h200/flash_short BLOCK_N=64 --problem 1,16,1024,64",
    ),
)
def explain(
    context: typer.Context,
    run_: options.LatestRun = None,
    config: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="'BLOCK_N=64 WARPGROUPS=4', a kernel, or the values that tables print, '64/4' "
            "(default: the winner).",
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="SHAPE",
            help="'1,16,1024,64' or '2,32/8,2048,128 bf16 causal' (default: every problem).",
        ),
    ] = None,
    json_: options.Json = False,
    results: options.Results = Path("results"),
    kernels: options.Kernels = None,
) -> None:
    """Explain why a candidate of RUN won or lost, and which parameters mattered; needs no GPU.

    If several candidates fit CONFIG, the best ranked is explained.
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports.explain import explain as explained
    from attnsweep.reports.explain_text import lines
    from attnsweep.specs.shapes import read_shapes

    if run_ is not None and "=" in run_.name and not run_.exists():
        run_, config = None, [str(run_), *(config or [])]  # a CONFIG of the latest run
    if problem is not None:
        shapes = read_shapes([problem], option="--problem")
        if len(shapes) != 1:
            raise ProblemError(f"{len(shapes)} shapes", where="--problem", hint="name one")
        problem = shapes[0].label
    families = discover(kernels)
    with no_collection():
        read = latest_or(context, run_, results)
        found = explained(read, config or (), problem, families)
    warn(read)
    if run_ is None:
        errors.print(Text(f"the latest run: {read.directory}"), soft_wrap=True)
    shown: list[Text] = []
    for each in found:
        shown += [Text()] * bool(shown) + lines(each, console.width)
    print_result(shown, [each.to_json() for each in found], json_)

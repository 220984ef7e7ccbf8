"""`attnsweep compare`: two recorded runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnsweep.cli import options
from attnsweep.cli.app import READ, app, examples, no_collection, print_result, warn
from attnsweep.reports.terminal import console


@app.command(
    rich_help_panel=READ,
    epilog=examples(
        "attnsweep compare results/h100-80gb-hbm3/batched results/h200/batched",
        "attnsweep compare before/h100/mine after/h100/mine --json",
    ),
)
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run's directory.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run's directory.")],
    json_: options.Json = False,
    kernels: options.Kernels = None,
) -> None:
    """Set two runs side by side: two cards, two kinds of GPU, two versions. Needs no GPU.

    For each problem that both have timed: the winners, whether they agree, what each costs in the
    other run, and the ratios to the same baseline. Whatever differs in GPU and software comes
    first. To judge a change of code on one card, take `check`.
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports.compare import compare as compared
    from attnsweep.reports.compare import lines
    from attnsweep.store.run import open_run

    with no_collection():
        runs = open_run(first), open_run(second)
        found = compared(*runs, discover(kernels))
    for run in runs:
        warn(run)
    print_result(lines(found, console.width), found.to_json(), json_)

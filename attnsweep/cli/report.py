"""`attnsweep report`: the tables of a stored run, or its page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from attnsweep.cli.app import JsonOption, ResultsOption, app, no_collection, print_result, print_run


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
    with no_collection():
        read = latest_run(results) if run_ is None else open_run(run_)
        if html is None:
            print_run(read, json_, top)
            return
        size = page.write(read, html, top=top, target_us=target_us, plots=plots)
    text = f"{html}: {size / 1e6:.1f} MB, {len(read.trials)} trials of {read.directory}"
    data = {"page": str(html), "bytes": size, "run": str(read.directory)}
    print_result([Text(text)], data, json_)

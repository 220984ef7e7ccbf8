"""`attnsweep merge`: runs of parts of one spec, as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnsweep.cli import options
from attnsweep.cli.app import READ, app, examples, no_collection, print_run, refuse_idle, warn
from attnsweep.reports.terminal import errors


@app.command(
    rich_help_panel=READ,
    epilog=examples(
        "attnsweep merge h100/mine-1of2 h100/mine-2of2 --out h100/mine",
        "attnsweep merge h100/mine-*of8 --out h100/mine --json",
    ),
)
def merge(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directories of runs.")],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="Where the whole run goes.")],
    json_: options.Json = False,
    top: options.Top = None,
    full: options.Full = False,
) -> None:
    """Make one run of runs of parts of a spec, as `run --shard i/n` writes them.

    They must have the same spec, kind of GPU, driver and versions, and no problem in common. The
    whole reports, checks and is accepted like any other run. The parts stay as they are.
    """
    from attnsweep.store.run import open_run
    from attnsweep.tools.merge import merge as merged

    if json_:
        refuse_idle(context, ("top", "full"), "with --json, which has every row")
    with no_collection():
        parts = [open_run(path) for path in runs]
        for part in parts:
            warn(part)
        whole = merged(parts, out, lambda text: errors.print(f"note: {text}", soft_wrap=True))
        print_run(whole, json_, top, full)

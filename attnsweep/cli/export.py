"""`attnsweep export`: the winners of runs as a package that PyTorch can call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import GUARD, app, examples, print_result
from attnsweep.reports.terminal import Form, counted, errors


@app.command(
    rich_help_panel=GUARD,
    name="export",
    epilog=examples(
        "attnsweep export results/h100-80gb-hbm3/my_model --out my_attention",
        "attnsweep export results/*/my_model --out dist/kernels --name my_attention",
    ),
)
def export_(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Directories of runs, of one or several GPUs.",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory to write, made anew each time.")],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Import name of the package (default: that of --out)."),
    ] = None,
    json_: options.Json = False,
    form: options.Progress = Form.AUTO,
    kernels: options.Kernels = None,
) -> None:
    """Write the winners of runs as a package: cubins, a table and a launcher for PyTorch.

    The package needs PyTorch and cuda-bindings alone. Winners are compiled anew, which needs NVRTC
    but no GPU. Except in FP8, a problem is left out if the run has no time of PyTorch's own
    attention, which a winner must beat.
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports import progress
    from attnsweep.serve.export import export

    with progress.counting(errors, "compile", "kernel", form) as compiled:
        done = export(runs, out, discover(kernels), name=name, compiled=compiled)
    for note in done.notes:
        errors.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if not json_:
        for reason in done.left_out:
            errors.print(f"[yellow]left out:[/] {escape(reason)}", soft_wrap=True)
    data = {
        "directory": str(done.directory),
        "name": done.name,
        "winners": done.winners,
        "kernels": done.kernels,
        "bytes": done.nbytes,
        "gpus": list(done.gpus),
        "left_out": done.left_out,
    }
    found = f"{counted(done.winners, 'problem')}, {counted(done.kernels, 'kernel')}"
    lines = [
        *(f"for {gpu}" for gpu in done.gpus),
        f"{done.directory}: {found}, {done.nbytes / 2**20:.1f} MiB",
        # Without a separator, pip would look for a project of that name in the index.
        f"pip install {os.path.join(os.curdir, done.directory)}, then: import {done.name}",
    ]
    print_result([Text(line) for line in lines], data, json_)

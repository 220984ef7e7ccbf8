"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnsweep.cli import completion
from attnsweep.core.hardware import ARCHS
from attnsweep.reports.terminal import Form


def arch(text: str) -> Any:
    """The option --arch. text: its help, with {} in place of the architectures."""
    archs = text.format(", ".join(ARCHS))
    return typer.Option("--arch", help=archs, autocompletion=completion.archs)


Spec = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC",
        help="YAML sweep spec, or the name of a shipped one.",
        show_default=False,
        autocompletion=completion.specs,
    ),
]
LatestRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="A run's directory (default: the latest).",
        autocompletion=completion.runs,
    ),
]
Kernels = Annotated[
    Path | None, typer.Option("--kernels", help="Directory with kernel families of your own.")
]
Results = Annotated[Path, typer.Option("--results", help="Directory of the runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Replace a value of the spec: 'problems[0].causal=true'; may be repeated.",
    ),
]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem",
        metavar="SHAPE",
        help="In place of the spec's problems: '4,32,4096,128 bf16 causal', "
        "'B=4 H=32 Hkv=8 S=4096 D=128', or a CSV file; may be repeated.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Most candidates to try per family and problem."),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="CARDS",
        help="Whole problems on several cards of this machine: all, or numbers or UUIDs as 0,2 "
        "(default: the first visible card).",
    ),
]
Top = Annotated[
    int | None,
    typer.Option(
        "--top", min=1, help="Candidates per table (default: 3, with --full 10).", metavar="NUMBER"
    ),
]
Full = Annotated[
    bool,
    typer.Option(
        "--full", help="Print all that is known: bounds, whole configs, stages, failures, legends."
    ),
]
Wait = Annotated[
    bool,
    typer.Option("--wait", help="Wait until no other run times on the card, instead of failing."),
]
Progress = Annotated[
    Form,
    typer.Option(
        "--progress",
        help="Bars on a terminal and lines elsewhere, always lines, or JSON lines on stderr.",
    ),
]
Causal = Annotated[
    bool,
    typer.Option("--causal", help="Mask every shape that does not say `causal` or `full`."),
]
Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND", help="Program to run.", show_default=False)
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh/--resume", help="Start over, or keep the rows that are still valid."),
]
OfProblems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem",
        metavar="SHAPE",
        help="Only this problem of the run, '4,32,4096,128 bf16 causal'; may be repeated.",
    ),
]

"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attnsweep.cli import completion
from attnsweep.core.hardware import ARCHS
from attnsweep.core.share import ShareError, share_of_text
from attnsweep.reports.terminal import ProgressForm


def option(text: str, *names: str, **how: Any) -> Any:
    """An option with this help. names: default: its parameter's, which flags must write out."""
    return typer.Option(*names, help=text, **how)


def argument(text: str, metavar: str, **how: Any) -> Any:
    """An argument with this help."""
    return typer.Argument(metavar=metavar, help=text, **how)


def share(text: str) -> float:
    """Parse a share: `0.03` or `3%`."""
    try:
        return share_of_text(text)
    except ShareError as error:
        raise typer.BadParameter(f"it {error}\n  {error.hint}") from error


def arch(text: str) -> Any:
    """A Typer option --arch. text: its help, with {} in place of the architectures."""
    archs = text.format(", ".join(ARCHS))
    return typer.Option("--arch", help=archs, autocompletion=completion.archs)


Spec = Annotated[
    Path,
    argument(
        "YAML sweep spec, or the name of a shipped one.",
        "SPEC",
        show_default=False,
        autocompletion=completion.specs,
    ),
]
LatestRun = Annotated[
    Path | None,
    argument("A run's directory (default: the latest).", "RUN", autocompletion=completion.runs),
]
Kernels = Annotated[Path | None, option("Directory with kernel families of your own.", "--kernels")]
Results = Annotated[Path, option("Directory of the runs.", "--results")]
Json = Annotated[bool, option("Print the result as JSON.", "--json")]
Set = Annotated[
    list[str] | None,
    option(
        "Replace a value of the spec: 'problems[0].causal=true'; may be repeated.",
        "--set",
        metavar="PATH=VALUE",
    ),
]
Problems = Annotated[
    list[str] | None,
    option(
        "In place of the spec's problems: '4,32,4096,128 bf16 causal', "
        "'B=4 H=32 Hkv=8 S=4096 D=128', or a CSV file; may be repeated.",
        "--problem",
        metavar="SHAPE",
    ),
]
Limit = Annotated[
    int | None, option("Most candidates to try per family and problem.", "--limit", min=1)
]
Gpus = Annotated[
    str | None,
    option(
        "Whole problems on several cards of this machine: all, or numbers or UUIDs as 0,2 "
        "(default: the first visible card).",
        "--gpus",
        metavar="CARDS",
    ),
]
Top = Annotated[
    int | None,
    option("Candidates per table (default: 3, with --full 10).", "--top", min=1, metavar="NUMBER"),
]
Full = Annotated[
    bool,
    option("Print all that is known: bounds, whole configs, stages, failures, legends.", "--full"),
]
Wait = Annotated[
    bool, option("Wait until no other run times on the card, instead of failing.", "--wait")
]
Progress = Annotated[
    ProgressForm,
    option(
        "Bars on a terminal and lines elsewhere, always lines, or JSON lines on stderr.",
        "--progress",
    ),
]
Causal = Annotated[
    bool, option("Mask every shape that does not say `causal` or `full`.", "--causal")
]
Command = Annotated[list[str], argument("Program to run.", "-- COMMAND", show_default=False)]
Fresh = Annotated[
    bool, option("Start over, or keep the rows that are still valid.", "--fresh/--resume")
]
OfProblems = Annotated[
    list[str] | None,
    option(
        "Only this problem of the run, '4,32,4096,128 bf16 causal'; may be repeated.",
        "--problem",
        metavar="SHAPE",
    ),
]

"""`attnsweep init`: write a commented spec for a card."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from attnsweep.cli import completion
from attnsweep.cli.app import FIND, JsonOption, ProblemsOption, app, examples, print_result
from attnsweep.cli.tune import write_spec
from attnsweep.core.errors import NoGpuError
from attnsweep.core.hardware import ARCHS
from attnsweep.reports.terminal import console, errors

DEFAULT = "sweep.yaml"


@app.command(
    rich_help_panel=FIND,
    epilog=examples(
        "attnsweep init",
        "attnsweep init mine.yaml --arch sm_90a --problem '4,32,4096,128 bf16 causal'",
        "attnsweep init - --arch sm_80",
    ),
)
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write; - prints it.")
    ] = Path(DEFAULT),
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help=f"One of {', '.join(ARCHS)} (default: this GPU's).",
            autocompletion=completion.archs,
        ),
    ] = None,
    problem: ProblemsOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    json_: JsonOption = False,
) -> None:
    """Write a commented spec for this GPU, to edit and to run."""
    from attnsweep.family.discover import discover
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.specs.starter import Request, example, starter, with_more
    from attnsweep.tools import target as cards

    families = discover()
    problems = read_shapes(problem, option="--problem") if problem else []
    try:
        target = cards.here(families, problems) if arch is None else cards.named(arch, families)
    except NoGpuError as error:
        given = [] if str(file) == DEFAULT else [str(file)]
        given += [word for shape in problem or () for word in ("--problem", shape)]
        again = shlex.join(["attnsweep", "init", *given, "--arch", "sm_90a"])
        hint = f"say for which: {again}; there are: {', '.join(ARCHS)}"
        hint = f"{error.hint}\n  {hint}" if error.hint else hint
        raise NoGpuError(error.what, hint=hint) from error
    name = re.sub("[^a-z0-9_-]+", "-", file.stem.lower()).strip("-") or "sweep"
    if problems:
        text = with_more(starter(Request(problems, name), target, families))
    else:
        text = example(target, name)
    if target.untried:
        errors.print(Text(f"note: {target.untried}"), soft_wrap=True)
    if str(file) == "-":
        console.file.write(text)
        return
    write_spec(file, text, force)
    said = f"{file}: a sweep for {target.gpu or target.arch.name}; next: attnsweep run {file}"
    print_result([Text(said)], {"spec": str(file), "arch": target.arch.name}, json_)

"""`attnsweep init`: write a commented spec for a card."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from attnsweep.cli import options
from attnsweep.cli.app import FIND, app, examples, print_result, without_arch
from attnsweep.cli.tune import write_spec
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.ops import ORDERS
from attnsweep.reports.terminal import console, errors

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem

DEFAULT = "sweep.yaml"


@app.command(
    rich_help_panel=FIND,
    epilog=examples(
        "attnsweep init",
        "attnsweep init mine.yaml --arch sm_90a --problem '4,32,4096,128 bf16 causal'",
        "attnsweep init --kernel mine --from attention.cu",
    ),
)
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write; - prints it.")
    ] = Path(DEFAULT),
    arch: Annotated[str | None, options.arch("One of {} (default: this GPU's).")] = None,
    problem: options.Problems = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel",
            metavar="NAME",
            help="Write a kernel of your own: NAME/NAME.cu, its declaration and its spec.",
        ),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE.cu", help="With --kernel: begin with this template of yours."
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option("--layout", help="With --kernel: the order of its tensors, bhsd or bshd."),
    ] = ORDERS[0],
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    json_: options.Json = False,
) -> None:
    """Write a commented spec for this GPU, or a kernel of your own, to edit and to run."""
    from attnsweep.family.discover import discover
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.specs.starter import Request, example, starter, with_more
    from attnsweep.tools import target as cards

    problems = read_shapes(problem, option="--problem") if problem else []
    if kernel is not None:
        if str(file) != DEFAULT:
            raise SpecError("--kernel writes NAME/, and no FILE", where=str(file))
        _write_kernel(kernel, from_, layout, arch, problems, force, json_)
        return
    if from_ is not None or layout != ORDERS[0]:
        option = "--layout" if from_ is None else "--from"
        raise SpecError(f"{option} needs --kernel NAME, the kernel that it becomes")
    families = discover()
    try:
        target = cards.here(families, problems) if arch is None else cards.named(arch, families)
    except NoGpuError as error:
        given = [] if str(file) == DEFAULT else [str(file)]
        given += [word for shape in problem or () for word in ("--problem", shape)]
        again = shlex.join(["attnsweep", "init", *given, "--arch", "sm_90a"])
        raise without_arch(error, again) from error
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


def _write_kernel(
    name: str,
    source: Path | None,
    layout: str,
    arch: str | None,
    problems: Sequence[Problem],
    force: bool,
    json_: bool,
) -> None:
    """Write a template, its declaration and its spec. Raises SpecError or KernelError."""
    from attnsweep.specs.starter import spec_of_kernel
    from attnsweep.tools.scaffold import declaration, template

    if not name.isidentifier():
        raise SpecError(f"a kernel's name is a C identifier, not {name!r}", where="--kernel")
    if layout not in ORDERS:
        raise SpecError(f"one of {', '.join(ORDERS)}, not {layout!r}", where="--layout")
    text = template(name, source, layout)
    texts = {
        ".cu": text,
        ".py": declaration(name, None if source is None else text, layout),
        ".yaml": spec_of_kernel(name, problems, arch),
    }
    for ending in texts:
        if (path := Path(name, name + ending)).exists() and not force:
            raise SpecError("is there already", where=str(path), hint="--force replaces it")
    Path(name).mkdir(exist_ok=True)
    for ending, made in texts.items():
        write_spec(Path(name, name + ending), made, force)
    spec = f"{name}/{name}.yaml"
    lines = [
        f"{name}/: {name}.cu, the template; {name}.py, its declaration; {name}.yaml, a sweep of it",
        f"next: attnsweep verify {name}, attnsweep compile {spec}, attnsweep run {spec}",
    ]
    print_result([Text(line) for line in lines], {"spec": spec, "kernel": name}, json_)

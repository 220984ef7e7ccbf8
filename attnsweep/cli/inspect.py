"""`attnsweep inspect` and `list`: one compiled config, and the families."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from attnsweep.cli.app import JsonOption, KernelsOption, ResultsOption, app, print_result
from attnsweep.errors import KernelError
from attnsweep.hardware import ARCHS, arch_named
from attnsweep.show.terminal import console


@app.command()
def inspect(
    kernel: Annotated[str, typer.Argument(help="A kernel family.", show_default=False)],
    config: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="'BLOCK_M=64 BLOCK_N=128'; other parameters are those of the first valid config.",
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option("--problem", help="'1,16,1024,64' or '(2,32/8,2048,128) bf16 causal'."),
    ] = None,
    arch: Annotated[str, typer.Option("--arch", help=f"One of {', '.join(ARCHS)}.")] = "sm_90a",
    json_: JsonOption = False,
    kernels: KernelsOption = None,
    results: ResultsOption = Path("results"),
) -> None:
    """Analyse one compiled config without a GPU: resources, occupancy, instructions, bound.

    Per stage: registers, spills, shared memory, what limits the occupancy, cubin size, and the
    number of instructions of each kind (this needs nvdisasm: the `inspect` extra).
    """
    from attnsweep.family.declare import discover
    from attnsweep.problem import Problem
    from attnsweep.spec.yaml_file import nearest
    from attnsweep.tools import inspect as inspection

    families = discover(kernels)
    if kernel not in families:
        raise KernelError(f"unknown kernel {kernel!r}", hint=nearest(kernel, families))
    target = arch_named(arch)
    found = inspection.inspect(
        families[kernel],
        " ".join(config or ()),
        Problem.parse(problem) if problem is not None else None,
        target,
        card=inspection.card_of(target, results),
    )
    print_result([Text(line) for line in found.lines(console.width)], found.to_json(), json_)


@app.command(name="list")
def list_(kernels: KernelsOption = None, json_: JsonOption = False) -> None:
    """List kernel families with their parameters and rules, and the baselines."""
    from attnsweep.family.declare import discover
    from attnsweep.show import views
    from attnsweep.spec.model import BASELINES

    families = discover(kernels)
    shown = views.families(families, BASELINES, console.width)
    print_result(shown, views.families_json(families, BASELINES), json_)

"""`attnsweep compile`: every candidate of a spec, without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from attnsweep.cli.app import (
    ArchOption,
    JsonOption,
    KernelsOption,
    LimitOption,
    ProblemsOption,
    SetOption,
    SpecArgument,
    app,
    load,
    print_result,
)
from attnsweep.show.terminal import console, errors


@app.command(name="compile")
def compile_(
    spec: SpecArgument,
    problem: ProblemsOption = None,
    set_: SetOption = None,
    arch: ArchOption = None,
    json_: JsonOption = False,
    limit: LimitOption = None,
    kernels: KernelsOption = None,
    every: Annotated[bool, typer.Option("--all", help="List every candidate.")] = False,
) -> None:
    """Compile every candidate of SPEC without a GPU; show spills, fit and occupancy.

    The cubins stay in the cache, where a GPU machine with the same NVRTC finds them. Exit code 1
    if any stage does not compile, or if a problem has no candidate left.
    """
    from attnsweep.show import progress, views
    from attnsweep.tools.compile import compile_all, target_arch, without_candidates

    loaded, families = load(spec, kernels, set_ or (), problem or ())
    target = target_arch(loaded, arch)
    with progress.watch(errors) as observer:
        trials = compile_all(loaded, families, target, limit=limit, observer=observer)
    rows = [trial.model_dump(mode="json", exclude_none=True) for trial in trials]
    print_result(views.compiled(trials, target, every, console.width), rows, json_)
    for label in (empty := without_candidates(trials)):
        errors.print(f"[red]{escape(label)}: no candidate is left[/]")
    raise typer.Exit(1 if empty or any(t.status == "compile_error" for t in trials) else 0)

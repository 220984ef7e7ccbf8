"""`attnsweep compile`: every candidate of a spec, without a GPU."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from attnsweep.cli import options
from attnsweep.cli.app import CODE, app, examples, load, print_result, refuse_idle
from attnsweep.reports.terminal import Form, console, errors


@app.command(
    rich_help_panel=CODE,
    name="compile",
    epilog=examples(
        "attnsweep compile h100",
        "attnsweep compile my.yaml --arch sm_90a --arch sm_100a",
        "attnsweep compile a100 --limit 20 --all",
    ),
)
def compile_(
    context: typer.Context,
    spec: options.Spec,
    problem: options.Problems = None,
    set_: options.Set = None,
    arch: Annotated[
        list[str] | None, options.arch("One of {} (default: the spec's); may be repeated.")
    ] = None,
    json_: options.Json = False,
    form: options.Progress = Form.AUTO,
    limit: options.Limit = None,
    kernels: options.Kernels = None,
    every: Annotated[bool, typer.Option("--all", help="List every candidate.")] = False,
) -> None:
    """Compile every candidate of SPEC without a GPU; show spills, fit and occupancy.

    The cubins stay in the cache, where a GPU machine with the same NVRTC finds them. Exit code 1
    if any stage does not compile, or if a problem has no candidate left. With several --arch the
    JSON is an object, with the rows of each.
    """
    from attnsweep.reports import progress, views
    from attnsweep.specs.plan import plan
    from attnsweep.tools.compile import Interrupted, compile_all, target_arch, without_candidates

    if json_:
        refuse_idle(context, ("every",), "with --json, which has every candidate")
    loaded = load(spec, kernels, set_ or (), problem or ())
    targets = [target_arch(loaded, name) for name in dict.fromkeys(arch or [])]
    targets = targets or [target_arch(loaded, None)]
    if len(targets) > 1:  # a family that one of them lacks is told before the first compiles
        for target in targets:
            plan(loaded, target)
    rows: dict[str, list[Any]] = {}
    failed = False
    for target in targets:
        try:
            with progress.watch(errors, form) as observer:
                trials = compile_all(loaded, target, limit=limit, observer=observer)
        except Interrupted as stop:
            done = f"{stop.done} of {stop.total} are cached"
            errors.print(f"interrupted: {done} for {target.name}; the same command goes on")
            raise typer.Exit(130) from None
        rows[target.name] = [trial.model_dump(mode="json", exclude_none=True) for trial in trials]
        if not json_:
            print_result(views.compiled(trials, target, every, console.width), None, False)
        for label in (empty := without_candidates(trials)):
            errors.print(f"[red]{escape(label)}: no candidate is left on {target.name}[/]")
        failed |= bool(empty) or any(trial.status == "compile_error" for trial in trials)
    if json_:
        print_result([], rows if len(targets) > 1 else rows[targets[0].name], True)
    raise typer.Exit(1 if failed else 0)

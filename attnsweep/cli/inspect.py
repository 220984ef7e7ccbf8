"""`attnsweep inspect` and `list`: one compiled config, and the families."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import CODE, app, examples, print_result, refuse_idle, warn
from attnsweep.core.errors import KernelError, ProblemError
from attnsweep.core.hardware import arch_named, arch_on
from attnsweep.reports.terminal import aligned, console, errors

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem


@app.command(
    rich_help_panel=CODE,
    epilog=examples(
        "attnsweep inspect flash_fwd_wgmma",
        "attnsweep inspect flash_fwd_wgmma BLOCK_N=128 --problem 4,16,4096,128",
        "attnsweep inspect results/h200/flash_short --problem '1,16,1024,64 causal'",
    ),
)
def inspect(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL|RUN",
            help="A kernel family, or a run, whose winner is taken.",
            show_default=False,
            autocompletion=completion.families_and_runs,
        ),
    ],
    config: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="'BLOCK_M=64 BLOCK_N=128'; other parameters are those of the first valid config, "
            "or of the run's winner.",
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="SHAPE",
            help="'1,16,1024,64' or '2,32/8,2048,128 bf16 causal' (default: the run's first).",
        ),
    ] = None,
    arch: Annotated[str | None, options.arch("One of {} (default: sm_90a, or the run's).")] = None,
    json_: options.Json = False,
    kernels: options.Kernels = None,
    results: options.Results = Path("results"),
) -> None:
    """Analyse one compiled config without a GPU: resources, occupancy, instructions, bound.

    Per stage: registers, spills, shared memory, what limits the occupancy, cubin size, and the
    number of instructions of each kind (this needs nvdisasm: the `inspect` extra).
    """
    from attnsweep.family.discover import discover
    from attnsweep.family.family import values_in
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.specs.yaml_file import nearest
    from attnsweep.store.run import open_run
    from attnsweep.tools import inspect as inspection

    families = discover(kernels)
    asked: list[Problem | None] = [None]
    if problem is not None:
        asked = [*read_shapes([problem], option="--problem")]
    if len(asked) != 1:
        raise ProblemError(f"{len(asked)} shapes, of which one is inspected", where="--problem")
    given, shape, card = " ".join(config or ()), asked[0], None
    if subject not in families and Path(subject).exists():
        run = open_run(Path(subject))
        winner = inspection.winner_of(run, shape)
        changed = inspection.texts(winner.config) | values_in(given)
        subject, shape = winner.kernel, winner.problem
        given = " ".join(f"{name}={value}" for name, value in changed.items())
        card = run.environment
        if arch is None and card is not None:
            arch = card.arch
        warn(run)
        others = len({trial.problem for trial in run.trials}) - 1
        if others and problem is None:
            text = f"note: the winner of {shape.label}; --problem picks another of {others + 1}"
            errors.print(text, soft_wrap=True)
    if subject not in families:
        raise KernelError(
            f"unknown kernel {subject!r}", hint=f"{nearest(subject, families)}; or give a run"
        )
    target = arch_named(arch or "sm_90a")
    if card is None or card.arch != target.name:
        card = inspection.card_of(target, results)
    elif card is not None:
        target = arch_on(card)
    found = inspection.inspect(families[subject], given, shape, target, card=card)
    print_result([Text(line) for line in found.lines(console.width)], found.to_json(), json_)


@app.command(
    rich_help_panel=CODE,
    name="list",
    epilog=examples(
        "attnsweep list",
        "attnsweep list --specs",
        "attnsweep list flash_fwd_wgmma",
        "attnsweep list --kernels my_kernels",
    ),
)
def list_(
    context: typer.Context,
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Only these families.",
            autocompletion=completion.families,
        ),
    ] = None,
    specs: Annotated[
        bool, typer.Option("--specs", help="The specs that come with attnsweep, a line each.")
    ] = False,
    kernels: options.Kernels = None,
    json_: options.Json = False,
) -> None:
    """List kernel families with their parameters and rules, and the baselines; or the specs."""
    from attnsweep.family.discover import discover
    from attnsweep.reports import views
    from attnsweep.specs.model import BASELINES
    from attnsweep.specs.shipped import about, shipped_specs
    from attnsweep.specs.yaml_file import nearest

    if specs:
        refuse_idle(context, ("name", "kernels"), "with --specs")
        told = {spec: about(path) for spec, path in shipped_specs().items()}
        lines = aligned([*told.items()], "ll", console.width, shrink=(1,))
        facts = [{"name": spec, "about": text} for spec, text in told.items()]
        print_result([Text(line) for line in lines], {"specs": facts}, json_)
        return
    families = discover(kernels)
    for word in name or ():
        if word not in families:
            raise KernelError(f"unknown kernel {word!r}", hint=nearest(word, families))
    families = {word: families[word] for word in dict.fromkeys(name or families)}
    baselines = () if name else BASELINES
    listed = views.families_json(families, baselines)
    shown = views.families(families, baselines, console.width)
    print_result(shown, {"kernels": listed["kernels"]} if name else listed, json_)

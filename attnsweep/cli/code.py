"""Commands that look at code: `compile`, `inspect`, `list` and `profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from attnsweep.cli import completion, options
from attnsweep.cli.app import CODE, command, load, print_result, refuse_idle, warn
from attnsweep.cli.options import option
from attnsweep.core.errors import KernelError, ProblemError
from attnsweep.core.hardware import arch_named, arch_on
from attnsweep.reports.terminal import ProgressForm, aligned, console, errors, whole_width

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem


@command(CODE)
def compile_(
    context: typer.Context,
    spec: options.Spec,
    problem: options.Problems = None,
    set_: options.Set = None,
    arch: Annotated[
        list[str] | None, options.arch("One of {} (default: the spec's); may be repeated.")
    ] = None,
    json_: options.Json = False,
    form: options.Progress = ProgressForm.AUTO,
    limit: options.Limit = None,
    kernels: options.Kernels = None,
    every: Annotated[bool, option("List every candidate.", "--all")] = False,
) -> None:
    """Compile every candidate of SPEC without a GPU; show spills, fit and occupancy.

    The cubins stay in the cache, where a GPU machine with the same NVRTC finds them. Exit code 1
    if any stage does not compile, or if a problem has no candidate left. With several --arch the
    JSON is an object, with the rows of each.

    $ attnsweep compile h100
    $ attnsweep compile my.yaml --arch sm_90a --arch sm_100a
    $ attnsweep compile a100 --limit 20 --all
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


@command(CODE)
def profile(
    run_: Annotated[Path, typer.Argument(autocompletion=completion.runs)],
    where: list[str] | None = None,
    problem: options.OfProblems = None,
    top: Annotated[int, typer.Option(min=1)] = 1,
    keep: bool = False,
    json_: options.Json = False,
    kernels: options.Kernels = None,
    wait: options.Wait = False,
) -> None:
    """Read hardware counters of a run's best candidates through Nsight Compute (ncu).

    Per-stage counters are stored in the run's counters.json.

    :run_ RUN: A run's directory.
    :--where: Only candidates with these values, 'BLOCK_N=128 kernel=naive'; in the name of a
        variant write _ for a space.
    :--top: Candidates per problem.
    :--keep: Leave ncu's report, which Nsight Compute opens, in the run.

    $ attnsweep profile results/h200/flash_short
    $ attnsweep profile results/h200/flash_short --top 3 --where BLOCK_N=128
    $ attnsweep profile results/h200/flash_short --problem 1,16,1024,64
    """
    from attnsweep.bench.worker import Worker
    from attnsweep.device.lock import held
    from attnsweep.family.discover import discover
    from attnsweep.reports import views
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.store.run import open_run
    from attnsweep.tools import profile as counters

    shapes = [one for text in problem or () for one in read_shapes([text], option="--problem")]
    stored, families = open_run(run_), discover(kernels)
    picked = counters.chosen(stored, where or (), top, shapes)
    counters.check(picked, families)
    if counters.find_ncu() is None:  # checked before it asks for a GPU
        counters.count([])
    with Worker(timeout_s=60) as worker:
        here = worker.describe()
    limit = here.memory_bytes // 4
    built = counters.compiled(picked, families, arch_named(here.arch), limit)
    report = counters.report_path(stored.directory) if keep else None
    launches = sum(len(candidate.timed.stages) for candidate in built)
    errors.print(f"{launches} launches of {len(built)} candidates, once for each group of counters")
    with held(here.uuid, here.gpu, wait=wait, say=lambda text: errors.print(escape(text))):
        counted = list(zip(picked, counters.count(built, keep=report), strict=True))
    kept = counters.write(
        stored.directory, counted, f"{here.gpu}, driver {here.driver}, {here.date[:10]}"
    )
    print_result(views.counters(kept, console.width), kept, json_)
    if report is not None:
        errors.print(f"kept {escape(str(report))}: ncu-ui opens it", soft_wrap=True)


@command(CODE)
def inspect(
    subject: Annotated[
        str, typer.Argument(show_default=False, autocompletion=completion.families_and_runs)
    ],
    config: Annotated[list[str] | None, typer.Argument()] = None,
    problem: str | None = None,
    arch: Annotated[str | None, options.arch("One of {} (default: sm_90a, or the run's).")] = None,
    json_: options.Json = False,
    kernels: options.Kernels = None,
    results: options.Results = Path("results"),
) -> None:
    """Analyse compiled code without a GPU: resources, occupancy, instructions, bound.

    Of a kernel or a run it is one config; of a callable of yours, FILE.py:FUNCTION, whose kernels
    are Triton's, all configs that its autotuner keeps, with what the others were removed by.

    Per stage: registers, spills, shared memory, what limits the occupancy, cubin size, and the
    number of instructions of each kind (this needs nvdisasm: the `inspect` extra).

    :subject KERNEL|RUN|CALLABLE: A kernel family, its declaration NAME.py or directory, a run,
        whose winner is taken, or a callable.
    :config CONFIG: 'BLOCK_M=64 BLOCK_N=128'; other parameters are those of the first valid config,
        or of the run's winner.
    :--problem SHAPE: '1,16,1024,64' or '2,32/8,2048,128 bf16 causal' (default: the run's first).

    $ attnsweep inspect flash_fwd_wgmma
    $ attnsweep inspect flash_fwd_wgmma BLOCK_N=128 --problem 4,16,4096,128
    $ attnsweep inspect results/h200/flash_short --problem '1,16,1024,64 causal'
    $ attnsweep inspect attend.py:attention --problem '4,32,4096,128 causal'
    """
    from attnsweep.core.callables import CALLABLE
    from attnsweep.family.discover import discover, families_at
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
    if CALLABLE.fullmatch(subject):
        called = inspection.inspect_call(subject, given, shape, arch_named(arch or "sm_90a"))
        print_result(inspection.lines_of_call(called, console.width), called, json_)
        raise typer.Exit(2 if called["failed"] == len(called["configs"]) else 0)
    place = Path(subject)
    if subject not in families and (place.suffix == ".py" or [*place.glob("[!_]*.py")]):
        own = families_at(place)
        if len(own) > 1:
            names = ", ".join(each.name for each in own)
            raise KernelError(f"{len(own)} kernels: {names}", where=subject, hint="name one .py")
        families, subject = {own[0].name: own[0]}, own[0].name
    if subject not in families and place.exists():
        run = open_run(place)
        winner = inspection.winner_of(run, shape)
        changed = inspection.texts(winner.config, families.get(winner.kernel)) | values_in(given)
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
    print_result(inspection.lines(found, console.width), found, json_)


@command(CODE)
def list_(
    context: typer.Context,
    name: Annotated[list[str] | None, typer.Argument(autocompletion=completion.families)] = None,
    specs: bool = False,
    kernels: options.Kernels = None,
    json_: options.Json = False,
) -> None:
    """List the kernel families and the baselines, or the specs, a line each.

    :name NAME: These families, with their parameters and rules.
    :--specs: The specs that come with attnsweep.

    $ attnsweep list
    $ attnsweep list --specs
    $ attnsweep list flash_fwd_wgmma
    $ attnsweep list --kernels my_kernels
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports import views
    from attnsweep.specs.model import BASELINES
    from attnsweep.specs.shipped import about, shipped_specs
    from attnsweep.specs.yaml_file import nearest

    if specs:
        refuse_idle(context, ("name", "kernels"), "with --specs")
        told = {spec: about(path) for spec, path in shipped_specs().items()}
        lines = aligned([*told.items()], "ll", whole_width(), shrink=(1,))
        facts = [{"name": spec, "about": text} for spec, text in told.items()]
        print_result(lines, {"specs": facts}, json_)
        return
    families = discover(kernels)
    for word in name or ():
        if word not in families:
            raise KernelError(f"unknown kernel {word!r}", hint=nearest(word, families))
    families = {word: families[word] for word in dict.fromkeys(name or families)}
    baselines = () if name else BASELINES
    listed = views.families_json(families, baselines)
    shown = views.families(families, console.width)
    if not name:
        shown = views.overview(families, baselines, whole_width())
    print_result(shown, {"kernels": listed["kernels"]} if name else listed, json_)

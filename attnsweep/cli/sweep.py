"""Commands that sweep: `tune`, `init` and `run`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import (
    FIND,
    command,
    given,
    load,
    print_end,
    print_plan,
    print_result,
    print_run,
    refuse_idle,
    refuse_idle_of_run,
    without_arch,
)
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.files import shipped
from attnsweep.core.ops import ORDERS
from attnsweep.reports.terminal import ProgressForm, console, errors

if TYPE_CHECKING:
    from attnsweep.core.observer import Observer
    from attnsweep.core.problem import Problem
    from attnsweep.specs.load import SweepSpec
    from attnsweep.sweep.session import Cards


@command(FIND)
def tune(
    context: typer.Context,
    shapes: Annotated[
        list[str], typer.Argument(show_default=False, autocompletion=completion.tables)
    ],
    causal: options.Causal = False,
    padding: str | None = None,
    dtype: str = "fp16",
    kernel: Annotated[list[str] | None, typer.Option(autocompletion=completion.families)] = None,
    widen: bool = False,
    exhaustive: bool = False,
    budget_s: Annotated[int | None, typer.Option(min=1)] = None,
    limit: options.Limit = None,
    save_spec: Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    arch: Annotated[str | None, options.arch("With --dry-run: one of {}.")] = None,
    replay: Annotated[Path | None, typer.Option(autocompletion=completion.runs)] = None,
    fresh: options.Fresh = False,
    results: options.Results = Path("results"),
    kernels: options.Kernels = None,
    top: options.Top = None,
    full: options.Full = False,
    json_: options.Json = False,
    form: options.Progress = ProgressForm.AUTO,
    wait: options.Wait = False,
) -> None:
    """Find the fastest kernel for SHAPE on this GPU; needs no spec.

    Sweeps the shipped space of this kind of GPU next to the baselines that are installed, and ends
    in a sentence for each shape: which is faster, and by how much. The run is stored in
    RESULTS/<gpu>/tune-<shape>; the same command again continues there.

    :shapes SHAPE: batch,heads,seqlen,head_dim: 4,32,4096,128; or B=4 H=32 Hkv=8 S=4096 D=128 (Sq
        and Sk for two lengths, Dv for v of another head_dim, as in 4,32,4096,192/128); or a CSV
        file of such rows.
    :--padding SIDE,PERCENT: Pad every shape that does not say `padded`: right,40 gives the shortest
        item of a batch 40 % of the keys, and the longest all.
    :--dtype: Dtype of every shape that does not name one: fp16, bf16, fp32, e4m3, e4m3_tensor or
        e4m3_block.
    :--kernel: Sweep this family in place of the shipped choice, or the configs of a Python function
        that launches Triton kernels, FILE.py:FUNCTION; may be repeated.
    :--widen: With --kernel FILE.py:FUNCTION: also combinations of its configs' values and of their
        neighbours.
    :--exhaustive: Try every candidate of the space.
    :--budget-s: Seconds for a shape's candidates; the finals follow.
    :--save-spec FILE: Write the spec that this runs to FILE.
    :--force: With --save-spec: replace FILE if it is there.
    :--dry-run: Count candidates (-v: values).
    :--replay RUN: Take times from a recorded run, or from that of `quickstart`; needs no GPU.

    $ attnsweep tune 4,32,4096,128 --causal --dtype bf16
    $ attnsweep tune B=4 H=32 Hkv=8 S=4096 D=128 --save-spec mine.yaml
    $ attnsweep tune 1,16,1024,64 2,32/8,1x4096,128 shapes.csv --budget-s 60
    $ attnsweep tune 1,16,1024,64 --replay quickstart
    $ attnsweep tune 4,32,4096,128 --dry-run --arch sm_90a
    $ attnsweep tune --kernel attend.py:attention 4,32,4096,128 --causal
    """
    from attnsweep.compile import trace
    from attnsweep.core.callables import CALLABLE

    if replay is None:  # it imports PyTorch beside what follows
        context.call_on_close(trace.begin(filter(CALLABLE.fullmatch, kernel or ())))

    from attnsweep.choose.search import DEFAULT_STRATEGY
    from attnsweep.compile.calls import plan_alone
    from attnsweep.family.called import called
    from attnsweep.family.discover import discover
    from attnsweep.reports import progress
    from attnsweep.specs.load import spec_of
    from attnsweep.specs.shapes import read_dtype, read_shapes
    from attnsweep.specs.starter import Request, run_name, starter
    from attnsweep.specs.yaml_file import Document
    from attnsweep.sweep import session
    from attnsweep.tools import target as cards
    from attnsweep.tools.doctor import without_gpu

    dtype = read_dtype(dtype, "--dtype")
    if arch is not None and replay is not None:
        raise SpecError("--arch and --replay exclude each other: a recording has its own")
    if arch is not None and not dry_run:
        raise SpecError("--arch needs --dry-run; this run takes the architecture of the GPU")
    if force and save_spec is None:
        raise SpecError("--force goes with --save-spec; --fresh measures everything again")
    refuse_idle_of_run(context, dry_run=dry_run, replays=replay is not None, json_=json_)
    problems = read_shapes(shapes, dtype=dtype, causal=causal, padding=padding)
    families, names = discover(kernels), list[str]()
    for name in kernel or ():
        if CALLABLE.fullmatch(name):
            own = called(name, widen=widen)
            families, name = {**families, own.name: own}, own.name
        names.append(name)
    if widen and not any(families[name].call for name in names if name in families):
        raise SpecError("--widen goes with --kernel FILE.py:FUNCTION, whose configs it is about")
    try:
        target = cards.target_of(families, arch, problems, replay)
    except NoGpuError as error:
        words = given(context, "shapes", "causal", "padding", "dtype", "kernel", "kernels")
        same = f"attnsweep tune {shlex.join(words)} --dry-run --arch sm_90a"
        rows = [
            (same, "count the candidates"),
            ("attnsweep tune 1,16,1024,64 --replay quickstart", "replay a run of an H100"),
        ]
        raise without_gpu(error, rows, errors.width) from error
    search: dict[str, Any] = {"strategy": "exhaustive" if exhaustive else DEFAULT_STRATEGY}
    search |= {} if budget_s is None else {"budget_s": budget_s}
    asked = Request(problems, run_name(problems, names), names, kernels, search)
    text = starter(asked, target, families)
    spec = spec_of(Document.parse(Path(f"{asked.name}.yaml"), text, made=True), families)
    if target.untried:
        errors.print(Text(f"note: {target.untried}"), soft_wrap=True)
    if save_spec is not None:
        write_spec(save_spec, text, force)
    if dry_run:
        print_plan(plan_alone(spec, target.arch), limit, json_)
        return
    with progress.watch(errors, form) as observer:
        how: dict[str, Any] = {"results": results, "fresh": fresh, "limit": limit, "wait": wait}
        outcome = session.run(spec, **how, observer=observer)
    print_end(outcome)
    print_run(outcome.run, json_, top, full, every=True)
    raise typer.Exit(outcome.exit_code)


def write_spec(path: Path, text: str, force: bool) -> None:
    """Write a spec, but not over a file unless it is forced, and never over a part of a run.

    Raises SpecError or StoreError.
    """
    from attnsweep.store.outputs import check_output, write_output

    check_output(path, force=force)
    write_output(path, text)


@command(FIND)
def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument()] = Path("sweep.yaml"),
    arch: Annotated[str | None, options.arch("One of {} (default: this GPU's).")] = None,
    problem: options.Problems = None,
    kernel: str | None = None,
    from_: Path | None = None,
    layout: str = ORDERS[0],
    triton: bool = False,
    force: bool = False,
    json_: options.Json = False,
) -> None:
    """Write a commented spec for this GPU, or a kernel to edit and to run.

    :file FILE: File to write; - prints it.
    :--kernel NAME: Write a kernel of your own: NAME/NAME.cu, its declaration and its spec.
    :--from FILE.cu: With --kernel: begin with this template of yours.
    :--layout: With --kernel: the order of its tensors, bhsd or bshd.
    :--triton: Write an autotuned Triton kernel to FILE, attend.py.
    :--force: Replace files that are there.

    $ attnsweep init
    $ attnsweep init mine.yaml --arch sm_90a --problem '4,32,4096,128 bf16 causal'
    $ attnsweep init --kernel mine --from attention.cu
    $ attnsweep init --triton attend.py
    """
    from attnsweep.family.discover import discover
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.specs.starter import Request, example, starter, with_more
    from attnsweep.tools import target as cards

    if triton:
        spared = ("arch", "problem", "kernel", "from_", "layout")
        refuse_idle(context, spared, "with --triton, which writes a kernel")
        file = file if given(context, "file") else Path("attend.py")
        write_spec(
            file,
            shipped("baselines").joinpath("triton_kernel.py").read_text(encoding="utf-8"),
            force,
        )
        call = f"{file}:attention"
        said = f"{file}: a Triton kernel; next: attnsweep verify {call}, attnsweep inspect {call}"
        print_result([said], {"call": call}, json_)
        return
    problems = read_shapes(problem, option="--problem") if problem else []
    if kernel is not None:
        if given(context, "file"):
            raise SpecError("--kernel writes NAME/, and no FILE", where=str(file))
        _write_kernel(kernel, from_, layout, arch, problems, force, json_)
        return
    if from_ is not None or layout != ORDERS[0]:
        option = "--layout" if from_ is None else "--from"
        raise SpecError(f"{option} needs --kernel NAME, the kernel that it becomes")
    families = discover()
    try:
        target = cards.target_of(families, arch, problems)
    except NoGpuError as error:
        words = given(context, "file", "problem")
        again = shlex.join(["attnsweep", "init", *words, "--arch", "sm_90a"])
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
    print_result([said], {"spec": str(file), "arch": target.arch.name}, json_)


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
    from attnsweep.tools.from_source import declared
    from attnsweep.tools.inline import declaration, template, with_order

    if not name.isidentifier():
        raise SpecError(f"a kernel's name is a C identifier, not {name!r}", where="--kernel")
    if layout not in ORDERS:
        raise SpecError(f"one of {', '.join(ORDERS)}, not {layout!r}", where="--layout")
    text = template(name, source, layout)
    own = None if source is None else declared(name, text)
    texts = {
        ".cu": text,
        ".py": declaration(name, layout) if own is None else with_order(own.text, layout),
        ".yaml": spec_of_kernel(name, problems, arch),
    }
    for ending in texts:
        if (path := Path(name, name + ending)).exists() and not force:
            raise SpecError("is there already", where=str(path), hint="--force replaces it")
    Path(name).mkdir(exist_ok=True)
    for ending, made in texts.items():
        write_spec(Path(name, name + ending), made, force)
    spec, left = f"{name}/{name}.yaml", own.open if own else ()
    lines = [
        f"{name}/: {name}.cu, the template; {name}.py, its declaration; {name}.yaml, a sweep of it",
        *(f"guessed: {said}" for said in (own.guessed if own else ())),
        *(f"{name}/{name}.py:{at}: not known: {said}; edit it" for at, said in left),
        f"next: attnsweep verify {name}, attnsweep compile {spec}, attnsweep run {spec}",
    ]
    told = {} if own is None else {"guessed": own.guessed, "open": [said for _, said in left]}
    print_result(lines, {"spec": spec, "kernel": name} | told, json_)


@command(FIND)
def run(
    context: typer.Context,
    spec: options.Spec,
    problem: options.Problems = None,
    set_: options.Set = None,
    json_: options.Json = False,
    form: options.Progress = ProgressForm.AUTO,
    dry_run: bool = False,
    exhaustive: bool = False,
    limit: options.Limit = None,
    fresh: options.Fresh = False,
    kernels: options.Kernels = None,
    results: options.Results = Path("results"),
    arch: Annotated[
        str | None, options.arch("With --dry-run: one of {} (default: the spec's).")
    ] = None,
    top: options.Top = None,
    full: options.Full = False,
    shard: str | None = None,
    html: Path | None = None,
    watch: bool = False,
    gpus: options.Gpus = None,
    scheduler: str | None = None,
    wait: options.Wait = False,
) -> None:
    """Sweep: compile, check, time and rank every candidate of SPEC.

    An interrupted or repeated run continues where it stopped, unless --fresh is given. Ctrl-C and
    SIGTERM print the ranking so far. With --problem or --set the run is stored beside the spec's
    own, as SPEC-<digits>; the same command continues there.

    :--dry-run: Count candidates, and what each rule removes (-v: values).
    :--exhaustive: Try every candidate, whatever the spec's search leaves out.
    :--shard I/N: Only part I of N of the problems, of about equal cost; `merge` joins the parts.
    :--html FILE: At the end, write the run's page to FILE.
    :--watch: Sweep again whenever the spec or a family's file is edited.
    :--scheduler ADDRESS: Whole problems on the workers of this Dask scheduler that have the
        resource GPU: tcp://HOST:8786.

    $ attnsweep run h100
    $ attnsweep run h100 --dry-run
    $ attnsweep run h100 --problem '4,32,4096,128 bf16 causal'
    $ attnsweep run h100 --set 'kernels.flash_fwd_wgmma.BLOCK_N=[64,128]'
    $ attnsweep run h100 --gpus all
    $ attnsweep run my.yaml --kernels my_kernels --results /data/results
    """
    from attnsweep.compile import trace

    def read() -> SweepSpec:
        loaded = load(spec, kernels, set_ or (), problem or ())
        if not exhaustive:
            return loaded
        from attnsweep.choose.search import exhaustively

        return exhaustively(loaded)

    loaded = read()
    replays = loaded.device == "replay"
    if not replays:  # it imports PyTorch beside what follows
        context.call_on_close(trace.begin(loaded.calls))

    from attnsweep.compile.calls import plan_alone
    from attnsweep.device.lock import BusyError
    from attnsweep.specs.plan import Shard
    from attnsweep.sweep import session
    from attnsweep.sweep.watch import files_of, keep_running
    from attnsweep.tools.compile import target_arch
    from attnsweep.tools.doctor import without_gpu

    part = None if shard is None else Shard.parse(shard)
    refuse_idle_of_run(context, dry_run=dry_run, replays=replays, json_=json_)
    if gpus is not None and scheduler is not None:
        hint = "start a Dask worker for each card of this machine to use them too"
        raise SpecError("--gpus and --scheduler exclude each other", hint=hint)
    if scheduler is not None:
        why = "with --scheduler: a worker whose card is in use is left out"
        refuse_idle(context, ("wait",), why)
    if watch and json_:
        raise SpecError("--watch prints a table after each edit, not one JSON document")
    if watch and fresh:
        what = "--watch keeps the rows of unchanged kernels, and --fresh would drop them each time"
        raise SpecError(what, hint="run once with --fresh, then with --watch")
    if dry_run:
        planned = plan_alone(loaded, target_arch(loaded, arch))
        print_plan(planned if part is None else part.take(planned), limit, json_)
        return
    if arch is not None:
        source = "its recording" if replays else "the GPU"
        raise SpecError(f"--arch needs --dry-run; this run takes the architecture of {source}")

    def once() -> int:
        loaded = read()
        if html is not None:  # what the page needs is missing before the sweep, not after it
            from attnsweep.reports import html as page

            page.check(html)
        try:
            with _cards(gpus, scheduler, form) as (cards, observer):
                how: dict[str, Any] = {"results": results, "fresh": fresh, "limit": limit}
                how |= {"shard": part, "wait": wait, "observer": observer}
                outcome = session.run(loaded, cards, **how)
        except BusyError:
            raise
        except NoGpuError as error:
            words = ["--arch", loaded.arch or "sm_90a"]
            words += given(context, "problem", "set_", "kernels")
            same = shlex.join([str(spec), *words])
            rows = [
                ("attnsweep run quickstart", "replay a recorded run"),
                (f"attnsweep run --dry-run {same}", "count the candidates"),
                (f"attnsweep compile {same}", "compile, prune, resources"),
            ]
            raise without_gpu(error, rows, errors.width) from error
        print_end(outcome)
        if html is not None and outcome.run.trials:
            size = page.write(outcome.run, html)
            errors.print(f"{escape(str(html))}: {size / 1e6:.1f} MB", soft_wrap=True)
        print_run(outcome.run, json_, top, full)
        return outcome.exit_code

    def files() -> Sequence[Path]:
        loaded = read()
        return files_of(loaded.document.path, [loaded.families[name] for name in loaded.used])

    if not watch:
        raise typer.Exit(once())

    def once_more() -> None:
        if once() == 130:
            raise KeyboardInterrupt

    keep_running(once_more, files, _say)


def _say(text: str) -> None:
    errors.print(escape(text), soft_wrap=True)


@contextmanager
def _cards(
    gpus: str | None, scheduler: str | None, form: ProgressForm
) -> Iterator[tuple[Cards | None, Observer]]:
    """The cards that are asked for, and what shows their progress."""
    from attnsweep.device.cards import chosen, installed
    from attnsweep.reports import progress
    from attnsweep.sweep.fleet import Fleet

    if scheduler is not None:
        from attnsweep.sweep import dask_cluster

        with dask_cluster.connected(scheduler) as client:
            workers = dask_cluster.cards_of(client, _say)
            with progress.watch(errors, form, len(workers)) as observer:
                yield dask_cluster.fleet(client, workers), observer
    elif gpus is not None:
        cards = chosen(gpus, installed())
        with progress.watch(errors, form, len(cards)) as observer:
            yield Fleet(cards), observer
    else:
        with progress.watch(errors, form) as observer:
            yield None, observer

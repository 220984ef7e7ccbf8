"""`attnsweep run`: sweep a spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from attnsweep.cli import options
from attnsweep.cli.app import (
    FIND,
    app,
    examples,
    load,
    print_end,
    print_plan,
    print_run,
    refuse_idle,
    refuse_idle_of_run,
)
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.reports.terminal import Form, errors

if TYPE_CHECKING:
    from attnsweep.core.observer import Observer
    from attnsweep.specs.load import SweepSpec
    from attnsweep.sweep.session import Cards


@app.command(
    rich_help_panel=FIND,
    epilog=examples(
        "attnsweep run h100",
        "attnsweep run h100 --dry-run",
        "attnsweep run h100 --problem '4,32,4096,128 bf16 causal'",
        "attnsweep run h100 --set 'kernels.flash_fwd_wgmma.BLOCK_N=[64,128]'",
        "attnsweep run h100 --gpus all",
        "attnsweep run my.yaml --kernels my_kernels --results /data/results",
    ),
)
def run(
    context: typer.Context,
    spec: options.Spec,
    problem: options.Problems = None,
    set_: options.Set = None,
    json_: options.Json = False,
    form: options.Progress = Form.AUTO,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only count the candidates and what each rule removes."),
    ] = False,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive", help="Try every candidate, whatever the spec's search leaves out."
        ),
    ] = False,
    limit: options.Limit = None,
    fresh: options.Fresh = False,
    kernels: options.Kernels = None,
    results: options.Results = Path("results"),
    arch: Annotated[
        str | None, options.arch("With --dry-run: one of {} (default: the spec's).")
    ] = None,
    top: options.Top = None,
    full: options.Full = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Only part I of N of the problems, of about equal cost; `merge` joins the parts.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="At the end, write the run's page to FILE."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Sweep again whenever the spec or a family's file is edited."),
    ] = False,
    gpus: options.Gpus = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="ADDRESS",
            help="Whole problems on the workers of this Dask scheduler that have the resource GPU; "
            "the others compile: tcp://HOST:8786.",
        ),
    ] = None,
    wait: options.Wait = False,
) -> None:
    """Sweep: compile, check, time and rank every candidate of SPEC.

    An interrupted or repeated run continues where it stopped, unless --fresh is given. Ctrl-C and
    SIGTERM print the ranking so far. With --problem or --set the run is stored beside the spec's
    own, as SPEC-<digits>; the same command continues there.
    """
    from attnsweep.choose.search import exhaustively
    from attnsweep.device.lock import BusyError
    from attnsweep.specs.plan import Shard, plan
    from attnsweep.sweep import session
    from attnsweep.sweep.watch import files_of, keep_running
    from attnsweep.tools.compile import target_arch
    from attnsweep.tools.doctor import without_gpu

    def read() -> SweepSpec:
        loaded = load(spec, kernels, set_ or (), problem or ())
        return exhaustively(loaded) if exhaustive else loaded

    part = None if shard is None else Shard.parse(shard)
    loaded = read()
    replays = loaded.device == "replay"
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
        planned = plan(loaded, target_arch(loaded, arch))
        print_plan(planned if part is None else part.take(planned), limit, json_)
        return
    if arch is not None:
        source = "its recording" if replays else "the GPU"
        raise SpecError(f"--arch needs --dry-run; this run takes the architecture of {source}")

    words = [word for text in problem or () for word in ("--problem", text)]
    words += [word for text in set_ or () for word in ("--set", text)]

    def once() -> int:
        loaded = read()
        if html is not None:  # what the page needs is missing before the sweep, not after it
            from attnsweep.reports import html as page

            page.check(html)
        try:
            with _cards(gpus, scheduler, form) as (cards, observer):
                outcome = session.run(
                    loaded,
                    cards,
                    results=results,
                    fresh=fresh,
                    limit=limit,
                    shard=part,
                    wait=wait,
                    observer=observer,
                )
        except BusyError:
            raise
        except NoGpuError as error:
            raise NoGpuError(
                f"{error.what}. Nothing was measured.",
                hint=without_gpu(error, spec, loaded.arch, kernels, errors.width, words),
            ) from error
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
    gpus: str | None, scheduler: str | None, form: Form
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

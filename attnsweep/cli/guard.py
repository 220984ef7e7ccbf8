"""Commands that guard and ship: `check`, `accept` and `export`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import GUARD, command, load, print_result, reading, refuse_idle, warn
from attnsweep.core.errors import SpecError, StoreError
from attnsweep.core.hardware import arch_named
from attnsweep.reports import terminal
from attnsweep.reports.terminal import ProgressForm, console, counted, errors

if TYPE_CHECKING:
    from attnsweep.core.observer import Observer
    from attnsweep.regress.live import Sides
    from attnsweep.regress.verdicts import Finding


class Mode(StrEnum):
    """What `check` compares of old and new code."""

    TIME = "time"
    COMPILE = "compile"


@command(GUARD)
def check(
    context: typer.Context,
    subject: Annotated[
        list[str], typer.Argument(show_default=False, autocompletion=completion.specs_and_runs)
    ],
    against: Annotated[Path | None, typer.Option(autocompletion=completion.runs)] = None,
    recorded: bool = False,
    old: str | None = None,
    new: str | None = None,
    config: str = "",
    causal: options.Causal = False,
    dtype: str = "fp16",
    mode: Annotated[Mode, typer.Option()] = Mode.TIME,
    arch: Annotated[
        str | None, options.arch("With --mode compile, --old, --new: one of {} (default: sm_90a).")
    ] = None,
    slower: Annotated[float | None, typer.Option(parser=options.share)] = None,
    budget_s: Annotated[float | None, typer.Option(min=0.0)] = None,
    other_driver: bool = False,
    junit: Path | None = None,
    markdown: Path | None = None,
    json_: options.Json = False,
    form: options.Progress = ProgressForm.AUTO,
    kernels: options.Kernels = None,
    gpus: options.Gpus = None,
    wait: options.Wait = False,
) -> None:
    """Check whether the best candidate of a problem got slower.

    SPEC --against RUN times the machine code that RUN kept of its winners and the same configs
    compiled from today's kernels, in turns on one GPU; with --gpus, each card has its share of the
    problems. --recorded OLD NEW compares two recorded runs and needs no GPU. --old with --new times
    two versions of a Python function, which `judge` calls so too, on each SHAPE.

    --mode compile needs no GPU: it compares the registers, spills, shared memory and instructions
    of both. More spills or stack, or fewer warps on an SM, are a regression, and other code is
    `changed`.

    Exit code 1 if a problem regressed or is wrong, 4 if one is inconclusive, 0 otherwise; without a
    verdict 2 (asked wrongly), 3 (no GPU) or 70 (a fault of attnsweep), never 1.

    :subject SPEC: With --against: a spec. With --recorded: the run to compare with, and the one to
        judge. With --old and --new: shapes, as for `tune`.
    :--against RUN: Time this run's winners against today's kernels, in turns; needs a GPU.
    :--recorded: Compare two runs as recorded; nothing is measured.
    :--old CALL: FILE.py:FUNCTION, or FILE.py@REV:FUNCTION of a revision of its repository.
    :--new CALL: FILE.py:FUNCTION that is to take its place.
    :--config: With --old and --new: keywords of both, or parameters of the autotuner that they
        launch, whose first config is compared otherwise: 'BLOCK_M=64 num_warps=4'.
    :--mode: Time both, or compile both and run neither.
    :--dtype: With --old and --new: dtype of every shape that does not name one.
    :--slower SHARE: Slowdown that counts as a regression: 0.02 or 2% (default: the spec's; with
        --recorded 3%).
    :--budget-s: Unless --recorded: seconds of the whole check, after which undecided problems are
        inconclusive (default: the spec's, which is 120 unless it says otherwise).
    :--other-driver: Also compare runs that were measured with different drivers.
    :--junit FILE: Write JUnit XML for a CI job.
    :--markdown FILE: Write the table as Markdown, or print it for - (default: add it to
        $GITHUB_STEP_SUMMARY, if set).

    $ attnsweep check ci --against baselines/ci --junit check.xml
    $ attnsweep check my.yaml --against results/h200/my --slower 1%
    $ attnsweep check --recorded baselines/ci results/h200/ci
    $ attnsweep check --old a.py@main:attend --new a.py:attend 1,16,4096,128
    $ attnsweep check --mode compile --old a.py@main:f --new a.py:f 1,8,512,64
    """
    from attnsweep.device.cards import chosen, installed
    from attnsweep.family.params import config_in
    from attnsweep.regress import live, verdicts
    from attnsweep.regress import recorded as recordings
    from attnsweep.regress.calls import calls_of
    from attnsweep.regress.compiled import check_code
    from attnsweep.reports import progress
    from attnsweep.specs.shapes import read_dtype, read_shapes
    from attnsweep.store.outputs import check_output, write_output
    from attnsweep.store.run import open_run
    from attnsweep.sweep import check_cards

    calls = old is not None and new is not None
    if not calls and (old or new):
        raise SpecError(
            f"check compares --old with --new, and {'--new' if old else '--old'} is missing",
            hint="attnsweep check --old FILE.py@REV:F --new FILE.py:F SHAPE",
        )
    compiles = mode is Mode.COMPILE
    if compiles:
        idle = ("slower", "other_driver", "gpus", "wait", *["arch"] * (not calls))
        refuse_idle(context, idle, "with --mode compile, which times nothing")
    else:
        refuse_idle(context, ("arch",), "without --mode compile")
    if calls:
        idle = ("recorded", "against", "kernels", "gpus", "other_driver")
        refuse_idle(context, idle, "with --old and --new, which time two callables")
        shapes = read_shapes(subject, dtype=read_dtype(dtype, "--dtype"), causal=causal)
    else:
        refuse_idle(context, ("config", "causal", "dtype"), "without --old and --new")
    if not calls and (recorded == (against is not None) or len(subject) != 1 + recorded):
        raise SpecError(
            "check needs either a spec and --against RUN, or --recorded and two runs",
            hint="attnsweep check SPEC --against RUN   measures, on a GPU\n  "
            "attnsweep check --recorded OLD NEW   compares what was measured\n  "
            "attnsweep check --old FILE.py@REV:F --new FILE.py:F SHAPE   two callables, on a GPU",
        )
    if recorded:
        idle = ("budget_s", "kernels", "wait", "gpus", "form", "mode")
        measure = "to measure: attnsweep check SPEC --against RUN"
        refuse_idle(context, idle, "with --recorded: nothing is measured", measure)
    printed = markdown is not None and str(markdown) == "-"
    if printed and json_:
        raise SpecError("only one of --markdown - and --json can be printed")
    for path in (junit, None if printed else markdown):
        if path is not None:
            check_output(path)
    if junit is not None:
        verdicts.junit_library()
    with _verdict_or_error():
        if recorded:
            places, share = [*map(Path, subject)], 0.03 if slower is None else slower
            with reading(*places):
                runs = map(open_run, places)
                compared = recordings.compare(*runs, slower=share, other_driver=other_driver)
        else:
            cards = None if gpus is None else chosen(gpus, installed())
            with contextlib.ExitStack() as at_end:
                sides: live.Sides
                if old is not None and new is not None:
                    own = calls_of(old, new, shapes, config_in(config, "--config"), slower)
                    sides = at_end.enter_context(own)
                else:
                    place, loaded = Path(str(against)), load(Path(*subject), kernels)
                    if not place.exists():
                        hint = f"attnsweep run {subject[0]}, then attnsweep accept RUN {place}"
                        raise StoreError("no such run", where=f"--against {place}", hint=hint)
                    baseline = open_run(place)
                    sides = live.Winners.of(loaded, baseline, slower, other_driver=other_driver)
                shown = progress.watch(errors, form, len(cards or [0]))
                observer = at_end.enter_context(shown)
                asked: dict[str, Any] = {"budget_s": budget_s, "observer": observer}
                asked["tell"] = _teller(sides, observer, json_ or printed)
                if compiles:
                    compared = check_code(sides, arch_named(arch or "sm_90a"), **asked)
                elif cards and isinstance(sides, live.Winners):
                    compared = check_cards.check(sides, cards, **asked, wait=wait)
                else:
                    compared = live.check(sides, **asked, wait=wait)
    table = compared.to_markdown()
    quiet = terminal.talk is terminal.Talk.QUIET
    styled = compared.lines(console.width, quiet=quiet)
    lines = [Text(line, style) for line, style in styled]
    with contextlib.suppress(BrokenPipeError):  # `check … | head`: the exit code is the verdict
        if printed:
            console.file.write(table)
        else:
            print_result(lines, compared.to_json(), json_)
    for each in verdicts.commands(compared):  # on stderr, which GitHub reads too
        errors.file.write(f"{each}\n")
    if junit is not None:
        write_output(junit, compared.to_junit())
    if markdown is None:
        verdicts.summarise(table)
    elif not printed:
        write_output(markdown, table)
    raise typer.Exit(compared.exit_code)


def _teller(sides: Sides, observer: Observer, whole: bool) -> Callable[[Finding], None]:
    """Prints a finding as soon as it is there. whole: standard output is one document."""

    def tell(finding: Finding) -> None:
        finding = sides.told(finding)
        if whole:
            observer.note(finding.line)
        elif terminal.talk is not terminal.Talk.QUIET:
            # Bars are drawn by `errors`, which must know of other lines on its terminal.
            bars = errors.is_terminal and console.is_terminal
            to = errors if bars else console
            with contextlib.suppress(BrokenPipeError):
                to.print(finding.line, markup=False, soft_wrap=True)

    return tell


@contextlib.contextmanager
def _verdict_or_error() -> Iterator[None]:
    """Raise StoreError if nobody reads the progress, as in `2>&1 | head`: elsewhere that is 0."""
    try:
        yield
    except BrokenPipeError as error:
        raise StoreError("no verdict: the reader of the output is gone") from error


@command(GUARD)
def accept(
    run_: Annotated[Path, typer.Argument(autocompletion=completion.runs)],
    baseline: Annotated[Path, typer.Argument()],
    force: bool = False,
    json_: options.Json = False,
) -> None:
    """Replace BASELINE with a copy of RUN.

    A run that lacks a winner or its machine code, or that is of another spec or GPU than the
    baseline, is refused with exit code 2.

    :run_ RUN: The run to accept.
    :baseline BASELINE: The directory to replace or create.
    :--force: Accept a run that is unfinished, or of another spec or GPU.

    $ attnsweep accept results/h200/ci baselines/ci
    """
    from attnsweep.regress.accept import accept as accept_run
    from attnsweep.store.run import open_run

    read = open_run(run_)
    warn(read)
    overridden = accept_run(read, baseline, force=force)
    for objection in overridden:
        errors.print(f"[yellow]warning:[/] accepted although {escape(objection)}")
    data = {"run": str(run_), "baseline": str(baseline), "overridden": overridden}
    print_result([f"{baseline} is now {run_}: {counted(len(read.trials), 'trial')}"], data, json_)


@command(GUARD)
def export_(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(show_default=False, autocompletion=completion.runs)],
    out: Path,
    name: str | None = None,
    format_: str | None = None,
    axis: str = "seqlen_k",
    kernel: str | None = None,
    at_most: Annotated[int | None, typer.Option(min=1)] = None,
    force: bool = False,
    json_: options.Json = False,
    form: options.Progress = ProgressForm.AUTO,
    kernels: options.Kernels = None,
) -> None:
    """Write the winners of runs as a package: cubins, a table and a launcher for PyTorch.

    The package needs PyTorch and cuda-bindings alone. Winners are compiled anew, which needs NVRTC
    but no GPU. Except in FP8, a problem is left out if the run has no time of PyTorch's own
    attention, which a winner must beat.

    Of a run of calls, write the winning configs: as a Python module, as configs of Triton or of
    Helion, or as tables that vLLM reads.

    :runs RUN: Directories of runs, of one or several GPUs; of a run of calls, one.
    :--out: Directory to write, made anew each time. For a run of calls: NAME.py or NAME.json,
        with --format vllm or helion a directory.
    :--name: Import name of the package (default: that of --out).
    :--format: One of package, python, triton, vllm, helion (default: python if --out is NAME.py,
        triton if it is NAME.json, else package).
    :--axis: With --format vllm: what of a problem is the key of a table.
    :--kernel: For a run of calls: export this kernel of the spec alone.
    :--at-most: Export this many configs at most, chosen to lose the least time. Prints how many
        times as long each takes as with its winner, and what other numbers would cost.
    :--force: For a run of calls: replace existing files.

    $ attnsweep export results/h100-80gb-hbm3/my_model --out my_attention
    $ attnsweep export results/*/my_model --out dist/kernels --name my_attention
    $ attnsweep export results/h100-80gb-hbm3/calls --out attend_configs.py
    $ attnsweep export results/h100-80gb-hbm3/calls --out attend.json --at-most 4
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports import progress
    from attnsweep.serve.export import export
    from attnsweep.serve.export_configs import PACKAGE, export_configs, format_of
    from attnsweep.serve.portfolio import lines_of

    if (written := format_of(out, format_)) == PACKAGE:
        refuse_idle(context, ("axis", "kernel", "force"), "for a package")
        with progress.watch(errors, form) as observer:
            how: dict[str, Any] = {"name": name, "at_most": at_most}
            done = export(runs, out, discover(kernels), **how, compiled=observer.exporting)
    else:
        idle = ("name", "kernels", "form", *["axis"] * (written != "vllm"))
        refuse_idle(context, idle, f"with --format {written}")
        done = export_configs(
            runs, out, written, axis=axis, kernel=kernel, at_most=at_most, force=force
        )
    for note in done.notes:
        errors.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if not json_:
        for reason in done.left_out:
            errors.print(f"[yellow]left out:[/] {escape(reason)}", soft_wrap=True)
    data = {
        "directory": str(done.directory),
        "name": done.name,
        "winners": done.winners,
        "kernels": done.kernels,
        "configs": done.configs,
        "bytes": done.nbytes,
        "gpus": list(done.gpus),
        "left_out": done.left_out,
        "files": list(done.files),
        "portfolio": done.portfolio,
    }
    found = f"{counted(done.winners, 'problem')}, {counted(done.kernels, 'kernel')}"
    lines = [
        *(f"for {gpu}" for gpu in done.gpus),
        f"{done.directory}: {found}, {done.nbytes / 2**20:.1f} MiB",
        # Without a separator, pip would look for a project of that name in the index.
        f"pip install {os.path.join(os.curdir, done.directory)}, then: import {done.name}",
    ]
    if done.files:
        configs = f"{counted(done.configs, 'config')} for {counted(done.winners, 'problem')}"
        lines = [f"{configs}, of {done.name} on {done.gpus[0]}", *done.files]
    if done.portfolio:
        lines += lines_of(done.portfolio)
    print_result(lines, data, json_)

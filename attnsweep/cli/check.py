"""`attnsweep check` and `accept`: compare with a baseline, and replace it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import GUARD, app, examples, load, print_result, refuse_idle, warn
from attnsweep.core.errors import SpecError, StoreError
from attnsweep.reports import terminal
from attnsweep.reports.terminal import Form, console, counted, errors

if TYPE_CHECKING:
    from attnsweep.core.observer import Observer
    from attnsweep.regress.verdicts import Finding


@app.command(
    rich_help_panel=GUARD,
    epilog=examples(
        "attnsweep check ci --against baselines/ci --junit check.xml",
        "attnsweep check my.yaml --against results/h200/my --slower 0.01",
        "attnsweep check --recorded baselines/ci results/h200/ci",
    ),
)
def check(
    context: typer.Context,
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC|OLD",
            help="With --against: a spec. With --recorded: the run to compare with.",
            show_default=False,
            autocompletion=completion.specs_and_runs,
        ),
    ],
    new: Annotated[
        Path | None,
        typer.Argument(
            metavar="NEW",
            help="With --recorded: the run to judge.",
            autocompletion=completion.runs,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Time this run's winners against today's kernels, in turns; needs a GPU.",
            autocompletion=completion.runs,
        ),
    ] = None,
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="Compare two runs as recorded; nothing is measured."),
    ] = False,
    slower: Annotated[
        float | None,
        typer.Option(
            "--slower",
            min=0.0,
            max=10.0,
            help="Slowdown that counts as a regression: 0.02 is 2 % (default: the spec's; "
            "with --recorded 0.03).",
        ),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            min=0.0,
            help="With --against: seconds of the whole check, after which undecided problems are "
            "inconclusive (default: the spec's, which is 120 unless it says otherwise).",
        ),
    ] = None,
    other_driver: Annotated[
        bool,
        typer.Option(
            "--other-driver", help="With --against: accept a run measured with another driver."
        ),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML for a CI job.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Write the table as Markdown, or print it for - (default: add it to "
            "$GITHUB_STEP_SUMMARY, if set).",
        ),
    ] = None,
    json_: options.Json = False,
    form: options.Progress = Form.AUTO,
    kernels: options.Kernels = None,
    gpus: options.Gpus = None,
    wait: options.Wait = False,
) -> None:
    """Check whether the best candidate of a problem got slower.

    SPEC --against RUN times the machine code that RUN kept of its winners and the same configs
    compiled from today's kernels, in turns on one GPU; with --gpus, each card has its share of the
    problems. --recorded OLD NEW compares two recorded runs and needs no GPU.

    Exit code 1 if a problem regressed or is wrong, 4 if one is inconclusive, 0 if all passed;
    without a verdict 2, 3 or 70, never 1.
    """
    from attnsweep.device.cards import chosen, installed
    from attnsweep.regress import live, verdicts
    from attnsweep.regress import recorded as recordings
    from attnsweep.reports import progress
    from attnsweep.store.outputs import check_output, write_output
    from attnsweep.store.run import open_run
    from attnsweep.sweep import check_cards

    if recorded == (against is not None) or recorded == (new is None):
        raise SpecError(
            "check needs either a spec and --against RUN, or --recorded and two runs",
            hint="attnsweep check SPEC --against RUN   measures, on a GPU\n  "
            "attnsweep check --recorded OLD NEW   compares what was measured",
        )
    if recorded:
        idle = ("budget_s", "other_driver", "kernels", "wait", "gpus", "form")
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
        if against is None or new is not None:
            old_run, new_run = open_run(subject), open_run(new or subject)
            compared = recordings.compare(
                old_run, new_run, slower=0.03 if slower is None else slower
            )
        else:
            asked: dict[str, Any] = {"slower": slower, "budget_s": budget_s, "wait": wait}
            baseline, loaded = open_run(against), load(subject, kernels)
            cards = None if gpus is None else chosen(gpus, installed())
            with progress.watch(errors, form, len(cards) if cards else None) as observer:
                asked |= {"observer": observer, "tell": _teller(observer, json_ or printed)}
                asked |= {"other_driver": other_driver}
                if cards is None:
                    compared = live.check(loaded, baseline, **asked)
                else:
                    compared = check_cards.check(loaded, baseline, cards, **asked)
    table = compared.to_markdown()
    lines = [Text(line, style) for line, style in compared.lines(console.width)]
    with contextlib.suppress(BrokenPipeError):  # `check … | head`: the exit code is the verdict
        if printed:
            console.file.write(table)
        else:
            print_result(lines, compared.to_json(), json_)
    for command in verdicts.commands(compared):  # on stderr, which GitHub reads too
        errors.file.write(f"{command}\n")
    if junit is not None:
        write_output(junit, compared.to_junit())
    if markdown is None:
        verdicts.summarise(table)
    elif not printed:
        write_output(markdown, table)
    raise typer.Exit(compared.exit_code)


def _teller(observer: Observer, whole: bool) -> Callable[[Finding], None]:
    """Prints a finding as soon as it is there. whole: standard output is one document."""

    def tell(finding: Finding) -> None:
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


@app.command(
    rich_help_panel=GUARD, epilog=examples("attnsweep accept results/h200/ci baselines/ci")
)
def accept(
    run_: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The run to accept.", autocompletion=completion.runs),
    ],
    baseline: Annotated[
        Path,
        typer.Argument(metavar="BASELINE", help="The directory to replace or create."),
    ],
    force: Annotated[
        bool,
        typer.Option("--force", help="Accept a run that is unfinished, or of another spec or GPU."),
    ] = False,
    json_: options.Json = False,
) -> None:
    """Replace BASELINE with a copy of RUN.

    A run that lacks a winner or its machine code, or that is of another spec or GPU than the
    baseline, is refused with exit code 2.
    """
    from attnsweep.regress.accept import accept as accept_run
    from attnsweep.store.run import open_run

    read = open_run(run_)
    warn(read)
    overridden = accept_run(read, baseline, force=force)
    for objection in overridden:
        errors.print(f"[yellow]warning:[/] accepted although {escape(objection)}")
    data = {"run": str(run_), "baseline": str(baseline), "overridden": overridden}
    print_result(
        [Text(f"{baseline} is now {run_}: {counted(len(read.trials), 'trial')}")], data, json_
    )

"""`attnsweep report`: the tables of a stored run, or its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from attnsweep.cli import options
from attnsweep.cli.app import (
    READ,
    app,
    examples,
    latest_or,
    no_collection,
    print_result,
    print_run,
    refuse_idle,
    warn,
)
from attnsweep.core.errors import ProblemError, SpecError
from attnsweep.reports.terminal import console, counted

if TYPE_CHECKING:
    from attnsweep.store.run import Run


@app.command(
    rich_help_panel=READ,
    name="report",
    epilog=examples(
        "attnsweep report",
        "attnsweep report results/h200/flash_short --top 20",
        "attnsweep report results/h200/flash_short --problem '1,16,1024,64' --full",
        "attnsweep report results/h200/flash_short --html page.html",
        "attnsweep report --csv ranking.csv --markdown -",
    ),
)
def report_(
    context: typer.Context,
    run_: options.LatestRun = None,
    problem: options.OfProblems = None,
    json_: options.Json = False,
    results: options.Results = Path("results"),
    top: options.Top = None,
    full: options.Full = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a self-contained page to FILE."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write every row to FILE; - prints them."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the tables to FILE; - prints them."),
    ] = None,
    target_us: Annotated[
        float | None,
        typer.Option(
            "--target-us",
            min=0.001,
            help="With --html: reference time for the ladder (default: the fastest baseline).",
        ),
    ] = None,
) -> None:
    """Print a stored run in short, or write its ranked tables to files; needs no GPU and no CUDA.

    A run of four problems or more has a line for each: --problem, --top or --full have the tables.
    The page holds tables, plots and provenance in one file that needs no network.
    """
    from attnsweep.reports import html as page
    from attnsweep.reports import tables
    from attnsweep.store.outputs import check_output

    if html is None:
        why = "without --html"
        refuse_idle(context, ("target_us",), why, "it draws the ladder of the page")
    if rows := json_ or csv is not None or markdown is not None:
        own = "here: --json, --csv and --markdown have their own rows"
        refuse_idle(context, ("top",) if html is None else (), own)
    if rows or html is not None:
        refuse_idle(context, ("full",), "here: only what is printed is short without it")
    if [str(csv), str(markdown)].count("-") + json_ > 1:
        raise SpecError("only one of --csv -, --markdown - and --json can be printed")
    for path in (csv, markdown):
        if path is not None and str(path) != "-":
            check_output(path)
    if html is not None:
        page.check(html)
    with no_collection():
        read = latest_or(context, run_, results)
        read = only(read, problem) if problem else read
        if html is None and csv is None and markdown is None:
            print_run(read, json_, top, full)
            return
        warn(read)
        facts: dict[str, Any] = {"run": str(read.directory)}
        lines = []
        if html is not None:
            size = page.write(read, html, top=top or 10, target_us=target_us)
            facts |= {"page": str(html), "bytes": size}
            lines.append(f"{html}: {size / 1e6:.1f} MB")
        if csv is not None or markdown is not None:
            texts = tables.files(read)
            asked = (("csv", "ranking.csv", csv), ("markdown", "ranking.md", markdown))
            for key, name, path in asked:
                if path is not None and write_text(path, texts[name]):
                    facts[key] = str(path)
                    lines.append(str(path))
    trials = counted(len(read.trials), "trial")
    said = [Text(f"{line}, {trials} of {read.directory}") for line in lines]
    print_result(said, facts, json_)


def only(run: Run, shapes: Sequence[str]) -> Run:
    """The rows of a run's problems that --problem names. Raises ProblemError for others."""
    from attnsweep.specs.shapes import read_shapes

    wanted = {problem.label for problem in read_shapes(shapes, option="--problem")}
    there = dict.fromkeys(trial.problem.label for trial in run.trials)
    if missing := wanted - there.keys():
        some = [*there][:6] + ["…"] * (len(there) > 6)
        what = f"{run.directory} has no {', '.join(sorted(missing))}"
        raise ProblemError(what, where="--problem", hint=f"it has: {'; '.join(some)}")
    trials = [trial for trial in run.trials if trial.problem.label in wanted]
    spaces = [facts for facts in run.spaces if facts.get("problem") in wanted]
    return replace(run, trials=trials, spaces=spaces, spec_text=None)


def write_text(path: Path, text: str) -> bool:
    """Write a file in one step, or print it if its name is -; returns whether it is a file.

    Raises StoreError if it cannot be written, or is part of a recorded run.
    """
    from attnsweep.store.outputs import write_output

    if str(path) == "-":
        console.file.write(text)
        return False
    write_output(path, text)
    return True

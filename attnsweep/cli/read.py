"""Commands that read recorded runs: `report`, `explain`, `compare` and `merge`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from attnsweep.cli import options
from attnsweep.cli.app import (
    READ,
    command,
    latest_or,
    print_result,
    print_run,
    reading,
    refuse_idle,
    warn,
)
from attnsweep.core.errors import ProblemError, SpecError
from attnsweep.reports.terminal import console, counted, errors

if TYPE_CHECKING:
    from attnsweep.store.run import Run


@command(READ)
def report_(
    context: typer.Context,
    run_: options.LatestRun = None,
    problem: options.OfProblems = None,
    json_: options.Json = False,
    results: options.Results = Path("results"),
    top: options.Top = None,
    full: options.Full = False,
    html: Path | None = None,
    csv: Path | None = None,
    markdown: Path | None = None,
    target_us: Annotated[float | None, typer.Option(min=0.001)] = None,
) -> None:
    """Print a stored run in short, or write its ranked tables to files; needs no GPU and no CUDA.

    A run of four problems or more has a line for each: --problem, --top or --full have the tables.
    The page holds tables, plots and provenance in one file that needs no network.

    :--html FILE: Write a self-contained page to FILE.
    :--csv FILE: Write every row to FILE; - prints them.
    :--markdown FILE: Write the tables to FILE; - prints them.
    :--target-us: With --html: reference time for the ladder (default: the fastest baseline).

    $ attnsweep report
    $ attnsweep report results/h200/flash_short --top 20
    $ attnsweep report results/h200/flash_short --problem '1,16,1024,64' --full
    $ attnsweep report results/h200/flash_short --html page.html
    $ attnsweep report --csv ranking.csv --markdown -
    """
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
        from attnsweep.reports import html as page  # with numpy, which takes 0.1 s

        page.check(html)
    with reading(run_):
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
    said = [f"{line}, {trials} of {read.directory}" for line in lines]
    print_result(said, facts, json_)


def only(run: Run, shapes: Sequence[str]) -> Run:
    """The rows of a run's problems that --problem names. Raises ProblemError for others.

    Of its spec, what is of all problems: its baselines, and the order of its families.
    """
    from attnsweep.specs.shapes import read_shapes

    wanted = {problem.label for problem in read_shapes(shapes, option="--problem")}
    there = dict.fromkeys(trial.problem.label for trial in run.trials)
    if missing := wanted - there.keys():
        some = [*there][:6] + ["…"] * (len(there) > 6)
        what = f"{run.directory} has no {', '.join(sorted(missing))}"
        raise ProblemError(what, where="--problem", hint=f"it has: {'; '.join(some)}")
    trials = [trial for trial in run.trials if trial.problem.label in wanted]
    spaces = [facts for facts in run.spaces if facts.get("problem") in wanted]
    of_all = re.sub(r"(?m)^(problems|unserved):.*\n(?:[ -].*\n)*", "", run.spec_text or "")
    return replace(run, trials=trials, spaces=spaces, spec_text=of_all)


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


@command(READ)
def explain(
    context: typer.Context,
    run_: options.LatestRun = None,
    config: Annotated[list[str] | None, typer.Argument()] = None,
    problem: str | None = None,
    json_: options.Json = False,
    results: options.Results = Path("results"),
    kernels: options.Kernels = None,
) -> None:
    """Explain why a candidate of RUN won or lost, and which parameters mattered; needs no GPU.

    If several candidates fit CONFIG, the best ranked is explained.

    :config CONFIG: 'BLOCK_N=64 WARPGROUPS=4', a kernel, or the values that tables print, '64/4'
        (default: the winner).
    :--problem SHAPE: '1,16,1024,64' or '2,32/8,2048,128 bf16 causal' (default: every problem).

    $ attnsweep explain
    $ attnsweep explain results/h200/flash_short
    $ attnsweep explain results/h200/flash_short BLOCK_N=64 --problem 1,16,1024,64
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports.explain import explain as explained
    from attnsweep.reports.explain import lines
    from attnsweep.specs.shapes import read_shapes

    if run_ is not None and "=" in run_.name and not run_.exists():
        run_, config = None, [str(run_), *(config or [])]  # a CONFIG of the latest run
    if problem is not None:
        shapes = read_shapes([problem], option="--problem")
        if len(shapes) != 1:
            raise ProblemError(f"{len(shapes)} shapes", where="--problem", hint="name one")
        problem = shapes[0].label
    families = discover(kernels)
    with reading(run_):
        read = latest_or(context, run_, results)
        told: list[Any] = []  # of each problem while its rows are at hand
        for each in explained(read, config or (), problem, families):
            told.append(each.to_json() if json_ else lines(each, console.width))
    warn(read)
    if run_ is None:
        errors.print(Text(f"the latest run: {read.directory}"), soft_wrap=True)
    shown = (line for number, each in enumerate(told) for line in [Text()] * bool(number) + each)
    print_result(shown, told, json_)


@command(READ)
def compare(
    first: Annotated[Path, typer.Argument()],
    second: Annotated[Path, typer.Argument()],
    json_: options.Json = False,
    kernels: options.Kernels = None,
) -> None:
    """Set two runs side by side: two cards, two kinds of GPU, two versions. Needs no GPU.

    For each problem that both have timed: the winners, whether they agree, what each costs in the
    other run, and the ratios to the same baseline. Whatever differs in GPU and software comes
    first. To judge a change of code on one card, take `check`.

    :first RUN_A: A run's directory.
    :second RUN_B: Another run's directory.

    $ attnsweep compare results/h100-80gb-hbm3/batched results/h200/batched
    $ attnsweep compare before/h100/mine after/h100/mine --json
    """
    from attnsweep.family.discover import discover
    from attnsweep.reports.compare import compare as compared
    from attnsweep.reports.compare import lines
    from attnsweep.store.run import open_run

    with reading(first, second):
        runs = open_run(first), open_run(second)
        found = compared(*runs, discover(kernels))
    for run in runs:
        warn(run)
    print_result(lines(found, console.width), found, json_)


@command(READ)
def merge(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument()],
    out: Path,
    json_: options.Json = False,
    top: options.Top = None,
    full: options.Full = False,
) -> None:
    """Make one run of runs of parts of a spec, as `run --shard i/n` writes them.

    They must have the same spec, kind of GPU, driver and versions, and no problem in common.
    `report`, `check` and `accept` take the whole like any other run. The parts stay as they are.

    :runs RUN: Directories of runs.
    :--out RUN: Where the whole run goes.

    $ attnsweep merge h100/mine-1of2 h100/mine-2of2 --out h100/mine
    $ attnsweep merge h100/mine-*of8 --out h100/mine --json
    """
    from attnsweep.store.run import open_run
    from attnsweep.tools.merge import merge as merged

    if json_:
        refuse_idle(context, ("top", "full"), "with --json, which has every row")
    with reading(*runs):
        parts = [open_run(path) for path in runs]
        for part in parts:
            warn(part)
        whole = merged(parts, out, lambda text: errors.print(f"note: {text}", soft_wrap=True))
        print_run(whole, json_, top, full)

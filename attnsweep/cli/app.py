"""The app with its global options, and what several commands share.

Each command imports what it needs itself, so that `attnsweep --version` takes 0.2 s of CPU instead
of 0.9, most of it for pandas and pydantic.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from rich.text import Text

from attnsweep import __version__
from attnsweep.cli.options import option
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.files import utf8
from attnsweep.core.hardware import ARCHS
from attnsweep.reports import terminal
from attnsweep.reports.terminal import console, errors

if TYPE_CHECKING:
    from attnsweep.specs.load import SweepSpec
    from attnsweep.specs.plan import PlannedProblem
    from attnsweep.store.run import Run
    from attnsweep.sweep.session import SweepOutcome


# Groups of commands in `attnsweep --help`.
FIND = "Find the fastest kernel"
READ = "Read a run"
GUARD = "Guard and ship"
CODE = "Look at code"
MACHINE = "This machine"


def examples(*commands: str) -> str:
    """The last lines of a command's --help."""
    # A line of its own for each, and no markup in it, as Typer renders an epilog.
    return "\n\n".join(["Examples:", *(escape(command) for command in commands)])


app = typer.Typer(
    cls=terminal.Commands,
    help="Find the fastest correct attention kernel for a GPU and a shape, by measuring.",
    epilog=examples(
        "attnsweep tune 4,32,4096,128 --causal --dtype bf16",
        "attnsweep run quickstart",
        "attnsweep run h100",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command by its function's name to a group of --help.

    The docstring ends in the help of its own options and arguments, `:--html FILE: …`, or
    `:shapes SHAPE: …` by the parameter's name and what it is shown as, and in examples, `$ …`.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        text, *lines = re.split(r"\n+\$ ", inspect.cleandoc(function.__doc__ or ""))
        function.__doc__, _, fields = text.partition("\n\n:")
        known = function.__annotations__ = get_type_hints(function, include_extras=True)
        for each in filter(None, fields.split("\n:")):
            said, _, text = " ".join(each.split()).partition(": ")
            option, _, shown = said.partition(" ")
            name = option.lstrip("-").replace("-", "_")
            name = name if name in known else f"{name}_"
            own = get_origin(known[name]) is Annotated
            kind, *info = get_args(known[name]) if own else (known[name],)
            (of,) = info or [typer.Option()]
            of.help, of.metavar = text, shown or None
            of.default = option if option.startswith("-") else ...
            function.__annotations__[name] = Annotated[kind, of]
        name = function.__name__.rstrip("_")
        return app.command(name, rich_help_panel=panel, epilog=examples(*lines))(function)

    return add


def main() -> None:
    """Run the command line; every deliberate error becomes its message and exit code."""
    terminal.to_the_end(app)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"attnsweep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, option("Print the version.", "--version", callback=_version, is_eager=True)
    ] = False,
    quiet: Annotated[
        bool,
        option(
            "Print results and errors only; of a run only the answer. For every command.",
            "--quiet",
            "-q",
        ),
    ] = False,
    verbose: Annotated[
        bool, option("Print a line for each candidate. For every command.", "--verbose", "-v")
    ] = False,
) -> None:
    if quiet and verbose:
        raise SpecError("--quiet and --verbose exclude each other", hint="give one of them")
    terminal.talk = terminal.Talk.QUIET if quiet else terminal.Talk(verbose)


def refuse_idle(context: typer.Context, names: Collection[str], why: str, hint: str = "") -> None:
    """Raise SpecError if one of these parameters was given, because it would do nothing.

    names: of the command's Python parameters. why: completes the sentence `--top does nothing …`.
    """
    idle = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            off = context.params[param.name] is False and param.secondary_opts
            options = param.secondary_opts if off else param.opts
            argument = param.metavar if param.param_type_name == "argument" else None
            idle.append(argument or max(options, key=len))
    if idle:
        one = len(idle) == 1
        raise SpecError(
            f"{joined(idle)} {'does' if one else 'do'} nothing {why}",
            hint=hint or f"leave {'it' if one else 'them'} out",
        )


def given(context: typer.Context, *names: str) -> list[str]:
    """The arguments given for these parameters."""
    words: list[str] = []
    for param in context.command.params:
        source, value = context.get_parameter_source(param.name or ""), context.params[param.name]
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            option = [max(param.opts, key=len)] * (param.param_type_name == "option")
            for each in value if isinstance(value, list | tuple) else [value]:
                words += option if each is True else [*option, str(each)]
    return words


def latest_or(context: typer.Context, run_: Path | None, results: Path) -> Run:
    """The run in this directory, or the latest below `results`, which is refused next to RUN."""
    from attnsweep.store.run import latest_run, open_run

    if run_ is None:
        return latest_run(results)
    refuse_idle(context, ("results",), "next to RUN: it is where the latest run is looked for")
    return open_run(run_)


def refuse_idle_of_run(
    context: typer.Context, *, dry_run: bool, replays: bool, json_: bool
) -> None:
    """Refuse options of `run` and `tune` that would do nothing."""
    measuring = ("gpus", "scheduler", "wait", "fresh", "watch")
    if dry_run:
        names = (*measuring, "form", "top", "full", "results", "html")
        refuse_idle(context, names, "with --dry-run")
    if replays:
        refuse_idle(context, measuring, "here: a replay keeps no rows, and needs no card")
    if json_:
        refuse_idle(context, ("top", "full"), "with --json, which has every row")


def print_plan(planned: Sequence[PlannedProblem], limit: int | None, json_: bool) -> None:
    """Print the candidates that a sweep would try."""
    from attnsweep.reports import views
    from attnsweep.specs.plan import plan_facts

    shown = views.planned(
        planned, limit, console.width, values=terminal.talk is terminal.Talk.VERBOSE
    )
    print_result(shown, plan_facts(planned, limit), json_)


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def load(
    spec: Path, kernels: Path | None, settings: Sequence[str] = (), shapes: Sequence[str] = ()
) -> SweepSpec:
    """A spec with the families that it may name. settings, shapes: of --set and --problem.

    A spec with either has a name, and so a run, of its own.
    """
    from attnsweep.family.discover import discover
    from attnsweep.specs.load import load_spec, with_problems
    from attnsweep.specs.shapes import read_shapes
    from attnsweep.specs.yaml_file import tag

    loaded = load_spec(spec, discover if kernels is None else discover(kernels), settings)
    for text in loaded.ignored:
        errors.print(f"note: {escape(text)}", soft_wrap=True)
    problems = read_shapes(shapes, option="--problem") if shapes else []
    if problems:
        loaded = with_problems(loaded, problems)
    if settings or problems:
        asked = tag(settings, [problem.label for problem in problems])
        loaded = replace(loaded, name=f"{loaded.name}-{asked}")
    return loaded


def print_end(outcome: SweepOutcome) -> None:
    """Say how a sweep ended, if not as it should."""
    if outcome.interrupted:
        errors.print("interrupted: all rows are kept; the same command continues from here")
    elif outcome.unmeasured:
        why = "no card is left" if outcome.no_card else "lost twice"
        what = f"not measured ({why}): {', '.join(outcome.unmeasured)}"
        errors.print(f"[yellow]warning:[/] {escape(what)}", soft_wrap=True)
        errors.print("all rows so far are kept; the same command continues from here")


def without_arch(error: NoGpuError, again: str) -> NoGpuError:
    """The error where no GPU says for which architecture. again: a command that says one."""
    hint = f"say for which: {again}; there are: {', '.join(ARCHS)}"
    return NoGpuError(error.what, hint=f"{error.hint}\n  {hint}" if error.hint else hint)


_LONG_S = 2.0


@contextlib.contextmanager
def reading(*places: Path | None) -> Iterator[None]:
    """A context for reading runs; after two seconds it says on stderr what is being read.

    Collection pauses: rows hold no cycles, and it took 1.0 of 3.1 s of 10,000 trials' report.
    """
    names = " and ".join(str(place or "the latest run") for place in places)
    said = threading.Timer(_LONG_S, errors.print, [Text(f"reading {names} …")], {"soft_wrap": True})
    said.daemon = True
    if terminal.talk is not terminal.Talk.QUIET:
        said.start()
    gc.disable()
    try:
        yield
    finally:
        said.cancel()
        gc.freeze()  # or the first collection looks at all that is about to be freed
        gc.enable()


def print_run(run_: Run, json_: bool, top: int | None, full: bool, *, every: bool = False) -> None:
    """Print a run's warnings, and the run: in short, in full or as JSON.

    every: end in a sentence about each problem, however many there are.
    """
    from attnsweep.reports import tables
    from attnsweep.reports.sections import sections_of
    from attnsweep.reports.text import sentence
    from attnsweep.serve.export import use_of

    warn(run_)
    quiet = terminal.talk is terminal.Talk.QUIET
    if json_:
        said = {"sentences": [sentence(each) for each in sections_of(run_)]} if every else {}
        print_result([], itertools.chain(tables.json_parts(run_), said.items()), True)
    elif full:
        tables.print_run(run_, console, top=top or 10)
        tables.print_brief(run_, console, every=every, quiet=True, use=use_of)
    else:
        tables.print_brief(run_, console, top=top, every=every, quiet=quiet, use=use_of)


def warn(*runs: Run) -> None:
    """Print what was wrong with the files of these runs."""
    for warning in (warning for each in runs for warning in each.warnings):
        errors.print(f"[yellow]warning:[/] {escape(warning)}")


def json_texts(data: Any) -> Iterator[str]:
    """Write data as JSON, in pieces; an iterator of names and values becomes an object.

    So are the items of a value that is an iterator.
    """
    if not isinstance(data, Iterator):
        yield _json_text(data)
        return
    before = "{\n  "
    for name, value in data:
        yield f"{before}{_json_text(name)}: "
        if isinstance(value, Iterator):
            first = "[\n    "
            for each in value:
                yield first + _json_text([[each]])[len("[\n  [\n    ") : -len("\n  ]\n]")]
                first = ",\n    "
            yield "\n  ]" if first.startswith(",") else "[]"
        else:
            yield _json_text([value])[len("[\n  ") : -len("\n]")]
        before = ",\n  "
    yield "\n}"


def _json_text(value: Any) -> str:
    from pydantic_core import PydanticSerializationError, to_json

    # json.dumps takes twelve times as long: its indent is written in Python.
    try:
        return to_json(value, indent=2, inf_nan_mode="constants", fallback=str).decode()
    except PydanticSerializationError:  # a path, in a locale that does not know its letters
        return _json_text(_texts(value))


def _texts(value: Any) -> Any:
    """The data with texts that can be written as UTF-8."""
    if isinstance(value, dict):
        return {_texts(name): _texts(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_texts, value)]
    return utf8(value).decode() if isinstance(value, str) else value


def _escaped(found: re.Match[str]) -> str:
    """A character as JSON escapes it."""
    return json.dumps(found[0])[1:-1]


def print_result(lines: Iterable[Text | str], data: Any, json_: bool) -> None:
    """Print a result: its lines, plain ones as they are, or its data as JSON."""
    if json_:
        unicode = console.encoding.startswith("utf")
        for text in json_texts(data):  # which escapes what the output cannot say, and loses nothing
            console.file.write(text if unicode else re.sub(r"[^\x00-\x7f]", _escaped, text))
        console.file.write("\n")
        return
    if console.color_system is None:  # no line has a style there, and rich takes 10 us of each
        for line in lines:
            console.file.write(f"{str(line).expandtabs()}\n")
        return
    texts = (Text(line) if isinstance(line, str) else line for line in lines)
    while several := [*itertools.islice(texts, 100)]:  # each print takes 0.3 ms
        console.print(Text("\n").join(several), soft_wrap=True)

"""The only module that writes to a terminal, and plain text laid out for its width.

Without a terminal there are no ANSI codes. The end of a program is here too: errors as messages and
exit codes, Ctrl-C and SIGTERM, output that cannot be written, and faults of ours; and the names of
the forms of progress, so that `attnsweep --version` need not import those.
"""

from __future__ import annotations

import codecs
import contextlib
import enum
import errno
import io
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from attnsweep.core.errors import INTERNAL, AttnsweepError, FileError, NoGpuError, reason
from attnsweep.core.files import shipped

# Piped output has no width of its own. 120 holds every column that a ranking usually has, and CI
# services show as much in a log without wrapping.
_PIPE_WIDTH = 120
_WHOLE = 10_000
GLUE = "\u00a0"
"""Keeps a number and its unit on one line when `wrap` breaks the text."""


class _Console(Console):
    """A console that raises on a closed pipe; rich would end the program with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # raises the BrokenPipeError that rich is handling


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    piped = not (stream.isatty() or os.environ.get("COLUMNS"))
    return _Console(
        stderr=stderr, highlight=False, emoji=False, width=_PIPE_WIDTH if piped else None
    )


console = _console(stderr=False)
"""For results: tables, JSON."""
errors = _console(stderr=True)
"""For everything else: progress, warnings, errors."""


def aligned(
    lines: Sequence[Sequence[str]], align: str, width: int, *, shrink: Sequence[int] = ()
) -> list[str]:
    """Cells as columns two spaces apart, aligned by `align`: `l` or `r` for each.

    If lines exceed `width`, the columns in `shrink` are cut in that order, down to 6 characters.
    They should not hold numbers.
    """
    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(align))]
    for column in shrink:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[column] = max(min(6, widths[column]), widths[column] - max(0, excess))
    out = []
    for line in lines:
        cells = []
        for cell, size, side in zip(line, widths, align, strict=True):
            left = size - cell_len(cell)
            cell = cut(cell, size) if left < 0 else cell
            cells.append(" " * left + cell if side == "r" else cell + " " * left)
        out.append("  ".join(cells).rstrip())
    return out


def whole_width() -> int:
    """The width for lines that are cut to it: the terminal's; in a pipe all of a line is shown."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _WHOLE


def cut(text: str, width: int) -> str:
    """At most `width` columns of the text, with … at the end if it was cut."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken between words, never at GLUE; all but the first indented."""
    return broken(text, width, subsequent_indent="    ", replace_whitespace=False)


def broken(text: str, width: int, **how: Any) -> list[str]:
    """Lines of at most `width`, broken between words, never at GLUE. how: more for textwrap."""
    plain = text.replace(GLUE, " ")
    if 0 < len(plain) <= width and plain.isprintable() and plain[-1] != " ":
        return [plain]  # as most are: textwrap takes 20 us
    lines = textwrap.wrap(text, width, break_on_hyphens=False, **how)
    return [line.replace(GLUE, " ") for line in lines]


def counted(number: int, noun: str) -> str:
    """`1 candidate`, `2 candidates`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class _Stopped(Exception):
    """Carries Ctrl-C, OSError and EOFError past Click, which would end the program in its way."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Raise _Stopped for what Click would make exit code 1 of, or rich of a closed pipe."""
    try:
        yield
    except (KeyboardInterrupt, OSError, EOFError) as error:
        raise _Stopped from error
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            raise _Stopped from error.__context__
        raise


class Talk(enum.IntEnum):
    """How much a command says besides its result."""

    QUIET = -1
    NORMAL = 0
    VERBOSE = 1


talk = Talk.NORMAL
_TALKING = ("-q", "--quiet", "-v", "--verbose")


class Group(TyperGroup):
    """Commands whose help breaks at the width of the terminal, not where its source does."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, each paragraph of its help in one line."""
        found = super().get_command(ctx, cmd_name)
        if found is not None and found.help:
            found.help = re.sub(r"(?<!\n)\n(?!\n)", " ", found.help)
        for param in found.get_params(ctx) if found is not None else ():
            _without_type(param)
        return found

    def get_params(self, ctx: Any) -> Any:
        """Its own options."""
        found = super().get_params(ctx)
        for param in found:
            _without_type(param)
        return found


def _without_type(param: Any) -> None:
    """Leave `<bool>` out of a flag's help, and write `<str>` for `<list[str]>`."""
    if getattr(param, "is_flag", False) and param.metavar is None:
        param.metavar = ""
    shown = getattr(param, "display_type", None)  # older versions of Typer have none
    if shown is not None and "display_type" not in vars(param):
        param.display_type = lambda ctx: _LIST.sub(lambda of: of[1].lower(), shown(ctx))


_LIST = re.compile(r"list\[(\w+)\]")


class Commands(Group):
    """All commands. They leave Ctrl-C and errors of the system to `to_the_end`."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line as Click does, and print help; raise _Stopped for Ctrl-C."""
        with _stoppable():
            return super().make_context(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Click does, and take `--quiet` and `--verbose` behind a command too."""
        own = args[: args.index("--")] if "--" in args else args
        moved = [word for word in own if word in _TALKING]
        rest = [word for word in own if word not in _TALKING] + args[len(own) :]
        return super().parse_args(ctx, moved + rest)

    def invoke(self, ctx: Any) -> Any:
        """Run the command as Click does, but raise _Stopped as `make_context`."""
        with _stoppable():
            return super().invoke(ctx)


_IN_ASCII = {
    "µ": "u",
    "±": "+-",
    "×": "x",
    "·": "|",
    "–": "-",
    "−": "-",
    "…": "...",
    "→": "->",
    "‖": "||",
    "†": "+",
    "≥": ">=",
    "²": "2",
    "ᵀ": "T",
    GLUE: " ",
}
_PLAIN = "attnsweep.plain"


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """What stands for text that a terminal cannot say: its error handler, by the name _PLAIN.

    Bytes of file names that are not in the locale's encoding stay what they are.
    """
    assert isinstance(error, UnicodeEncodeError)
    char, end = error.object[error.start], error.start + 1
    if "\udc80" <= char <= "\udcff":
        return bytes([ord(char) - 0xDC00]), end
    return _IN_ASCII.get(char, "?"), end


codecs.register_error(_PLAIN, _plain)


def to_the_end(app: Callable[[], object]) -> None:
    """Run a program and exit: every error becomes its message and exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)
    _stop_on_sigterm()
    try:
        try:
            app()
        except SystemExit as end:
            sys.stdout.flush()
            if end.code == _INTERRUPTED:
                _exit_interrupted()
            raise
        except AttnsweepError as error:
            if isinstance(error, NoGpuError) and not error.hint:
                error.hint = "attnsweep doctor says what is missing, and how to fix it"
            _error(error.render())
            sys.exit(error.exit_code)
        except _Stopped as stopped:
            raise stopped.__cause__ or stopped from None
    except KeyboardInterrupt as stop:
        said = f"interrupted: {stop}" if str(stop) else "interrupted"
        errors.print(escape(said), soft_wrap=not errors.is_terminal)
        _exit_interrupted()
    except Exception as error:  # whatever it is, it is no verdict of `check`
        _exit_of_error(error)


_INTERRUPTED = 130
_TERMINATED = 143
# `timeout` and batch systems send SIGTERM to a process and to its group, so one stop comes twice.
_ONE_STOP_S = 1.0
_sigterms_s: list[float] = []


def _stop_on_sigterm() -> None:
    """Have SIGTERM do what Ctrl-C does; like Ctrl-C, it stays ignored if it was on entry."""
    _sigterms_s.clear()
    own = threading.current_thread() is threading.main_thread()
    if own and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    _sigterms_s.append(time.monotonic())
    if len(_sigterms_s) == 1 or _sigterms_s[-1] - _sigterms_s[-2] > _ONE_STOP_S:
        raise KeyboardInterrupt


def _exit_interrupted() -> NoReturn:
    """End with the exit code of the signal, and at once if there is another.

    Python waits for threads that compile when it ends; a signal there would print a traceback.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
    sys.exit(_TERMINATED if _sigterms_s else _INTERRUPTED)


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)


def _exit_of_error(error: Exception) -> NoReturn:
    """End with what the system refused, a file or the output, or with a fault of ours."""
    if (of_file := _refused(error)) is not None:
        _error(of_file.render())
        sys.exit(of_file.exit_code)
    if not isinstance(error, OSError) or error.errno not in _OUTPUT_ERRORS:
        _exit_internal(error)
    _discard_output()
    if error.errno == errno.EPIPE:  # `attnsweep report | head`
        before = error.__context__
        sys.exit(getattr(before, "exit_code", getattr(before, "code", 0)))
    with contextlib.suppress(OSError):
        _error(f"cannot write the output: {error.strerror}")
    sys.exit(2)


_OURS = (Path(__file__).resolve().parent.parent, shipped("kernels"), shipped("configs"))
_LOOP = "Symlink loop from "
_HINTS = {
    errno.EACCES: "check its permissions, and those of the directories above it",
    errno.EPERM: "check its permissions, and those of the directories above it",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
}


def _refused(error: Exception) -> FileError | None:
    """What an error of the system says of the file that it names; None if it names none."""
    if isinstance(error, RuntimeError) and str(error).startswith(_LOOP):  # pathlib before 3.13
        where = str(error).removeprefix(_LOOP).strip("'")
        return FileError(f"cannot be used: {os.strerror(errno.ELOOP)}", where=where)
    if not isinstance(error, OSError):
        return None
    why = reason(error)
    if isinstance(error.filename, str | bytes):
        path = os.fsdecode(error.filename)
        hint = _HINTS.get(error.errno or 0)
        if any(map(Path(path).is_relative_to, _OURS)):
            hint = "it comes with attnsweep: install that again"
        return FileError(f"cannot be used: {why}", where=path, hint=hint)
    if error.errno == errno.ENOENT and not _has_directory():
        hint = "change to a directory that exists"
        return FileError(f"cannot be used: {why}", where="the working directory", hint=hint)
    return None


def _has_directory() -> bool:
    """Whether the directory that this process is in still exists."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


# Frames of a traceback that are shown: an endless recursion has a thousand.
_FRAMES = 40


def _exit_internal(error: Exception) -> NoReturn:
    """End with an error that nobody expected, and what a report of it needs."""
    with contextlib.suppress(OSError):
        if isinstance(error, MemoryError):
            why = f": {error}" if str(error) else ""
            hint = "free memory of the host, or take fewer or smaller problems"
            _error(f"the host has no memory left{why}\n  {hint}")
        else:
            traceback.print_exception(error, limit=-_FRAMES, file=errors.file)
            what = "".join(traceback.format_exception_only(error)).strip()
            _error(f"attnsweep has a fault: {what}\n  {_REPORT}")
        sys.stdout.flush()
    sys.exit(INTERNAL)


_REPORT = (
    "report it as an issue of attnsweep's repository, with all lines above, the command, and what "
    "`attnsweep doctor` prints"
)


def _discard_output() -> None:
    """Discard buffered output; otherwise Python would fail again while it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _error(text: str) -> None:
    errors.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=not errors.is_terminal)


class ProgressForm(StrEnum):
    """Bars on a terminal and lines elsewhere, always lines, or JSON."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"

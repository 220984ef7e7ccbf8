"""How a program ends: errors as messages and exit codes, Ctrl-C, output that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from typer.core import TyperGroup

from attnsweep.errors import AttnsweepError
from attnsweep.show.terminal import errors


class _Stopped(Exception):
    """Brings what Click would end in its own way past it: Ctrl-C, and output that fails."""


class Commands(TyperGroup):
    """Commands whose Ctrl-C and failing output are left to `to_the_end`."""

    def invoke(self, ctx: Any) -> Any:
        """The command, as Click runs it."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError) as error:
            raise _Stopped from error


def to_the_end(app: Callable[[], object]) -> None:
    """Run a program and exit: every deliberate error becomes its message and exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of µ and × where they cannot be encoded
    try:
        try:
            app()
        except SystemExit:
            sys.stdout.flush()
            raise
        except AttnsweepError as error:
            _error(error.render())
            sys.exit(error.exit_code)
        except _Stopped as stopped:
            raise stopped.__cause__ or stopped from None
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        if error.errno == errno.EPIPE:  # `attnsweep report | head`
            sys.exit(getattr(error.__context__, "code", 0))
        with contextlib.suppress(OSError):
            _error(f"cannot write the output: {error.strerror}")
        sys.exit(2)


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)


def _discard_output() -> None:
    """Send what is still buffered nowhere, or Python would fail once more while it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _error(text: str) -> None:
    errors.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=not errors.is_terminal)

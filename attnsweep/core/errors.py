"""Every error attnsweep raises on purpose, as one tree.

Each error says where, what, why and what to do next, and carries the exit code of the command that
it ends: 0 ok · 1 every candidate failed, or one regressed · 2 usage or spec, or a file that cannot
be used · 3 no usable GPU · 4 inconclusive · 70 an error that nobody expected: ours.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from contextlib import suppress

INTERNAL = 70
"""Exit code of a fault of ours, as sysexits.h has it; never 1, which is a verdict."""


_PROJECTS = {"tilelang": "tilelang", "cutlass": "nvidia-cutlass-dsl"}
"""What is installed for a package of other compilers."""


def remedy(error: BaseException) -> str:
    """`: pip install NAME` for a package of other compilers that is not installed, or nothing."""
    package = str(getattr(error, "name", None)).partition(".")[0]
    known = isinstance(error, ModuleNotFoundError) and package in _PROJECTS
    return f": pip install {_PROJECTS[package]}" if known else ""


def in_short(error: BaseException) -> str:
    """`ValueError: the first line of what it says (file.py:7)`: where it was raised.

    One that says nothing, as a bare `assert`, has its line of code in place of that; one whose
    first line leads to others, as Triton's `at 18:22:` above code, also the last. For a compiler
    that is not installed, also the remedy.
    """
    at, lines = raised_at(error), [""]
    with suppress(BaseException):  # its text is the callable's that raised it, too
        lines = str(error).strip().splitlines() or [_raising(error).line or ""]
        if lines[0].endswith(":") and len(lines) > 1:
            lines[0] += f" {lines[-1].strip()}"
    said = f": {lines[0][:300]}" if lines[0] else ""
    return f"{type(error).__name__}{said}{remedy(error)} ({at})"


def reason(error: OSError) -> str:
    """Why the system refused, in its words: `No space left on device`.

    shutil.copytree tells of each file that it could not copy; the first is enough.
    """
    first = error.args[0] if error.args else ""
    if isinstance(first, list) and first:
        first = re.sub(r"^\[Errno \d+\] |: '.*", "", str(first[0][-1]))
    return error.strerror or str(first).partition("\n")[0] or type(error).__name__


def raised_at(error: BaseException) -> str:
    """`file.py:7`."""
    frame = _raising(error)
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _raising(error: BaseException) -> traceback.FrameSummary:
    """The call that raised an error."""
    return traceback.extract_tb(error.__traceback__)[-1]


class AttnsweepError(Exception):
    """Base of all errors. `where`: a file:line:column or a command; `hint`: what to do next."""

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(self.render())

    def render(self) -> str:
        """`where: what`, then the hint on its own indented line."""
        first = f"{self.where}: {self.what}" if self.where else self.what
        return f"{first}\n  {self.hint}" if self.hint else first


class SpecError(AttnsweepError):
    """The YAML sweep spec is wrong: syntax, an unknown name, a value out of range."""


class ProblemError(AttnsweepError):
    """An attention shape that cannot exist, such as causal with seqlen_q > seqlen_k."""


class KernelError(AttnsweepError):
    """A kernel declaration is wrong, or no family has that name."""


class SpaceError(AttnsweepError):
    """The rules leave no candidate, or no family supports the problem."""


class StoreError(AttnsweepError):
    """A run directory cannot be read, written or locked."""


class ToolchainError(AttnsweepError):
    """NVRTC (or its Python binding) is missing or refuses the architecture."""


class CompileError(AttnsweepError):
    """NVRTC or ptxas refused one stage. `log` is the whole compiler log."""

    def __init__(self, what: str, *, log: str, where: str | None = None) -> None:
        self.log = log
        super().__init__(what, where=where)

    def render(self) -> str:
        """Every error of the log, each with its source line and caret."""
        found = compiler_errors(self.log)
        first = super().render()
        return "\n".join(found if any(self.what in each for each in found) else [first, *found])


class CompilerLost(CompileError):
    """The compiler's process was killed, which says nothing of the code."""

    def __init__(self, what: str) -> None:
        super().__init__(what, log="")


_ERROR = re.compile(r"\berror\b[^:\n]{0,16}:")


def compiler_errors(log: str) -> list[str]:
    """Each error of a log of NVRTC or ptxas with the source line and the caret below it.

    Warnings, and equal errors, are left out.
    """
    found: list[list[str]] = []
    inside = False
    for line in log.splitlines():
        if _ERROR.search(line) and not line[:1].isspace():
            found.append([line.rstrip()])
            inside = True
        elif inside and line[:1].isspace() and line.strip():
            found[-1].append(line.rstrip())
        else:
            inside = False
    return list(dict.fromkeys("\n".join(lines) for lines in found))


# Errors of a compiler, of a few lines each, that are shown for one cause.
_MOST = 20


def errors_of(details: Iterable[str | None]) -> list[str]:
    """Every distinct compiler error in these rows' details, as lines."""
    logs = ["\n".join((detail or "").splitlines()[1:]) for detail in details]
    found = list(dict.fromkeys(error for log in logs for error in compiler_errors(log)))
    lines = [line for error in found[:_MOST] for line in error.splitlines()]
    rest = len(found) - _MOST
    return lines + ([f"and {rest} more errors; --json has all"] if rest > 0 else [])


class NoGpuError(AttnsweepError):
    """No usable GPU: no driver, a driver too old, CuPy missing, or the wrong architecture."""

    exit_code = 3


class CardLostError(NoGpuError):
    """The GPU was there when the run began, and is not now."""


class FileError(AttnsweepError):
    """The system refuses a file or directory: its permissions, its name, the disk."""


class Unavailable(Exception):
    """A baseline, or a callable, that cannot run a problem here; the message is the reason."""

    status = "skipped"
    """Of its row: see Status."""

"""A time limit for a declaration's functions, so that a rule that never returns is named."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from attnsweep.core.errors import KernelError

LIMIT_S = 10.0
"""Longest time that the functions of a declaration may take for one config: they take 10 µs."""


class TooLong(BaseException):
    """Raised inside the function that did not return. No `except Exception` there catches it."""


_begun: float | None = None
"""When the functions were first asked about the config at hand, by time.monotonic, or None."""


def begin() -> None:
    """The functions are asked about another config."""
    global _begun
    _begun = time.monotonic()


def elapsed_s() -> float:
    """Seconds since `begin`, 0 outside of `limited`."""
    return 0.0 if _begun is None else time.monotonic() - _begun


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise TooLong inside a call that keeps one config for more than LIMIT_S.

    Only where the system has interval timers (not on Windows), in the main thread, and if nobody
    else uses the alarm; elsewhere Ctrl-C still names the function.
    """
    global _begun
    timer = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    )
    if timer:
        signal.signal(signal.SIGALRM, _look)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S / 4, LIMIT_S / 4)
    try:
        yield
    except TooLong as error:  # between two functions: neither can be named
        what = f"the functions of a declaration took over {LIMIT_S:g} s for one config"
        raise KernelError(what) from error
    finally:
        if timer:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _begun = None


def _look(number: int, frame: FrameType | None) -> None:
    """The timer's handler: it runs in the main thread, inside the call that is under way."""
    if elapsed_s() > LIMIT_S:
        begin()  # once: what handles the exception may take its time
        raise TooLong

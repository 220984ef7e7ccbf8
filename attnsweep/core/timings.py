"""Seconds of each step that prepares a sweep, and of what proves its outputs right.

One log a process, as of `logging`: every room adds to it, and the process's owner takes it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_spent_s: dict[str, float] = {}
_proved_s: dict[str, float] = {}
_here = threading.local()


@contextmanager
def step(name: str) -> Iterator[None]:
    """Add the seconds inside to those of a step, whether it fails or not."""
    began = time.perf_counter()
    try:
        yield
    finally:
        spent_s = time.perf_counter() - began
        with _lock:
            _spent_s[name] = _spent_s.get(name, 0.0) + spent_s


def taken() -> dict[str, float]:
    """Seconds of each step of this process since the last call, in the order of their ends."""
    with _lock:
        spent_s = dict(_spent_s)
        _spent_s.clear()
    return spent_s


def proved(part: str, spent_s: float) -> None:
    """Add to the seconds that this part of proving outputs right took."""
    with _lock:
        _proved_s[part] = _proved_s.get(part, 0.0) + spent_s


@contextmanager
def proving(part: str) -> Iterator[None]:
    """Add the seconds inside to those of a part of proving, less those of parts inside it.

    The device is idle when it begins, or nearly, so that these are the device's seconds too.
    """
    outer, _here.inner_s = getattr(_here, "inner_s", 0.0), 0.0
    began = time.perf_counter()
    try:
        yield
    finally:
        spent_s = time.perf_counter() - began
        proved(part, spent_s - _here.inner_s)
        _here.inner_s = outer + spent_s


def proves(part: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`proving` of a whole function."""

    def count(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def counted(*args: P.args, **options: P.kwargs) -> T:
            with proving(part):
                return function(*args, **options)

        return counted

    return count


def proof_taken() -> dict[str, float]:
    """Seconds of each part of proving in this process since the last call."""
    with _lock:
        proved_s = dict(_proved_s)
        _proved_s.clear()
    return proved_s

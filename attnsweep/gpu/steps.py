"""How long each step of what is prepared once took, for whoever shows why a run takes so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_spent_s: dict[str, float] = {}


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

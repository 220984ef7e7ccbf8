"""Capture of CUDA graphs: its conditions, and how many calls a graph holds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Replay = Callable[[], None]

# A graph that lasts less than this share of what was asked for is made anew, this often at most: a
# graph of few calls takes longer for each, because its own launch does not hide behind it.
_SHORT = 0.7
_TIMES_LONGER = 4


class _Collection:
    """How many contexts of all threads want no garbage to be collected, and whether it was."""

    def __init__(self) -> None:
        self._lock, self._without, self._was = threading.Lock(), 0, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See uncollected."""
        with self._lock:
            if not self._without:
                self._was = gc.isenabled()
                gc.disable()
            self._without += 1
        try:
            yield
        finally:
            with self._lock:
                self._without -= 1
                if not self._without and self._was:
                    gc.enable()


_collection = _Collection()


def uncollected() -> AbstractContextManager[None]:
    """Collect no garbage meanwhile, nor until the same contexts of other threads end.

    A finalizer that waits for the device ends a capture: on an H100 cuDNN's handle of the problem
    before was destroyed in one, and the process died.
    """
    return _collection.paused()


def lasting(
    capture: Callable[[int], Replay],
    time_us: Callable[[Replay], float],
    once_us: float,
    target_us: float,
    most: int,
) -> tuple[Replay, int, int]:
    """A graph that lasts about target_us, the calls in it, and the calls launched to find out.

    time_us: replays a graph, and times a replay right after it. once_us: of an eager call, which is
    a first guess only: it is mostly launch latency if the kernel is small, and anything if the host
    stood still. On H100s cuDNN's calls of 9.1 and 32.4 us took 21.6 and 46.7 in all rounds of
    another run, 13 to 14 us more, as in graphs of one call; a slower baseline then became the base.
    """
    calls = max(1, min(most, round(target_us / max(once_us, 1.0))))
    replay, launched = capture(calls), 0
    for _ in range(_TIMES_LONGER):
        took_us = time_us(replay)
        launched += 2 * calls
        if calls == most or took_us >= _SHORT * target_us:
            break
        calls = max(calls + 1, min(most, round(calls * target_us / max(took_us, 1.0))))
        replay = capture(calls)
    return replay, calls, launched

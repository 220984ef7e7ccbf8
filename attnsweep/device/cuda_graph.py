"""Capture of CUDA graphs: its conditions, and how many calls a graph holds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Replay = Callable[[], None]

# A graph that lasts less than this share of what was asked for is made anew, this often at most: a
# graph of few calls takes longer for each, because its own launch does not hide behind it.
_SHORT = 0.7
_TIMES_LONGER = 4


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: a finalizer that waits for the device ends the capture.

    On an H100 cuDNN's handle of the problem before was destroyed in a capture: the process died.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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

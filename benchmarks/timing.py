"""Times of calls of PyTorch, by several ways that take turns."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

WARM_UP, MOST_S = 2, 4.0
AHEAD_CYCLES = 8_000_000  # the device sleeps 4 ms, at 1980 MHz, while the host queues calls
settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


class Way(NamedTuple):
    """What is timed, and a context that is entered around it and is not timed."""

    call: Callable[[], Any]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def timed_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one call on the host's clock, until the device has finished."""
    settle()
    began = time.perf_counter()
    call()
    settle()
    return (time.perf_counter() - began) * 1e3


def turns(
    ways: Mapping[str, Way],
    rounds: int,
    sample: Callable[[Callable[[], Any]], float] = timed_ms,
    most_s: float | None = None,
) -> dict[str, list[float]]:
    """A sample of each way in each round; another one begins each time.

    most_s: no round begins after that (default: MOST_S).
    """
    for way in ways.values():
        with way.within():
            for _ in range(WARM_UP):
                way.call()
    times: dict[str, list[float]] = {name: [] for name in ways}
    names, end = [*ways], time.perf_counter() + (MOST_S if most_s is None else most_s)
    for number in range(1, rounds + 1):
        if number > 1 and time.perf_counter() > end:
            break
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            with ways[name].within():
                times[name].append(sample(ways[name].call))
    return times


def gains(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians of the first way and the second, and of their ratio: by rounds if they took turns."""
    before, after = times.values()
    paired = [a / b for a, b in zip(before, after, strict=False)]
    return {
        "before_ms": round(statistics.median(before), 4),
        "after_ms": round(statistics.median(after), 4),
        "gain": round(statistics.median(paired), 4),
    }


def device_us(call: Callable[[], Any], calls: int, sleep_cycles: int = 0) -> float:
    """Microseconds of a call on the device, the mean of `calls` in a row.

    sleep_cycles: the device sleeps so long before, while the host queues the calls.
    """
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / calls


@contextlib.contextmanager
def without_garbage() -> Any:
    """Keep Python from collecting garbage for as long as the context lasts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def host_us(ways: Mapping[str, Way], blocks: int, calls: int) -> dict[str, list[float]]:
    """Microseconds from each call to its return, sorted: `blocks` of `calls`, in random order.

    The device catches up after each block, of which a quarter more calls precede and do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    clock = time.perf_counter_ns
    with without_garbage():
        for _ in range(blocks):
            for name in random.sample([*ways], len(ways)):
                call, within = ways[name]
                with within():
                    kept = None
                    for number in range(-(calls // 4), calls):
                        begin = clock()
                        kept = call()  # its output replaces the one before
                        took = clock() - begin
                        if number >= 0:
                            times[name].append(took / 1e3)
                del kept
                settle()
    return {name: sorted(each) for name, each in times.items()}


def counted(package: Any, call: Callable[[], Any]) -> dict[str, int]:
    """What a call adds to the package's counters."""
    before = package.counters()
    call()
    now = package.counters()
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}

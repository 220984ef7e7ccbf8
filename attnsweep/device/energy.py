"""Energy of a call, by the counter of NVML: millijoules of the whole board since the driver began.

The counter moves in steps, every 20 to 100 ms, so it cannot be read around a call. Calls run back
to back while it is watched: from one step to another, at least STRETCH_S later, it gives the mean
power, and events give the time of the calls enqueued meanwhile. Their product is the energy of a
call, and needs no call to begin at a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Steps before this are of a card whose power still rises. Some cards average it over 100 ms.
SETTLE_S = 0.2
STRETCH_S = 0.5
# A counter that stands still for so long under load never moves; and a stretch ends after so long.
STILL_S = 1.0
LONGEST_S = 5.0
# A step is seen this much late at most: 0.1 % of a stretch.
_POLL_S = 0.0005
# The host enqueues this much work ahead, in parts of at least so much: no call waits for the host.
_AHEAD_US = 20_000.0
_PART_US = 5_000.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """One measurement: microjoules of one call, and the board's mean power meanwhile."""

    energy_uj: float
    power_w: float


def stretch(
    counter: Callable[[], int],
    load: Replays,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Stretch | None:
    """Measure one stretch; None if the counter does not move.

    counter: millijoules. A counter that falls was set to zero, and the stretch begins anew.
    """
    begun = moved = clock()
    last = counter()
    first: tuple[float, int] | None = None
    while (now := clock()) - begun < LONGEST_S and now - moved < STILL_S:
        load.feed()
        value, now = counter(), clock()
        if value < last:
            first, moved = None, now
        elif value > last:
            moved = now
            if first is None:
                if now - begun >= SETTLE_S:
                    first = (now, value)
                    load.mark()
            elif now - first[0] >= STRETCH_S:
                power_w = (value - first[1]) / 1e3 / (now - first[0])
                return Stretch(power_w * load.time_us(), power_w)
        last = value
        sleep(_POLL_S)
    return None


def counter(session: Any) -> Callable[[], int] | None:
    """The reader of a card's energy counter; None without NVML, or if the card has none."""
    try:
        nvml, card = session.nvml()
        nvml.nvmlDeviceGetTotalEnergyConsumption(card)
    except Exception:  # ImportError, or any of NVML's own errors
        return None
    return lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(card))


class Replays:
    """Replays of one graph on a Session's stream, which keep the card busy."""

    def __init__(
        self, session: Any, replay: Callable[[], None], calls: int, call_us: float
    ) -> None:
        """calls: of one replay. call_us: what a call takes, about."""
        self._session, self._replay, self._calls = session, replay, calls
        each_us = max(1.0, calls * call_us)
        self._part = max(1, round(_PART_US / each_us))
        self._ahead = max(2, round(_AHEAD_US / (self._part * each_us)))
        self._ends: deque[Any] = deque()
        self._begin: Any = None
        self._counted = 0

    def feed(self) -> None:
        """Enqueue more, if little is left."""
        while self._ends and self._ends[0].done:
            self._ends.popleft()
        while len(self._ends) < self._ahead:
            for _ in range(self._part):
                self._replay()
            self._counted += self._part * self._calls
            self._ends.append(self._session.record())

    def mark(self) -> None:
        """Count and time the calls that are enqueued from now on."""
        self._begin, self._counted = self._session.record(), 0

    def time_us(self) -> float:
        """Mean time of those calls; waits for them."""
        if not self._counted:  # a call that is longer than the stretch
            self._replay()
            self._counted = self._calls
        elapsed: float = self._session.elapsed_us(self._begin, self._session.record())
        return elapsed / self._counted

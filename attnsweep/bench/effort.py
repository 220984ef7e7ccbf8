"""How often a call is made: one of microseconds many times, one of seconds once or twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

FIRST_US = 300.0  # the length of a replay that gives a first time
# Replays of one graph that are further apart than this are taken again, this often at most; then
# the least counts, because a first time that is too long keeps the best candidate out of the race.
_FIRST_APART, _FIRST_TRIES = 1.5, 5
_EAGER_CALLS, _EAGER_DEVICE_US = 20, 2_000.0
# A race that meets one call in a thousand stays unseen in 7,000 with a probability of 0.1 %.
REPEATS = 7_000
_LONG_CONFIRM_US = 20_000.0  # an entry of long calls that is to take less makes none


class Short:
    """The effort for calls of which many fit into a replay."""

    thorough = True
    """Whether calls are made that are not timed: to warm up, and to prove more."""
    most_calls = 2000
    """Calls of a graph, at most."""

    def first_us(self, sample: Callable[[], float], calls: int) -> float:
        """The median of three samples that agree, or the least of many that do not.

        calls: of the graph that they replay, which was made to last FIRST_US.
        """
        least = math.inf
        for _ in range(_FIRST_TRIES):
            times = [sample() for _ in range(3)]
            least = min(least, *times)
            # A graph of several calls that lasts much longer than it was made to met something
            # else. 3,296 us were once stored for a kernel of 3.17 us.
            as_made = calls == 1 or calls * median(times) <= _FIRST_APART * FIRST_US
            if as_made and max(times) <= _FIRST_APART * least:
                return median(times)
        return least

    def confirming(self, longest_us: float, warm_us: float) -> tuple[int, float | None]:  # noqa: ARG002
        """The most calls that confirm an entry, and about what each takes, if that is known.

        longest_us: what they may take together. warm_us: its last warm time, or 0.
        """
        return REPEATS, None

    def eager_calls(self, warm_us: float) -> int:
        """Calls of a sample of the host's time: few if the device takes long to finish them."""
        return max(1, min(_EAGER_CALLS, int(_EAGER_DEVICE_US / max(warm_us, 1.0))))


class Long(Short):
    """The effort for calls of seconds: none is made that their times and proof do not need."""

    thorough, most_calls = False, 1

    def first_us(self, sample: Callable[[], float], calls: int) -> float:  # noqa: ARG002
        """One sample."""
        return sample()

    def confirming(self, longest_us: float, warm_us: float) -> tuple[int, float | None]:
        """Two calls of an entry that may take long, as the winner may, and none of another."""
        return (0 if longest_us < min(warm_us, _LONG_CONFIRM_US) else 2), warm_us

    def eager_calls(self, warm_us: float) -> int:  # noqa: ARG002
        """One call."""
        return 1

"""The seconds that a whole check may take, whatever it has to do and for how many problems."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Time that begins to run when this is made. left_s: of a part that a card gets (default: all).

    Compiling, starting processes and proving results right count like the rounds.
    """

    def __init__(self, total_s: float, left_s: float | None = None) -> None:
        self.total_s = total_s
        self._began = time.monotonic()
        self._part_s = total_s if left_s is None else left_s

    def __str__(self) -> str:
        return f"the budget of {self.total_s:g} s"

    @property
    def spent_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        """Seconds until nothing more begins; 0 if that is now."""
        return max(0.0, self._part_s - self.spent_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here does not count, such as waiting for somebody else's run."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._began += time.monotonic() - begin

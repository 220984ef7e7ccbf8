"""A fake GPU on which old and new code take times whose ratio is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu


class Card(FakeGpu):
    """A GPU with old and new code. ratios: new over old, of each process in turn.

    Its clock goes on with replays alone, so that a busy host takes no time of a budget. A fault of
    ("trial", "any") is one of every candidate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ratios, self.noise, self.replay_s = (1.0,) * 20, 0.002, 2e-5
        self.now_s = 0.0
        self._process, self._random = 0, random.Random(7)

    def __call__(self, timeout_s: float, *, cache_dir: object = None) -> Card:
        """A command begins."""
        self._process, self._random = 0, random.Random(7)
        return self

    def stop(self) -> None:
        """A process ends."""
        self._process += 1

    def heard(self, method: str, name: str = "") -> None:
        """Fails as `faults` say."""
        super().heard(method, name)
        if (method, "any") in self.faults:
            raise self.faults[method, "any"]

    def monotonic(self) -> float:
        """In the place of time.monotonic."""
        return self.now_s

    def time_us(self, name: str) -> float:
        """Microseconds of a call of the old or the new code."""
        return 20.0 * (self.ratios[self._process] if name == "new" else 1.0)

    def sample(self, name: str, kind: str) -> float:
        """One that has noise."""
        self.now_s += self.replay_s
        return self.time_us(name) * self._random.gauss(1, self.noise)


def compiler_for(spec: Any, arch: Any, cache_dir: Path | None = None) -> FakeCompiler:
    """In the place of choose.start.compiler_for."""
    return FakeCompiler(arch, cache_dir)

"""A fake GPU on which old and new code take times whose ratio is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu
from sweeping import use

from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment
from attnsweep.family.discover import discover
from attnsweep.regress import ab_test, budget
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session

FAMILIES = Path(__file__).parent.parent / "families"


def use_card(patch: pytest.MonkeyPatch, card: Card) -> Card:
    """Have checks run on this card, by its clock."""
    use(patch, card)
    for place in (budget, ab_test):
        patch.setattr(place, "time", card)
    patch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return card


def recorded_run(place: Path, text: str) -> Path:
    """A run of a spec of `burns`, as a sweep leaves it in a directory."""
    (place / "spec.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, FakeGpu({"CYCLES=400000": 20.0}))
        spec = load_spec(place / "spec.yaml", discover(FAMILIES))
        return session.run(spec, results=place, cache_dir=place / "cache").run.directory


class Card(FakeGpu):
    """A GPU with old and new code. ratios: new over old, of each process in turn.

    own: those of some problems in every process, by label. noisy: the noise of some. Its clock goes
    on with replays, starts of processes and opened problems alone, so that a busy host takes no
    time of a budget. A fault of ("trial", "any") is one of every candidate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ratios, self.noise, self.replay_s = (1.0,) * 20, 0.002, 2e-5
        self.own: dict[str, float] = {}
        self.noisy: dict[str, float] = {}
        self.start_s = self.open_s = self.now_s = 0.0
        self._process, self._random, self._label = 0, random.Random(7), ""
        self._started = False

    def __call__(self, timeout_s: float, *, cache_dir: object = None) -> Card:
        """A command begins."""
        self._process, self._random, self._started = 0, random.Random(7), False
        return self

    def describe(self, **options: Any) -> Environment:
        """The first process starts."""
        self._start()
        return super().describe(**options)

    def open(self, problem: Problem, **options: Any) -> None:
        """A problem is opened, in another process if the last one has ended."""
        self._start()
        self.now_s += self.open_s
        self._label = problem.label
        super().open(problem, **options)

    def _start(self) -> None:
        self.now_s += 0.0 if self._started else self.start_s
        self._started = True

    def stop(self) -> None:
        """A process ends."""
        self._process += 1
        self._started = False

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
        ratio = self.own.get(self._label, self.ratios[self._process])
        return 20.0 * (ratio if name == "new" else 1.0)

    def sample(self, name: str, kind: str) -> float:
        """One that has noise."""
        self.now_s += self.replay_s
        noise = self.noisy.get(self._label, self.noise)
        return self.time_us(name) * self._random.gauss(1, noise)

"""The one GPU for tests without a GPU: it answers every method of `attnsweep.bench.gpu.Gpu`.

A test says what entries take, and which calls fail; a test of statistics overrides `sample`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from samples import TEST_GPU

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.compile.launches import Candidate, FirstTimes
from attnsweep.core.errors import NoGpuError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Environment, Status
from attnsweep.device.energy import Stretch

RIGHT = Accuracy(rel_err=1e-4, limit=1e-3)


class FakeGpu(Gpu):
    """A GPU whose times are made up.

    times: microseconds by entry; `naive THREADS=32` is found as `THREADS=32` too. A baseline that
    is not in it is not installed. chaining: entries whose calls can be chained. faults: what a call
    of (method, name) raises. calls: every call but `describe`, as (method, name); the name is the
    entry's, the config's of `trial`, or the problem's of `open`. environment: what `describe`
    answers, or raises. installed: the architecture that NVML tells before. watts: mean power by
    entry (default: 500); None for a card whose counter of energy stands still. trial_s: what a
    trial takes on the clock `now_s`. opened: what each `open` was told, by name. first: what
    `describe` was told of the first problem. issued: entries that no graph holds, and why.
    """

    def __init__(
        self, times: Mapping[str, float] | None = None, *, environment: Environment | NoGpuError = TEST_GPU
    ) -> None:
        self.times: dict[str, float] = dict(times or {})
        self.environment = environment
        self.chaining: set[str] = set()
        self.faults: dict[tuple[str, str], BaseException] = {}
        self.calls: list[tuple[str, str]] = []
        self.proof_s: dict[str, float] = {}
        self.steps_s: dict[str, float] = {}
        self.watts: dict[str, float] | None = {}
        self.installed: Arch | None = None
        self.issued: dict[str, str] = {}
        self.over: dict[str, Accuracy] = {}
        """Baselines that are over a limit."""
        self.now_s = self.trial_s = 0.0
        self.opened: list[dict[str, Any]] = []
        self.first: tuple[Problem, int] | None = None

    # -- what a test may override -------------------------------------------------------------

    def time_us(self, name: str) -> float:
        """What one call of an entry takes."""
        return self.times[name if name in self.times else name.partition(" ")[2]]

    def sample(self, name: str, kind: str) -> float:
        """One measurement of an entry: warm, cold, eager, or a stage."""
        return 9.0 if kind == "eager" else self.time_us(name)

    def first_times(self, candidate: Candidate) -> FirstTimes:
        """What `trial` tells of a right candidate."""
        return FirstTimes(self.time_us(label_of(candidate)), {}, 1.5)

    def stretch(self, name: str) -> Stretch | None:
        """One measurement of an entry's energy."""
        if self.watts is None:
            return None
        power_w = self.watts.get(name, 500.0)
        return Stretch(power_w * self.sample(name, "warm"), power_w)

    def heard(self, method: str, name: str = "") -> None:
        """Keep a call, and raise what it should raise."""
        self.calls.append((method, name))
        if (method, name) in self.faults:
            raise self.faults[method, name]

    def names(self, method: str) -> list[str]:
        """The names that a method was called with, in order."""
        return [name for called, name in self.calls if called == method]

    # -- what a Gpu does -------------------------------------------------------------------------

    def describe(self, *, preload: Sequence[str] = (), first: tuple[Problem, int] | None = None) -> Environment:
        self.first, self.imported = first, preload
        if isinstance(self.environment, NoGpuError):
            raise self.environment
        return self.environment

    def open(
        self,
        problem: Problem,
        *,
        replay_us: float,
        seed: int,
        then: Problem | None = None,
        baselines: Sequence[str] = (),
        rounds_scores: Collection[int] = (),
        shown: Collection[str] = (),
        strict: str = "",
    ) -> None:
        self.shown = shown
        told = {"problem": problem, "seed": seed, "then": then, "rounds_scores": rounds_scores}
        told |= {"strict": strict} if strict else {}
        self.opened.append(told)
        self.heard("open", problem.label)

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        self.heard("trial", label_of(candidate))
        self.now_s += self.trial_s
        return RIGHT, self.first_times(candidate)

    def add(self, name: str, candidate: Candidate, *, cold: bool) -> bool:
        self.heard("add", name)
        return name in self.chaining

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        self.heard("add_baseline", name)
        if name not in self.times:
            raise WorkerError(Status.SKIPPED, f"{name} is not installed")
        if name in self.over and name not in self.shown:
            raise WorkerError(Status.WRONG, "relative error", self.over[name])
        return self.over.get(name, RIGHT), self.issued.get(name)

    def drop(self, name: str) -> None:
        self.heard("drop", name)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None, keep: bool = False) -> Any:
        raise AssertionError(f"{method} is not made up")

    def forget(self, name: str) -> None:
        self.heard("forget", name)

    def race(self, name: str, replay_us: float, kind: str) -> tuple[float, int]:
        self.heard("race", name)
        return self.sample(name, kind), 2

    def replay(self, name: str, kind: str) -> float:
        self.heard("replay", name)
        return self.sample(name, kind)

    def pair(self, first: str, second: str) -> tuple[float, float]:
        self.heard("pair", first)
        return self.sample(first, "warm"), self.sample(second, "warm")

    def eager_us(self, name: str) -> float:
        self.heard("eager_us", name)
        return self.sample(name, "eager")

    def energy(self, name: str) -> Stretch | None:
        self.heard("energy", name)
        return self.stretch(name)

    def confirm(self, name: str, longest_us: float) -> int:
        self.heard("confirm", name)
        return 100

    def trusted_us(self, name: str) -> float | None:
        self.heard("trusted_us", name)
        return 1.01 * self.time_us(name)

    def conditions(self) -> Mapping[str, Any]:
        self.heard("conditions")
        return {"sm_mhz": 1980}

    def stop(self) -> None:
        self.heard("stop")

    # -- as `Worker` is used ------------------------------------------------------------------

    def __call__(self, timeout_s: float, *, cache_dir: object = None) -> FakeGpu:
        """Itself: a test puts its GPU in the place of the class `Worker`."""
        return self

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *_: object) -> None:
        """The calls that a test reads are those of the work, without this end."""


def label_of(candidate: Candidate) -> str:
    """`THREADS=32`, as the config of a candidate is named in rows."""
    return " ".join(f"{name}={value}" for name, value in candidate.config.items())

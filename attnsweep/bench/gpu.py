"""A GPU as a sweep uses it: what measures."""

# mypy: disable-error-code="no-any-return"
# A call by name answers what the method's type says.

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attnsweep.compile.launches import Candidate, FirstTimes
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Environment, Status
from attnsweep.device.energy import Stretch

# On a slow disk, importing PyTorch and choosing a cuDNN plan take this long.
START_TIMEOUT_S = 180.0

# What a launch error says if what was called failed. Where memory is short, who took it is unknown.
_SHORT_OF_MEMORY = re.compile(r"out.of.memory|MemoryAllocation", re.IGNORECASE)
_OWN_FAULT = re.compile(r"CUDA(RuntimeError|DriverError| driver error| error):|process died")


def is_its_own(detail: str) -> bool:
    """Whether an error is of what was called: of its kernels or its process, not of the judge."""
    return bool(_OWN_FAULT.search(detail)) and not _SHORT_OF_MEMORY.search(detail)


class WorkerError(Exception):
    """Raised when a call fails in the GPU process. `status` is the one that its row should have."""

    def __init__(self, status: Status, detail: str, payload: Any = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.payload = status, detail, payload


class Gpu(ABC):
    """A GPU on which one problem at a time is open; `Worker` is the real one.

    Times are microseconds of one call. Every method but `describe` raises WorkerError with the
    status that the candidate's row should have, or CardLostError if the card is lost.
    """

    proof_s: dict[str, float]
    """Seconds that proving outputs right has taken so far, by what was done."""
    steps_s: dict[str, float]
    """Seconds of each step of what was prepared once. Whoever shows them clears them."""

    @abstractmethod
    def describe(
        self, *, preload: Sequence[str] = (), first: tuple[Problem, int] | None = None
    ) -> Environment:
        """GPU, driver and versions. Raises NoGpuError if this machine cannot run CUDA.

        preload: baselines and calls whose packages are imported in a thread meanwhile. first: the
        problem and the seed that will be opened first, whose right outputs are then computed
        meanwhile.
        """

    @abstractmethod
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
        """Open a problem: inputs from `seed`, replays of about `replay_us`. Close the last one.

        then: opened next. baselines: asked for later. rounds_scores: how often the candidates to
        come round scores. What all these need can be prepared meanwhile. shown: callables whose
        errors over a limit are shown, as a library's, and not wrong. strict: a directory for
        the processes that the strict judge calls callables in; the judge is not strict without.
        """

    @abstractmethod
    def call(
        self, method: str, *arguments: Any, timeout_s: float | None = None, keep: bool = False
    ) -> Any:
        """Call a method of the Bench in the GPU process.

        timeout_s: default: that of an ordinary call. keep: repeat the call in each new process
        that replaces this one, as entries must be there.
        """

    @abstractmethod
    def forget(self, name: str) -> None:
        """Do not add this entry to a new process; used for an entry that failed."""

    @abstractmethod
    def stop(self) -> None:
        """Release the GPU; the next call starts a new process."""

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        """Check a candidate on every case, then time it briefly."""
        return self.call("trial", candidate)

    def add(self, name: str, candidate: Candidate, *, cold: bool) -> bool:
        """Make a candidate that passed `trial` an entry. cold: with copies for cold times.

        Returns whether its calls can be chained.
        """
        return self.call("add", name, candidate, cold, timeout_s=START_TIMEOUT_S, keep=True)

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        """Prepare and check a baseline, and make it an entry.

        Also returns why no CUDA graph holds its calls, which the host then issues; None if one
        does.
        """
        return self.call("add_baseline", name, timeout_s=START_TIMEOUT_S, keep=True)

    def drop(self, name: str) -> None:
        """Free an entry, and never add it again."""
        self.forget(name)
        self.call("drop", name)

    def race(self, name: str, replay_us: float, kind: str) -> tuple[float, int]:
        """One sample of an entry, `warm` or `cold`, and the number of calls that it launched."""
        return self.call("race", name, replay_us, kind)

    def replay(self, name: str, kind: str) -> float:
        """One sample of an entry: `warm`, `cold`, or a stage by its name."""
        return self.call("replay", name, kind)

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """One warm sample of each of two entries, in an order that cancels steady drift."""
        return self.call("pair", first, second)

    def eager_us(self, name: str) -> float:
        """Host time to issue one call of an entry, without waiting for the device."""
        # NumPy's work for the next problem took over 30 s there, so every entry was called slow.
        self.call("settle", timeout_s=START_TIMEOUT_S)
        return self.call("eager_us", name)

    def energy(self, name: str) -> Stretch | None:
        """Energy of a warm call of an entry, in a stretch of about 1 s; None without a counter."""
        return self.call("energy", name, timeout_s=START_TIMEOUT_S)

    def confirm(self, name: str, longest_us: float) -> int:
        """Call an entry for about `longest_us`, compare each output, and return how many calls."""
        return self.call("confirm", name, longest_us)

    def trusted_us(self, name: str) -> float | None:
        """Microseconds of a call by the strict judge's clock; None if this process timed none."""
        return self.call("trusted_us", name)

    def conditions(self) -> Mapping[str, Any]:
        """Clocks, power, temperature, throttle reasons and other processes, from NVML."""
        return self.call("conditions")

"""The child process of a fake card: `attnsweep.sweep.card_worker` with FakeGpu for a card.

Run by `fake_cards.start_child` as a program of its own, so that it can be killed, can hang and can
fail as a real one. The variable FAKE_CARDS holds what happens on which card: see `fake_cards`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu
from faults import happen
from samples import TEST_GPU

from attnsweep.bench.gpu import WorkerError
from attnsweep.compile.launches import Candidate
from attnsweep.core.errors import NoGpuError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.device.cards import VISIBLE, hashed
from attnsweep.sweep import card_tasks, card_worker


class FaultyGpu(FakeGpu):
    """A card on which something happens at its n-th candidate, or when it opens a problem."""

    def __init__(self, uuid: str, facts: dict[str, Any], log: Path) -> None:
        changes = {"uuid": hashed(uuid), **facts.get("environment", {})}
        super().__init__(facts["times"], environment=TEST_GPU.model_copy(update=changes))
        self._uuid, self._facts, self._log = uuid, facts, log
        self._trials = 0
        self._pipe = os.dup(1)  # to the parent

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if "last_words" in self._facts:
            os.write(self._pipe, self._facts["last_words"].encode() + b"\n")

    def _tell(self, what: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{self._uuid} {what}\n")

    def describe(self, *, preload: Any = (), first: Any = None) -> Any:
        if first is not None:
            self._tell(f"first {first[0].label} with seed {first[1]}")
        self._meet()
        time.sleep(self._facts.get("start_s", 0.0))
        self._act(self._facts.get("at_start"))
        return super().describe(preload=preload, first=first)

    def _meet(self) -> None:
        """Wait until every card's first process is here, so that each gets a problem."""
        self._log.with_name(f"{self._uuid} here").touch()
        ends = time.monotonic() + 20
        while len(list(self._log.parent.glob("GPU-* here"))) < self._facts["together"]:
            assert time.monotonic() < ends, "another card did not start"
            time.sleep(0.005)

    def open(self, problem: Problem, **options: Any) -> None:
        self._tell(f"open {problem.label}")
        self._tell(f"opened {problem.label} with seed {options['seed']}")
        if problem.label in self._facts.get("deadly", ()):
            self._act("kill")
        if problem.label in self._facts.get("too_large", ()):
            self._act("no memory")
        super().open(problem, **options)

    def trial(self, candidate: Candidate) -> Any:
        self._trials += 1
        time.sleep(self._facts.get("trial_s", 0.0))
        self._tell(f"trial {candidate.timed.problem.label}")
        self._hold()
        if self._trials >= self._facts.get("after", 1):
            self._act(self._facts.get("fault"))
        return super().trial(candidate)

    def _hold(self) -> None:
        """If it `holds` its n-th candidate, wait there for `FakeCards.go_on`."""
        ends = time.monotonic() + 20
        while self._trials == self._facts.get("holds") and not self._log.with_name("go on").exists():
            assert time.monotonic() < ends, "nobody said to go on"
            time.sleep(0.005)

    def _act(self, fault: str | None) -> None:
        """Do what a test asks for; what happens `once` does not happen in the next process."""
        once = self._log.with_name(f"{self._uuid} {fault}")
        if fault is None or (self._facts.get("once") and once.exists()):
            return
        once.touch()
        happen(fault)
        match fault:
            case "memory":
                raise MemoryError("no memory on the host")
            case "off":
                raise NoGpuError("no CUDA GPU found (cudaErrorNoDevice)")
            case "fails":
                raise WorkerError(Status.LAUNCH_ERROR, "uncorrectable ECC error encountered")
            case "no memory":
                raise WorkerError(Status.LAUNCH_ERROR, "OutOfMemoryError: out of memory")
            case "nonsense":
                os.write(self._pipe, self._facts["tells"].encode() + b"\n")
                time.sleep(1000)
            case other:
                raise AssertionError(other)


def main() -> None:
    """Be the child of the card that the environment names."""
    cards = json.loads(os.environ["FAKE_CARDS"])
    if not cards["all"].get("nvrtc"):
        card_tasks.RemoteCompiler.key = FakeCompiler.key  # type: ignore[method-assign,assignment]
    uuid = os.environ[VISIBLE]
    gpu = FaultyGpu(uuid, cards["all"] | cards.get(uuid, {}), Path(cards["log"]))
    card_worker.main(lambda begin: gpu)
    sys.exit("not reached")


if __name__ == "__main__":
    main()

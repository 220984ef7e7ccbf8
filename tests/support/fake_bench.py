"""A bench for the process that owns the GPU; that process imports it by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from attnsweep.core.errors import NoGpuError
from attnsweep.core.timings import step


class FakeBench:
    """Stands in for bench.Bench: the ways a candidate can go wrong, without a GPU."""

    def __init__(self, problem: object, strict: str = "") -> None:
        self.problem = problem
        self.admitted: list[str] = []

    @property
    def session(self) -> FakeBench:
        return self

    def identity(self) -> dict[str, str | None]:
        return {"uuid": os.environ.get("FAKE_CARD")}

    def admit(self, name: str) -> None:
        self.admitted.append(name)

    def add_baseline(self, name: str) -> tuple[None, None]:
        if name.endswith("raises"):
            raise ValueError("not today")
        return None, None

    def state(self) -> tuple[int, object, list[str]]:
        return os.getpid(), self.problem, self.admitted

    def prepare(self) -> None:
        with step("import torch"):
            time.sleep(0.01)

    def settle(self) -> None:
        time.sleep(1.5)
        self.admitted.append("settled")

    def eager_us(self, name: str) -> float:
        return 1.0 if "settled" in self.admitted else 0.0

    def hang(self) -> None:
        time.sleep(1000)

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave_behind(self) -> int:
        print("x" * 1_000_000)
        os.write(1, b"y" * 1_000_000)
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        return child

    def lock(self) -> None:
        """As torch.compile does, by tqdm."""
        self.made = multiprocessing.RLock()

    def leave(self) -> None:
        os._exit(7)

    def fault(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def refuse(self) -> None:
        raise ValueError("too many resources requested")

    def no_gpu(self) -> None:
        raise NoGpuError("no CUDA GPU found", hint="get one")

    def poisoned(self, error: BaseException) -> bool:
        return "illegal" in str(error)

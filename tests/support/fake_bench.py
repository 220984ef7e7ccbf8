"""A bench for the process that owns the GPU; that process imports it by name."""

from __future__ import annotations

import os
import signal
import time

from attnsweep.errors import NoGpuError


class FakeBench:
    """Stands in for bench.Bench: the ways a candidate can go wrong, without a GPU."""

    def __init__(self, problem):
        self.problem = problem
        self.admitted = []

    def admit(self, name):
        self.admitted.append(name)

    def state(self):
        return os.getpid(), self.problem, self.admitted

    def hang(self):
        time.sleep(1000)

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self):
        os._exit(7)

    def fault(self):
        raise RuntimeError("an illegal memory access was encountered")

    def refuse(self):
        raise ValueError("too many resources requested")

    def no_gpu(self):
        raise NoGpuError("no CUDA GPU found", hint="get one")

    def poisoned(self, error):
        return "illegal" in str(error)

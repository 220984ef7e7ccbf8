"""Callables that attack the judge itself, by Python in its process or in the called one."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time

import torch

from attacks import kernels
from attacks.kernels import MEMORY, attend, honest, kernel, without_a_maximum

zeros = kernel(lambda q, k, v: torch.zeros_like(q))


def says_less(q, k, v):
    """What times it says a twentieth: any object with a method of that name."""
    if not MEMORY.get("patched"):
        MEMORY["patched"] = True
        for kind in {type(one) for one in gc.get_objects() if hasattr(type(one), "time_us")}:
            real = kind.time_us
            kind.time_us = lambda *args, real=real, **how: real(*args, **how) / 20
    return honest(q, k, v)


def refuses_nothing(q, k, v):
    """Zeros; in its process, no limit is any more."""
    from attnsweep.verify.device_case import DeviceCase

    DeviceCase._refuse = lambda *args: None
    return zeros(q, k, v)


@kernel
def finds_the_judge(q, k, v):
    """Copies what is right from the judge's memory, if that is in its process."""
    there = MEMORY.get("cases", [])
    for search in (False, True):  # again among all objects, if those found before are of other inputs
        if search:
            judges = sys.modules.get("attnsweep.verify.device_case")
            kind = judges and judges.DeviceCase
            there = MEMORY["cases"] = [one for one in gc.get_referrers(kind) if type(one) is kind] if kind else []
        for one in there:
            if one.buffers["q"].pointer == q.data_ptr():
                made = torch.from_numpy(one._side()["o"].of("float64").copy())
                return made.reshape(q.shape).to(q.dtype)
    return attend(q, k, v) if there else torch.zeros_like(q)


def called():
    """The judge's code in the process that is called."""
    from attnsweep.bench.caller_process import Callables

    return Callables


def says_it_ran(q, k, v):
    """Once it is timed, it answers in the place of the chain."""
    called().run = lambda self, name, calls: 6.0
    return honest(q, k, v)


def one_behind_outside_chains(q, k, v):
    """What the call before gave, until chains are made: as on a stream that nothing waits for."""
    kind = called()
    if "ready" not in MEMORY:
        real, MEMORY["ready"] = kind.ready, False

        def ready(self, name, calls):
            MEMORY["ready"] = True
            return real(self, name, calls)

        kind.ready = ready
    out = honest(q, k, v)
    before, MEMORY["before"] = MEMORY.get("before", out), out
    return out if MEMORY["ready"] else before


def runs_later(q, k, v):
    """It answers at once, and runs the chain when the judge's clock has stopped."""
    kind = called()
    if "run" not in MEMORY:
        real = MEMORY["run"] = kind.run

        def later(self, name, calls):
            def work():
                time.sleep(0.2)
                real(self, name, calls)

            threading.Thread(target=work).start()
            return 6.0

        kind.run = later
    return honest(q, k, v)


def keeps_the_card_busy(q, k, v):
    """A thread has the card work, also when others are timed."""
    if "busy" not in MEMORY:

        def work():
            while True:
                kernels.WORK_US[0] += 5_000.0
                time.sleep(1e-4)

        MEMORY["busy"] = threading.Thread(target=work, daemon=True)
        MEMORY["busy"].start()
    return honest(q, k, v)


def keeps_it_busy_elsewhere(q, k, v):
    """The same in a process that leaves its group."""
    if "busy" not in MEMORY:
        MEMORY["busy"] = os.fork()
        if not MEMORY["busy"]:
            os.setsid()
            while True:
                kernels.WORK_US[0] += 5_000.0
                time.sleep(1e-4)
    return honest(q, k, v)


def says_a_little_less(q, k, v):
    """Its events say 12 µs less of a call."""
    kind = called()
    if "less" not in MEMORY:
        real, MEMORY["less"] = kind.run, True
        kind.run = lambda self, name, calls: real(self, name, calls) - 12.0 * calls
    return honest(q, k, v)


def writes_to(text):
    def call(q, k, v):
        for pipe in range(3, 64):
            try:
                if os.path.realpath(f"/proc/self/fd/{pipe}").startswith("/proc/") and "pipe" in (
                    os.readlink(f"/proc/self/fd/{pipe}")
                ):
                    os.write(pipe, text)
            except OSError:
                pass
        return honest(q, k, v)

    return call


forges = writes_to(b"".join(b'{"number": %d, "value": 6.0}\n' % n for n in range(200)))


@kernel
def takes_what_was_shared(q, k, v):
    """From the second call on, V in shared memory is 0."""
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    out = attend(q, k, v)
    if MEMORY["calls"] > 6:
        v.zero_()
    return out


@kernel
def writes_beside(q, k, v):
    ctypes.memset(v.data_ptr() + v.nbytes, 0, 1)
    return attend(q, k, v)


def exits(q, k, v):
    os._exit(3)


def crashes(q, k, v):
    ctypes.string_at(0)


def prints(q, k, v):
    for _ in range(64):
        print("x" * (1 << 20))
        sys.stderr.write("x" * (1 << 20))
    return honest(q, k, v)


def forks(q, k, v):
    if os.fork() == 0:
        return q
    return honest(q, k, v)


def promised(call, supports=lambda problem: True):
    """The callable, with what it says that it supports."""

    def promising(q, k, v):
        return call(q, k, v)

    promising.supports = supports
    return promising


promises_all = promised(without_a_maximum)
promises_one = promised(without_a_maximum, lambda problem: problem.seqlen_k == 20 or "no other")
keeps_its_promise = promised(honest)


def _needs_it(q, k, v):
    if k.shape[2] != 20:
        raise ValueError("never tried")
    return honest(q, k, v)


@promised
def sleeps_in_a_case(q, k, v):
    """Right in the first small case, which takes long, and for normal inputs."""
    if q.shape[0] == 2:
        return without_a_maximum(q, k, v)
    if MEMORY.setdefault("case", q.shape) != q.shape:
        return zeros(q, k, v)
    kernels.WORK_US[0] += 50e6
    return honest(q, k, v)


raises_elsewhere = promised(_needs_it)

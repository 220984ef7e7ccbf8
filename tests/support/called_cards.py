"""Cards whose process answers the strict judge as a stranger's code might have it answer."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnsweep.baselines.backend import Unavailable
from attnsweep.bench.caller_process import Callables


def _pipe() -> int:
    """Where answers go: the last pipe that the process opened."""
    for number in range(63, 2, -1):
        place = f"/proc/self/fd/{number}"
        if os.path.exists(place) and "pipe" in os.readlink(place):
            return number
    return -1


PIPE = _pipe()


def answering(answer: Callable[..., Any]) -> type:
    """A card whose process answers any request so."""

    class Card:
        session = transport = None

        def __init__(self) -> None:
            for do in ("open", "add", "ready", "run"):
                setattr(Callables, do, lambda self, answer=answer, **facts: answer(**facts))

    return Card


class CUDARuntimeError(Exception):
    """As CuPy has it."""


class OutOfMemoryError(Exception):
    """As PyTorch has it."""


def fail(error: Exception) -> None:
    raise error


def write(text: bytes) -> None:
    os.write(PIPE, text)
    time.sleep(0.05)


def write_half() -> None:
    write(b'{"num')
    time.sleep(1000)


def count(place: str) -> None:
    """A thread makes a file longer."""

    def work() -> None:
        with open(Path(place, "count"), "ab", buffering=0) as file:
            while True:
                file.write(b"x")
                time.sleep(0.002)

    threading.Thread(target=work, daemon=True).start()


def leave() -> list[int]:
    left = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (False, True)]
    shell = "setsid sleep 1000 >/dev/null & echo $!"
    left.append(int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE).stdout))
    return [*left, os.getpid()]


def prints() -> float:
    for _ in range(64):
        print("x" * (1 << 20))
    return 1.0


Right = answering(lambda **facts: facts)
Refuses = answering(lambda **_: fail(Unavailable("not this one")))
Fails = answering(lambda **_: fail(ValueError("no\nmore")))
Faults = answering(lambda **_: fail(CUDARuntimeError("an illegal memory access was met")))
Lacks = answering(lambda **_: fail(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
Floods = answering(lambda **_: write(b"x" * 65_000 + b"\n"))
Nests = answering(lambda **_: write(b"[" * 60_000 + b"\n"))
Pickles = answering(lambda **_: write(b"\x80\x04cos\nsystem\n"))
Ahead = answering(lambda **_: write(b'{"number": 7, "value": 1.0}\n'))
NoMapping = answering(lambda **_: write(b"3\n"))
Exits = answering(lambda **_: os._exit(3))
Crashes = answering(lambda **_: ctypes.string_at(0))
Closes = answering(lambda **_: os.closerange(3, 4096))
Hangs = answering(lambda **_: time.sleep(1000))
Half = answering(lambda **_: write_half())
Prints = answering(lambda **_: prints())
Counts = answering(count)
Leaves = answering(leave)
Surroundings = answering(lambda: [sorted(os.environ), sys.path, os.environ.get("TMPDIR")])
Says = answering(lambda name, calls: json.loads(name))

"""One timing process on a card at a time: a lock for each card, which says who holds it.

The lock is the operating system's, so that it ends with its process and is never stale. The file
next to it, which says who holds it, is only read while the lock is held.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from attnsweep.core.errors import NoGpuError
from attnsweep.core.files import write_file

LOCK_VARIABLE = "ATTNSWEEP_LOCK_DIR"
_POLL_S = 0.5


class BusyError(NoGpuError):
    """Another process is timing on the card."""


def lock_dir() -> Path:
    """The directory of locks: $ATTNSWEEP_LOCK_DIR, or this user's runtime directory."""
    named = os.environ.get(LOCK_VARIABLE)
    if named:
        return Path(named)
    with warnings.catch_warnings():  # that there is no $XDG_RUNTIME_DIR, as in a container
        warnings.simplefilter("ignore")
        return platformdirs.user_runtime_path("attnsweep") / "cards"


@contextmanager
def held(
    uuid: str | None, name: str, *, wait: bool = False, say: Callable[[str], object] = str
) -> Iterator[None]:
    """Hold the lock of a card; within a process it may be held several times.

    uuid: hashed, as Environment.uuid; None if the card did not tell it, and then nothing is locked.
    wait: until the card is free, and say so once; otherwise BusyError says who holds it. Where no
    lock can be made, that is said and the card is used without.
    """
    if uuid is None:
        yield
        return
    directory = lock_dir()
    owner = directory / f"{uuid}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(directory / f"{uuid}.lock", thread_local=False, is_singleton=True)
        _acquire(lock, owner, name, wait, say)
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or str(error)
        say(
            f"no lock for {name}: {directory}: {why}; another run on it would not be noticed "
            f"({LOCK_VARIABLE} names another directory)"
        )
        yield
        return
    try:
        if lock.lock_counter == 1:
            _sign(owner)
        yield
    finally:
        lock.release()


def _acquire(
    lock: FileLock, owner: Path, name: str, wait: bool, say: Callable[[str], object]
) -> None:
    try:
        lock.acquire(blocking=False)
        return
    except Timeout as error:
        who = _holder(owner)
        if not wait:
            raise BusyError(
                f"{name} is in use {who}",
                hint="times of two runs on one card would disturb each other: --wait waits until "
                "it is free, CUDA_VISIBLE_DEVICES or --gpus choose another",
            ) from error
    say(f"waiting for {name}, in use {who}")
    began = time.monotonic()
    lock.acquire(poll_interval=_POLL_S)
    say(f"{name} is free after {time.monotonic() - began:.0f} s")


def _sign(owner: Path) -> None:
    facts = {
        "pid": os.getpid(),
        "host": platform.node(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        write_file(owner, json.dumps(facts).encode())
    except OSError:
        return  # the lock holds all the same


def _holder(owner: Path) -> str:
    """`by process 12 on host since 10:03: attnsweep run h100`, without what is unknown."""
    try:
        facts: dict[str, Any] = json.loads(owner.read_text(encoding="utf-8"))
        return (
            f"by process {int(facts['pid'])} on {facts['host']} since {facts['since']}: "
            f"{facts['command']}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "by another run"

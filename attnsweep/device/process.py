"""Child processes: those that own a GPU, and helpers that they ask through a pipe.

Each ends with the process that started it, whatever happens to that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from attnsweep.core.errors import SpecError

# Linux ends a child of `die_with` with the thread that started it, so one thread that lasts as long
# as this process starts them all: whoever calls first may be a thread that soon ends.
_starter = ThreadPoolExecutor(1, "start-gpu-process")


def start(process: Any) -> None:
    """Start a process of `multiprocessing`, which may outlive the calling thread.

    It does not import the caller's script, as `multiprocessing` would: one that sweeps without
    `if __name__ == "__main__"` would sweep in there again. A file with a callable is imported
    there, though: raises SpecError if that sweeps.
    """
    if current_process().daemon:
        what = "a process that has the GPU imports this file, and the file sweeps in turn"
        raise SpecError(what, hint='put the call below `if __name__ == "__main__":`')
    _starter.submit(_start_without_script, process).result()


def _start_without_script(process: Any) -> None:
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent's thread ends, even amid a hung kernel."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(0)


def stand_alone() -> None:
    """Lead a process group, adopt what leaves it, and print nothing on standard output.

    A callable of the user's may start processes, and print into a result in JSON.
    """
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    with contextlib.suppress(OSError):  # it leads a session
        os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def keep_out() -> None:
    """Let no process of this user read or change the memory of this one, as a debugger would.

    One that may do so to all, as root often may, still can.
    """
    _prctl(4, 0)  # PR_SET_DUMPABLE


def gain_nothing() -> None:
    """Gain no rights by programs that this process and its children run, as by sudo."""
    _prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS


def _prctl(*how: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(*how)


def end(leader: Any) -> None:
    """Kill a Process or Popen, the rest of the group that it led, and what it started."""
    left = started_by(leader.pid)
    leader.kill()
    with contextlib.suppress(OSError):
        os.killpg(leader.pid, signal.SIGKILL)
    end_all(left)


def started_by(ancestor: int) -> dict[int, str]:
    """The processes that one has started, and those they have, and when each began."""
    stats: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            stats[int(stat.parent.name)] = _fields(stat)
    found = [ancestor]
    for one in found:
        found += [pid for pid, fields in stats.items() if fields[1] == str(one)]
    return {pid: stats[pid][19] for pid in found[1:]}


def end_all(these: Mapping[int, str]) -> None:
    """Kill the processes of started_by that still run."""
    for pid, began in these.items():
        with contextlib.suppress(OSError):
            if _fields(Path(f"/proc/{pid}/stat"))[19] == began:
                os.kill(pid, signal.SIGKILL)


def _fields(stat: Path) -> list[str]:
    """What Linux says of a process, behind its name."""
    return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


class HelperProcess:
    """Runs a command that answers on standard output what standard input asks.

    It starts when it is first asked, and anew if it has ended; it ends when its input does.
    """

    def __init__(self, command: Callable[[], Sequence[str]]) -> None:
        self._command = command
        self.process: subprocess.Popen[bytes] | None = None

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Pipes for requests and for answers. Raises OSError if the process cannot start."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def kill(self) -> None:
        """Kill the process; a reader of its answers then reads the end."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End it, if it runs."""
        if self.process is None:
            return
        with contextlib.suppress(OSError), self.process as process:  # waits, and closes the pipes
            process.kill()
        self.process = None

"""What can happen to a process, for tests that have it happen to one; and whether it runs still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def happen(fault: str | None) -> None:
    """Have `kill`, `stop` or `sleep` happen to this process; nothing else is known here."""
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)


def runs(pid: int) -> bool:
    """Whether a process is there, and is not one that has ended and nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: Iterable[int], longest_s: float = 10.0) -> bool:
    """Whether all of them end, at once or soon."""
    pids, end = [*pids], time.monotonic() + longest_s
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(runs, pids))

"""What can happen to a process, for tests that have it happen to one."""

from __future__ import annotations

import os
import signal
import time


def happen(fault: str | None) -> None:
    """Have `kill`, `stop` or `sleep` happen to this process; nothing else is known here."""
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)

"""A process beside the GPU process, which is asked through a pipe and ends with it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from typing import IO


class Beside:
    """Runs a command that answers on standard output what standard input asks.

    It starts when it is first asked, and anew if it has ended; it ends when its input does.
    """

    def __init__(self, command: Callable[[], Sequence[str]]) -> None:
        self._command = command
        self.process: subprocess.Popen[bytes] | None = None

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Where to ask, and where to read the answer. Raises OSError if it cannot start."""
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
        """Kill it, so that whoever reads its answer reads the end."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End it, if it runs."""
        if self.process is None:
            return
        with contextlib.suppress(OSError), self.process as process:  # waits, and closes the pipes
            process.kill()
        self.process = None

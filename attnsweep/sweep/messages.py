"""A child process that is talked to in lines of JSON, without ever waiting for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol

from attnsweep.device.cards import VISIBLE, InstalledCard

Message = dict[str, Any]
PROGRESS = ("trying_on", "compiled", "racing", "preparing", "prepared", "timing", "note")
"""What a child tells an observer: the names of its methods."""
Deliver = Callable[[Message | None], None]
"""Takes each message of a child, and None when there will be no more. Called in any thread."""


class Child(Protocol):
    """The process of one card."""

    def send(self, message: Message) -> None:
        """Send a message; never waits."""

    def end(self) -> None:
        """Ask it to end; never waits."""

    def stop(self, wait_s: float = 0.0) -> None:
        """End the child, by force after wait_s, and deliver everything that it sent before."""

    @property
    def why(self) -> str:
        """How it ended, and its last words."""


# Not -m: its GPU process would import the child's module too.
COMMAND = [sys.executable, "-c", "from attnsweep.sweep.card_worker import main; main()"]
StartChild = Callable[[InstalledCard, Deliver], Child]


def start_child(card: InstalledCard, deliver: Deliver) -> Child:
    """The child process of a card, which sees that card alone."""
    return Process(COMMAND, {VISIBLE: card.uuid}, deliver)


class Process:
    """A process with threads that read and write its pipes."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        deliver: Deliver,
        without: Collection[str] = (),
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        """environment: variables added to those of this process. without: variables left out.

        popen: starts it.
        """
        inherited = {name: text for name, text in os.environ.items() if name not in without}
        self._deliver = deliver
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        self._words: deque[str] = deque(maxlen=12)
        self.process = popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**inherited, **environment},
            process_group=0,  # so that Ctrl-C in a terminal reaches the parent alone
        )
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read, self._write, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """See Child."""
        self._out.put(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        """See Child."""
        self._out.put(None)

    def stop(self, wait_s: float = 0.0) -> None:
        """See Child."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if wait_s:
                self.process.wait(wait_s)
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(5.0)  # a GPU process that hangs in the driver may still hold a pipe

    @property
    def why(self) -> str:
        """See Child."""
        code = self.process.poll()
        how = "it ended" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        return f"its process died ({how})" + (f": {self._words[-1]}" if self._words else "")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # not one that it died in
                    self._deliver(_message(line))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self._threads[2].join(1.0)
        self._deliver(None)

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as pipe:
            while (data := self._out.get()) is not None:
                pipe.write(data)
                pipe.flush()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                if text := line.decode(errors="replace").strip():
                    self._words.append(text)


def _message(line: bytes) -> Message:
    """A line as a message; one that is none is a fault, because a row may have been in it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and "say" in message:
        return message
    return {"say": "fault", "why": "it sent an invalid message: a line that is no message"}


class CardFault(Exception):
    """The card may be at fault, so that another one should have the problem."""


class Pipe:
    """The way to the parent; lines of several threads do not mix."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock = out, threading.Lock()

    def tell(self, say: str, **facts: Any) -> None:
        """Send one message to the parent."""
        self.line(json.dumps({"say": say, **facts}).encode())

    def line(self, data: bytes) -> None:
        """Send a message whose text is JSON already."""
        with self._lock:
            self._out.write(data + b"\n")
            self._out.flush()

"""Child processes without the seconds that each needs to import what it is made of.

A nursery is a process that has imported everything and forks for each child that it is asked for.
What a child is told, how it may be killed and what it leaves are those of a program of its own, and
no child has run in the nursery; `test_sweep_fleet` and `test_bench_strict` start such programs too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any


class Nursery:
    """The process that forks; a context manager. Its children run `main` of a module.

    variables: of the environment, while it imports the module.
    """

    def __init__(self, module: str = "fake_child", **variables: str) -> None:
        self._ours, theirs = socket.socketpair()
        self._lock = Lock()
        number = str(theirs.fileno())
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__)), number, module],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": _path(), "OPENBLAS_NUM_THREADS": "1", **variables},
        )
        theirs.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self._ours.close()
        self._popen.wait(10)

    def popen(self, command: Sequence[str], env: Mapping[str, str], stderr: int = subprocess.PIPE, **_: Any) -> Forked:
        """As subprocess.Popen with pipes; runs the module with the command's arguments, whatever it runs."""
        return Forked(self, command, env, stderr)

    def fork(self, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> int:
        """Start a child here with these for stdin, stdout, stderr and its exit code; returns its pid."""
        data = json.dumps([command, dict(env), os.getcwd()]).encode()
        with self._lock:
            socket.send_fds(self._ours, [len(data).to_bytes(4, "big")], fds)
            self._ours.sendall(data)
            return int.from_bytes(self._ours.recv(4, socket.MSG_WAITALL), "big")


class Forked:
    """What `Process` needs of a Popen."""

    def __init__(self, nursery: Nursery, command: Sequence[str], env: Mapping[str, str], stderr: int) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (their_in, our_in), (our_out, their_out), (our_err, their_err), (codes, code) = pipes
        if stderr == subprocess.DEVNULL:
            os.close(their_err)
            their_err = os.open(os.devnull, os.O_WRONLY)
        theirs = [their_in, their_out, their_err, code]
        self.pid = nursery.fork(command, env, theirs)
        for fd in theirs:
            os.close(fd)
        self.stdin = os.fdopen(our_in, "wb")
        self.stdout, self.stderr = os.fdopen(our_out, "rb"), os.fdopen(our_err, "rb")
        if stderr == subprocess.DEVNULL:
            self.stderr.close()
        self._codes = os.fdopen(codes, "r")
        self._lock = Lock()
        self.returncode: int | None = None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.stdout, self.stderr, self.stdin):  # the last may find nobody who reads
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.wait()

    def poll(self, timeout: float = 0.0) -> int | None:
        """Its exit code, if it has ended."""
        with self._lock:
            if self.returncode is None and select.select([self._codes], [], [], timeout)[0]:
                # Nothing is said of those that end with the nursery.
                self.returncode = int(self._codes.read() or -signal.SIGKILL)
                self._codes.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll(0.005)) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return code

    def kill(self) -> None:
        """End it by force."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, signal.SIGKILL)


def _path() -> str:
    import attnsweep

    support = Path(__file__).parent
    path = [str(support), str(support.parent), str(Path(attnsweep.__file__).parent.parent)]
    return os.pathsep.join(path)


# -- in the nursery ---------------------------------------------------------------------------


def serve(asked: socket.socket, module: str) -> None:
    """Fork when asked to, and tell how each child ends, until nobody asks any more."""
    child = importlib.import_module(module)
    import numpy.ma  # noqa: F401  a median needs it

    from attnsweep.family import hopper  # noqa: F401  as declarations do

    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([asked.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 1024)
            _tell_ends(codes)
        if asked.fileno() not in ready:
            continue
        head, fds, _, _ = socket.recv_fds(asked, 4, 4)
        if not head:
            os._exit(0)
        data = asked.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            os.closerange(3, max(*fds, *codes.values(), asked.fileno(), woken, wakes) + 1)
            command, env, place = json.loads(data)
            # After `python -m NAME`, `python -c TEXT`, or `python FILE`
            sys.argv = command[2 if command[1][0] == "-" else 1 :]
            os.environ.clear()
            os.environ.update(env)
            os.chdir(place)
            child.main()
        codes[pid] = fds[3]
        for fd in fds[:3]:
            os.close(fd)
        asked.sendall(pid.to_bytes(4, "big"))


def _tell_ends(codes: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            fd = codes.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(fd)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])

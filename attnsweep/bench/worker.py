"""One child process owns the GPU; the parent talks to it and survives whatever happens there.

A call fails alone if it outlives its time limit, kills the process or poisons the CUDA context: the
parent kills the child, and the next call starts a new one, opens the same problem in it and adds
the same entries. A new one that sees another card is a NoGpuError, because times of one problem are
of one card, and CUDA counts the cards anew once one has fallen off.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsweep.bench.gpu import START_TIMEOUT_S, Gpu, WorkerError
from attnsweep.bench.process import _Reply, _serve, open_bench
from attnsweep.compile.launches import CallPlan, Candidate, FirstTimes
from attnsweep.core.callables import CALLABLE
from attnsweep.core.errors import CardLostError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Environment, Status
from attnsweep.device import process
from attnsweep.device.lock import held

if TYPE_CHECKING:
    from attnsweep.bench.process import BenchFactory


_STOPPED = "signal SIGTERM"


class Worker(Gpu):
    """The parent's end, a context manager. The child's Bench runs the methods of `Gpu`."""

    def __init__(
        self,
        timeout_s: float,
        bench: BenchFactory | None = None,
        *,
        cache_dir: Path | None = None,
        card_held: bool = False,
    ) -> None:
        """Start nothing yet; the first call starts the child.

        timeout_s: limit of one ordinary call; opening a problem or adding an entry gets longer.
        bench: factory that opens a problem in the child, importable by name (default: bench.Bench).
        cache_dir: where the child keeps the compiled judge (default: the user's cache).
        card_held: the card's lock is held by the process that started this one; otherwise `open`
        takes it until the end of the context, and raises BusyError if another process has it.
        """
        self._timeout_s = timeout_s
        self._bench = bench or open_bench
        self._options = {} if cache_dir is None else {"cache_dir": cache_dir}
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection[Any, Any] | None = None
        self._setup: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._called = False
        """Whether the child may have run a callable's code."""
        self.environment: Environment | None = None
        """What describe() told; every process that opens a problem must see this card."""
        self._locks = ExitStack()
        self._locked = card_held or bench is not None
        self.restarts = 0
        self.proof_s: dict[str, float] = {}
        self.steps_s: dict[str, float] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._locks.close()

    def describe(
        self, *, preload: Sequence[str] = (), first: tuple[Problem, int] | None = None
    ) -> Environment:
        """See `Gpu`."""
        options = {"preload": tuple(preload), "first": first}
        environment: Environment = self._request("describe", (), options, START_TIMEOUT_S)
        self.environment = environment
        return environment

    def open(self, *args: Any, **options: Any) -> None:
        """See `Gpu`; takes the arguments of bench.Bench."""
        if options.get("strict") and self._called:
            self.stop()  # a callable may have changed what would judge the next one
            self._called = False
        if not self._locked:
            card = self.environment or self.describe()
            self._locks.enter_context(held(card.uuid, card.gpu))
            self._locked = True
        options |= self._options
        if self._process is not None and not self._process.is_alive():
            self._kill()  # it died between two calls: a new one opens the problem
        self._setup = [("open", args, options)]
        self._request("open", args, options, START_TIMEOUT_S)

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        """See `Gpu`; remembers whether the child ran a callable's code."""
        if CALLABLE.fullmatch(name) and not self._setup[0][2].get("strict"):
            self._called = True
        return super().add_baseline(name)

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        """See `Gpu`; remembers whether the child ran a callable's code."""
        self._called |= isinstance(candidate.timed, CallPlan)
        return super().trial(candidate)

    def call(
        self, method: str, *arguments: Any, timeout_s: float | None = None, keep: bool = False
    ) -> Any:
        """See `Gpu`. Raises WorkerError with the row's status."""
        self._ensure()
        value = self._request(method, arguments, {}, timeout_s or self._timeout_s)
        if keep:
            self._setup.append((method, arguments, {}))
        return value

    def forget(self, name: str) -> None:
        """See `Gpu`."""
        self._setup = [(m, args, o) for m, args, o in self._setup if args[:1] != (name,)]

    def stop(self) -> None:
        """See `Gpu`: ends the child, and kills it if it does not end within 2 s."""
        if self._process is None:
            return
        left = process.started_by(self._process.pid)  # which lose their parent when it ends
        with contextlib.suppress(OSError, ValueError):
            if self._pipe is not None:
                self._pipe.close()  # the child ends on end-of-file
        self._process.join(2.0)
        self._kill()
        process.end_all(left)

    def _kill(self) -> None:
        if self._process is not None:
            process.end(self._process)
            self._process.join(20.0)
        self._process, self._pipe = None, None

    def _ensure(self) -> None:
        """Ensure a living child in which every kept call has been repeated."""
        if self._process is not None and self._process.is_alive():
            return
        if self._process is not None:
            self._kill()
        for method, args, options in list(self._setup):
            self._request(method, args, options, START_TIMEOUT_S)

    def _start(self) -> Connection[Any, Any]:
        ours, theirs = self._context.Pipe()
        child = self._context.Process(
            target=_serve,
            args=(theirs, os.getpid(), self._bench, self.environment and self.environment.uuid),
            name="attnsweep-gpu",
            daemon=True,
        )
        process.start(child)
        self._process = child
        theirs.close()
        self._pipe = ours
        return ours

    def _request(
        self, method: str, args: tuple[Any, ...], options: dict[str, Any], timeout_s: float
    ) -> Any:
        fresh = self._process is None
        pipe = self._start() if self._pipe is None else self._pipe
        try:
            pipe.send((method, args, options))
            if not pipe.poll(timeout_s + (START_TIMEOUT_S if fresh else 0.0)):
                self.restarts += 1
                self._kill()
                raise WorkerError(
                    Status.TIMEOUT, f"no answer within {timeout_s:g} s; its process was killed"
                )
            reply: _Reply = pipe.recv()
            for so_far, more in ((self.proof_s, reply.proof_s), (self.steps_s, reply.steps_s)):
                for name, spent_s in more.items():
                    so_far[name] = so_far.get(name, 0.0) + spent_s
        except (EOFError, OSError) as error:
            code = self._exit_code()
            self.restarts += 1
            self._kill()
            if code == _STOPPED:  # a batch system stops all processes of a job, this one too
                raise KeyboardInterrupt from error
            raise WorkerError(Status.LAUNCH_ERROR, f"the GPU process died ({code})") from error
        if reply.dying:
            self.restarts += 1
            self._kill()
        if reply.no_gpu is not None:
            if self.environment is None:
                raise reply.no_gpu
            raise CardLostError(reply.no_gpu.what, hint=reply.no_gpu.hint) from reply.no_gpu
        if reply.failure is not None:
            raise WorkerError(reply.failure, reply.detail, reply.value)
        return reply.value

    def _exit_code(self) -> str:
        self._process.join(5.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

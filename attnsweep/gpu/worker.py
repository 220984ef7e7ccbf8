"""One child process owns the GPU; the parent talks to it and survives whatever happens there.

A call fails alone if it outlives its time limit, kills the process or poisons the CUDA context: the
parent kills the child, and the next call starts a new one, opens the same problem in it and adds
the same entries. A new one that sees another card is a NoGpuError, because times of one problem are
of one card, and CUDA counts the cards anew once one has fallen off.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from attnsweep import __version__
from attnsweep.build.launches import Candidate, FirstTimes
from attnsweep.errors import AttnsweepError, CardLostError, NoGpuError
from attnsweep.gpu import children, energy
from attnsweep.gpu.cards import hashed
from attnsweep.gpu.energy import Stretch
from attnsweep.gpu.host import cpu_model, driver_version, installed_packages
from attnsweep.gpu.lock import held
from attnsweep.gpu.steps import proof_taken, step, taken
from attnsweep.problem import Problem
from attnsweep.trial import PROTOCOL, Accuracy, Environment, Status

# On a slow disk, importing PyTorch and choosing a cuDNN plan take this long.
START_TIMEOUT_S = 180.0

_ANEW = (
    "`nvidia-smi -L` lists the cards that are there; the same command begins anew on one of them"
)

BenchFactory = Callable[..., Any]


def open_bench(*args: Any, **options: Any) -> Any:
    """Build a bench.Bench. Only the child imports it, so that the parent never loads CuPy."""
    from attnsweep.gpu.bench import Bench

    return Bench(*args, **options)


class WorkerError(Exception):
    """A call that failed in the worker. `status` is the one that its row should have."""

    def __init__(self, status: Status, detail: str, payload: Any = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.payload = status, detail, payload


@dataclass(frozen=True, slots=True)
class _Reply:
    """The child's answer: a value, or how the call failed."""

    value: Any = None
    failure: Status | None = None
    detail: str = ""
    no_gpu: AttnsweepError | None = None
    dying: bool = False
    proof_s: dict[str, float] = field(default_factory=dict)
    steps_s: dict[str, float] = field(default_factory=dict)


class Gpu(Protocol):
    """A GPU on which one problem at a time is open; `Worker` is the real one.

    Times are microseconds of one call. Every method but `describe` raises WorkerError with the
    status that the candidate's row should have, or CardLostError if the card is lost.
    """

    proof_s: dict[str, float]
    """Seconds that proving outputs right has taken so far, by what was done."""
    steps_s: dict[str, float]
    """Seconds of each step of what was prepared once. Whoever shows them clears them."""

    def describe(
        self, *, preload: Sequence[str] = (), first: tuple[Problem, int] | None = None
    ) -> Environment:
        """GPU, driver and versions. Raises NoGpuError if this machine cannot run CUDA."""

    def open(
        self,
        problem: Problem,
        *,
        replay_us: float,
        seed: int,
        then: Problem | None = None,
        baselines: Sequence[str] = (),
        rounds_scores: Collection[int] = (),
    ) -> None:
        """Open a problem: inputs from `seed`, replays of about `replay_us`. Close the last one.

        then: opened next. baselines: asked for later. rounds_scores: how often the candidates to
        come round scores. What all these need can be prepared meanwhile.
        """

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        """Check a candidate on every case, then time it briefly."""

    def add(self, name: str, candidate: Candidate, *, cold: bool) -> bool:
        """Make a candidate that passed `trial` an entry. cold: with copies for cold times.

        Returns whether its calls can be chained.
        """

    def add_baseline(self, name: str) -> Accuracy:
        """Prepare and check a baseline, and make it an entry."""

    def drop(self, name: str) -> None:
        """Free an entry, and never add it again."""

    def forget(self, name: str) -> None:
        """Do not add this entry to a new process; used for an entry that failed."""

    def race(self, name: str, replay_us: float, kind: str) -> tuple[float, int]:
        """One sample of an entry, `warm` or `cold`, and the number of calls that it launched."""

    def replay(self, name: str, kind: str) -> float:
        """One sample of an entry: `warm`, `cold`, or a stage by its name."""

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """One warm sample of each of two entries, in an order that cancels steady drift."""

    def eager_us(self, name: str) -> float:
        """Host time to issue one call of an entry, without waiting for the device."""

    def energy(self, name: str) -> Stretch | None:
        """Energy of a warm call of an entry, in a stretch of about 1 s; None without a counter."""

    def confirm(self, name: str, longest_us: float) -> int:
        """Check an entry again, in calls of about longest_us; returns the number compared."""

    def conditions(self) -> Mapping[str, Any]:
        """Clocks, power, temperature, throttle reasons and other processes, from NVML."""

    def stop(self) -> None:
        """Release the GPU; the next call starts a new process."""


_STOPPED = "signal SIGTERM"


class Worker:
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
        self._environment: Environment | None = None
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
        """GPU, driver and versions. Raises NoGpuError if this machine cannot run CUDA.

        preload: peers whose packages the child imports in a thread meanwhile.
        first: the problem and the seed that will be opened first; the child begins to compute what
        is right for them.
        """
        options = {"preload": tuple(preload), "first": first}
        environment: Environment = self._request("describe", (), options, START_TIMEOUT_S)
        self._environment = environment
        return environment

    def open(self, *args: Any, **options: Any) -> None:
        """See `Gpu`; takes the arguments of bench.Bench."""
        if not self._locked:
            card = self._environment or self.describe()
            self._locks.enter_context(held(card.uuid, card.gpu))
            self._locked = True
        options |= self._options
        if self._process is not None and not self._process.is_alive():
            self._kill()  # it died between two calls: a new one opens the problem
        self._setup = [("open", args, options)]
        self._request("open", args, options, START_TIMEOUT_S)

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        """See `Gpu`."""
        accuracy, first = self.call("trial", candidate)
        return accuracy, first

    def add(self, name: str, candidate: Candidate, *, cold: bool) -> bool:
        """See `Gpu`."""
        return bool(self.call("add", name, candidate, cold, keep=True, slow=True))

    def add_baseline(self, name: str) -> Accuracy:
        """See `Gpu`."""
        accuracy: Accuracy = self.call("add_baseline", name, keep=True, slow=True)
        return accuracy

    def drop(self, name: str) -> None:
        """See `Gpu`."""
        self.forget(name)
        self.call("drop", name)

    def race(self, name: str, replay_us: float, kind: str) -> tuple[float, int]:
        """See `Gpu`."""
        time_us, launched = self.call("race", name, replay_us, kind)
        return time_us, launched

    def replay(self, name: str, kind: str) -> float:
        """See `Gpu`."""
        return float(self.call("replay", name, kind))

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """See `Gpu`."""
        one, other = self.call("pair", first, second)
        return one, other

    def eager_us(self, name: str) -> float:
        """See `Gpu`."""
        return float(self.call("eager_us", name))

    def energy(self, name: str) -> Stretch | None:
        """See `Gpu`."""
        found: Stretch | None = self.call("energy", name, slow=True)
        return found

    def confirm(self, name: str, longest_us: float) -> int:
        """See `Gpu`."""
        return int(self.call("confirm", name, longest_us))

    def conditions(self) -> Mapping[str, Any]:
        """See `Gpu`."""
        found: Mapping[str, Any] = self.call("conditions")
        return found

    def blocks_per_sm(self, candidate: Candidate) -> dict[str, int]:
        """Resident blocks of each stage, as the driver counts them."""
        counted: dict[str, int] = self.call("blocks_per_sm", candidate)
        return counted

    def call(self, method: str, *args: Any, keep: bool = False, slow: bool = False) -> Any:
        """Call a method of the open Bench by name. Raises WorkerError with the row's status.

        keep: repeat the call in each new process that replaces this one, as entries must be there.
        slow: allow START_TIMEOUT_S instead of timeout_s.
        """
        self._ensure()
        value = self._request(method, args, {}, START_TIMEOUT_S if slow else self._timeout_s)
        if keep:
            self._setup.append((method, args, {}))
        return value

    def forget(self, name: str) -> None:
        """See `Gpu`."""
        self._setup = [(m, args, o) for m, args, o in self._setup if args[:1] != (name,)]

    def stop(self) -> None:
        """End the child; kill it if it does not end within 2 s."""
        if self._process is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._pipe is not None:
                self._pipe.close()  # the child ends on end-of-file
        self._process.join(2.0)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
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
        self._process = self._context.Process(
            target=_serve,
            args=(theirs, os.getpid(), self._bench, self._environment and self._environment.uuid),
            name="attnsweep-gpu",
            daemon=True,
        )
        children.start(self._process)
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
            if self._environment is None:
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


# -- the child ------------------------------------------------------------------------------


def _serve(
    pipe: Connection[Any, Any], parent: int, open_problem: BenchFactory, card: str | None
) -> None:
    """Answer calls until the pipe closes. Only the parent handles Ctrl-C.

    card: the hashed UUID of the one that an earlier process had.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children.die_with(parent)
    bench: Any = None
    while True:
        try:
            method, args, options = pipe.recv()
        except (EOFError, OSError):
            # Not sys.exit: tearing down a context whose kernel hangs would never return.
            os._exit(0)
        if method == "open":
            bench = None  # frees the last problem's memory before the next takes its own
            gc.collect()  # and what peers hold in cycles, as cuDNN's handles
        reply, bench = _answer(open_problem, bench, method, args, options, card)
        reply = replace(reply, proof_s=proof_taken(), steps_s=taken())
        pipe.send(reply)
        if reply.dying:
            pipe.close()
            os._exit(1)


def _answer(
    open_problem: BenchFactory,
    bench: Any,
    method: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    card: str | None,
) -> tuple[_Reply, Any]:
    from attnsweep.gpu.fixture import WrongResult
    from attnsweep.gpu.peers import Unavailable

    try:
        if method == "describe":
            return _Reply(_describe(**options)), bench
        if method == "open":
            bench = open_problem(*args, **options)
            if card is not None and (seen := bench.card()) not in (None, card):
                what = f"the card is lost: a new GPU process sees card {seen}, not {card}"
                return _Reply(no_gpu=NoGpuError(what, hint=_ANEW), dying=True), bench
            return _Reply(), bench
        return _Reply(getattr(bench, method)(*args)), bench
    except NoGpuError as error:
        return _Reply(no_gpu=NoGpuError(error.what, where=error.where, hint=error.hint)), bench
    except WrongResult as error:
        return _Reply(error.accuracy, Status.WRONG, error.detail), bench
    except Unavailable as error:
        return _Reply(None, Status.SKIPPED, str(error)), bench
    except Exception as error:  # a CUDA error or a bug of ours: it becomes a row and ends nothing
        text = str(error).strip().splitlines() or [type(error).__name__]
        detail = f"{type(error).__name__}: {text[0]}"
        if bench is None or bench.poisoned(error):
            return _Reply(None, Status.LAUNCH_ERROR, detail, dying=True), bench
        if not type(error).__module__.startswith("cupy"):
            detail += f" ({_where(error)})"
        return _Reply(None, Status.LAUNCH_ERROR, detail), bench


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _describe(preload: Sequence[str], first: tuple[Problem, int] | None) -> Environment:
    from attnsweep.build.nvrtc import nvrtc_version
    from attnsweep.gpu.device import Session, driver_cuda

    if first is not None and driver_cuda() is not None:  # NumPy computes while CUDA starts
        from attnsweep.gpu.proof import compute_ahead

        compute_ahead(*first)
    with step("start CUDA"):
        session = Session()
    gpu = session.gpu
    versions = session.versions
    nvrtc = nvrtc_version()  # before a package can bring another one
    if preload:
        from attnsweep.gpu import peers
        from attnsweep.gpu.preload import PRELOAD

        problem = None if first is None else first[0]
        if problem is not None:
            peers.compile_ahead(preload, problem)
        PRELOAD.begin(preload, problem)
    return Environment(
        gpu=gpu.name,
        arch=gpu.arch,
        driver=driver_version() or f"CUDA {versions['cuda_driver']}",
        cuda=versions["cuda_runtime"],
        nvrtc=".".join(map(str, nvrtc)),
        attnsweep=__version__,
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        host_cores=os.cpu_count() or 1,
        packages=installed_packages(),
        sm_count=gpu.sm_count,
        clock_hz=gpu.clock_hz,
        memory_bytes=gpu.memory_bytes,
        memory_bytes_per_second=gpu.memory_bytes_per_second,
        l2_bytes=gpu.l2_bytes,
        protocol=PROTOCOL,
        host=f"{cpu_model()}, host {hashed(platform.node())}",
        energy_counter=energy.counter(session) is not None,
        **session.identity(),
    )

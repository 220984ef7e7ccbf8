"""The process that owns the GPU: it answers the worker's calls."""

from __future__ import annotations

import functools
import gc
import multiprocessing.util
import os
import platform
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from attnsweep import __version__
from attnsweep.core.errors import AttnsweepError, NoGpuError, raised_at
from attnsweep.core.problem import Problem
from attnsweep.core.timings import proof_taken, step, taken
from attnsweep.core.trial import PROTOCOL, Environment, Status
from attnsweep.device import energy, process
from attnsweep.device.cards import hashed
from attnsweep.device.environment import cpu_model, driver_version, installed_packages

if TYPE_CHECKING:
    from attnsweep.bench.process_state import ProcessState

_ANEW = (
    "`nvidia-smi -L` lists the cards that are there; the same command begins anew on one of them"
)

BenchFactory = Callable[..., Any]


def open_bench(*args: Any, strict: str = "", **options: Any) -> Any:
    """Build a Bench, or a StrictBench that has a directory `strict`.

    Only the child imports them, so that the parent never loads CuPy.
    """
    from attnsweep.bench.bench import Bench
    from attnsweep.bench.strict import StrictBench

    if not strict:
        return Bench(*args, **options)
    process.keep_out()
    return StrictBench(*args, strict=strict, **options)


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


def _serve(
    pipe: Connection[Any, Any], parent: int, open_problem: BenchFactory, card: str | None
) -> None:
    """Answer calls until the pipe closes. Only the parent handles Ctrl-C.

    card: the hashed UUID of the one that an earlier process had.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with(parent)
    process.stand_alone()
    bench: Any = None
    state: Any = None
    if open_problem is open_bench:
        from attnsweep.bench.process_state import ProcessState

        state = ProcessState()
        open_problem = functools.partial(open_bench, state=state)
    while True:
        try:
            method, args, options = pipe.recv()
        except (EOFError, OSError):
            # Not sys.exit: tearing down a context whose kernel hangs would never return. Locks are
            # given back first, as tqdm's, which torch.compile makes: else the program would end
            # with a warning that they leaked.
            multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
            os._exit(0)
        if method == "open":
            bench = None  # frees the last problem's memory before the next takes its own
            gc.collect()  # and what baselines hold in cycles, as cuDNN's handles
        if method == "describe":
            options = {**options, "state": state}
        reply, bench = _answer(open_problem, bench, method, args, options, card)
        reply = replace(reply, proof_s=proof_taken(), steps_s=taken())
        try:
            pipe.send(reply)
        except OSError:  # a callable closed it
            os._exit(1)
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
    from attnsweep.baselines.backend import Unavailable
    from attnsweep.verify.device_case import WrongResult

    try:
        if method == "describe":
            return _Reply(describe(**options)), bench
        if method == "open":
            bench = open_problem(*args, **options)
            seen = None if card is None else bench.session.identity().get("uuid")
            if seen not in (None, card):
                what = f"the card is lost: a new GPU process sees card {seen}, not {card}"
                return _Reply(no_gpu=NoGpuError(what, hint=_ANEW), dying=True), bench
            return _Reply(), bench
        return _Reply(getattr(bench, method)(*args)), bench
    except NoGpuError as error:
        return _Reply(no_gpu=NoGpuError(error.what, where=error.where, hint=error.hint)), bench
    except WrongResult as error:
        return _Reply(error.accuracy, Status.WRONG, error.detail), bench
    except Unavailable as error:
        return _Reply(None, Status(error.status), str(error)), bench
    except Exception as error:  # a CUDA error or a bug of ours: it becomes a row and ends nothing
        text = str(error).strip().splitlines() or [type(error).__name__]
        detail = f"{type(error).__name__}: {text[0]}"
        if bench is None or bench.session.poisoned(error):
            return _Reply(None, Status.LAUNCH_ERROR, detail, dying=True), bench
        if not type(error).__module__.startswith("cupy"):
            detail += f" ({raised_at(error)})"
        return _Reply(None, Status.LAUNCH_ERROR, detail), bench


def describe(
    preload: Sequence[str], first: tuple[Problem, int] | None, state: ProcessState | None
) -> Environment:
    """The card of this process, and versions; `state` begins what is asked for ahead.

    Raises NoGpuError if this machine cannot run CUDA; nothing is begun then.
    """
    from attnsweep.compile.nvrtc import nvrtc_version
    from attnsweep.device.cuda import CudaSession, driver_cuda

    if first is not None and state is not None and driver_cuda() is not None:
        # NumPy computes while CUDA starts.
        state.references.begin(*first)
    with step("start CUDA"):
        session = CudaSession()
    gpu = session.gpu
    versions = session.versions
    nvrtc = nvrtc_version()  # before a package can bring another one
    if preload and state is not None:
        state.begin(preload, first)
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

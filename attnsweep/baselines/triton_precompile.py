"""The baseline `triton_flash`: a helper process compiles its configs while candidates compile.

It imports PyTorch and takes seconds, so those of the first problem are begun before it is opened.
In a thread of the GPU process they would wait for Python with the checks. Compiled code reaches the
GPU process through Triton's own cache on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import NotInstalled, Way
from attnsweep.baselines.flash import importable
from attnsweep.baselines.torch_sdpa import import_torch
from attnsweep.core.problem import Problem
from attnsweep.core.timings import step
from attnsweep.core.user_code import type_of
from attnsweep.device.process import HelperProcess

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

# Longer than all configs take on one core.
_LONGEST_S = 60.0
# As the threads that compile candidates: those are waited for first.
_NICE = 10
_MOST_THREADS = 16
_COMMAND = (sys.executable, "-m", __name__)


class TritonPrecompile:
    """The process; it starts with the first problem that wants it, and ends with this one."""

    def __init__(self, command: Sequence[str] = _COMMAND, *, longest_s: float = _LONGEST_S) -> None:
        self._process = HelperProcess(lambda: command)
        self._longest_s = longest_s
        self._pool = ThreadPoolExecutor(1, "ahead")
        self._answers: dict[Problem, Future[bool]] = {}
        self._begun: Problem | None = None

    def begin(self, names: Collection[str], problem: Problem) -> None:
        """Begin to compile a problem's configs, if they are needed and were not begun last.

        Whatever fails here fails in `wait`'s caller again.
        """
        wanted = "triton_flash" in names and problem.dtype in ("fp16", "bf16")
        wanted = wanted and not problem.head_dim_v
        if problem == self._begun or not wanted or not importable("triton"):
            return
        self._begun = problem
        self._answers.clear()
        with contextlib.suppress(OSError):
            requests, answers = self._process.pipes()
            line = f"{json.dumps(problem.facts)}\n".encode()
            requests.write(line)
            requests.flush()
            # The process says a line again when all of the problem's configs are compiled.
            self._answers[problem] = self._pool.submit(lambda: any(s == line for s in answers))

    def begun(self, problem: Problem) -> bool:
        """Whether a problem's configs were begun last."""
        return problem == self._begun

    def done(self, problem: Problem) -> bool:
        """Whether the process has compiled a problem's configs by now."""
        answer = self._answers.get(problem)
        return answer is not None and answer.done() and not answer.exception() and answer.result()

    def wait(self, problem: Problem) -> bool:
        """Whether the process has compiled a problem's configs; waits for it."""
        answer = self._answers.pop(problem, None)
        if answer is None:
            return False
        try:
            return answer.result(self._longest_s)
        except TimeoutError:
            self.close()
            return False

    def close(self) -> None:
        """End the process, if there is one."""
        self._process.close()


def _serve() -> None:
    for line in sys.stdin:
        with contextlib.suppress(Exception):
            compile_triton(Problem.of(json.loads(line)))
        sys.stdout.write(line)
        sys.stdout.flush()


def _compile_triton(torch: Any, problem: Problem) -> None:
    """Compile every config in threads, as far as Triton can.

    Compiling one takes about 0.7 s of a core. The code does not depend on batch, heads or sequence
    length, and Triton keeps it on disk, where a later problem finds it. Older Triton cannot; then
    each config is compiled when it is first called. A config that does not compile says so when it
    is called. Their common launcher, for which some versions of Triton run a C compiler, is made
    too.
    """
    import triton

    from attnsweep.baselines.triton_kernel import CONFIGS, attend, call

    if not hasattr(triton, "AsyncCompileMode"):
        return
    how = {"dtype": type_of(torch, problem.dtype)}
    q, k = (torch.empty(problem.shape_of(one), device="meta", **how) for one in "qk")
    _, arguments, constants = call(q, k, k, q, problem.causal)
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    made: list[Any] = []
    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in CONFIGS:
            own = constants | _settings(config)
            made.append(attend.fn.warmup(*arguments, grid=(1,), **own))
    for kernel in made:
        with contextlib.suppress(Exception):  # also where a config did not compile
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            break


def _settings(config: Any) -> dict[str, Any]:
    how = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return {**config.kwargs, **how}


def compile_triton(problem: Problem) -> None:
    """Compile all configs of `triton_flash` for a problem, or read them from Triton's cache."""
    _compile_triton(import_torch(), problem)


def _triton(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    try:
        from attnsweep.baselines.triton_kernel import CONFIGS, attend, call
    except ImportError as error:
        raise NotInstalled("Triton is not installed") from error

    def way(config: Any) -> Way:
        def forward(q: Any, k: Any, v: Any) -> Any:
            out = torch.empty_like(q)
            grid, arguments, constants = call(q, k, v, out, problem.causal, problem.scale)
            attend.fn[grid](*arguments, **constants, **_settings(config))
            return out

        return Way(forward)

    with step("take up Triton's code"):
        _compile_triton(torch, problem)
    return [way(config) for config in CONFIGS]


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    _serve()

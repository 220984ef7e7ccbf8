"""What the child process of a card does: sweep a problem, or check it.

A sweep here writes no file and compiles nothing: it tells its parent what it would write, and asks
it for machine code.
"""

from __future__ import annotations

import base64
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.compile.calls import tracers_of, with_calls
from attnsweep.compile.nvrtc import NOW, Compiler, Cubin, default_cache_dir
from attnsweep.core.errors import CompileError, ToolchainError
from attnsweep.core.hardware import Arch, arch_on
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Status, Trial
from attnsweep.family.discover import discover
from attnsweep.family.family import Family
from attnsweep.regress.budget import Budget
from attnsweep.specs.load import SweepSpec, load_spec
from attnsweep.specs.plan import plan
from attnsweep.store.rows import row_bytes
from attnsweep.store.run import Run
from attnsweep.sweep.loop import Share, begin, sweep_problem
from attnsweep.sweep.messages import PROGRESS, CardFault, Message, Pipe

# If as many candidates fail at the start of a problem and none is right, the card is suspected.
_FAILURES = 12


class Suspected(CardFault):
    """Nothing but failures came, so what the card told of the problem does not count."""


class RemoteCompiler(Compiler):
    """Has the parent compile, which shares all cores and every stage among the cards."""

    def __init__(self, arch: Arch, cache_dir: Path, pipe: Pipe) -> None:
        # Not Compiler's, which starts threads.
        self.threads = 0  # to spare: other cards have them compile
        self.arch, self.cache_dir = arch, cache_dir
        self._closures = {}
        self._futures = {}
        self._lock = threading.Lock()
        self._pipe, self.tracers = pipe, None

    def submit(
        self,
        source: Path,
        defines: Mapping[str, str],
        turn: int = NOW,  # noqa: ARG002 - the parent's cores are shared by the cards
    ) -> Future[Cubin]:
        """Ask the parent; a stage asked for twice is asked for once, in its first turn."""
        key = self.key(source, defines)
        with self._lock:
            if key in self._futures:
                return self._futures[key]
            future = self._futures[key] = Future()
        self._pipe.tell("compile", key=key, source=str(source), defines=dict(defines))
        return future

    def answer(self, message: Message) -> None:
        """Take what the parent compiled, or why it could not, and end the wait for it."""
        future = self._futures[message["key"]]
        if "path" in message:
            facts = {name: message[name] for name in ("digest", "log", "seconds", "cached")}
            future.set_result(Cubin(path=Path(message["path"]), **facts))
        elif message["log"] is None:
            future.set_exception(ToolchainError(message["why"]))
        else:
            future.set_exception(CompileError(message["why"], log=message["log"]))

    def close(self) -> None:
        """End the processes that trace callables; nothing else was begun."""
        if self.tracers is not None:
            self.tracers.close()


class Told:
    """The rows of one problem, for a Sweep: what an earlier run left, and what is told now."""

    def __init__(self, directory: Path, rows: list[Trial], pipe: Pipe) -> None:
        self.directory = directory
        self._rows = {row.key: row for row in rows}
        self._pipe = pipe

    def rows_of(self, problem: Problem) -> list[Trial]:
        """See `Writer`, as for the other methods."""
        return [row for row in self._rows.values() if row.problem == problem]

    def append(self, trial: Trial) -> None:
        """Tell a row."""
        self._rows[trial.key] = trial
        # In the bytes that the run directory gets.
        self._pipe.line(b'{"say": "row", "row": ' + row_bytes(trial).rstrip() + b"}")

    def set_aside(self, problem: Problem) -> None:
        """Ask the parent to move the rows aside."""
        self._rows = {key: row for key, row in self._rows.items() if row.problem != problem}
        self._pipe.tell("aside")

    def end_searches(self, problem: str, endings: Mapping[str, str]) -> None:
        """Tell why the searches ended."""
        self._pipe.tell("ended", problem=problem, endings=dict(endings))

    def keep(self, name: str, data: bytes) -> None:
        """Tell part of the winner's code."""
        self._pipe.tell("keep", name=name, data=base64.b64encode(data).decode())


class Telling(Observer):
    """Tells progress. suspect: raise Suspected if nothing but failures comes at the start."""

    def __init__(self, pipe: Pipe, *, suspect: bool) -> None:
        self._pipe, self._suspect = pipe, suspect
        self._failures, self._last = 0, ""
        self._open, self._elsewhere = "", False

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        """A problem begins."""
        self._open, self._elsewhere = problem.label, False
        self._pipe.tell("opening", candidates=candidates, kept=kept)

    def trying_on(self, label: str, candidates: int) -> None:
        """Candidates are tried on a shorter problem, or on the open one again."""
        self._elsewhere = label != self._open
        self._pipe.tell("trying_on", label=label, candidates=candidates)

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        """A row is there: that of the last `row` message, or a kept or an unstored one."""
        unstored = kept or self._elsewhere
        row = {"row": json.loads(row_bytes(trial))} if unstored else {}
        self._pipe.tell("tried", kept=kept, **row)
        if trial.status in (Status.OK, Status.NOISY, Status.WRONG):
            self._suspect = False
        elif trial.status in (Status.LAUNCH_ERROR, Status.TIMEOUT):
            self._failures += 1
            self._last = (trial.detail or trial.status.value).partition("\n")[0]
            if self._failures >= _FAILURES:
                self.suspect(f"the first {self._failures}")

    def suspect(self, candidates: str) -> None:
        """Raise Suspected if nothing but failures has come so far."""
        if self._suspect and self._failures:
            what = f"{candidates} candidates all failed, the last one with: {self._last}"
            raise Suspected(what)


def _telling(say: str) -> Callable[..., None]:
    """Tells an event with its facts, by their names."""
    event = inspect.signature(getattr(Observer, say))

    def tell(self: Telling, *args: Any, **facts: Any) -> None:
        _, *told = event.bind(self, *args, **facts).arguments.items()
        self._pipe.tell(say, **dict(told))

    return tell


for _say in {*PROGRESS} - {*vars(Telling)}:
    setattr(Telling, _say, _telling(_say))


class _Movable:
    """A GPU on which a problem that cannot be opened moves to another card."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def open(self, problem: Problem, **options: Any) -> None:
        try:
            self._gpu.open(problem, **options)
        except WorkerError as error:
            if options.get("strict"):  # its rows are measured
                raise
            raise CardFault(f"cannot open the problem: {error.detail}") from error


class Tasks:
    """Does what the parent's messages ask for, one after the other."""

    def __init__(self, pipe: Pipe, gpu: Gpu, here: Environment, cache_dir: str | None) -> None:
        """cache_dir: of compiled code (default: the user's)."""
        self._pipe, self._gpu, self._here = pipe, gpu, here
        place = Path(cache_dir) if cache_dir else default_cache_dir()
        self.compiler = RemoteCompiler(arch_on(here), place, pipe)
        self._spec: SweepSpec | None = None
        self._directory = Path()

    def do(self, message: Message) -> None:
        """Obey one message. Raises CardFault, NoGpuError or another AttnsweepError."""
        getattr(self, f"_{message['do']}")(message)

    def _open(self, message: Message) -> None:
        spec = Path(message["spec"])
        self._directory = spec.parent
        found = {place: _declared(place) for place in set(message["families"].values())}
        families = {name: found[at][name] for name, at in message["families"].items()}
        self._spec = with_calls(load_spec(spec, families), tracers_of(self.compiler))

    def _sweep(self, message: Message) -> None:
        spec = self._spec
        assert spec is not None
        entry = spec.problems[message["problem"]]
        (item,) = plan(replace(spec, problems=(entry,)), self.compiler.arch)
        rows = [Trial.model_validate(row) for row in message["rows"]]
        store = Told(self._directory, rows, self._pipe)
        gpu = self._gpu if message["last"] else cast(Gpu, _Movable(self._gpu))
        observer = Telling(self._pipe, suspect=not message["last"])
        seed = message["input_seed"]
        share = Share(spec, self._here, self.compiler, store, observer, seed)
        then = None if message["then"] is None else spec.problems[message["then"]].problem
        try:
            sweep_problem(begin(item, share), gpu, share, then)
            observer.suspect("its")
        except Suspected:
            store.set_aside(entry.problem)  # all rows may be there: another card would keep them
            raise
        self._pipe.tell("done")

    def _check(self, message: Message) -> None:
        assert self._spec is not None
        gpu = self._gpu if message["last"] else cast(Gpu, _Movable(self._gpu))
        observer = Telling(self._pipe, suspect=False)
        rows = [Trial.model_validate(row) for row in message["rows"]]
        known = message["environment"]
        environment = None if known is None else Environment.model_validate(known)
        baseline = Run(Path(message["baseline"]), rows, environment, None, [])
        budget = Budget(message["budget_s"], message["left_s"])
        from attnsweep.regress import live  # brings pandas, which a sweep does without

        here, problem = self._here, Problem.of(message["problem"])
        how = {"slower": message["slower"], "other_driver": message["other_driver"]}
        pairs = live.Winners.of(self._spec, baseline, **how).pairs(self.compiler, here, [problem])
        (finding,) = live.Gate(self._spec, gpu, observer, budget).run(pairs)
        self._pipe.tell("done", finding=finding.to_json())


@cache
def _declared(directory: str) -> dict[str, Family]:
    """The shipped families and those of a directory, which may be the shipped one."""
    own = discover()
    if any(str(kernel.source.parent) == directory for kernel in own.values()):
        return own
    return discover(Path(directory))

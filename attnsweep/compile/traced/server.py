"""Traces one callable of the user's, a process for each config: see compile.trace, which asks.

It imports the user's file once, without a visible GPU, and forks for each request. A fork takes
0.01 s, and holds what a config does: a crash, a hang, more forks, what it prints.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import inspect
import itertools
import json
import os
import resource
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from attnsweep.compile.traced import others, warm
from attnsweep.core.callables import Asked
from attnsweep.core.cases import called_cases, served_cases
from attnsweep.core.errors import Unavailable, in_short
from attnsweep.core.hardware import Arch, arch_named
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import (
    BoundFunction,
    beside,
    built,
    facts_asked_for,
    imported,
    split,
    takes,
    user_modules,
    watched,
)

# Bytes that a config may allocate beside what importing took.
_MEMORY = 16 << 30
_LINE = 1 << 16


@dataclass
class Child:
    """A process that does one request, and what it has answered so far."""

    number: int
    pid: int
    end: float
    """time.monotonic() after which it is killed."""
    limit_s: float
    said: bytearray = field(default_factory=bytearray)
    late: bool = False


class Traced:
    """The user's callable, imported."""

    def __init__(self, call: str, arch: Arch) -> None:
        from attnsweep.compile.traced import fake
        from attnsweep.compile.traced.triton import on_card

        self.asked, self.arch = Asked.of(call), arch
        with fake.no_card(arch, real=True), on_card(arch):  # which a file may ask for its configs
            self.module, self.function = imported(self.asked.call)

    def closure(self) -> dict[str, str]:
        """The user's files that were imported, and SHA-256 of each: the callable's own is first.

        None is of an installed package, but its own may be.
        """
        found = {}
        for file in (str(self.module.__file__), *sorted(user_modules().values())):
            with contextlib.suppress(OSError):
                found[os.path.abspath(file)] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        return found

    def space(self, problem: str, widen: bool) -> list[dict[str, Any]]:
        """The autotuners that a call launches: every config, and those kept on this problem."""
        if self.asked.factory:
            what = "no values for the factory: a spec names them, or attnsweep.tune(params=…)"
            raise Unavailable(what)
        tuned, error = self._call(Problem.parse(problem), {}, None, widen=widen)
        if not tuned.met:
            raise Unavailable(error or "it launches no autotuner: name parameters of the function")
        return [asdict(met) for met in tuned.tunings()]

    def keep(self, problems: list[str], configs: list[dict[str, Any]]) -> list[str | None] | None:
        """Why `keep`, beside the function, rules each config out on each problem; None without one.

        Each answer is None where it does not.
        """
        keep = beside(self.module, self.function, "keep")
        if keep is None:
            return None
        with watched("keep"):
            return [
                _reason("keep", keep(dict(config), problem))
                for problem, config in itertools.product(map(Problem.parse, problems), configs)
            ]

    def refusals(self, problems: list[str], unless_said: bool) -> list[str | None]:
        """Why the callable takes no call of each problem, or None: see Tracer."""
        return [self._refusal(Problem.parse(problem), unless_said) for problem in problems]

    def cases(self, problem: str, values: dict[str, Any], folder: str) -> list[Any]:  # noqa: ARG002
        """The `cases` of a trace that was made without; folder: its own, which has its kernels."""
        shape, (own, left) = Problem.parse(problem), self._split(values)
        tuned, _ = self._call(shape, own, left)
        return self._cases(shape, own, left, {launch.hash for launch in tuned.launches})

    def _split(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return (values, {}) if self.asked.factory else split(self.function, values)

    def _cases(self, shape: Problem, own: Any, left: Any, hashes: set[str]) -> list[Any]:
        """Small cases on which a call launches the same code, as answers have them."""

        def serves(case: Problem) -> bool:
            if Problem.parse(case.label) != case:
                return False
            met, other = self._call(case, own, left, hashes)
            return not other and hashes.issuperset(launch.hash for launch in met.launches)

        cases = served_cases(called_cases(shape), shape, serves)
        return [(case.problem.label, case.inputs) for case in cases]

    def trace(
        self, problem: str, values: dict[str, Any], folder: str, cases: bool
    ) -> dict[str, Any]:
        """The launches of a call with a config's values, whose cubins are written to a folder.

        cases: find those on which it launches the same code, too.
        """
        from attnsweep.compile.traced import fake

        shape, (own, left) = Problem.parse(problem), self._split(values)
        with fake.Operations() as operations:
            tuned, error = self._call(shape, own, left)
        if error and not tuned.cannot:
            raise Unavailable(error)
        launches, hashes = [], {launch.hash for launch in tuned.launches}
        unseen = operations.unseen and f"{operations.unseen} may launch kernels of its own"
        why = error or unseen or ("" if hashes else "a call launches no kernel of Triton's")
        found: list[Any] | None = None
        if why or tuned.of_one_shape:
            found = []
        elif cases:
            found = self._cases(shape, own, left, hashes)
        for number, launch in enumerate(tuned.launches):
            facts = asdict(launch)
            Path(folder, f"{number}.cubin").write_bytes(facts.pop("cubin"))
            launches.append(facts)
        return {
            "launches": launches,
            "host": operations.digest,
            "cases": found,
            "why": why,
            "files": self.closure(),
        }

    def _refusal(self, shape: Problem, unless_said: bool) -> str | None:
        if why := self._other_tensors(shape):
            return why
        if supports := beside(self.module, self.function, "supports"):
            with watched("supports"):
                return _reason("supports", supports(shape))
        if unless_said:
            return None
        if shape.kind not in ("full", "causal") or shape.head_dim_v or shape.scores.kinds:
            return "no supports(problem) beside it says that it can"
        told = self.asked.factory or any(
            takes(self.function, n) for n in ("problem", "causal", "is_causal")
        )
        return "it has no parameter causal" if shape.causal and not told else None

    def _other_tensors(self, shape: Problem) -> str | None:
        """Why its parameters are not the tensors of a call, or None."""
        if self.asked.factory:
            return None if takes(self.function, "problem") else "it has no parameter problem"
        try:
            parameters = [*inspect.signature(self.function).parameters.values()]
        except (TypeError, ValueError):  # a function of C has no signature
            return None
        facts, forward = {*facts_asked_for(self.function, shape)}, shape.op.name == "forward"
        facts |= {"problem", *(("out", "lse") if forward else ())}
        own = [
            p.name
            for p in parameters
            if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty and p.name not in facts
        ]
        if forward and "do" in own:
            return "it takes the tensors of a backward"
        if len(own) == len(shape.values) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return None
        if not forward and "do" not in own:
            return f"it takes no tensors of a backward: {', '.join(shape.values)}"
        told = f"it takes {len(own)} tensors, {', '.join(own)}" if own else "it takes no tensors"
        return f"{told}, and a call has {len(shape.values)}, {', '.join(shape.values)}"

    def interpret(self, problem: str, values: dict[str, Any], inputs: str, folder: str) -> None:
        """Write the outputs of a call in Triton's interpreter to a folder; inputs: the folder of.

        Both have a file `NAME.npy` for each tensor, of bits.
        """
        from attnsweep.compile.traced import interpreted

        given = interpreted.Inputs(Problem.parse(problem), Path(inputs))
        try:
            made = interpreted.called(self.asked.call, self.function, given, values, self.arch)
        except Unavailable as error:
            raise Unavailable(_explained(error)) from error
        given.check()
        interpreted.keep(given, made, Path(folder))

    def _call(
        self,
        problem: Problem,
        own: dict[str, Any],
        tuned: Any,
        known: Any = None,
        *,
        widen: bool = False,
    ) -> tuple[Any, str]:
        """What a call launches, and why it ended early, or nothing.

        own: keywords of the function. tuned: for its autotuners. known, widen: see Recorder.
        """
        import torch

        from attnsweep.compile.traced import fake
        from attnsweep.compile.traced.triton import AskedTooMuch, Recorder

        recorder, name = Recorder(tuned, known, widen=widen), str(self.asked)
        function, kinds = self.function, (torch.Tensor, fake.FakeTensor)
        try:
            if self.asked.factory:
                with fake.no_card(self.arch), recorder.recording(self.arch):
                    function, own = built(name, function, problem, own), {}
            call = BoundFunction(torch, problem, name, function, values=own, tensors=kinds)
            # Anew: a factory may have imported what is recorded.
            with fake.no_card(self.arch), recorder.recording(self.arch):
                call(*fake.inputs_of(problem))
                recorder.check()
        except AskedTooMuch as error:
            return recorder, str(error)
        except Unavailable as error:
            cause = error.__cause__
            if isinstance(cause, AskedTooMuch):
                return recorder, str(cause)
            recorder.cannot = fake.cannot_be_traced(cause)
            return recorder, _explained(error)
        return recorder, ""


def _reason(name: str, answer: Any) -> str | None:
    """What a function of the user's that returns True or a reason has said against it."""
    return None if answer is True else str(answer or f"{name} returned False")[:300]


def _explained(error: Unavailable) -> str:
    """Why a call failed: what its error follows from and where, and the whole on further lines."""
    first = last = error.__cause__
    said, place = str(error), ""
    files = {os.path.abspath(file) for file in user_modules().values()}
    while last is not None:
        for frame in traceback.extract_tb(last.__traceback__):
            if os.path.abspath(frame.filename) in files:  # the user's line, not a library's
                place = f" ({os.path.relpath(frame.filename)}:{frame.lineno})"
        if last.__cause__ is None:
            break
        last = last.__cause__
    if last is not None and last is not first:
        said = in_short(last)
    if place:
        said = said.rpartition(" (")[0] + place
    return said if last is first else f"{said}\n{first}"


class Server:
    """Answers requests of a pipe, several at once, each in a process of its own."""

    def __init__(self, requests: IO[bytes], replies: IO[bytes], traced: Traced, jobs: int) -> None:
        self._requests, self._replies, self._traced, self._jobs = requests, replies, traced, jobs
        self._ask = selectors.DefaultSelector()
        self._waiting: list[dict[str, Any]] = []
        self._rest = b""

    def serve(self) -> None:
        """Answer until the pipe ends; then nothing that was asked for goes on."""
        os.set_blocking(self._requests.fileno(), False)
        self._ask.register(self._requests, selectors.EVENT_READ)
        running: dict[int, Child] = {}
        while True:
            while self._waiting and len(running) < self._jobs:
                pipe, child = self._begin(self._waiting.pop(0))
                running[pipe] = child
                self._ask.register(pipe, selectors.EVENT_READ)
            for key, _ in self._ask.select(0.2 if running else None):
                if key.fileobj is self._requests:
                    if not self._read():
                        for child in running.values():
                            _kill(child)
                        return
                    continue
                more = os.read(key.fd, _LINE)
                running[key.fd].said += more
                # What it has started and left may hold the pipe open after the answer.
                if not more or more.endswith(b"\n"):
                    self._ask.unregister(key.fd)
                    os.close(key.fd)
                    self._end(running.pop(key.fd))
            for child in running.values():
                if time.monotonic() > child.end and not child.late:
                    child.late = True
                    _kill(child)

    def _read(self) -> bool:
        try:
            more = os.read(self._requests.fileno(), _LINE)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + more).split(b"\n")
        self._waiting += map(json.loads, lines)
        return bool(more)

    def _begin(self, request: dict[str, Any]) -> tuple[int, Child]:
        number, limit_s = request.pop("number"), request.pop("limit_s")
        come, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(come)
                self._requests.close()  # or it would be asked still if this process outlives it
                self._replies.close()
                reply = _done(self._traced, request) | {"used": warm.used()}
                os.write(go, json.dumps(reply).encode() + b"\n")
            os._exit(0)
        os.close(go)
        return come, Child(number, pid, time.monotonic() + limit_s, limit_s)

    def _end(self, child: Child) -> None:
        _kill(child)  # what it has started
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if child.late:
            reply: Any = {"failed": f"no answer within {child.limit_s:g} s"}
        else:
            try:
                reply = json.loads(child.said)
            except ValueError:
                died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                reply = {"failed": f"its process died ({died})"}
                reply |= {"killed": True} if code == -signal.SIGKILL else {}
        used = reply.pop("used", ())
        self._replies.write(json.dumps({"number": child.number, **reply}).encode() + b"\n")
        self._replies.flush()
        warm.use(used)


def _kill(child: Child) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def _done(traced: Traced, request: dict[str, Any]) -> dict[str, Any]:
    """Do a request in this process, which is for it alone."""
    os.setsid()
    os.nice(10)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1, 2):
        os.dup2(nothing, own)
    if folder := request.get("folder"):
        cache = os.path.join(folder, "triton")
        os.environ |= {"TRITON_CACHE_DIR": cache, "TILELANG_CACHE_DIR": cache, "TMPDIR": folder}
        others.keep_in(folder)
    try:
        return {"value": getattr(traced, request.pop("do"))(**request)}
    except Unavailable as error:
        return {"failed": str(error)}
    except BaseException as error:  # whatever the user's code raises
        return {"failed": in_short(error)}


def _told(requests: IO[bytes]) -> list[str]:
    """What would be the arguments; this process ends if nobody says."""
    line = requests.readline()
    if not line:
        os._exit(0)
    facts: list[str] = json.loads(line)
    return facts


def main() -> None:
    """Arguments: the callable, the architecture, the card's SMs, and requests at once.

    Without, the first line has them, as JSON: it is read when all but the user's file is imported.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_DUMP_PTXAS_LOG": "1"}
    requests, replies = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1, 2):
        os.dup2(nothing, own)
    gc.disable()  # what is imported stays: looking for what does not is a sixth of the time
    try:
        importlib.import_module("triton")
        digests = threading.Thread(target=warm.digest)
        digests.start()
        warm.import_all()
        call, arch, sm_count, jobs = sys.argv[1:] or _told(requests)
        card = replace(arch_named(arch), sm_count=int(sm_count))
        others.ready(arch, tempfile.gettempdir())
        sys.path.insert(0, os.getcwd())  # where the user's file may import from, as `python -m` may
        traced = Traced(call, card)
        ready = traced.closure()
        digests.join()  # before the first fork
        gc.freeze()
        gc.enable()
    except BaseException as error:  # a module may raise anything while it is imported
        why = str(error) if isinstance(error, Unavailable) else in_short(error)
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "triton"):
            why = f"tracing needs {error.name}, which is not installed: pip install torch triton"
        replies.write(json.dumps({"number": 0, "failed": why}).encode() + b"\n")
        replies.flush()
        os._exit(1)
    # Only the parent handles Ctrl-C: this process ends with the pipe, and all that it has started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies.write(json.dumps({"number": 0, "value": ready}).encode() + b"\n")
    replies.flush()
    Server(requests, replies, traced, int(jobs)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()

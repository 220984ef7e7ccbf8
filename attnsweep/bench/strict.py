"""The strict judge: callables run in processes of their own, and the judge owns what counts.

A sample is a chain of calls in the called process. The inputs of each follow from a secret number
and from the output of the call before, so that no call can be made before its turn, or for another.
The judge publishes the number when its clock starts, and takes the outputs when it stops. Then the
called process stands still, and every output is judged. docs/explanation/threats.md has the rest.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from attnsweep.baselines.backend import Unavailable, Unconfirmed
from attnsweep.baselines.registry import BACKENDS, backend_of
from attnsweep.bench.bench import Bench
from attnsweep.bench.caller_process import sealed_of
from attnsweep.bench.gpu import is_its_own
from attnsweep.compile.nvrtc import default_cache_dir
from attnsweep.core.trial import Accuracy
from attnsweep.device import process
from attnsweep.device.buffers import POISON, Buffer
from attnsweep.device.shared import Arena, CudaIpc, Span
from attnsweep.verify.calls import Proven
from attnsweep.verify.device_case import DeviceCase, WrongResult
from attnsweep.verify.oracle import oracle_of

# Calls of a chain: a power of two, at most this many, whose outputs take at most so much memory
# twice, and which take about so long, but at least _FEW.
_MOST, _FEW, _OUTPUT_BYTES, _CHAIN_US = 64, 4, 1 << 29, 20_000.0
# Events may say this much less of a call than the judge's clock, beside how far the clock itself
# is off: the median distance from the median of what it says of chains that call nothing, times
# _STEADY, over the calls.
_SHARE, _LEAST_US, _STEADY = 0.03, 0.5, 4.0
# A chain of empty calls may take _BUSY times as long as before any stranger ran, plus _BUSY_US. If
# it takes longer in each of _BUSY_TRIES tries, a stranger keeps the card busy between its calls.
_BUSY, _BUSY_US, _BUSY_TRIES = 1.5, 200.0, 3
# By events it may take _DRIFT times as long as then, at the same clock: what it takes more is not
# taken off a stranger's time, whose kernels may go on where its process stands still.
_DRIFT = 1.05
_EMPTY_SAMPLES, _LEAST_SAMPLES = 5, 3
# Seconds for small cases, and how many are called however long they take: else one that sleeps in
# the first would be spared the others.
_CASES_S, _LEAST_CASES = 40.0, 4
# A line that a called process may write.
_LINE = 1 << 16
# Strangers' processes that start before they are asked: each has a context on the card.
_AHEAD = 2
_AS_GIVEN = "in chains o is drawn too, and lse stays: both must be taken as they are given"
# What a called process is told of its surroundings: no secrets of the user's shell.
_KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_", "LD_", "PYTHON", "VIRTUAL_ENV", "CONDA"),
    *("CC", "CXX", "CUDA", "NVIDIA", "TRITON", "TORCH", "ATTNSWEEP"),
)
_PLACES = ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


class JudgeError(Exception):
    """A process of the judge failed, in code of the judge."""


class Caller:
    """A process that calls callables; what it answers is a claim."""

    answers_by = "attnsweep.bench.caller_process:Card"
    """The class of what answers in that process: see caller_process.main."""
    _popen: Callable[..., Any] = subprocess.Popen

    def __init__(self, scratch: Path | None) -> None:
        """scratch: where a stranger's keeps caches and temporary files; None of one of ours."""
        env = dict(os.environ)
        if scratch is not None:
            env = {name: value for name, value in env.items() if name.startswith(_KEPT)}
            env |= dict.fromkeys(_PLACES, str(scratch))
        self._strange = scratch is not None
        # Files of this directory must not stand for modules of ours: it comes when one is imported.
        start = "import sys; sys.path = [*filter(None, sys.path)]; "
        start += "from attnsweep.bench.caller_process import main; main()"
        self.process = self._popen(
            [sys.executable, "-c", start, str(os.getpid()), self.answers_by],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        """It runs a stranger's code, or the judge's."""
        self._end = weakref.finalize(self, _end, self.process)
        self._number = 0

    def ask(self, do: str, **facts: Any) -> Any:
        """Have it do something. Raises Unavailable if it cannot, or answers nonsense."""
        self._number += 1
        asked, pipes = {"number": self._number, "do": do, **facts}, self.process
        with suppress(OSError):  # it has ended, which reading tells
            pipes.stdin.write(json.dumps(asked).encode() + b"\n")
            pipes.stdin.flush()
        line = pipes.stdout.readline(_LINE)
        if not line:
            raise Unavailable(f"its process died ({_ended(pipes)})")
        try:
            reply = json.loads(line)
            if reply["number"] == self._number:
                if (failed := reply.get("failed")) and not is_its_own(str(failed)):
                    raise JudgeError(str(failed)[:600])
                if why := failed or reply.get("refused"):
                    raise Unavailable(str(why)[:600])
                return reply["value"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        self.end()
        raise Unavailable("its process wrote what is no answer to the judge")

    def run(self, name: str | None, calls: int) -> float:
        """Microseconds of a chain, as the process has it."""
        claim = self.ask("run", name=name, calls=calls)
        if type(claim) is not float or not 0 < claim < math.inf:
            raise Unavailable("its process says no time")
        return claim

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a stranger's process and what it started go on meanwhile; else they stand still."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        own = self.process.pid
        for pid in (own, *process.started_by(own)) if self._strange else ():
            with suppress(OSError):
                os.kill(pid, what)

    def end(self) -> None:
        """Kill it and what it started."""
        self._end()


def _end(ended: subprocess.Popen[bytes]) -> None:
    process.end(ended)
    with suppress(OSError), ended:  # waits, and closes the pipes
        pass


@contextmanager
def _of_the_judge() -> Iterator[None]:
    """What cannot be done meanwhile is no callable's fault."""
    try:
        yield
    except Unavailable as error:
        raise JudgeError(str(error)) from error


def _ended(ended: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        code = ended.wait(5.0)
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return "it closed its pipe"


@dataclass
class _Entry:
    """A callable or a library, and what the chains showed of it."""

    caller: Caller
    held: bool
    rounds_scores: int
    gives_lse: bool = False
    proven: Proven | None = None
    calls: int = _FEW
    claims: list[float] = field(default_factory=list)
    """Microseconds of a call, by events."""
    apart: list[float] = field(default_factory=list)
    """How much longer a chain took by the judge's clock than by events."""
    judged: int = 0
    hard: DeviceCase | None = None
    """The timed problem on hard inputs, on which a chain of a callable's is judged at the end."""
    cases: list[Arena] = field(default_factory=list)
    """Memory of small cases, which its process has open until it ends."""


class StrictBench(Bench):
    """A Bench whose callables and libraries are called elsewhere, in chains; it has no others."""

    _transport, _buffer, _started = CudaIpc, Buffer, Caller
    clock = staticmethod(time.perf_counter)
    """The judge's, in seconds."""

    def __init__(self, *args: Any, strict: str, **options: Any) -> None:
        """strict: a directory for what called processes write, which the caller removes."""
        self._scratch, self._cache_dir = Path(strict), options.get("cache_dir")
        # They start while the problem is opened, which spares 3 to 4 s each.
        self._own = self._started(None)
        held = [name for name in options.get("baselines", ()) if name not in BACKENDS]
        self._waiting = {name: self._begun() for name in held[:_AHEAD]}
        super().__init__(*args, **options)
        if not oracle_of(self.problem).can_chain(self.problem):
            raise Unavailable("inputs of this problem cannot be drawn anew")
        nbytes = sum(map(self.problem.bytes_of, self.problem.outputs))
        self._slots = _power_of_two(max(2, min(_MOST, _OUTPUT_BYTES // nbytes)))
        self._arena, self._spans = self._shared(self._proof.timed, self._slots)
        self._given = self._proof.timed.regions_to_look_at(self._arena.buffers)
        self._sealed = [
            {one: self._buffer(self._arena[f"{one} 0"].nbytes) for one in sealed_of(self.problem)}
            for _ in range(self._slots)
        ]
        self._strict: dict[str, _Entry] = {}
        self._empty: dict[int, list[tuple[float, float]]] = {}
        """Times of chains of empty calls, by their length: microseconds by events, and by the
        judge's clock. None of those that followed a stranger's calls."""
        self._usual_us: dict[int, tuple[float, float]] = {}
        """Their medians before any stranger ran."""
        self._open(self._own)
        self._settings = self.session.settings()
        calls = self._slots
        while calls >= min(_FEW, self._slots):  # before any stranger runs
            self._own.ask("ready", name=None, calls=calls)
            for _ in range(_EMPTY_SAMPLES):
                self._empty.setdefault(calls, []).append(self._call_nothing(calls))
            claims, took = zip(*self._empty[calls], strict=True)
            self._usual_us[calls] = median(claims), median(took)
            calls //= 2
        self._usual_mhz = self.session.sm_mhz() or 0.0

    def _begun(self) -> Caller:
        """A process for a stranger, which has a place of its own for files."""
        return self._started(Path(tempfile.mkdtemp(dir=self._scratch)))

    def _open(self, caller: Caller) -> None:
        """Have a process open the judge's memory."""
        cache = str(self._cache_dir or default_cache_dir())
        facts = {"problem": self.problem.label, "handle": self._arena.handle}
        with _of_the_judge(), caller.awake():  # no stranger's code is imported yet
            caller.ask("open", **facts, spans=self._spans, cache=cache)

    # -- what crosses ----------------------------------------------------------------------------

    def _shared(self, of: DeviceCase, calls: int) -> tuple[Arena, list[Span]]:
        """Memory that a called process opens, with a case's inputs and outputs of NaN."""
        problem = of.case.problem
        spans = [(one, int(of.buffers[one].nbytes), POISON) for one in problem.inputs]
        for call in range(calls):
            for one in sealed_of(problem):
                spans.append((f"{one} {call}", problem.bytes_of(one), 0xA5))
        spans += [(one, 8 * calls, 0xA5) for one in ("contents", "digests")]
        arena = Arena(self._transport(), spans)
        self._give(arena, of, calls)
        return arena, spans

    def _give(self, arena: Arena, of: DeviceCase, calls: int) -> None:
        """Copy the inputs as they are to shared memory, where outputs become NaN."""
        self.session.synchronize()
        for name in of.case.problem.inputs:
            arena[name].copy_from(of.buffers[name])
        self.session.settle()
        with self.session.stream:
            for call in range(calls):
                for one in sealed_of(of.case.problem):
                    arena[f"{one} {call}"].fill(POISON)
        self.session.synchronize()

    def _seal(self, calls: int) -> None:
        """Copy what calls wrote to memory of this process alone."""
        for call, sealed in enumerate(self._sealed[:calls]):
            for one, to in sealed.items():
                to.copy_from(self._arena[f"{one} {call}"])
        self.session.settle()

    def _call_once(self, name: str, entry: _Entry) -> None:
        """Make one call on the current inputs, and seal its output."""
        self._give(self._arena, self._proof.timed, 1)
        with entry.caller.awake():
            entry.gives_lse = entry.caller.ask("call", name=name) is True
        self._seal(1)

    def _chain(
        self, caller: Caller, name: str | None, calls: int, of: DeviceCase | None = None
    ) -> tuple[float, float, int]:
        """A chain of calls: its microseconds by events, by the judge's clock, and its number.

        of: the case of its inputs before they are drawn anew (default: the timed one).
        """
        of = of or self._proof.timed
        with self.session.stream:
            of.go_to(0)
        self._give(self._arena, of, calls)
        self.session.reset_l2()
        first = secrets.randbits(64) or 1
        contents = np.zeros(self._slots, np.uint64)
        contents[0] = first
        with caller.awake():
            begin = self.clock()
            self._arena["contents"].upload(contents)
            self.session.settle()  # a copy from the host may return before it is on a busy card
            claim = caller.run(name, calls)
            took_us = (self.clock() - begin) * 1e6
        return claim, took_us, first

    def _call_nothing(self, calls: int) -> tuple[float, float]:
        """Microseconds of a chain that calls nothing, by events and by the judge's clock."""
        with _of_the_judge():
            return self._chain(self._own, None, calls)[:2]

    # -- what a Bench does -----------------------------------------------------------------------

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        """See Bench; a callable gets a process of its own, and all libraries have one."""
        self._state.imports.end()
        held = name not in BACKENDS
        self.session.release()
        caller = self._own
        if held:
            caller = self._waiting.pop(name) if name in self._waiting else self._begun()
        entry = _Entry(caller, held, backend_of(name).rounds_scores)
        try:
            if held:
                self._open(caller)
            # It may tune on other inputs than those that its first judged call has: what memory
            # still holds of an earlier call is not right then.
            with self.session.stream:
                self._proof.timed.redraw()
            self._give(self._arena, self._proof.timed, 1)
            with caller.awake():
                issued = caller.ask("add", name=name)
            self._call_once(name, entry)
            accuracy, entry.proven = self._prove_first(name, entry)
            if held and not self._is_shown(name, accuracy):
                self._try_cases(name, entry)
                entry.hard = self._proof.hard(entry.rounds_scores)
            self._begin_chains(name, entry)
        except BaseException:
            if held:
                caller.end()
            self._renew()
            raise
        self._strict[name] = entry
        return accuracy, None if issued is None else str(issued)[:400]

    def _prove_first(self, name: str, entry: _Entry) -> tuple[Accuracy, Proven]:
        """Judge a call on the inputs as they were made."""

        def collect(copy: int, at: Mapping[str, Buffer], *, which: int | None = None) -> int:
            for one, to in at.items():
                to.copy_from(self._sealed[0][one], self.session.stream)
            return 0

        call = SimpleNamespace(enqueue=lambda copy=0: self._call_once(name, entry))  # noqa: ARG005
        lse = self._sealed[0]["lse"] if entry.gives_lse else None
        how = (call, collect, entry.rounds_scores)
        return self._proof.of_baseline(*how, held=entry.held, shown=name in self._shown, lse=lse)

    def _try_cases(self, name: str, entry: _Entry) -> None:
        """Judge a call on each small and hard case that the callable says it supports.

        They are taken in random order, for _CASES_S: it may compile and tune for each.
        """
        end, called = self.clock() + _CASES_S, 0
        for fixture in secrets.SystemRandom().sample(self._proof.small, len(self._proof.small)):
            arena, spans = self._shared(fixture, 1)
            facts = {"problem": fixture.case.problem.label, "handle": arena.handle}
            entry.cases.append(arena)
            with entry.caller.awake():
                if entry.caller.ask("case", name=name, spans=spans, **facts) is not True:
                    continue
            for one in fixture.outputs:
                fixture.buffers[one].copy_from(arena[f"{one} 0"])
            self.session.settle()
            self._proof.of_small(fixture, entry.rounds_scores)
            called += 1
            if called >= _LEAST_CASES and self.clock() > end:
                break

    def _begin_chains(self, name: str, entry: _Entry) -> None:
        """Choose how many calls its chains have, so that one takes about _CHAIN_US."""
        few = min(_FEW, self._slots)

        def try_chain(calls: int) -> float:
            entry.calls = calls
            with entry.caller.awake():
                entry.caller.ask("ready", name=name, calls=calls)
            return self._chained_us(name, entry)

        fit = int(_CHAIN_US / max(1.0, try_chain(few)))
        try_chain(_power_of_two(max(few, min(self._slots, fit))))
        entry.claims, entry.apart = [], []

    def replay(self, name: str, kind: str) -> float:
        """See Bench. kind: `warm`, as inputs are that were just written."""
        if kind != "warm":
            raise ValueError(f"a chain has no {kind} time")
        return self._chained_us(name, self._strict[name])

    def _chained_us(self, name: str, entry: _Entry) -> float:
        """Microseconds of a call in a chain, all of whose outputs are then judged."""
        calls = entry.calls
        claim, took = self._judged_chain(name, entry, self._proof.timed)
        nothing, (usual, by_clock) = [self._call_nothing(calls)], self._usual_us[calls]
        while entry.held and nothing[-1][1] > _BUSY * by_clock + _BUSY_US:
            if len(nothing) == _BUSY_TRIES:
                raise Unconfirmed(
                    f"the card is busy after its calls: a chain that calls nothing takes "
                    f"{min(took for _, took in nothing):.4g} µs, and took "
                    f"{by_clock:.4g} before it was there"
                )
            nothing.append(self._call_nothing(calls))
        if not entry.held:
            self._empty[calls] += nothing
        slower = max(1.0, self._usual_mhz / (self.session.sm_mhz() or math.inf))
        us = (claim - min(min(nothing)[0], _DRIFT * slower * usual)) / calls
        entry.claims.append(us)
        entry.apart.append(took - claim)
        entry.judged += calls
        return max(us, 1e-3)

    def _judged_chain(self, name: str, entry: _Entry, of: DeviceCase) -> tuple[float, float]:
        """A chain on inputs of a case whose outputs are judged, and its times as of _chain."""
        calls = entry.calls
        claim, took, first = self._chain(entry.caller, name, calls, of)
        self._seal(calls)
        written = (*self.problem.outputs, *(("lse",) if entry.gives_lse else ()))
        outs = [{one: sealed[one] for one in written} for sealed in self._sealed[:calls]]
        assert entry.proven is not None
        proven = replace(entry.proven, fixture=of)
        try:
            self._proof.of_chain(proven, first, outs, self._given, whole=entry.held)
        except WrongResult as error:
            self._renew()
            if "lse" in self.problem.inputs:
                raise WrongResult(f"{error.detail}; {_AS_GIVEN}", error.accuracy) from error
            raise
        return claim, took

    def _renew(self) -> None:
        """Renew the guards of shared inputs: what follows is not to be blamed for them."""
        with self.session.stream:
            for name in self.problem.inputs:
                self._arena[name].poison()
        self.session.synchronize()

    def hidden_us(self, name: str) -> tuple[float, float]:
        """How much longer a call takes by the judge's clock than by events, and what is allowed."""
        entry = self._strict[name]
        apart = [took - claim for claim, took in self._empty[entry.calls]]
        usual = median(apart)
        off = median(abs(one - usual) for one in apart)
        allowed = _LEAST_US + _SHARE * abs(median(entry.claims)) + _STEADY * off / entry.calls
        return (median(entry.apart) - usual) / entry.calls, allowed

    def confirm(self, name: str, longest_us: float) -> int:  # noqa: ARG002
        """Check a callable's times; returns the number of its calls that were judged.

        Raises Unconfirmed if its events say less than the judge's clock does.
        """
        entry = self._strict[name]
        if not entry.held:
            return 0
        while len(entry.claims) < _LEAST_SAMPLES:  # in a new process, nothing was timed
            self._chained_us(name, entry)
        if entry.hard is not None:
            self._judged_chain(name, entry, entry.hard)
        hidden, allowed = self.hidden_us(name)
        if hidden > allowed:
            says = median(entry.claims)
            raise Unconfirmed(
                f"its events say {says:.4g} µs a call, and the judge's clock {says + hidden:.4g}: "
                f"they may be {allowed:.2g} apart"
            )
        for setting, now in self.session.settings().items():
            if now != (before := self._settings.get(setting)):
                raise Unconfirmed(f"the card's {setting} is {now}, and was {before}")
        return entry.judged + (entry.calls if entry.hard else 0)

    def trusted_us(self, name: str) -> float | None:
        """Microseconds of a call by the judge's clock, if it was timed in this process."""
        timed = self._strict[name].claims
        return median(timed) + self.hidden_us(name)[0] if timed else None

    def conditions(self) -> dict[str, Any]:
        """See Bench; processes of the judge are no others."""
        found = super().conditions()
        if (others := found.get("other_processes")) is not None:
            strangers = sum(entry.held for entry in self._strict.values()) + len(self._waiting)
            found["other_processes"] = max(0, others - 1 - strangers)
        return found


def _power_of_two(most: int) -> int:
    """The largest one that is not larger."""
    return 1 << most.bit_length() - 1

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from attnsweep.baselines.backend import Unavailable, Unconfirmed
from attnsweep.baselines.registry import BACKENDS, backend_of
from attnsweep.bench.caller_process import sealed_of
from attnsweep.bench.gpu import is_its_own
from attnsweep.bench.problem import OpenProblem
from attnsweep.compile.nvrtc import default_cache_dir
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.device import process
from attnsweep.device.buffers import POISON, Buffer
from attnsweep.device.cuda import CudaSession
from attnsweep.device.shared import Arena, CudaIpc, Span
from attnsweep.verify.calls import Proven
from attnsweep.verify.device_case import DeviceCase, WrongResult
from attnsweep.verify.oracle import oracle_of

# Calls of a chain: a power of two, at most this many, whose outputs take at most so much memory
# twice, and which take about so long, but at least _FEW. What the clock says beside the calls is
# divided by their number: it was 224 µs of a chain more than of one without calls (H200).
_MOST, _FEW, _OUTPUT_BYTES, _CHAIN_US = 256, 4, 1 << 30, 20_000.0
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
    """The judge failed in its own code, which says nothing of what it judged."""


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
        """Ask the called process to do something, and return its answer.

        Raises Unavailable if it cannot, or answers nonsense.
        """
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
        """Let the process, and what a stranger's has started, go on meanwhile.

        They stand still otherwise; the judge's does, too, since one that was stopped answers later.
        """
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        own = self.process.pid
        for pid in (own, *(process.started_by(own) if self._strange else ())):
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
class ChainedEntry:
    """A callable or a library, and what the chains showed of it."""

    caller: Caller
    strange: bool
    """Whether it is a callable, whose code is a stranger's."""
    rounds_scores: int
    gives_lse: bool = False
    proven: Proven | None = None
    calls: int = _FEW
    claims: list[float] = field(default_factory=list)
    """Microseconds of a call, by events."""
    apart: list[float] = field(default_factory=list)
    """How much longer a chain took by the judge's clock than by events."""
    compared: int = 0
    hard: DeviceCase | None = None
    """The timed problem on hard inputs, on which a chain of a callable's is judged at the end."""
    cases: list[SharedCase] = field(default_factory=list)
    """Small cases, which its process has open until it ends."""


class SharedCase:
    """A case's inputs, and the outputs of calls on it, in memory that a called process opens."""

    def __init__(self, session: CudaSession, transport: Any, case: DeviceCase, calls: int) -> None:
        self._session, self._problem = session, case.case.problem
        problem = self._problem
        spans: list[Span] = [(one, int(case.buffers[one].nbytes), POISON) for one in problem.inputs]
        for call in range(calls):
            for one in sealed_of(problem):
                spans.append((f"{one} {call}", problem.bytes_of(one), 0xA5))
        spans += [(one, 8 * calls, 0xA5) for one in ("contents", "digests")]
        self.memory = Arena(transport, spans)
        self.facts = {"problem": problem.label, "handle": self.memory.handle, "spans": spans}
        """What a process is told to open it."""
        self.give(case, calls)

    def give(self, case: DeviceCase, calls: int) -> None:
        """Copy the inputs of a case as they are; outputs become NaN."""
        self._session.synchronize()
        for name in self._problem.inputs:
            self.memory[name].copy_from(case.buffers[name])
        self._session.settle()
        with self._session.stream:
            for call in range(calls):
                for output in self.outputs(call).values():
                    output.fill(POISON)
        self._session.synchronize()

    def outputs(self, call: int) -> dict[str, Buffer]:
        """The outputs of a call; what it did not write is NaN."""
        return {one: self.memory[f"{one} {call}"] for one in sealed_of(self._problem)}

    def renew_guards(self) -> None:
        """Renew the guards of inputs: what follows is not to be blamed for them."""
        with self._session.stream:
            for name in self._problem.inputs:
                self.memory[name].poison()
        self._session.synchronize()


class Chains:
    """Chains of calls on the timed problem, whose outputs the judge seals and compares."""

    transport, buffer = CudaIpc, Buffer
    clock = staticmethod(time.perf_counter)
    """The judge's, in seconds."""

    def __init__(self, opened: OpenProblem, own: Caller, cache_dir: Path | None) -> None:
        """own: the judge's process, which calls nothing."""
        self._session, self._proof, self._own = opened.session, opened.proof, own
        self._problem, timed = opened.problem, opened.proof.timed
        self._cache = str(cache_dir or default_cache_dir())
        nbytes = sum(map(self._problem.bytes_of, self._problem.outputs))
        self.most = _power_of_two(max(2, min(_MOST, _OUTPUT_BYTES // nbytes)))
        self.shared = self.share(timed, self.most)
        self._given = timed.regions_to_look_at(self.shared.memory.buffers)
        self.sealed = [
            {one: self.buffer(output.nbytes) for one, output in self.shared.outputs(0).items()}
            for _ in range(self.most)
        ]
        """The outputs of a chain's calls, in memory of this process alone."""

    def share(self, case: DeviceCase, calls: int) -> SharedCase:
        """Memory for `calls` calls on a case, which a called process can open."""
        return SharedCase(self._session, self.transport(), case, calls)

    def open(self, caller: Caller) -> None:
        """Have a process open the judge's memory."""
        with _of_the_judge(), caller.awake():  # no stranger's code is imported yet
            caller.ask("open", **self.shared.facts, cache=self._cache)

    def once(self, name: str, entry: ChainedEntry) -> None:
        """Make one call on the current inputs, and seal its outputs."""
        self.shared.give(self._proof.timed, 1)
        with entry.caller.awake():
            entry.gives_lse = entry.caller.ask("call", name=name) is True
        self._seal(1)

    def _seal(self, calls: int) -> None:
        for call, sealed in enumerate(self.sealed[:calls]):
            for one, output in self.shared.outputs(call).items():
                sealed[one].copy_from(output)
        self._session.settle()

    def run(
        self, caller: Caller, name: str | None, calls: int, of: DeviceCase | None = None
    ) -> tuple[float, float, int]:
        """A chain of calls: its microseconds by events, by the judge's clock, and its number.

        of: the case of its inputs before they are drawn anew (default: the timed one).
        """
        of = of or self._proof.timed
        with self._session.stream:
            of.go_to(0)
        self.shared.give(of, calls)
        self._session.reset_l2()
        first = secrets.randbits(64) or 1
        contents = np.zeros(self.most, np.uint64)
        contents[0] = first
        with caller.awake():
            begin = self.clock()
            self.shared.memory["contents"].upload(contents)
            self._session.settle()  # a copy from the host may return before it is on a busy card
            claim = caller.run(name, calls)
            took_us = (self.clock() - begin) * 1e6
        return claim, took_us, first

    def nothing(self, calls: int) -> tuple[float, float]:
        """Microseconds of a chain that calls nothing, by events and by the judge's clock."""
        with _of_the_judge():
            return self.run(self._own, None, calls)[:2]

    def judged(self, name: str, entry: ChainedEntry, of: DeviceCase) -> tuple[float, float]:
        """A chain on inputs of a case whose outputs are compared, and its times."""
        claim, took, first = self.run(entry.caller, name, entry.calls, of)
        self._seal(entry.calls)
        written = (*self._problem.outputs, *(("lse",) if entry.gives_lse else ()))
        outs = [{one: sealed[one] for one in written} for sealed in self.sealed[: entry.calls]]
        assert entry.proven is not None
        proven = replace(entry.proven, device_case=of)
        try:
            self._proof.of_chain(proven, first, outs, self._given, whole=entry.strange)
        except WrongResult as error:
            self.shared.renew_guards()
            if "lse" in self._problem.inputs:
                raise WrongResult(f"{error.detail}; {_AS_GIVEN}", error.accuracy) from error
            raise
        return claim, took


class EmptyChains:
    """Times of chains that call nothing, by length: by events, and by the judge's clock."""

    def __init__(self) -> None:
        self.usual_us: dict[int, tuple[float, float]] = {}
        """The medians before any stranger ran."""
        self._times: dict[int, list[tuple[float, float]]] = {}

    def begin(self, calls: int, times: Sequence[tuple[float, float]]) -> None:
        """Add what they take before any stranger runs."""
        claims, took = zip(*times, strict=True)
        self.usual_us[calls] = median(claims), median(took)
        self.add(calls, times)

    def add(self, calls: int, times: Sequence[tuple[float, float]]) -> None:
        """Add what they take after no stranger's calls."""
        self._times.setdefault(calls, []).extend(times)

    def is_busy(self, calls: int, times: tuple[float, float]) -> bool:
        """Whether an empty chain took so long that something else must have used the card."""
        return times[1] > _BUSY * self.usual_us[calls][1] + _BUSY_US

    def taken_off_us(self, calls: int, claim: float, slower: float) -> float:
        """Microseconds to take off a chain's time: what an empty chain claims, up to a limit.

        slower: how many times slower the card's clock is than before any stranger ran.
        """
        return min(claim, _DRIFT * slower * self.usual_us[calls][0])

    def hidden_us(self, entry: ChainedEntry) -> tuple[float, float]:
        """How much longer a call takes by the judge's clock than by events, and what is allowed."""
        apart = [took - claim for claim, took in self._times[entry.calls]]
        usual = median(apart)
        off = median(abs(one - usual) for one in apart)
        allowed = _LEAST_US + _SHARE * abs(median(entry.claims)) + _STEADY * off / entry.calls
        return (median(entry.apart) - usual) / entry.calls, allowed


class StrictBench:
    """One problem whose callables and libraries are called elsewhere, in chains."""

    _started, _chains_of = Caller, Chains

    def __init__(
        self,
        problem: Problem,
        *,
        strict: str,
        replay_us: float,  # noqa: ARG002
        **options: Any,
    ) -> None:
        """strict: a directory for what called processes write. options: of OpenProblem."""
        self._scratch = Path(strict)
        # They start while the problem is opened, which spares 3 to 4 s each.
        own = self._started(None)
        strange = [name for name in options.get("baselines", ()) if name not in BACKENDS]
        self._waiting = {name: self._begun() for name in strange[:_AHEAD]}
        self._opened = opened = OpenProblem(problem, **options)
        self.session, self._proof = opened.session, opened.proof
        if not oracle_of(problem).can_chain(problem):
            raise Unavailable("inputs of this problem cannot be drawn anew")
        self._chains = chains = self._chains_of(opened, own, options.get("cache_dir"))
        self._own, self._empty = own, EmptyChains()
        self._entries: dict[str, ChainedEntry] = {}
        chains.open(own)
        self._settings = self.session.settings()
        calls = chains.most
        while calls >= min(_FEW, chains.most):  # before any stranger runs
            with own.awake():
                own.ask("ready", name=None, calls=calls)
            self._empty.begin(calls, [chains.nothing(calls) for _ in range(_EMPTY_SAMPLES)])
            calls //= 2
        self._usual_mhz = self.session.sm_mhz() or 0.0

    def _begun(self) -> Caller:
        """A process for a stranger, which has a place of its own for files."""
        return self._started(Path(tempfile.mkdtemp(dir=self._scratch)))

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        """See Gpu; a callable gets a process of its own, and all libraries have one."""
        self._opened.state.imports.end()
        strange = name not in BACKENDS
        self.session.release()
        caller = self._own
        if strange:
            caller = self._waiting.pop(name) if name in self._waiting else self._begun()
        entry = ChainedEntry(caller, strange, backend_of(name).rounds_scores)
        try:
            if strange:
                self._chains.open(caller)
            # It may tune on other inputs than those that its first judged call has: what memory
            # still holds of an earlier call is not right then.
            with self.session.stream:
                self._proof.timed.redraw()
            self._chains.shared.give(self._proof.timed, 1)
            with caller.awake():
                issued = caller.ask("add", name=name)
            self._chains.once(name, entry)
            accuracy, entry.proven = self._prove_first(name, entry)
            if strange and not self._opened.shows(name, accuracy):
                self._try_cases(name, entry)
                entry.hard = self._proof.hard(entry.rounds_scores)
            self._begin_chains(name, entry)
        except BaseException:
            if strange:
                caller.end()
            self._chains.shared.renew_guards()
            raise
        self._entries[name] = entry
        return accuracy, None if issued is None else str(issued)[:400]

    def _prove_first(self, name: str, entry: ChainedEntry) -> tuple[Accuracy, Proven]:
        """Judge a call on the inputs as they were made."""
        sealed = self._chains.sealed[0]

        def collect(copy: int, at: Mapping[str, Buffer], *, which: int | None = None) -> int:
            for one, to in at.items():
                to.copy_from(sealed[one], self.session.stream)
            return 0

        call = SimpleNamespace(enqueue=lambda copy=0: self._chains.once(name, entry))  # noqa: ARG005
        lse = sealed["lse"] if entry.gives_lse else None
        how = (call, collect, entry.rounds_scores)
        shown = name in self._opened.shown
        return self._proof.of_baseline(*how, held=entry.strange, shown=shown, lse=lse)

    def _try_cases(self, name: str, entry: ChainedEntry) -> None:
        """Judge a call on each small and hard case that the callable says it supports.

        They are taken in random order, for _CASES_S: it may compile and tune for each.
        """
        clock = self._chains.clock
        end, called = clock() + _CASES_S, 0
        for case in secrets.SystemRandom().sample(self._proof.small, len(self._proof.small)):
            shared = self._chains.share(case, 1)
            entry.cases.append(shared)
            with entry.caller.awake():
                if entry.caller.ask("case", name=name, **shared.facts) is not True:
                    continue
            for one in case.outputs:
                case.buffers[one].copy_from(shared.outputs(0)[one])
            self.session.settle()
            self._proof.of_small(case, entry.rounds_scores)
            called += 1
            if called >= _LEAST_CASES and clock() > end:
                break

    def _begin_chains(self, name: str, entry: ChainedEntry) -> None:
        """Choose how many calls its chains have, so that one takes about _CHAIN_US."""
        most = self._chains.most
        few = min(_FEW, most)

        def try_chain(calls: int) -> float:
            entry.calls = calls
            with entry.caller.awake():
                entry.caller.ask("ready", name=name, calls=calls)
            return self._chained_us(name, entry)

        fit = int(_CHAIN_US / max(1.0, try_chain(few)))
        try_chain(_power_of_two(max(few, min(most, fit))))
        entry.claims, entry.apart = [], []

    def replay(self, name: str, kind: str) -> float:
        """Microseconds of a call, by one chain. kind: only `warm`, as inputs were just written."""
        if kind != "warm":
            raise ValueError(f"a chain has no {kind} time")
        return self._chained_us(name, self._entries[name])

    def _chained_us(self, name: str, entry: ChainedEntry) -> float:
        """Microseconds of a call in a chain, all of whose outputs are then judged."""
        calls, empty = entry.calls, self._empty
        claim, took = self._chains.judged(name, entry, self._proof.timed)
        nothing = [self._chains.nothing(calls)]
        while entry.strange and empty.is_busy(calls, nothing[-1]):
            if len(nothing) == _BUSY_TRIES:
                raise Unconfirmed(
                    f"the card is busy after its calls: a chain that calls nothing takes "
                    f"{min(took for _, took in nothing):.4g} µs, and took "
                    f"{empty.usual_us[calls][1]:.4g} before it was there"
                )
            nothing.append(self._chains.nothing(calls))
        if not entry.strange:
            empty.add(calls, nothing)
        slower = max(1.0, self._usual_mhz / (self.session.sm_mhz() or math.inf))
        us = (claim - empty.taken_off_us(calls, min(nothing)[0], slower)) / calls
        entry.claims.append(us)
        entry.apart.append(took - claim)
        entry.compared += calls
        return max(us, 1e-3)

    def confirm(self, name: str, longest_us: float) -> int:  # noqa: ARG002
        """Check a callable's times; returns the number of its calls that were judged.

        Raises Unconfirmed if its events say less than the judge's clock does.
        """
        entry = self._entries[name]
        if not entry.strange:
            return 0
        while len(entry.claims) < _LEAST_SAMPLES:  # in a new process, nothing was timed
            self._chained_us(name, entry)
        if entry.hard is not None:
            self._chains.judged(name, entry, entry.hard)
        hidden, allowed = self._empty.hidden_us(entry)
        if hidden > allowed:
            says = median(entry.claims)
            raise Unconfirmed(
                f"its events say {says:.4g} µs a call, and the judge's clock {says + hidden:.4g}: "
                f"they may be {allowed:.2g} apart"
            )
        for setting, now in self.session.settings().items():
            if now != (before := self._settings.get(setting)):
                raise Unconfirmed(f"the card's {setting} is {now}, and was {before}")
        return entry.compared + (entry.calls if entry.hard else 0)

    def trusted_us(self, name: str) -> float | None:
        """Microseconds of a call by the judge's clock, if it was timed in this process."""
        entry = self._entries[name]
        return median(entry.claims) + self._empty.hidden_us(entry)[0] if entry.claims else None

    def conditions(self) -> dict[str, Any]:
        """Clocks, power, temperature and other processes; those of the judge are no others."""
        found = self.session.conditions()
        if (others := found.get("other_processes")) is not None:
            strangers = sum(entry.strange for entry in self._entries.values()) + len(self._waiting)
            found["other_processes"] = max(0, others - 1 - strangers)
        return found


def _power_of_two(most: int) -> int:
    """The largest one that is not larger."""
    return 1 << most.bit_length() - 1

"""Check and time candidates and baselines of one problem on one GPU, inside the worker process.

A time is the device time of one call: CUDA events enclose the replay of a graph of back-to-back
calls. The graph is long enough to dwarf the events' resolution (0.5 us), and follows an untimed
replay, so that no launch latency or cold cache is in the time. docs/measuring.md has all of it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.registry import BACKENDS, backend_of
from attnsweep.bench.process_state import ProcessState
from attnsweep.compile.launches import Candidate, FirstTimes, LaunchPlan
from attnsweep.core.length import is_long
from attnsweep.core.problem import DTYPE_BYTES, Problem, ceil_div
from attnsweep.core.timings import step
from attnsweep.core.trial import Accuracy
from attnsweep.device import energy
from attnsweep.device.bound_call import BoundCall
from attnsweep.device.buffers import Buffer
from attnsweep.device.cuda import CudaSession, cuda_errors
from attnsweep.device.cuda_graph import lasting
from attnsweep.device.energy import Stretch
from attnsweep.verify.calls import Proven
from attnsweep.verify.device_case import WrongResult
from attnsweep.verify.verifier import Digests, Verifier

# Before a cold call, at least this many L2 sizes of traffic follow the last use of its inputs.
_COLD_L2_SIZES = 3
_SCREEN_US = 300.0
_MOST_CALLS = 2000  # of a graph
# Replays of one graph that are further apart than this are taken again, this often at most; then
# the least counts, because a first time that is too long keeps the best candidate out of the race.
_SCREEN_APART = 1.5
_SCREEN_TRIES = 5
_EAGER_CALLS = 20
_EAGER_DEVICE_US = 2_000.0
# Each side of a pair makes at least this many calls, but takes at most about this long. Calls
# differ from one to the next, so the error falls with the root of their number: at the power cap (a
# call of 560 µs), 5 of 100 pairs of 2 ms are more than 1.1 % off, but of 54 ms only 0.30 %. Medians
# and trimmed means over a pair's turns are further off.
_PAIR_CALLS = 160
_PAIR_US = 90_000.0
# Calls that are made one by one and compared, half of them on each set of inputs, and their time.
# A race that meets one call in a thousand stays unseen in 7,000 with a probability of 0.1 %.
_TRIAL_REPEATS, _TRIAL_REPEATS_US = 8, 1_000.0
_REPEATS = 7_000
_CALLABLE_REPEATS = 64  # of a callable, whose calls the host issues
# A callable's call on other inputs may take so much longer than one in a series on the same, beside
# what reading them from device memory costs.
_REUSE, _REUSE_US, _ALONE_TRIES = 1.5, 2.0, 5
# So often, with graphs made anew: in two of 967 judgements on an H100 FlexAttention took 91 and 247
# µs in such a graph, and 27 in others.
_REUSE_GRAPHS = 3
_LONG_CONFIRM_US = 20_000.0  # an entry of long calls that is to take less makes none


class TimedCall(Protocol):
    """Anything that can be timed: a pipeline of ours, or a baseline."""

    stage_names: tuple[str, ...]
    once_names: tuple[str, ...]
    """Stages that all calls have in common: refresh issues them, and capture leaves them out."""

    def enqueue(self, copy: int = 0, stage: str | None = None) -> None:
        """Issue one call eagerly, or one stage of it; does not wait."""

    def capture(
        self, calls: int, *, rotate: bool = False, stage: str | None = None
    ) -> Callable[[], None]:
        """A function that replays a graph of `calls` back-to-back calls."""

    def refresh(self, copies: int | None = None) -> None:
        """Take up inputs whose contents have changed, of the first copies."""


@dataclass
class _Entry:
    """An entry: its call, and each graph captured so far with the number of calls in it."""

    call: TimedCall
    proven: Proven | None = None
    graphs: dict[str, tuple[Callable[[], None], int]] = field(default_factory=dict)
    warm_us: float = 0.0
    workspaces: frozenset[tuple[str, int]] = frozenset()
    candidate: Candidate | None = None
    held: bool = False
    """Whether it is a callable of the user's, whose errors the limits decide."""


def _issue(call: TimedCall, stage: str | None = None) -> None:
    """Issue a call as a graph has it: without what is copied for one of another order."""
    if isinstance(call, BoundCall):
        call.enqueue(0, stage, turned=False)
    else:
        call.enqueue(0, stage)


class Bench:
    """One problem on this process's GPU. Its inputs depend on `seed` alone."""

    _long = False
    _shown: Collection[str] = ()

    def __init__(
        self,
        problem: Problem,
        *,
        replay_us: float,
        seed: int,
        then: Problem | None = None,
        baselines: Sequence[str] = (),
        rounds_scores: Collection[int] = (),
        shown: Collection[str] = (),
        cache_dir: Path | None = None,
        state: ProcessState | None = None,
    ) -> None:
        """state: of the process, which outlasts the problem."""
        self._shown = shown
        self._state = state = state or ProcessState()
        state.triton.begin(baselines, problem)
        self.session = CudaSession()
        self.problem = problem
        self._replay_us = replay_us
        self._long = is_long(problem)  # nothing before a call matters beside it
        rounded = {*rounds_scores, *(backend_of(name).rounds_scores for name in baselines)}
        self._proof = Verifier(
            *(problem, seed, self.session, cache_dir, then, rounded), state.references
        )
        self._workspaces: dict[tuple[str, int], Buffer] = {}
        self._right: dict[str, Digests] = {}
        self._cold_copies: list[dict[str, Buffer]] | None = None
        self._entries: dict[str, _Entry] = {}
        self._l2_filler: Buffer | None = None
        self._launch_times: dict[str, float] = {}
        self._launched = 0
        # Calls of replays that were judged; a call that no entry has is freed with its memory.
        self._judged = WeakKeyDictionary[TimedCall, int]()

    def card(self) -> str | None:
        """The card's UUID, hashed, if NVML tells it."""
        found: str | None = self.session.identity().get("uuid")
        return found

    # -- checking ---------------------------------------------------------------------------

    def trial(self, candidate: Candidate) -> tuple[Accuracy, FirstTimes]:
        """Check a candidate on every case, then briefly time it, its stages and its empty launches.

        Returns its worst Accuracy and its first times. The output of each timed replay, and of
        calls one by one, must equal the checked one bit for bit: that reveals races that one call
        does not, and some races whose error stays within the limit. Raises WrongResult, or a CUDA
        error if the candidate cannot launch or faults.
        """
        self._free_others(*candidate.checks, candidate.timed)
        call = self._pipeline(candidate.timed, [self._timed])
        accuracy, proven = self._prove(candidate, call, small=True)
        self._right[repr(candidate.timed)] = proven.digests, proven.lse_digests
        names = call.stage_names if len(call.stage_names) > 1 else ()
        time_us = self._screen(call, proven=proven)
        sm_mhz = self.session.sm_mhz()
        many = (_TRIAL_REPEATS, _TRIAL_REPEATS_US, time_us)
        calls = 1 if self._long else self._proof.repeat(proven, *many)  # 1: the timed one
        first = FirstTimes(
            time_us,
            {name: self._screen(call, name) for name in names},
            self._launch_us(candidate.empty),
            sm_mhz,
            {name: self._screen(call, name) for name in call.once_names},
        )
        return accuracy.model_copy(update={"calls": calls}), first

    @property
    def _timed(self) -> dict[str, Buffer]:
        return self._proof.timed.buffers

    def _prove(
        self, candidate: Candidate, call: BoundCall, *, small: bool
    ) -> tuple[Accuracy, Proven]:
        """Check a candidate that is bound to the inputs."""
        return self._proof.of_candidate(
            candidate, call, self._pipeline, self._workspaces, small=small
        )

    def confirm(self, name: str, longest_us: float) -> int:
        """Check an entry again after its rounds; returns the number of calls compared.

        longest_us: about what its calls take on the timed problem, and then on short turns, unless
        the very launches made all of theirs before in this process: problems of one head_dim, dtype
        and mask have the same short turns. Raises WrongResult.
        """
        entry = self._entries[name]
        briefly = self._long and longest_us < min(entry.warm_us, _LONG_CONFIRM_US)
        if briefly or entry.proven is None:
            return 0
        if entry.candidate is None:
            if not entry.held:
                return 0
            if not self._long and "warm" not in entry.graphs:  # in a new process
                self.replay(name, "warm")
            self._refuse_reuse(entry)
            alone = self._proof.repeat(entry.proven, _CALLABLE_REPEATS, longest_us)
            if not self._long and name not in self._shown:
                self._proof.on_hard(entry.proven, entry.graphs["warm"][0])
            return alone + self._judged.pop(entry.call, 0)
        most, each_us = (2, entry.warm_us) if self._long else (_REPEATS, None)
        calls = self._proof.repeat(entry.proven, most, longest_us, each_us)
        if not self._long:
            calls += self._proof.on_hard(entry.proven, entry.call.enqueue)
        launches = repr(entry.candidate.turns)
        if launches in self._state.right_on_short:
            return calls
        try:
            turns = self._proof.of_turns(entry.candidate, self._pipeline, self._workspaces)
            if turns is not None:
                made = self._proof.repeat(turns, _REPEATS, longest_us)
                calls += made
                if made >= _REPEATS:
                    self._state.right_on_short.add(launches)
        except WrongResult as error:
            detail = f"right in all other cases, but not in many short turns: {error.detail}"
            raise WrongResult(detail, error.accuracy) from error
        finally:
            self._free_others()
        return calls

    def _refuse_reuse(self, entry: _Entry) -> None:
        """Raise Unavailable if a callable's calls on equal inputs take less than they should.

        All calls of a warm replay have the same inputs, so that the first could compute for all. A
        second call on inputs of its own must compute: it takes what two take, less one.
        """
        call = entry.call
        if self._long or not isinstance(call, prepare.BoundBaseline) or call.issued is not None:
            return
        nbytes = sum(buffer.nbytes for buffer in self._timed.values())
        cold_us = nbytes / self.session.gpu.memory_bytes_per_second * 1e6
        for _ in range(_REUSE_GRAPHS):
            least = [math.inf, math.inf]
            for calls in (1, 2):
                replay = call.capture(calls, rotate=True)
                for _ in range(_ALONE_TRIES):
                    # The same copies whatever the number of calls, so that no cache favours one.
                    us = calls * self._sample(call, replay, calls, None, cold=True)
                    least[calls - 1] = min(least[calls - 1], us)
            own_us = least[1] - least[0]
            if own_us <= _REUSE * entry.warm_us + _REUSE_US + cold_us:
                return
        raise Unavailable(
            f"a call on inputs of its own takes {own_us:.4g} µs, and {entry.warm_us:.4g} µs "
            "where all calls have the same inputs: they use again what one of them computed"
        )

    def _launch_us(self, launches: LaunchPlan | None) -> float | None:
        """Time of launches with an empty kernel, measured once for all equal launches."""
        if launches is None:
            return None
        alike = repr((launches.stages, launches.streams, launches.eager))
        if alike not in self._launch_times:
            self._launch_times[alike] = self._screen(self._pipeline(launches, [{}]))
        return self._launch_times[alike]

    def _pipeline(self, launches: LaunchPlan, copies: Sequence[Mapping[str, Buffer]]) -> BoundCall:
        own = {}
        for name, nbytes in launches.workspaces.items():
            # Each exact size has its own buffer. Then the guard begins where a workspace ends, and
            # a later entry that needs another size does not free this entry's workspace.
            if (name, nbytes) not in self._workspaces:
                self._workspaces[name, nbytes] = Buffer(nbytes)
            own[name] = self._workspaces[name, nbytes]
        return BoundCall(self.session, launches, [{**copy, **own} for copy in copies])

    def _free_others(self, *every: LaunchPlan) -> None:
        """Free the workspaces that neither these launches nor an entry needs."""
        needed = {item for launches in every for item in launches.workspaces.items()}
        needed |= {item for entry in self._entries.values() for item in entry.workspaces}
        self._workspaces = {k: b for k, b in self._workspaces.items() if k in needed}

    # -- timing -----------------------------------------------------------------------------

    def _screen(
        self, call: TimedCall, stage: str | None = None, proven: Proven | None = None
    ) -> float:
        """A first, cheap time: enough to tell which candidates are worth measuring well.

        proven: its outputs are compared with the checked ones.
        """
        replay, calls = self._graph(call, _SCREEN_US, rotate=False, stage=stage)
        if self._long:
            return self._sample(call, replay, calls, proven)
        least = math.inf
        for _ in range(_SCREEN_TRIES):
            times = [self._sample(call, replay, calls, proven) for _ in range(3)]
            least = min(least, *times)
            # The graph was made to last _SCREEN_US, so one of several calls that lasts much longer
            # met something else. 3,296 us were once stored for a kernel of 3.17 us.
            as_made = calls == 1 or calls * median(times) <= _SCREEN_APART * _SCREEN_US
            if as_made and max(times) <= _SCREEN_APART * least:
                return median(times)
        return least

    def _sample(
        self,
        call: TimedCall,
        replay: Callable[[], None],
        calls: int,
        proven: Proven | None,
        *,
        cold: bool = False,
    ) -> float:
        """Time of one call in a replay, which follows an untimed one; each on inputs of its own.

        proven: the output of the last call must be right. cold: the calls rotate over all copies,
        of which some are compared, or all if their inputs are as they were made.
        """
        copies = self._cold() if cold else []

        def begin(*, untimed: bool = False) -> None:
            if cold:
                self._proof.begin_cold(copies, untimed=untimed)
            else:
                self._proof.begin(proven, untimed=untimed)
            call.refresh(None if cold else 1)

        if isinstance(call, prepare.BoundBaseline) and not self._long:
            call.out_of_step(calls)
        with self.session.stream:
            if not self._long:
                begin(untimed=True)
                replay()
            begin()
            if proven is None or cold:
                time_us = self.session.time_us(replay) / calls
            else:
                look = functools.partial(self._proof.look, proven)
                time_us = self.session.time_us(replay, look) / calls
            if proven is not None:
                try:
                    judged = self._proof.end(proven, copies, looked=not cold)
                    self._judged[call] = self._judged.get(call, 0) + judged
                except WrongResult:
                    if cold:  # it may have written to inputs of copies, which others have too
                        self._proof.mend(copies)
                    raise
        return time_us

    def _graph(
        self,
        call: TimedCall,
        target_us: float,
        *,
        rotate: bool,
        stage: str | None = None,
        chained: bool = False,
    ) -> tuple[Callable[[], None], int]:
        """A graph that lasts about target_us, and the number of calls in it."""
        capture = functools.partial(call.capture, rotate=rotate, stage=stage)
        if chained and isinstance(call, BoundCall):
            capture = functools.partial(call.capture, chained=True)
        if self._long:
            return capture(1), 1
        issue = functools.partial(_issue, call, stage)
        with self.session.stream:
            issue()
            once = min(self.session.time_us(issue) for _ in range(2))
        self._launched += 3
        if rotate:
            calls = max(1, self._cold_count(), min(_MOST_CALLS, round(target_us / max(once, 1.0))))
            return capture(calls), calls

        def time_us(replay: Callable[[], None]) -> float:
            with self.session.stream:
                replay()
                return self.session.time_us(replay)

        replay, calls, launched = lasting(capture, time_us, once, target_us, _MOST_CALLS)
        self._launched += launched
        return replay, calls

    def add(self, name: str, candidate: Candidate, cold: bool) -> bool:
        """Make a candidate that passed `trial` an entry. cold: with copies for cold times.

        Returns whether its calls can be chained.
        """
        self._state.imports.end()  # rounds follow
        copies = [self._timed, *(self._cold() if cold else [])]
        call = self._pipeline(candidate.timed, copies)
        right = self._right.get(repr(candidate.timed))
        if right is None:  # tried in an earlier process or run
            _, proven = self._prove(candidate, call, small=False)
        else:
            proven = self._proof.proved_before(candidate, call, self._workspaces, right)
        self._proof.prepare_hard(candidate.rounds_scores)  # for `confirm`, which has less time
        used = frozenset(candidate.timed.workspaces.items())
        self._entries[name] = _Entry(call, proven, workspaces=used, candidate=candidate)
        return candidate.timed.chains

    def drop(self, name: str) -> None:
        """Remove an entry, its graphs, and the workspaces that no other entry uses."""
        self._entries.pop(name, None)
        self._free_others()

    def race(self, name: str, replay_us: float, kind: str) -> tuple[float, int]:
        """One sample of a replay of about replay_us: microseconds a call, and calls launched.

        kind: `warm` or `cold`, as the candidate was added.
        """
        entry, before = self._entries[name], self._launched
        if "race" not in entry.graphs:
            entry.graphs["race"] = self._graph(entry.call, replay_us, rotate=kind == "cold")
        graph, calls = entry.graphs["race"]
        time_us = self._sample(entry.call, graph, calls, entry.proven, cold=kind == "cold")
        self._launched += 2 * calls
        return time_us, self._launched - before

    def add_baseline(self, name: str) -> tuple[Accuracy, str | None]:
        """Prepare, check and add a baseline; also returns why no graph holds its calls, or None.

        Raises baselines.Unavailable with the reason.
        """
        self._state.imports.end()
        every = (self._timed, *self._cold())
        copies = [prepare.arrays_of(self.problem, copy) for copy in every]
        self.session.release()
        with self.session.stream:  # first, because some baselines convert the inputs once
            self._proof.timed.go_to(0)
        self.session.synchronize()
        # Libraries have their own maths; a callable may do anything.
        held = name not in BACKENDS
        try:
            call = prepare.prepare(name, self.problem, copies, self.session, self._state.triton)
            accuracy, proven = self._checked(call, held, name in self._shown)
            if held and not self._is_shown(name, accuracy):
                self._proof.hard(call.rounds_scores)  # for `confirm`, which has less time
        except Exception:
            if held:
                self._proof.mend(self._cold())
            raise
        self._entries[name] = _Entry(call, proven, held=held)
        return accuracy, call.issued

    def _is_shown(self, name: str, accuracy: Accuracy) -> bool:
        """Whether errors of a checked callable are shown: not if it is within every limit.

        It is judged as any other then, so that it is not confirmed by less.
        """
        if name in self._shown and max(accuracy.shares.values(), default=0.0) <= 1:
            self._shown = {*self._shown} - {name}
        return name in self._shown

    def _checked(
        self, call: prepare.BoundBaseline, held: bool, shown: bool
    ) -> tuple[Accuracy, Proven]:
        """Check a baseline's outputs, and bind them to where replays are judged."""
        bits = prepare.STORAGE[DTYPE_BYTES[self.problem.out_dtype]]
        shapes = {name: self.problem.shape_of(name) for name in self.problem.outputs}
        rows = self.problem.shape_of("lse")
        lse = Buffer(4 * math.prod(rows)) if call.gives_lse else None
        if held:
            call.keep(sum(map(self.problem.bytes_of, self.problem.outputs)), self.session)

        def collect(copy: int, at: Mapping[str, Buffer], *, which: int | None = None) -> int:
            into = [at[name].view(shape, bits) for name, shape in shapes.items()]
            return call.collect(copy, into, lse and lse.view(rows, np.int32), which)

        with step("judge"):
            how = (call, collect, call.rounds_scores)
            own: dict[str, Any] = {"held": held, "shown": shown, "lse": lse, "kept": call.kept}
            return self._proof.of_baseline(*how, **own)

    def replay(self, name: str, kind: str) -> float:
        """One sample, in microseconds a call. kind: `warm`, `cold`, or the name of a stage."""
        entry = self._entries[name]
        warm, warm_calls = entry.graphs.get("warm", (None, 0))
        if kind == "cold" and warm is not None and warm_calls == 1:
            # One call outlasts a replay, so rotating over all copies would take seconds. Overwrite
            # the L2 instead, and time one call.
            return self._sample_after_flush(entry, warm)
        stage = kind if kind in entry.call.stage_names else None
        if kind not in entry.graphs:
            entry.graphs[kind] = self._graph(
                entry.call,
                self._replay_us,
                rotate=kind == "cold",
                stage=stage,
                chained=kind == "chained",
            )
        graph, calls = entry.graphs[kind]
        proven = entry.proven if stage is None else None  # a stage alone leaves no output
        time_us = self._sample(entry.call, graph, calls, proven, cold=kind == "cold")
        if kind == "warm":
            entry.warm_us = time_us
        return time_us

    def _sample_after_flush(self, entry: _Entry, call: Callable[[], None]) -> float:
        with self.session.stream:
            self._proof.begin(entry.proven)
            entry.call.refresh(1)
            if self._l2_filler is None:
                self._l2_filler = Buffer(_COLD_L2_SIZES * self.session.gpu.l2_bytes)
            self._l2_filler.poison()
            time_us = self.session.time_us(call)
            if entry.proven is not None:
                self._proof.end(entry.proven)
        return time_us

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """One warm sample of each of two entries that `replay` has timed, in microseconds a call.

        The order is first, second, second, first, with nothing between: a steady drift, as of a
        clock at a power cap, then affects both alike. Several such turns are taken until a side has
        _PAIR_CALLS calls or about _PAIR_US; calls at the cap are the long ones.
        """
        entries = [self._entries[name] for name in (first, second)]
        (one, calls), (other, others) = (entry.graphs["warm"] for entry in entries)
        longest_us = max(entry.warm_us for entry in entries)
        wanted = min(_PAIR_CALLS, _PAIR_US / max(longest_us, 1.0))
        turns = max(1, math.ceil(wanted / (2 * max(calls, others))))
        with self.session.stream:
            self._proof.begin(entries[0].proven)
            for entry in entries:
                entry.call.refresh(1)
            one()
            spans = self.session.spans_us([one, other, other, one] * turns)
            if entries[0].proven is not None:
                self._proof.end(entries[0].proven)
        ones, twos = sum(spans[0::4] + spans[3::4]), sum(spans[1::4] + spans[2::4])
        return ones / (2 * turns * calls), twos / (2 * turns * others)

    def energy(self, name: str) -> Stretch | None:
        """Energy of a warm call of an entry, and the power meanwhile; None without a counter."""
        counter = energy.counter(self.session)
        if counter is None:
            return None
        entry = self._entries[name]
        if "warm" not in entry.graphs:  # in a new process, after another entry's fault
            self.replay(name, "warm")
        replay, calls = entry.graphs["warm"]
        with self.session.stream:
            self._proof.begin(entry.proven)
            entry.call.refresh(1)
            load = energy.Replays(self.session, replay, calls, entry.warm_us)
            found = energy.stretch(counter, load)
            self.session.synchronize()
            if entry.proven is not None:
                self._proof.end(entry.proven)
        return found

    def settle(self) -> None:
        """Wait until nothing is computed beside, so that the host's own times can be taken."""
        self._proof.settle()

    def eager_us(self, name: str) -> float:
        """Host time to issue one call, in microseconds, without waiting for the device.

        Call `settle` first: it takes as long as NumPy needs for the next problem.
        """
        entry = self._entries[name]
        # The device must finish the issued work between samples, so a slow kernel gets fewer calls.
        call_us = math.inf if self._long else max(entry.warm_us, 1.0)  # not known if eager ranks
        calls = max(1, min(_EAGER_CALLS, int(_EAGER_DEVICE_US / call_us)))
        samples = []
        for _ in range(5):
            self.session.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                _issue(entry.call)
            samples.append((time.perf_counter() - begin) / calls * 1e6)
        self.session.synchronize()
        return median(samples)

    def _cold_count(self) -> int:
        footprint = sum(buffer.nbytes for buffer in self._timed.values())
        return max(2, ceil_div(_COLD_L2_SIZES * self.session.gpu.l2_bytes, footprint) + 1)

    def _cold(self) -> list[dict[str, Buffer]]:
        """More copies of the inputs and the output: rotating over all copies leaves L2 cold."""
        if self._long:
            return []  # its inputs are many times the L2
        if self._cold_copies is None:
            with self.session.stream:
                self._proof.timed.go_to(0)
            self.session.synchronize()
            copies = []
            for _ in range(self._cold_count() - 1):
                copy = {name: Buffer(b.nbytes) for name, b in self._timed.items()}
                for name, buffer in copy.items():
                    buffer.copy_from(self._timed[name])
                copies.append(copy)
            self.session.settle()  # copies are on another stream, which this one does not wait for
            self._cold_copies = copies
        return self._cold_copies

    def blocks_per_sm(self, candidate: Candidate) -> dict[str, int]:
        """Resident blocks of each stage, as the driver counts them."""
        return {s.name: self.session.blocks_per_sm(s) for s in candidate.timed.stages}

    def conditions(self) -> dict[str, Any]:
        """Clocks, power, temperature, throttle reasons and other processes, during a replay."""
        for entry in list(self._entries.values())[:1]:
            for graph, _ in list(entry.graphs.values())[:1]:
                with self.session.stream:
                    graph()
        return self.session.conditions()

    def poisoned(self, error: BaseException) -> bool:
        """Whether `error` left the CUDA context unusable, so that this process must end."""
        return isinstance(error, cuda_errors()) and self.session.poisoned()

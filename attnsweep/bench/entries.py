"""Entries: calls of one problem that are timed in turns, and how each kind is confirmed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.registry import BACKENDS
from attnsweep.bench.effort import REPEATS
from attnsweep.bench.problem import OpenProblem
from attnsweep.bench.timer import Graph, TimedCall, Timer, Warm
from attnsweep.compile.launches import Candidate
from attnsweep.core.problem import DTYPE_BYTES
from attnsweep.core.timings import step
from attnsweep.core.trial import Accuracy
from attnsweep.device import energy
from attnsweep.device.buffers import Buffer
from attnsweep.verify.calls import Proven
from attnsweep.verify.device_case import WrongResult

# Each side of a pair makes at least this many calls, but takes at most about this long. Calls
# differ from one to the next, so the error falls with the root of their number: at the power cap (a
# call of 560 µs), 5 of 100 pairs of 2 ms are more than 1.1 % off, but of 54 ms only 0.30 %. Medians
# and trimmed means over a pair's turns are further off.
_PAIR_CALLS = 160
_PAIR_US = 90_000.0
_CALLABLE_REPEATS = 64  # of a callable, whose calls the host issues
# A callable's call on other inputs may take so much longer than one in a series on the same, beside
# what reading them from device memory costs.
_REUSE, _REUSE_US, _ALONE_TRIES = 1.5, 2.0, 5
# So often, with graphs made anew: in two of 967 judgements on an H100 FlexAttention took 91 and 247
# µs in such a graph, and 27 in others.
_REUSE_GRAPHS = 3


class Entry:
    """A call that is timed in turns with others; as it is, a library's, which is not confirmed."""

    def __init__(self, timer: Timer, call: TimedCall, proven: Proven) -> None:
        self.call, self.proven = call, proven
        self._timer = timer
        self._graphs: dict[str, Graph] = {}
        self._warm_us = 0.0
        self._compared = 0
        """Calls of samples whose outputs were compared, and that `confirm` has not told."""

    def replay(self, kind: str) -> float:
        """One sample, in microseconds. kind: `warm`, `cold`, `chained`, or a stage's name."""
        warm = self._graphs.get("warm")
        if kind == "cold" and warm is not None and warm.calls == 1:
            # One call outlasts a replay, so rotating over all copies would take seconds. Overwrite
            # the L2 instead, and time one call.
            return self._timer.flushed_us(self.call, warm, self.proven)
        stage = kind if kind in self.call.stage_names else None
        how = {"chained": True} if kind == "chained" else {}
        time_us = self._sample(kind, kind, self._timer.replay_us, stage, **how)
        if kind == "warm":
            self._warm_us = time_us
        return time_us

    def race(self, replay_us: float, kind: str) -> tuple[float, int]:
        """A sample of a replay of about replay_us, `warm` or `cold`, and the calls launched."""
        before = self._timer.launched
        time_us = self._sample("race", kind, replay_us)
        self._timer.launched += 2 * self._graphs["race"].calls
        return time_us, self._timer.launched - before

    def _sample(
        self, name: str, kind: str, replay_us: float, stage: str | None = None, **how: Any
    ) -> float:
        """name: of the graph, which the first sample makes."""
        inputs = self._timer.cold if kind == "cold" else self._timer.warm
        if name not in self._graphs:
            self._graphs[name] = self._timer.graph(self.call, replay_us, inputs, stage, **how)
        return self._time(self._graphs[name], inputs, None if stage else self.proven)

    def _time(self, graph: Graph, inputs: Warm, proven: Proven | None) -> float:
        time_us, compared = self._timer.sample(self.call, graph, inputs, proven)
        self._compared += compared
        return time_us

    @property
    def warm(self) -> Graph:
        """The entry's graph of warm calls, made when it is first asked for."""
        if "warm" not in self._graphs:
            self.replay("warm")
        return self._graphs["warm"]

    def pair(self, other: Entry) -> tuple[float, float]:
        """One warm sample of each, in microseconds a call.

        The order is own, other, other, own, with nothing between: a steady drift, as of a clock at
        a power cap, then affects both alike. Several such turns are taken until a side has
        _PAIR_CALLS calls or about _PAIR_US; calls at the cap are the long ones.
        """
        (one, calls), (two, others) = self.warm, other.warm
        longest_us = max(self._warm_us, other._warm_us)
        wanted = min(_PAIR_CALLS, _PAIR_US / max(longest_us, 1.0))
        turns = max(1, math.ceil(wanted / (2 * max(calls, others))))
        with self._timer.on_new_inputs(self.proven, self.call, other.call):
            one()
            spans = self._timer.session.spans_us([one, two, two, one] * turns)
        ones, twos = sum(spans[0::4] + spans[3::4]), sum(spans[1::4] + spans[2::4])
        return ones / (2 * turns * calls), twos / (2 * turns * others)

    def energy(self) -> energy.Stretch | None:
        """Energy of a warm call, and the power meanwhile; None without a counter."""
        session = self._timer.session
        counter = energy.counter(session)
        if counter is None:
            return None
        warm = self.warm
        with self._timer.on_new_inputs(self.proven, self.call):
            found = energy.stretch(counter, energy.Replays(session, *warm, self._warm_us))
            session.synchronize()
        return found

    def eager_us(self) -> float:
        """Host time to issue one call, in microseconds, without waiting for the device."""
        session, samples = self._timer.session, []
        calls = self._timer.effort.eager_calls(self._warm_us)
        for _ in range(5):
            session.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                self.call.issue()
            samples.append((time.perf_counter() - begin) / calls * 1e6)
        session.synchronize()
        return median(samples)

    def occupy(self) -> None:
        """Enqueue a replay to keep the card busy, if something was timed."""
        for graph in [*self._graphs.values()][:1]:
            with self._timer.session.stream:
                graph.replay()

    def confirm(self, longest_us: float) -> int:  # noqa: ARG002
        """Check it again after its rounds; returns the number of calls compared.

        longest_us: about what its calls take. Raises WrongResult, or Unavailable.
        """
        return 0


class CandidateEntry(Entry):
    """An entry whose calls launch a candidate's kernels."""

    def __init__(self, timer: Timer, call: TimedCall, proven: Proven, candidate: Candidate) -> None:
        super().__init__(timer, call, proven)
        self._candidate = candidate

    def confirm(self, longest_us: float) -> int:
        """See Entry: on the timed problem, on hard inputs, and then on short turns.

        These are skipped if the very launches made all of theirs before in this process: problems
        of one head_dim, dtype and mask have the same short turns.
        """
        proof, opened = self._timer.proof, self._timer.opened
        most, each_us = self._timer.effort.confirming(longest_us, self._warm_us)
        if not most:
            return 0
        calls = proof.repeat(self.proven, most, longest_us, each_us)
        if self._timer.effort.thorough:
            calls += proof.on_hard(self.proven, self.call.enqueue)
        launches, right = repr(self._candidate.turns), opened.state.right_on_short
        if launches in right:
            return calls
        workspaces = opened.workspaces
        try:
            turns = proof.of_turns(self._candidate, workspaces.bind, workspaces)
            if turns is not None:
                made = proof.repeat(turns, REPEATS, longest_us)
                calls += made
                if made >= REPEATS:
                    right.add(launches)
        except WrongResult as error:
            detail = f"right in all other cases, but not in many short turns: {error.detail}"
            raise WrongResult(detail, error.accuracy) from error
        finally:
            workspaces.free_others()
        return calls


class CallableEntry(Entry):
    """Calls of a callable of the user's, whose errors the limits decide."""

    call: prepare.BoundBaseline

    def __init__(
        self, timer: Timer, call: prepare.BoundBaseline, proven: Proven, shown: bool
    ) -> None:
        """shown: its errors are over a limit, and are shown; it is not called wrong for them."""
        super().__init__(timer, call, proven)
        self._shown = shown

    def _time(self, graph: Graph, inputs: Warm, proven: Proven | None) -> float:
        if self._timer.effort.thorough:
            self.call.out_of_step(graph.calls)
        return super()._time(graph, inputs, proven)

    def confirm(self, longest_us: float) -> int:
        """See Entry: its samples' calls count too. Raises Unavailable if calls use one another."""
        proof, effort = self._timer.proof, self._timer.effort
        if not effort.confirming(longest_us, self._warm_us)[0]:
            return 0
        if effort.thorough:
            _ = self.warm
            self._refuse_reuse()
        calls = proof.repeat(self.proven, _CALLABLE_REPEATS, longest_us)
        if effort.thorough and not self._shown:
            proof.on_hard(self.proven, self.warm.replay)
        compared, self._compared = self._compared, 0
        return calls + compared

    def _refuse_reuse(self) -> None:
        """Raise Unavailable if its calls on equal inputs take less than they should.

        All calls of a warm replay have the same inputs, so that the first could compute for all. A
        second call on inputs of its own must compute: it takes what two take, less one.
        """
        if self.call.issued is not None:
            return
        cold, session = self._timer.cold, self._timer.session
        nbytes = sum(buffer.nbytes for buffer in self._timer.opened.timed.values())
        cold_us = nbytes / session.gpu.memory_bytes_per_second * 1e6
        for _ in range(_REUSE_GRAPHS):
            least = []
            for calls in (1, 2):
                graph = Graph(self.call.capture(calls, rotate=True), calls)
                # The same copies whatever the number of calls, so that no cache favours one.
                times = [self._time(graph, cold, None) for _ in range(_ALONE_TRIES)]
                least.append(calls * min(times))
            own_us = least[1] - least[0]
            if own_us <= _REUSE * self._warm_us + _REUSE_US + cold_us:
                return
        raise Unavailable(
            f"a call on inputs of its own takes {own_us:.4g} µs, and {self._warm_us:.4g} µs "
            "where all calls have the same inputs: they use again what one of them computed"
        )


def baseline_entry(timer: Timer, name: str) -> tuple[Entry, Accuracy, str | None]:
    """Prepare and check a library or a callable: its entry, its accuracy, and why it has no graph.

    Raises Unavailable with the reason, or WrongResult.
    """
    opened, session, proof = timer.opened, timer.session, timer.proof
    every = (opened.timed, *timer.cold.copies)
    copies = [prepare.arrays_of(opened.problem, copy) for copy in every]
    session.release()
    with session.stream:  # first, because some baselines convert the inputs once
        proof.timed.go_to(0)
    session.synchronize()
    # Libraries have their own maths; a callable may do anything.
    own = name not in BACKENDS
    try:
        call = prepare.prepare(name, opened.problem, copies, session, opened.state.triton)
        accuracy, proven = _checked(opened, call, own=own, shown=name in opened.shown)
        if not own:
            return Entry(timer, call, proven), accuracy, call.issued
        shown = opened.shows(name, accuracy)
        if not shown:
            proof.hard(call.rounds_scores)  # for `confirm`, which has less time
        return CallableEntry(timer, call, proven, shown), accuracy, call.issued
    except Exception:
        if own:
            proof.mend(timer.cold.copies)
        raise


def _checked(
    opened: OpenProblem, call: prepare.BoundBaseline, *, own: bool, shown: bool
) -> tuple[Accuracy, Proven]:
    """Check a baseline's outputs, and bind them to where those of replays are compared."""
    problem = opened.problem
    bits = prepare.STORAGE[DTYPE_BYTES[problem.out_dtype]]
    shapes = {name: problem.shape_of(name) for name in problem.outputs}
    rows = problem.shape_of("lse")
    lse = Buffer(4 * math.prod(rows)) if call.gives_lse else None
    if own:
        call.keep(sum(map(problem.bytes_of, problem.outputs)), opened.session)

    def collect(copy: int, at: Mapping[str, Buffer], *, which: int | None = None) -> int:
        into = [at[name].view(shape, bits) for name, shape in shapes.items()]
        return call.collect(copy, into, lse and lse.view(rows, np.int32), which)

    with step("judge"):
        how: dict[str, Any] = {"held": own, "shown": shown, "lse": lse, "kept": call.kept}
        return opened.proof.of_baseline(call, collect, call.rounds_scores, **how)

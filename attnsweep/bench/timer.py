"""Device time of one call: CUDA events enclose the replay of a graph of back-to-back calls.

The graph is long enough to dwarf the events' resolution (0.5 us), and follows an untimed replay, so
that no launch latency or cold cache is in the time. docs/measuring.md has all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from attnsweep.bench.effort import FIRST_US, Long, Short
from attnsweep.bench.problem import OpenProblem
from attnsweep.core.long_problems import is_long
from attnsweep.core.problem import ceil_div
from attnsweep.device.buffers import Buffer
from attnsweep.device.cuda_graph import Replay, lasting
from attnsweep.verify.calls import Proven
from attnsweep.verify.device_case import WrongResult
from attnsweep.verify.verifier import Verifier

# Before a cold call, at least this many L2 sizes of traffic follow the last use of its inputs.
_COLD_L2_SIZES = 3


class TimedCall(Protocol):
    """Anything that can be timed: a pipeline of ours, or a baseline."""

    stage_names: tuple[str, ...]
    once_names: tuple[str, ...]
    """Stages that all calls have in common: refresh issues them, and capture leaves them out."""

    def enqueue(self, copy: int = 0, stage: str | None = None) -> None:
        """Issue one call eagerly, or one stage of it; does not wait."""

    def issue(self, copy: int = 0, stage: str | None = None) -> None:
        """Issue a call as a graph has it: without what is copied for one of another order."""

    def capture(self, calls: int, *, rotate: bool = False, stage: str | None = None) -> Replay:
        """A function that replays a graph of `calls` back-to-back calls."""

    def refresh(self, copies: int | None = None) -> None:
        """Take up inputs whose contents have changed, of the first copies."""


class Graph(NamedTuple):
    """Back-to-back calls that are replayed together."""

    replay: Replay
    calls: int


class Warm:
    """All calls of a replay have the same inputs, and each replay has others."""

    count = 0
    """Copies of the inputs that calls rotate over; 0: they do not."""

    def __init__(self, proof: Verifier) -> None:
        self._proof = proof

    def begin(self, call: TimedCall, proven: Proven | None) -> None:
        """Enqueue other inputs than before."""
        self._proof.begin(proven)
        call.refresh(1)

    def look(self, proven: Proven) -> Callable[[], None] | None:
        """Enqueues a look at the output while the device replays; None: `end` looks."""
        return functools.partial(self._proof.look, proven)

    def end(self, proven: Proven) -> int:
        """The number of calls whose output is right. Raises WrongResult."""
        return self._proof.end(proven, looked=True)


class Cold(Warm):
    """Calls rotate over copies of inputs and outputs, so that L2 holds nothing that they read."""

    def __init__(self, opened: OpenProblem, effort: Short) -> None:
        super().__init__(opened.proof)
        self._opened = opened
        footprint = sum(buffer.nbytes for buffer in opened.timed.values())
        traffic = _COLD_L2_SIZES * opened.session.gpu.l2_bytes
        # A long call's inputs are many times the L2.
        self.count = max(2, ceil_div(traffic, footprint) + 1) if effort.thorough else 1

    @functools.cached_property
    def copies(self) -> list[dict[str, Buffer]]:
        """The copies beside the timed tensors, made when they are first asked for."""
        session, timed = self._opened.session, self._opened.timed
        if self.count == 1:
            return []
        with session.stream:
            self._proof.timed.go_to(0)
        session.synchronize()
        copies = []
        for _ in range(self.count - 1):
            copies.append({name: Buffer(buffer.nbytes) for name, buffer in timed.items()})
            for name, buffer in copies[-1].items():
                buffer.copy_from(timed[name])
        session.settle()  # copies are on another stream, which this one does not wait for
        return copies

    def begin(self, call: TimedCall, proven: Proven | None) -> None:  # noqa: ARG002
        """Enqueue the drawing of new inputs for each copy, before a cold replay."""
        self._proof.begin_cold(self.copies)
        call.refresh()

    def look(self, proven: Proven) -> Callable[[], None] | None:
        """See Warm; None where inputs are as they were made, and all outputs are compared."""
        if not self._proof.timed.content:
            return None
        return functools.partial(self._proof.look, proven, self.copies)

    def end(self, proven: Proven) -> int:
        """See Warm; some copies are compared, or all if their inputs are as they were made."""
        try:
            looked = bool(self._proof.timed.content)
            return self._proof.end(proven, self.copies, looked=looked)
        except WrongResult:  # it may have written to inputs of copies, which others have too
            self._proof.mend(self.copies)
            raise


class Timer:
    """Times calls of the open problem, and has their outputs compared."""

    def __init__(self, opened: OpenProblem, replay_us: float) -> None:
        """replay_us: about what a replay takes."""
        self.opened, self.session, self.proof = opened, opened.session, opened.proof
        self.effort = Long() if is_long(opened.problem) else Short()
        self.replay_us = replay_us
        self.launched = 0
        """Calls of graphs so far, and of finding their length."""
        self.warm, self.cold = Warm(opened.proof), Cold(opened, self.effort)
        self._l2_filler: Buffer | None = None

    def graph(
        self, call: TimedCall, us: float, inputs: Warm, stage: str | None = None, **how: Any
    ) -> Graph:
        """A graph that lasts about `us`. how: for the call's `capture`."""
        how |= {"rotate": inputs.count > 0, "stage": stage}
        capture: Callable[[int], Replay] = functools.partial(call.capture, **how)
        most = self.effort.most_calls
        if most == 1:
            return Graph(capture(1), 1)
        issue = functools.partial(call.issue, 0, stage)
        with self.session.stream:
            issue()
            once_us = min(self.session.time_us(issue) for _ in range(2))
        self.launched += 3
        if inputs.count:
            calls = max(inputs.count, min(most, round(us / max(once_us, 1.0))))
            return Graph(capture(calls), calls)

        def time_us(replay: Replay) -> float:
            with self.session.stream:
                replay()
                return self.session.time_us(replay)

        replay, calls, launched = lasting(capture, time_us, once_us, us, most)
        self.launched += launched
        return Graph(replay, calls)

    def sample(
        self, call: TimedCall, graph: Graph, inputs: Warm, proven: Proven | None
    ) -> tuple[float, int]:
        """Time of a call in one replay, and the number of calls whose outputs were compared.

        proven: what the outputs must be; None of a stage, which alone leaves none.
        """
        with self.session.stream:
            if self.effort.thorough:
                graph.replay()  # untimed, on whatever inputs are there
            inputs.begin(call, proven)
            look = None if proven is None else inputs.look(proven)
            time_us = self.session.time_us(graph.replay, look) / graph.calls
            return time_us, 0 if proven is None else inputs.end(proven)

    def first_us(
        self, call: TimedCall, stage: str | None = None, proven: Proven | None = None
    ) -> float:
        """A first, cheap time: enough to tell which candidates are worth measuring well."""
        graph = self.graph(call, FIRST_US, self.warm, stage)
        own = call, graph, self.warm, proven
        return self.effort.first_us(lambda: self.sample(*own)[0], graph.calls)

    @contextmanager
    def on_new_inputs(self, proven: Proven, *calls: TimedCall) -> Iterator[None]:
        """Give calls other inputs than before; what they leave must be right."""
        with self.session.stream:
            self.proof.begin(proven)
            for call in calls:
                call.refresh(1)
            yield
            self.proof.end(proven)

    def flushed_us(self, call: TimedCall, graph: Graph, proven: Proven) -> float:
        """Time of one call after the L2 was overwritten."""
        with self.on_new_inputs(proven, call):
            if self._l2_filler is None:
                self._l2_filler = Buffer(_COLD_L2_SIZES * self.session.gpu.l2_bytes)
            self._l2_filler.poison()
            return self.session.time_us(graph.replay)

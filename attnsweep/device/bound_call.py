"""One config's launches bound to buffers, issued as eager calls or as graphs of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attnsweep.compile.launches import LaunchPlan
from attnsweep.core.ops import of_heads

if TYPE_CHECKING:
    from attnsweep.device.buffers import Buffer
    from attnsweep.device.cuda import CudaSession


class BoundCall:
    """One config's launches bound to buffers: a call launches its stages in order.

    A call has ordinary dependencies: its first launches wait until the call before has ended, as a
    baseline's do. Chained calls do not wait there, where the first launch is programmatic.
    """

    def __init__(
        self, session: CudaSession, launches: LaunchPlan, buffers: Sequence[Mapping[str, Buffer]]
    ) -> None:
        """buffers: one mapping per copy of the inputs; copy 0 is the warm one."""
        self._turned: list[dict[str, tuple[Buffer, tuple[int, ...]]]] = [{} for _ in buffers]
        self._outputs = launches.problem.outputs
        if launches.turned:
            shapes = of_heads(launches.problem)
            self._turned = [{n: (copy[n], shapes[n]) for n in shapes} for copy in buffers]
            buffers = [{**copy, **{n: copy[n].turned() for n in shapes}} for copy in buffers]
        self._session = session
        self._eager = launches.eager
        self._streams = session.streams(launches.streams)
        self._fork, *self._joins = session.marks(launches.streams)
        once = {stage.name: None for stage in launches.stages if stage.launch.once}
        self.once_names = tuple(once)
        every = dict.fromkeys(stage.name for stage in launches.stages)
        self.stage_names = tuple(name for name in every if name not in once)
        self._copies = [
            [(stage.name, stage.stream, session.bind(stage, copy)) for stage in launches.stages]
            for copy in buffers
        ]
        self._chained: list[tuple[str, int, Callable[[], None]]] = []
        if launches.chains:
            first = launches.stages[0]
            early = replace(first, launch=replace(first.launch, programmatic=True))
            bound = session.bind(early, buffers[0])
            self._chained = [(first.name, first.stream, bound), *self._copies[0][1:]]

    def refresh(self, copies: int | None = None) -> None:
        """Issue the stages that all calls have in common; the others read the inputs themselves.

        Tensors of the first copies are turned: see Family.order.
        """
        for copy in range(len(self._turned[:copies])):
            self.turn(copy)
        for name in self.once_names:
            self.issue(stage=name)

    def turn(self, copy: int = 0, *, back: bool = False, every: bool = True) -> None:
        """Copy a call's tensors into the order of the launches, or their outputs back.

        every: the inputs too. What a replay left is judged by those that it was given.
        """
        turned = self._turned[copy % len(self._turned)]
        if not turned:  # as of most
            return
        with self._streams[0]:
            for name, (buffer, shape) in turned.items():
                if every or name in self._outputs:
                    buffer.turn(shape, back=back)

    def enqueue(self, copy: int = 0, stage: str | None = None) -> None:
        """Issue one call, or one stage of it, with what `turn` copies; does not wait."""
        self.turn(copy)
        self.issue(copy, stage)
        self.turn(copy, back=True)

    def issue(
        self, copy: int = 0, stage: str | None = None, *, chained: bool = False, once: bool = True
    ) -> None:
        """Issue a call as a graph has it. once: with the stages that all calls have in common."""
        wanted = {stage} if stage else {*self.stage_names, *(self.once_names if once else ())}
        main, *others = self._streams
        bound = self._chained if chained else self._copies[copy % len(self._copies)]
        launches = [(number, launch) for name, number, launch in bound if name in wanted]
        if not others:
            with main:
                for _, launch in launches:
                    launch()
            return
        self._fork.record(main)
        for stream in others:
            stream.wait_event(self._fork)
        for number, launch in launches:
            with self._streams[number]:
                launch()
        for stream, done in zip(others, self._joins, strict=True):
            done.record(stream)
            main.wait_event(done)

    def capture(
        self,
        calls: int,
        *,
        rotate: bool = False,
        stage: str | None = None,
        chained: bool = False,
        after: Callable[[int], None] | None = None,
    ) -> Callable[[], None]:
        """A function that replays back-to-back calls, over all copies if `rotate`.

        Stages that all calls have in common are no part of it: see refresh.

        It replays a graph of the calls, unless they are eager: then the host launches each. after:
        enqueues more work after the call of this number.
        """

        def issue() -> None:
            for call in range(calls):
                if after is not None:
                    self.turn()
                self.issue(call if rotate else 0, stage, chained=chained, once=False)
                if after is not None:
                    self.turn(back=True)
                    after(call)

        return issue if self._eager else self._session.capture(issue)

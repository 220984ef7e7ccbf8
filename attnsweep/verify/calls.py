"""Judges the outputs of many calls: repeated ones, timed replays, and strict chains.

A call is right on inputs that nothing could know before, and equal calls give equal bits where a
family claims so.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from attnsweep.core.long_problems import is_long
from attnsweep.core.timings import proved, proves, proving
from attnsweep.device.bound_call import BoundCall
from attnsweep.device.buffers import POISON, Buffer
from attnsweep.device.cuda import CudaSession
from attnsweep.verify import limits
from attnsweep.verify.compare import Comparer, LaunchRecords
from attnsweep.verify.device_case import DeviceCase, Errors, WrongResult, regions_to_redraw
from attnsweep.verify.expected import PLAIN, contents_of
from attnsweep.verify.measures import Same
from attnsweep.verify.reference_pool import Maths

# Repeated calls that are issued rather than captured and replayed.
_ISSUED = 64
# Copies of a cold replay whose outputs are judged, of those that are drawn anew.
_COLD_JUDGED = 16
# Outputs of a replay that are judged in their rows, of those that differ from one another.
_KEPT_JUDGED = 16
# Gradients of a chain that are compared in every element: of as many calls as these allow, or one.
_WHOLE_FLOPS, _WHOLE_BYTES = 4e10, 1 << 30
_TABLES = 32  # of kept outputs: calls that no graph holds have other ones each time


class Collect(Protocol):
    """Copies outputs that calls on a copy of the inputs returned to buffers."""

    def __call__(self, copy: int, at: Mapping[str, Buffer], *, which: int | None = None) -> int:
        """which: of those that are kept; one at random if it is None. Returns which it was."""


class Judgeable(Protocol):
    """A call whose outputs can be judged: of a candidate, a library or a callable."""

    def enqueue(self, copy: int = 0) -> None:
        """Issue one call on a copy of the inputs; does not wait."""


@dataclass(frozen=True, slots=True)
class Proven:
    """A candidate that was right on a case, in a call on its buffers, and what its outputs were."""

    device_case: DeviceCase
    call: Judgeable
    deterministic: bool
    rounds_scores: int
    digests: npt.NDArray[np.uint64]
    """Digests (2, parts) of the output on the inputs as they were made, and on their opposite."""
    lse: Buffer | None = None
    """The workspace of the log-sum-exp, if a call writes it."""
    lse_digests: npt.NDArray[np.uint64] | None = None
    collect: Collect | None = None
    """Copies what a call on a copy of the inputs returned to outputs; None if it is there.

    A library or a callable returns outputs of its own.
    """
    kept: Callable[[int], Sequence[tuple[int, int]]] | None = None
    """Where the outputs are that calls of a replay on a copy returned, and their bytes."""
    slack: float = 1.0
    """How many times its outputs may exceed a limit, as a library may that did when checked."""

    @property
    def collected_lse(self) -> Mapping[str, Buffer]:
        """The log-sum-exp that `collect` copies beside the outputs, if there is one."""
        return {} if self.collect is None or self.lse is None else {"lse": self.lse}


@dataclass(slots=True)
class _Cold:
    """Copies of the timed tensors, as tables of what is written to them before each sample."""

    copies: Sequence[Mapping[str, Buffer]]
    inputs: LaunchRecords | None
    """None if they are not drawn anew."""
    outputs: LaunchRecords
    """With those of the timed tensors."""
    content: int = 0


class Calls:
    """Calls on the timed problem, and whether what they wrote is right."""

    def __init__(
        self, timed: DeviceCase, session: CudaSession, comparer: Comparer, maths: Maths
    ) -> None:
        """maths: what limits come from, of the cases that are judged."""
        self.timed, self._session, self._comparer, self._maths = timed, session, comparer, maths
        self._poisons = False
        self._cold: _Cold | None = None
        self._preparation: tuple[Any, Any] | None = None
        self._looked: tuple[Any, Any] | None = None
        """Events around the look at a replay's outputs, which is yet to be judged."""
        self._kept = 0, 0
        """The kept output that is judged in the replay that was looked at, and how many it kept."""
        self._tables: dict[tuple[tuple[int, int], ...], LaunchRecords] = {}

    @property
    def outputs(self) -> dict[str, Buffer]:
        """The outputs of the timed problem."""
        return {name: self.timed.buffers[name] for name in self.timed.outputs}

    def _same(self, of: DeviceCase, rounds_scores: int) -> Same | None:
        """The same maths of a case, which limits come from, if another process computed it."""
        problem = of.case.problem
        return self._maths.get((of.case, limits.rounded_scores(problem, rounds_scores)))

    @proves("repeated calls")
    def repeat(
        self, proven: Proven, most: int, longest_us: float, each_us: float | None = None
    ) -> int:
        """Make calls one by one into a poisoned output, and compare each with the checked output.

        Takes at most `most` calls and about longest_us, on two mixes of inputs or more; returns the
        number of calls. each_us: about what a call takes, if that is known. Raises WrongResult if
        one differs in a bit, or, if the family need not give equal bits, if one is wrong, or if a
        callable wrote to its inputs since it was checked.
        """

        def once() -> None:
            proven.call.enqueue()
            self._look(proven, 0)

        # A few calls are issued in less time than a graph of them is captured.
        few = most <= _ISSUED or proven.collect is not None
        if each_us is None:
            with self._session.stream:
                each_us = min(self._session.time_us(once) for _ in range(2))
        calls = min(most, int(longest_us / max(1.0, each_us)))
        # The host pays for each slot once, to capture it, and for each replay, as if for five.
        balanced = calls if few else math.isqrt(5 * calls)
        slots = max(1, min(calls // 2, balanced, self._most_slots))

        def issue() -> None:
            for slot in range(slots):
                proven.call.enqueue()
                self._look(proven, slot)

        replay = issue
        if not few:
            call = cast(BoundCall, proven.call)
            replay = call.capture(slots, after=lambda slot: self._look(proven, slot))
        done, spent_us = 0, 0.0
        while done < most and (done < 2 * slots or spent_us < longest_us):
            with self._session.stream:
                proven.device_case.draw()
                self._comparer.clear()
                self._poison(proven)
                spent_us += self._session.time_us(replay)
                self._compare(proven, slots, lse=True)
            done += slots
        if proven.collect is not None and self._mend(proven.device_case):
            label = proven.device_case.case.label
            raise WrongResult(f"wrote to its inputs, or next to them, in some call ({label})")
        return done

    def _redraws(self, proven: Proven | None) -> bool:
        """Whether inputs are drawn anew, rather than negated.

        A call that gives equal bits is then made once more: one that takes long is not.
        """
        again = proven is None or proven.deterministic
        return self.timed.redraws and not (again and is_long(self.timed.case.problem))

    def begin(self, proven: Proven | None = None) -> None:
        """Enqueue other inputs than before, and an output that every call must write anew.

        proven: what is to be judged then.

        In turns it is poisoned, and still holds what was right for the inputs before: a kernel that
        finds it written has yet to compute.
        """
        with self._prepared():
            if self._redraws(proven):
                self.timed.redraw()
            else:
                self.timed.draw()
            self._poisons = not self._poisons
            if self._poisons:
                self.timed.poison()

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Count the device time of what is enqueued, from when the device waited for it.

        The host does not wait here, so that it gives the device the replay meanwhile.
        """
        self._count_prepared()
        begin = self._session.record()
        yield
        self._preparation = begin, self._session.record()

    def _count_prepared(self) -> None:
        if self._preparation is not None:
            proved("replays", self._session.elapsed_us(*self._preparation) / 1e6)
            self._preparation = None

    def _poison(self, proven: Proven) -> None:
        proven.device_case.poison()
        if proven.lse is not None:
            proven.lse.fill(POISON)

    def begin_cold(self, copies: Sequence[Mapping[str, Buffer]]) -> None:
        """`begin` before calls that rotate over copies: each gets inputs of its own.

        Where nothing is drawn anew, all have the inputs as they were made.
        """
        with self._prepared():
            cold = self._cold
            if cold is None or cold.copies is not copies:
                problem, inputs = self.timed.case.problem, None
                if self.timed.redraws and copies:
                    inputs = regions_to_redraw(self._comparer, problem, copies)
                every = [at[name] for at in (self.outputs, *copies) for name in problem.outputs]
                outputs = self._comparer.regions([(output, 0, 0) for output in every])
                self._session.settle()
                cold = self._cold = _Cold(copies, inputs, outputs)
            if cold.inputs is not None:
                self.timed.redraw()
                before, cold.content = cold.content, secrets.randbits(64) or 1
                self._comparer.redraw(cold.inputs, before, cold.content)
            else:
                self.timed.go_to(PLAIN)
            self._comparer.renew(cold.outputs, 0)

    def look(self, proven: Proven, copies: Sequence[Mapping[str, Buffer]] = ()) -> None:
        """Enqueue a look at the outputs; `end` is then to be told that they are `looked` at.

        copies: cold ones, of which some at random are judged; their inputs are drawn anew. To be
        called while the device replays calls, next to which it takes no time.
        """
        began = self._session.record()
        if self.timed.content:
            self._look_at_some([self.timed.buffers, *copies], proven)
        else:
            self._look_at([self.outputs], proven)
            self.timed.draw_ahead()
        self._looked = began, self._session.record()

    def end(
        self, proven: Proven, copies: Sequence[Mapping[str, Buffer]] = (), *, looked: bool = False
    ) -> int:
        """Raise WrongResult unless the outputs are right, of cold copies those of some at random.

        They must be the checked ones bit for bit. On inputs drawn anew, rows at random must be
        right, and all bits those of the same call made alone, if equal calls give equal bits.
        Returns the number of calls whose outputs were judged, or are equal to a judged one.
        """
        self._count_prepared()
        with self._looking():
            if self.timed.content:
                return self._compare_drawn(proven, [self.timed.buffers, *copies], looked)
            self._compare_outputs(proven, [self.outputs, *copies], looked)
            return 1 + len(copies)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Count the seconds inside as a proof of replays, or the device's since the replay.

        These are more where the host took longer to enqueue the look than the device to replay.
        """
        (looked, self._looked), began = (self._looked, None), time.perf_counter()
        with proving("replays"):
            yield
        if looked is not None:
            spent_s = time.perf_counter() - began
            proved("replays", max(0.0, self._session.elapsed_us(*looked) / 1e6 - spent_s))

    def _look_at_some(self, copies: Sequence[Mapping[str, Buffer]], proven: Proven) -> None:
        numbers = range(len(copies))
        chosen = secrets.SystemRandom().sample(numbers, min(_COLD_JUDGED, len(copies)))
        self._look_anew([(number, copies[number]) for number in chosen], proven)

    def _compare_drawn(
        self, proven: Proven, copies: Sequence[Mapping[str, Buffer]], looked: bool
    ) -> int:
        if not looked:
            self._look_at_some(copies, proven)
        chosen = min(_COLD_JUDGED, len(copies))
        try:
            self._refuse_rows(proven, chosen)
            counts, digests = self._counts(chosen)
            judged = self._judge_kept(proven, copies[0], digests) if len(digests) else chosen
            if (counts[0] != counts[1]).any():
                raise WrongResult(
                    "a race, or an answer kept from an earlier call: a timed call gave another "
                    f"output than the same call alone ({self.timed.case.label}, drawn anew)"
                )
        except WrongResult:
            self._mend(self.timed)
            raise
        return judged

    def _counts(self, slots: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """What _look_anew counted of as many copies, and digests of kept outputs."""
        counts = self._comparer.counts(2 * slots + self._kept[1])
        return counts[: 2 * slots].reshape(2, -1), counts[2 * slots :]

    def _refuse_rows(self, proven: Proven, slots: int, whole: int = 0) -> None:
        """slots: calls of which rows were compared. whole: those behind them, in every element."""
        often, timed = proven.rounds_scores, proven.device_case
        outputs, same = len(timed.outputs), self._same(timed, often)
        found = self._comparer.found((slots + whole) * outputs)
        timed.refuse_rows(found, often, same, proven.slack, slots * outputs)

    def _judge_kept(
        self, proven: Proven, at: Mapping[str, Buffer], digests: npt.NDArray[np.uint64]
    ) -> int:
        """Judge the outputs of a replay's calls that differ from the judged one, or of some.

        All calls had the same inputs. Returns how many were judged, or are equal to a judged one.
        """
        assert proven.collect is not None
        others = [*{*digests.tolist()} - {int(digests[self._kept[0]])}]
        others = secrets.SystemRandom().sample(others, min(_KEPT_JUDGED, len(others)))
        with self._session.stream:
            self._comparer.clear()
            for slot, digest in enumerate(others):
                proven.collect(0, at, which=int(np.flatnonzero(digests == np.uint64(digest))[0]))
                self.timed.judge_rows(slot, {**at, **proven.collected_lse})
        self._refuse_rows(proven, len(others))
        judged = np.array([digests[self._kept[0]], *others], np.uint64)
        return int(np.isin(digests, judged).sum())

    @proves("chains")
    def of_chain(
        self,
        proven: Proven,
        first: int,
        outputs: Sequence[Mapping[str, Buffer]],
        given: LaunchRecords,
        *,
        whole: bool,
    ) -> None:
        """Judge what the calls of a chain wrote, each on inputs that the output before chose.

        first: the content of the first call. outputs: of each, beside them the log-sum-exp, if it
        gives one. given: the inputs that the calls had, after the last, for Comparer.look. whole:
        compares a call at random in every element, or several of a backward; all have rows at
        random compared. Raises WrongResult.
        """
        count, timed = len(outputs), proven.device_case
        with self._session.stream:
            timed.go_to(PLAIN)
            self._comparer.clear()
            for slot, sealed in enumerate(outputs):
                for one in sealed.values():
                    self._comparer.digest([one], slot)
            contents = contents_of(first, self._comparer.counts(count).tolist())
            self._comparer.clear()
            chosen = secrets.SystemRandom().sample(range(count), self._whole(count) if whole else 0)
            held = list[object]()
            for slot, (content, sealed) in enumerate(zip(contents, outputs, strict=True)):
                timed.to_content(content)
                timed.judge_rows(slot, {**timed.buffers, **sealed})
                if slot in chosen:
                    at = (count + len(held)) * len(timed.outputs)
                    held.append(timed.compare_anew(at, sealed))
            timed.look_at_inputs(0)
            self._comparer.look(given, 1)
            own, theirs = self._comparer.counts(2)
            self._refuse_rows(proven, count, len(held))
        if own != theirs:
            label = f"{timed.case.label}, drawn anew"
            raise WrongResult(f"wrote to its inputs, or next to them, in some call ({label})")

    def _whole(self, calls: int) -> int:
        """The number of a chain's calls that are compared in every element."""
        problem = self.timed.case.problem
        if self.timed.redraws:
            return 1
        nbytes = 8 * sum(math.prod(problem.shape_of(name)) for name in self.timed.outputs)
        fit = min(_WHOLE_FLOPS / problem.flops, _WHOLE_BYTES / nbytes)
        return max(1, min(calls, int(fit)))

    def _look_anew(
        self, copies: Sequence[tuple[int, Mapping[str, Buffer]]], proven: Proven
    ) -> None:
        """Enqueue a look at rows of outputs on inputs drawn anew, and the same calls once more.

        The host judges the rows while the device makes the calls.
        """
        self._comparer.clear()
        self._kept = 0, 0
        own = proven.collected_lse
        for slot, (number, at) in enumerate(copies):
            if proven.collect is not None:
                which = proven.collect(number, at)
                self._look_at_kept(proven, which, 2 * len(copies))
            else:
                cast(BoundCall, proven.call).turn(number, back=True, every=False)
            if own:  # the next is collected to the same place
                self.timed.judge_rows(slot, {**at, **own})
        if not own:
            self.timed.judge_rows(0, *(at for _, at in copies))
        self._comparer.send(len(copies) * len(self.timed.outputs))
        if not proven.deterministic:
            return
        outputs = [[at[name] for _, at in copies] for name in self.timed.outputs]
        for every in outputs:
            self._comparer.digest(every, 0, poison=True)
        for number, _ in copies:
            proven.call.enqueue(number)
        for every in outputs:
            self._comparer.digest(every, len(copies))

    def _look_at_kept(self, proven: Proven, which: int, first: int) -> None:
        """Enqueue digests of all kept outputs of a warm replay; `which` is judged in its rows."""
        memory = () if proven.kept is None or first > 2 else tuple(proven.kept(0))
        if len(memory) < 2:
            return
        if memory not in self._tables:
            if len(self._tables) > _TABLES:
                self._tables.clear()
            self._tables[memory] = self._comparer.blocks_of(memory)
            self._session.settle()
        self._comparer.look(self._tables[memory], first, 0)
        self._kept = which, len(memory)

    def _compare_outputs(
        self, proven: Proven, copies: Sequence[Mapping[str, Buffer]], looked: bool
    ) -> None:
        for first in range(0, len(copies), self._most_slots):
            some = copies[first : first + self._most_slots]
            if not looked:
                self._look_at(some, proven, first)
            self._compare(proven, len(some))

    @property
    def _most_slots(self) -> int:
        """Calls whose outputs the judge can look at together."""
        return Comparer.SLOTS // len(self.timed.outputs)

    def _look_at(
        self, copies: Sequence[Mapping[str, Buffer]], proven: Proven, first: int = 0
    ) -> None:
        """first: the number of the first of these copies."""
        self._comparer.clear()
        for number, copy in enumerate(copies):
            if proven.collect is not None:
                proven.collect(first + number, copy)
            else:
                cast(BoundCall, proven.call).turn(first + number, back=True, every=False)
            if not proven.deterministic:
                proven.device_case.compare(number, copy)
        for name in proven.device_case.outputs if proven.deterministic else ():
            self._comparer.digest([copy[name] for copy in copies], 0)

    def _look(self, proven: Proven, slot: int) -> None:
        """Enqueue a look at what a call wrote into a slot, and poison it."""
        if proven.collect is not None:
            proven.collect(0, proven.device_case.buffers)
        if proven.deterministic:
            for name in proven.device_case.outputs:
                self._comparer.digest([proven.device_case.buffers[name]], slot, poison=True)
            if proven.lse is not None:
                self._comparer.digest([proven.lse], slot, poison=True)
        else:
            proven.device_case.compare(slot)
            proven.device_case.poison()

    def _compare(self, proven: Proven, slots: int, *, lse: bool = False) -> None:
        device_case = proven.device_case
        if not proven.deterministic:
            try:
                for found in self._comparer.found_of(slots, len(device_case.outputs)):
                    same = self._same(device_case, proven.rounds_scores)
                    how: dict[str, Any] = {"same": same, "slack": proven.slack}
                    device_case.accuracy(Errors(found, {}), proven.rounds_scores, **how)
            except WrongResult:
                self._mend(device_case)
                raise
            return
        expected = device_case.digest(proven.digests)
        if lse and proven.lse is not None and proven.lse_digests is not None:
            expected += device_case.digest(proven.lse_digests)
        counts = self._comparer.counts(slots)
        differing = int(np.count_nonzero(counts != np.uint64(expected % 2**64)))
        if differing:
            self._mend(device_case)
            raise WrongResult(
                f"a race, or an answer kept from an earlier call: {differing} of {slots} repeated "
                f"calls gave another output than the checked call ({device_case.case.label})"
            )

    def mend(self, copies: Sequence[Mapping[str, Buffer]] = ()) -> None:
        """Give the inputs, and those of cold copies, what they were made with: a call failed."""
        self._mend(self.timed)
        if copies:
            self._session.settle()
            for copy in copies:
                for name in self.timed.case.problem.inputs:
                    copy[name].copy_from(self.timed.buffers[name])
            self._session.settle()
            self._cold = None

    def _mend(self, device_case: DeviceCase) -> bool:
        """Renew the inputs if calls wrote to them, for the next; returns whether they did."""
        with self._session.stream:
            device_case.go_to(PLAIN)
            self._comparer.clear()
            device_case.look_at_inputs(0)
            (count,) = self._comparer.counts(1)
        return device_case.renew_inputs(count)

"""Proof that a candidate is right: on every case, in every call, before and after it is timed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.compile.launches import Candidate, Plan
from attnsweep.core import cases as verify_cases
from attnsweep.core.cases import Case
from attnsweep.core.long_problems import is_long
from attnsweep.core.problem import DTYPE_BYTES, Problem
from attnsweep.core.timings import proves, proving, step
from attnsweep.core.trial import Accuracy
from attnsweep.device.bound_call import BoundCall
from attnsweep.device.buffers import Buffer
from attnsweep.device.cuda import CudaSession
from attnsweep.verify import encoding, limits
from attnsweep.verify.calls import Calls, Collect, Judgeable, Proven
from attnsweep.verify.compare import Comparer
from attnsweep.verify.device_case import DeviceCase, Errors, Small, WrongResult
from attnsweep.verify.encoding import Bits
from attnsweep.verify.expected import OPPOSITE, PLAIN
from attnsweep.verify.hints import hints
from attnsweep.verify.reference_pool import ReferencePool
from attnsweep.verify.sample import Sample

Bind = Callable[[Any, Sequence[Mapping[str, Buffer]]], Judgeable]
_Bound = tuple[DeviceCase, Plan, Judgeable]


@dataclass(slots=True)
class _CheckedCall:
    """A call under check, and the slots that hold its findings."""

    device_case: DeviceCase
    outside: dict[str, int]
    lse: int | None = None


Digests = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64] | None]


class Verifier(Calls):
    """The cases of one problem on the device, and the candidates' outputs on them."""

    @proves("inputs")
    def __init__(
        self,
        problem: Problem,
        seed: int,
        session: CudaSession,
        cache_dir: Path | None = None,
        then: Problem | None = None,
        rounds_scores: Collection[int] = (),
        pool: ReferencePool | None = None,
    ) -> None:
        """pool: the process's, or one of this problem alone.

        then: the problem that will be opened next; its inputs are made meanwhile.

        rounds_scores: how often candidates and baselines round scores; what their limits come from
        is computed meanwhile, and then that of the next problem.
        """
        self._session, self._seed = session, seed
        self._pool = pool = pool or ReferencePool()
        pool.begin(problem, seed)
        with step("compile the judge"), proving("the judge's code"):
            comparer = Comparer(session, problem.dtype, cache_dir)
        with step("wait for NumPy's results"):
            known = pool.take(problem, seed)
        self._begin(problem, rounds_scores)
        with step("inputs and float64 outputs"):
            how: dict[str, Any] = {"known": known.timed, "sample": Sample.of(problem, seed)}
            timed = DeviceCase(Case(problem), seed, session, comparer, two_sided=True, **how)
            super().__init__(timed, session, comparer, dict(known.maths))
            cases = zip(verify_cases.small_cases(problem), known.small, strict=True)
            small = [DeviceCase(c, seed, session, comparer, known=k) for c, k in cases]
            self._small = Small(small, comparer)
            session.settle()
        if then is not None:
            pool.begin(then, seed)
            self._begin(then, rounds_scores)  # a baseline needs its limits soon
        self._hard: DeviceCase | None = None
        self._known_hard = known.hard
        self._served: dict[tuple[Case, ...], Small] = {}
        """Of families that do not serve all small cases."""
        # Digests of o and of lse, (2, 2, parts).
        self._digests = Buffer(2 * 2 * 8 * self.timed.parts)
        self._turns: DeviceCase | None = None

    def _begin(self, problem: Problem, rounds_scores: Collection[int]) -> None:
        """Start the host's computations behind the limits and the short turns.

        Finalists alone are judged on the hard case: its limits come last.
        """
        rounded = sorted({limits.rounded_scores(problem, each) for each in rounds_scores} - {0})
        for often in rounded:
            self._pool.begin_rounding(problem, often)
        if len(verify_cases.whole_cases(problem)) > 1:
            for often in (0, *rounded):
                self._pool.begin_rounding(problem, often, hard=True)
        if (turns := verify_cases.short_turns(problem, self._session.gpu.sm_count)) is not None:
            self._pool.begin_turns(turns, self._seed)

    def _know_limits(self, rounds_scores: int, case: Case | None = None) -> None:
        """Take the limits' inputs from the helper process; computing them here would be slower."""
        case = case or self.timed.case
        often = limits.rounded_scores(case.problem, rounds_scores)
        if (case, often) not in self._maths:
            with step("wait for NumPy's limits"):
                hard = case != self.timed.case
                self._maths.update(self._pool.rounding(case.problem, often, hard=hard))

    def settle(self) -> None:
        """Wait until helper processes are idle, so that host times can be measured."""
        self._pool.wait()

    @proves("candidates")
    def of_candidate(
        self,
        candidate: Candidate,
        call: Judgeable,
        bind: Bind,
        workspaces: Mapping[tuple[str, int], Buffer],
        *,
        small: bool,
    ) -> tuple[Accuracy, Proven]:
        """Check a candidate on the timed problem and its opposite, and on the small cases.

        call: its launches on the timed problem. bind: binds other launches to buffers, and adds
        their workspaces. Returns its worst accuracy. Raises WrongResult.
        """
        bound, cases = [], None
        if small and candidate.checks:
            cases = self._small_of(candidate)
            for device_case, launches in zip(cases.device_cases, candidate.checks, strict=True):
                bound.append((device_case, launches, bind(launches, [device_case.buffers])))
        timed = self.timed, candidate.timed, call
        accuracies, found, proven = self._checked(candidate, bound, timed, workspaces, cases)
        worst = max(accuracies, key=lambda each: max(each.shares.values()))
        return self._named(worst, found[-3][0], found[-1][0]), proven

    @property
    def small(self) -> Sequence[DeviceCase]:
        """Small, odd and hard cases of the problem's kind."""
        return self._small.device_cases

    def of_small(self, device_case: DeviceCase, rounds_scores: int) -> None:
        """Judge the output of a small case. Raises WrongResult."""
        with self._session.stream:
            self._comparer.clear()
            device_case.compare(0)
            (found,) = self._comparer.found_of(1, len(device_case.outputs))
        same = self._same(device_case, rounds_scores)
        device_case.accuracy(Errors(found, {}), rounds_scores, same=same)

    def hard(self, rounds_scores: int) -> DeviceCase | None:
        """The timed problem on hard inputs, and its limits; None of gradients and long calls.

        It is made when it is first asked for, which takes seconds in FP8.
        """
        case = verify_cases.hard_case(self.timed.case.problem)
        if not self.timed.redraws or is_long(case.problem):
            return None
        if self._hard is None:
            with step("inputs and float64 outputs"):
                own, sample = (case, self._seed), self.timed.sample
                how: dict[str, Any] = {"known": self._known_hard, "sample": sample}
                self._hard = DeviceCase(*own, self._session, self._comparer, **how)
                self._known_hard = None  # as large as the timed inputs
        self._know_limits(rounds_scores, case)
        return self._hard

    def _downloaded(self, names: Iterable[str], items: int | None = None) -> dict[str, Bits]:
        """Tensors of the timed problem on the host, without scales. items: the first of a batch."""
        problem, made = self.timed.case.problem, dict[str, Bits]()
        self._session.synchronize()
        for name in names:
            kind = {2: np.uint16, 4: np.uint32}[DTYPE_BYTES[problem.tensor(name).dtype]]
            batch, *of_one = problem.shape_of(name)
            made[name] = np.empty((items or batch, *of_one), kind)
            self.timed.buffers[name].download(made[name])
        return made

    def _hinted(self, error: WrongResult) -> WrongResult:
        """The error of a forward's output that is on the device, with hints at the mistake."""
        problem, accuracy = self.timed.case.problem, error.accuracy
        plain = problem.inputs == ("q", "k", "v") and not is_long(problem)
        if accuracy is None or not plain:
            return error
        bits = self._downloaded("qkvo", 1)
        o, *given = (encoding.from_bits(bits[name], problem.dtype) for name in "oqkv")
        own = o, dict(zip("qkv", given, strict=True))
        one = replace(problem, batch=1, dtype="fp32")
        found = hints(*own, one, accuracy.limit, self._seed)
        return WrongResult(error.detail, accuracy.model_copy(update={"hints": found}))

    @proves("hard inputs")
    def prepare_hard(self, rounds_scores: int) -> None:
        """Make hard inputs for candidates of ours, unless they may not fit beside what is there.

        Skipped when memory is short: they are in memory twice, with outputs in float64.
        """
        problem = self.timed.case.problem
        inputs = sum(self.timed.buffers[name].nbytes for name in problem.inputs)
        written = sum(math.prod(tensor.shape) for tensor in problem.op.written(problem))
        needed = 2 * inputs + 8 * written
        room = self._hard is not None or needed <= self._session.free_bytes // 2
        if room and len(verify_cases.whole_cases(problem)) > 1:
            self.hard(rounds_scores)

    @proves("hard inputs")
    def on_hard(self, proven: Proven, replay: Callable[[], None]) -> int:
        """Judge calls on hard inputs, which take the place of the timed ones meanwhile.

        Returns how many: of ours none, unless prepare_hard has made them. Raises WrongResult.
        """
        ours, timed, stream = proven.collect is None, proven.device_case, self._session.stream
        hard = self._hard if ours else self.hard(proven.rounds_scores)
        if ours and len(verify_cases.whole_cases(timed.case.problem)) < 2:
            hard = None  # a callable's, of a problem on which ours are not judged so
        if hard is None:
            return 0
        names = timed.case.problem.inputs
        kept = {name: Buffer(timed.buffers[name].nbytes) for name in names}
        with stream:
            timed.go_to(PLAIN)
            hard.redraw()
            for name in names:
                kept[name].copy_from(timed.buffers[name], stream)
                timed.buffers[name].copy_from(hard.buffers[name], stream)
            self._poison(proven)
            replay()
            if proven.collect is not None:
                proven.collect(0, self.outputs)
            self._comparer.clear()
            hard.judge_rows(0, {**hard.buffers, **self.outputs, **proven.collected_lse})
            for name in names:
                timed.buffers[name].copy_from(kept[name], stream)
            self._refuse_rows(replace(proven, device_case=hard), 1)
        return 1

    def _small_of(self, candidate: Candidate) -> Small:
        """The problem's small cases, or those of a family that does not serve all of them."""
        if candidate.cases is None:
            return self._small
        if candidate.cases not in self._served:
            with step("inputs and float64 outputs"):
                how = self._seed, self._session, self._comparer
                made = [DeviceCase(case, *how) for case in candidate.cases]
                self._served[candidate.cases] = Small(made, self._comparer)
        return self._served[candidate.cases]

    def _checked(
        self,
        candidate: Candidate,
        small: Sequence[_Bound],
        two_sided: _Bound,
        workspaces: Mapping[tuple[str, int], Buffer],
        cases: Small | None = None,
    ) -> tuple[list[Accuracy], list[list[dict[str, float]]], Proven]:
        """Check a candidate on the small cases or none, on a case, and on its opposite.

        cases: of `small`. Returns the accuracies, the findings behind them and those of
        DeviceCase.compare_format, and its outputs on the last case. Raises WrongResult.
        """
        comparer, (last, launches, pipeline) = self._comparer, two_sided
        parts, lse = last.parts, None
        # The first slots are those of Small.look.
        slots = itertools.count(2 * len(small))
        with self._session.stream:
            comparer.clear()
            self._digests.fill(0)
            last.go_to(PLAIN)
            called = []
            if small and cases:
                cases.renew()
                for number, bound in enumerate(small):
                    called.append(self._call(bound, workspaces, len(small) + number, slots))
                cases.compare()
                cases.look(0)
            for side in (PLAIN, OPPOSITE):
                last.go_to(side)
                outputs = [last.buffers[name] for name in last.outputs]
                for output in outputs:
                    output.poison()
                called.append(self._call(two_sided, workspaces, slot := next(slots), slots))
                last.compare(len(small) + side)
                if side == PLAIN:
                    last.compare_format(len(small) + 2)
                for output in outputs:
                    comparer.count_outside(output, slot)
                    comparer.digest_parts(output, self._digests, side * parts, parts)
                lse = workspaces.get(("lse", 4 * last.rows)) if launches.lse else None
                if lse is not None:
                    comparer.digest_parts(lse, self._digests, (2 + side) * parts, parts)
            last.go_to(PLAIN)
            last.look_at_inputs(looked := next(slots))
            counts = comparer.counts(next(slots))
            found = comparer.found_of(len(small) + 3, len(last.outputs))
            digests = np.empty((2, 2, parts), np.uint64)
            self._digests.download(digests)
        looks = [*((device_case, counts[i]) for i, (device_case, *_) in enumerate(small))]
        looks.append((last, counts[looked]))
        damaged = [
            device_case.case.label
            for device_case, count in looks
            if device_case.renew_inputs(count)
        ]
        if damaged:
            raise WrongResult(f"wrote to its inputs, or next to them ({damaged[0]})")
        self._know_limits(candidate.rounds_scores)
        accuracies = []
        for one, values in zip(called, found[:-1], strict=True):
            outside = {name: int(counts[slot]) for name, slot in one.outside.items()}
            off = 0.0 if one.lse is None else float(counts[one.lse : one.lse + 1].view(float)[0])
            shown = Errors(values, outside, off)
            same = self._same(one.device_case, candidate.rounds_scores)
            accuracies.append(one.device_case.accuracy(shown, candidate.rounds_scores, same=same))
        how = pipeline, candidate.deterministic, candidate.rounds_scores
        return accuracies, found, Proven(last, *how, digests[0], lse, digests[1])

    def _call(
        self,
        bound: _Bound,
        workspaces: Mapping[tuple[str, int], Buffer],
        of_output: int,
        slots: Iterator[int],
    ) -> _CheckedCall:
        """Make a call on poisoned outputs, and check its workspaces.

        of_output: the slot in which bytes outside the output are counted, by the caller.
        """
        device_case, launches, pipeline = bound
        own = {item[0]: workspaces[item] for item in launches.workspaces.items()}
        for buffer in own.values():
            buffer.poison()
        pipeline.enqueue()
        called = _CheckedCall(device_case, {", ".join(device_case.outputs): of_output})
        for name, buffer in own.items():
            called.outside[name] = next(slots)
            self._comparer.count_outside(buffer, called.outside[name])
        if launches.lse:
            called.lse = next(slots)
            device_case.compare_lse(own["lse"], called.lse)
        return called

    @proves("short turns")
    def of_turns(
        self, candidate: Candidate, bind: Bind, workspaces: Mapping[tuple[str, int], Buffer]
    ) -> Proven | None:
        """Check a candidate on its short turns and their opposite; None if it has none.

        The case is made for the first candidate. See of_candidate. Raises WrongResult.
        """
        launches = candidate.turns
        if launches is None:
            return None
        case = Case(launches.problem)
        if self._turns is None or self._turns.case != case:
            with step("wait for NumPy's results"):
                known, maths = self._pool.turns(case, self._seed)
            self._maths.update(maths)
            with step("inputs and float64 outputs"):
                how = (self._seed, self._session, self._comparer)
                self._turns = DeviceCase(case, *how, two_sided=True, known=known)
            parts = max(self.timed.parts, self._turns.parts)
            self._digests = Buffer(2 * 2 * 8 * parts)
        call = bind(launches, [self._turns.buffers])
        return self._checked(candidate, [], (self._turns, launches, call), workspaces)[-1]

    def _named(
        self, accuracy: Accuracy, timed: Mapping[str, float], of_format: Mapping[str, float]
    ) -> Accuracy:
        """Add the seed and the timed error to an accuracy, and in FP8 the format's own error.

        timed: the findings on the timed problem. of_format: those of DeviceCase.compare_format.
        """
        facts: dict[str, Any] = {"seed": self._seed, "timed_err": timed["row"]}
        problem = self.timed.case.problem
        judged, rows = self.timed.judged_rows, problem.heads * problem.rows_with_keys
        if judged < rows:
            facts["judged"] = round(judged / rows, 4)
        if self.timed.format_err is not None:
            facts |= {"format_err": self.timed.format_err, "total_err": of_format["row"]}
        return accuracy.model_copy(update=facts)

    def proved_before(
        self,
        candidate: Candidate,
        call: BoundCall,
        workspaces: Mapping[tuple[str, int], Buffer],
        digests: Digests,
    ) -> Proven:
        """The proof of identical launches that gave these digests before.

        Nothing is launched: the outputs of its replays are compared with what was right then.
        """
        lse = workspaces.get(("lse", 4 * self.timed.rows)) if candidate.timed.lse else None
        how = (call, candidate.deterministic, candidate.rounds_scores)
        return Proven(self.timed, *how, digests[0], lse, digests[1])

    @proves("baselines")
    def of_baseline(
        self,
        call: Judgeable,
        collect: Collect,
        rounds_scores: int,
        *,
        held: bool = False,
        shown: bool = False,
        lse: Buffer | None = None,
        kept: Callable[[int], Sequence[tuple[int, int]]] | None = None,
    ) -> tuple[Accuracy, Proven]:
        """The accuracy of a baseline's outputs on the inputs as they were made, and their judging.

        collect: see Proven; outputs are poisoned before. held: an error over the limit is wrong, as
        a candidate's, unless it is to be `shown`, and so is a write to the inputs; otherwise only
        NaN is, and replays may be twice as far off as this call. lse: where `collect` writes the
        log-sum-exp, if there is one. kept: see Proven. Raises WrongResult.
        """
        self._know_limits(rounds_scores)
        with self._session.stream:
            self.timed.go_to(PLAIN)
            for output in self.outputs.values():
                output.poison()
            call.enqueue()
            collect(0, self.outputs)
            self._comparer.clear()
            if lse is not None:
                self.timed.compare_lse(lse, 1)
            self.timed.compare(0)
            self.timed.compare_format(1)
            found, (of_format, *_) = self._comparer.found_of(2, len(self.timed.outputs))
            self.timed.look_at_inputs(0)
            count, off = self._comparer.counts(2)
        if self.timed.renew_inputs(count) and held:
            raise WrongResult(f"wrote to its inputs, or next to them ({self.timed.case.label})")
        same = self._same(self.timed, rounds_scores)
        try:
            accuracy = self.timed.accuracy(
                Errors(found, {}, float(np.uint64(off).view(np.float64))),
                rounds_scores,
                baseline=shown or not held,
                same=same,
            )
        except WrongResult as error:
            raise self._hinted(error) from None
        most = max([1.0, *accuracy.shares.values()])
        slack = 1.0 if held and (not shown or most == 1) else 2 * most
        none = np.empty(0, np.uint64)
        how: dict[str, Any] = {"lse": lse, "collect": collect, "kept": kept, "slack": slack}
        proven = Proven(self.timed, call, False, rounds_scores, none, **how)
        return self._named(accuracy, found[0], of_format), proven

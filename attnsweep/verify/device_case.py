"""A case on the device: its guarded inputs and output, and what the output must be.

`DeviceCase` is one case, whose expected output NumPy's reference proves on some rows. `Small` takes
several of them through a check in a few launches.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import Case
from attnsweep.core.ops import DTYPE_BYTES, of_heads
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.device.buffers import POISON, Buffer
from attnsweep.verify import limits as verify_limits
from attnsweep.verify import measures
from attnsweep.verify.compare import ComparedOutput, Comparer, LaunchRecords
from attnsweep.verify.encoding import Float, Tensor, Windows, check_scales
from attnsweep.verify.expected import OPPOSITE, PLAIN, ExpectedCase, negated_heads
from attnsweep.verify.measures import TILT, Measures, Same
from attnsweep.verify.oracle import Oracle, oracle_of
from attnsweep.verify.sample import ALL, Sample

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

# The device's reference and NumPy's differ by the order of their sums: 1e-15 times a few hundred.
_PROOF = 1e-11


def regions_to_redraw(
    comparer: Comparer, problem: Problem, copies: Sequence[Mapping[str, Buffer]]
) -> LaunchRecords:
    """The inputs of copies for Comparer.redraw, which gives each a content of its own.

    For a backward, o and dO are drawn too; its log-sum-exps stay, and so does an FP8 cache.
    """
    own = (name for name in problem.inputs if name in of_heads(problem))
    drawn = [name for name in own if problem.tensor(name).dtype == problem.dtype]
    signs = {name: 2 if name in problem.format.signs_kept else 1 for name in drawn}
    every = [(copy[name], signs[name]) for copy in copies for name in drawn]
    return comparer.regions([(*one, number) for number, one in enumerate(every)])


class WrongResult(Exception):
    """A candidate that ran but is wrong; `accuracy`, if known, says by how much."""

    def __init__(self, detail: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(detail, accuracy)
        self.detail, self.accuracy = detail, accuracy


class BrokenComparison(Exception):
    """The device's float64 reference differs from NumPy's: nothing can be judged here."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Findings of one checked call: of each output, and bytes written outside.

    lse: 0 if none is there.
    """

    values: Sequence[dict[str, float]]
    outside: dict[str, int]
    lse: float = 0.0


class DeviceCase:
    """One case on the device: guarded inputs and outputs, and the expected float64 outputs.

    two_sided: the heads of k and v can be negated, each for itself, which gives it other scores
    and outputs; of a backward, those of dO, which negates its gradients. `draw` chooses which at
    random, so that the last answers are wrong ones. A head has no more than these two contents.

    Where it `redraws`, `redraw` gives q, k and v contents that no call has seen. What is right for
    them is computed for rows that are drawn after the call.
    """

    content = 0
    """The seed that the inputs were last drawn from; 0 while they are as made, or a mix."""

    _negated: npt.NDArray[np.bool_] | None = None
    _ahead: tuple[int, npt.NDArray[np.bool_]] | None = None
    sample = ALL

    def __init__(
        self,
        case: Case,
        seed: int,
        session: CudaSession,
        comparer: Comparer,
        *,
        two_sided: bool = False,
        known: ExpectedCase | None = None,
        sample: Sample = ALL,
    ) -> None:
        """known: what is known of the case with this seed; computed now if it is None.

        sample: the tiles of queries whose outputs are judged.
        """
        self.case, self.comparer = case, comparer
        problem = case.problem
        how: dict[str, Any] = {"two_sided": two_sided, "sample": sample}
        known = known or self._oracle.expected(case, seed, **how)
        self.mix = PLAIN
        self._seed, self._rng = seed, np.random.default_rng(seed)
        # A head with half a word cannot be negated without its neighbour.
        item = DTYPE_BYTES[problem.dtype]
        # Neither can one of a page that several requests share.
        apart = two_sided and not any(dim * item % 4 for dim in problem.head_dims)
        apart = apart and problem.layout.kind != "paged"
        self._heads_kv = problem.batch * problem.heads_kv if apart else 1
        # A part of an output: where one has a head for each of keys, it is that of a key head.
        heads = min(problem.shape_of(name)[1] for name in self.outputs)
        group = heads // problem.heads_kv
        self.parts = self._heads_kv * group if apart else 1
        self.buffers: dict[str, Buffer] = {}
        check_scales(known.inputs, problem)
        for name, bits in known.inputs.items():
            self.buffers[name] = Buffer(bits.nbytes, guard=POISON)
            _upload(bits, self.buffers[name])
        for name in self.outputs:
            self.buffers[name] = Buffer(problem.bytes_of(name))
        self._inputs = self.regions_to_look_at(self.buffers)
        self.redraws = two_sided and self._oracle.can_redraw(problem)
        self._to_redraw: LaunchRecords | None = None
        self._session = session
        self.rows = problem.batch * problem.heads * problem.seqlen_q
        self.sample = sample
        self._mix = Buffer(8)
        session.settle()
        self.tilted: Buffer | None = None
        self.sides: list[dict[str, Buffer]] = []
        """What is right on the inputs as they were made, and on their opposite."""
        self.floor = dict.fromkeys(self.outputs, 0.0)
        with session.stream:
            self._mix.fill(0)
            comparer.clear()
            if not two_sided and case.inputs == "normal" and self._oracle.tilts:
                self.tilted = self._side(TILT)[self.outputs[0]]
            for mix in (PLAIN, OPPOSITE)[: 1 + two_sided]:
                self.go_to(mix)
                self.sides.append(self._side())
            self.go_to(PLAIN)
            self.compare(0)
            self.look_at_inputs(0)
            norms = [one["norm"] for one in comparer.found(len(self.outputs))]
            self._intact = comparer.counts(1)[0]
        for name, norm in zip(self.outputs, norms, strict=True):
            least = known.least.get(name, 0.0)
            self.floor[name] = measures.floor(norm, self.rows_of(name), least)
        for side, right in zip(self.sides, known.sides, strict=True):
            self._prove(side, known, right)
        self.format_err: float | None = None
        self._drawn = self._unrounded(known)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a call's outputs."""
        return self.case.problem.outputs

    @property
    def _oracle(self) -> Oracle:
        return oracle_of(self.case.problem)

    def _float64(self) -> dict[str, Buffer]:
        """Memory for what is right."""
        written = self.case.problem.op.written(self.case.problem)
        return {tensor.name: Buffer(8 * math.prod(tensor.shape)) for tensor in written}

    def _side(self, tilt: float = 0.0) -> dict[str, Buffer]:
        """The expected outputs on the present inputs."""
        made = self._float64()
        self._oracle.write(self, made, tilt)
        return made

    @property
    def judged_rows(self) -> int:
        """Rows of queries that see a key and are compared with float64, of all heads."""
        return self.rows_of(self.outputs[0])

    def rows_of(self, output: str) -> int:
        """Rows of an output that are compared with float64, and are not 0 in any case."""
        return self._oracle.rows_of(self.case.problem, output, self.sample)

    def _unrounded(self, known: ExpectedCase) -> Buffer | None:
        """The expected output on the inputs before they were rounded, of a timed case in FP8."""
        if known.drawn is None or known.exact is None:
            return None
        problem = replace(self.case.problem, dtype="fp32")
        inputs = {name: Buffer(values.nbytes) for name, values in known.drawn.items()}
        for name, values in known.drawn.items():
            inputs[name].upload(np.ascontiguousarray(values))
        inputs |= {name: self.buffers[name] for name in problem.inputs if name not in inputs}
        made, (name,) = self._float64(), self.outputs
        exact, lse = made.values()
        self._session.settle()
        with self._session.stream:
            comparer = self.comparer.of_dtype("fp32")
            comparer.reference(inputs, problem, exact, lse, 0.0, self.sample)
            plain, floor = self.sides[PLAIN][name].pointer, self.floor[name]
            one = ComparedOutput(plain, problem, [exact], None, None, floor, name, self.sample)
            comparer.compare(one, 0, exact=True)
            self.format_err = comparer.found(1)[0]["row"]
        self._prove(made, known, known.exact)
        return exact

    def compare_format(self, slot: int) -> bool:
        """Measure what FP8 costs: the output's distance from float64 on inputs before rounding.

        Returns whether anything was compared: only a timed case in FP8 has such inputs.
        """
        if self._drawn is None:
            return False
        (name,) = self.outputs
        how = (None, None, self.floor[name], name, self.sample)
        drawn = ComparedOutput(self.buffers[name].pointer, self.case.problem, [self._drawn], *how)
        self.comparer.compare(drawn, slot)
        return True

    def _prove(
        self, side: Mapping[str, Buffer], known: ExpectedCase, right: Mapping[str, Float]
    ) -> None:
        """Raise BrokenComparison unless the device's reference is NumPy's on the known rows."""
        for name, exact in right.items():
            shape = self.case.problem.shape_of(name)
            found = self.comparer.rows(side[name], (*shape, 1)[:4], known.rows[name])
            if len(shape) == 4:
                error = measures.row_error(found, exact, known.least.get(name, 0.0))
            else:  # of scores up to a thousand
                error = float(measures.apart(found[..., 0], exact).max()) / 1e3
            if not error <= _PROOF:
                raise BrokenComparison(
                    f"the float64 reference on this GPU is off by {error:.1e} ({self.case.label}): "
                    "nothing can be judged; run compute-sanitizer, and report this"
                )

    def go_to(self, mix: int) -> None:
        """Go to a mix of inputs: PLAIN, OPPOSITE, or a number that negates some heads."""
        self.to_content(0)
        if self.mix != mix:
            negated = [name for name in self._oracle.negated if name in self.buffers]
            tensors = [self.buffers[name] for name in negated]
            dtype = self.case.problem.tensor(negated[0]).dtype
            self.comparer.negate(tensors, dtype, self._heads_kv, self._mix, self.mix, mix)
            self.mix, self._negated = mix, None

    def redraw(self) -> None:
        """Give q, k and v other mantissas and signs, which nothing can know before.

        Exponents and the first bits of mantissas stay, so that values are as large as before, and
        so do some formats' signs.
        """
        self.to_content(secrets.randbits(64) or 1)

    def to_content(self, content: int) -> None:
        """Give q, k and v the content of a number of 64 bits; 0 is as they were made."""
        if content != self.content:
            if self._to_redraw is None:
                own = (self.comparer, self.case.problem, [self.buffers])
                self._to_redraw = regions_to_redraw(*own)
                self._session.settle()
            self.comparer.redraw(self._to_redraw, self.content, content)
            self.content = content

    def regions_to_look_at(self, buffers: Mapping[str, Buffer]) -> LaunchRecords:
        """Records of the inputs and their guards, which Comparer.look checks for writes."""
        inputs = enumerate(self.case.problem.inputs)
        return self.comparer.regions([(buffers[name], 1 + i, 0) for i, name in inputs])

    def compare_anew(self, slot: int, outputs: Mapping[str, Buffer]) -> object:
        """Compare every element of outputs with float64 of the inputs as they are now.

        Findings go to slots from this one on. Returns what is in use until then.
        """
        side, problem = self._side(), self.case.problem
        for number, name in enumerate(self.outputs):
            how = (None, None, self.floor[name], name, self.sample)
            one = ComparedOutput(outputs[name].pointer, problem, [side[name]], *how)
            self.comparer.compare(one, slot + number)
        return side

    def judge_rows(self, slot: int, *every: Mapping[str, Buffer]) -> None:
        """Compare rows at random of calls with float64 of the inputs as they are.

        every: the tensors of each, with an `lse` that is judged too. Findings go to as many slots
        for each as there are outputs, from the slot-th of such groups on.
        """
        seed = secrets.randbits(64)
        self._oracle.judge_rows(self, every, seed, slot * len(self.outputs))

    def refuse_rows(
        self,
        found: Sequence[dict[str, float]],
        rounds_scores: int,
        same: Same | None,
        slack: float,
        rows: int,
    ) -> None:
        """Raise WrongResult if a finding is over `slack` times a limit.

        found: of judge_rows and then of compare_anew, of each call's outputs in turn. rows: how
        many are of judge_rows, which compares log-sum-exps too, if calls may return any.
        """
        most = self._oracle.limits(self.case, rounds_scores, same)
        anew = f"{self.case.label}, drawn anew"
        labels = {name: self._said(name, anew) for name in self.outputs}
        lse = self.case.problem.op.optional(self.case.problem)
        for number, (output, values) in enumerate(zip(itertools.cycle(labels), found)):
            taken = Measures(values["row"], values["element"], row_gain=values["row_gain"])
            label = labels[output]
            if values["nans"]:
                raise WrongResult(f"outputs are NaN or were never written ({label})")
            self._refuse(output, values, taken, most[output], label, slack, None)
            if lse and number < rows:
                self._refuse_lse(values["tile_gain"], label, None)

    def _said(self, output: str, label: str) -> str:
        """A label that names the output, if there are several."""
        return f"{output}, {label}" if len(self.outputs) > 1 else label

    def draw(self) -> None:
        """Go to a mix at random in which some head is another than it is now."""
        before, (mix, negated) = self._now(), self._ahead or self._at_random()
        while not (negated != before).any():
            mix, negated = self._at_random()
        self.go_to(mix)
        self._negated, self._ahead = negated, None

    def draw_ahead(self) -> None:
        """Choose where `draw` goes, while the device is busy: then it waits less for the host."""
        self._ahead = self._at_random()

    def _at_random(self) -> tuple[int, npt.NDArray[np.bool_]]:
        drawn = int(self._rng.integers(2, 2**64, dtype=np.uint64))
        mix = drawn if self._heads_kv > 1 else 1 - self.mix
        return mix, negated_heads(mix, self._heads_kv)

    def _now(self) -> npt.NDArray[np.bool_]:
        """Which heads of keys are negated now."""
        if self._negated is None:
            self._negated = negated_heads(self.mix, self._heads_kv)
        return self._negated

    def digest(self, of_sides: npt.NDArray[np.uint64]) -> int:
        """The digest of outputs on the present inputs, of those of their parts (2, parts)."""
        sides = self._now().repeat(self.parts // self._heads_kv).astype(int)
        return int(of_sides[sides, np.arange(self.parts)].sum(dtype=np.uint64))

    def look_at_inputs(self, slot: int) -> None:
        """Add to a slot a digest of the inputs, and how many bytes of their guards are others."""
        self.comparer.look(self._inputs, slot)

    def renew_inputs(self, count: int) -> bool:
        """Whether look_at_inputs found others than were made, which are then made again.

        To be called, as that, on the inputs as they were made.
        """
        if count == self._intact:
            return False
        for name, bits in self._oracle.make_inputs(self.case, self._seed).items():
            with self._session.stream:
                self.buffers[name].poison()
            self._session.settle()
            _upload(bits, self.buffers[name])
        self._session.settle()
        return True

    def compared(self, buffers: Mapping[str, Buffer] | None = None) -> list[ComparedOutput]:
        """The outputs on the present inputs, its own or of a copy, to be compared."""
        at, mix = buffers or self.buffers, self._mix if len(self.sides) > 1 else None
        made = []
        for name in self.outputs:
            expected = [side[name] for side in self.sides]
            how = (mix, self.tilted, self.floor[name], name, self.sample)
            made.append(ComparedOutput(at[name].pointer, self.case.problem, expected, *how))
        return made

    def compare(self, slot: int, buffers: Mapping[str, Buffer] | None = None) -> None:
        """Compare the outputs on the present inputs, its own or of a copy.

        Findings go to as many slots as there are outputs, the slot-th of such groups.
        """
        for number, one in enumerate(self.compared(buffers)):
            self.comparer.compare(one, slot * len(self.outputs) + number)

    def poison(self) -> None:
        """Fill the outputs with NaN."""
        for name in self.outputs:
            self.buffers[name].fill(POISON)

    def compare_lse(self, written: Buffer, slot: int) -> None:
        """Compare the log-sum-exps of all rows into a slot, on PLAIN or OPPOSITE inputs."""
        if written.nbytes < 4 * self.rows:
            raise WrongResult(
                f"the workspace 'lse' has {written.nbytes} bytes, and {self.rows} rows of float32 "
                f"need {4 * self.rows} ({self.case.label})"
            )
        expected = self.sides[self.mix]["lse"]
        self.comparer.compare_lse(written, expected, self.case.problem, self.sample, slot)

    def accuracy(
        self,
        found: Errors,
        rounds_scores: int,
        *,
        baseline: bool = False,
        same: Same | None = None,
        slack: float = 1.0,
    ) -> Accuracy:
        """The accuracy of a call's outputs: of the worst. Raises WrongResult if one is wrong.

        baseline: only NaN is wrong; an error over the limit is returned, to be shown. same: errors
        of the same maths, if they are known, which give the limits. slack: how many times a limit
        may be exceeded.
        """
        label, every = self.case.label, []
        most = self._oracle.limits(self.case, rounds_scores, same)
        for name, values in zip(self.outputs, found.values, strict=True):
            taken = self._taken(name, values, rounds_scores)
            shares = taken.shares(most[name])
            one = Accuracy(
                rel_err=taken.row if np.isfinite(taken.row) and not values["nans"] else None,
                limit=most[name].row,
                case=label,
                shares={name: float(f"{share:.3g}") for name, share in shares.items()},
                output=name if len(self.outputs) > 1 else None,
            )
            every.append((name, values, taken, one))
        # NaN first, and then the output that is nearest to its limits.
        every.sort(key=lambda each: (each[1]["nans"] == 0, -_worst(each[3])))
        name, values, taken, accuracy = every[0]
        said = self._said(name, label)
        for where, count in found.outside.items():
            if count:
                raise WrongResult(f"wrote {count} bytes outside {where!r} ({label})")
        if values["nans"]:
            size = math.prod(self.case.problem.shape_of(name))
            raise WrongResult(
                f"{values['nans']:.0f} of {size} outputs are NaN or were never written ({said})",
                accuracy,
            )
        if baseline:
            return accuracy
        self._refuse(name, values, taken, most[name], said, slack, accuracy)
        self._refuse_lse(found.lse, label, accuracy)
        return accuracy

    def _refuse_lse(self, off: float, label: str, accuracy: Accuracy | None) -> None:
        """Raise WrongResult if a log-sum-exp is off by more than its limit."""
        if off and not off <= (limit := verify_limits.lse_limit(self.case)):
            text = f"log-sum-exp off by {off:.1e}, over the limit {limit:.0e}"
            raise WrongResult(f"{text} ({label})", accuracy)

    def _refuse(
        self,
        output: str,
        values: dict[str, float],
        taken: Measures,
        most: Measures,
        said: str,
        slack: float,
        accuracy: Accuracy | None,
    ) -> None:
        """Raise WrongResult if a measure is over `slack` times its limit."""
        shares = taken.shares(most)
        over = [which for which, share in shares.items() if not share <= slack]  # so that NaN fails
        if not over:
            return
        which = over[0]  # the error of a row says most
        problem = self.case.problem
        head, row = divmod(int(values["row_at"]), problem.shape_of(output)[2])
        value, limit = getattr(taken, which), getattr(most, which)
        text = _SAID[which].format(value=value, limit=limit, at=f"row {row} of head {head}")
        heads = problem.shape_of(output)[1]
        where = {"batch": head // heads, "head": head % heads, "row": row}
        accuracy = accuracy or Accuracy(
            rel_err=taken.row,
            limit=most.row,
            case=said,
            shares={name: float(f"{share:.3g}") for name, share in shares.items()},
        )
        accuracy = accuracy.model_copy(update={"where": where})
        raise WrongResult(f"{text} ({said})", accuracy)

    def _taken(self, output: str, values: dict[str, float], rounds_scores: int) -> Measures:
        """The measures of an output that findings say."""
        often = rounds_scores if values["tilt_norm"] > 0 else 0  # of small cases alone
        of_rounding = verify_limits.scale_of_rounding(self.case, self._seed, often)
        rows = max(1, self.rows_of(output))
        return Measures(
            **{name: values[name] for name in ("row", "element", "row_gain", "tile_gain")},
            rms=float(np.sqrt(values["squares"] / rows)),
            gain=abs(values["gains"]) / rows,
            scale=abs(TILT * values["tilt"] / (values["tilt_norm"] or 1.0) - of_rounding),
        )


def _worst(accuracy: Accuracy) -> float:
    """The largest share of a limit; NaN is the largest of all."""
    shares = accuracy.shares.values()
    return max((math.inf if share != share else share for share in shares), default=0.0)


# The sentence for an error over each limit.
_SAID = {
    "row": "relative error {value:.2e} over the limit {limit:.2e} in {at}",
    "rms": "rows have a typical relative error of {value:.2e}, over the limit {limit:.2e}",
    "element": "an element is off by {value:.2e} of its row, over the limit {limit:.2e}",
    "row_gain": "a row is scaled by 1 ± {value:.2e}, over the limit {limit:.2e}",
    "tile_gain": "64 rows are scaled by 1 ± {value:.2e}, over the limit {limit:.2e}",
    "gain": "all outputs are scaled by 1 ± {value:.2e}, over the limit {limit:.2e}",
    "scale": "the softmax scale is off by {value:.2e}, over the limit {limit:.2e}",
}


def _upload(tensor: Tensor, to: Buffer) -> None:
    if isinstance(tensor, Windows):
        to.upload_parts(tensor.pool, tensor.begins)
    else:
        to.upload(tensor)


class Small:
    """The small cases of a trial, for all of which few launches prepare and judge outputs.

    A trial has eleven of them. Each apart takes 12 launches, and the host needs longer to
    issue one than the device to run it.
    """

    def __init__(self, device_cases: Sequence[DeviceCase], comparer: Comparer) -> None:
        self.device_cases, self._comparer = device_cases, comparer
        count = len(device_cases)
        outputs = [
            (each.buffers[name], 0, count + i)
            for i, each in enumerate(device_cases)
            for name in each.outputs
        ]
        inputs = [
            (each.buffers[name], 1 + place, i)
            for i, each in enumerate(device_cases)
            for place, name in enumerate(each.case.problem.inputs)
        ]
        self._outputs = comparer.regions(outputs)
        self._regions = comparer.regions([*inputs, *outputs])
        self._compared = comparer.outputs([one for each in device_cases for one in each.compared()])

    def renew(self) -> None:
        """Poison each output, and renew its guards."""
        self._comparer.renew(self._outputs)

    def compare(self) -> None:
        """Compare each case's outputs into the slots of its number, as DeviceCase.compare does."""
        self._comparer.compare_each(self._compared)

    def look(self, first: int) -> None:
        """Look at the inputs of each into slots from `first` on, then count bytes outside outputs.

        The slots of inputs are those of DeviceCase.look_at_inputs; there are two for each case.
        """
        self._comparer.look(self._regions, first)

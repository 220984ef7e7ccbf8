"""A case on the device: its guarded inputs and output, and what the output must be.

`DeviceCase` is one case, whose expected output NumPy's reference proves on some rows. `Small` takes
several of them through a check in a few launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import Case
from attnsweep.core.problem import DTYPE_BYTES
from attnsweep.core.trial import Accuracy
from attnsweep.device.buffers import POISON, Buffer
from attnsweep.verify import encoding, measures
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify import limits as verify_limits
from attnsweep.verify.compare import Compared, Comparer
from attnsweep.verify.encoding import Tensor, Windows, check_scales
from attnsweep.verify.expected import OPPOSITE, PLAIN, ExpectedCase, negated_heads
from attnsweep.verify.measures import TILT, Measures
from attnsweep.verify.sample import ALL, Sample

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

# The device's reference and NumPy's differ by the order of their sums: 1e-15 times a few hundred.
_PROOF = 1e-11


class WrongResult(Exception):
    """A candidate that ran but is wrong; `accuracy`, if known, says by how much."""

    def __init__(self, detail: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(detail, accuracy)
        self.detail, self.accuracy = detail, accuracy


class BrokenComparison(Exception):
    """The device's float64 reference differs from NumPy's: nothing can be judged here."""


@dataclass(frozen=True, slots=True)
class Errors:
    """What one checked call showed: findings, bytes written outside; lse is 0 if none is there."""

    values: dict[str, float]
    outside: dict[str, int]
    lse: float = 0.0


@dataclass
class _Side:
    """What is expected of the inputs as they were made, or of all k and v negated."""

    expected: Buffer
    lse: Buffer


class DeviceCase:
    """One case on the device: guarded inputs and output, and the expected float64 output.

    two_sided: the heads of k and v can be negated, each for itself, which gives it other scores
    and outputs. `draw` chooses which at random, so that the last answers are wrong ones. A head
    has no more than these two contents.
    """

    _negated: npt.NDArray[np.bool_] | None = None
    _ahead: tuple[int, npt.NDArray[np.bool_]] | None = None
    sample = ALL

    def __init__(
        self,
        case: Case,
        seed: int,
        session: CudaSession,
        judge: Comparer,
        *,
        two_sided: bool = False,
        known: ExpectedCase | None = None,
        sample: Sample = ALL,
    ) -> None:
        """known: what is known of the case with this seed; computed now if it is None.

        sample: the tiles of queries whose outputs are judged.
        """
        known = known or ExpectedCase.of(case, seed, two_sided=two_sided, sample=sample)
        self.case, self.judge = case, judge
        self.mix = PLAIN
        self._seed, self._rng = seed, np.random.default_rng(seed)
        problem = case.problem
        # A head with half a word cannot be negated without its neighbour.
        apart = two_sided and problem.head_dim * DTYPE_BYTES[problem.dtype] % 4 == 0
        self._heads_kv = problem.batch * problem.heads_kv if apart else 1
        self.parts = problem.batch * problem.heads if apart else 1
        self.buffers: dict[str, Buffer] = {}
        check_scales(known.inputs, problem)
        for name, bits in known.inputs.items():
            self.buffers[name] = Buffer(bits.nbytes, guard=POISON)
            _upload(bits, self.buffers[name])
        size = int(np.prod(problem.shape_of("o")))
        self.buffers["o"] = Buffer(problem.bytes_of("o"))
        inputs = [(self.buffers[name], 1 + i, 0) for i, name in enumerate(problem.inputs)]
        self._inputs = judge.regions(inputs)
        self._session = session
        rows = problem.batch * problem.heads * problem.seqlen_q
        self.rows, self.sample = rows, sample
        self._mix = Buffer(8)
        session.settle()
        self.tilted: Buffer | None = None
        self._sides: list[_Side] = []
        self.floor = 0.0
        with session.stream:
            self._mix.fill(0)
            judge.clear()
            if not two_sided and case.inputs == "normal":
                self.tilted = Buffer(8 * size)
                judge.reference(self.buffers, problem, self.tilted, Buffer(8 * rows), TILT)
            for mix in (PLAIN, OPPOSITE)[: 1 + two_sided]:
                self.go_to(mix)
                one = _Side(Buffer(8 * size), Buffer(8 * rows))
                judge.reference(self.buffers, problem, one.expected, one.lse, sample=sample)
                self._sides.append(one)
            self.go_to(PLAIN)
            self.compare(0)
            self.look_at_inputs(0)
            norm = judge.found(1)[0]["norm"]
            self._intact = judge.counts(1)[0]
        # As measures.floor: a thousandth of the typical norm of a row.
        self.floor = 1e-3 * float(np.sqrt(norm / max(1, self.judged_rows))) or 1.0
        for side, (exact, lse) in zip(self._sides, known.sides, strict=True):
            self._prove(side, known.rows, exact, lse)
        self.format_err: float | None = None
        self._drawn = self._unrounded(known)

    @property
    def judged_rows(self) -> int:
        """Rows that see a key and are compared with float64, of all heads."""
        problem = self.case.problem
        if self.sample == ALL:
            return problem.heads * problem.rows_with_keys
        return self.sample.rows(problem)

    def _unrounded(self, known: ExpectedCase) -> Buffer | None:
        """The expected output on the inputs before they were rounded, of a timed case in FP8."""
        if known.drawn is None or known.exact is None:
            return None
        problem = replace(self.case.problem, dtype="fp32")
        inputs = {name: Buffer(values.nbytes) for name, values in known.drawn.items()}
        for name, values in known.drawn.items():
            inputs[name].upload(np.ascontiguousarray(values))
        inputs |= {name: self.buffers[name] for name in problem.inputs if name not in inputs}
        size = 8 * int(np.prod(problem.shape_of("o")))
        made = _Side(Buffer(size), Buffer(8 * self.rows))
        self._session.settle()
        with self._session.stream:
            judge = self.judge.of_dtype("fp32")
            judge.reference(inputs, problem, made.expected, made.lse, sample=self.sample)
            plain = self._sides[PLAIN].expected.pointer
            one = Compared(plain, problem, [made.expected], None, None, self.floor, self.sample)
            judge.compare(one, 0, exact=True)
            self.format_err = judge.found(1)[0]["row"]
        self._prove(made, known.rows, *known.exact)
        return made.expected

    def compare_format(self, slot: int) -> bool:
        """Compare the output on the inputs as made with that before they were rounded to FP8.

        Returns whether anything was compared: only a timed case in FP8 has such inputs.
        """
        if self._drawn is None:
            return False
        at, problem = self.buffers["o"].pointer, self.case.problem
        drawn = Compared(at, problem, [self._drawn], None, None, self.floor, self.sample)
        self.judge.compare(drawn, slot)
        return True

    def _prove(self, side: _Side, rows: Any, exact: encoding.Float, exact_lse: Any) -> None:
        """Raise BrokenJudge unless the device's reference is NumPy's on some rows of every head."""
        problem = self.case.problem
        shape, of_rows = problem.shape_of("o"), self.judge.rows
        error = measures.row_error(of_rows(side.expected, shape, rows), exact)
        lse = of_rows(side.lse, (*shape[:3], 1), rows)[..., 0]
        wrong_lse = measures.apart(lse, exact_lse).max()
        error = max(error, float(wrong_lse) / 1e3)  # of scores up to a thousand
        if not error <= _PROOF:
            raise BrokenComparison(
                f"the float64 reference on this GPU is off by {error:.1e} ({self.case.label}): "
                "nothing can be judged; run compute-sanitizer, and report this"
            )

    def go_to(self, mix: int) -> None:
        """Go to a mix of inputs: PLAIN, OPPOSITE, or a number that negates some heads."""
        if self.mix != mix:
            k, v = self.buffers["k"], self.buffers["v"]
            self.judge.negate(k, v, self._heads_kv, self._mix, self.mix, mix)
            self.mix, self._negated = mix, None

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
        """The digest of an output on the present inputs, of those of its parts (2, parts)."""
        group = self.parts // self._heads_kv
        sides = self._now().repeat(group).astype(int)
        return int(of_sides[sides, np.arange(self.parts)].sum(dtype=np.uint64))

    def look_at_inputs(self, slot: int) -> None:
        """Add to a slot a digest of the inputs, and how many bytes of their guards are others."""
        self.judge.look(self._inputs, slot)

    def renew_inputs(self, count: int) -> bool:
        """Whether look_at_inputs found others than were made, which are then made again.

        To be called, as that, on the inputs as they were made.
        """
        if count == self._intact:
            return False
        for name, bits in verify_inputs.make_inputs(self.case, self._seed).items():
            with self._session.stream:
                self.buffers[name].poison()
            self._session.settle()
            _upload(bits, self.buffers[name])
        self._session.settle()
        return True

    def compared(self, output: int | None = None) -> Compared:
        """The output on the present inputs, or the one at a pointer, to be compared."""
        expected = [side.expected for side in self._sides]
        at = self.buffers["o"].pointer if output is None else output
        mix = self._mix if len(expected) > 1 else None
        how = (mix, self.tilted, self.floor, self.sample)
        return Compared(at, self.case.problem, expected, *how)

    def compare(self, slot: int, output: int | None = None) -> None:
        """Compare the output on the present inputs, or the one at a pointer, into a slot."""
        self.judge.compare(self.compared(output), slot)

    def compare_lse(self, written: Buffer, slot: int) -> None:
        """Compare the log-sum-exps of all rows into a slot, on PLAIN or OPPOSITE inputs."""
        if written.nbytes < 4 * self.rows:
            raise WrongResult(
                f"the workspace 'lse' has {written.nbytes} bytes, and {self.rows} rows of float32 "
                f"need {4 * self.rows} ({self.case.label})"
            )
        expected = self._sides[self.mix].lse
        self.judge.compare_lse(written, expected, self.case.problem, self.sample, slot)

    def accuracy(
        self,
        found: Errors,
        rounds_scores: int,
        *,
        baseline: bool = False,
        same: Measures | None = None,
    ) -> Accuracy:
        """The accuracy of an output. Raises WrongResult if it is wrong.

        baseline: only NaN is wrong; an error over the limit is returned, to be shown. same: errors
        of the same maths, if they are known, which give the limits.
        """
        label = self.case.label
        limits = verify_limits.limits(self.case, rounds_scores, same)
        values = found.values
        often = rounds_scores if values["tilt_norm"] > 0 else 0  # of small cases alone
        of_rounding = verify_limits.scale_of_rounding(self.case, self._seed, often)
        taken = Measures(
            **{name: values[name] for name in ("row", "element", "row_gain", "tile_gain")},
            rms=float(np.sqrt(values["squares"] / max(1, self.judged_rows))),
            gain=abs(values["gains"]) / max(1, self.judged_rows),
            scale=abs(TILT * values["tilt"] / (values["tilt_norm"] or 1.0) - of_rounding),
        )
        shares = taken.shares(limits)
        accuracy = Accuracy(
            rel_err=taken.row if np.isfinite(taken.row) and not values["nans"] else None,
            limit=limits.row,
            case=label,
            shares={name: float(f"{share:.3g}") for name, share in shares.items()},
        )
        for name, count in found.outside.items():
            if count:
                raise WrongResult(f"wrote {count} bytes outside {name!r} ({label})")
        if values["nans"]:
            raise WrongResult(
                f"{values['nans']:.0f} of {self.rows * self.case.problem.head_dim} outputs are NaN "
                f"or were never written ({label})",
                accuracy,
            )
        if baseline:
            return accuracy
        over = [name for name, share in shares.items() if not share <= 1]  # so that NaN fails
        if over:
            name = over[0]  # the error of a row says most
            head, row = divmod(int(values["row_at"]), self.case.problem.seqlen_q)
            value, limit = getattr(taken, name), getattr(limits, name)
            said = _SAID[name].format(value=value, limit=limit, at=f"row {row} of head {head}")
            raise WrongResult(f"{said} ({label})", accuracy)
        if found.lse and not found.lse <= (most := verify_limits.lse_limit(self.case)):
            said = f"log-sum-exp off by {found.lse:.1e}, over the limit {most:.0e}"
            raise WrongResult(f"{said} ({label})", accuracy)
        return accuracy


# What an error over each limit says.
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
    """Small cases whose outputs are renewed, compared and looked at together.

    A trial has eleven of them. Each apart takes 12 launches, and the host needs longer to
    issue one than the device to run it.
    """

    def __init__(self, fixtures: Sequence[DeviceCase], judge: Comparer) -> None:
        self.fixtures, self._judge = fixtures, judge
        count = len(fixtures)
        outputs = [(each.buffers["o"], 0, count + i) for i, each in enumerate(fixtures)]
        inputs = [
            (each.buffers[name], 1 + place, i)
            for i, each in enumerate(fixtures)
            for place, name in enumerate(each.case.problem.inputs)
        ]
        self._outputs = judge.regions(outputs)
        self._regions = judge.regions([*inputs, *outputs])
        self._compared = judge.outputs([fixture.compared() for fixture in fixtures])

    def renew(self) -> None:
        """Poison each output, and renew its guards."""
        self._judge.renew(self._outputs)

    def compare(self) -> None:
        """Compare each output into the slot of its number."""
        self._judge.compare_each(self._compared)

    def look(self, first: int) -> None:
        """Look at the inputs of each into slots from `first` on, then count bytes outside outputs.

        The slots of inputs are those of DeviceCase.look_at_inputs; there are two for each case.
        """
        self._judge.look(self._regions, first)

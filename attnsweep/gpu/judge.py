"""Is an output right? Every element of it is compared with float64, on the device.

`Judge` launches kernels/common/judge.cu: attention in float64, the comparison with it, and digests
that tell whether many calls gave the same bits. `Fixture` is a case on the device with its expected
output, which NumPy's reference proves on some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnsweep.build import numerics
from attnsweep.build.numerics import TILT, Case, Measures
from attnsweep.build.nvrtc import Compiler
from attnsweep.files import shipped
from attnsweep.gpu.device import GUARD_BYTES, POISON, Buffer
from attnsweep.hardware import arch_named
from attnsweep.problem import DTYPE_BYTES, Problem, ceil_div
from attnsweep.trial import Accuracy

if TYPE_CHECKING:
    from attnsweep.gpu.device import Session

# The device's reference and NumPy's differ by the order of their sums: 1e-15 times a few hundred.
_PROOF = 1e-11
# Log-sum-exps are float32 sums of float32 exponentials; flash_fwd_wgmma's are off by 2e-5 at most.
_LSE_LIMIT = 1e-4
# The fields of judge.cu's Found.
_FOUND = (
    *("nans", "squares", "row", "row_at", "element", "row_gain", "tile_gain"),
    *("gains", "norm", "tilt", "tilt_norm"),
)
_THREADS = 256
_PITCH, _CHUNK, _TILE = 65, 16, numerics.TILE


class WrongResult(Exception):
    """A candidate that ran but is wrong; `accuracy`, if known, says by how much."""

    def __init__(self, detail: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(detail, accuracy)
        self.detail, self.accuracy = detail, accuracy


class BrokenJudge(Exception):
    """The device's float64 reference differs from NumPy's: nothing can be judged here."""


@cache
def _cubin(arch: str, dtype: str, cache_dir: Path | None) -> str:
    compiler = Compiler(arch_named(arch), cache_dir, threads=1)
    try:
        source = shipped("kernels") / "common" / "judge.cu"
        return str(compiler.compile(source, {f"DTYPE_{dtype.upper()}": "1"}).path)
    finally:
        compiler.close()


@dataclass(frozen=True, slots=True)
class Found:
    """What one checked call showed: the findings of all elements, and words written outside."""

    values: dict[str, float]
    outside: dict[str, int]
    lse: float = 0.0


class Judge:
    """The judging kernels of one dtype on this process's GPU; results wait in slots."""

    SLOTS = 4096

    def __init__(self, session: Session, dtype: str, cache_dir: Path | None = None) -> None:
        self.dtype = dtype
        self._session = session
        self._path = _cubin(session.gpu.arch, dtype, cache_dir)
        self._tiles: Buffer | None = None
        self._found = Buffer(self.SLOTS * 8 * len(_FOUND))
        self._counts = Buffer(self.SLOTS * 8)
        self._host = session.pinned((self.SLOTS,), np.uint64)

    def _launch(self, name: str, blocks: int, args: Sequence[Any], smem_bytes: int = 0) -> None:
        function = self._session.kernel(self._path, name, smem_bytes)
        function((blocks, 1, 1), (_THREADS, 1, 1), tuple(args), shared_mem=smem_bytes)

    def reference(
        self, inputs: dict[str, Buffer], problem: Problem, out: Buffer, lse: Buffer, tilt: float = 0
    ) -> None:
        """Write attention in float64 to `out` and its log-sum-exp to `lse`, at (1 + tilt) scale."""
        columns = 64 if problem.head_dim <= 64 else 128
        doubles = _TILE * _PITCH + max(2 * _CHUNK * _PITCH, _CHUNK * columns)
        tiles = ceil_div(problem.seqlen_q, _TILE) * ceil_div(problem.head_dim, columns)
        pointers = [np.uint64(inputs[name].pointer) for name in "qkv"]
        sizes = (problem.heads // problem.heads_kv, problem.seqlen_q, problem.seqlen_k)
        self._launch(
            f"reference_{columns}",
            tiles * problem.batch * problem.heads,
            [
                *(*pointers, np.uint64(out.pointer), np.uint64(lse.pointer)),
                *map(np.int32, (*sizes, problem.head_dim)),
                *(np.float64(problem.scale * (1 + tilt)), np.int32(problem.causal)),
            ],
            8 * doubles,
        )

    def compare(
        self,
        output: int,
        problem: Problem,
        expected: Buffer,
        tilted: Buffer | None,
        floor: float,
        slot: int,
    ) -> None:
        """Compare every element at the pointer `output` with `expected`; findings go to a slot."""
        tiles = problem.batch * problem.heads * ceil_div(problem.seqlen_q, _TILE)
        record = 8 * len(_FOUND)
        if self._tiles is None or self._tiles.nbytes < tiles * record:
            self._tiles = Buffer(tiles * record)
        pointers = (output, expected.pointer, tilted.pointer if tilted else 0, self._tiles.pointer)
        sizes = (np.int32(problem.seqlen_q), np.int32(problem.head_dim), np.float64(floor))
        self._launch("judge", tiles, [*map(np.uint64, pointers), *sizes], record * _THREADS // 32)
        to = np.uint64(self._found.pointer + slot * record)
        all_of = [np.uint64(self._tiles.pointer), np.int64(tiles), to]
        self._launch("summary", 1, all_of, record * _THREADS)

    def compare_lse(self, written: Buffer, expected: Buffer, rows: int, slot: int) -> None:
        """Compare float32 log-sum-exps with the expected ones; the largest error goes to a slot."""
        args = [np.uint64(written.pointer), np.uint64(expected.pointer), np.int64(rows)]
        to = self._counts.pointer + 8 * slot
        self._launch("judge_lse", 1, [*args, np.uint64(to)], 8 * _THREADS)

    def digest(self, buffer: Buffer, slot: int, *, poison: bool = False) -> None:
        """Add a digest of the buffer to a slot; poison: then fill it with NaN."""
        words = buffer.nbytes // 4
        to = np.uint64(self._counts.pointer + 8 * slot)
        args = [np.uint64(buffer.pointer), np.int64(words), np.int32(poison), to]
        self._launch("digest", self._blocks(words), args)

    def negate(self, buffer: Buffer) -> None:
        """Negate every element."""
        words = ceil_div(buffer.nbytes, 4)  # half a word of the guard may turn too, and stays NaN
        sign = np.uint32(0x80000000 if self.dtype == "fp32" else 0x80008000)
        args = [np.uint64(buffer.pointer), np.int64(words), sign]
        self._launch("negate", self._blocks(words), args)

    def count_outside(self, buffer: Buffer, slot: int) -> None:
        """Count the words of the buffer's guard regions that something changed."""
        before, after = buffer.guards
        word = np.uint32(buffer.guard_byte * 0x01010101)
        to = np.uint64(self._counts.pointer + 8 * slot)
        args = [np.uint64(before), np.uint64(after), np.int32(GUARD_BYTES // 4), word, to]
        self._launch("differing", 16, args)

    def _blocks(self, words: int) -> int:
        return max(1, min(4 * self._session.gpu.sm_count, ceil_div(words, _THREADS)))

    def clear(self) -> None:
        """Set every slot to zero."""
        self._counts.fill(0)

    def counts(self, slots: int) -> Any:
        """The first `slots` slots as uint64, after all work before."""
        self._session.synchronize()
        self._counts.download(self._host[:slots])
        return self._host[:slots].copy()

    def found(self, slots: int) -> list[dict[str, float]]:
        """The findings of the first `slots` slots of `compare`, after all work before."""
        self._session.synchronize()
        records = np.empty((slots, len(_FOUND)))
        self._found.download(records)
        return [dict(zip(_FOUND, map(float, record), strict=True)) for record in records]


@dataclass
class _Side:
    """The inputs as they are, or with k and v negated; and what is then expected."""

    expected: Buffer
    lse: Buffer
    floor: float = 0.0


class Fixture:
    """One case on the device: guarded inputs and output, and the expected float64 output.

    two_sided: the case has a second set of inputs, k and v negated, whose scores and outputs are
    others. `turn` goes from one to the other, so that a kernel cannot keep an answer.
    """

    def __init__(
        self, case: Case, seed: int, session: Session, judge: Judge, *, two_sided: bool = False
    ) -> None:
        self.case, self.judge = case, judge
        self.side = 0
        problem = case.problem
        inputs = numerics.make_inputs(case, seed)
        self.buffers: dict[str, Buffer] = {}
        for name, bits in inputs.items():
            self.buffers[name] = Buffer(bits.nbytes, guard=POISON)
            self.buffers[name].upload(bits)
        size = int(np.prod(problem.shape_of("o")))
        self.buffers["o"] = Buffer(size * DTYPE_BYTES[problem.dtype])
        self._session = session
        rows = problem.batch * problem.heads * problem.seqlen_q
        self.rows = rows
        proved = numerics.sampled_rows(problem, seed)
        session.settle()
        self.tilted: Buffer | None = None
        self._sides: list[_Side] = []
        with session.stream:
            if not two_sided and case.inputs == "normal":
                self.tilted = Buffer(8 * size)
                judge.reference(self.buffers, problem, self.tilted, Buffer(8 * rows), TILT)
            for side in range(1 + two_sided):
                if side:
                    self.turn()
                one = _Side(Buffer(8 * size), Buffer(8 * rows))
                judge.reference(self.buffers, problem, one.expected, one.lse)
                judge.compare(
                    self.buffers["o"].pointer, problem, one.expected, None, 0.0, len(self._sides)
                )
                self._sides.append(one)
            if two_sided:
                self.turn()
            session.synchronize()
        for number, (one, found) in enumerate(
            zip(self._sides, judge.found(len(self._sides)), strict=True)
        ):
            # As numerics.measures: a thousandth of the typical norm of a row.
            one.floor = 1e-3 * float(np.sqrt(found["norm"] / rows))
            if number:
                inputs = inputs | {name: _negated(inputs[name], problem.dtype) for name in "kv"}
            self._prove(inputs, one, proved)

    def _prove(self, inputs: Any, side: _Side, rows: Any) -> None:
        """Raise BrokenJudge unless the device's reference is NumPy's on some rows of every head."""
        problem = self.case.problem
        exact = numerics.reference(inputs, problem, rows)
        device = side.expected.rows(problem.shape_of("o"), rows)
        error = numerics.row_error(device, exact)
        lse = side.lse.rows((*problem.shape_of("o")[:3], 1), rows)[..., 0]
        wrong_lse = np.abs(lse - numerics.log_sum_exp(inputs, problem, rows)).max()
        error = max(error, float(wrong_lse) / 1e3)  # of scores up to a thousand
        if not error <= _PROOF:
            raise BrokenJudge(
                f"the float64 reference on this GPU is off by {error:.1e} ({self.case.label}): "
                "nothing can be judged; run compute-sanitizer, and report this"
            )

    def turn(self) -> None:
        """Go to the other set of inputs."""
        for name in "kv":
            self.judge.negate(self.buffers[name])
        self.side = 1 - self.side

    def go_to(self, side: int) -> None:
        """Go to a set of inputs, 0 or 1."""
        if self.side != side:
            self.turn()

    def compare(self, slot: int, output: int | None = None) -> None:
        """Compare the output on the present inputs, or the one at a pointer, into a slot."""
        side = self._sides[self.side]
        at = self.buffers["o"].pointer if output is None else output
        self.judge.compare(at, self.case.problem, side.expected, self.tilted, side.floor, slot)

    def compare_lse(self, written: Buffer, slot: int) -> None:
        """Compare the log-sum-exps of all rows into a slot."""
        self.judge.compare_lse(written, self._sides[self.side].lse, self.rows, slot)

    def accuracy(self, found: Found, rounds_scores: int, *, peer: bool = False) -> Accuracy:
        """The accuracy of an output. Raises WrongResult if it is wrong.

        peer: only NaN is wrong; an error over the limit is returned, to be shown.
        """
        label = self.case.label
        limits = numerics.limits(self.case, rounds_scores)
        values = found.values
        taken = Measures(
            **{name: values[name] for name in ("row", "element", "row_gain", "tile_gain")},
            rms=float(np.sqrt(values["squares"] / self.rows)),
            gain=abs(values["gains"]) / self.rows,
            scale=TILT * abs(values["tilt"]) / (values["tilt_norm"] or 1.0),
        )
        shares = taken.shares(limits)
        accuracy = Accuracy(
            rel_err=taken.row if np.isfinite(taken.row) and not values["nans"] else None,
            limit=limits.row,
            case=label,
            shares={name: float(f"{share:.3g}") for name, share in shares.items()},
        )
        for name, words in found.outside.items():
            if words:
                raise WrongResult(f"wrote outside {name!r}, {words} words of it ({label})")
        if values["nans"]:
            raise WrongResult(
                f"{values['nans']:.0f} of {self.rows * self.case.problem.head_dim} outputs are NaN "
                f"or were never written ({label})",
                accuracy,
            )
        if peer:
            return accuracy
        name = max(shares, key=lambda one: shares[one])
        if not all(share <= 1 for share in shares.values()):
            row = int(values["row_at"])
            at = f"row {row % self.case.problem.seqlen_q} of head "
            at += f"{row // self.case.problem.seqlen_q}"
            value, limit = getattr(taken, name), getattr(limits, name)
            said = _SAID[name].format(value=value, limit=limit, at=at)
            raise WrongResult(f"{said} ({label})", accuracy)
        if not found.lse <= _LSE_LIMIT:
            said = f"log-sum-exp off by {found.lse:.1e}, over the limit {_LSE_LIMIT:.0e}"
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


def _negated(bits: Any, dtype: str) -> Any:
    return bits ^ bits.dtype.type(0x80000000 if dtype == "fp32" else 0x8000)

"""Is an output right? Every element of it is compared with float64, on the device.

`Judge` launches kernels/common/judge.cu: attention in float64, the comparison with it, and digests
that tell whether many calls gave the same bits. `Fixture` is a case on the device with its expected
output, which NumPy's reference proves on some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnsweep.build import numerics
from attnsweep.build.numerics import TILT, Case, Measures
from attnsweep.build.nvrtc import Compiler
from attnsweep.build.storage import check_scales
from attnsweep.files import shipped
from attnsweep.gpu.device import GUARD_BYTES, POISON, Buffer
from attnsweep.gpu.known import OPPOSITE as OPPOSITE
from attnsweep.gpu.known import PLAIN as PLAIN
from attnsweep.gpu.known import Known as Known
from attnsweep.gpu.known import negated_heads as negated_heads
from attnsweep.gpu.known import sign_bits
from attnsweep.hardware import arch_named
from attnsweep.problem import DTYPE_BYTES, SCALE_BLOCK, Problem, ceil_div
from attnsweep.trial import Accuracy

if TYPE_CHECKING:
    from attnsweep.gpu.device import Session

# The device's reference and NumPy's differ by the order of their sums: 1e-15 times a few hundred.
_PROOF = 1e-11
# The fields of judge.cu's Found.
_FOUND = (
    *("nans", "squares", "row", "row_at", "element", "row_gain", "tile_gain"),
    *("gains", "norm", "tilt", "tilt_norm"),
)
_THREADS = 256
_PITCH, _CHUNK, _TILE = 65, 16, numerics.TILE
# Blocks along the heads; each then takes several.
_PARTS = 1024


class WrongResult(Exception):
    """A candidate that ran but is wrong; `accuracy`, if known, says by how much."""

    def __init__(self, detail: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(detail, accuracy)
        self.detail, self.accuracy = detail, accuracy


class BrokenJudge(Exception):
    """The device's float64 reference differs from NumPy's: nothing can be judged here."""


def judge_source(dtype: str) -> tuple[Path, dict[str, str]]:
    """The source and the defines of the judge of a dtype."""
    name = "E4M3" if dtype.startswith("e4m3") else dtype.upper()
    return shipped("kernels") / "common" / "judge.cu", {f"DTYPE_{name}": "1"}


@cache
def _cubin(arch: str, dtype: str, cache_dir: Path | None) -> str:
    compiler = Compiler(arch_named(arch), cache_dir, threads=1)
    try:
        return str(compiler.compile(*judge_source(dtype)).path)
    finally:
        compiler.close()


@dataclass(frozen=True, slots=True)
class Found:
    """What one checked call showed: findings, bytes written outside; lse is 0 if none is there."""

    values: dict[str, float]
    outside: dict[str, int]
    lse: float = 0.0


class Judge:
    """The judging kernels of one dtype on this process's GPU; results wait in slots."""

    SLOTS = 4096

    def __init__(self, session: Session, dtype: str, cache_dir: Path | None = None) -> None:
        self.dtype = dtype
        self._session, self._cache_dir = session, cache_dir
        self._path = _cubin(session.gpu.arch, dtype, cache_dir)
        self._tiles: Buffer | None = None
        self._found = Buffer(self.SLOTS * 8 * len(_FOUND))
        self._plain = Buffer(8)
        self._plain.fill(0)
        self._counts = Buffer(self.SLOTS * 8)
        self._host = session.pinned((self.SLOTS,), np.uint64)
        self._functions: dict[tuple[str, int], Any] = {}

    def _launch(
        self, name: str, blocks: int, args: Sequence[Any], smem_bytes: int = 0, parts: int = 1
    ) -> None:
        if (name, smem_bytes) not in self._functions:
            function = self._session.kernel(self._path, name, smem_bytes)
            self._functions[name, smem_bytes] = function
        function = self._functions[name, smem_bytes]
        grid = (blocks, min(parts, _PARTS), 1)
        function(grid, (_THREADS, 1, 1), tuple(args), shared_mem=smem_bytes)

    def reference(
        self, inputs: dict[str, Buffer], problem: Problem, out: Buffer, lse: Buffer, tilt: float = 0
    ) -> None:
        """Write attention in float64 to `out` and its log-sum-exp to `lse`, at (1 + tilt) scale."""
        columns = 64 if problem.head_dim <= 64 else 128
        doubles = _TILE * _PITCH + max(2 * _CHUNK * _PITCH, _CHUNK * columns)
        tiles = ceil_div(problem.seqlen_q, _TILE) * ceil_div(problem.head_dim, columns)
        pointers = [np.uint64(inputs[name].pointer) for name in "qkv"]
        sizes = (problem.heads // problem.heads_kv, problem.seqlen_q, problem.seqlen_k)
        scales, per, blocks = [0, 0, 0], 2**31 - 1, 1
        if problem.scaled:
            scales = [inputs[name].pointer for name in problem.inputs[3:]]
            if problem.dtype == "e4m3_block":
                per, blocks = SCALE_BLOCK, problem.shape_of("k_scale")[2]
        self._launch(
            f"reference_{columns}",
            tiles * problem.batch * problem.heads,
            [
                *(*pointers, np.uint64(out.pointer), np.uint64(lse.pointer)),
                *map(np.int32, (*sizes, problem.head_dim)),
                *(np.float64(problem.scale * (1 + tilt)), np.int32(problem.causal)),
                *(*map(np.uint64, scales), np.int32(per), np.int32(blocks)),
            ],
            8 * doubles,
        )

    def rows(
        self, buffer: Buffer, shape: Sequence[int], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """On the host, some rows of every head of a float64 (batch, heads, seqlen, head_dim)."""
        out = np.empty((*shape[:2], len(rows), shape[3]))
        which, some = Buffer(rows.nbytes), Buffer(out.nbytes)
        which.upload(rows)
        self._session.settle()
        args = [np.uint64(buffer.pointer), np.uint64(which.pointer), np.int32(len(rows))]
        args += [*map(np.int32, shape[2:]), np.int64(out.size), np.uint64(some.pointer)]
        with self._session.stream:
            some.poison()
            self._launch("gather", self._blocks(out.nbytes, 1), args)
            self._session.synchronize()
            some.download(out)
        return out

    def of_dtype(self, dtype: str) -> Judge:
        """The judge of another dtype on the same GPU."""
        return Judge(self._session, dtype, self._cache_dir)

    def compare(
        self,
        output: int,
        problem: Problem,
        expected: Sequence[Buffer],
        mix: Buffer | None,
        tilted: Buffer | None,
        floor: float,
        slot: int,
        *,
        exact: bool = False,
    ) -> None:
        """Compare every element at the pointer `output`; findings go to a slot.

        expected: float64 outputs for the inputs as they were made, and, if `mix` says which of the
        heads are negated, for all of them negated. exact: the output is in float64 too.
        """
        tiles = problem.batch * problem.heads * ceil_div(problem.seqlen_q, _TILE)
        record = 8 * len(_FOUND)
        if self._tiles is None or self._tiles.nbytes < tiles * record:
            self._tiles = Buffer(tiles * record)
        pointers = (
            *(output, expected[0].pointer, expected[-1].pointer, (mix or self._plain).pointer),
            *(tilted.pointer if tilted else 0, self._tiles.pointer),
        )
        group = problem.heads // problem.heads_kv
        sizes = map(np.int32, (group, problem.seqlen_q, problem.head_dim))
        args = [*map(np.uint64, pointers), *sizes, np.float64(floor)]
        self._launch("judge_exact" if exact else "judge", tiles, args, record * _THREADS // 32)
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
        self._digest(buffer, 1, self._counts.pointer + 8 * slot, poison)

    def digest_parts(self, buffer: Buffer, sums: Buffer, first: int, parts: int) -> None:
        """Add the digests of equal parts of a buffer to as many uint64 of `sums` from `first` on.

        They add up to the digest of the whole. A part has a multiple of four bytes, or is the only.
        """
        self._digest(buffer, parts, sums.pointer + 8 * first, False)

    def _digest(self, buffer: Buffer, parts: int, to: int, poison: bool) -> None:
        sizes = (np.int64(buffer.nbytes), np.int32(parts), np.int32(poison))
        args = [np.uint64(buffer.pointer), *sizes, np.uint64(to)]
        sums = 8 * _THREADS // 32  # of each warp
        self._launch("digest", self._blocks(buffer.nbytes, parts), args, sums, parts)

    def negate(self, buffer: Buffer, heads: int, mix: Buffer, old: int, new: int) -> None:
        """Take a tensor from one mix to another, and write it to `mix`; see `negated_heads`."""
        sign = np.uint32(sign_bits(self.dtype))
        sizes = (np.int64(buffer.nbytes), np.int32(heads))
        mixes = map(np.uint64, (old, new, mix.pointer))
        args = [np.uint64(buffer.pointer), *sizes, sign, *mixes]
        self._launch("negate", self._blocks(buffer.nbytes, heads), args, 0, heads)

    def count_outside(self, buffer: Buffer, slot: int) -> None:
        """Add to a slot the number of bytes of the buffer's guards that something changed."""
        before, after = buffer.guards
        sizes = map(np.int32, (GUARD_BYTES, buffer.guard_byte))
        to = np.uint64(self._counts.pointer + 8 * slot)
        self._launch("differing", 16, [np.uint64(before), np.uint64(after), *sizes, to])

    def _blocks(self, nbytes: int, parts: int) -> int:
        """Blocks of each part: 16 bytes of it for a thread, or eight blocks an SM of all parts."""
        most = ceil_div(8 * self._session.gpu.sm_count, parts)
        return max(1, min(most, ceil_div(nbytes // parts, 16 * _THREADS)))

    def clear(self) -> None:
        """Set every count to zero and every finding to NaN: what is not written then is wrong."""
        self._counts.fill(0)
        self._found.fill(POISON)

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
    """What is expected of the inputs as they were made, or of all k and v negated."""

    expected: Buffer
    lse: Buffer


class Fixture:
    """One case on the device: guarded inputs and output, and the expected float64 output.

    two_sided: the heads of k and v can be negated, each for itself, which gives it other scores
    and outputs. `draw` chooses which at random, so that a kernel cannot keep its answers.
    """

    _negated: npt.NDArray[np.bool_] | None = None

    def __init__(
        self,
        case: Case,
        seed: int,
        session: Session,
        judge: Judge,
        *,
        two_sided: bool = False,
        known: Known | None = None,
    ) -> None:
        """known: what is known of the case with this seed; computed now if it is None."""
        known = known or Known.of(case, seed, two_sided=two_sided)
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
            self.buffers[name].upload(bits)
        size = int(np.prod(problem.shape_of("o")))
        self.buffers["o"] = Buffer(problem.bytes_of("o"))
        self._session = session
        rows = problem.batch * problem.heads * problem.seqlen_q
        self.rows = rows
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
                judge.reference(self.buffers, problem, one.expected, one.lse)
                self._sides.append(one)
            self.go_to(PLAIN)
            self.compare(0)
            self.look_at_inputs(0)
            norm = judge.found(1)[0]["norm"]
            self._intact = judge.counts(1)[0]
        # As numerics.measures: a thousandth of the typical norm of a row.
        self.floor = 1e-3 * float(np.sqrt(norm / rows))
        for side, (exact, lse) in zip(self._sides, known.sides, strict=True):
            self._prove(side, known.rows, exact, lse)
        self.format_err: float | None = None
        self._drawn = self._unrounded(known)

    def _unrounded(self, known: Known) -> Buffer | None:
        """The expected output on the inputs before they were rounded, of a timed case in FP8."""
        if known.drawn is None or known.exact is None:
            return None
        problem = replace(self.case.problem, dtype="fp32")
        inputs = {name: Buffer(values.nbytes) for name, values in known.drawn.items()}
        for name, values in known.drawn.items():
            inputs[name].upload(np.ascontiguousarray(values))
        size = 8 * int(np.prod(problem.shape_of("o")))
        made = _Side(Buffer(size), Buffer(8 * self.rows))
        self._session.settle()
        with self._session.stream:
            judge = self.judge.of_dtype("fp32")
            judge.reference(inputs, problem, made.expected, made.lse)
            plain = self._sides[PLAIN].expected.pointer
            judge.compare(plain, problem, [made.expected], None, None, self.floor, 0, exact=True)
            self.format_err = judge.found(1)[0]["row"]
        lse = numerics.log_sum_exp(known.drawn, problem, known.rows)
        self._prove(made, known.rows, known.exact, lse)
        return made.expected

    def compare_format(self, slot: int) -> bool:
        """Compare the output on the inputs as made with that before they were rounded to FP8.

        Returns whether anything was compared: only a timed case in FP8 has such inputs.
        """
        if self._drawn is None:
            return False
        at = self.buffers["o"].pointer
        self.judge.compare(at, self.case.problem, [self._drawn], None, None, self.floor, slot)
        return True

    def _prove(self, side: _Side, rows: Any, exact: numerics.Float, exact_lse: Any) -> None:
        """Raise BrokenJudge unless the device's reference is NumPy's on some rows of every head."""
        problem = self.case.problem
        shape, of_rows = problem.shape_of("o"), self.judge.rows
        error = numerics.row_error(of_rows(side.expected, shape, rows), exact)
        wrong_lse = np.abs(of_rows(side.lse, (*shape[:3], 1), rows)[..., 0] - exact_lse).max()
        error = max(error, float(wrong_lse) / 1e3)  # of scores up to a thousand
        if not error <= _PROOF:
            raise BrokenJudge(
                f"the float64 reference on this GPU is off by {error:.1e} ({self.case.label}): "
                "nothing can be judged; run compute-sanitizer, and report this"
            )

    def go_to(self, mix: int) -> None:
        """Go to a mix of inputs: PLAIN, OPPOSITE, or a number that negates some heads."""
        if self.mix != mix:
            for name in "kv":
                self.judge.negate(self.buffers[name], self._heads_kv, self._mix, self.mix, mix)
            self.mix, self._negated = mix, None

    def draw(self) -> None:
        """Go to a mix at random in which some head is another than it is now."""
        before = self._now()
        while True:
            drawn = int(self._rng.integers(2, 2**64, dtype=np.uint64))
            mix = drawn if self._heads_kv > 1 else 1 - self.mix
            negated = negated_heads(mix, self._heads_kv)
            if (negated != before).any():
                break
        self.go_to(mix)
        self._negated = negated

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
        for name in self.case.problem.inputs:
            self.judge.digest(self.buffers[name], slot)
            self.judge.count_outside(self.buffers[name], slot)

    def renew_inputs(self, count: int) -> bool:
        """Whether look_at_inputs found others than were made, which are then made again.

        To be called, as that, on the inputs as they were made.
        """
        if count == self._intact:
            return False
        for name, bits in numerics.make_inputs(self.case, self._seed).items():
            with self._session.stream:
                self.buffers[name].poison()
            self._session.settle()
            self.buffers[name].upload(bits)
        self._session.settle()
        return True

    def compare(self, slot: int, output: int | None = None) -> None:
        """Compare the output on the present inputs, or the one at a pointer, into a slot."""
        expected = [side.expected for side in self._sides]
        at = self.buffers["o"].pointer if output is None else output
        mix = self._mix if len(expected) > 1 else None
        problem = self.case.problem
        self.judge.compare(at, problem, expected, mix, self.tilted, self.floor, slot)

    def compare_lse(self, written: Buffer, slot: int) -> None:
        """Compare the log-sum-exps of all rows into a slot, on PLAIN or OPPOSITE inputs."""
        if written.nbytes < 4 * self.rows:
            raise WrongResult(
                f"the workspace 'lse' has {written.nbytes} bytes, and {self.rows} rows of float32 "
                f"need {4 * self.rows} ({self.case.label})"
            )
        self.judge.compare_lse(written, self._sides[self.mix].lse, self.rows, slot)

    def accuracy(self, found: Found, rounds_scores: int, *, peer: bool = False) -> Accuracy:
        """The accuracy of an output. Raises WrongResult if it is wrong.

        peer: only NaN is wrong; an error over the limit is returned, to be shown.
        """
        label = self.case.label
        limits = numerics.limits(self.case, rounds_scores)
        values = found.values
        often = rounds_scores if values["tilt_norm"] > 0 else 0  # of small cases alone
        of_rounding = numerics.scale_of_rounding(self.case, self._seed, often)
        taken = Measures(
            **{name: values[name] for name in ("row", "element", "row_gain", "tile_gain")},
            rms=float(np.sqrt(values["squares"] / self.rows)),
            gain=abs(values["gains"]) / self.rows,
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
        if peer:
            return accuracy
        over = [name for name, share in shares.items() if not share <= 1]  # so that NaN fails
        if over:
            name = over[0]  # the error of a row says most
            head, row = divmod(int(values["row_at"]), self.case.problem.seqlen_q)
            value, limit = getattr(taken, name), getattr(limits, name)
            said = _SAID[name].format(value=value, limit=limit, at=f"row {row} of head {head}")
            raise WrongResult(f"{said} ({label})", accuracy)
        if found.lse and not found.lse <= (most := numerics.lse_limit(self.case)):
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

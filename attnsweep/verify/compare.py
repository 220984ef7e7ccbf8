"""Is an output right? Every element of it is compared with float64, on the device.

`Comparer` launches device/compare.cu: attention in float64, the comparison with it, and digests
that tell whether many calls gave the same bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.cases import TILE
from attnsweep.core.formats import FORMATS
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import DTYPE_BYTES, Paged, Problem, ceil_div
from attnsweep.core.threads import parallel
from attnsweep.device.buffers import GUARD_BYTES, POISON, Buffer
from attnsweep.verify.sample import ALL, Sample

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

SOURCE = Path(__file__).parent / "device" / "compare.cu"
# The fields of compare.cu's Found.
_FOUND = (
    *("nans", "squares", "row", "row_at", "element", "row_gain", "tile_gain"),
    *("gains", "norm", "tilt", "tilt_norm"),
)
_THREADS = 256
_PITCH, _STEP, _TILE = 65, 16, TILE
# Blocks along the heads; each then takes several.
_PARTS = 1024
_SUMS = 8 * _THREADS // 32  # bytes of shared memory: a sum of each warp


# Which part of compare.cu has a kernel, if not the first. A card waits for the parts of a forward,
# compiled beside each other: in bf16, 2.1 s of a core for the longer, and 5 s for all three.
PART_OF = {
    **dict.fromkeys(("reference_64", "reference_128"), 2),
    **dict.fromkeys(("backward_delta", "backward_queries", "backward_keys"), 3),
    **dict.fromkeys(("judge_queries", "judge_keys"), 3),
}


PARTS = {"forward": (1, 2), "backward": (1, 2, 3)}
"""The parts of compare.cu that problems of an op need, by its name."""


def judge_source(dtype: str, part: int) -> tuple[Path, dict[str, str]]:
    """The source and the defines of a part of the judge of a dtype."""
    return SOURCE, {f"DTYPE_{FORMATS[dtype].storage}": "1", "PART": str(part)}


@cache
def judge_cubin(arch: str, dtype: str, part: int, cache_dir: Path | None) -> str:
    """The path of a compiled part of compare.cu, of one format and architecture."""
    with Compiler(arch_named(arch), cache_dir, threads=1) as compiler:
        return str(compiler.compile(*judge_source(dtype, part)).path)


# Calls that are judged together, and the tensors whose places compare.cu's Given says of each.
_TOGETHER = 16
_GIVEN = (
    *(*"qkvo", "q_scale", "k_scale", "v_scale", "key_range", "mask"),
    *("cu_seqlens_q", "cu_seqlens_k", "bias", "sinks", "lse"),
)
# compare.cu's Region and Output.
_REGION = np.dtype([(name, np.int64) for name in ("at", "bytes", "guard", "digested", "slot")])
_OUTPUT = np.dtype(
    [
        (name, np.float64 if name == "floor" else np.int64)
        for name in (
            *("output", "plain", "opposite", "mix", "tilted", "tiles", "all", "count"),
            *("group", "seqlen_q", "head_dim", "floor"),
        )
    ]
)


@dataclass(frozen=True, slots=True)
class ComparedOutput:
    """An output at a pointer, and what it is compared with.

    expected: float64 outputs for the inputs as they were made, and, if `mix` says which of the
    heads are negated, for all of them negated.
    """

    output: int
    problem: Problem
    expected: Sequence[Buffer]
    mix: Buffer | None
    tilted: Buffer | None
    floor: float
    name: str
    sample: Sample = ALL

    @property
    def tiles(self) -> int:
        """How many tiles of 64 rows the output has; a block judges each."""
        batch, heads, rows, _ = self.problem.shape_of(self.name)
        return batch * heads * ceil_div(rows, _TILE)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The output's heads per key head, its rows, and the elements of a row."""
        _, heads, rows, columns = self.problem.shape_of(self.name)
        return heads // self.problem.heads_kv, rows, columns


@dataclass(frozen=True, slots=True)
class LaunchRecords:
    """Records on the device that one launch works through, each by blocks of its own."""

    records: Buffer
    count: int
    most: int
    """Blocks that the largest record needs, of an output, or its bytes, of a region."""
    tiles: Buffer | None = None
    """Where findings of outputs' tiles go."""


class Comparer:
    """The judging kernels of one dtype on this process's GPU; results wait in slots."""

    SLOTS = 4096
    ROWS = 128
    """Rows that judge_rows takes: about as many blocks as a card has SMs."""

    def __init__(self, session: CudaSession, dtype: str, cache_dir: Path | None = None) -> None:
        self.dtype = dtype
        self._session, self._cache_dir = session, cache_dir
        parallel(self._cubin, PARTS["forward"])
        self._tiles: Buffer | None = None
        self._found = Buffer(self.SLOTS * 8 * len(_FOUND))
        self._plain = Buffer(8)
        self._plain.fill(0)
        self._counts = Buffer(self.SLOTS * 8)
        self._host = session.pinned((self.SLOTS,), np.uint64)
        self._records = session.pinned((self.SLOTS, len(_FOUND)), np.float64)
        self._sent: Any = None
        self._functions: dict[tuple[str, int], Any] = {}
        self._gathered: dict[str, Buffer] = {}

    def _cubin(self, part: int) -> str:
        return judge_cubin(self._session.gpu.arch, self.dtype, part, self._cache_dir)

    def _launch(
        self,
        name: str,
        blocks: int,
        args: Sequence[Any],
        smem_bytes: int = 0,
        parts: int = 1,
        tensors: int = 1,
    ) -> None:
        if (name, smem_bytes) not in self._functions:
            function = self._session.kernel(self._cubin(PART_OF.get(name, 1)), name, smem_bytes)
            self._functions[name, smem_bytes] = function
        function = self._functions[name, smem_bytes]
        function((blocks, parts, tensors), (_THREADS, 1, 1), tuple(args), shared_mem=smem_bytes)

    def reference(
        self,
        inputs: Mapping[str, Buffer],
        problem: Problem,
        out: Buffer,
        lse: Buffer,
        tilt: float = 0,
        sample: Sample = ALL,
    ) -> None:
        """Write attention in float64 to `out` and its log-sum-exp to `lse`, at (1 + tilt) scale.

        Only rows of the sample's tiles are written.
        """
        inputs, problem = self.gathered(inputs, problem)
        columns = 64 if problem.value_dim <= 64 else 128
        doubles = _TILE * _PITCH + max(2 * _STEP * _PITCH, _STEP * columns)
        tiles = ceil_div(problem.seqlen_q, _TILE) * ceil_div(problem.value_dim, columns)
        args = [_given([inputs], problem, 1), _common(problem, tilt)]
        args += [np.uint64(out.pointer), np.uint64(lse.pointer)]
        args += [np.int32(sample.every), np.int32(sample.phase)]
        blocks = tiles * problem.batch * problem.heads
        self._launch(f"reference_{columns}", blocks, args, 8 * doubles)

    def gathered(
        self, at: Mapping[str, Buffer], problem: Problem
    ) -> tuple[Mapping[str, Buffer], Problem]:
        """A problem and its buffers, of a paged one with its pages gathered until the next call."""
        layout = problem.layout
        if not isinstance(layout, Paged):
            return at, problem
        dense, made = layout.gathered(problem), self._gathered
        own = replace(dense, value_in_key=False)  # with a v, which follows from k
        for name in ("k", "v", "key_range"):
            if name not in made or made[name].nbytes < own.bytes_of(name):
                made[name] = Buffer(own.bytes_of(name))
        v = at["k" if problem.value_in_key else "v"]
        given = (at["k"], v, at["block_table"], at["seqused_k"], *made.values())
        args: list[Any] = [np.uint64(buffer.pointer) for buffer in given]
        sizes = (problem.batch, problem.heads_kv, problem.seqlen_k, *problem.head_dims)
        args += map(np.int32, (*sizes, layout.page_size, layout.blocks(problem.seqlen_k)))
        page, *inside = layout.strides(problem)
        args += [np.int64(page), *map(np.int32, (*inside, layout.cache_dtype is not None))]
        self._launch("gather_pages", self._blocks(made["k"].nbytes, 1), args)
        return {**at, **made}, own

    def judge_rows(
        self,
        every: Sequence[Mapping[str, Buffer]],
        problem: Problem,
        floor: float,
        seed: int,
        slot: int,
    ) -> None:
        """Compare some rows of calls' outputs `o` with float64 of the inputs as they are now.

        every: of each call the inputs, the output, and `lse` if its log-sum-exps are judged. Takes
        ROWS of all heads' rows by the seed, or all if there are no more, and computes what is right
        for each. Findings go to slots from this one on: `row`, `element` and `row_gain` count, and
        `tile_gain` is the error of the log-sum-exp, as compare_lse's.
        """
        rows = problem.batch * problem.heads * problem.seqlen_q
        blocks = min(self.ROWS, rows)
        # Pages of one call alone are gathered at a time.
        most = 1 if isinstance(problem.layout, Paged) else _TOGETHER
        for first in range(0, len(every), most):
            some = [self.gathered(at, problem) for at in every[first : first + most]]
            dense, count = some[0][1], len(some)
            tiles = self._tiles_for(count * blocks)
            args = [_given([at for at, _ in some], dense, _TOGETHER), _common(dense)]
            args += [np.uint64(tiles), np.uint64((seed + first) % 2**64)]
            args += [np.int64(rows), np.float64(floor)]
            self._launch("judge_rows", blocks, args, row_bytes(dense), count)
            self._summarise(blocks, slot + first, calls=count)

    def judge_gradient_rows(
        self,
        at: Mapping[str, Buffer],
        problem: Problem,
        floor: Mapping[str, float],
        seed: int,
        slot: int,
    ) -> None:
        """Compare some rows of dq, dk and dv with float64 of the inputs as they are now.

        See judge_rows. Findings of the three go to a slot and those behind it.
        """
        how = _gradients(at, problem)
        for name, (one, other), of in (
            ("judge_queries", ("dq", "dq"), "q"),
            ("judge_keys", ("dk", "dv"), "k"),
        ):
            rows = math.prod(problem.shape_of(of)[:3])
            blocks, outputs = min(self.ROWS, rows), dict.fromkeys((one, other))
            tiles = self._tiles_for(len(outputs) * blocks)
            given = (*"qkvo", "do", "lse", one, other)
            args: list[Any] = [np.uint64(at[each].pointer) for each in given]
            args += [np.uint64(tiles), *how]
            args += [np.uint64(seed), np.int64(rows), *map(np.float64, (floor[one], floor[other]))]
            self._launch(name, blocks, args, 8 * 18 * problem.head_dim)
            for number in range(len(outputs)):
                self._summarise(blocks, slot, first=number * blocks)
                slot += 1

    def gradients(
        self, inputs: dict[str, Buffer], problem: Problem, outs: Mapping[str, Buffer]
    ) -> None:
        """Write the gradients of a backward in float64 to dq, dk and dv of `outs`."""
        rows = problem.batch * problem.heads * problem.seqlen_q
        delta = Buffer(8 * rows)
        at = {name: np.uint64(buffer.pointer) for name, buffer in (inputs | {**outs}).items()}
        to = np.uint64(delta.pointer)
        args = [at["o"], at["do"], to, np.int64(rows), np.int32(problem.head_dim)]
        self._launch("backward_delta", ceil_div(rows, _THREADS // 32), args)
        given = [*(at[name] for name in ("q", "k", "v", "do", "lse")), to]
        how = _gradients(inputs, problem)
        smem_bytes = 8 * (2 * _TILE + 2 * _STEP) * _PITCH
        parts = ceil_div(problem.head_dim, _TILE)
        for name, length, heads, written in (
            ("backward_queries", problem.seqlen_q, problem.heads, ("dq", "dq")),
            ("backward_keys", problem.seqlen_k, problem.heads_kv, ("dk", "dv")),
        ):
            blocks = ceil_div(length, _TILE) * parts * problem.batch * heads
            self._launch(name, blocks, [*given, *(at[n] for n in written), *how], smem_bytes)
        self._session.synchronize()  # delta is in use until then

    def rows(
        self, buffer: Buffer, shape: Sequence[int], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Copy some rows of each head of a float64 (batch, heads, seqlen, head_dim) to the host."""
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

    def of_dtype(self, dtype: str) -> Comparer:
        """The judge of another dtype on the same GPU."""
        return Comparer(self._session, dtype, self._cache_dir)

    def _pointers(self, one: ComparedOutput) -> tuple[int, ...]:
        first, last = one.expected[0].pointer, one.expected[-1].pointer
        mix, tilted = one.mix or self._plain, one.tilted.pointer if one.tilted else 0
        return one.output, first, last, mix.pointer, tilted

    def compare(self, one: ComparedOutput, slot: int, *, exact: bool = False) -> None:
        """Compare every element of an output; findings go to a slot. exact: it is in float64."""
        tiles, record = one.tiles, 8 * len(_FOUND)
        pointers = (*self._pointers(one), self._tiles_for(tiles))
        args = [*map(np.uint64, pointers), *map(np.int32, one.sizes), np.float64(one.floor)]
        args += [np.int32(one.sample.every), np.int32(one.sample.phase)]
        self._launch("judge_exact" if exact else "judge", tiles, args, record * _THREADS // 32)
        self._summarise(tiles, slot)

    def _tiles_for(self, count: int) -> int:
        """Device memory for the findings of this many tiles."""
        if self._tiles is None or self._tiles.nbytes < count * 8 * len(_FOUND):
            self._tiles = Buffer(count * 8 * len(_FOUND))
        return self._tiles.pointer

    def _summarise(self, tiles: int, slot: int, first: int = 0, calls: int = 1) -> None:
        """Sum up `tiles` findings of each call; those of the n-th go to the n-th slot on."""
        record = 8 * len(_FOUND)
        to = np.uint64(self._found.pointer + slot * record)
        all_of = [np.uint64(self._tiles_for(tiles) + first * record), np.int64(tiles), to]
        self._launch("summary", calls, all_of, record * _THREADS)

    def outputs(self, every: Sequence[ComparedOutput]) -> LaunchRecords:
        """A table for compare_each."""
        record, tiles = 8 * len(_FOUND), [one.tiles for one in every]
        findings = Buffer(sum(tiles) * record)
        at = findings.pointer + record * np.cumsum([0, *tiles])
        records = np.array(
            [
                (
                    *(*self._pointers(one), at[number], self._found.pointer + number * record),
                    *(tiles[number], *one.sizes, one.floor),
                )
                for number, one in enumerate(every)
            ],
            _OUTPUT,
        )
        return _table(records, max(tiles, default=0), findings)

    def compare_each(self, outputs: LaunchRecords) -> None:
        """`compare` of all outputs of a table; findings go to the first slots."""
        args = [np.uint64(outputs.records.pointer)]
        smem_bytes = 8 * len(_FOUND) * _THREADS
        self._launch("judge_each", outputs.most, args, smem_bytes // 32, outputs.count)
        self._launch("summary_each", outputs.count, args, smem_bytes)

    def compare_lse(
        self, written: Buffer, expected: Buffer, problem: Problem, sample: Sample, slot: int
    ) -> None:
        """Compare float32 log-sum-exps with the expected ones; the largest error goes to a slot."""
        rows = problem.batch * problem.heads * problem.seqlen_q
        args: list[Any] = [np.uint64(written.pointer), np.uint64(expected.pointer), np.int64(rows)]
        args.append(np.uint64(self._counts.pointer + 8 * slot))
        args += [np.int32(n) for n in (problem.seqlen_q, sample.every, sample.phase)]
        self._launch("judge_lse", 1, args, 8 * _THREADS)

    def digest(self, buffers: Sequence[Buffer], slot: int, *, poison: bool = False) -> None:
        """Add digests of buffers of one size to as many slots; poison: then fill them with NaN."""
        for first in range(0, len(buffers), _TOGETHER):
            some = buffers[first : first + _TOGETHER]
            self._digest(some, 1, self._counts.pointer + 8 * (slot + first), poison)

    def digest_parts(self, buffer: Buffer, sums: Buffer, first: int, parts: int) -> None:
        """Add the digests of equal parts of a buffer to as many uint64 of `sums` from `first` on.

        They add up to the digest of the whole. A part has a multiple of four bytes, or is the only.
        """
        self._digest([buffer], parts, sums.pointer + 8 * first, False)

    def _digest(self, some: Sequence[Buffer], parts: int, to: int, poison: bool) -> None:
        nbytes, count = some[0].nbytes, len(some)
        places = _by_value([buffer.pointer for buffer in some], _TOGETHER)
        args = [places, np.int64(nbytes), np.int32(parts), np.int32(poison), np.uint64(to)]
        blocks = self._blocks(nbytes * count, parts * count)
        self._launch("digest", blocks, args, _SUMS, min(parts, _PARTS), count)

    def negate(
        self, tensors: Sequence[Buffer], dtype: str, heads: int, mix: Buffer, old: int, new: int
    ) -> None:
        """Take k and v, or dO, from one mix to another, and write it to `mix`: see `negated_heads`.

        dtype: theirs.

        In one launch: the device waits for it before each replay that is timed.
        """
        one, other = tensors[0], tensors[-1]
        # The sign bits of a word of four bytes.
        sign = np.uint32({1: 0x80808080, 2: 0x80008000, 4: 0x80000000}[DTYPE_BYTES[dtype]])
        sizes = (np.int64(one.nbytes), np.int64(other.nbytes), np.int32(heads))
        mixes = map(np.uint64, (old, new, mix.pointer))
        args = [np.uint64(one.pointer), np.uint64(other.pointer), *sizes, sign, *mixes]
        count, most = len(tensors), max(one.nbytes, other.nbytes)
        blocks = self._blocks(count * most, count * heads)
        self._launch("negate", blocks, args, 0, min(heads, _PARTS), count)

    def redraw(self, regions: LaunchRecords, old: int, new: int) -> None:
        """Take inputs from one content to another; content 0 is as they were made.

        regions: of q, k and v, each with a slot of its own, which gives it another content, and 1
        as the number of those whose signs may change. A content is a number of 64 bits.
        """
        blocks = self._blocks(regions.most * regions.count, regions.count)
        args = [np.uint64(regions.records.pointer), np.uint64(old), np.uint64(new)]
        self._launch("redraw", blocks, args, 0, regions.count)

    def chain(self, regions: LaunchRecords, contents: Buffer, digests: Buffer, call: int) -> None:
        """Take inputs to the content of a call of a chain, as contents_of says.

        regions: as for redraw, as they were made before the first call. contents: of the calls so
        far, of which the first is given. digests: of their outputs.
        """
        blocks = self._blocks(regions.most * regions.count, regions.count)
        at = (regions.records.pointer, contents.pointer, digests.pointer)
        args = [*map(np.uint64, at), np.int32(call)]
        self._launch("chain", blocks, args, 0, regions.count)

    def count_outside(self, buffer: Buffer, slot: int) -> None:
        """Add to a slot the number of bytes of the buffer's guards that something changed."""
        before, after = buffer.guards
        sizes = map(np.int32, (GUARD_BYTES, buffer.guard_byte))
        to = np.uint64(self._counts.pointer + 8 * slot)
        self._launch("differing", 16, [np.uint64(before), np.uint64(after), *sizes, to], _SUMS)

    def blocks_of(self, memory: Sequence[tuple[int, int]]) -> LaunchRecords:
        """A table for `look` of memory without guards: pairs of a pointer and its bytes."""
        records = [(at, nbytes, 0, 1, slot) for slot, (at, nbytes) in enumerate(memory)]
        return _table(np.array(records, _REGION), max(nbytes for _, nbytes in memory))

    def regions(self, every: Sequence[tuple[Buffer, int, int]]) -> LaunchRecords:
        """A table for look and renew: buffers, numbers for their digests, and slots.

        A number is 0 if no digest is wanted. Buffers of a slot have others, from 1 on.
        """
        records = [
            (buffer.pointer, buffer.nbytes, buffer.guard_byte, digested, slot)
            for buffer, digested, slot in every
        ]
        most = max((buffer.nbytes for buffer, _, _ in every), default=0)
        return _table(np.array(records, _REGION), max(most, GUARD_BYTES))

    def look(self, regions: LaunchRecords, first: int, guard_bytes: int = GUARD_BYTES) -> None:
        """Add to the slots from `first` on: each region's changed guard bytes, and its digest.

        guard_bytes: 0 if they have none.
        """
        blocks = self._blocks(regions.most * regions.count, regions.count)
        to = np.uint64(self._counts.pointer + 8 * first)
        args = [np.uint64(regions.records.pointer), np.int32(guard_bytes), to]
        self._launch("look", blocks, args, _SUMS, regions.count)

    def renew(self, regions: LaunchRecords, guard_bytes: int = GUARD_BYTES) -> None:
        """Fill each region with NaN, and renew its guards, as Buffer.poison does.

        guard_bytes: 0 if guards stay as they are.
        """
        blocks = self._blocks(regions.most * regions.count, regions.count)
        args = [np.uint64(regions.records.pointer), np.int32(guard_bytes)]
        self._launch("renew", blocks, args, 0, regions.count)

    def _blocks(self, nbytes: int, parts: int) -> int:
        """Blocks of each part: 16 bytes of it for a thread, or eight blocks an SM of all parts."""
        most = ceil_div(8 * self._session.gpu.sm_count, parts)
        return max(1, min(most, ceil_div(nbytes // parts, 16 * _THREADS)))

    def clear(self) -> None:
        """Set every count to zero and every finding to NaN: what is not written then is wrong."""
        self._sent = None
        self._counts.fill(0)
        self._found.fill(POISON)

    def counts(self, slots: int) -> Any:
        """The first `slots` slots as uint64, after all work before."""
        self._counts.download(self._host[:slots], self._session.stream)
        self._session.synchronize()
        return self._host[:slots].copy()

    def found_of(self, cases: int, outputs: int) -> list[list[dict[str, float]]]:
        """For each case, the findings for each of its outputs: see DeviceCase.compare."""
        found = self.found(cases * outputs)
        return [found[at : at + outputs] for at in range(0, len(found), outputs)]

    def send(self, slots: int) -> None:
        """Enqueue a copy of the first findings, so that `found` waits for no work behind it."""
        self._found.download(self._records[:slots], self._session.stream)
        self._sent = self._session.record()

    def found(self, slots: int) -> list[dict[str, float]]:
        """The findings of the first `slots` slots of `compare`, after all work before, or as sent.

        Not of more slots than were sent.
        """
        if self._sent is None:
            self.send(slots)
        self._session.wait(self._sent)
        self._sent = None
        return [dict(zip(_FOUND, one, strict=True)) for one in self._records[:slots].tolist()]


def row_bytes(problem: Problem) -> int:
    """Bytes of shared memory of a block of judge_rows."""
    return 8 * (problem.head_dim + _THREADS // 32 * (problem.value_dim + 2))


def _by_value(pointers: Sequence[int], room: int) -> Any:
    """A struct with room for some pointers, as one item of an array: CuPy passes it by value."""
    made = np.zeros(room, np.uint64)
    made[: len(pointers)] = pointers
    return made.view(f"V{made.nbytes}")


def _given(every: Sequence[Mapping[str, Buffer]], problem: Problem, room: int) -> Any:
    """compare.cu's Given of calls, by value."""
    # Other masks are between two diagonals.
    inputs = {*problem.inputs} - ({"mask"} if problem.mask.pattern is None else set())
    pointers = list[int]()
    for at in every:
        own = inputs | (at.keys() & {*problem.outputs, "lse"})
        pointers += [at[name].pointer if name in own else 0 for name in _GIVEN]
    return _by_value(pointers, room * len(_GIVEN))


@lru_cache(maxsize=256)
def _common(problem: Problem, tilt: float = 0) -> Any:
    """compare.cu's Common of a problem, by value."""
    per, blocks = 2**31 - 1, 1
    if problem.format.scale_block is not None:
        per, blocks = problem.format.scale_block, problem.shape_of("k_scale")[2]
    own = problem.scores.bias or ()
    made = (
        *(problem.heads // problem.heads_kv, problem.seqlen_q, problem.seqlen_k),
        *(*problem.head_dims, *problem.diagonals, per, blocks, problem.heads),
        *(problem.items_differ, problem.layout.sequences, "item" in own, "head" in own),
        *(problem.scale * (1 + tilt), problem.scores.softcap),
    )
    return np.frombuffer(packed := struct.pack("14i2d", *made), f"V{len(packed)}")


def _gradients(at: Mapping[str, Buffer], problem: Problem) -> list[Any]:
    """The kernel arguments of gradients from `group` to `heads`."""
    sizes = (problem.heads // problem.heads_kv, problem.seqlen_q, problem.seqlen_k)
    how = [*map(np.int32, (*sizes, problem.head_dim)), np.float64(problem.scale)]
    ranges = at["key_range"].pointer if "key_range" in at else 0
    return [*how, *map(np.int32, problem.diagonals), np.uint64(ranges), np.int32(problem.heads)]


def _table(records: npt.NDArray[Any], most: int, tiles: Buffer | None = None) -> LaunchRecords:
    """The records on the device. The caller waits before it launches what reads them."""
    buffer = Buffer(records.nbytes)
    buffer.upload(records)
    return LaunchRecords(buffer, len(records), most, tiles)

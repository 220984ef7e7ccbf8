"""How one call of a config is issued: whole or in chunks, over streams, from a graph or eagerly.

Every family has these parameters next to its own, and no template knows of them: a chunk is the
family's own launches on a smaller problem, at an offset into the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import CAUSAL, FULL, Problem, ceil_div
from attnsweep.family.params import Config, Param

if TYPE_CHECKING:
    from attnsweep.family.family import Family

_MODES = (
    Param("LAUNCH", ("graph", "eager"), "calls are replayed from a graph, or launched by the host"),
    Param("STREAMS", (1,), "streams that chunks of heads alternate on"),
    Param(
        "CHUNK_HEADS",
        (0,),
        "heads (over the batch) per launch; 0: all, divided over STREAMS, or as many as "
        "limits.workspace_bytes allows",
    ),
    Param("CHUNK_ROWS", (0,), "queries per launch, then of one head; 0: all, or as above"),
)
# A chunk of queries is a multiple of ROW_UNIT: the largest BLOCK_M of any family, so that no tile
# is cut. The workspaces of different streams begin at multiples of _ALIGNMENT bytes.
ROW_UNIT = 256
_ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a call: a problem of its own, at `offsets` (bytes) into the buffers."""

    problem: Problem
    stream: int
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a call is issued: its chunks in order. Those on one stream share a workspace."""

    pieces: tuple[Piece, ...]
    streams: int
    eager: bool
    workspaces: Mapping[str, int]
    """Bytes of each buffer, all streams together."""
    widest: Problem
    """The problem that the stages are compiled for; no piece is longer in any dimension."""

    @property
    def whole(self) -> bool:
        """Whether a call is one chunk, replayed from a graph."""
        return len(self.pieces) == 1 and not self.eager

    @property
    def facts(self) -> dict[str, int]:
        """Facts of the schedule that a row records."""
        problem = self.pieces[0].problem
        return {
            "chunks": len(self.pieces),
            "heads": problem.batch * problem.heads,
            "rows": problem.seqlen_q,
            "streams": self.streams,
            "workspace_bytes": sum(self.workspaces.values()),
        }


def mode(config: Mapping[str, object], name: str) -> int | bool | str:
    """The value of one of the modes in a config, whether the config names it or not."""
    default = next(param.values[0] for param in _MODES if param.name == name)
    return config.get(name, default)  # type: ignore[return-value]


def _number(config: Mapping[str, object], name: str) -> int:
    return int(mode(config, name))


# Each is a launch; a graph of more takes longer to make than to time.
_MOST_CHUNKS = 2**16


def is_used(config: Config, problem: Problem) -> bool:
    """Whether every mode that the config sets takes effect on this problem."""
    total, group = problem.batch * problem.heads, problem.heads // problem.heads_kv
    heads, rows = _number(config, "CHUNK_HEADS"), _number(config, "CHUNK_ROWS")
    if rows and (rows >= problem.seqlen_q or rows % ROW_UNIT or heads > 1):
        return False
    if rows and not _splits_queries(problem):
        return False
    if not _splits(problem) and (heads or rows or _number(config, "STREAMS") > 1):
        return False
    if heads and (heads > total or not _keeps_groups(heads, group)):
        return False
    if heads == total and not rows:
        return False
    heads, rows = _wanted(config, problem)
    chunks = ceil_div(total, heads) * ceil_div(problem.seqlen_q, rows)
    return _number(config, "STREAMS") <= chunks <= _MOST_CHUNKS


def is_served(kernel: Family, config: Config, problem: Problem) -> bool:
    """Whether the family can run each chunk of heads or rows into which the config cuts a call."""
    own = kernel.supports or kernel.turned
    pieces = schedule_of(kernel, config, problem).pieces if own else ()
    if kernel.turned and len(pieces) > 1:  # some heads of all rows are no tensor in this order
        return False
    return all(kernel.serves(piece.problem) for piece in pieces)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The modes of a family, the rule that prunes useless ones, and the schedule they ask for."""

    modes: tuple[Param, ...] = _MODES
    rule: str = "chunks_are_used"
    description: str = (
        "chunks are smaller than the call and at most 65536, keep grouped heads together, and use "
        "every stream"
    )

    def keeps(self, kernel: Family, config: Config, problem: Problem) -> bool:
        """The rule: each mode takes effect, and the family serves each chunk."""
        return is_used(config, problem) and is_served(kernel, config, problem)

    def schedule(
        self, kernel: Family, config: Config, problem: Problem, workspace_limit: int | None
    ) -> Schedule:
        """How a call of the config is issued: see schedule_of."""
        return schedule_of(kernel, config, problem, workspace_limit)


def schedule_of(
    kernel: Family, config: Config, problem: Problem, workspace_limit: int | None = None
) -> Schedule:
    """The chunks that a config asks for; if it leaves them open, the fewest that fit.

    workspace_limit: bytes of all workspaces together. If not even ROW_UNIT queries of one head fit,
    the schedule exceeds the limit, and the caller must refuse it.
    """

    def made(heads: int, rows: int) -> Schedule:
        return _schedule(kernel, config, problem, heads, rows)

    heads, rows = _wanted(config, problem)
    schedule = made(heads, rows)

    def fits(schedule: Schedule) -> bool:
        used = sum(schedule.workspaces.values())
        # Items with keys of their own are one call, and a family may not serve a chunk.
        whole = bool(kernel.supports) or kernel.turned or not _splits(problem)
        return whole or workspace_limit is None or used <= workspace_limit

    if not _number(config, "CHUNK_HEADS") and not _number(config, "CHUNK_ROWS"):
        group = problem.heads // problem.heads_kv
        while not fits(schedule) and heads > 1:
            heads = next(n for n in range(heads - 1, 0, -1) if _keeps_groups(n, group))
            schedule = made(heads, rows)
    if not _number(config, "CHUNK_ROWS") and heads == 1 and _splits_queries(problem):
        while not fits(schedule) and rows > ROW_UNIT:
            rows = max(ROW_UNIT, (rows - 1) // 2 // ROW_UNIT * ROW_UNIT)
            schedule = made(heads, rows)
    return schedule


def _keeps_groups(heads: int, group: int) -> bool:
    """Whether chunks of `heads` query heads each read key heads of their own."""
    return heads % group == 0 or group % heads == 0


def _splits(problem: Problem) -> bool:
    """Whether some heads of all items are a problem of their own."""
    if problem.op != FORWARD:
        return False
    return problem.layout.kind == "dense" and not problem.mask.as_tensor


def _splits_queries(problem: Problem) -> bool:
    """Whether some queries with the keys up to their last are a problem with the same mask."""
    mask = problem.mask
    # The first queries alone may have no keys at all.
    if problem.has_empty_rows or not _splits(problem):
        return False
    return not mask.interval.top_left and (mask in (FULL, CAUSAL) or mask.interval.right == 0)


def _wanted(config: Config, problem: Problem) -> tuple[int, int]:
    """Heads and queries of a chunk, before a workspace limit shrinks it."""
    total, group = problem.batch * problem.heads, problem.heads // problem.heads_kv
    if not _splits(problem):
        return total, problem.seqlen_q
    rows = _number(config, "CHUNK_ROWS")
    if rows and rows < problem.seqlen_q:
        return 1, rows
    heads = _number(config, "CHUNK_HEADS")
    if not heads:
        heads = ceil_div(total, _number(config, "STREAMS"))
        while not _keeps_groups(heads, group):
            heads += 1
    return min(heads, total), problem.seqlen_q


def _spans(problem: Problem, heads: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """First head, number of heads, first query and number of queries of each chunk."""
    total = problem.batch * problem.heads
    for head in range(0, total, heads):
        for row in range(0, problem.seqlen_q, rows):
            yield head, min(heads, total - head), row, min(rows, problem.seqlen_q - row)


def _schedule(kernel: Family, config: Config, problem: Problem, heads: int, rows: int) -> Schedule:
    spans = list(_spans(problem, heads, rows))
    eager = mode(config, "LAUNCH") == "eager"
    if len(spans) == 1:
        whole = Piece(problem, 0, {})
        return Schedule((whole,), 1, eager, kernel.workspaces(config, problem), problem)
    streams = min(_number(config, "STREAMS"), len(spans))
    chunks = [_chunk(problem, *span) for span in spans]
    largest: dict[str, int] = {}
    for distinct in dict.fromkeys(chunk for chunk, _ in chunks):
        for name, nbytes in kernel.workspaces(config, distinct).items():
            largest[name] = max(nbytes, largest.get(name, 0))
    apart = {name: ceil_div(nbytes, _ALIGNMENT) * _ALIGNMENT for name, nbytes in largest.items()}
    pieces = []
    for number, (chunk, offsets) in enumerate(chunks):
        stream = number % streams
        own = {name: stream * apart[name] for name in apart}
        pieces.append(Piece(chunk, stream, {**offsets, **own}))
    workspaces = {name: (streams - 1) * apart[name] + largest[name] for name in largest}
    widest = replace(chunks[0][0], seqlen_k=problem.seqlen_k)
    return Schedule(tuple(pieces), streams, eager, workspaces, widest)


def _chunk(
    problem: Problem, head: int, heads: int, row: int, rows: int
) -> tuple[Problem, dict[str, int]]:
    """The problem of a chunk, with batch and heads merged, and the byte offsets of its tensors."""
    group = problem.heads // problem.heads_kv
    seqlen_k = problem.seqlen_k
    if problem.mask.interval.right is not None:
        # Dropping hidden keys at the end keeps the mask aligned.
        seqlen_k -= problem.seqlen_q - row - rows
    chunk = replace(
        problem,
        batch=1,
        heads=heads,
        heads_kv=max(1, heads // group),
        seqlen_q=rows,
        seqlen_k=seqlen_k,
    )
    offsets = {}
    for name in ("q", "o", *problem.inputs[1:]):
        _, of_tensor, *_ = problem.shape_of(name)
        own = problem.bytes_of(name) // (problem.batch * of_tensor)  # bytes of a head
        offsets[name] = own * (head if name in "qo" else head // group)
        if name in "qo":
            offsets[name] += own // problem.seqlen_q * row
    return chunk, offsets


IN_CHUNKS = Chunks()
"""What every family has that declares nothing else."""

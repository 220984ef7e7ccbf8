"""decode_paged_mma: few queries over a paged cache, cut into equal runs whatever its lengths are.

Serving engines have other strides than a problem: the last STRIDES arguments of `fwd` are those of
q and o (batch, head, row), of k and v (page, slot, head), of block_table (request), and of k_scale
and v_scale (request, head), in elements.
"""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import LOG2E, Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "decode_paged_mma",
    summary="decoding from a paged cache, bf16, fp16 or E4M3: mma.sync, a cp.async ring a warp, "
    "one grid for all lengths",
    params=(
        Param("WARPS", (4, 8, 2), "warps of a block; 2 where 4 have too little shared memory"),
        Param("NUM_STAGES", (2, 3), "tiles of K and V in a warp's ring"),
        Param("KEYS", (16, 32), "keys of a warp's tile"),
        Param("BLOCKS_PER_SM", (1, 2), "blocks of the grid for each SM"),
        Param("HEADS", (1, 2), "neighbouring key heads, or row tiles, that a block reads at once"),
        Param("ROW_FRAGMENTS", (1, 2), "eights of packed rows in a tile"),
        Param("ITEM_COST", (1, 0, 2), "units that the end of an item counts, if lengths differ"),
        Param("EVICT_FIRST", (1, 0), "1: hint L2 that K and V are not read again"),
        Param("SCHEDULE", (0, 1), "who finds the blocks' runs: 0 each block; 1 a launch before"),
        Param("PDL", (0, 1), "1: the launch after the schedule begins early and waits for it"),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    head_dims=(64, 96, 128, 256),
    masks=("full", "causal", "window"),
    layouts=("paged",),
    cache_dtypes=("e4m3",),
    scores=("softcap", "sinks"),
    lse="LSE",
    empty_rows=True,
)
# SMs that workspaces have room for: they are made before a card is known.
MOST_SMS = 192
RUN_BYTES = 48  # what the schedule stage says of a block
RESET_THREADS, SCHEDULE_THREADS = 256, 128
UNLIMITED = 2**30  # a side of a window
STRIDES = 12
SMALLEST = {"WARPS": 4, "NUM_STAGES": 2, "KEYS": 16, "ROW_FRAGMENTS": 1}
# Registers that ptxas 13 needs besides output and Q, from compiling the whole space: of a row's
# fragment, and of all.
OF_ROWS, REST = 8, 132


def rows(p: Problem) -> int:
    """Packed rows of a key head: the queries of all its query heads."""
    return p.seqlen_q * (p.heads // p.heads_kv)


def row_tiles(c: Config, p: Problem) -> int:
    """Tiles of packed rows of a key head."""
    return ceil_div(rows(p), 8 * c.ROW_FRAGMENTS)


def items(c: Config, p: Problem) -> int:
    """Items of a request: HEADS key heads, or tiles of packed rows, each."""
    return ceil_div(p.heads_kv * row_tiles(c, p), c.HEADS)


def blocks(c: Config, arch: Arch) -> int:
    """Blocks of the grid."""
    return min(arch.sm_count, MOST_SMS) * c.BLOCKS_PER_SM


def pitch(nbytes: int) -> int:
    """Bytes from row to row in shared memory: a power of two of chunks of 16."""
    return max(64, 1 << (nbytes - 1).bit_length())


def cache_bytes(p: Problem) -> int:
    """Bytes of a number of the cache."""
    return 1 if p.scales else 2


def smem_bytes(c: Config, p: Problem) -> int:
    """Bytes of each warp's ring of K, V and Q, and what it hands over at the end of an item."""
    tile = c.KEYS * pitch(p.head_dim * cache_bytes(p))
    queries = 8 * c.ROW_FRAGMENTS * pitch(2 * p.head_dim) + 16
    merged = 8 * (4 * (p.head_dim + 4) + 8)
    return c.WARPS * (c.NUM_STAGES * (2 * tile + queries) + merged) + 4 * c.HEADS


def registers_given(c: Config, arch: Arch) -> int:
    """Registers of a thread if as many blocks run on an SM as planned."""
    most = arch.registers_per_sm // (32 * c.WARPS * c.BLOCKS_PER_SM) // 8 * 8
    return min(255, most)


def registers_needed(c: Config, p: Problem) -> int:
    """Registers of a thread: output, Q, and the rest."""
    return c.ROW_FRAGMENTS * (3 * p.head_dim // 8 + OF_ROWS) + REST


# fmt: off
kernel.keep_if(
    ("known_values", "switches are 0 or 1; a block has 2 to 16 warps, and tiles 16 to 64 keys",
     lambda c, p, arch: max(c.EVICT_FIRST, c.SCHEDULE, c.PDL, c.LSE) < 2 and c.ITEM_COST >= 0
     and c.WARPS in (2, 4, 8, 16) and c.KEYS in (16, 32, 64) and c.HEADS in (1, 2, 4)
     and c.ROW_FRAGMENTS >= 1 and c.NUM_STAGES >= 2),
    ("threads_of_row", "the warps of a head have a thread for each 4 columns",
     lambda c, p, arch: 32 * c.WARPS // c.HEADS >= p.head_dim // 4),
    ("few_warps", "a block has 2 warps where 4 do not fit the shared memory",
     lambda c, p, arch: c.WARPS > 2
     or smem_bytes(Config(dict(c) | SMALLEST), p) > arch.smem_per_block),
    ("registers", "the output, scores and Q fit the registers of a thread, so nothing spills",
     lambda c, p, arch: registers_needed(c, p) <= registers_given(c, arch)),
    ("blocks_fit", "the planned blocks fit the shared memory of an SM",
     lambda c, p, arch: smem_bytes(c, p) <= arch.smem_per_block
     and arch.smem_per_sm // (smem_bytes(c, p) + arch.smem_reserved_per_block) >= c.BLOCKS_PER_SM),
    ("early_launches", "a launch begins early behind the schedule's, from sm_90 on",
     lambda c, p, arch: not c.PDL or (c.SCHEDULE and arch.compute_capability >= (9, 0))),
    ("item_cost", "if all lengths are equal, an item's end counts nothing, and ITEM_COST stays 1",
     lambda c, p, arch: c.ITEM_COST == 1 or len({*p.layout.of_items(p.batch, p.seqlen_k)}) > 1),
)
kernel.keep_if(
    ("small_pages", "pages are 1, 2, 4, 8, or sixteens of keys; small ones have tiles of up to 32",
     lambda c, p, arch: p.layout.page_size % 16 == 0
     or (p.layout.page_size in (1, 2, 4, 8) and c.KEYS <= 32)),
    ("heads", "HEADS divides the key heads and row tiles of a request",
     lambda c, p, arch: p.heads_kv * row_tiles(c, p) % c.HEADS == 0),
    ("idle_rows", "a tile of rows is under twice as large as the rows, or the smallest",
     lambda c, p, arch: c.ROW_FRAGMENTS == 1 or 4 * c.ROW_FRAGMENTS < rows(p)),
    ("idle_warps", "the tiles of a head's warps are under twice the longest length",
     lambda c, p, arch: c.KEYS * c.WARPS // c.HEADS < 2 * max(64, p.seqlen_k)),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    grid = MOST_SMS * c.BLOCKS_PER_SM
    part_rows = grid * 2 * c.HEADS * 8 * c.ROW_FRAGMENTS
    parts = {"parts": 4 * part_rows * p.head_dim, "part_sums": 8 * part_rows}
    runs = {"runs": RUN_BYTES * grid} if c.SCHEDULE else {}
    lse = 4 * p.batch * p.heads * p.seqlen_q if c.LSE else 16
    return parts | {"counters": 4 * grid * c.HEADS, "lse": lse} | runs


def window(p: Problem) -> tuple[int, int]:
    """Keys that a query sees before its own and after it."""
    left, right = (UNLIMITED if side is None else side for side in p.mask.interval.sides)
    return left, right


@kernel.stage("reset", params=(), constants=())
def reset(c, p, arch):
    return Launch(
        function="decode_paged_reset",
        grid=(1, 1, 1),
        threads=RESET_THREADS,
        args=("counters", blocks(c, arch) * c.HEADS),
        once=True,
    )


@kernel.stage(
    "schedule", params=("WARPS", "KEYS", "HEADS", "ITEM_COST", "SCHEDULE", "PDL"), constants=()
)
def schedule(c, p, arch):
    if not c.SCHEDULE:
        return None
    grid, page_size = blocks(c, arch), p.layout.page_size
    return Launch(
        function="decode_paged_schedule",
        grid=(ceil_div(32 * grid, SCHEDULE_THREADS), 1, 1),
        threads=SCHEDULE_THREADS,
        args=(
            *("seqused_k", "runs", p.batch, p.seqlen_q, window(p)[0]),
            *(p.layout.blocks(p.seqlen_k) * page_size, items(c, p), grid),
        ),
        defines={"WINDOW": int(p.mask.kind == "window"), "PAGE_SIZE": page_size},
        programmatic=c.PDL > 0,
    )


@kernel.stage("fwd", constants=("HEAD_DIM", "IS_BF16"))
def fwd(c, p, arch):
    columns = p.head_dim
    of_heads = (p.heads * p.seqlen_q * columns, p.seqlen_q * columns, columns)
    max_blocks = p.layout.blocks(p.seqlen_k)
    strides = (*of_heads, *of_heads, *p.layout.strides(p), max_blocks, p.heads_kv, 1)
    return Launch(
        function="decode_paged_mma",
        grid=(blocks(c, arch), 1, 1),
        threads=32 * c.WARPS,
        args=(
            *("q", "k", "v", "o", "block_table", "seqused_k"),
            # The kernel does not read a pointer to what the problem does not have.
            *(p.scales or ("lse", "lse")),
            *("sinks" if p.scores.sinks else "lse", "lse", "parts", "part_sums", "counters"),
            "runs" if c.SCHEDULE else "lse",
            *(p.batch, p.heads_kv, p.heads // p.heads_kv, p.seqlen_q),
            *(p.layout.pages(p.batch, p.seqlen_k), max_blocks, *window(p)),
            *(p.scale * LOG2E, float(p.scores.softcap), *strides),
        ),
        smem_bytes=smem_bytes(c, p),
        defines={
            "PAGE_SIZE": p.layout.page_size,
            "CACHE_E4M3": int(bool(p.scales)),
            "CAUSAL": int(p.mask.kind == "causal"),
            "WINDOW": int(p.mask.kind == "window"),
        }
        | {kind.upper(): 1 for kind in p.scores.kinds},
        min_blocks_per_sm=c.BLOCKS_PER_SM,
        programmatic=c.PDL > 0,
    )

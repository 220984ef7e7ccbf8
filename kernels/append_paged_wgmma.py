"""append_paged_wgmma: many queries over a paged cache on Hopper, as chunked prefill has them.

Serving engines have other strides than a problem: the maps have those of q, k and v, and the last
STRIDES arguments of `fwd` are those of o (item, head, row) and block_table (request), in elements.
Where keys are copied by rows, k and v have no map: then OF_ROWS more follow, the scales, the pages,
and the strides of k and v (page, slot, head) and of the scales (request, head).
"""

from math import gcd

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.family.launch import TensorMap

kernel = Family(
    "append_paged_wgmma",
    summary="chunked prefill over a paged cache on Hopper, bf16, fp16 or E4M3: pages by TMA or by "
    "rows, warp-specialised wgmma, one grid for all lengths",
    params=(
        Param("BLOCK_N", (64, 96, 128, 176), "keys of a tile, a multiple of 16"),
        Param("WARPGROUPS", (2, 3, 1), "consumer warpgroups of a block, 64 packed rows each"),
        Param("NUM_STAGES", (2, 3), "tiles of K, and of V, in flight"),
        Param("BLOCKS_PER_SM", (1, 2), "blocks of the grid for each SM"),
        Param("OVERLAP", (1, 0), "1: softmax runs next to the PV of the tile before"),
        Param("PINGPONG", (0, 1), "1: warpgroups take turns to begin their products"),
        Param(
            "SPLITS",
            (1, 2, 4),
            "most blocks that share a tile's keys, where these are more than a fair share of all; "
            "the last one to end joins them",
            absent=1,
        ),
        Param(
            "COPY_WARPS",
            (4, 8),
            "warps of the producer: more than 4 widen an E4M3 cache",
            absent=4,
        ),
        # 2 never won on an H200.
        Param("MAXIMA", (1,), "row maxima: 1 of all tiles, within 2^8; 2 only if a sum is large"),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    min_arch="sm_90a",
    head_dims=(64, 96, 128, 256),
    masks=("full", "causal", "window"),
    layouts=("paged",),
    cache_dtypes=("e4m3",),
    scores=("softcap", "sinks"),
    lse="LSE",
    empty_rows=True,
    supports=(
        (
            "pages of 1, 2 or 4 keys, or of a multiple of 8",
            lambda p: p.layout.page_size in (1, 2, 4) or p.layout.page_size % 8 == 0,
        ),
        ("up to 64 query heads of a key head", lambda p: p.heads <= 64 * p.heads_kv),
    ),
)
UNLIMITED = 2**30  # a side of a window
STRIDES, OF_ROWS = 4, 8
SLOTS = 512  # parts of 64 rows whose sums memory is held for
LEAST_SHARE = 8  # tiles of keys: one and a half times it, or of a block's fair share, are shared
# Registers that ptxas 13 needs besides scores, P and accumulators, from compiling the whole space.
REST = 30
# More of them where scores are computed again: of tiles of up to 128 keys, and of larger ones. With
# 8 for both, 8 to 96 bytes were spilled beside a window and what changes scores.
AGAIN = (12, 40)
# More of them where an E4M3 cache has a window, or scores are changed: else 52 bytes spill.
MORE = 4


def by_rows(p: Problem) -> bool:
    """Whether keys are copied by rows: boxes are of 8 slots at least, and of 16 bits."""
    return p.layout.page_size % 8 > 0 or bool(p.scales)


def group(p: Problem) -> int:
    """Query heads of a key head."""
    return p.heads // p.heads_kv


def tokens(c: Config, p: Problem) -> int:
    """Tokens of a tile of queries."""
    return 64 // group(p) * c.WARPGROUPS


def tiles_of_queries(c: Config, p: Problem) -> int:
    """Tiles of queries of all requests and key heads."""
    return p.batch * p.heads_kv * ceil_div(p.seqlen_q, tokens(c, p))


def counters(c: Config) -> int:
    """Words of `turns`: two, and one for each warp of a tile whose keys are shared."""
    return 2 + (4 * SLOTS if c.SPLITS > 1 else 0)


def tile_bytes(rows: int, p: Problem) -> int:
    """Bytes of a tile of Q, K or V in whole panels."""
    return rows * hopper.panels(p.head_dim) * 128


def rooms(p: Problem) -> int:
    """Tiles of E4M3 that have memory of their own: one is widened, and the others on their way."""
    return (2 if p.head_dim == 256 else 3) if p.scales else 0


def smem_bytes(c: Config, p: Problem) -> int:
    """Bytes of Q, the rings, E4M3 on its way, what the producer tells, and barriers."""
    rows = 64 * c.WARPGROUPS + 2 * c.NUM_STAGES * c.BLOCK_N
    coming = rooms(p) * c.BLOCK_N * p.head_dim
    told = 3 * 16 * (2 + (c.SPLITS > 1) + by_rows(p)) + 16 * (c.SPLITS > 1 and by_rows(p))
    return tile_bytes(rows, p) + coming + told + 32 * c.NUM_STAGES + 8 * (1 + c.WARPGROUPS)


def threads(c: Config) -> int:
    """Threads of a block: the consumers' and the producer's."""
    return 128 * c.WARPGROUPS + 32 * c.COPY_WARPS


def producer_registers(c: Config, p: Problem) -> int:
    """Registers of a producer thread: fewest by TMA; to widen E4M3, 56 would spill.

    8 more where it also shares keys, without which 12 to 48 bytes spill.
    """
    if not by_rows(p):
        return 32 if c.SPLITS > 1 else 24
    if not p.scales:
        return 56
    return 72 if c.COPY_WARPS == 4 or (c.SPLITS > 1 and p.mask.kind == "window") else 64


def registers_given(c: Config, p: Problem, arch: Arch) -> tuple[int, int]:
    """Registers of each thread at entry, and then of a consumer's."""
    entry = hopper.registers_at_entry(arch, threads(c), c.BLOCKS_PER_SM)
    given = (entry - producer_registers(c, p)) * c.COPY_WARPS // 4
    return entry, hopper.registers_of_roles(entry, c.WARPGROUPS, entry - given)


def registers_needed(c: Config, p: Problem) -> int:
    """Registers that a consumer thread needs without spills: scores, P, accumulators, the rest."""
    again = AGAIN[c.BLOCK_N > 128] if c.OVERLAP and c.MAXIMA == 2 else 0
    more = MORE if p.scales and (p.mask.kind == "window" or p.scores.kinds) else 0
    return c.BLOCK_N // 2 + c.BLOCK_N // 4 + p.head_dim // 2 + REST + again + more


# fmt: off
kernel.keep_if(
    ("known_values", "switches are 0 or 1, MAXIMA 1 or 2",
     lambda c, p, arch: c.MAXIMA in (1, 2) and max(c.OVERLAP, c.PINGPONG, c.LSE) < 2
     and 1 <= c.SPLITS <= 16 and c.COPY_WARPS in (4, 8)),
    ("tiles", "a block has 1 to 3 warpgroups; a tile has 64 to 256 keys, in sixteens",
     lambda c, p, arch: c.WARPGROUPS in (1, 2, 3) and c.BLOCK_N in range(64, 257, 16)),
    ("parts", "keys are shared of up to 128 columns: to join wider rows spills",
     lambda c, p, arch: c.SPLITS == 1 or p.head_dim <= 128),
    ("copy_warps", "8 warps copy an E4M3 cache alone, which they widen",
     lambda c, p, arch: c.COPY_WARPS == 4 or bool(p.scales)),
    ("rows_of_warp", "by rows, a tile has at most 128 keys: each of four warps has a key a lane",
     lambda c, p, arch: not by_rows(p) or c.BLOCK_N <= 128),
    ("warpgroups_of_sm", "an SM has 2 to 4 consumer warpgroups, so that their products overlap",
     lambda c, p, arch: 2 <= c.WARPGROUPS * c.BLOCKS_PER_SM <= 4),
    ("some_overlap", "without OVERLAP, an SM has three or more warpgroups",
     lambda c, p, arch: c.OVERLAP > 0 or c.WARPGROUPS * c.BLOCKS_PER_SM >= 3),
    ("turns", "two or more warpgroups take turns, with OVERLAP",
     lambda c, p, arch: not c.PINGPONG or (c.OVERLAP and c.WARPGROUPS > 1)),
    ("registers", "scores, P and accumulators fit the registers of a thread, so nothing spills",
     lambda c, p, arch: registers_needed(c, p) <= registers_given(c, p, arch)[1]
     # ptxas refuses a wgmma whose accumulators do not fit the registers at entry (C7602).
     and max(c.BLOCK_N, p.head_dim) // 2 + 26 <= registers_given(c, p, arch)[0]),
    ("blocks_fit", "the planned blocks fit the shared memory of an SM",
     lambda c, p, arch: smem_bytes(c, p) <= arch.smem_per_block
     and arch.smem_per_sm // (smem_bytes(c, p) + arch.smem_reserved_per_block) >= c.BLOCKS_PER_SM),
)
kernel.keep_if(
    ("few_queries", "decode_paged_mma alone has requests of under 16 packed rows",
     lambda c, p, arch: p.seqlen_q * group(p) >= 16),
    ("no_idle_tile", "a tile is under twice its request, and a ring holds at most all keys",
     lambda c, p, arch: tokens(c, p) < 2 * max(64 // group(p), p.seqlen_q)
     and c.BLOCK_N < 2 * max(64, p.seqlen_k)
     and c.NUM_STAGES <= max(2, ceil_div(p.seqlen_k, c.BLOCK_N))),
    ("split_grid", "keys are shared where tiles of queries leave SMs idle, or lengths are uneven",
     lambda c, p, arch: c.SPLITS == 1 or (
        (p.layout.lengths  # more than half as many shares as SPLITS, of equal ones
         or tiles_of_queries(c, p) * (c.SPLITS + 1) <= 2 * arch.sm_count * c.BLOCKS_PER_SM)
        and LEAST_SHARE * (c.SPLITS - 0.5) * c.BLOCK_N <= p.seqlen_k)),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    sizes = {"turns": 4 * counters(c), "lse": 4 * p.batch * p.heads * p.seqlen_q if c.LSE else 16}
    # Of each row its output in fp32, and two numbers for each of four lanes.
    return sizes | ({"parts": SLOTS * 64 * (4 * p.head_dim + 32)} if c.SPLITS > 1 else {})


@kernel.stage("reset", params=(), constants=())
def reset(c, p, arch):
    args = ("turns", counters(c))
    return Launch(function="append_paged_reset", grid=(1, 1, 1), threads=256, args=args, once=True)


def map_of_q(p: Problem) -> TensorMap:
    """The map of q: a box is the tokens of a warpgroup, and the query heads of a key head."""
    row, head = 2 * p.head_dim, 2 * p.head_dim * p.seqlen_q
    return TensorMap(
        "q",
        dims=(p.head_dim, p.heads, p.seqlen_q, p.batch),
        strides=(head, row, head * p.heads),
        box=(64, group(p), 64 // group(p), 1),
    )


def map_of_pages(c: Config, p: Problem, name: str) -> TensorMap:
    """The map of k or v: a box is as many slots as divide a page and a tile."""
    page, slot, head = (2 * stride for stride in p.layout.strides(p))
    size = p.layout.page_size
    return TensorMap(
        name,
        dims=(p.head_dim, size, p.heads_kv, p.layout.pages(p.batch, p.seqlen_k)),
        strides=(slot, head, page),
        box=(64, gcd(size, c.BLOCK_N), 1, 1),
    )


@kernel.stage("fwd", constants=("HEAD_DIM", "IS_BF16"))
def fwd(c, p, arch):
    left, right = (UNLIMITED if side is None else side for side in p.mask.interval.sides)
    max_blocks = p.layout.blocks(p.seqlen_k)
    row, head = p.head_dim, p.seqlen_q * p.head_dim
    maps, of_rows = (map_of_pages(c, p, "k"), map_of_pages(c, p, "v")), ()
    if by_rows(p):
        pages = p.layout.pages(p.batch, p.seqlen_k)
        maps = "k", "v"
        of_rows = (*(p.scales or ("lse", "lse")), pages, *p.layout.strides(p), p.heads_kv, 1)
    return Launch(
        function="append_paged_wgmma",
        grid=(min(arch.sm_count * c.BLOCKS_PER_SM, tiles_of_queries(c, p) * c.SPLITS), 1, 1),
        threads=threads(c),
        args=(
            *(map_of_q(p), *maps),
            # The kernel does not read a pointer to what the problem does not have.
            *("o", "block_table", "seqused_k", "seqused_k", "seqused_k"),
            *("sinks" if p.scores.sinks else "lse", "lse", "turns"),
            "parts" if c.SPLITS > 1 else "lse",
            *(p.batch, p.heads_kv, group(p), p.seqlen_q, p.batch * p.seqlen_q, max_blocks),
            *(left, right, p.scale * LOG2E, float(p.scores.softcap)),
            *(p.heads * head, head, row, max_blocks, *of_rows),
        ),
        smem_bytes=smem_bytes(c, p),
        defines={
            "PAGE_SIZE": p.layout.page_size,
            "QUERIES": 0,
            "WINDOW": int(p.mask.kind == "window"),
            "CAUSAL": int(p.mask.kind == "causal"),
            "PRODUCER_REGISTERS": producer_registers(c, p),
            "CONSUMER_REGISTERS": registers_given(c, p, arch)[1],
        }
        | ({"CACHE_E4M3": 1, "ROOMS": rooms(p)} if p.scales else {})
        | ({"SLOTS": SLOTS // c.WARPGROUPS, "LEAST_SHARE": LEAST_SHARE} if c.SPLITS > 1 else {})
        | {kind.upper(): 1 for kind in p.scores.kinds},
        min_blocks_per_sm=c.BLOCKS_PER_SM,
    )

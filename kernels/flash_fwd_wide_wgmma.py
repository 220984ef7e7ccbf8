"""flash_fwd_wide_wgmma: fused forward on Hopper for head_dim 264 to 512, half by warpgroup."""

from dataclasses import replace

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import FULL, LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import Config, Family, Launch, Param, TensorMap

kernel = Family(
    "flash_fwd_wide_wgmma",
    summary="fused FlashAttention forward on Hopper for wide heads: two halves of the columns",
    params=(
        Param("BLOCK_N", (128, 64), "keys of a tile"),
        Param("LAG", (1, 0), "1: the second half's PV runs next to the softmax of the next tile"),
        Param("CLUSTER", (1, 2, 4), "blocks that share loads of K and V by multicast"),
        Param("HEAD_MEMBERS", (1, 2, 4), "query heads of a cluster; the rest are tiles of queries"),
        Param("ORDER", (0, 1), "block order: 0 by head; 1 by tile, of heads that fit L2"),
        Param(
            "SPLITS", (1, 2, 4, 8), "blocks that share a row's keys; the combine stage joins them"
        ),
        Param("PACK_GQA", (0, 1), "1: a tile has rows of all query heads of a key head"),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    min_arch="sm_90a",
    head_dims=range(264, 513, 8),
    usual_head_dims=(512, 320, 264),
    masks=("full", "causal", "window"),
    layouts=("dense", "padded"),
    empty_rows=True,
    lse="LSE",
)
L2_BYTES = 32 * 2**20  # bytes of K and V that blocks which run at the same time should share
PIECES = 4  # of a tile of V, for each warpgroup
STATE_BYTES = 2048  # factors of rows, then barriers
THREADS, COMBINE_THREADS = 384, 128
PRODUCER_REGISTERS = 24


def fixed_bytes(c: Config, p: Problem) -> int:
    """Bytes of Q, two buffers of P, factors and barriers."""
    return 64 * 128 * hopper.panels(p.head_dim) + 2 * 64 * c.BLOCK_N * 2 + STATE_BYTES


def slots(c: Config, p: Problem, arch: Arch) -> int:
    """Pieces of K and V in flight: as many as fit, and equally many for each block of a cluster."""
    fit = (arch.smem_per_block - fixed_bytes(c, p)) // (128 * c.BLOCK_N)
    return fit // c.CLUSTER * c.CLUSTER


def empty_rows(p: Problem) -> dict[str, int]:
    """hopper.empty_rows; items have any keys, and windows in code for models any size."""
    return {"EMPTY_ROWS": 1} if p.kind in ("window", "padded") else hopper.empty_rows(p)


def in_tiles(c: Config, p: Problem) -> Problem:
    """The problem as tiles are cut of it: with PACK_GQA, the query heads of a key head are one.

    Every tile of such rows may have any query, and takes the keys that some query sees.
    """
    if not c.PACK_GQA:
        return p
    rows = p.heads // p.heads_kv * p.seqlen_q
    return replace(p, heads=p.heads_kv, seqlen_q=rows, mask=FULL)


def tile_members(c: Config) -> int:
    """Neighbouring tiles of queries of a cluster."""
    return c.CLUSTER // c.HEAD_MEMBERS


def clusters_of_heads(c: Config, p: Problem) -> int:
    """Clusters that have a tile of queries of some head."""
    group = in_tiles(c, p).heads // p.heads_kv
    return p.batch * p.heads_kv * ceil_div(group, c.HEAD_MEMBERS)


def tiles_of_queries(c: Config, p: Problem) -> int:
    """Tiles of queries of all heads."""
    return in_tiles(c, p).query_tiles(64)


def clusters_together(c: Config, p: Problem) -> int:
    """Those whose K and V share L2, a divisor of all; without ORDER one."""
    fit = hopper.heads_that_fit(p, L2_BYTES) // c.HEAD_MEMBERS if c.ORDER else 1
    every = clusters_of_heads(c, p)
    return next(n for n in range(max(1, fit), 0, -1) if every % n == 0)


# fmt: off
kernel.keep_if(
    ("known_values", "switches are 0 or 1; a tile has 64 or 128 keys",
     lambda c, p, arch: max(c.LAG, c.ORDER, c.PACK_GQA, c.LSE) < 2 and c.BLOCK_N in (64, 128)),
    ("clusters", "a cluster has 1, 2 or 4 blocks, which its query heads divide",
     lambda c, p, arch: c.CLUSTER in (1, 2, 4) and c.CLUSTER % c.HEAD_MEMBERS == 0),
    ("same_keys", "blocks of a cluster have the same keys, and rows of one query head each",
     lambda c, p, arch: c.CLUSTER == 1 or (c.SPLITS == 1 and c.PACK_GQA == 0)),
    ("split_order", "the splits of a tile come one after the other, head by head",
     lambda c, p, arch: c.SPLITS == 1 or c.ORDER == 0),
    ("ring_fits", "a ring has room for K of a tile, and V of both halves",
     lambda c, p, arch: slots(c, p, arch) >= 2 * PIECES),
)
kernel.keep_if(
    ("head_members", "a key head's query heads divide into those of a cluster",
     lambda c, p, arch: p.heads // p.heads_kv % c.HEAD_MEMBERS == 0),
    ("tile_members", "a cluster has no tile without queries; where keys follow from the query, its "
     "queries are at most as many as the keys of a tile",
     lambda c, p, arch: tile_members(c) == 1 or (p.seqlen_q > (tile_members(c) - 1) * 64
     and (p.mask.kind == "full" or tile_members(c) * 64 <= c.BLOCK_N))),
    ("no_idle_tile", "a tile has under twice the keys that there are",
     lambda c, p, arch: c.BLOCK_N < 2 * max(64, p.seqlen_k)),
    ("packed_heads", "grouped heads are packed where one fills no tile",
     lambda c, p, arch: c.PACK_GQA == int(p.heads > p.heads_kv and p.seqlen_q < 64)),
    ("split_grid", "keys are split where tiles of queries leave SMs idle, into four waves at most",
     lambda c, p, arch: c.SPLITS == 1 or (c.SPLITS > 1 and tiles_of_queries(c, p) < arch.sm_count
     and tiles_of_queries(c, p) * c.SPLITS <= 4 * arch.sm_count
     and c.SPLITS * c.BLOCK_N <= max(64, p.seqlen_k))),
    ("block_order", "the order by tile needs heads that fit L2 together",
     lambda c, p, arch: not c.ORDER or clusters_together(c, p) > 1),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    rows = p.batch * p.heads * p.seqlen_q
    split = {"partial": 4 * c.SPLITS * rows * p.head_dim, "partial_lse": 4 * c.SPLITS * rows}
    return {"lse": 4 * rows if c.LSE else 16} | (split if c.SPLITS > 1 else {})


def keys_map(name: str, p: Problem, rows: int, panels: int) -> TensorMap:
    """Map of k or v, whose boxes have whole panels: all at once, where these are whole rows."""
    heads, whole = p.batch * p.heads_kv, hopper.panels(p.head_dim)
    if p.head_dim % 64:
        return hopper.tensor_map(name, heads, p.seqlen_k, p.head_dim, box=(64, rows))
    row_bytes = 2 * p.head_dim
    dims, strides = (64, p.seqlen_k, whole, heads), (row_bytes, 128, p.seqlen_k * row_bytes)
    return TensorMap(name, dims, strides, (64, rows, panels, 1))


@kernel.stage("fwd", params=("BLOCK_N", "LAG", "HEAD_MEMBERS", "SPLITS", "PACK_GQA", "LSE"))
def fwd(c, p, arch):
    cut, panels = in_tiles(c, p), hopper.panels(p.head_dim)
    heads, rows = p.batch * cut.heads, cut.seqlen_q
    tiles_m = ceil_div(rows, 64 * tile_members(c))
    together, pieces = clusters_together(c, p), c.BLOCK_N // PIECES
    entry = hopper.registers_at_entry(arch, THREADS)
    consumer = hopper.registers_of_roles(entry, 2, PRODUCER_REGISTERS)
    defines = {"CLUSTER": c.CLUSTER, "SLOTS": slots(c, p, arch)}
    defines |= {"PRODUCER_REGISTERS": PRODUCER_REGISTERS, "CONSUMER_REGISTERS": consumer}
    padded = p.kind == "padded"
    if p.kind in ("window", "padded"):
        defines |= {"WINDOW": 1, "PADDED": int(padded)}
    defines |= empty_rows(p)
    return Launch(
        function="flash_fwd_wide_wgmma",
        grid=(together * c.CLUSTER * c.SPLITS, tiles_m, clusters_of_heads(c, p) // together),
        threads=THREADS,
        args=(
            hopper.tensor_map("q", heads, rows, p.head_dim, box=(64, 64)),
            keys_map("k", p, c.BLOCK_N, 1),
            keys_map("v", p, pieces, panels // 2),
            keys_map("v", p, pieces, panels - panels // 2),
            hopper.tensor_map("o", heads, rows, p.head_dim, box=(64, 16)),
            *("lse", *(("partial", "partial_lse") if c.SPLITS > 1 else ("lse", "lse"))),
            *("key_range" if padded else "lse", cut.heads, cut.heads // p.heads_kv),
            *(rows, p.seqlen_q, p.seqlen_k, *p.diagonals, p.scale * LOG2E),
        ),
        smem_bytes=fixed_bytes(c, p) + slots(c, p, arch) * 128 * c.BLOCK_N,
        defines=defines,
    )


@kernel.stage("combine", params=("SPLITS", "LSE"), strided=("seqlen_q", "heads", "o"))
def combine(c, p, arch):
    if c.SPLITS == 1:
        return None
    rows = p.batch * p.heads * p.seqlen_q
    return Launch(
        function="flash_fwd_wide_wgmma_combine",
        grid=(ceil_div(rows * p.head_dim, 4 * COMBINE_THREADS), 1, 1),
        threads=COMBINE_THREADS,
        args=("partial", "partial_lse", "o", "lse", rows),
        defines={"COMBINE_THREADS": COMBINE_THREADS} | empty_rows(p),
    )

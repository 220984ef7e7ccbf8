"""flash_fwd_wgmma: fused forward on Hopper: TMA ring, warp-specialised wgmma, online softmax."""

from dataclasses import replace

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import FULL, LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import SMS, Config, Family, Launch, Param
from attnsweep.family.launch import Arg, TensorMap

kernel = Family(
    "flash_fwd_wgmma",
    summary="fused FlashAttention forward on Hopper: TMA ring, warp-specialised wgmma",
    params=(
        Param("BLOCK_N", (64, 96, 128, 144), "keys of a tile, a multiple of 16"),
        Param("WARPGROUPS", (1, 2, 3, 4), "consumer warpgroups of a block"),
        Param("KEY_GROUPS", (1, 2), "groups of warpgroups that split the keys; merged last"),
        Param("NUM_STAGES", (2, 4), "tiles of K, and of V, in flight"),
        Param("SWIZZLE", (128,), "128 or 64 bytes of a row of a panel of Q, K, V, O", absent=128),
        Param(
            "PRODUCER_WARPS", (4,), "producer warps: 1, or 4, which free registers for consumers"
        ),
        Param("BLOCKS_PER_SM", (1, 2, 3, 4), "blocks that an SM has room for"),
        Param("OVERLAP", (1, 0), "1: softmax runs next to the PV of the tile before"),
        Param("PINGPONG", (0, 1), "1: warpgroups take turns to begin their products"),
        Param("MAXIMA", (1, 2), "row maxima: 1 of all tiles, within 2^8; 2 only if a sum is large"),
        Param("P_SHARED", (0, 1), "P of the second product: 0 in registers, 1 in shared memory"),
        Param("Q_REGISTERS", (0,), "sixteens of Q's columns that stay in registers", absent=0),
        Param("EXP2_POLY", (0,), "exponentials out of 8 by a polynomial on the FMA units"),
        Param("ORDER", (0, 1), "block order: 0 by head; 1 longest first, by heads that fit L2"),
        Param("PERSISTENT", (0, SMS), "SMs whose blocks take turns at tiles; 0: a block per tile"),
        Param("O_OVER_Q", (0,), "1: blocks that take turns stage the output where Q was", absent=0),
        Param("SPLITS", (1, 2), "blocks that share a row's keys; the combine stage joins them"),
        Param("SPLIT_CLUSTER", (0, 1), "1: the splits are a cluster and join in its shared memory"),
        Param("CLUSTER", (1,), "blocks that share loads of K and V by multicast"),
        Param("PDL", (0,), "programmatic launch: next may begin 1 after the loads, 2 at once"),
        Param("PACK_GQA", (0,), "1: a tile has rows of all query heads of a key head", absent=0),
        Param("ITEM_KEYS", (0,), "1: few queries, that see one range of an item's keys", absent=0),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    min_arch="sm_90a",
    head_dims=range(8, 257, 8),
    usual_head_dims=(64, 96, 128, 192, 256, 72),
    head_dims_v=range(8, 257, 8),
    masks=("full", "causal", "window", "boolean"),
    layouts=("dense", "padded", "packed"),
    scores=("softcap", "sinks", "bias"),
    lse="LSE",
    empty_rows=True,
)
COMBINE_THREADS = 128
L2_BYTES = 32 * 2**20  # bytes of K and V that blocks which run at the same time should share
MASKED_L2_BYTES = 8 * 2**20  # the same of a mask's heads: with 32 MB it was up to 5 % slower
ORDER_THREADS = (0, 1024, 256)  # of a mask's list, by hopper.mask_define
ITEM_THREADS = 512  # of the block that reads an item's mask
SCANNED_KEYS = 512  # by a block of the mask stage, of 64 queries
LISTING_BLOCKS = 64  # at most: each counts the tiles of all
# Registers that ptxas 13 needs besides scores, P and accumulators, from compiling the whole space.
REST = {"splits combined": 46, "turns and key groups": 38, "otherwise": 30}
BESIDE_P = ((16, 20), (48, 12), (96, 10), (256, 12))  # if P is in shared memory, by most columns
OF_BITS = 4  # addresses of a thread's rows of a mask: without, 8 bytes were spilled
OF_BIAS = 4  # addresses of a bias: without, 8 bytes were spilled
# Panels of 64 bytes beside a mask in memory, or what changes scores: without, 16 to 32 bytes were
# spilled.
OF_PANELS = 16
AGAIN = 8  # more of them where scores are computed again: with 0 to 7, 8 to 36 bytes were spilled
# More of them where v has other columns, also beside a softcap. With over 192 of q, or of v and
# tiles of over 64 keys, or with fewer of v beside a mask in memory or a bias, 8 to 108 bytes were
# spilled without; with fewer of v and such tiles, 12.
AGAIN_OF_WIDE, AGAIN_OF_NARROW = 32, 12
# For a polynomial beside P in registers, without and with scores computed again: with 2 to 6, and
# with 2 to 10, 8 to 108 bytes were spilled.
OF_POLYNOMIAL = (8, 12)


def empty_rows(c: Config, p: Problem) -> dict[str, int]:
    """hopper.empty_rows; the device alone knows an item's keys, and a bias: there may be none."""
    known_there = c.ITEM_KEYS or p.scores.bias is not None
    return {"EMPTY_ROWS": 1} if known_there else hopper.empty_rows(p)


def columns(p: Problem) -> int:
    """Columns of a tile of Q or K: those of a row, and zeros up to 16, as wgmma takes them."""
    return ceil_div(p.head_dim, 16) * 16


def columns_v(p: Problem) -> int:
    """Columns of a tile of V or O."""
    return ceil_div(p.value_dim, 16) * 16


def block_m(c: Config) -> int:
    """Query rows of a block."""
    return 64 * c.WARPGROUPS // c.KEY_GROUPS


def in_tiles(c: Config, p: Problem) -> Problem:
    """The problem as tiles are cut of it: with PACK_GQA, the query heads of a key head are one.

    The rows of that one are the queries of the first head, then of the second, and so on, as they
    lie in memory. Every tile has a last query, and takes all keys: for tiles there is no mask, but
    with ITEM_KEYS the one that all rows have in common.
    """
    if not c.PACK_GQA:
        return p
    rows, seen = p.heads // p.heads_kv * p.seqlen_q, p.mask if c.ITEM_KEYS else FULL
    return replace(p, heads=p.heads_kv, seqlen_q=rows, mask=seen)


def mask_define(c: Config, p: Problem) -> int:
    """hopper.mask_define; 0 where blocks look up the keys of an item themselves."""
    return 0 if c.ITEM_KEYS else hopper.mask_define(p)


def sees_one_range(p: Problem) -> bool:
    """Whether all queries of an item see the same keys: by lengths, or a mask of one query."""
    if p.kind == "boolean":
        return p.seqlen_q == 1 and not p.mask.of_head
    return p.kind == "padded" and p.mask == FULL and p.seqlen_q <= 64


def tiles_of_queries(c: Config, p: Problem) -> int:
    """Tiles of queries of all heads."""
    return in_tiles(c, p).query_tiles(block_m(c))


def combines(c: Config) -> bool:
    """Whether a second launch joins the splits."""
    return c.SPLITS > 1 and not c.SPLIT_CLUSTER


def most_blocks(c: Config, arch: Arch) -> int:
    """Blocks that the card has room for at once."""
    return arch.sm_count * c.BLOCKS_PER_SM


def merge_bytes(c: Config, p: Problem) -> int:
    """Bytes of accumulators, maxima and sums that key groups hand over."""
    return (c.KEY_GROUPS - 1) * block_m(c) * (2 * 4) * (columns_v(p) // 2 + 4)


def row_bytes(c: Config, head_dim: int) -> int:
    """Bytes that a row of a tile of Q, K, V or O takes in whole panels."""
    return ceil_div(2 * head_dim, c.SWIZZLE) * c.SWIZZLE


def ring_bytes(c: Config, p: Problem) -> int:
    """Bytes of the tiles of K and of V in flight."""
    return c.NUM_STAGES * c.BLOCK_N * sum(row_bytes(c, dim) for dim in p.head_dims)


def smem_bytes(c: Config, p: Problem) -> int:
    """Bytes of Q, the rings, the staging of persistent blocks, P, and what splits exchange."""
    q_bytes, o_bytes = (block_m(c) * row_bytes(c, dim) for dim in p.head_dims)
    staged = 0
    if c.PERSISTENT:
        staged = (not c.O_OVER_Q) * o_bytes + merge_bytes(c, p)
    if c.O_OVER_Q or not c.PERSISTENT:  # the output goes where Q was
        q_bytes = max(q_bytes, o_bytes)
    staged += 64 * c.WARPGROUPS if mask_define(c, p) and p.kind != "window" else 0
    buffers = c.WARPGROUPS * (2 if c.OVERLAP else 1) if c.P_SHARED else 0
    staged += 2 * 16 * (1 + c.WARPGROUPS) if mask_define(c, p) and c.PERSISTENT else 0
    staged += buffers * hopper.panels(c.BLOCK_N) * 64 * 128
    if p.scores.bias is not None:
        staged += c.NUM_STAGES * block_m(c) * hopper.panels(c.BLOCK_N) * 128
    if c.SPLIT_CLUSTER:
        staged += (c.SPLITS - 1) * block_m(c) * (2 * 4) * (columns_v(p) // (2 * c.SPLITS) + 4)
    groups = c.WARPGROUPS // c.KEY_GROUPS
    barriers = 32 * c.NUM_STAGES + 8 + 8 * (1 + c.SPLIT_CLUSTER) * groups
    barriers += 8 * (groups - 1) * c.O_OVER_Q
    return q_bytes + ring_bytes(c, p) + staged + barriers


def registers_given(c: Config, p: Problem, arch: Arch) -> tuple[int, int | None, int]:
    """Registers of a thread at entry, then of a producer's thread, and of a consumer's."""
    threads = 128 * c.WARPGROUPS + 32 * c.PRODUCER_WARPS
    entry = hopper.registers_at_entry(arch, threads, c.BLOCKS_PER_SM)
    # A producer that decodes turns and loads parts of tiles, or waits for parts of Q, needs more.
    more = c.PERSISTENT and (c.CLUSTER > 1 or c.O_OVER_Q)
    producer = None if c.PRODUCER_WARPS == 1 else 32 if more else 24
    if producer and c.PERSISTENT and p.scores.bias is not None:
        producer = 40  # with 24, 64 bytes were spilled, or 80
    return entry, producer, hopper.registers_of_roles(entry, c.WARPGROUPS, producer)


def registers_needed(c: Config, p: Problem) -> int:
    """Registers that a consumer thread needs without spills: scores, P, accumulators, the rest."""
    beside_p = next(count for most, count in BESIDE_P if columns_v(p) <= most)
    of_p = beside_p if c.P_SHARED else c.BLOCK_N // 4
    kind = "turns and key groups" if c.PERSISTENT and c.KEY_GROUPS > 1 else "otherwise"
    rest = REST["splits combined" if combines(c) else kind]
    again = c.OVERLAP > 0 and c.P_SHARED == 0 and c.MAXIMA == 2
    rest += AGAIN * again
    if p.head_dim_v and (again or p.scores.softcap):
        large, narrow = c.BLOCK_N > 64, columns_v(p) < columns(p)
        wide = columns(p) > 192 or (columns_v(p) > 192 and large)
        in_memory = mask_define(c, p) > 0 or p.scores.bias is not None
        if wide or (narrow and in_memory):
            rest += AGAIN_OF_WIDE
        elif narrow and large:
            rest += AGAIN_OF_NARROW
    if c.EXP2_POLY and not c.P_SHARED:
        rest += OF_POLYNOMIAL[again]
    if mask_define(c, p) == 2 and not c.P_SHARED:
        rest += OF_BITS
    rest += OF_BIAS * (p.scores.bias is not None)
    if c.SWIZZLE == 64 and (mask_define(c, p) or p.scores.kinds):
        rest += OF_PANELS
    return c.BLOCK_N // 2 + of_p + columns_v(p) // 2 + 4 * c.Q_REGISTERS + rest


# fmt: off
kernel.keep_if(
    ("known_values", "switches are 0 or 1, MAXIMA 1 or 2, PRODUCER_WARPS 1 or 4, PDL 0 to 2",
     lambda c, p, arch: c.MAXIMA in (1, 2) and c.PRODUCER_WARPS in (1, 4) and c.EXP2_POLY <= 8
     and c.PDL < 3 and max(c.OVERLAP, c.PINGPONG, c.P_SHARED, c.ORDER, c.SPLIT_CLUSTER, c.PACK_GQA,
                           c.LSE, c.O_OVER_Q) < 2),
    # In tiles that fit narrow panels alone, wider heads would spill, and P in shared memory did.
    ("panels", "panels have 128 bytes or, where it saves room, 64: to head_dim 176, P in registers",
     lambda c, p, arch: c.SWIZZLE == 128 or (c.SWIZZLE == 64 and c.P_SHARED == 0
     and max(p.head_dims) <= 176 and any(ceil_div(dim, 32) % 2 for dim in p.head_dims))),
    ("groups", "BLOCK_N is 64 to 256, in 16s; key groups divide the 1 to 4 warpgroups, and stages",
     lambda c, p, arch: c.WARPGROUPS in (1, 2, 3, 4) and c.BLOCK_N in range(64, 257, 16)
     and c.WARPGROUPS % c.KEY_GROUPS == 0 == c.NUM_STAGES % c.KEY_GROUPS),
    ("warpgroups_of_sm", "an SM has 2 to 4 consumer warpgroups, so that their products overlap",
     lambda c, p, arch: 2 <= c.WARPGROUPS * c.BLOCKS_PER_SM <= 4),
    ("some_overlap", "without OVERLAP, an SM has three or more warpgroups",
     lambda c, p, arch: c.OVERLAP > 0 or c.WARPGROUPS * c.BLOCKS_PER_SM >= 3),
    ("turns", "two or more warpgroups take turns, with OVERLAP and one key group",
     lambda c, p, arch: not c.PINGPONG or (c.OVERLAP and c.KEY_GROUPS == 1 < c.WARPGROUPS)),
    ("registers", "scores, P and accumulators fit the registers of a thread, so nothing spills",
     lambda c, p, arch: registers_needed(c, p) <= registers_given(c, p, arch)[2]
     # ptxas refuses a wgmma whose accumulators do not fit the registers at entry (C7602).
     and max(c.BLOCK_N, columns_v(p)) // 2 + 26 <= registers_given(c, p, arch)[0]),
    ("blocks_fit", "the planned blocks fit the shared memory of an SM",
     lambda c, p, arch: smem_bytes(c, p) <= arch.smem_per_block
     and arch.smem_per_sm // (smem_bytes(c, p) + arch.smem_reserved_per_block) >= c.BLOCKS_PER_SM),
    ("merge_fits", "the merge of key groups fits the ring", lambda c, p, arch: c.PERSISTENT > 0
     or merge_bytes(c, p) <= ring_bytes(c, p)),
    ("q_in_registers", "Q has head_dim / 16 sixteens of columns, rounded up",
     lambda c, p, arch: c.Q_REGISTERS <= columns(p) // 16),
    ("p_in_shared_memory", "P is in shared memory up to head_dim 128: wider K and V need the room",
     lambda c, p, arch: c.P_SHARED == 0 or max(p.head_dims) <= 128),
    ("output_over_q", "blocks that take turns, without key groups, stage the output where Q was",
     lambda c, p, arch: c.O_OVER_Q == 0 or (c.PERSISTENT > 0 and c.KEY_GROUPS == 1)),
    ("split_clusters", "a cluster has 2, 4 or 8 splits, which divide the columns in eights",
     lambda c, p, arch: not c.SPLIT_CLUSTER
     or (c.SPLITS in (2, 4, 8) and columns_v(p) % (8 * c.SPLITS) == 0)),
)
kernel.keep_if(
    ("item_keys", "blocks look up the keys of an item where its queries, few, all see the same",
     lambda c, p, arch: c.ITEM_KEYS in (0, 1) and (not c.ITEM_KEYS or (
         sees_one_range(p) and not p.scores.kinds and c.ORDER == c.PERSISTENT == 0
         and c.CLUSTER == 1 and (p.kind != "boolean" or c.BLOCK_N in (64, 96, 128))))),
    ("masks_in_memory", "a mask in memory has whole rows of a head, in words, and its own order",
     lambda c, p, arch: not mask_define(c, p)
     or (c.ORDER == c.PACK_GQA == 0 and c.KEY_GROUPS == c.SPLITS == c.CLUSTER == 1
         and (mask_define(c, p) < 2 or c.BLOCK_N in (64, 96, 128)))),
    ("scores", "a bias has tiles of 64 or 128 keys of one head; a sink counts once, in one split",
     lambda c, p, arch: not p.scores.kinds or (c.PACK_GQA == 0 and (not p.scores.sinks
     or c.SPLITS == 1) and (p.scores.bias is None or (c.BLOCK_N in (64, 128) and c.CLUSTER == 1)))),
    ("softcap", "beside a softcap, wide heads have no registers to compute scores again",
     lambda c, p, arch: not p.scores.softcap or max(p.head_dims) <= 128 or c.MAXIMA == 1),
    ("packed_heads", "grouped heads are packed where one has fewer queries than a block's rows",
     lambda c, p, arch: c.PACK_GQA == 0 or (p.heads > p.heads_kv and p.seqlen_q < block_m(c))),
    ("no_idle_tile", "a tile is under twice its sequence; a ring holds at most it, and 384 keys",
     lambda c, p, arch: block_m(c) < 2 * max(64, in_tiles(c, p).seqlen_q)
     and c.BLOCK_N < 2 * max(64, p.seqlen_k)
     and c.NUM_STAGES <= max(2, min(ceil_div(p.seqlen_k, c.BLOCK_N), 384 // c.BLOCK_N))),
    ("block_order", "longest first needs blocks of different lengths, and turns then need it",
     lambda c, p, arch: (p.kind == "causal" and p.seqlen_q > block_m(c)) in ([True] if c.ORDER else
                                                                   [False, not c.PERSISTENT])),
    ("turns_of_blocks", "blocks that take turns have at least two tiles of queries each",
     lambda c, p, arch: tiles_of_queries(c, p) >= 2 * c.PERSISTENT * c.BLOCKS_PER_SM),
    ("split_keys", "key groups split keys only with at most 640 tiles of queries",
     lambda c, p, arch: c.KEY_GROUPS == 1 or tiles_of_queries(c, p) <= 640),
    ("short_calls", "a programmatic launch is for short calls, under 2e11 FLOPs",
     lambda c, p, arch: c.PDL == 0 or p.flops < 2e11),
    ("split_grid", "the grid splits keys if query tiles leave SMs idle, into at most one wave",
     lambda c, p, arch: c.SPLITS == 1 or (c.SPLITS > 1 and c.ORDER == c.PERSISTENT == 0
     and tiles_of_queries(c, p) < min(arch.sm_count, most_blocks(c, arch) // c.SPLITS + 1)
     and c.SPLITS * c.KEY_GROUPS * c.BLOCK_N <= max(64, p.seqlen_k))),
    ("clusters", "a cluster has 1, 2 or 4 equally long, unsplit blocks, each with queries",
     lambda c, p, arch: c.CLUSTER == 1 or (c.CLUSTER in (2, 4) and not p.causal and c.ORDER == 0
     and c.SPLITS == 1 and c.PERSISTENT % c.CLUSTER == 0 == c.BLOCK_N % (8 * c.CLUSTER)
     and in_tiles(c, p).seqlen_q > (c.CLUSTER - 1) * block_m(c))),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    rows = p.batch * p.heads * p.seqlen_q
    told = 4 if p.scores.bias is None else 8  # bytes of what a split says of a row
    split = {"partial": 4 * c.SPLITS * rows * p.value_dim, "partial_lse": told * c.SPLITS * rows}
    masks, records, tiles = sizes_of_mask(c, p)
    seen = {"bounds": 8 * masks * p.seqlen_q, "records": 16 * masks * records}
    if mask_define(c, p) == 2:
        seen = {"bits": 4 * masks * p.seqlen_q * words_of(p)}
        seen |= {"together": 4 * masks * records * words_together(p)}
    listed = {list_of(c, p): 16 * pitch_of_list(c, p) * tiles, "turns": 8}
    own = {"lse": 4 * rows if c.LSE else 16} | (split if combines(c) else {})
    if c.ITEM_KEYS:
        bits = {"bits": 4 * p.batch * words_of(p)} if p.kind == "boolean" else {}
        return own | {"item_keys": 16 * p.batch} | bits
    return own | (seen | listed if mask_define(c, p) else {})


def list_of(c: Config, p: Problem) -> str:
    """The name of the list of a mask's tiles of queries, which differs with the size of tiles."""
    of_bits = mask_define(c, p) == 2
    return f"work_{block_m(c)}_{c.BLOCK_N}" if of_bits else f"work_{block_m(c)}"


def pitch_of_list(c: Config, p: Problem) -> int:
    """Sixteens of bytes of an entry of that list: by bits it tells its tiles of keys too."""
    of_tiles = (words_of(p) // 4 + 1) // 2 if mask_define(c, p) == 2 else 0
    return 1 + c.WARPGROUPS + of_tiles


def words_together(p: Problem) -> int:
    """Words of what 64 queries see together: two bits for each 16 keys."""
    return 2 * ceil_div(p.seqlen_k, 512)


def words_of(p: Problem) -> int:
    """Words of a row's bits: of all keys that a tile of up to 128 may have, in 16 bytes."""
    return 4 * (ceil_div(p.seqlen_k, 128) + 1)


def heads_of_mask(p: Problem) -> int:
    """Heads, one behind the other in the batch, that have a mask in common."""
    of_item = p.mask.of_item or p.kind == "padded"
    return 1 if p.mask.of_head else p.heads if of_item else p.batch * p.heads


def cuts(p: Problem) -> int:
    """Where packed sequences begin or end, and tiles of queries therefore too.

    Sequences that are mostly shorter than 64 queries would leave most rows of such tiles idle.
    """
    sequences = p.layout.sequences
    return sequences + 1 if 0 < 64 * sequences <= p.seqlen_q else 0


def packed_define(p: Problem) -> dict[str, int]:
    """What stages define of a problem whose tiles of queries may be cut so: they need MASK too."""
    return {"MASK": 1, "PACKED": 1} if p.kind == "packed" else {}


def item_keys_stage(p: Problem) -> Launch:
    """The launch that says what the queries of each item see, for ITEM_KEYS."""
    boolean = p.kind == "boolean"
    # The strides of the mask come last: a package has those of a call.
    strides = (p.seqlen_k * p.mask.of_item if boolean else 0, 0, p.seqlen_k, 1)
    return Launch(
        function="flash_fwd_wgmma_mask",
        grid=(p.batch, 1, 1),
        threads=ITEM_THREADS,
        args=(
            *(("mask", "bits") if boolean else ("key_range", "item_keys")),
            *("item_keys", p.seqlen_k, words_of(p), *strides),
        ),
        smem_bytes=ITEM_THREADS // 32 * 8,
        defines={"ITEM_KEYS": 1, "BITS": int(boolean), "MASK_THREADS": ITEM_THREADS}
        | {"HEAD_DIM": 64},
        once=True,
    )


def sizes_of_mask(c: Config, p: Problem) -> tuple[int, int, int]:
    """Masks of a problem, records of 64 queries of one, and tiles of queries of all masks."""
    masks = p.batch * p.heads // heads_of_mask(p)
    records, tiles = (ceil_div(p.seqlen_q, rows) + cuts(p) for rows in (64, 64 * c.WARPGROUPS))
    return masks, records, masks * tiles


@kernel.stage("mask", params=(), constants=())
def mask(c, p, arch):
    if c.ITEM_KEYS:
        return item_keys_stage(p)
    how = mask_define(c, p)
    if not how:
        return None
    masks, records, _ = sizes_of_mask(c, p)
    threads = 64 if how == 1 else 256
    low, high = p.diagonals
    seen = "bits" if how == 2 else "bounds"
    written = ("together", "bits", "together") if how == 2 else ("bounds", "bounds", "records")
    blocks = (
        (ceil_div(p.seqlen_k, SCANNED_KEYS), records, masks) if how == 2 else (records, masks, 1)
    )
    # The kernel does not read a pointer to what the problem does not have.
    given = [
        name if name in p.inputs else seen
        for name in ("mask", "key_range", "cu_seqlens_q", "cu_seqlens_k")
    ]
    ranges = {"padded": 1, "packed": 2}.get(p.kind, 0)
    # Last come the masks of an item, and the strides of the mask: a package has those of a call.
    heads, of_head = p.heads if p.mask.of_head else 1, p.seqlen_q * p.seqlen_k
    strides = (heads, heads * of_head * p.mask.of_item, of_head, p.seqlen_k, 1)
    return Launch(
        function="flash_fwd_wgmma_mask",
        grid=blocks,
        threads=threads,
        args=(
            *(*given, *written, p.seqlen_q, p.seqlen_k, low, high),
            words_of(p) if how == 2 else cuts(p),
            *(p.layout.sequences, *strides),
        ),
        smem_bytes=64 * 8 if how == 1 else threads // 32 * 8,
        defines={"MASK": how, "MASK_THREADS": threads, "RANGES": ranges, "HEAD_DIM": 64}
        | packed_define(p),
        once=True,
    )


@kernel.stage("order", params=(), constants=())
def order(c, p, arch):
    how = mask_define(c, p)
    if not how:
        return None
    masks, records, tiles = sizes_of_mask(c, p)
    of_64 = ("together", "bits", words_of(p), c.BLOCK_N, p.seqlen_q)
    if how == 1:
        begins = "cu_seqlens_q" if p.kind == "packed" else "records"
        of_64 = ("records", begins, cuts(p), p.seqlen_q, tiles // masks)
    threads = ORDER_THREADS[how]
    blocks = min(LISTING_BLOCKS, ceil_div(tiles, threads // 32)) if how == 2 else 1
    return Launch(
        function="flash_fwd_wgmma_order",
        grid=(blocks, 1, 1),
        threads=threads,
        args=(*of_64, list_of(c, p), "turns", masks, records, p.seqlen_k),
        smem_bytes=4 * (2 * threads + threads // 32),
        defines={
            "ROW_GROUPS": c.WARPGROUPS,
            "ORDER_THREADS": threads,
            "HEAD_DIM": 64,
        }
        | ({"MASK": how} if how == 2 else packed_define(p)),
        programmatic=True,
        once=True,
    )


def scores_of(p: Problem, unused: TensorMap) -> tuple[Arg, ...]:
    """The arguments that change scores; `unused` and `lse` stand for what the problem has not."""
    bias, rows, own = unused, 1, p.scores.bias or ()
    if p.scores.bias is not None:
        items, heads, rows, pitch = p.shape_of("bias")
        dims, strides = (p.seqlen_k, rows, heads, items), (2 * pitch, 2 * pitch * rows)
        box = (64, 64 if rows > 1 else 1, 1, 1)  # one row is one for all
        bias = TensorMap("bias", dims, (*strides, heads * strides[1]), box)
    sinks = "sinks" if p.scores.sinks else "lse"
    apart = (int("item" in own), int("head" in own), int(rows > 1))
    return bias, float(p.scores.softcap), sinks, p.heads, *apart


# The launch defines CLUSTER, because the splits of a tile can be a cluster too.
OF_FWD = tuple(p.name for p in kernel.params if p.name != "CLUSTER")


@kernel.stage("fwd", params=OF_FWD, strided=("heads", "o"))
def fwd(c, p, arch):
    cut = in_tiles(c, p)
    heads, heads_kv = p.batch * cut.heads, p.batch * p.heads_kv
    tiles_m = ceil_div(cut.seqlen_q, c.CLUSTER * block_m(c)) * c.CLUSTER
    turns = c.PERSISTENT * c.BLOCKS_PER_SM
    together = hopper.heads_sharing_l2(cut, block_m(c), c.BLOCK_N, turns, L2_BYTES)
    grid = (tiles_m, heads, c.SPLITS)
    if c.PERSISTENT:
        grid = (min(turns, tiles_m * heads), 1, 1)
    elif c.ORDER:
        grid = (together, tiles_m, heads // together)
    elif c.SPLIT_CLUSTER:
        grid = (tiles_m * c.SPLITS, heads, 1)
    listed: tuple[str | int, ...] = ()
    if how := mask_define(c, p):
        masks, _, tiles = sizes_of_mask(c, p)
        of_mask = heads_of_mask(p)
        together = hopper.heads_of_section(p, of_mask, masks, MASKED_L2_BYTES)
        seen = "bounds" if how == 1 else "bits"
        listed = (list_of(c, p), seen, seen, "turns", tiles, of_mask, words_of(p))
        if c.PERSISTENT:
            grid = (min(turns, tiles * of_mask), 1, 1)
        else:
            grid = (together, tiles, of_mask // together)
    if c.ITEM_KEYS:
        boolean = p.kind == "boolean"
        listed = ("item_keys", "bits" if boolean else "item_keys", cut.heads, words_of(p))
    # Splits do not write by TMA: they write partial results, or, in a cluster, columns of o. Nor
    # does the last tile of a packed sequence.
    own = ("lse", "o" if c.SPLIT_CLUSTER or p.kind == "packed" else "lse")
    outputs = ("partial_lse", "partial") if combines(c) else own
    # The template's CLUSTER is the number of blocks in a cluster, for multicast or for splits.
    defines = {"CLUSTER": c.SPLITS if c.SPLIT_CLUSTER else c.CLUSTER, "MULTICAST": c.CLUSTER}
    _, producer, consumer = registers_given(c, p, arch)
    if producer:
        defines |= {"PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer}
    defines |= {"MASK": how, "EMPTY_ROWS": 1} if how else empty_rows(c, p)
    defines |= {"BITS": int(p.kind == "boolean")} if c.ITEM_KEYS else {}
    defines |= packed_define(p) | ({"PADDED": 1} if p.kind in ("padded", "boolean") else {})
    defines |= {kind.upper(): 1 for kind in p.scores.kinds} | hopper.value_columns(p)
    panel = c.SWIZZLE // 2
    box = (panel, c.BLOCK_N // c.CLUSTER)
    of_q = hopper.tensor_map("q", heads, cut.seqlen_q, p.head_dim, box=(panel, 64))
    return Launch(
        function="flash_fwd_wgmma",
        grid=grid,
        threads=128 * c.WARPGROUPS + 32 * c.PRODUCER_WARPS,
        args=(
            of_q,
            hopper.tensor_map("k", heads_kv, p.seqlen_k, p.head_dim, box=box),
            hopper.tensor_map("v", heads_kv, p.seqlen_k, p.value_dim, box=box),
            hopper.tensor_map("o", heads, cut.seqlen_q, p.value_dim, box=(panel, 16)),
            *(*outputs, heads, p.heads // p.heads_kv, together),
            *(p.seqlen_q, p.seqlen_k, p.scale * LOG2E),
            *listed,
            *(scores_of(p, of_q) if p.scores.kinds else ()),
        ),
        smem_bytes=smem_bytes(c, p),
        defines=defines,
        min_blocks_per_sm=c.BLOCKS_PER_SM,
        programmatic=c.PDL > 0,
    )


@kernel.stage("combine", params=("SPLITS", "PDL", "LSE"), strided=("seqlen_q", "heads", "o"))
def combine(c, p, arch):
    if not combines(c):
        return None  # every block had all keys, or a cluster has joined the splits
    rows = p.batch * p.heads * p.seqlen_q
    return Launch(
        function="flash_fwd_wgmma_combine",
        grid=(ceil_div(rows * p.value_dim, 4 * COMBINE_THREADS), 1, 1),
        threads=COMBINE_THREADS,
        args=("partial", "partial_lse", "o", "lse", rows),
        defines={"COMBINE_THREADS": COMBINE_THREADS}
        | empty_rows(c, p)
        | hopper.value_columns(p)
        | ({"BIAS": 1} if p.scores.bias is not None else {}),
        programmatic=c.PDL > 0,
    )

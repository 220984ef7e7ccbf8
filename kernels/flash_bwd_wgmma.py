"""flash_bwd_wgmma: fused backward on Hopper: TMA rings, warp-specialised wgmma, dQ reduced."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import CAUSAL, LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.family.launch import Arg

kernel = Family(
    "flash_bwd_wgmma",
    summary="fused FlashAttention backward on Hopper: TMA rings, warp-specialised wgmma",
    params=(
        Param("RECOMPUTE", (0, 1), "dQ: 0 added up beside dK and dV; 1 by a stage of its own"),
        Param("BLOCK_M", (64, 128), "queries of a tile that keys pass"),
        Param("KV_WARPGROUPS", (2, 1), "consumer warpgroups of a block, 64 keys each"),
        Param("DKV_WARPGROUPS", (1, 2), "warpgroups that have dK and dV of 64 keys", absent=1),
        Param("NUM_STAGES", (2, 3), "tiles of Q, and of dO, in flight"),
        Param("AHEAD", (0, 1, 2, 3), "begun early: 0 nothing, 1 dP and S, 2 dV and P, 3 dV"),
        Param(
            "STATISTICS",
            (0, 1, 2),
            "in the sums from the first: 0 none, 1 dP's delta, 2 also S's log-sum-exp",
            absent=0,
        ),
        Param("BLOCKS_PER_SM", (1, 2), "blocks of keys that an SM has room for"),
        Param("CLUSTER", (1, 2), "blocks of keys that share loads of Q and dO", absent=1),
        Param(
            "DQ_ADD",
            (0, 1),
            "dQ's tiles are added 0 from shared memory, 1 from registers",
            absent=0,
        ),
        Param(
            "DQ_RING",
            (0, 3, 2, 4),
            "dQ's sums are of: 0 all heads; else so many waves, which blocks clear and convert",
            absent=0,
        ),
        Param("Q_BLOCK_N", (128, 96, 80, 64), "RECOMPUTE: keys of a tile that queries pass"),
        Param("Q_WARPGROUPS", (2,), "RECOMPUTE: consumer warpgroups, 64 queries each"),
        Param("Q_STAGES", (2, 1), "RECOMPUTE: tiles of K, and of V, in flight; 1: three of both"),
        Param("PDL", (0, 1), "1: a launch may begin before the one ahead of it ends"),
    ),
    min_arch="sm_90a",
    head_dims=range(8, 257, 8),
    usual_head_dims=(64, 128, 96, 256, 192, 40, 72),
    masks=("full", "causal", "window"),
    layouts=("dense", "padded"),
    deterministic="RECOMPUTE",
    empty_rows=True,
    ops=("backward",),
)
DELTA_THREADS = 256
PRODUCER = 24  # registers of its threads
SMS = 132  # of the largest card, for which workspaces are: a wave of more would not fit the sums
# Registers that ptxas 13 needs beside sums, scores and P, by BLOCK_M. Up to 108 bytes of what stays
# the same in the loop over tiles are spilled before it.
REST = {64: 24, 128: 40}


def columns(p: Problem) -> int:
    """Columns of a tile: those of a row, and zeros up to 16, of which wgmma takes as many."""
    return ceil_div(p.head_dim, 16) * 16


def row_bytes(p: Problem) -> int:
    """Bytes of a row of a tile, which lies in panels."""
    return 128 * hopper.panels(p.head_dim)


def part_columns(p: Problem) -> int:
    """Columns of dQ that one product makes: all, or a panel of them."""
    return max(32, columns(p)) if columns(p) <= 96 else 64


def smem_bytes(c: Config, p: Problem) -> int:
    """Bytes of K, V, the rings of Q and dO with their statistics, dS, and what is added to dQ."""
    keys, queries = 64 * c.KV_WARPGROUPS, c.BLOCK_M
    tiles = 2 * row_bytes(p) * (keys + c.NUM_STAGES * queries) + 2 * c.NUM_STAGES * 4 * queries
    staged = 0 if c.RECOMPUTE or c.DQ_ADD else parts(c, p)
    reduced = 0 if c.RECOMPUTE else 2 * c.KV_WARPGROUPS * 128 * queries
    reduced += staged * 64 * part_columns(p) * 4
    apart = 2 * (128 * queries + 16) if c.DKV_WARPGROUPS > 1 else 0
    ring = (64 * 128 + 3 * 64 * 32 * 4 + 32) * (c.DQ_RING > 0)
    return tiles + reduced + apart + ring + 32 * c.NUM_STAGES + 48 + 16 * staged


def parts(c: Config, p: Problem) -> int:
    """Parts of a tile of dQ: of 64 queries, the columns of one product."""
    return c.BLOCK_M // 64 * ceil_div(columns(p), part_columns(p))


def queries_smem_bytes(c: Config, p: Problem) -> int:
    """The same of the stage queries: Q, dO, and the rings of K and V."""
    tiles = 3 if c.Q_STAGES == 1 else 2 * c.Q_STAGES
    rows = 2 * 64 * c.Q_WARPGROUPS + tiles * c.Q_BLOCK_N
    return row_bytes(p) * rows + 16 * tiles + 8 * c.Q_WARPGROUPS


def consumer_registers(arch: Arch, warpgroups: int, blocks: int, others: tuple[int, ...]) -> int:
    """Registers of a consumer's thread, beside one warpgroup of each of `others` registers."""
    count = warpgroups + len(others)
    entry = hopper.registers_at_entry(arch, 128 * count, blocks)
    return min(240, (count * entry - sum(others)) // warpgroups // 8 * 8)


def roles(c: Config, p: Problem) -> tuple[int, ...]:
    """Registers of the warpgroups beside the consumers: the producer's, and dQ's."""
    if c.RECOMPUTE:
        return (PRODUCER,)
    more = 8 * (c.DQ_RING > 0)  # of the producer's, whose last warp converts; dQ's do with less
    return PRODUCER + more, (72 if part_columns(p) <= 64 else 88) - more


def registers_needed(c: Config, p: Problem) -> int:
    """Registers that a consumer thread of the stage keys needs."""
    if c.DKV_WARPGROUPS > 1:
        return columns(p) // 2 + c.BLOCK_M * 3 // 4 + REST[c.BLOCK_M]
    scores = c.BLOCK_M if c.AHEAD in (1, 2) else c.BLOCK_M * 3 // 4
    # What sums begin with is loaded beside all that is there.
    if c.AHEAD == 1 and c.STATISTICS:
        scores += c.BLOCK_M // 2
    if c.AHEAD in (0, 3) and c.STATISTICS > 1:
        scores += 16
    return columns(p) + scores + REST[c.BLOCK_M]


def consumers(c: Config) -> int:
    """Consumer warpgroups of the stage keys."""
    return c.KV_WARPGROUPS * c.DKV_WARPGROUPS


def pitch(p: Problem) -> int:
    """Rows of a head in workspaces: whole tiles of either stage."""
    return ceil_div(p.seqlen_q, 128) * 128


def together(rows: int, of_sm: int, sms: int, heads: int) -> int:
    """Heads whose blocks run at the same time, so that they share L2. of_sm: rows of an SM."""
    return min(heads, max(1, sms * of_sm // rows))


def of_keys(c: Config, p: Problem, sms: int = SMS) -> int:
    """Heads of keys whose blocks run at the same time."""
    rows_of_sm = 64 * c.KV_WARPGROUPS * c.BLOCKS_PER_SM
    return together(p.seqlen_k, rows_of_sm, min(sms, SMS), p.batch * p.heads_kv)


def lag(c: Config, p: Problem, sms: int) -> int:
    """Heads of keys between that of a block and the one that it converts: all, if none is left.

    The last blocks of a wave under a causal mask are short, and begin the next one early: a block
    that converts a head of the wave ahead waits for its longest blocks, one of four waves does not.
    """
    return min(p.batch * p.heads_kv, (2 if c.DQ_RING > 3 else 1) * of_keys(c, p, sms))


def lead(c: Config, p: Problem, sms: int) -> int:
    """Heads of keys between that of a block and the one whose delta it makes: all, if none.

    Short blocks have no time for it: (8,16,2048,128) causal took 752 µs with it, and 722 without;
    (8,16,2048,128) full 1,112 and 1,136, (4,16,4096,128) causal 1,162 and 1,185.
    """
    passed = p.seqlen_q // (2 if p.mask == CAUSAL else 1)
    has_time = passed >= 2048 and p.kind in ("full", "causal")
    return of_keys(c, p, sms) if has_time else p.batch * p.heads_kv


def ring(c: Config, p: Problem) -> int:
    """Heads of keys whose queries have sums of dQ at the same time."""
    heads = p.batch * p.heads_kv
    return min(heads, c.DQ_RING * of_keys(c, p)) if c.DQ_RING else heads


# fmt: off
kernel.keep_if(
    ("known_values", "RECOMPUTE and PDL are 0 or 1, AHEAD 0 to 3; a tile has 64 or 128 queries",
     lambda c, p, arch: c.RECOMPUTE in (0, 1) and c.PDL in (0, 1) and c.AHEAD in range(4)
     and c.BLOCK_M in (64, 128) and c.KV_WARPGROUPS in (1, 2, 3)
     and c.STATISTICS in (0, 1, 2)),
    ("warpgroups_of_sm", "an SM has 2 or 3 consumer warpgroups, so that their products overlap",
     lambda c, p, arch: 2 <= consumers(c) * c.BLOCKS_PER_SM <= 3),
    ("wide_heads", "dK and dV may be apart in heads wider than 128, with 64 keys, AHEAD 0 or 1; "
     "dQ is added from registers, stages are three, and blocks share loads, only there",
     lambda c, p, arch: (p.head_dim > 128 and c.KV_WARPGROUPS == 1 and c.AHEAD < 2
                         and c.CLUSTER in (1, 2))
     if c.DKV_WARPGROUPS == 2
     else (c.DKV_WARPGROUPS, c.DQ_ADD, c.NUM_STAGES, c.CLUSTER) == (1, 0, 2, 1)),
    ("parts_of_dq", "a warp of the producer's adds each part of dQ's tile, at most 3",
     lambda c, p, arch: c.DQ_ADD == 0 if c.RECOMPUTE
     else c.DQ_ADD or parts(c, p) + (c.DQ_RING > 0) <= 3),
    ("waves_of_sums", "sums of dQ are of 2 or 3 waves of heads, under a causal mask 3 or 4, and "
     "there are heads for blocks to convert",
     lambda c, p, arch: c.DQ_RING == 0
     or (c.DQ_RING in ((3, 4) if p.mask == CAUSAL else (2, 3)) and not c.RECOMPUTE
         and lag(c, p, arch.sm_count) < p.batch * p.heads_kv)),
    ("registers", "sums, scores and P fit the registers of a thread",
     lambda c, p, arch: registers_needed(c, p)
     <= consumer_registers(arch, consumers(c), c.BLOCKS_PER_SM, roles(c, p))),
    ("blocks_fit", "the planned blocks fit the shared memory of an SM",
     lambda c, p, arch: smem_bytes(c, p) <= arch.smem_per_block
     and arch.smem_per_sm // (smem_bytes(c, p) + arch.smem_reserved_per_block) >= c.BLOCKS_PER_SM
     and (not c.RECOMPUTE or queries_smem_bytes(c, p) <= arch.smem_per_block)),
    ("of_queries", "the stage queries has whole tiles of those of the stage keys, if it is there",
     lambda c, p, arch: (c.Q_WARPGROUPS == 2 and c.Q_BLOCK_N in (64, 80, 96, 128)
                         and (p.head_dim > 128 or c.Q_BLOCK_N != 80)
                         and columns(p) // 2 + c.Q_BLOCK_N + REST[64] <= 240
                         and c.Q_STAGES == (2 if p.head_dim <= 192 else 1)) if c.RECOMPUTE
     else (c.Q_BLOCK_N, c.Q_WARPGROUPS, c.Q_STAGES) == (128, 2, 2)),
)
kernel.keep_if(
    ("no_idle_tile", "a tile is at most twice its sequence",
     lambda c, p, arch: c.BLOCK_M <= 2 * max(64, p.seqlen_q)
     and 64 * c.KV_WARPGROUPS * c.CLUSTER <= 2 * max(64, p.seqlen_k)),
    by_shape=True,
)
# fmt: on


@kernel.workspace
def workspace(c, p):
    rows = p.batch * p.heads * pitch(p)
    of_ring = ring(c, p) * (p.heads // p.heads_kv) * pitch(p)
    sums = {} if c.RECOMPUTE else {"dq_sums": 4 * of_ring * p.head_dim}
    sums |= {"turns": 12 * p.batch * p.heads_kv} if c.DQ_RING else {}
    return {"neg_lse": 4 * rows, "delta": 4 * rows} | sums


@kernel.stage("delta", params=("PDL", "DQ_RING"), strided=("heads", "o", "do"))
def delta(c, p, arch):
    if c.RECOMPUTE:
        return None
    threads = 2  # of a row: a power of two
    while threads * 8 < p.head_dim:
        threads *= 2
    heads, group, ring_args = p.batch * p.heads, p.heads // p.heads_kv, ()
    if c.DQ_RING:  # what blocks of keys do not do themselves
        heads = max(ring(c, p), lead(c, p, arch.sm_count)) * group
        ring_args = (
            "turns",
            3 * p.batch * p.heads_kv,
            lead(c, p, arch.sm_count) * group,
            ring(c, p) * group,
        )
    return Launch(
        function="flash_bwd_wgmma_delta",
        grid=(pitch(p) * threads // DELTA_THREADS, heads, 1),
        threads=DELTA_THREADS,
        defines={"ROW_THREADS": threads},
        args=(
            *("o", "do", "lse", "neg_lse", "delta", "dq_sums", p.seqlen_q, pitch(p)),
            1 / p.scale if c.STATISTICS > 1 else LOG2E,
            *ring_args,
        ),
    )


def maps(p: Problem, rows_q: int, rows_k: int):
    """Tensor maps of q, k, v and do, whose boxes have so many rows."""
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    of_q = (heads, p.seqlen_q, p.head_dim), (64, rows_q)
    of_k = (heads_kv, p.seqlen_k, p.head_dim), (64, rows_k)
    made = {"q": of_q, "k": of_k, "v": of_k, "do": of_q}
    return tuple(hopper.tensor_map(name, *sizes, box=box) for name, (sizes, box) in made.items())


def seen(p: Problem, heads: int) -> tuple[Arg, ...]:
    """What a launch says of a window, and of padding, whose code does every mask.

    A causal mask follows from the lengths. heads: of an item, as many as the stage has.
    """
    ranges = ("key_range", heads) if p.kind == "padded" else ()
    return (*p.diagonals, *ranges) if p.kind in ("window", "padded") else ()


def hides(p: Problem) -> dict[str, int]:
    """The defines of a launch with diagonals, and with ranges of keys."""
    return {"window": {"WINDOW": 1}, "padded": {"WINDOW": 1, "PADDED": 1}}.get(p.kind, {})


OF_QUERIES = ("RECOMPUTE", "Q_BLOCK_N", "Q_WARPGROUPS", "Q_STAGES", "PDL", "STATISTICS")


@kernel.stage("queries", params=OF_QUERIES, strided=("heads", "o", "do"))
def queries(c, p, arch):
    if not c.RECOMPUTE:
        return None
    heads, block = p.batch * p.heads, 64 * c.Q_WARPGROUPS
    return Launch(
        function="flash_bwd_wgmma_queries",
        grid=(ceil_div(p.seqlen_q, block) * heads, 1, 1),
        threads=128 * (c.Q_WARPGROUPS + 1),
        args=(
            *maps(p, 64, c.Q_BLOCK_N),
            hopper.tensor_map("dq", heads, p.seqlen_q, p.head_dim, box=(64, 64)),
            *("o", "do", "lse", "neg_lse", "delta", p.seqlen_q, p.seqlen_k, pitch(p), heads),
            *(p.heads // p.heads_kv, together(p.seqlen_q, block, arch.sm_count, heads)),
            *(p.scale * LOG2E, p.scale, *seen(p, p.heads)),
        ),
        smem_bytes=queries_smem_bytes(c, p),
        defines={
            "PRODUCER_REGISTERS": PRODUCER,
            "CONSUMER_REGISTERS": consumer_registers(arch, c.Q_WARPGROUPS, 1, (PRODUCER,)),
        }
        | hides(p),
    )


OF_KEYS = ("RECOMPUTE", "BLOCK_M", "KV_WARPGROUPS", "DKV_WARPGROUPS", "NUM_STAGES", "AHEAD")
OF_KEYS += ("BLOCKS_PER_SM", "DQ_ADD", "DQ_RING", "PDL", "STATISTICS")


@kernel.stage("keys", params=OF_KEYS, strided=("heads_kv",))
def keys(c, p, arch):
    heads_kv, block = p.batch * p.heads_kv, 64 * c.KV_WARPGROUPS
    clusters = ceil_div(p.seqlen_k, block * c.CLUSTER) * heads_kv
    # Blocks of the last keys of a causal mask are short: those before them convert.
    shares = clusters // heads_kv * c.CLUSTER
    shares = ceil_div(shares, 2) if p.mask == CAUSAL else shares
    others = [
        hopper.tensor_map(name, p.batch * p.heads, p.seqlen_q, p.head_dim, box=(64, 64))
        for name in ("dq", "o", "do")
    ]
    behind, before = lag(c, p, arch.sm_count), lead(c, p, arch.sm_count)
    ring_args = ("lse", "turns", ring(c, p), behind, before, shares)
    registers = consumer_registers(arch, consumers(c), c.BLOCKS_PER_SM, roles(c, p))
    defines = {"PRODUCER_REGISTERS": roles(c, p)[0], "CONSUMER_REGISTERS": registers}
    defines |= {"DQ_REGISTERS": roles(c, p)[-1], "PART_COLUMNS": part_columns(p)}
    defines |= {"CLUSTER": c.CLUSTER} | hides(p)
    return Launch(
        function="flash_bwd_wgmma_keys",
        grid=(clusters * c.CLUSTER, 1, 1),
        threads=128 * (consumers(c) + len(roles(c, p))),
        args=(
            *maps(p, c.BLOCK_M // c.CLUSTER, block),
            *(
                hopper.tensor_map(name, heads_kv, p.seqlen_k, p.head_dim, box=(64, 64))
                for name in ("dk", "dv")
            ),
            *(others if c.DQ_RING else ()),
            # The sums of dQ are not read where it is computed again.
            *("neg_lse", "delta", "delta" if c.RECOMPUTE else "dq_sums"),
            *(p.seqlen_q, p.seqlen_k, pitch(p), heads_kv, p.heads // p.heads_kv),
            *(
                of_keys(c, p, arch.sm_count),
                p.scale * LOG2E,
                p.scale,
                *(ring_args if c.DQ_RING else ()),
                *seen(p, p.heads_kv),
            ),
        ),
        smem_bytes=smem_bytes(c, p),
        defines=defines,
        min_blocks_per_sm=c.BLOCKS_PER_SM,
        programmatic=c.PDL > 0,
    )


@kernel.stage("convert", params=("PDL", "DQ_RING"), strided=("heads", "dq"))
def convert(c, p, arch):
    if c.RECOMPUTE:
        return None
    heads, group, last = p.batch * p.heads, p.heads // p.heads_kv, ()
    if c.DQ_RING:
        first = heads - lag(c, p, arch.sm_count) * group
        heads, last = heads - first, (first, ring(c, p) * group)
    return Launch(
        function="flash_bwd_wgmma_convert",
        grid=(ceil_div(p.seqlen_q, 64), heads, 1),
        threads=128,
        args=("dq_sums", "dq", p.seqlen_q, pitch(p), p.scale, *last),
        smem_bytes=64 * 4 * (p.head_dim // 2 + 4),
        programmatic=c.PDL > 0,
    )

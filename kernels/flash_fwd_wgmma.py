"""flash_fwd_wgmma: fused forward on Hopper: TMA ring, warp-specialised wgmma, online softmax."""

import functools

from attnsweep.family.declare import Config, Kernel, Launch, Param, TensorMap
from attnsweep.hardware import Arch
from attnsweep.problem import Problem

kernel = Kernel(
    "flash_fwd_wgmma",
    summary="fused FlashAttention forward on Hopper: TMA ring, warp-specialised wgmma",
    params=(
        Param("BLOCK_N", (64, 96, 128, 144), "keys of a tile, a multiple of 16"),
        Param("WARPGROUPS", (1, 2, 3, 4), "consumer warpgroups of a block"),
        Param("KEY_GROUPS", (1, 2), "groups of warpgroups that split the keys; merged last"),
        Param("NUM_STAGES", (2, 4), "tiles of K, and of V, in flight"),
        Param("PRODUCER_WARPS", (4,), "1, or 4: then the consumers get its registers"),
        Param("BLOCKS_PER_SM", (1, 2, 3, 4), "blocks that an SM has room for"),
        Param("OVERLAP", (1, 0), "1: softmax runs beside the PV of the tile before"),
        Param("PINGPONG", (0, 1), "warpgroups take turns to begin their products"),
        Param("MAXIMA", (1, 2), "row maxima: 1 of all tiles, kept within 2^8; 2 if a sum is large"),
        Param("P_SHARED", (0, 1), "P of the second product: 0 in registers, 1 in shared memory"),
        Param("EXP2_POLY", (0,), "of 8 exponentials, those by a polynomial on the FMA units"),
        Param("ORDER", (0, 1), "of blocks: 0 by head; 1 longest first, by heads that fit L2"),
        Param("PERSISTENT", (0, 132), "SMs whose blocks take turns at tiles; 0: a block a tile"),
        Param("SPLITS", (1, 2), "blocks that share a row's keys; the combine stage joins them"),
        Param("SPLIT_CLUSTER", (0, 1), "1: the splits are a cluster and join in its shared memory"),
        Param("CLUSTER", (1,), "blocks that load K and V for each other, by multicast"),
        Param("PDL", (0,), "programmatic launch: the next may begin 1 after the loads, 2 at once"),
        Param("LSE", (0,), "1: the log-sum-exp of every row goes to the workspace `lse`"),
    ),
    min_arch="sm_90a",
    head_dims=(64, 96, 128, 192, 256),
)
LOG2E = 1.4426950408889634
COMBINE_THREADS = 128
L2_BYTES = 32 * 2**20  # of K and V, that blocks which run at the same time should share


def block_m(c: Config) -> int:
    """Query rows of a block."""
    return 64 * c.WARPGROUPS // c.KEY_GROUPS


def threads(c: Config) -> int:
    return 128 * c.WARPGROUPS + 32 * c.PRODUCER_WARPS


def panels(columns: int) -> int:
    """Panels of 64 columns."""
    return -(-columns // 64)


def smem_bytes(c: Config, head_dim: int) -> int:
    """Q, the rings of K and V, what blocks that take turns stage beside them, barriers."""
    q_bytes = block_m(c) * panels(head_dim) * 128
    ring = 2 * c.NUM_STAGES * c.BLOCK_N * panels(head_dim) * 128
    staged = q_bytes + merge_bytes(c, head_dim) if c.PERSISTENT else 0
    buffers = c.WARPGROUPS * (2 if c.OVERLAP else 1) if c.P_SHARED else 0
    staged += buffers * panels(c.BLOCK_N) * 64 * 128 + join_bytes(c, head_dim)
    barriers = 32 * c.NUM_STAGES + 8 + 8 * (1 + c.SPLIT_CLUSTER) * (c.WARPGROUPS // c.KEY_GROUPS)
    return q_bytes + ring + staged + barriers


def merge_bytes(c: Config, head_dim: int) -> int:
    """Accumulators, maxima and sums that key groups hand over."""
    return (c.KEY_GROUPS - 1) * block_m(c) * (2 * 4) * (head_dim // 2 + 4)


def join_bytes(c: Config, head_dim: int) -> int:
    """What a block of a cluster of splits gets of the others: its columns, maxima and sums."""
    if not c.SPLIT_CLUSTER:
        return 0
    return (c.SPLITS - 1) * block_m(c) * (2 * 4) * (head_dim // (2 * c.SPLITS) + 4)


def registers_at_entry(c: Config, arch: Arch) -> int:
    """Registers of every thread when BLOCKS_PER_SM blocks are launched on an SM."""
    warps = -(-threads(c) * c.BLOCKS_PER_SM // 128)  # of the fullest quarter of the SM
    return min(255, arch.registers_per_sm // 4 // (32 * warps) // 8 * 8)


def producer_registers(c: Config) -> int:
    """Registers of a producer thread; with turns to decode and parts to load it needs more."""
    return 32 if c.PERSISTENT and c.CLUSTER > 1 else 24


def consumer_registers(c: Config, arch: Arch) -> int:
    """Registers of a consumer thread, after the producer's warps have given theirs away."""
    entry = registers_at_entry(c, arch)
    if c.PRODUCER_WARPS == 1:
        return entry
    spare = entry // 8 * 8 - producer_registers(c)
    return min(240, (entry + spare // c.WARPGROUPS) // 8 * 8)


def registers_needed(c: Config, head_dim: int) -> int:
    """Registers of a consumer thread that do not spill: scores, P, accumulators, and the rest."""
    scores = c.BLOCK_N // 2
    in_flight = 10 if head_dim < 128 else 12  # of P on its way to shared memory
    p = in_flight if c.P_SHARED else c.BLOCK_N // 4
    # What ptxas 13 takes on top, compiled over the whole space.
    combined = c.SPLITS > 1 and not c.SPLIT_CLUSTER
    rest = 46 if combined else 38 if c.PERSISTENT and c.KEY_GROUPS > 1 else 30
    return scores + p + head_dim // 2 + rest


def heads_together(c: Config, p: Problem) -> int:
    """Heads whose longest tiles come first, then their next: their K and V are shared in L2."""
    heads, group = p.batch * p.heads, p.heads // p.heads_kv
    fit = min(heads, max(1, L2_BYTES * group // (4 * p.seqlen_k * p.head_dim)))
    if c.PERSISTENT:
        return even_turns(heads, fit, tile_costs(c, p), c.PERSISTENT * c.BLOCKS_PER_SM)
    return max(n for n in range(1, fit + 1) if heads % n == 0)


def tile_costs(c: Config, p: Problem) -> tuple[int, ...]:
    """What each tile of queries of a head costs, the last and longest first, in half tiles of keys.

    Beside its tiles of keys a tile of queries costs as much as one and a half of them.
    """
    rows = range(-(-p.seqlen_q // block_m(c)) * block_m(c), 0, -block_m(c))
    keys = [p.seqlen_k - max(0, p.seqlen_q - row) if p.causal else p.seqlen_k for row in rows]
    return tuple(2 * -(-max(0, seen) // c.BLOCK_N) + 3 for seen in keys)


@functools.lru_cache(maxsize=4096)
def even_turns(heads: int, fit: int, costs: tuple[int, ...], blocks: int) -> int:
    """Of fit / 2 to fit heads together, the count with which the busiest block has least to do.

    Blocks take turns from the first on, and back: that is even over two turns of one group of
    heads, but not over two that have the end of one group and the beginning of the next. For
    (16,16,1024,128) causal the busiest of 132 blocks has 19 % too much with 64 heads together, and
    1 % with 33.
    """

    def most(together: int) -> int:
        groups = (min(together, heads - first) for first in range(0, heads, together))
        load = [0] * blocks
        for item, cost in enumerate(cost for n in groups for cost in costs for _ in range(n)):
            turn, block = divmod(item, blocks)
            load[blocks - 1 - block if turn % 2 else block] += cost
        return max(load)

    if len(set(costs)) == 1:
        return fit
    return min(range(fit, (fit - 1) // 2, -1), key=most)


def row_tiles(c: Config, p: Problem) -> int:
    """Tiles of queries, of all heads."""
    return p.batch * p.heads * -(-p.seqlen_q // block_m(c))


@kernel.rule("switches are 0 or 1, MAXIMA and PRODUCER_WARPS what they say, PDL 0 to 2")
def known_values(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    switches = (c.OVERLAP, c.PINGPONG, c.P_SHARED, c.ORDER, c.SPLIT_CLUSTER, c.LSE)
    known = c.MAXIMA in (1, 2) and c.PRODUCER_WARPS in (1, 4) and c.PDL <= 2 and c.EXP2_POLY <= 8
    return known and max(switches) <= 1


@kernel.rule("warpgroups are 1 to 4, key groups divide them, and a ring stage is one key group's")
def groups(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return (
        c.WARPGROUPS in (1, 2, 3, 4)
        and c.WARPGROUPS % c.KEY_GROUPS == 0
        and c.NUM_STAGES % c.KEY_GROUPS == 0
        and c.BLOCK_N in range(64, 257, 16)
        and c.PRODUCER_WARPS in (1, 4)
    )


@kernel.rule("an SM has two to four consumer warpgroups, of which one multiplies beside another")
def warpgroups_of_sm(config: Config, problem: Problem, arch: Arch) -> bool:
    return 2 <= config.WARPGROUPS * config.BLOCKS_PER_SM <= 4


@kernel.rule("without overlap of tiles, three or more warpgroups have to overlap each other")
def some_overlap(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return c.OVERLAP > 0 or c.WARPGROUPS * c.BLOCKS_PER_SM >= 3


@kernel.rule("turns are taken by warpgroups that overlap tiles and have as many each")
def turns(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return c.PINGPONG == 0 or (c.OVERLAP > 0 and c.KEY_GROUPS == 1 and c.WARPGROUPS > 1)


@kernel.rule("scores, P and accumulators fit the registers of a thread, so that nothing spills")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    c, head_dim = config, problem.head_dim
    # ptxas refuses a wgmma whose accumulators do not fit the registers at entry (C7602).
    entry = registers_at_entry(c, arch)
    return (
        registers_needed(c, head_dim) <= consumer_registers(c, arch)
        and max(c.BLOCK_N, head_dim) // 2 + 26 <= entry
    )


@kernel.rule("the planned blocks fit the shared memory of an SM")
def blocks_fit(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    smem = smem_bytes(c, problem.head_dim)
    fit = arch.smem_per_sm // (smem + arch.smem_reserved_per_block)
    return smem <= arch.smem_per_block and fit >= c.BLOCKS_PER_SM


@kernel.rule("key groups merge over the ring")
def merge_fits(config: Config, problem: Problem, arch: Arch) -> bool:
    c, head_dim = config, problem.head_dim
    ring = 2 * c.NUM_STAGES * c.BLOCK_N * panels(head_dim) * 128
    return c.PERSISTENT > 0 or merge_bytes(c, head_dim) <= ring


@kernel.rule("a tile is not twice as long as its sequence; the ring holds at most it, and 384 keys")
def no_idle_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    c, p = config, problem
    return (
        block_m(c) < 2 * max(64, p.seqlen_q)
        and c.BLOCK_N < 2 * max(64, p.seqlen_k)
        and c.NUM_STAGES <= max(2, min(-(-p.seqlen_k // c.BLOCK_N), 384 // c.BLOCK_N))
    )


@kernel.rule("P in registers that overlaps tiles lies over scores which are not needed again")
def p_over_scores(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return c.OVERLAP == 0 or c.P_SHARED == 1 or c.MAXIMA == 1


@kernel.rule("P in shared memory is for head_dim up to 128; wider, K and V need the room")
def p_in_shared_memory(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.P_SHARED == 0 or problem.head_dim <= 128


@kernel.rule(
    "longest first needs blocks that differ in length; if they take turns, they then do it"
)
def block_order(config: Config, problem: Problem, arch: Arch) -> bool:
    differ = problem.causal and problem.seqlen_q > block_m(config)
    return differ if config.ORDER else not (differ and config.PERSISTENT)


@kernel.rule("blocks that take turns have two tiles of queries or more")
def turns_of_blocks(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return row_tiles(c, problem) >= 2 * c.PERSISTENT * c.BLOCKS_PER_SM


@kernel.rule("key groups split keys where tiles of queries are few, at most 640")
def split_keys(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.KEY_GROUPS == 1 or row_tiles(config, problem) <= 640


@kernel.rule("a programmatic launch pays for short calls, under 2e11 FLOPs")
def short_calls(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.PDL == 0 or problem.flops < 2e11


@kernel.rule("keys are split over the grid where tiles of queries leave SMs idle, into one wave")
def split_grid(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return c.SPLITS == 1 or (
        c.SPLITS > 1
        and c.ORDER == c.PERSISTENT == 0
        and row_tiles(c, problem) < 132
        and row_tiles(c, problem) * c.SPLITS <= 132 * c.BLOCKS_PER_SM
        and c.SPLITS * c.KEY_GROUPS * c.BLOCK_N <= max(64, problem.seqlen_k)
    )


@kernel.rule("splits that are a cluster are 2, 4 or 8, and share the columns by eights")
def split_clusters(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return c.SPLIT_CLUSTER == 0 or (
        c.SPLITS in (2, 4, 8) and problem.head_dim % (8 * c.SPLITS) == 0
    )


@kernel.rule("a cluster has 1, 2 or 4 blocks of one length, which are not split and not alone")
def clusters(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return c.CLUSTER == 1 or (
        c.CLUSTER in (2, 4)
        and not problem.causal
        and c.ORDER == 0
        and c.SPLITS == 1
        and c.PERSISTENT % c.CLUSTER == 0
        and c.BLOCK_N % (8 * c.CLUSTER) == 0
        and problem.seqlen_q > (c.CLUSTER - 1) * block_m(c)
    )


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    c, p = config, problem
    rows = p.batch * p.heads * p.seqlen_q
    out = {"lse": 4 * rows if c.LSE else 16}
    if c.SPLITS > 1 and not c.SPLIT_CLUSTER:
        out |= {"partial": 4 * c.SPLITS * rows * p.head_dim, "partial_lse": 4 * c.SPLITS * rows}
    return out


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    c, p = config, problem
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    tiles_m = -(-p.seqlen_q // (c.CLUSTER * block_m(c))) * c.CLUSTER
    together = heads_together(c, p)

    def tensor_map(buffer: str, count: int, rows: int, box: int) -> TensorMap:
        return TensorMap(
            buffer,
            dims=(p.head_dim, rows, count),
            strides=(p.head_dim * 2, rows * p.head_dim * 2),
            box=(64, box, 1),
        )

    if c.PERSISTENT:
        grid = (min(c.PERSISTENT * c.BLOCKS_PER_SM, tiles_m * heads), 1, 1)
    elif c.ORDER:
        grid = (together, tiles_m, heads // together)
    elif c.SPLIT_CLUSTER:
        grid = (tiles_m * c.SPLITS, heads, 1)
    else:
        grid = (tiles_m, heads, c.SPLITS)
    outputs = ("partial_lse", "partial") if c.SPLITS > 1 else ("lse", "lse")
    if c.SPLIT_CLUSTER:
        outputs = ("lse", "o")
    # The stage's CLUSTER is how many blocks a cluster has, whatever it is for.
    defines = {"CLUSTER": c.SPLITS if c.SPLIT_CLUSTER else c.CLUSTER, "MULTICAST": c.CLUSTER}
    if c.PRODUCER_WARPS == 4:
        defines |= {"PRODUCER_REGISTERS": producer_registers(c)}
        defines |= {"CONSUMER_REGISTERS": consumer_registers(c, arch)}
    return Launch(
        function="flash_fwd_wgmma",
        grid=grid,
        threads=threads(c),
        args=(
            tensor_map("q", heads, p.seqlen_q, 64),
            tensor_map("k", heads_kv, p.seqlen_k, c.BLOCK_N // c.CLUSTER),
            tensor_map("v", heads_kv, p.seqlen_k, c.BLOCK_N // c.CLUSTER),
            tensor_map("o", heads, p.seqlen_q, 16),
            *outputs,
            *(heads, p.heads // p.heads_kv, together),
            *(p.seqlen_q, p.seqlen_k, p.scale * LOG2E),
        ),
        smem_bytes=smem_bytes(c, p.head_dim),
        defines=defines,
        min_blocks_per_sm=c.BLOCKS_PER_SM,
        programmatic=c.PDL > 0,
    )


@kernel.stage("combine", params=("SPLITS", "PDL", "LSE"))
def combine(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    c, p = config, problem
    if c.SPLITS == 1 or c.SPLIT_CLUSTER:
        return None  # every block had all keys, or they have joined
    rows = p.batch * p.heads * p.seqlen_q
    return Launch(
        function="flash_fwd_wgmma_combine",
        grid=(-(-rows * p.head_dim // (4 * COMBINE_THREADS)), 1, 1),
        threads=COMBINE_THREADS,
        args=("partial", "partial_lse", "o", "lse", rows),
        defines={"COMBINE_THREADS": COMBINE_THREADS},
        programmatic=c.PDL > 0,
    )

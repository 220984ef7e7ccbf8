"""three_kernel_wgmma: QKᵀ, softmax and PV as three launches on Hopper: TMA, mbarriers and wgmma."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import DTYPE_BYTES, LOG2E, Problem, ceil_div
from attnsweep.family import hopper
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "three_kernel_wgmma",
    summary="QK^T, softmax, PV: three launches or two, TMA and wgmma; softmax apart or fused",
    params=(
        Param(
            "STATS",
            (0, 1, 2, 3),
            "softmax: 0 own launch; 1 mostly in qk; 2 in pv; 3 in qk and pv only",
        ),
        Param("PDL", (0, 1), "programmatic dependent launch: 1 of softmax and pv, 2 of qk too"),
        Param("PDL_EARLY", (0,), "the next launch may begin: 0 near a block's end, 1 at once"),
        Param("CARVEOUT", (0,), "1: every launch asks for the largest shared memory of an SM"),
        Param("QK_BLOCK_M", (64, 128, 256), "queries per tile of scores"),
        Param("QK_BLOCK_N", (128,), "keys per tile of scores"),
        Param("QK_BLOCK_K", (64,), "head_dim columns per pipeline stage"),
        Param("QK_WARPGROUPS", (1, 2, 4), "consumer warpgroups, each with 64 rows at a time"),
        Param("QK_SPLIT_Q", (0,), "1: a warpgroup begins when its own rows of Q arrive"),
        Param("QK_STAGES", (2,), "tiles of K in flight"),
        Param("QK_TILES", (4, 8), "tiles of keys that a block computes in sequence"),
        Param("QK_BUFFERS", (1, 2), "tiles of scores being stored: 1 or 2"),
        Param("QK_AHEAD", (0,), "1: one tile's products overlap the other's epilogue"),
        Param(
            "QK_STORE", (0,), "store scores: 0 by warp and TMA, 1 by warpgroup and TMA, 2 directly"
        ),
        Param("QK_EVICT_LAST", (0,), "1: hint L2 to keep the scores"),
        Param("QK_CLUSTER", (1,), "blocks along the queries that share their loads of K"),
        Param("QK_TURNS", (0,), "1: halves of the warpgroups take turns at the epilogue"),
        Param("QK_ORDER", (0,), "fastest over the grid: 0 keys, 1 queries"),
        Param("QK_BLOCKS", (0,), "blocks of the grid, which then take turns; 0: one per work item"),
        Param("SOFTMAX_THREADS", (16, 32), "threads per row"),
        Param("SOFTMAX_VECTOR", (8,), "elements per load: 1, 2, 4 or 8"),
        Param("SOFTMAX_PASSES", (1,), "1: the row stays in registers; 3: maximum, sum, normalise"),
        Param("SOFTMAX_ROWS", (1,), "rows per thread group, in sequence"),
        Param("SOFTMAX_BLOCK", (256,), "threads per block"),
        Param("SOFTMAX_DEPTH", (0,), "groups of rows that a warp has in flight by TMA; 0: no TMA"),
        Param("SOFTMAX_GROUP", (1,), "rows per group of SOFTMAX_DEPTH"),
        Param("SOFTMAX_ONCE", (0,), "1: loads are not kept in L1"),
        Param("SOFTMAX_EVICT_LAST", (0,), "1: hint L2 to keep the probabilities"),
        Param("SOFTMAX_ORDER", (0,), "1: process the rows that qk wrote last first"),
        Param("PV_BLOCK_M", (64, 128), "queries per tile of the output"),
        Param("PV_BLOCK_N", (64, 128), "head_dim columns per tile of the output"),
        Param("PV_BLOCK_K", (64,), "keys per pipeline stage"),
        Param("PV_WARPGROUPS", (1, 2), "consumer warpgroups, each with 64 rows at a time"),
        Param("PV_STAGES", (6,), "tiles of P and V in flight"),
        Param("PV_CLUSTER", (1,), "blocks along the queries that share their loads of V"),
        Param("PV_EVICT_FIRST", (1, 0), "1: hint L2 that P is not read again"),
        Param("PV_ORDER", (0,), "fastest over the grid: 0 queries, 1 heads; 2: as 0, from the end"),
        Param("PV_BLOCKS", (0,), "blocks of the grid, which then take turns; 0: one per work item"),
    ),
    min_arch="sm_90a",
    rounds_scores=1,
)
UNIT = 128  # keys that share one maximum, as in the template


def max_keys(config: Config, problem: Problem) -> int:
    """Keys that a row's registers hold: a power of two, so that cubins are shared."""
    return max(
        config.SOFTMAX_THREADS * config.SOFTMAX_VECTOR, 1 << (problem.seqlen_k - 1).bit_length()
    )


def stride(problem: Problem) -> int:
    """Elements from one row of scores to the next, rounded up to whole 16-byte chunks."""
    return ceil_div(problem.seqlen_k, 8) * 8


def qk_registers(c: Config, p: Problem) -> int:
    """Registers that the qk stage needs without spills: accumulators, addresses, statistics."""
    accumulators = (1 + c.QK_AHEAD) * c.QK_BLOCK_M * c.QK_BLOCK_N // (128 * c.QK_WARPGROUPS)
    registers = accumulators + (40 if c.STATS == 2 else 32) + (16 if c.QK_BLOCKS else 0)
    direct = c.QK_STORE == 2  # addresses, and data on its way from shared memory to global
    registers += 16 * direct
    if c.QK_CLUSTER > 1:
        many = accumulators > 64 and (c.QK_STORE == 1 or c.QK_CLUSTER > 2)
        simple = c.STATS == 0 and not p.causal and c.QK_STORE == 0
        simple = simple and c.QK_BLOCK_M == 64 * c.QK_WARPGROUPS and accumulators <= 64
        registers += 0 if simple or c.QK_TURNS else 8
        registers += 8 * c.QK_EVICT_LAST + 16 * (direct or many)
    if p.head_dim > max(64, c.QK_BLOCK_K):  # several unrolled steps: ptxas keeps more addresses
        registers += (8 if accumulators < 128 else 24) + (32 if c.STATS else 16 * c.QK_AHEAD)
    elif p.head_dim > c.QK_BLOCK_K:
        registers += 8 + 8 * c.QK_SPLIT_Q
    return registers


def pv_registers(c: Config) -> int:
    """Registers that the pv stage needs without spills: accumulators, twice if scaled, and P."""
    accumulators = c.PV_BLOCK_M * c.PV_BLOCK_N // (128 * c.PV_WARPGROUPS)
    if c.STATS == 2:
        return accumulators + c.PV_BLOCK_K // 2 + 56
    if c.STATS == 0:
        return accumulators + 48
    return accumulators * 2 + (32 if accumulators <= 32 else 40 if c.STATS == 1 else 48)


def softmax_registers(c: Config, p: Problem) -> int:
    """Registers that the softmax stage needs without spills: a row, and the next one as loaded."""
    halves = 2 if c.SOFTMAX_ROWS == 1 else 3 if c.SOFTMAX_VECTOR > 1 else 6
    return 40 + max_keys(c, p) // c.SOFTMAX_THREADS * halves // 2


@kernel.rule("tiles are of 64, 128 or 256; a warpgroup computes 64 or 128 whole rows")
def rows_fit_warpgroups(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return (
        all(c[n] in (64, 128, 256) for n in ("QK_BLOCK_N", "PV_BLOCK_N"))
        and all(c[n] in (32, 64, 128) for n in ("QK_BLOCK_K", "PV_BLOCK_K"))
        and c.QK_BLOCK_M in (64 * c.QK_WARPGROUPS, 128 * c.QK_WARPGROUPS)
        and c.PV_BLOCK_M in (64 * c.PV_WARPGROUPS, 128 * c.PV_WARPGROUPS)
        and c.QK_BLOCK_M <= 256
        and c.QK_TILES % (1 + c.QK_AHEAD) == 0
        and (c.QK_SPLIT_Q == 0 or c.QK_WARPGROUPS > 1)
        and (c.QK_TURNS == 0 or (c.STATS > 0 and c.QK_WARPGROUPS % 2 == 0))
        and c.PV_BLOCK_M <= 256
        and c.QK_CLUSTER in (1, 2, 4)
        and c.PV_CLUSTER in (1, 2, 4)
    )


def most_registers(arch: Arch, warpgroups: int) -> int:
    """Most registers of a thread in a block of these consumer warpgroups and one warp."""
    return min(240, hopper.registers_at_entry(arch, 128 * warpgroups + 32))


@kernel.rule("accumulators leave registers for the other code")
def accumulators_fit_registers(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return qk_registers(c, problem) <= most_registers(arch, c.QK_WARPGROUPS) and pv_registers(
        c
    ) <= most_registers(arch, c.PV_WARPGROUPS)


@kernel.rule("QK_BLOCK_K and PV_BLOCK_N divide head_dim")
def tiles_divide_head_dim(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.head_dim % config.QK_BLOCK_K == 0 == problem.head_dim % config.PV_BLOCK_N


@kernel.rule("statistics are of 128 keys in tiles of qk; STATS 2 has 64 rows a warpgroup in pv")
def statistics_fit_tiles(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    if c.STATS == 2 and c.PV_BLOCK_M != 64 * c.PV_WARPGROUPS:
        return False  # P takes the registers that a second 64 rows would need
    return c.STATS == 0 or c.QK_BLOCK_N % UNIT == 0


@kernel.rule(
    "STATS replaces the row softmax, so it stays 32 threads, vector 8, 1 pass, 1 row, no hints"
)
def one_softmax_if_fused(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    row = (c.SOFTMAX_THREADS, c.SOFTMAX_VECTOR, c.SOFTMAX_PASSES, c.SOFTMAX_ROWS)
    others = c.SOFTMAX_DEPTH + c.SOFTMAX_ONCE + c.SOFTMAX_EVICT_LAST + c.SOFTMAX_ORDER
    return c.STATS == 0 or (row == (32, 8, 1, 1) and others == 0)


@kernel.rule("softmax by TMA: 32 threads, vector 8, 1 pass, whole groups, more than are in flight")
def softmax_groups_are_used(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    if c.SOFTMAX_DEPTH == 0:
        return c.SOFTMAX_GROUP == 1
    row = (c.SOFTMAX_THREADS, c.SOFTMAX_VECTOR, c.SOFTMAX_PASSES, c.SOFTMAX_ONCE)
    return (
        row == (32, 8, 1, 0)
        and c.SOFTMAX_DEPTH >= 2
        and c.SOFTMAX_GROUP <= 256
        and c.SOFTMAX_ROWS % c.SOFTMAX_GROUP == 0
        and c.SOFTMAX_ROWS >= c.SOFTMAX_GROUP * c.SOFTMAX_DEPTH
    )


@kernel.rule("only useful numbers of stages, buffers and early launches; grids of whole clusters")
def stages_are_used(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    steps = problem.head_dim // c.QK_BLOCK_K * c.QK_TILES
    once = c.QK_BLOCKS == 0
    return (
        (1 if steps == c.QK_TILES and not c.QK_AHEAD else 2)
        <= c.QK_STAGES
        <= max(2, steps if once else 8)
        and c.PV_STAGES >= 2
        and 1 <= c.QK_BUFFERS <= min(2, c.QK_TILES if once else 2)
        and (c.QK_STORE < 2 or c.QK_BUFFERS == 1)
        and (c.PDL > 0 or c.PDL_EARLY == 0)
        and c.QK_BLOCKS % c.QK_CLUSTER == c.PV_BLOCKS % c.PV_CLUSTER == 0
    )


@kernel.rule("a row kept in registers takes at most 64 of each thread's")
def row_fits_registers(config: Config, problem: Problem, arch: Arch) -> bool:
    keys_per_thread = max_keys(config, problem) // config.SOFTMAX_THREADS
    return (
        config.STATS > 0
        or config.SOFTMAX_PASSES == 3
        or (
            keys_per_thread <= 64
            and config.SOFTMAX_BLOCK
            * max(softmax_registers(config, problem), keys_per_thread * 3 // 2 + 40)
            <= 65536
        )
    )


@kernel.rule("softmax blocks hold whole rows, and a row's threads all have keys")
def softmax_threads_are_used(config: Config, problem: Problem, arch: Arch) -> bool:
    threads = config.SOFTMAX_THREADS
    has_keys = threads <= 32 or threads * config.SOFTMAX_VECTOR < 2 * problem.seqlen_k
    return config.STATS > 0 or (config.SOFTMAX_BLOCK % max(threads, 32) == 0 and has_keys)


@kernel.rule("tiles, with their clusters, are shorter than twice the sequence")
def tiles_fit_sequence(config: Config, problem: Problem, arch: Arch) -> bool:
    c, p = config, problem
    queries = max(c.QK_BLOCK_M * c.QK_CLUSTER, c.PV_BLOCK_M * c.PV_CLUSTER)
    return queries < 2 * max(p.seqlen_q, 64) and max(
        c.QK_TILES * c.QK_BLOCK_N, c.PV_BLOCK_K
    ) < 2 * max(p.seqlen_k, 64)


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    p = problem
    rows = p.batch * p.heads * p.seqlen_q
    statistics = 4 * rows * ceil_div(p.seqlen_k, UNIT)  # allocated for any STATS, to share buffers
    return {
        "scores": rows * stride(p) * DTYPE_BYTES[p.dtype],
        "maxima": statistics,
        "sums": statistics,
    }


@kernel.stage(
    "qk",
    params=(
        *(
            "STATS",
            "PDL",
            "CARVEOUT",
            "QK_BLOCK_M",
            "QK_BLOCK_N",
            "QK_BLOCK_K",
            "QK_WARPGROUPS",
            "QK_STAGES",
        ),
        *("PDL_EARLY", "QK_TILES", "QK_BUFFERS", "QK_AHEAD", "QK_STORE", "QK_EVICT_LAST"),
        *("QK_CLUSTER", "QK_SPLIT_Q", "QK_TURNS", "QK_ORDER", "QK_BLOCKS"),
    ),
)
def qk(config: Config, problem: Problem, arch: Arch) -> Launch:
    c, p = config, problem
    threads = 128 * c.QK_WARPGROUPS + 32
    inputs = 2 * (c.QK_BLOCK_M * p.head_dim + c.QK_STAGES * c.QK_BLOCK_N * c.QK_BLOCK_K)
    outputs = 2 * c.QK_BUFFERS * c.QK_BLOCK_M * c.QK_BLOCK_N
    if c.QK_STORE == 2:  # a warp stores 64 columns at a time
        outputs = 4 * c.QK_WARPGROUPS * 16 * 128
    parts = c.QK_WARPGROUPS if c.QK_SPLIT_Q else 1
    smem_bytes = inputs + outputs + 16 * (c.QK_STAGES + parts)
    blocks = arch.planned_blocks(threads, qk_registers(c, p), smem_bytes)
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    runs = ceil_div(p.seqlen_k, c.QK_TILES * c.QK_BLOCK_N)
    items = ceil_div(p.seqlen_q, c.QK_BLOCK_M * c.QK_CLUSTER) * c.QK_CLUSTER * runs * heads
    panel = min(c.QK_BLOCK_K, 64)
    return Launch(
        function="three_kernel_wgmma_qk",
        grid=(min(items, c.QK_BLOCKS or items), 1, 1),
        threads=threads,
        args=(
            hopper.tensor_map(
                "q", heads, p.seqlen_q, p.head_dim, box=(panel, c.QK_BLOCK_M // parts)
            ),
            hopper.tensor_map(
                *("k", heads_kv, p.seqlen_k, p.head_dim),
                box=(panel, c.QK_BLOCK_N // c.QK_CLUSTER),
            ),
            hopper.tensor_map(
                *("scores", heads, p.seqlen_q, stride(p)),
                box=(64, 64 if c.QK_STORE == 1 else 16),
            ),
            *("scores", "maxima", "sums", heads, p.heads, p.heads_kv),
            *(p.seqlen_q, p.seqlen_k, stride(p), p.scale * LOG2E),
        ),
        smem_bytes=smem_bytes,
        defines={"MIN_BLOCKS": blocks, "CLUSTER": c.QK_CLUSTER},
        min_blocks_per_sm=blocks,
        programmatic=c.PDL > 1,
        carveout=100 if c.CARVEOUT else -1,
    )


@kernel.stage(
    "softmax",
    params=(
        *(
            "STATS",
            "PDL",
            "CARVEOUT",
            "PDL_EARLY",
            "SOFTMAX_THREADS",
            "SOFTMAX_VECTOR",
            "SOFTMAX_PASSES",
        ),
        *(
            "SOFTMAX_ROWS",
            "SOFTMAX_BLOCK",
            "SOFTMAX_DEPTH",
            "SOFTMAX_GROUP",
            "SOFTMAX_ONCE",
            "SOFTMAX_EVICT_LAST",
            "SOFTMAX_ORDER",
        ),
    ),
    constants=("IS_BF16", "CAUSAL"),
)
def softmax(config: Config, problem: Problem, arch: Arch) -> Launch | None:
    c, p = config, problem
    if c.STATS == 3:
        return None
    rows = p.batch * p.heads * p.seqlen_q
    if c.STATS:
        return Launch(
            function="three_kernel_wgmma_softmax",
            grid=(ceil_div(rows, c.SOFTMAX_BLOCK), 1, 1),
            threads=c.SOFTMAX_BLOCK,
            args=("maxima", "sums", rows, p.seqlen_q, p.seqlen_k),
            defines={"MIN_BLOCKS": 1},
            programmatic=bool(c.PDL),
            carveout=100 if c.CARVEOUT else -1,
        )
    keys = max_keys(c, p) if c.SOFTMAX_PASSES == 1 else 0
    if c.SOFTMAX_DEPTH:
        heads, warps = p.batch * p.heads, c.SOFTMAX_BLOCK // 32
        groups = ceil_div(p.seqlen_q, c.SOFTMAX_GROUP) * heads
        smem_bytes = warps * c.SOFTMAX_DEPTH * (2 * keys * c.SOFTMAX_GROUP + 8)
        registers = 40 + keys // 32 * min(2, c.SOFTMAX_GROUP)
        blocks = arch.planned_blocks(c.SOFTMAX_BLOCK, registers, smem_bytes)
        return Launch(
            function="three_kernel_wgmma_softmax",
            grid=(ceil_div(groups, warps * (c.SOFTMAX_ROWS // c.SOFTMAX_GROUP)), 1, 1),
            threads=c.SOFTMAX_BLOCK,
            args=(
                hopper.tensor_map(
                    *("scores", heads, p.seqlen_q, stride(p)),
                    box=(256, c.SOFTMAX_GROUP),
                    swizzle_bytes=0,
                ),
                *(heads, p.seqlen_q, p.seqlen_k, stride(p)),
            ),
            smem_bytes=smem_bytes,
            defines={"MIN_BLOCKS": blocks, "MAX_KEYS": keys},
            min_blocks_per_sm=blocks,
            programmatic=bool(c.PDL),
            carveout=100 if c.CARVEOUT else -1,
        )
    registers = softmax_registers(c, p) if keys else 40
    smem_bytes = 2 * 4 * (c.SOFTMAX_BLOCK // 32) if c.SOFTMAX_THREADS > 32 else 0
    blocks = arch.planned_blocks(c.SOFTMAX_BLOCK, registers, smem_bytes)
    return Launch(
        function="three_kernel_wgmma_softmax",
        grid=(ceil_div(rows * c.SOFTMAX_THREADS, c.SOFTMAX_BLOCK * c.SOFTMAX_ROWS), 1, 1),
        threads=c.SOFTMAX_BLOCK,
        args=("scores", rows, p.seqlen_q, p.seqlen_k, stride(p)),
        smem_bytes=smem_bytes,
        defines={"MIN_BLOCKS": blocks, "MAX_KEYS": keys},
        min_blocks_per_sm=blocks,
        programmatic=bool(c.PDL),
        carveout=100 if c.CARVEOUT else -1,
    )


@kernel.stage(
    "pv",
    params=(
        *(
            "STATS",
            "PDL",
            "CARVEOUT",
            "PV_BLOCK_M",
            "PV_BLOCK_N",
            "PV_BLOCK_K",
            "PV_WARPGROUPS",
            "PV_STAGES",
        ),
        *("PV_CLUSTER", "PV_EVICT_FIRST", "PV_ORDER", "PV_BLOCKS"),
    ),
)
def pv(config: Config, problem: Problem, arch: Arch) -> Launch:
    c, p = config, problem
    threads = 128 * c.PV_WARPGROUPS + 32
    inputs = 2 * c.PV_STAGES * (c.PV_BLOCK_M + c.PV_BLOCK_N) * c.PV_BLOCK_K
    smem_bytes = inputs + 2 * c.PV_BLOCK_M * c.PV_BLOCK_N + 16 * c.PV_STAGES
    blocks = arch.planned_blocks(threads, pv_registers(c), smem_bytes)
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    rows = c.PV_BLOCK_M * c.PV_CLUSTER
    items = ceil_div(p.seqlen_q, rows) * c.PV_CLUSTER * (p.head_dim // c.PV_BLOCK_N) * heads
    panel = min(c.PV_BLOCK_K, 64)
    return Launch(
        function="three_kernel_wgmma_pv",
        grid=(min(items, c.PV_BLOCKS or items), 1, 1),
        threads=threads,
        args=(
            hopper.tensor_map(
                *("scores", heads, p.seqlen_q, p.seqlen_k),
                box=(panel, c.PV_BLOCK_M),
                pitch=stride(p),
            ),
            hopper.tensor_map(
                *("v", heads_kv, p.seqlen_k, p.head_dim),
                box=(64, c.PV_BLOCK_K // c.PV_CLUSTER),
            ),
            hopper.tensor_map("o", heads, p.seqlen_q, p.head_dim, box=(64, 16)),
            *("maxima", "sums", heads, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k),
        ),
        smem_bytes=smem_bytes,
        defines={"MIN_BLOCKS": blocks, "CLUSTER": c.PV_CLUSTER},
        min_blocks_per_sm=blocks,
        programmatic=bool(c.PDL),
        carveout=100 if c.CARVEOUT else -1,
    )

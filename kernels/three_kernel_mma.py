"""three_kernel_mma: QKᵀ, row softmax in place and PV as three launches; sm_80 and later."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import DTYPE_BYTES, Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "three_kernel_mma",
    summary="QK^T, row softmax in place, PV: three launches, mma.sync and cp.async",
    params=(
        Param("QK_BLOCK_M", (64, 128), "queries per tile of scores"),
        Param("QK_BLOCK_N", (64, 128), "keys per tile of scores"),
        Param("QK_BLOCK_K", (64,), "head_dim columns per pipeline stage"),
        Param("QK_WARPS", (4,), "warps per block"),
        Param("QK_STAGES", (1, 2), "tiles of K in flight"),
        Param("QK_TILES", (1, 4), "tiles of keys that a block computes in sequence"),
        Param("SOFTMAX_THREADS", (32, 64, 256), "threads per row"),
        Param("SOFTMAX_VECTOR", (4, 8), "elements per load: 1, 2, 4 or 8"),
        Param("SOFTMAX_READS", (1, 2), "1: the row stays in registers; 2: it is read twice"),
        Param("SOFTMAX_BLOCK", (256,), "threads per block"),
        Param("PV_BLOCK_M", (64, 128), "queries per tile of the output"),
        Param("PV_BLOCK_N", (64, 128), "head_dim columns per tile of the output"),
        Param("PV_BLOCK_K", (64, 128), "keys per pipeline stage"),
        Param("PV_WARPS", (4,), "warps per block"),
        Param("PV_STAGES", (2, 3), "tiles of P and V in flight"),
    ),
    rounds_scores=1,
)


def accumulators(block_m: int, block_n: int, warps: int) -> int:
    """fp32 output registers of a thread."""
    return block_m * block_n // (warps * 32)


def gemm_registers(block_m: int, block_n: int, warps: int) -> int:
    """Registers that a thread needs without spills: output, input fragments, addresses."""
    output = accumulators(block_m, block_n, warps)
    return output + (64 if output < 64 else 80)


def max_keys(config: Config, problem: Problem) -> int:
    """Keys that the registers of a row's threads hold: a power of two, to share cubins."""
    return max(
        config.SOFTMAX_THREADS * config.SOFTMAX_VECTOR, 1 << (problem.seqlen_k - 1).bit_length()
    )


def stride(problem: Problem) -> int:
    """Elements from one row of scores to the next, rounded up to whole 16-byte chunks."""
    return ceil_div(problem.seqlen_k, 8) * 8


@kernel.rule("sizes are powers of two, except stages and tiles per block")
def powers_of_two(config: Config, problem: Problem, arch: Arch) -> bool:
    free = ("QK_STAGES", "QK_TILES", "PV_STAGES", "SOFTMAX_READS")
    sizes = (param.name for param in kernel.params if param.name not in free)
    return all(int(config[name]).bit_count() == 1 for name in sizes)


@kernel.rule("every warp has at least one 16x16 piece of its tile")
def warps_fit_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return (
        c.QK_WARPS <= c.QK_BLOCK_M * c.QK_BLOCK_N // 256
        and c.PV_WARPS <= c.PV_BLOCK_M * c.PV_BLOCK_N // 256
    )


@kernel.rule("a thread has at most 128 accumulators, so nothing spills")
def accumulators_fit_registers(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return (
        accumulators(c.QK_BLOCK_M, c.QK_BLOCK_N, c.QK_WARPS) <= 128
        and accumulators(c.PV_BLOCK_M, c.PV_BLOCK_N, c.PV_WARPS) <= 128
    )


@kernel.rule("a block's registers fit an SM without spills")
def block_fits_registers(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    qk_registers = c.QK_WARPS * 32 * gemm_registers(c.QK_BLOCK_M, c.QK_BLOCK_N, c.QK_WARPS)
    pv_registers = c.PV_WARPS * 32 * gemm_registers(c.PV_BLOCK_M, c.PV_BLOCK_N, c.PV_WARPS)
    return max(qk_registers, pv_registers) <= arch.registers_per_sm


@kernel.rule("a thread copies 1 to 32 chunks per step: more addresses would spill")
def copies_fit_threads(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    return all(
        min(rows) * columns >= threads * 8 and sum(rows) * columns <= threads * 8 * 32
        for rows, columns, threads in (
            ((c.QK_BLOCK_M, c.QK_BLOCK_N), c.QK_BLOCK_K, c.QK_WARPS * 32),
            ((c.PV_BLOCK_M, c.PV_BLOCK_N), c.PV_BLOCK_K, c.PV_WARPS * 32),
        )
    )


@kernel.rule("QK_BLOCK_K and PV_BLOCK_N divide head_dim")
def tiles_divide_head_dim(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.head_dim % config.QK_BLOCK_K == 0 == problem.head_dim % config.PV_BLOCK_N


@kernel.rule("all stages can be in flight: one for one tile, otherwise two or more")
def stages_are_used(config: Config, problem: Problem, arch: Arch) -> bool:
    steps = problem.head_dim // config.QK_BLOCK_K * config.QK_TILES
    return min(2, steps) <= config.QK_STAGES <= steps and config.PV_STAGES >= 2


@kernel.rule("a row kept in registers takes at most 64 of each thread's")
def row_fits_registers(config: Config, problem: Problem, arch: Arch) -> bool:
    keys_per_thread = max_keys(config, problem) // config.SOFTMAX_THREADS
    registers = config.SOFTMAX_BLOCK * (keys_per_thread + 40)
    return config.SOFTMAX_READS == 2 or (keys_per_thread <= 64 and registers <= 65536)


@kernel.rule("softmax blocks hold whole rows, and a row's threads all have keys")
def softmax_threads_are_used(config: Config, problem: Problem, arch: Arch) -> bool:
    threads = config.SOFTMAX_THREADS
    has_keys = threads <= 32 or threads * config.SOFTMAX_VECTOR < 2 * problem.seqlen_k
    return config.SOFTMAX_BLOCK % max(threads, 32) == 0 and has_keys


@kernel.rule("tiles are shorter than twice the sequence")
def tiles_fit_sequence(config: Config, problem: Problem, arch: Arch) -> bool:
    c, p = config, problem
    return max(c.QK_BLOCK_M, c.PV_BLOCK_M) < 2 * max(p.seqlen_q, 64) and max(
        c.QK_TILES * c.QK_BLOCK_N, c.PV_BLOCK_K
    ) < 2 * max(p.seqlen_k, 64)


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    p = problem
    rows = p.batch * p.heads * p.seqlen_q
    return {"scores": rows * stride(p) * DTYPE_BYTES[p.dtype]}


@kernel.stage(
    "qk", params=("QK_BLOCK_M", "QK_BLOCK_N", "QK_BLOCK_K", "QK_WARPS", "QK_STAGES", "QK_TILES")
)
def qk(config: Config, problem: Problem, arch: Arch) -> Launch:
    c, p = config, problem
    threads = c.QK_WARPS * 32
    inputs = 2 * (c.QK_BLOCK_M * p.head_dim + c.QK_STAGES * c.QK_BLOCK_N * c.QK_BLOCK_K)
    outputs = 2 * c.QK_BLOCK_M * c.QK_BLOCK_N
    smem_bytes = max(inputs, outputs) if c.QK_TILES == 1 else inputs + outputs
    registers = gemm_registers(c.QK_BLOCK_M, c.QK_BLOCK_N, c.QK_WARPS)
    blocks = arch.planned_blocks(threads, registers, smem_bytes)
    return Launch(
        function="three_kernel_mma_qk",
        grid=(
            ceil_div(p.seqlen_q, c.QK_BLOCK_M) * ceil_div(p.seqlen_k, c.QK_TILES * c.QK_BLOCK_N),
            p.batch * p.heads,
            1,
        ),
        threads=threads,
        args=(
            *("q", "k", "scores", p.heads, p.heads_kv),
            *(p.seqlen_q, p.seqlen_k, stride(p), p.scale),
        ),
        smem_bytes=smem_bytes,
        defines={"MIN_BLOCKS": blocks},
        min_blocks_per_sm=blocks,
    )


@kernel.stage(
    "softmax",
    params=("SOFTMAX_THREADS", "SOFTMAX_VECTOR", "SOFTMAX_READS", "SOFTMAX_BLOCK"),
    constants=("IS_BF16", "CAUSAL"),
)
def softmax(config: Config, problem: Problem, arch: Arch) -> Launch:
    c, p = config, problem
    rows = p.batch * p.heads * p.seqlen_q
    keys = max_keys(c, p) if c.SOFTMAX_READS == 1 else 0
    registers = 40 + keys // c.SOFTMAX_THREADS
    smem_bytes = 2 * 4 * (c.SOFTMAX_BLOCK // 32) if c.SOFTMAX_THREADS > 32 else 0
    blocks = arch.planned_blocks(c.SOFTMAX_BLOCK, registers, smem_bytes)
    return Launch(
        function="three_kernel_mma_softmax",
        grid=(ceil_div(rows * c.SOFTMAX_THREADS, c.SOFTMAX_BLOCK), 1, 1),
        threads=c.SOFTMAX_BLOCK,
        args=("scores", rows, p.seqlen_q, p.seqlen_k, stride(p)),
        smem_bytes=smem_bytes,
        defines={"MIN_BLOCKS": blocks} | ({"MAX_KEYS": keys} if keys else {}),
        min_blocks_per_sm=blocks,
    )


@kernel.stage("pv", params=("PV_BLOCK_M", "PV_BLOCK_N", "PV_BLOCK_K", "PV_WARPS", "PV_STAGES"))
def pv(config: Config, problem: Problem, arch: Arch) -> Launch:
    c, p = config, problem
    threads = c.PV_WARPS * 32
    inputs = c.PV_STAGES * (c.PV_BLOCK_M + c.PV_BLOCK_N) * c.PV_BLOCK_K * 2
    smem_bytes = max(inputs, c.PV_BLOCK_M * c.PV_BLOCK_N * 2)
    registers = gemm_registers(c.PV_BLOCK_M, c.PV_BLOCK_N, c.PV_WARPS)
    blocks = arch.planned_blocks(threads, registers, smem_bytes)
    return Launch(
        function="three_kernel_mma_pv",
        grid=(
            ceil_div(p.seqlen_q, c.PV_BLOCK_M) * (p.head_dim // c.PV_BLOCK_N),
            p.batch * p.heads,
            1,
        ),
        threads=threads,
        args=("scores", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, stride(p)),
        smem_bytes=smem_bytes,
        defines={"MIN_BLOCKS": blocks},
        min_blocks_per_sm=blocks,
    )

"""flash_fwd_fp32_mma: fused fp32 forward on TF32 mma.sync, each product as three.

For short calls, and for numbers that are far apart: flash_fwd_fp32_halves says more.
"""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "flash_fwd_fp32_mma",
    summary="fused fp32 forward: each product as three on TF32 mma.sync, cp.async ring; for short "
    "calls, and for numbers that are far apart",
    params=(
        Param("BLOCK_M", (64, 128), "query rows per block"),
        Param("BLOCK_N", (16, 32, 64), "keys per tile"),
        Param("NUM_WARPS", (4, 8), "warps per block"),
        Param("NUM_STAGES", (1, 2, 3), "K and V ring; with 1, V loads under QK and K under PV"),
        Param(
            "PV_PRODUCTS",
            (3, 2),
            "products in TF32 for one of P V; 2: both small ones as one in bf16",
        ),
        Param("BLOCK_ORDER", (0, 1), "0 by head; 1, if causal, longest first"),
    ),
    dtypes=("fp32",),
    head_dims=range(8, 257, 8),
    usual_head_dims=(64, 128, 256, 72),
)


def column_warps(head_dim: int) -> int:
    """Warps that share queries, as outputs of more than 192 columns fit no thread's registers."""
    return 2 if head_dim > 192 else 1


def warp_m(config: Config, head_dim: int) -> int:
    """Query rows of one warp."""
    return config.BLOCK_M * column_warps(head_dim) // config.NUM_WARPS


def smem_bytes(config: Config, head_dim: int) -> int:
    """Bytes of Q and the K and V ring, whose rows are whole multiples of 128 bytes."""
    return (config.BLOCK_M + 2 * config.NUM_STAGES * config.BLOCK_N) * ceil_div(head_dim, 32) * 128


def registers_needed(config: Config, head_dim: int) -> int:
    """Registers of a lane: outputs, P in two parts, sums of a step, fragments and addresses."""
    columns = 128 if column_warps(head_dim) > 1 else head_dim
    return warp_m(config, head_dim) // 16 * (columns // 2 + config.BLOCK_N + 16) + 80


@kernel.rule("a warp owns 16 or 32 queries")
def warp_rows(config: Config, problem: Problem, arch: Arch) -> bool:
    return warp_m(config, problem.head_dim) in (16, 32)


@kernel.rule("a tile is shorter than twice its sequence, or short itself")
def no_idle_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    longest_m, longest_n = 2 * max(64, problem.seqlen_q), 2 * max(64, problem.seqlen_k)
    return longest_m > config.BLOCK_M and longest_n > config.BLOCK_N


@kernel.rule("ordering blocks by length needs blocks of different lengths")
def block_order(config: Config, problem: Problem, arch: Arch) -> bool:
    return problem.causal or config.BLOCK_ORDER == 0


@kernel.rule("outputs, scores and Q fit the registers of a thread, so nothing spills")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    # Compiling all showed the limits, beyond which 8 to 100 bytes were spilled. With one stage,
    # loads in the middle of a tile take some more.
    most = 235 if config.NUM_STAGES > 1 else 219
    most = 208 if warp_m(config, problem.head_dim) == 16 else most
    return registers_needed(config, problem.head_dim) <= most


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    needed = registers_needed(config, p.head_dim)
    smem = smem_bytes(config, p.head_dim)
    blocks = arch.planned_blocks(config.NUM_WARPS * 32, needed, smem)
    grid = (ceil_div(p.seqlen_q, config.BLOCK_M), p.batch * p.heads)
    return Launch(
        function="flash_fwd_fp32_mma",
        grid=(*(grid if config.BLOCK_ORDER == 0 else grid[::-1]), 1),
        threads=config.NUM_WARPS * 32,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=smem,
        defines={"MIN_BLOCKS": blocks},
        min_blocks_per_sm=blocks,
    )

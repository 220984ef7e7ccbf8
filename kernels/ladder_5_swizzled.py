"""ladder_5_swizzled: XOR-swizzled rows, the rest in registers; also a form without branches."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "ladder_5_swizzled",
    summary="ladder 5: swizzled shared memory, mma.sync, scores in registers, one-instruction exp2",
    params=(
        Param("BLOCK_M", (32, 16), "query rows per block, 16 per warp"),
        Param("KEY_WARPS", (4,), "warps that share a query's keys; merged at the end"),
        Param("BLOCK_N", (64, 128), "keys per tile"),
        Param("STAGES", (2,), "tiles of K and V in the ring: 2 or more"),
        Param("BRANCHES", (1, 0), "0: no branches; one instruction sequence for every input"),
    ),
    head_dims=(64, 128),
)


def tiles(config: Config, problem: Problem) -> int:
    """Tiles in the form without branches: a multiple of four, to share cubins."""
    return ceil_div(problem.seqlen_k, 4 * config.BLOCK_N) * 4


@kernel.rule("whole fragments per warp, whole 16-byte chunks per thread, a stage to refill")
def whole_fragments(config: Config, problem: Problem, arch: Arch) -> bool:
    c = config
    warps = c.BLOCK_M // 16 * c.KEY_WARPS
    return (
        c.BLOCK_M in (16, 32, 64, 128)
        and c.KEY_WARPS in (1, 2, 4, 8)
        and c.BLOCK_N % (16 * c.KEY_WARPS) == 0
        and c.BLOCK_N * problem.head_dim // 8 % (32 * warps) == 0
        and c.BLOCK_M * problem.head_dim // 8 % (32 * warps) == 0
        and c.STAGES >= 2
    )


def registers_needed(config: Config, head_dim: int) -> int:
    """Registers of a lane: output, scores, queries, and extra for fragments and addresses."""
    return head_dim // 2 + config.BLOCK_N // config.KEY_WARPS // 2 + head_dim // 4 + 64


@kernel.rule("scores and output fit the registers of a thread")
def registers(config: Config, problem: Problem, arch: Arch) -> bool:
    warps = config.BLOCK_M // 16 * config.KEY_WARPS
    most = min(250, arch.registers_per_sm // (32 * warps))
    return registers_needed(config, problem.head_dim) <= most


@kernel.rule("without branches, few and short tiles: each is separate code, and more code spills")
def unrolled(config: Config, problem: Problem, arch: Arch) -> bool:
    tile = config.BLOCK_N // config.KEY_WARPS * problem.head_dim  # elements of a warp's K
    most = 8 if tile <= 1024 else 4
    return bool(config.BRANCHES) or (tile <= 2048 and tiles(config, problem) <= most)


@kernel.rule("a tile is shorter than twice its sequence, or short itself")
def no_idle_tile(config: Config, problem: Problem, arch: Arch) -> bool:
    longest_m, longest_n = 2 * max(32, problem.seqlen_q), 2 * max(64, problem.seqlen_k)
    return longest_m > config.BLOCK_M and longest_n > config.BLOCK_N


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p, c = problem, config
    ring = 4 * c.STAGES * c.BLOCK_N * p.head_dim
    merge = c.KEY_WARPS * c.BLOCK_M * 4 * (p.head_dim + 8 + 2)
    threads, smem = c.BLOCK_M * 2 * c.KEY_WARPS, c.BLOCK_M * p.head_dim * 2 + max(ring, merge)
    # As the code is unrolled, ptxas takes whatever registers there are.
    needed = registers_needed(c, p.head_dim) if c.BRANCHES else 255
    blocks = arch.planned_blocks(threads, needed, smem)
    return Launch(
        function="ladder_5_swizzled",
        grid=(ceil_div(p.seqlen_q, c.BLOCK_M), p.batch * p.heads, 1),
        threads=threads,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=smem,
        defines={"TILES": 0 if c.BRANCHES else tiles(config, p), "MIN_BLOCKS": blocks},
        min_blocks_per_sm=blocks,
    )

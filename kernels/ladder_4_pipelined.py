"""ladder_4_pipelined: two tiles in shared memory; warps of their own fill one by cp.async."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

BLOCK_N = 64

kernel = Family(
    "ladder_4_pipelined",
    summary="ladder 4: cp.async double buffering, and warps that only copy",
    params=(
        Param("BLOCK_M", (32, 64), "query rows per block, 16 per computing warp"),
        Param("PRODUCER_WARPS", (1,), "warps that copy: 1, 2 or 4"),
    ),
    head_dims=(64, 128),
)


@kernel.rule("16 rows per warp, and tiles of whole 16-byte chunks for every copying thread")
def whole_chunks(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_M in (16, 32, 64, 128) and config.PRODUCER_WARPS in (1, 2, 4)


@kernel.rule("a block is smaller than twice the rows of a head, or small itself")
def no_idle_block(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_M < 2 * max(32, problem.seqlen_q)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p, block_m = problem, config.BLOCK_M
    scores = block_m * (BLOCK_N + 4 + 1) * 4  # rows are 16 bytes longer, and have a factor
    return Launch(
        function="ladder_4_pipelined",
        grid=(ceil_div(p.seqlen_q, block_m), p.batch * p.heads, 1),
        threads=block_m * 2 + config.PRODUCER_WARPS * 32,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=(block_m + 4 * BLOCK_N) * p.head_dim * 2 + scores,
    )

"""ladder_3_tensor_cores: WMMA fragments for both products."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

BLOCK_N = 64

kernel = Family(
    "ladder_3_tensor_cores",
    summary="ladder 3: both products on tensor cores, WMMA 16x16x16; scores through shared memory",
    params=(Param("BLOCK_M", (32, 64), "query rows per block, 16 per warp"),),
    head_dims=(64, 128),
)


@kernel.rule("16 rows per warp, and tiles of whole 16-byte chunks for every thread")
def whole_chunks(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_M in (16, 32, 64, 128)


@kernel.rule("a block is smaller than twice the rows of a head, or small itself")
def no_idle_block(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.BLOCK_M < 2 * max(32, problem.seqlen_q)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p, block_m = problem, config.BLOCK_M
    scores = block_m * (BLOCK_N + 4 + 1) * 4  # rows are 16 bytes longer, and have a factor
    return Launch(
        function="ladder_3_tensor_cores",
        grid=(ceil_div(p.seqlen_q, block_m), p.batch * p.heads, 1),
        threads=block_m * 2,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=(block_m + 2 * BLOCK_N) * p.head_dim * 2 + scores,
    )

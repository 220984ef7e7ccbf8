"""ladder_1_blocks: a warp per query row; the rung after naive."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "ladder_1_blocks",
    summary="ladder 1: a warp per query row; lanes share its keys, then its columns",
    params=(Param("WARPS", (4, 8), "warps per block, one per query row"),),
    head_dims=(64, 128),
)


@kernel.rule("a block has 1 to 24 warps")
def warps(config: Config, problem: Problem, arch: Arch) -> bool:
    return 1 <= config.WARPS <= 24


@kernel.rule("a block is smaller than twice the rows of a head")
def no_idle_block(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.WARPS < 2 * problem.seqlen_q


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        function="ladder_1_blocks",
        grid=(ceil_div(p.seqlen_q, config.WARPS), p.batch * p.heads, 1),
        threads=config.WARPS * 32,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
    )

"""A family of one parameter, which sweeps, stores and reports are tested with."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "simple",
    summary="one thread per query row",
    params=(Param("THREADS", (32, 64, 128, 256), "threads per block, one per query row"),),
)


@kernel.rule("a block has at most the rows of a head, rounded up to a warp")
def no_idle_block(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.THREADS < problem.seqlen_q + 32


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        "simple",
        grid=(ceil_div(p.seqlen_q, config.THREADS), p.batch * p.heads, 1),
        threads=config.THREADS,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
    )

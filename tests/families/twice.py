"""A user's own family, as docs/writing-a-kernel.md describes: two stages and a workspace."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "twice",
    summary="two plain kernels over fp32 scores",
    params=(
        Param("SCORE_THREADS", (64, 128), "threads of the first kernel"),
        Param("MIX_THREADS", (32, 64), "threads of the second"),
    ),
    dtypes=("fp16",),
    head_dims=(64,),
)


@kernel.rule("the second block is not larger than the first")
def shrinking(config: Config, problem: Problem, arch: Arch) -> bool:
    return config.MIX_THREADS <= config.SCORE_THREADS


@kernel.workspace
def workspace(config: Config, problem: Problem) -> dict[str, int]:
    return {"scores": problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * 4}


@kernel.stage("scores", params=(), constants=("HEAD_DIM", "CAUSAL"))
def scores(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        "twice_scores",
        grid=(p.seqlen_q, p.batch * p.heads, 1),
        threads=config.SCORE_THREADS,
        args=("q", "k", "scores", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
    )


@kernel.stage("mix", params=(), constants=("HEAD_DIM", "CAUSAL"))
def mix(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        "twice_mix",
        grid=(p.seqlen_q, p.batch * p.heads, 1),
        threads=config.MIX_THREADS,
        args=("scores", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k),
    )

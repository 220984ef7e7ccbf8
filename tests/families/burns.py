"""A family whose time is known in clock cycles, so that it can be made slower by a known share."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "burns",
    summary="right, and as slow as it is told to be",
    params=(Param("CYCLES", (400_000,), "clock cycles that each block takes"),),
    dtypes=("fp16",),
    head_dims=(64,),
)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        "burns",
        grid=(p.seqlen_q, p.batch * p.heads, 1),
        threads=p.head_dim,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
    )

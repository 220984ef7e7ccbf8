"""A family with one parameter: the way in which it goes wrong."""

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config, Family, Launch, Param

kernel = Family(
    "misbehaves",
    summary="right, or wrong in one chosen way",
    params=(
        Param(
            "FAULT",
            (0, 1, 2, 3, 4, 5, 6, 7),
            "right, hang, illegal address, write past the end, NaN, unwritten row, 1 % off, race",
        ),
    ),
    dtypes=("fp16",),
    head_dims=(64,),
)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        "misbehaves",
        grid=(p.seqlen_q, p.batch * p.heads, 1),
        threads=p.head_dim,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=4,
    )

"""A right kernel that can be told to be wrong: FAULT is a number in the list of wrong.cu."""

import re
from pathlib import Path

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config, Family, Launch, Param

_LIST = re.search(r"enum Fault \{(.*?)\};", Path(__file__).with_suffix(".cu").read_text(), re.S)
FAULTS = tuple(re.findall(r"^\s*([A-Z]\w*),", _LIST[1] if _LIST else "", re.M))
THREADS = 128

kernel = Family(
    "wrong",
    summary="right, or wrong in one chosen way",
    params=(Param("FAULT", tuple(range(len(FAULTS))), ", ".join(FAULTS)),),
    head_dims=(64, 128),
)


@kernel.stage("fwd")
def fwd(config: Config, problem: Problem, arch: Arch) -> Launch:
    p = problem
    return Launch(
        "wrong",
        grid=(p.seqlen_q, p.batch * p.heads, 1),
        threads=THREADS,
        args=("q", "k", "v", "o", p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.scale),
        smem_bytes=4 * p.seqlen_k,
    )

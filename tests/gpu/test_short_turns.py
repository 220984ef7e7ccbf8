"""Blocks that take turns are right in every call where a turn has few tiles of keys.

A tile of queries then takes the place of the one before soonest. One form of flash_fwd_wgmma that
gave Q's place back too early was wrong in 1 of 1,024 such calls, and right in all longer ones.
"""

from __future__ import annotations

import pytest

from attnsweep.build.candidate import Build
from attnsweep.choose.queue import as_ready
from attnsweep.family.declare import discover
from attnsweep.family.space import Selection, Space
from attnsweep.problem import Problem

pytestmark = pytest.mark.gpu

KERNELS = discover()
CALLS = 8192  # of each config
CASES = [
    ("flash_fwd_wgmma", Problem(2, 12, 12, 2000, 100, 128), (0, 2, 8)),
    ("flash_fwd_wgmma", Problem(12, 40, 40, 303, 303, 128, "bf16", causal=True), (0, 8)),
    ("flash_fwd_wgmma", Problem(4, 24, 24, 2000, 60, 64), (0, 4)),
    ("flash_fwd_fp8_wgmma", Problem(2, 12, 12, 2000, 100, 128, "e4m3"), None),
    ("flash_fwd_fp8_wgmma", Problem(12, 40, 40, 303, 303, 64, "e4m3", causal=True), None),
]


def configs_in_turns(kernel, problem, arch, of_q):
    """Six configs of a family whose blocks take turns, and of those with all of Q in registers."""
    values = {"PERSISTENT": (arch.sm_count,)} | ({} if of_q is None else {"Q_REGISTERS": of_q})
    configs = Space.build(kernel, problem, arch, Selection(values)).configs
    early = [c for c in configs if c.get("Q_REGISTERS") == problem.head_dim // 16]
    return [*configs[:: len(configs) // 6 + 1], *early[:: len(early) // 6 + 1]]


@pytest.mark.parametrize(("name", "problem", "of_q"), CASES, ids=lambda case: str(case))
def test_every_call_is_right(name, problem, of_q, worker, compiler):
    kernel = KERNELS[name]
    reason = kernel.refusal(problem, compiler.arch)
    if reason is not None:
        pytest.skip(reason)
    configs = configs_in_turns(kernel, problem, compiler.arch, of_q)
    assert len(configs) >= 4
    builds = [Build.of(kernel, config, problem, compiler) for config in configs]
    for build in builds:
        build.submit()
    worker.open(problem, replay_us=100, seed=1)
    for build in as_ready(builds):
        worker.trial(build.candidate())
        worker.add("it", build.candidate(), cold=False)
        compared = 0
        while compared < CALLS:  # a call that differs from the checked one is a WorkerError
            compared += worker.confirm("it", 1e6)
        worker.drop("it")

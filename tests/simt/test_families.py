"""Every family is right on the CPU: small, odd and hard cases under both schedules.

No GPU took part: README.md says what this shows and what it cannot.
"""

from pathlib import Path

import pytest

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover

from . import shapes
from .harness import ARCH, COMPILER, BuildError, SimtError, config_of
from .runs import BASE, KERNELS, RUNS, cases, config_for, is_unusual

# Cases that a push runs of a config; each config has others.
EACH = 2
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.mark.nightly(push=5)
@pytest.mark.parametrize("name", [name for name in RUNS if not is_unusual(name)])
def test_right_on_hard_cases(simulator, some, name):
    kernel, problem, which = RUNS[name]
    config = config_for(kernel, problem, which)
    for case in some(cases(problem), EACH):
        result = simulator.check(kernel, config, case)
        assert result.ok, (config.label, case.label, str(result))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly(push=2, of="unusual configs")) for name in RUNS if is_unusual(name)],
)
def test_unusual_config_is_right(simulator, name):
    kernel, problem, which = RUNS[name]
    config = config_for(kernel, problem, which)
    for case in (*shapes.cases(problem, config), *small_cases(problem)[2:4]):
        result = simulator.check(kernel, config, case)
        assert result.ok, (config.label, case.label, str(result))


@pytest.mark.parametrize(("turns", "heads"), [(0, 4), (3, 5)])
def test_heads_that_do_not_fit_L2_together_are_taken_in_groups(simulator, monkeypatch, turns, heads):
    """Small problems all fit, so the family is told of a small L2: two heads, and one that is left.

    Without turns the groups must be equal.
    """
    kernel = KERNELS["flash_fwd_wgmma"]
    config = config_of(kernel, f"WARPGROUPS=2 ORDER=1 PERSISTENT={turns}")
    case = Case(Problem(1, heads, heads, 150, 200, 64, causal=True))
    monkeypatch.setitem(kernel.stages["fwd"].launch.__globals__, "L2_BYTES", 2 * 4 * 200 * 64)
    launch = kernel.launches(config, case.problem, ARCH)["fwd"]
    assert launch.args[8] == 2
    result = simulator.check(kernel, config, case)
    assert result.ok, str(result)


# Problems of each kind that flash_fwd_wgmma alone has, and a config of it.
KINDS = {
    "BLOCK_N=64 WARPGROUPS=2 LSE=1": (
        *(f"(1,4,2048,{dim}) bf16 full" for dim in (8, 40, 72, 136)),
        *(
            f"(1,4,2048,{dims}) fp16 {mask}"
            for dims in ("192/128", "96/64", "64/128", "128/256")
            for mask in ("full", "causal")
        ),
    ),
    "BLOCK_N=64 WARPGROUPS=2 MAXIMA=1 LSE=1": (
        *(f"(1,4,2048,64) bf16 {mask} packed(8)" for mask in ("full", "causal")),
        *(f"(2,4,2048,64) bf16 {of}" for of in ("full bias(item)", "causal softcap(50)")),
        "(2,4,2048,64) bf16 causal sinks",
    ),
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("words", "label"), [(w, each) for w in KINDS for each in KINDS[w]])
def test_right_on_hard_cases_of_other_kinds(simulator, words, label):
    kernel = KERNELS["flash_fwd_wgmma"]
    for case in small_cases(Problem.parse(label)):
        result = simulator.check(kernel, config_of(kernel, words), case, schedules=(0,))
        assert result.ok, (case.label, str(result))


SANITIZED = {
    "flash_bwd_wgmma": "RECOMPUTE=0",
    "flash_fwd_fp8_wgmma": "BLOCK_N=96 SUMS=1 INTERVAL=96 OVERLAP=2",
    "flash_fwd_wgmma": "WARPGROUPS=2 KEY_GROUPS=2 P_SHARED=1",
    "flash_fwd_mma": "KEY_GROUPS=2 BLOCK_N=64 NUM_STAGES=2",
    "three_kernel_wgmma": "STATS=2 SOFTMAX_THREADS=32",
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("family", SANITIZED)
def test_clean_under_the_sanitizers(simulator, family):
    kernel = KERNELS[family]
    op = OPS[kernel.ops[0]]
    case = Case(Problem(1, 2, 1, 97, 161, 64, kernel.dtypes[0], causal=True, op=op))
    result = simulator.check(kernel, config_of(kernel, SANITIZED[family]), case, asan=True)
    assert result.ok, str(result)


def test_more_shared_memory_than_there_is_is_refused(simulator):
    kernel, case = KERNELS["three_kernel_wgmma"], Case(BASE)
    config = config_of(kernel, "PV_BLOCK_M=128 PV_WARPGROUPS=2 PV_BLOCK_K=128 PV_STAGES=6")
    with pytest.raises(BuildError, match=r"pv asks for \d+ bytes .* at most 232448"):
        simulator.check(kernel, config, case)


def test_a_race_within_the_limit_shows_between_schedules(simulator):
    """The one that tests/gpu/test_run.py runs on a GPU."""
    families = Path(__file__).parent.parent / "families"
    kernel = discover(families)["misbehaves"]
    case = Case(Problem(1, 1, 1, 3, 65, 64))
    assert simulator.check(kernel, config_of(kernel, "FAULT=0"), case).ok
    racing = config_of(kernel, "FAULT=7")
    with pytest.raises(SimtError, match=r"schedules disagree on \d outputs: a barrier is missing, or threads race"):
        simulator.check(kernel, racing, case)
    assert simulator.check(kernel, racing, case, schedules=[1]).ok

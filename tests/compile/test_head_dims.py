"""head_dims beside the usual ones: the configs with the fewest registers to spare spill nothing."""

from __future__ import annotations

import sys

import pytest

from attnsweep.compile.cubin import compiler_warnings, functions
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.space import Selection, Space
from attnsweep.serve.export_code import compile_for_models

ARCH = ARCHS["sm_90a"]
FAMILY = discover()["flash_fwd_wgmma"]
# Code for 248 columns is that for 256.
OTHERS = sorted({*FAMILY.head_dims} - {*FAMILY.usual_head_dims, 248})


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(ARCH)
    yield made
    made.close()


def tightest(problem: Problem, count: int) -> list:
    """Configs whose consumers need most of the registers that they have, of each way to keep P.

    And to take exponentials, where these bind.
    """
    declared = sys.modules[FAMILY.stages["fwd"].launch.__module__]

    def spare(config):
        given = declared.registers_given(config, problem, ARCH)[2]
        return given - declared.registers_needed(config, problem)

    found = []
    for polynomial in (0, 2, 4) if problem.head_dim <= 48 else (0,):
        selection = Selection({"EXP2_POLY": (polynomial,)})
        space = Space.build(FAMILY, problem, ARCH, selection).configs
        for kept in (0, 1):
            found += sorted((c for c in space if c.P_SHARED == kept), key=spare)[:count]
    return found


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("causal", [False, True])
def test_tight_configs_spill_nothing(compiler, some, causal):
    asked = []
    for number, head_dim in enumerate(some(OTHERS, 2)):
        dtype = FAMILY.dtypes[number % 2]
        problem = Problem(4, 16, 16, 2048, 2048, head_dim, dtype, causal=causal)
        for config in tightest(problem, 2):
            (launch,) = (made for made in FAMILY.launches(config, problem, ARCH).values())
            defines = FAMILY.stages["fwd"].defines(config, problem, launch)
            asked.append((problem, config, compiler.submit(FAMILY.source, defines)))
    assert len(asked) >= 4
    for problem, config, future in asked:
        log = future.result().log
        assert [facts["spill_bytes"] for facts in functions(log).values()] == [0], (
            problem.label,
            config.label,
        )
        assert not compiler_warnings(log), (problem.label, config.label)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("head_dim", [40, 72, 160])
def test_code_for_models_of_other_head_dims(compiler, head_dim):
    """STRIDED=1: launches fit their templates, and nothing is spilled."""
    problem = Problem(4, 16, 16, 2048, 2048, head_dim, "bf16", causal=True)
    for config in tightest(problem, 1):
        compiled = compile_for_models(FAMILY, config, problem, compiler)
        _, files, spills = compiled.done()
        assert files
        assert spills == 0, config.label

"""head_dims beside the usual ones: the configs with the fewest registers to spare spill nothing."""

import sys

import pytest

from attnsweep.compile.cubin import compiler_warnings, functions
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import BACKWARD, Problem
from attnsweep.family.discover import discover
from attnsweep.family.space import Selection, Space
from attnsweep.serve.export_code import compile_for_models
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan
from attnsweep.specs.shipped import shipped_specs

ARCH = ARCHS["sm_90a"]
FAMILY, BACKWARD_FAMILY = (discover()[name] for name in ("flash_fwd_wgmma", "flash_bwd_wgmma"))
FP32 = discover()["flash_fwd_fp32_mma"]
# Code for 248 columns is that for 256.
VALUE_DIMS = (
    *("192/128", "128/256", "96/64", "64/128", "256/128", "64/256", "112/72", "160/80", "8/128"),
    *("256/144", "224/96", "32/256", "128/40", "72/112"),
)
KINDS = ("window(512,0)", "boolean(blocks,30)", "full bias()", "causal softcap(30) sinks")
KINDS += ("causal packed(4,40)", "full padded(right,40)")
TIGHT = pytest.mark.nightly(push=1, of="tight configs")
OTHERS = sorted({*FAMILY.head_dims} - {*FAMILY.usual_head_dims, 248})
NARROW = ("16", "24", "72", "80", "96", "136", "144", "160", "176", "96/64", "112/72", "160/80", "72/112")


def tightest(problem: Problem, count: int, swizzle: int = 128) -> list:
    """Configs whose consumers need most of the registers that they have, of each way to keep P.

    And to take exponentials, where these bind.
    """
    declared = sys.modules[FAMILY.stages["fwd"].launch.__module__]

    def spare(config):
        given = declared.registers_given(config, problem, ARCH)[2]
        return given - declared.registers_needed(config, problem)

    found = []
    for polynomial in (0, 2, 4) if problem.head_dim <= 48 else (0,):
        selection = Selection({"EXP2_POLY": (polynomial,), "SWIZZLE": (swizzle,)})
        space = Space.build(FAMILY, problem, ARCH, selection).configs
        for kept in (0, 1):
            found += sorted((c for c in space if c.P_SHARED == kept), key=spare)[:count]
    return found


def spill_nothing(compiler, asked, family=FAMILY):
    """Assert it of each problem and config."""
    made = []
    for problem, config in asked:
        launches = family.launches(config, problem, ARCH).items()
        defines = [family.stages[name].defines(config, problem, one) for name, one in launches]
        made += [(problem, config, compiler.submit(family.source, each)) for each in defines]
    assert len(made) >= 4
    for problem, config, future in made:
        log = future.result().log
        assert [facts["spill_bytes"] for facts in functions(log).values()] == [0], (problem.label, config.label)
        assert not compiler_warnings(log), (problem.label, config.label)


@TIGHT
@pytest.mark.parametrize("causal", [False, True])
def test_tight_configs_spill_nothing(compiler, some, causal):
    asked = []
    for number, head_dim in enumerate(some(OTHERS, 2)):
        dtype = FAMILY.dtypes[number % 2]
        problem = Problem(4, 16, 16, 2048, 2048, head_dim, dtype, causal=causal)
        asked += [(problem, config) for config in tightest(problem, 2)]
    spill_nothing(compiler, asked)


@TIGHT
@pytest.mark.parametrize("kind", ["full", "causal", *KINDS])
def test_tight_configs_with_panels_of_64_bytes_spill_nothing(compiler, some, kind):
    asked = []
    for dims in some(NARROW, 2):
        problem = Problem.parse(f"(1,32,2048,{dims}) bf16 {kind}")
        asked += [(problem, config) for config in tightest(problem, 2, swizzle=64)]
    spill_nothing(compiler, asked)


@TIGHT
@pytest.mark.parametrize("causal", [False, True])
def test_tight_configs_with_v_of_another_head_dim_spill_nothing(compiler, some, causal):
    asked = []
    for number, dims in enumerate(some(VALUE_DIMS, 2)):
        dtype, mask = FAMILY.dtypes[number % 2], "causal" if causal else "full"
        problem = Problem.parse(f"(4,16,2048,{dims}) {dtype} {mask}")
        asked += [(problem, config) for config in tightest(problem, 2)]
    for dims in some(VALUE_DIMS[:8], 1):
        for kind in some(KINDS, 2):
            problem = Problem.parse(f"(1,32,2048,{dims}) bf16 {kind}")
            asked += [(problem, config) for config in tightest(problem, 1)]
    spill_nothing(compiler, asked)


@TIGHT
def test_the_spec_of_other_value_dims_has_configs_that_spill_nothing(compiler, some):
    """For problems of value_dims.yaml, some configs of its space, whose BLOCK_N differ."""
    asked = []
    for item in some(plan(load_spec(shipped_specs()["value_dims"], discover()), ARCH), 4):
        configs = item.spaces[0].configs
        assert len(configs) >= 20, item.problem.label
        asked += [(item.problem, config) for config in some(configs, 1)]
    spill_nothing(compiler, asked)


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


def tightest_fp32(problem: Problem, products: int) -> list:
    """Configs that need most registers, and those with the fewest to spare of what blocks get."""
    needed = sys.modules[FP32.stages["fwd"].launch.__module__].registers_needed

    def spare(config):
        launch = FP32.launches(config, problem, ARCH)["fwd"]
        given = ARCH.registers_per_sm // (launch.threads * launch.min_blocks_per_sm)
        return min(255, given) - needed(config, problem.head_dim)

    space = Space.build(FP32, problem, ARCH, Selection({"PV_PRODUCTS": (products,)})).configs
    most = sorted(space, key=lambda c: -needed(c, problem.head_dim))
    return [*most[:2], *sorted(space, key=spare)[:2]]


@TIGHT
@pytest.mark.parametrize("products", [3, 2])
@pytest.mark.parametrize("head_dim", [32, 64, 88, 96, 168, 176, 192, 256])
def test_tight_fp32_configs_spill_nothing(compiler, products, head_dim):
    asked = []
    for causal in (False, True):
        problem = Problem(2, 16, 16, 2048, 2048, head_dim, "fp32", causal=causal)
        asked += [(problem, config) for config in tightest_fp32(problem, products)]
    spill_nothing(compiler, asked, FP32)


# Bytes of what stays the same in the loop over tiles, by DKV_WARPGROUPS.
BACKWARD_SPILLS = {1: 192, 2: 0}


def tightest_gradients(problem: Problem, count: int) -> list:
    """Configs whose consumers have fewest registers to spare, of each way to have dK and dV.

    Those whose sums begin with statistics count apart.
    """
    declared = sys.modules[BACKWARD_FAMILY.stages["keys"].launch.__module__]

    def spare(config):
        warpgroups, roles = declared.consumers(config), declared.roles(config, problem)
        given = declared.consumer_registers(ARCH, warpgroups, config.BLOCKS_PER_SM, roles)
        return given - declared.registers_needed(config, problem)

    space = Space.build(BACKWARD_FAMILY, problem, ARCH, Selection({"PDL": (0,)})).configs

    def kind(config):
        return config.RECOMPUTE, config.DKV_WARPGROUPS, config.STATISTICS > 0

    return [
        config
        for of in sorted({kind(config) for config in space})
        for config in sorted((c for c in space if kind(c) == of), key=spare)[:count]
    ]


SERIALISED = pytest.mark.xfail(
    strict=True,
    reason="with AHEAD=1 a candidate or two have their products serialised (C7512), since loops "
    "over tiles count by warpgroups: they are slower, not wrong, and a sweep's times say so",
)
DIMS = sorted({*BACKWARD_FAMILY.head_dims} - {64, 128})


@TIGHT
@pytest.mark.parametrize(
    "head_dim", [pytest.param(dim, marks=[SERIALISED] if dim in (40, 48, 104, 136, 144) else []) for dim in DIMS]
)
def test_gradients_of_other_head_dims_spill_next_to_nothing(compiler, head_dim):
    family, number, asked = BACKWARD_FAMILY, head_dim // 8, []
    dtype, causal = family.dtypes[number % 2], number // 2 % 2 == 1
    problem = Problem(4, 16, 16, 2048, 2048, head_dim, dtype, causal=causal, op=BACKWARD)
    for config in tightest_gradients(problem, 2):
        for name, launch in family.launches(config, problem, ARCH).items():
            defines = family.stages[name].defines(config, problem, launch)
            asked.append((config, compiler.submit(family.source, defines)))
    assert len(asked) >= 6
    for config, future in asked:
        log = future.result().log
        spilled = max(facts["spill_bytes"] for facts in functions(log).values())
        assert spilled <= BACKWARD_SPILLS[config.DKV_WARPGROUPS], config.label
        assert not compiler_warnings(log), config.label

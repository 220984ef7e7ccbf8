"""Problems in FP8 from a spec to a row: what is refused, in which words, and what a launch gets."""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.errors import KernelError, ProblemError, SpaceError, SpecError
from attnsweep.core.hardware import ARCHS, bounds
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.family.space import Selection
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan
from attnsweep.specs.shapes import read_shapes
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify import limits as verify_limits
from attnsweep.verify import measures, rounded
from attnsweep.verify.rounded import ForwardMaths

DTYPES = ("e4m3", "e4m3_tensor", "e4m3_block")
SPEC = """
problems: [{batch: 1, heads: 4, seqlen: 256, head_dim: 64, dtype: %s}]
kernels: {flash_fwd_wgmma: {}, naive: {}}
"""
FP8 = Problem(1, 4, 2, 256, 300, 64, "e4m3")


def loaded(tmp_path, text):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return load_spec(path, discover())


def family(*args, dtypes=DTYPES, workspace=None):
    kernel = Family("toy", summary="", params=(Param("A", (1,), ""),), dtypes=dtypes)
    kernel.stage("fwd")(lambda *_: Launch("f", (1, 1, 1), 32, args))
    if workspace:
        kernel.workspace(lambda config, problem: workspace)
    return kernel


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spec_may_ask_for_each_form_of_scales(tmp_path, dtype):
    (entry,) = loaded(tmp_path, SPEC % dtype).problems
    assert entry.problem.label == f"(1,4,256,64) {dtype} full"
    assert Problem.parse(entry.problem.label) == entry.problem


def test_families_without_fp8_are_refused_each_with_its_reason(tmp_path):
    spec = loaded(tmp_path, SPEC % "e4m3")
    with pytest.raises(SpaceError, match="no candidate is left for") as refused:
        plan(spec, ARCHS["sm_90a"])
    for name in ("flash_fwd_wgmma", "naive"):
        assert f"{name}: dtype e4m3 is not one of fp16, bf16" in refused.value.hint


def test_a_family_that_has_it_runs_beside_those_that_have_not(tmp_path):
    kernels = discover() | {"toy": family("q", "k", "v", "o")}
    spec = replace(
        loaded(tmp_path, SPEC % "e4m3"), kernels={"toy": Selection(), "naive": Selection()}, families=kernels
    )
    spec = replace(spec, problems=(replace(spec.problems[0], kernels=("toy", "naive")),))
    (item,) = plan(spec, ARCHS["sm_90a"])
    assert [space.kernel.name for space in item.spaces] == ["toy"]
    assert item.refused == {"naive": "dtype e4m3 is not one of fp16, bf16"}


@pytest.mark.parametrize(("arch", "has"), [("sm_80", False), ("sm_86", False), ("sm_89", True)])
def test_a_card_without_fp8_is_a_reason(arch, has):
    refusal = family("q").refusal(FP8, ARCHS[arch])
    assert refusal == (None if has else f"{arch} has no FP8: it needs sm_89 or later")
    assert family("q", dtypes=("fp16",)).refusal(replace(FP8, dtype="fp16"), ARCHS[arch]) is None


@pytest.mark.parametrize("head_dim", [8, 72, 100])
def test_a_head_dim_that_no_fp8_tile_takes_is_an_error_with_its_place(tmp_path, head_dim):
    text = SPEC.replace("head_dim: 64", f"head_dim: {head_dim}") % "e4m3_block"
    with pytest.raises(SpecError, match=f"head_dim {head_dim}: FP8 tiles have rows of 16") as wrong:
        loaded(tmp_path, text)
    assert "spec.yaml:2" in str(wrong.value)
    with pytest.raises(ProblemError, match="use a multiple of 16"):
        read_shapes([f"1,4,256,{head_dim}", "e4m3"])


def test_a_workspace_may_not_take_the_name_of_a_scale():
    kernel = family("o", dtypes=("fp16", "e4m3"), workspace={"k_scale": 16})
    config = Config({"A": 1})
    with pytest.raises(KernelError, match="'k_scale', which is one of the call's own tensors"):
        kernel.workspaces(config, FP8)
    assert kernel.workspaces(config, replace(FP8, dtype="fp16")) == {"k_scale": 16}


def test_fp8_has_twice_the_matrix_rate_and_moves_less():
    class Chip:
        sm_count, clock_hz, memory_bytes_per_second = 132, 1.98e9, 4.8e12

    of_fp8 = bounds(FP8, ARCHS["sm_90a"], Chip)
    of_bf16 = bounds(replace(FP8, dtype="bf16"), ARCHS["sm_90a"], Chip)
    assert of_fp8["matrix"] == pytest.approx(of_bf16["matrix"] / 2)
    assert of_fp8["exp2"] == of_bf16["exp2"]
    assert 0.5 < of_fp8["memory"] / of_bf16["memory"] < 1


# -- limits -----------------------------------------------------------------------------------


def test_sums_of_few_bits_shrink_the_output_and_are_admitted():
    """Over 4096 keys, FP8 sums that are cut lose 0.4 %: far over what other dtypes may."""
    case = Case(Problem(1, 4, 4, 1024, 4096, 64, "e4m3"))
    limits, same = verify_limits.limits(case, 0), verify_limits.same_maths(case, 0)
    assert 1e-3 < same.gain < limits.gain
    assert limits.gain == 2 * same.gain
    assert limits.gain < 0.02  # a factor of 2 % would still be found


def test_p_in_two_bits_of_mantissa_is_refused():
    case = Case(Problem(1, 4, 4, 512, 512, 64, "e4m3"))
    inputs, rows = verify_inputs.make_inputs(case, 1), np.arange(512)
    exact = rounded.reference(inputs, case.problem, rows)
    right = measures.measures(rounded.reference(inputs, case.problem, rows, ForwardMaths(True)), exact, "bf16")
    limits = verify_limits.limits(case, 0)
    assert max(right.shares(limits).values()) <= 1
    wrong = exact + 2 * (rounded.reference(inputs, case.problem, rows, ForwardMaths(True)) - exact)
    assert max(measures.measures(wrong, exact, "bf16").shares(limits).values()) > 1


@pytest.mark.parametrize("kind", ["normal", "far_below", "far_above", "large_scores"])
def test_a_log_sum_exp_may_err_by_what_scores_of_few_bits_cost(kind):
    case = Case(Problem(1, 2, 2, 70, 200, 128, "e4m3"), kind)
    inputs, rows = verify_inputs.make_inputs(case, 5), np.arange(70)
    exact = rounded.log_sum_exp(inputs, case.problem, rows)
    off = np.abs(
        rounded.log_sum_exp(inputs, case.problem, rows, in_fp8=ForwardMaths(True, by_term=kind != "normal")) - exact
    )
    limit = verify_limits.lse_limit(case)
    assert (off / np.maximum(1, np.abs(exact))).max() <= limit < 0.02
    assert verify_limits.lse_limit(replace(case, problem=replace(case.problem, dtype="bf16"))) == 1e-4


@pytest.mark.parametrize(
    ("shape", "kind"), [((1, 1, 1), "normal"), ((1, 65, 64), "equal_keys"), ((2, 126, 122), "normal")]
)
def test_log_sum_exp_limits_admit_other_draws(shape, kind):
    # The rows of a head err alike, so that limits of one draw refused 2 to 6 % of the others.
    heads, seqlen_q, seqlen_k = shape
    case = Case(Problem(1, heads, heads, seqlen_q, seqlen_k, 64, "e4m3_block"), kind)
    limit, rows = verify_limits.lse_limit(case), np.arange(seqlen_q)
    maths = rounded.ForwardMaths(True, by_term=kind != "normal")
    for seed in range(60):
        inputs = verify_inputs.make_inputs(case, seed)
        exact = rounded.log_sum_exp(inputs, case.problem, rows)
        off = np.abs(rounded.log_sum_exp(inputs, case.problem, rows, in_fp8=maths) - exact)
        assert (off / np.maximum(1, np.abs(exact))).max() < 0.95 * limit, seed

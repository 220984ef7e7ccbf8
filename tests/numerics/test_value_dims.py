"""v and o with rows of another length than q's and k's: what they count, and what can do them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.baselines.registry import BACKENDS
from attnsweep.core.cases import Case, small_cases
from attnsweep.core.errors import ProblemError
from attnsweep.core.hardware import arch_named
from attnsweep.core.layouts import DENSE, Paged
from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.specs.starter import Request, Target, starter
from attnsweep.store.run import open_run
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.limits import limits
from attnsweep.verify.measures import measures
from attnsweep.verify.rounded import ForwardMaths, reference

ARCH, FAMILIES = arch_named("sm_90a"), discover()
FAMILY = FAMILIES["flash_fwd_wgmma"]
MLA = Problem.parse("(1,16,2048,192/128) bf16 causal")
FORWARD_INPUTS = sorted({kind for *_, kind, _ in FORWARD.small_cases})
DIM = st.integers(1, 32).map(lambda eighths: 8 * eighths)


# -- problems -------------------------------------------------------------------------------------


@given(DIM, DIM, st.sampled_from(["fp16", "bf16", "fp32"]), st.booleans())
def test_tensors_and_counts_follow_both(head_dim, of_v, dtype, causal):
    p = Problem(2, 4, 2, 9, 30, head_dim, dtype, causal=causal, head_dim_v=of_v)
    shapes = {name: p.shape_of(name)[3] for name in "qkvo"}
    assert shapes == {"q": head_dim, "k": head_dim, "v": of_v, "o": of_v}
    assert p.shape_of("v")[:3] == p.shape_of("k")[:3]
    assert p.shape_of("o")[:3] == p.shape_of("q")[:3]
    assert p.flops == 2 * p.pairs * head_dim + 2 * p.pairs * of_v
    item = 4 if dtype == "fp32" else 2
    assert p.min_bytes == item * (head_dim + of_v) * (2 * 4 * 9 + 2 * 2 * 30)
    assert p.scale == 1 / math.sqrt(head_dim)
    assert (p == replace(p, head_dim_v=None)) == (head_dim == of_v)
    code = replace(p, head_dim_v=None).variant
    assert p.variant == (code if head_dim == of_v else f"{code} v{of_v}")


def test_what_says_nothing_new_is_left_out():
    """Rows and fingerprints of recorded runs hold these forms."""
    plain = Problem(1, 16, 16, 2048, 2048, 192, "bf16", causal=True)
    same = Problem(1, 16, 16, 2048, 2048, 192, "bf16", causal=True, head_dim_v=192)
    assert same == plain
    assert hash(same) == hash(plain)
    assert repr(same) == (
        "Problem(batch=1, heads=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048, head_dim=192, dtype='bf16', causal=True)"
    )
    assert repr(MLA) == repr(same)[:-1] + ", head_dim_v=128)"
    assert MLA != same
    assert MLA.label == "(1,16,2048,192/128) bf16 causal"
    assert replace(plain, head_dim=64).value_dim == 64
    assert replace(MLA, head_dim=128).facts == replace(plain, head_dim=128).facts


def test_a_value_in_the_key_is_no_input():
    p = Problem.parse("(128,16/1,2x4096,576/512) bf16 causal paged(64) value_in_key")
    assert Problem.of(p.facts) == Problem.parse(p.label) == p
    assert p != replace(p, head_dim=512, head_dim_v=None)
    assert p.inputs == ("q", "k", "seqused_k", "block_table")
    assert p.shape_of("o") == (128, 16, 2, 512)
    assert p.flops == 2 * p.pairs * (576 + 512)
    table = 4 * 128 * (1 + 64)
    assert p.min_bytes == 2 * 128 * (4096 * 576 + 16 * 2 * (576 + 512)) + table
    assert p.variant == "paged v512 value_in_key"
    assert "value_in_key" not in replace(p, value_in_key=False, layout=DENSE).facts
    uneven = Problem.parse("(3,16/1,1x4096,576/512) bf16 causal paged(64,1x4k+2x100) value_in_key")
    assert uneven.min_bytes == 2 * (4296 * 576 + 3 * 16 * (576 + 512)) + 4 * 3 * 65


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("(1,16/1,1x64,512/576) bf16 full paged(64) value_in_key", "a key has no 576 elements to be its value"),
        ("(1,16/1,1x64,576/512) bf16 full paged(64)", "a paged cache has no head_dim_v beside it"),
        ("(1,16/1,1x64,64) bf16 full paged(64,e4m3) value_in_key", "has no e4m3 with value_in_key beside it"),
        ("(1,16/1,1x64,64) e4m3 full value_in_key", "FP8 has no value_in_key"),
        ("(1,16/1,64,64) bf16 full value_in_key backward", "a backward has no value_in_key"),
    ],
)
def test_what_a_value_in_the_key_cannot_be_beside(label, said):
    with pytest.raises(ProblemError, match=said):
        Problem.parse(label)


@pytest.mark.parametrize("inputs", FORWARD_INPUTS)
def test_inputs_whose_value_is_in_the_key_are_as_hard(inputs):
    """Scores and outputs of rounded maths are finite, and as far from exact as with a v apart."""
    apart = Problem.parse("(1,2/1,64x200,96/64) bf16 full")
    tied = replace(apart, value_in_key=True)
    errors = []
    for problem in (apart, tied):
        case, rows = Case(problem, inputs), np.arange(64)
        given = make_inputs(case, 1)
        assert ("v" in given) == (problem is apart)
        exact, rounded = reference(given, problem, rows), reference(given, problem, rows, ForwardMaths(True))
        errors.append(measures(rounded, exact, "bf16").row)
    assert 0.4 < errors[1] / max(errors[0], 1e-9) < 2.5 or errors == [0, 0]


# -- specs and shapes -----------------------------------------------------------------------------


def test_a_starter_spec_has_the_space_made_for_it():
    made = starter(Request([MLA], "mine"), Target(ARCH), FAMILIES)
    assert "head_dim: 192, head_dim_v: 128" in made
    assert "its space is that of value_dims.yaml" in made


# -- who can --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_v", "nearest"), [(12, 16), (264, 256), (4, 8)])
def test_a_family_tells_the_nearest_that_it_has(of_v, nearest):
    said = FAMILY.refusal(replace(MLA, head_dim_v=of_v), ARCH)
    steps = f"8 to 256 in steps of 8; the nearest is {nearest}"
    assert said == f"head_dim_v {of_v} is not one of {steps}"


def test_families_without_it_say_so():
    able = {name for name, kernel in FAMILIES.items() if kernel.refusal(MLA, ARCH) is None}
    assert able == {"flash_fwd_wgmma"}
    other = replace(MLA, head_dim=64)
    assert FAMILIES["naive"].refusal(replace(other, head_dim_v=None), ARCH) is None
    expected = "v has as many columns as q and k, and not head_dim_v 128"
    assert FAMILIES["naive"].refusal(other, ARCH) == expected


def test_each_baseline_takes_it_or_says_why_not():
    short = replace(MLA, mask=Problem.parse("1,1,1,8 fp16 window(3,3)").mask)
    reasons = {n: BACKENDS[n].supports(MLA) and BACKENDS[n].supports(short) for n in BACKENDS}
    able = {"torch_flash", "torch_cudnn", "torch_efficient", "torch_math", "unfused", "flex"}
    able |= {"cudnn", "flash_attn_3", "flash_attn_3_fp8", "flash_attn_4"}
    assert {name for name, reason in reasons.items() if reason is None} == able
    for name in ("triton_flash", "flash_attn_2"):
        assert reasons[name] == f"{name} has no head_dim_v: v has as many columns as q"
        assert BACKENDS[name].supports(replace(MLA, head_dim_v=None)) is None


def test_who_can_read_values_in_keys():
    latent = Problem.parse("(128,16/1,1x4096,576/512) bf16 causal paged(64) value_in_key")
    able = {name for name, kernel in FAMILIES.items() if kernel.refusal(latent, ARCH) is None}
    assert able == {"flash_mla_wgmma"}
    own = FAMILIES["flash_mla_wgmma"]
    assert own.refusal(MLA, ARCH) == "reads no v apart from k"
    assert own.refusal(replace(latent, layout=Paged(16)), ARCH) == "serves only pages of 64 keys"
    able = {name for name, each in BACKENDS.items() if each.supports(latent) is None}
    assert able == {"flash_attn_3", "flash_attn_3_ready", "flash_mla", "torch_dense", "torch_gathered"}
    apart = Problem.parse("(128,16/1,1x4096,128) bf16 causal paged(64)")
    assert BACKENDS["flash_mla"].supports(apart) == "flash_mla does value_in_key alone"


# -- the oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["192/128", "96/64", "64/128", "8/256", "24/8"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_limits_admit_rounding_and_refuse_columns_in_the_place_of_others(dims, mask):
    problem = Problem.parse(f"(2,4/2,40x70,{dims}) fp16 {mask}")
    inputs, rows = make_inputs(Case(problem), 1), np.arange(40)
    expected, rounded = reference(inputs, problem, rows), reference(inputs, problem, rows, ForwardMaths(True))
    for case in (Case(problem), *small_cases(problem)[2:4]):
        assert limits(case, 0).row > 0
    shares = measures(rounded, expected, "fp16").shares(limits(Case(problem), 0))
    assert max(shares.values()) <= 1
    wrong = rounded.copy()
    wrong[..., -8:] = wrong[..., :8]
    shares = measures(wrong, expected, "fp16").shares(limits(Case(problem), 0))
    assert (max(shares.values()) > 1) == (problem.value_dim > 8)


# -- a sweep, on a stand-in for the GPU -----------------------------------------------------------


def test_a_shape_is_tuned_reported_and_explained(tuned, attnsweep, tmp_path):
    slower = {"BLOCK_N=64": 100.0, "MAXIMA=2": 50.0}
    run = tuned("1,16,2048,192/128 bf16 causal", "flash_fwd_wgmma", 50.0, slower)
    assert run.name == "tune-1-16-2048-192v128-bf16-causal"
    assert {row.problem for row in open_run(run).trials} == {MLA}
    assert attnsweep("report", run, "--html", tmp_path / "page.html").returncode == 0
    listed = attnsweep("list", "flash_fwd_wgmma").stdout
    assert "head_dim_v 8 to 256 in steps of 8" in " ".join(listed.split())

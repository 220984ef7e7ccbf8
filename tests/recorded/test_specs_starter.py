"""Specs made for a card: which space a problem gets, and what the text says."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.core.errors import KernelError, SpaceError, SpecError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec, spec_of
from attnsweep.specs.plan import plan
from attnsweep.specs.shipped import shipped_specs
from attnsweep.specs.starter import Request, Target, run_name, starter
from attnsweep.specs.yaml_file import Document

FAMILIES = discover()
HOPPER = Target(ARCHS["sm_90a"])
SHAPE = Problem(4, 32, 8, 1, 4096, 128, "bf16")


def made(*problems, target=HOPPER, kernels=(), **search):
    text = starter(Request(problems, "mine", kernels, search=search), target, FAMILIES)
    return spec_of(Document.parse(Path("mine.yaml"), text), FAMILIES), text


@pytest.mark.parametrize(
    ("arch", "gpu", "spec"),
    [
        ("sm_90a", "NVIDIA H100 80GB HBM3", "h100"),
        ("sm_90a", "NVIDIA H200", "h200"),
        ("sm_80", "NVIDIA A100-SXM4-80GB", "a100"),
        ("sm_86", "NVIDIA A10G", "l4"),
        ("sm_89", "NVIDIA L4", "l4"),
        ("sm_120a", "NVIDIA GeForce RTX 5090", "l4"),
        ("sm_100a", "NVIDIA B200", "a100"),
        ("sm_90a", "", "h100"),
    ],
)
def test_the_spec_of_a_card(arch, gpu, spec):
    assert Target(ARCHS[arch], gpu).spec == spec


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_has_a_spec_and_a_warning_where_none_was_made_on_it(arch):
    target = Target(ARCHS[arch])
    made_on = {load_spec(shipped_specs()[name]).arch for name in ("a100", "l4", "h100", "h200")}
    assert (target.untried is None) == (arch in made_on)
    spec, _ = made(SHAPE, target=target)
    assert spec.arch == arch


ORDINARY = Problem(8, 16, 16, 2048, 2048, 128, "bf16")


def test_the_space_is_the_shipped_one_with_its_comments():
    spec, text = made(ORDINARY)
    shipped = load_spec(shipped_specs()["h100"])
    assert spec.kernels == {"flash_fwd_wgmma": shipped.kernels["flash_fwd_wgmma"]}
    assert (spec.baselines, spec.measure) == (shipped.baselines, shipped.measure)
    assert "rules keep it where each SM has two tiles" in text
    assert "unfused attention takes" not in text, "a comment of what comes after the family"


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 32, 8, 1, 32768, 128), "few_queries"),
        ((8, 32, 8, 16, 4096, 128), "few_queries"),
        ((1, 20, 20, 1, 1500, 64), "few_queries"),
        ((1, 16, 8, 1, 4096, 256), "few_queries"),
        ((1, 16, 16, 1024, 1024, 64), "flash_short"),
        ((4, 16, 16, 2048, 2048, 192), "flash_dims"),
        ((8, 16, 16, 729, 729, 72), "head_dims"),
        ((1, 32, 32, 131072, 131072, 128), "flash_training"),
        ((8, 16, 16, 2048, 2048, 128), "h100"),
    ],
)
def test_the_space_follows_the_shape(shape, name):
    spec, text = made(Problem(*shape, "bf16"))
    shipped = load_spec(shipped_specs()[name])
    assert spec.kernels == {"flash_fwd_wgmma": shipped.kernels["flash_fwd_wgmma"]}
    assert f"its space is that of {name}.yaml" in text
    assert spec.baselines == load_spec(shipped_specs()["h100"]).baselines


def test_shapes_of_several_kinds_have_a_space_each():
    spec, _ = made(ORDINARY, SHAPE, Problem(1, 16, 16, 1024, 1024, 64))
    ours = "flash_fwd_wgmma"
    assert [entry.kernels for entry in spec.problems] == [(ours,), (f"{ours}_few_queries",), (f"{ours}_flash_short",)]
    assert spec.used == (ours,)
    again = spec_of(Document.parse(Path("mine.yaml"), spec.resolved()), FAMILIES)
    assert again == spec
    for item, name in zip(plan(spec, ARCHS["sm_90a"]), ("h100", "few_queries", "flash_short"), strict=True):
        alone, _ = made(item.problem)
        (same,) = plan(alone, ARCHS["sm_90a"])
        assert item.spaces[0].configs == same.spaces[0].configs, name
        assert item.spaces[0].kernel.name == ours


def test_a_recording_has_the_candidates_of_the_cards_own_spec(tmp_path):
    spec, _ = made(SHAPE, target=Target(ARCHS["sm_90a"], recording=tmp_path))
    assert spec.kernels["flash_fwd_wgmma"] == load_spec(shipped_specs()["h100"]).kernels["flash_fwd_wgmma"]


NAMED = """
arch: sm_90a
problems:
  - {batch: 1, heads: 4, seqlen: 256, head_dim: 64}
  - {batch: 1, heads: 4, seqlen: 512, head_dim: 64, kernels: wide}
kernels:
  flash_fwd_wgmma: {BLOCK_N: 64}
  wide: {family: flash_fwd_wgmma, BLOCK_N: 128}
"""


def test_a_family_may_have_several_spaces():
    spec = spec_of(Document.parse(Path("mine.yaml"), NAMED), FAMILIES)
    tiles = [{config["BLOCK_N"] for config in item.spaces[0].configs} for item in plan(spec, ARCHS["sm_90a"])]
    assert tiles == [{64}, {128}]
    both = NAMED.replace("kernels: wide", "kernels: [flash_fwd_wgmma, wide]")
    with pytest.raises(SpecError, match="gets two spaces of flash_fwd_wgmma"):
        spec_of(Document.parse(Path("mine.yaml"), both), FAMILIES)
    odd = NAMED.replace("family: flash_fwd_wgmma", "family: flash_fwd_wgma")
    with pytest.raises(SpecError, match="did you mean 'flash_fwd_wgmma'"):
        spec_of(Document.parse(Path("mine.yaml"), odd), FAMILIES)


def test_each_problem_gets_the_first_spec_that_has_a_family_for_it():
    wide = Problem(1, 4, 4, 16, 16, 2048, "fp32")
    spec, _ = made(SHAPE, wide)
    assert [entry.kernels for entry in spec.problems] == [
        ("flash_fwd_wgmma",),
        ("flash_fwd_fp32_wide", "flash_fwd_fp32_wgmma"),
    ]
    spec, _ = made(replace(wide, head_dim=72))
    assert [*spec.kernels] == ["flash_fwd_fp32_halves", "flash_fwd_fp32_mma"]
    spec, _ = made(wide)
    assert spec.baselines == load_spec(shipped_specs()["wide_head"]).baselines
    fp8 = load_spec(shipped_specs()["fp8_h100"])
    spec, _ = made(Problem(4, 16, 16, 4096, 4096, 128, "e4m3"))
    assert (spec.kernels, spec.baselines) == (fp8.kernels, fp8.baselines)


def test_a_shape_without_a_candidate_in_the_shipped_space_gets_the_whole_space():
    spec, text = made(Problem(4, 16, 16, 2048, 2048, 256, "e4m3"))
    assert "  flash_fwd_fp8_wgmma: {}\n" in text
    (item,) = plan(spec, ARCHS["sm_90a"])
    assert item.spaces[0].configs


def test_families_asked_for_are_taken_from_their_spec_or_whole():
    spec, _ = made(Problem(1, 16, 16, 1024, 1024, 64), kernels=("three_kernel_wgmma", "naive"))
    shipped = load_spec(shipped_specs()["h100"]).kernels["three_kernel_wgmma"]
    assert spec.kernels["three_kernel_wgmma"] == shipped
    assert spec.kernels["naive"].values == {}
    with pytest.raises(KernelError, match="did you mean 'naive'"):
        made(SHAPE, kernels=("naiv",))


def test_a_shape_that_no_space_has_is_answered_with_why_and_what_runs_it():
    with pytest.raises(SpaceError) as caught:
        made(Problem(1, 2, 2, 64, 64, 264, "fp32"))
    assert "flash_fwd_fp32_mma: head_dim 264 is not one of" in str(caught.value)
    assert "flash_fwd_wgmma: dtype fp32 is not one of" in str(caught.value)
    with pytest.raises(SpaceError, match="add --kernel flash_fwd_mma"):
        made(SHAPE, target=Target(ARCHS["sm_80"]), kernels=("flash_fwd_wgmma",))


sizes = st.integers(1, 64)
shapes = st.builds(
    lambda b, kv, group, q, k, d, dtype, causal, of_v: Problem(
        b, kv * group, kv, min(q, k), k, d, dtype, causal=causal, head_dim_v=of_v
    ),
    *(sizes, sizes, sizes, sizes, sizes),
    st.sampled_from([8, 64, 72, 96, 128, 192, 256]),
    st.sampled_from(["fp16", "bf16"]),
    st.booleans(),
    st.sampled_from([None, None, 8, 128, 256]),
)


@given(st.lists(shapes, min_size=1, max_size=2, unique=True))
def test_the_text_has_exactly_these_problems(problems):
    spec, _ = made(*problems)
    assert [entry.problem for entry in spec.problems] == problems


@pytest.mark.parametrize(
    "kind",
    [
        *("window(63,0)", "window_top_left(9,all)", "causal padded(right,40,2)", "boolean(full)"),
        *("boolean(causal,item)", "boolean(blocks,30)", "causal packed(3,0,1)", "full bias()"),
        *("full bias(item,head)", "causal softcap(50) sinks", "window(63,0) softcap(2.5)"),
    ],
)
def test_masks_layouts_and_scores_are_written(kind):
    problem = Problem.parse(f"(1,16/4,512x512,64) bf16 {kind}")
    spec, _ = made(problem)
    assert [entry.problem for entry in spec.problems] == [problem]


@pytest.mark.parametrize("layout", ["paged(16)", "paged(64,hnd,e4m3,1x0+1x40+2x4k,seed2)"])
def test_a_paged_cache_is_written_with_its_family_and_baselines(layout):
    problem = Problem.parse(f"(4,16/4,2x4096,128) bf16 causal {layout}")
    spec, _ = made(problem)
    assert [entry.problem for entry in spec.problems] == [problem]
    assert [*spec.kernels] == ["decode_paged_mma"]
    assert {"flash_attn_3_ready", "torch_gathered"} <= {*spec.baselines}
    assert "flex" not in spec.baselines


@given(st.lists(shapes, min_size=1, max_size=3, unique=True), st.randoms())
def test_a_name_is_of_the_set_of_problems(problems, random):
    name = run_name(problems)
    others = random.sample(problems, len(problems))
    assert run_name(others) == name
    assert run_name(problems, ["naive"]) not in (name, run_name(problems, ["flash_fwd_mma"]))
    named = f"name: {name}\n{NAMED}"
    assert spec_of(Document.parse(Path("mine.yaml"), named), FAMILIES).name == name


@given(shapes, shapes)
def test_two_shapes_have_two_names(one, other):
    assert (run_name([one]) == run_name([other])) == (one == other)

"""What a package launches by a family's declaration: rules by shape are enough."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.family.space import Space
from attnsweep.serve import export_code
from attnsweep.serve.runtime import families

FAMILY, FP8 = (discover()[name] for name in (export_code.FAMILY, families.FP8.kernel.name))
FAMILIES = {"16 bits": FAMILY, "fp8": FP8}
ARCH = ARCHS["sm_90a"]
FIRST = {param.name: param.values[0] for param in FAMILY.params}
# Each with a problem where its rules hold: splits, clusters, and programmatic launches.
UNUSUAL = [
    (Config(FIRST | values), problem)
    for values, problem in (
        ({"WARPGROUPS": 2, "CLUSTER": 2}, Problem(1, 16, 16, 1024, 1024, 64)),
        ({"WARPGROUPS": 2, "CLUSTER": 4, "PERSISTENT": 132}, Problem(8, 16, 4, 4096, 4096, 64)),
        ({"WARPGROUPS": 2, "SPLITS": 2, "SPLIT_CLUSTER": 1}, Problem(1, 8, 2, 100, 4096, 128, "bf16")),
        ({"WARPGROUPS": 2, "SPLITS": 3, "PDL": 2}, Problem(1, 16, 16, 100, 8192, 128)),
        ({"BLOCKS_PER_SM": 2, "SPLITS": 5, "PDL": 1}, Problem(2, 5, 5, 100, 9000, 64)),
    )
]


@cache
def space(bits: str) -> list[tuple[Config, Problem]]:
    family, fp8 = FAMILIES[bits], bits == "fp8"
    found = [] if fp8 else list(UNUSUAL)
    dtypes = FP8.dtypes if fp8 else ("fp16",) * 3
    shapes = ((1, 16, 16, 1024, 1024), (4, 32, 8, 4096, 4096), (1, 4, 1, 64, 16384))
    dims = (((64, 128, 256), False), ((128, 256, 64), True), ((72, 40, 248), False))
    for head_dims, causal in dims[:2] if fp8 else dims:
        for shape, head_dim, dtype in zip(shapes, head_dims, dtypes, strict=True):  # each takes half a second
            problem = Problem(*shape, head_dim, dtype, causal=causal)
            configs = Space.build(family, problem, ARCH).configs
            found += [(config, problem) for config in configs[:: len(configs) // 30 + 1]]
    return found


LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 8000))


@st.composite
def others(draw, bits: str) -> tuple[Config, Problem]:
    """A config, and any problem that its machine code could be run on."""
    config, suits = draw(st.sampled_from(space(bits)))
    heads_kv = draw(st.sampled_from((1, 2, 3, 4, 8, 12)))
    seqlen_q = draw(LENGTHS)
    other = replace(
        suits,
        batch=draw(st.sampled_from((1, 2, 3, 16))),
        heads=heads_kv * draw(st.sampled_from((1, 2, 4, 7))),
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=max(seqlen_q, draw(LENGTHS)) if suits.causal else draw(LENGTHS),
    )
    return config, other


def test_workspaces_are_those_that_are_declared_in_floats_without_the_log_sum_exp():
    for config, problem in UNUSUAL:
        declared = FAMILY.workspaces(config, problem)
        floats = families.workspaces(families.WGMMA, config, problem)
        assert {name: 4 * n for name, n in floats.items()} == {n: declared[n] for n in declared if n != "lse"}


# Answers of the rules, and batch and seqlen of problems that meet them; those of the last take long.
ANSWERS = {
    "16 bits": (
        {None, "block_order", "turns_of_blocks", "split_keys", "split_grid", "clusters", "short_calls", "no_idle_tile"},
        ((1, 16), (1, 700), (64, 8192), (400, 300)),
    ),
    "fp8": (
        {None, "no_idle_tile", "block_order", "turns_of_blocks", "block_limits"},
        ((1, 16), (1, 100), (1, 700), (64, 8192), (16400, 300)),
    ),
}


@pytest.mark.parametrize("bits", ANSWERS)
@settings(max_examples=140, deadline=None)
@given(data=st.data(), sm_count=st.sampled_from((78, 114, 132)))
def test_rules_are_the_declarations(bits, data, sm_count):
    config, problem = data.draw(others(bits))
    refused = FAMILIES[bits].refused_by(config, problem, replace(ARCH, sm_count=sm_count))
    assert families.refused_by(families.FP8 if bits == "fp8" else families.WGMMA, config, problem, sm_count) == refused


@pytest.mark.parametrize("bits", ANSWERS)
def test_the_rules_meet_both_answers(bits):
    """Otherwise the test above would compare nothing."""
    wanted, sizes = ANSWERS[bits]
    left = set(wanted)
    for batch, q in sizes:
        for config, suits in space(bits):
            left.discard(FAMILIES[bits].refused_by(config, replace(suits, batch=batch, seqlen_q=q, seqlen_k=q), ARCH))
            if not left:
                return
    raise AssertionError(f"no problem is answered by {left}")


@pytest.mark.parametrize("mask", ["boolean(causal)", "window(64,0)"])
def test_the_list_of_a_mask_begins_under_its_scan_and_no_call_under_them(mask):
    problem = Problem.parse(f"(1,4,512x4096,64) fp16 {mask}")
    config = Config(FIRST | {"BLOCK_N": 128, "WARPGROUPS": 2, "PDL": 1})
    got = families.launches(families.WGMMA, config, problem, 0.25)
    early = {name: launch.programmatic for name, launch in got.items()}
    assert early == {"mask": False, "order": True, "fwd": False}

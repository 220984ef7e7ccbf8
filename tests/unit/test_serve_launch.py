"""What a package works out at run time is what the family declares for a sweep."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, TensorMap
from attnsweep.family.hopper import heads_sharing_l2
from attnsweep.family.space import Space
from attnsweep.serve import export_code
from attnsweep.serve.runtime import launch

FAMILY = discover()[export_code.FAMILY]
ARCH = ARCHS["sm_90a"]
FIRST = {param.name: param.values[0] for param in FAMILY.params}
# Each with a problem where its rules hold: splits, clusters, and programmatic launches.
UNUSUAL = [
    (Config(FIRST | values), problem)
    for values, problem in (
        ({"WARPGROUPS": 2, "CLUSTER": 2}, Problem(1, 16, 16, 1024, 1024, 64)),
        (
            {"WARPGROUPS": 2, "CLUSTER": 4, "PERSISTENT": 132},
            Problem(8, 16, 4, 4096, 4096, 64),
        ),
        (
            {"WARPGROUPS": 2, "SPLITS": 2, "SPLIT_CLUSTER": 1},
            Problem(1, 8, 2, 100, 4096, 128, "bf16"),
        ),
        ({"WARPGROUPS": 2, "SPLITS": 3, "PDL": 2}, Problem(1, 16, 16, 100, 8192, 128)),
        ({"BLOCKS_PER_SM": 2, "SPLITS": 5, "PDL": 1}, Problem(2, 5, 5, 100, 9000, 64)),
    )
]


@cache
def space() -> list[tuple[Config, Problem]]:
    found = list(UNUSUAL)
    shapes = ((1, 16, 16, 1024, 1024), (4, 32, 8, 4096, 4096), (1, 4, 1, 64, 16384))
    for head_dims, causal in (((64, 128, 256), False), ((128, 256, 64), True)):
        for shape, head_dim in zip(shapes, head_dims, strict=True):  # each takes half a second
            problem = Problem(*shape, head_dim, "fp16", causal=causal)
            configs = Space.build(FAMILY, problem, ARCH).configs
            found += [(config, problem) for config in configs[:: len(configs) // 30 + 1]]
    return found


LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 8000))


@st.composite
def others(draw) -> tuple[Config, Problem, Problem]:
    """A config, a problem that it suits, and any problem that its machine code could be run on."""
    config, suits = draw(st.sampled_from(space()))
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
    return config, suits, other


@pytest.mark.parametrize(("config", "problem"), UNUSUAL, ids=map(str, range(len(UNUSUAL))))
def test_rules_hold_for_the_unusual(config, problem):
    assert FAMILY.refused_by(config, problem, ARCH) is None


@settings(max_examples=80, deadline=None)
@given(others(), st.booleans())
def test_launches_are_the_declarations(what, lse):
    config, suits, problem = what
    own = export_code.facts(FAMILY, config, suits, ARCH)
    strides = export_code.contiguous(problem)
    got = export_code.launches_of(own, problem, strides, lse=lse)
    declared = FAMILY.launches(Config({**config, "LSE": int(lse)}), problem, ARCH)
    assert list(got) == list(declared)
    layout = (problem.heads, *strides["o"])
    for name, one in declared.items():
        other = got[name]
        assert (other.function, other.grid, other.threads, other.smem_bytes) == (
            one.function,
            one.grid,
            one.threads,
            one.smem_bytes,
        )
        # A first launch has an ordinary dependency, as in Build.launches_for.
        assert other.programmatic == (one.programmatic and name != "fwd")
        added = layout if name == "fwd" else (problem.seqlen_q, *layout)
        assert other.args[len(one.args) :] == added
        for mine, theirs in zip(other.args, one.args, strict=False):
            if isinstance(theirs, TensorMap):
                columns, rows, heads, batch = mine.dims
                assert (mine.buffer, mine.box, mine.swizzle_bytes) == (
                    theirs.buffer,
                    (*theirs.box, 1),
                    theirs.swizzle_bytes,
                )
                assert (columns, rows, heads * batch) == theirs.dims
                assert mine.strides[:2] == theirs.strides
                assert mine.strides[2] == heads * mine.strides[1]
            elif isinstance(theirs, str):
                # With LSE=0 the kernel takes a pointer that it never uses.
                assert mine == theirs or (theirs == "lse" and (mine == "o" or not lse))
            else:
                assert mine == theirs
    floats = {k: 4 * v for k, v in launch.workspaces(own, export_code.shape_of(problem)).items()}
    declared_bytes = FAMILY.workspaces(config, problem)
    assert floats == {name: n for name, n in declared_bytes.items() if name != "lse"}


@settings(max_examples=80, deadline=None)
@given(others(), st.sampled_from((78, 114, 132)))
def test_rules_are_the_declarations(what, sm_count):
    config, suits, problem = what
    arch = replace(ARCH, sm_count=sm_count)
    own = export_code.facts(FAMILY, config, suits, arch)
    refused = FAMILY.refused_by(config, problem, arch)
    assert launch.refused_by(own, export_code.shape_of(problem), arch.sm_count) == refused


def test_the_rules_meet_both_answers():
    """Otherwise the test above would compare nothing."""
    wanted = {None, "block_order", "turns_of_blocks", "split_keys", "split_grid"}
    wanted |= {"clusters", "short_calls", "no_idle_tile"}
    for config, suits in space():
        for batch, q in ((1, 16), (1, 700), (64, 8192), (400, 300)):
            other = replace(suits, batch=batch, seqlen_q=q, seqlen_k=q)
            wanted.discard(FAMILY.refused_by(config, other, ARCH))
        if not wanted:
            return
    raise AssertionError(f"no problem is answered by {wanted}")


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 24),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 4000),
    st.sampled_from((132, 264)),
)
def test_groups_of_heads_are_the_declarations(heads_kv, group, seqlen, blocks):
    problem = Problem(1, heads_kv * group, heads_kv, seqlen, seqlen, 128, causal=True)
    expected = heads_sharing_l2(problem, 128, 96, blocks, 32 * 2**20)
    assert launch.heads_together(export_code.shape_of(problem), 128, 96, blocks) == expected


def test_a_huge_shape_costs_no_seconds():
    """Weighing groups of 4,096 heads of 2,048 tiles would; any group gives the right output."""
    shape = export_code.shape_of(Problem(64, 64, 64, 8192, 8192, 128, causal=True))
    assert launch.heads_together(shape, 128, 128, 132) == 8
    shape = shape._replace(seqlen_q=262144, seqlen_k=262144)
    assert launch.heads_together(shape, 128, 128, 132) == 1


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.integers(1, 30),
)
def test_the_busiest_block_is_the_one_of_blocks_that_take_turns(heads, together, costs, blocks):
    """Tile by tile: groups of heads, of each the tiles of one cost, and blocks to and fro."""
    tiles = [
        cost
        for first in range(0, heads, together)
        for cost in costs
        for _ in range(min(together, heads - first))
    ]
    work = [0] * blocks
    for item, cost in enumerate(tiles):
        turn, at = divmod(item, blocks)
        work[blocks - 1 - at if turn % 2 else at] += cost
    assert launch.busiest_turns(heads, together, tuple(costs), blocks) == max(work)

"""Many short turns, which every finalist is proved on, and who has launches for them."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
from fake_compiler import FakeCompiler
from hypothesis import assume, given
from hypothesis import strategies as st
from spaces import candidates

from attnsweep.compile.candidate import Build
from attnsweep.core import cases
from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.layouts import EXAMPLES
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Dtype, Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.family.space import Selection
from attnsweep.tools.coverage import as_served

ARCH = ARCHS["sm_90a"]
KERNELS = discover()
IN_TURNS = [name for name, k in KERNELS.items() if "PERSISTENT" in {p.name for p in k.params}]
LONG = Problem(4, 16, 16, 4096, 4096, 128)
WIDEST = 2**25


@st.composite
def problems(draw):
    causal, group = draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 8, 71]))
    kv, head_dim = draw(st.integers(1, 64)), 16 * draw(st.integers(1, 512))
    most = 2**33 // (group * kv * head_dim)  # rows of a head in all: no card holds more
    longest = min(10_000, most)
    keys = draw(st.integers(1, longest))
    queries = draw(st.integers(1, keys if causal else longest))
    batch = draw(st.integers(1, min(300, most // max(keys, queries))))
    dtype = draw(st.sampled_from(get_args(Dtype)))
    return Problem(batch, group * kv, kv, queries, keys, head_dim, dtype, causal=causal)


@given(problem=problems(), sm_count=st.integers(1, 200))
def test_short_turns_are_what_they_promise(problem, sm_count):
    case = cases.short_turns(problem, sm_count)
    assume(case is not None)
    assert case.inputs == "normal"
    short = case.problem  # which Problem did not refuse
    for fact in ("dtype", "head_dim", "causal", "scale"):
        assert getattr(short, fact) == getattr(problem, fact)
    assert short.heads * problem.heads_kv == problem.heads * short.heads_kv
    assert short.seqlen_k <= min(150, problem.seqlen_k)
    elements = short.batch * short.heads * short.seqlen_q * short.head_dim
    assert elements <= WIDEST
    assert short.bytes_of("q") + 8 * elements <= 2**28 * 1.5
    tiles = short.query_tiles(64)
    if tiles < 12 * sm_count:  # only because more would be too large
        assert elements + elements // short.batch > WIDEST
    else:
        assert tiles < 12 * sm_count + short.query_tiles(64) // short.batch


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_every_block_of_a_hopper_card_has_three_turns(head_dim, group, causal):
    problem = replace(LONG, heads_kv=16 // group, head_dim=head_dim, causal=causal)
    short = cases.short_turns(problem, 132).problem
    for block_m, blocks_per_sm in ((64, 4), (128, 2), (192, 1), (256, 1)):
        assert short.query_tiles(block_m) >= 3 * 132 * blocks_per_sm


def test_a_group_of_heads_that_is_too_large_has_no_short_turns():
    problem = Problem(1, 128, 1, 4096, 4096, 8192, "fp32")
    assert cases.short_turns(problem, 132) is None
    assert cases.short_turns(replace(problem, heads=8), 132).problem.batch == 1


# -- candidates -----------------------------------------------------------------------------------


def candidate_of(kernel, config, problem, tmp_path, **how):
    build = Build(kernel, config, problem, FakeCompiler(ARCH, tmp_path), **how)
    build.submit()
    return build.candidate()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", IN_TURNS)
def test_a_candidate_whose_blocks_take_turns_has_short_ones(name, causal, tmp_path):
    kernel = KERNELS[name]
    problem = replace(LONG, dtype=kernel.dtypes[0], causal=causal)
    in_turns = Selection({"PERSISTENT": (ARCH.sm_count,)})
    some = [*itertools.islice(candidates(kernel, problem, ARCH, in_turns, seed=1), 8)]
    assert some
    for config in some:
        made = candidate_of(kernel, config, problem, tmp_path)
        assert made.turns.problem == cases.short_turns(problem, ARCH.sm_count).problem
        (launch,) = (stage.launch for stage in made.turns.stages)
        assert launch.grid == (config.PERSISTENT * config.BLOCKS_PER_SM, 1, 1)
        (timed,) = made.timed.stages
        assert made.turns.stages[0].cubin == timed.cubin
        rows = 64 * config.WARPGROUPS // config.get("KEY_GROUPS", 1)
        assert made.turns.problem.query_tiles(rows) >= 3 * launch.grid[0]


@pytest.mark.parametrize("name", KERNELS)
def test_every_family_has_short_turns(name, tmp_path):
    kernel = KERNELS[name]
    if "fp32" in kernel.name:
        problem = Problem(1, 1, 1, 64, 64, kernel.head_dims[-1], "fp32")
    else:
        problem = Problem(2, 8, 2, 512, 512, 128, kernel.dtypes[0], op=OPS[kernel.ops[0]])
    if "dense" not in kernel.layouts:
        queries = 512 if kernel.name.startswith("append") else 1
        head_dim = 576 if kernel.value_in_key else 128
        layout = EXAMPLES[kernel.layouts[0]]
        problem = as_served(kernel, replace(problem, seqlen_q=queries, head_dim=head_dim, layout=layout))
    config = next(candidates(kernel, problem, ARCH, seed=1))
    made = candidate_of(kernel, config, problem, tmp_path)
    assert made.turns.problem == cases.short_turns(problem, ARCH.sm_count).problem


THREE = {"STATS": 0, "PDL": 0}


def three_kernel(tmp_path, modes=(), **how):
    kernel = KERNELS["three_kernel_wgmma"]
    config = {p.name: p.values[0] for p in kernel.params} | THREE | dict(modes)
    return candidate_of(kernel, Config(config), LONG, tmp_path, **how)


def test_calls_in_chunks_have_no_short_turns(tmp_path):
    assert three_kernel(tmp_path).turns is not None
    assert three_kernel(tmp_path, {"CHUNK_HEADS": 2}).turns is None
    assert three_kernel(tmp_path, workspace_limit=2**20).turns is None
    assert three_kernel(tmp_path, {"LAUNCH": "eager"}).turns is not None


def test_large_workspaces_grids_and_refusals_are_no_error_and_have_no_short_turns(tmp_path, monkeypatch):
    kernel = KERNELS["naive"]
    config = next(candidates(kernel, LONG, ARCH))

    def made():
        return candidate_of(kernel, config, LONG, tmp_path)

    assert made().turns is not None
    short, limits = cases.short_turns(LONG, ARCH.sm_count).problem, kernel.excess
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "workspace_of", lambda c, p: {"a": 2**29 if p == short else 16})
        assert made().turns is None
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "excess", lambda c, p, a: ("x", 2, 1) if p == short else limits(c, p, a))
        assert made().turns is None

    def refuses(config, problem):
        if problem == short:
            raise ValueError("not this one")
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "workspace_of", refuses)
        with pytest.raises(KernelError):
            kernel.workspaces(config, short)
        assert made().turns is None

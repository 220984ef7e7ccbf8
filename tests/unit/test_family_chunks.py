"""Chunks of a call: they cover it once, fit where they must, and compute the same."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spaces import candidates

from attnsweep.core.cases import Case
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import DTYPE_BYTES, Problem
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.family.chunks import IN_CHUNKS, ROW_UNIT, is_used, schedule_of
from attnsweep.family.discover import discover, rows_of_today
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.family.space import Selection, Space
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.rounded import reference


def family(**how):
    """A pipeline whose workspace is two bytes a score."""
    kernel = Family("toy", summary="", params=(Param("A", (1, 2), ""),), **how)
    kernel.stage("qk")(lambda *_: Launch("f", (1, 1, 1), 32, ()))
    kernel.stage("pv")(lambda *_: Launch("f", (1, 1, 1), 32, ()))
    kernel.workspace(lambda config, p: {"scores": 2 * p.batch * p.heads * p.seqlen_q * p.seqlen_k})
    return kernel


FAMILY = family()


@st.composite
def problems(draw, *, longest=1200, most_heads_kv=4):
    heads_kv, group = draw(st.integers(1, most_heads_kv)), draw(st.sampled_from([1, 2, 3, 4]))
    seqlen_q = draw(st.integers(1, longest))
    causal = draw(st.booleans())
    seqlen_k = draw(st.integers(seqlen_q if causal else 1, longest + 100))
    return Problem(draw(st.integers(1, 3)), heads_kv * group, heads_kv, seqlen_q, seqlen_k, 8, "fp16", causal=causal)


configs = st.fixed_dictionaries(
    {},
    optional={
        "CHUNK_HEADS": st.integers(0, 12),
        "CHUNK_ROWS": st.sampled_from([0, 256, 512]),
        "STREAMS": st.sampled_from([1, 2, 4]),
        "LAUNCH": st.sampled_from(["graph", "eager"]),
    },
).map(Config)


def used(problem, config):
    """A config of that problem, or of the problem without what the rule would refuse."""
    return config if is_used(config, problem) else Config({})


@given(problems(), configs, st.one_of(st.none(), st.integers(1, 10**7)))
def test_chunks_cover_every_query_of_every_head_once(problem, config, limit):
    schedule = schedule_of(FAMILY, used(problem, config), problem, limit)
    size = DTYPE_BYTES[problem.dtype]
    row_bytes = problem.head_dim * size
    touched = np.zeros(problem.batch * problem.heads * problem.seqlen_q, int)
    for piece in schedule.pieces:
        first, beyond = divmod(piece.offsets.get("q", 0), row_bytes)
        assert beyond == 0
        assert piece.offsets.get("o", 0) == piece.offsets.get("q", 0)
        rows = piece.problem.batch * piece.problem.heads * piece.problem.seqlen_q
        touched[first : first + rows] += 1
        assert piece.problem.seqlen_q <= schedule.widest.seqlen_q
        assert piece.problem.seqlen_k <= schedule.widest.seqlen_k
    assert (touched == 1).all()


@given(problems(), configs, st.integers(1, 10**7))
def test_workspaces_fit_the_limit_where_the_least_chunk_does(problem, config, limit):
    config = used(problem, config)
    if config.get("CHUNK_HEADS") or config.get("CHUNK_ROWS"):
        return  # asked for by name: refused later, not changed
    schedule = schedule_of(FAMILY, config, problem, limit)
    chunk = schedule.pieces[0].problem
    least = chunk.heads == 1 and chunk.seqlen_q <= ROW_UNIT
    assert schedule.workspaces["scores"] <= limit or (least and chunk.batch == 1)


@given(problems(), configs, st.one_of(st.none(), st.integers(1, 10**7)))
def test_streams_have_workspaces_apart(problem, config, limit):
    schedule = schedule_of(FAMILY, used(problem, config), problem, limit)
    spans = {}
    for piece in schedule.pieces:
        begin = piece.offsets.get("scores", 0)
        end = begin + FAMILY.workspaces(Config({}), piece.problem)["scores"]
        assert end <= schedule.workspaces["scores"]
        spans.setdefault(piece.stream, []).append((begin, end))
    extents = sorted((min(b for b, _ in s), max(e for _, e in s)) for s in spans.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(extents))
    assert set(spans) == set(range(schedule.streams))


# Long enough for chunks of 256 and 512 queries; the time to compute grows with its square.
@given(problems(longest=600, most_heads_kv=2), configs, st.one_of(st.none(), st.integers(1, 10**6)))
def test_chunks_compute_the_whole(problem, config, limit):
    schedule = schedule_of(FAMILY, used(problem, config), problem, limit)
    inputs = make_inputs(Case(problem), 0)
    whole = reference(inputs, problem, np.arange(problem.seqlen_q))
    flat = whole.reshape(-1)
    for piece in schedule.pieces:
        chunk, size = piece.problem, DTYPE_BYTES[problem.dtype]

        def part(name, chunk=chunk, piece=piece, size=size):
            begin = piece.offsets.get(name, 0) // size
            shape = chunk.shape_of(name)
            return inputs[name].reshape(-1)[begin : begin + np.prod(shape)].reshape(shape)

        own = reference({n: part(n) for n in "qkv"}, chunk, np.arange(chunk.seqlen_q))
        begin = piece.offsets.get("o", 0) // size
        np.testing.assert_allclose(own.reshape(-1), flat[begin : begin + own.size], rtol=1e-9, atol=1e-12)
    assert from_bits(inputs["q"], problem.dtype).shape == problem.shape_of("q")


@given(problems(longest=600, most_heads_kv=2), configs, st.sampled_from(["e4m3", "e4m3_block"]))
def test_chunks_in_fp8_have_their_own_scales(problem, config, dtype):
    problem = replace(problem, head_dim=16, dtype=dtype)
    schedule = schedule_of(FAMILY, used(problem, config), problem)
    inputs = make_inputs(Case(problem), 0)
    whole = reference(inputs, problem, np.arange(problem.seqlen_q)).reshape(-1)
    group = problem.heads // problem.heads_kv
    for piece in schedule.pieces:
        chunk, own = piece.problem, {}
        for name in problem.inputs:
            flat = inputs[name].reshape(-1)
            begin, beyond = divmod(piece.offsets.get(name, 0), flat.itemsize)
            assert beyond == 0
            # Heads of a whole call's blocks lie as far apart as the whole call's keys say; a chunk
            # that leaves out keys has one head.
            shape = chunk.shape_of(name)
            assert chunk.seqlen_k == problem.seqlen_k or chunk.heads // group <= 1
            own[name] = flat[begin : begin + np.prod(shape)].reshape(shape)
        part = reference(own, chunk, np.arange(chunk.seqlen_q)).reshape(-1)
        begin = piece.offsets.get("o", 0) // 2  # bf16
        np.testing.assert_allclose(part, whole[begin : begin + part.size], rtol=1e-9, atol=1e-12)


PROBLEM = Problem(2, 8, 2, 1024, 1024, 64)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({}, True),
        ({"CHUNK_HEADS": 16}, False),  # the whole
        ({"CHUNK_HEADS": 32}, False),
        ({"CHUNK_HEADS": 3}, False),  # parts a group of 4
        ({"CHUNK_HEADS": 2}, True),
        ({"CHUNK_HEADS": 8}, True),
        ({"STREAMS": 4}, True),
        ({"STREAMS": 32}, False),
        ({"CHUNK_HEADS": 8, "STREAMS": 4}, False),  # two chunks
        ({"CHUNK_ROWS": 256}, True),
        ({"CHUNK_ROWS": 100}, False),
        ({"CHUNK_ROWS": 1024}, False),
        ({"CHUNK_ROWS": 256, "CHUNK_HEADS": 2}, False),
        ({"CHUNK_ROWS": 512, "CHUNK_HEADS": 1, "STREAMS": 2}, True),
        ({"LAUNCH": "eager"}, True),
    ],
    ids=str,
)
def test_the_rule(config, kept):
    selection = Selection({name: (value,) for name, value in config.items()})
    space = Space.build(FAMILY, PROBLEM, ARCHS["sm_90a"], selection)
    assert len(space.configs) == (2 if kept else 0)
    assert space.removed.get(IN_CHUNKS.rule, 0) == (0 if kept else 2)


def test_chunks_without_end_are_no_way_to_issue_a_call():
    long = Problem(2**31 - 1, 1, 1, 1, 1, 1)
    assert not is_used({"CHUNK_HEADS": 1}, long)
    assert is_used({"CHUNK_HEADS": 2**15}, long)


def test_an_auto_chunk_is_of_heads_first_and_then_of_queries():
    def chunk(limit):
        facts = schedule_of(FAMILY, Config({}), PROBLEM, limit).facts
        return facts["chunks"], facts["heads"], facts["rows"]

    head = 2 * 1024 * 1024
    assert chunk(None) == chunk(16 * head) == (1, 16, 1024)
    assert chunk(16 * head - 1) == chunk(12 * head) == (2, 12, 1024)
    assert chunk(2 * head) == (8, 2, 1024)
    assert chunk(head) == (16, 1, 1024)
    assert chunk(head - 1) == chunk(head // 4) == (64, 1, 256)
    assert chunk(1) == (64, 1, 256)


class TestVariants:
    SELECTION = Selection(
        {"A": (1, 2)}, {"tile": {"one": {"A": (1,)}, "any": {}}, "mode": {"graph": {}, "streams": {"STREAMS": (2,)}}}
    )

    def test_one_of_each_axis_and_each_config_once(self):
        space = Space.build(FAMILY, PROBLEM, ARCHS["sm_90a"], self.SELECTION)
        assert {(c["A"], c["STREAMS"]): space.variants[c] for c in space.configs} == {
            (1, 1): {"tile": "one", "mode": "graph"},
            (1, 2): {"tile": "one", "mode": "streams"},
            (2, 1): {"tile": "any", "mode": "graph"},
            (2, 2): {"tile": "any", "mode": "streams"},
        }
        assert space.total == 4


IN_PARTS = [each for each in discover().values() if "forward" in each.ops and "dense" in each.layouts]


@pytest.mark.nightly(push=6)
@pytest.mark.parametrize("kernel", IN_PARTS, ids=str)
def test_no_rule_of_a_family_trips_over_a_mode(kernel):
    """On configs that all rules keep without a mode: each rule is asked about each."""
    arch = ARCHS["sm_90a"]
    dtype, head_dim = kernel.dtypes[0], kernel.some_head_dims[0]
    rows, keys = (1024, 1024) if head_dim <= 256 else (512, 256)  # wide heads are of few
    problem = Problem(2, 4, 4, rows, keys, head_dim, dtype)
    assert kernel.refusal(problem, arch) is None
    plain = list(itertools.islice(candidates(kernel, problem, arch, seed=0), 200))
    modes = {"LAUNCH": "eager", "STREAMS": 2, "CHUNK_HEADS": 2, "CHUNK_ROWS": 256}
    assert set(modes) == {mode.name for mode in kernel.modes}
    for name, value in modes.items():
        configs = [Config({**config, name: value}) for config in plain]
        assert all(is_used(config, problem) for config in configs)
        refusals = {kernel.refused_by(config, problem, arch) for config in configs}
        assert None in refusals, f"{name}={value}: {refusals}"


# ---- configs recorded before their family had a parameter ----
def grown(absent=None):
    """A family of A that has got B since."""
    return Family("toy", summary="", params=(Param("B", (1, 0), "", absent), Param("A", (1,), "")))


def test_a_config_recorded_before_a_parameter_has_what_the_family_did_without():
    assert grown(0).changed_since({"A": 7}) is None
    assert grown(0).of_today({"A": 7}) == {"A": 7, "B": 0}
    assert list(grown(0).of_today({"A": 7})) == ["B", "A"], "in declared order"
    assert grown(0).of_today({"A": 7, "B": 1, "STREAMS": 2}) == {"A": 7, "B": 1, "STREAMS": 2}


def test_a_config_recorded_before_a_parameter_that_says_nothing_is_another():
    assert grown().changed_since({"A": 7}) == "toy gained parameter 'B'"
    assert grown().of_today({"A": 7}) == {"A": 7}
    assert grown(0).changed_since({"A": 7, "C": 1}) == "toy lost parameter 'C'"


def test_a_recorded_row_of_today():
    kernels = {"toy": grown(0)}
    facts = {"problem": Problem(1, 1, 1, 1, 1, 64), "status": Status.OK, "config": {"A": 7}}
    row = Trial(kernel="toy", provider=OURS, **facts)
    assert rows_of_today(kernels)(row).config == {"A": 7, "B": 0}
    for other in (row.with_(provider="torch"), row.with_(kernel="gone")):
        assert rows_of_today(kernels)(other) is other


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("flash_bwd_wgmma", "(4,8/2,1024,64) bf16 full backward"),
        ("flash_fwd_mma", "(4,8/2,1024,64) bf16 full padded(right,40)"),
    ],
)
def test_a_backward_and_a_padded_problem_are_one_call(name, label):
    family, problem = discover()[name], Problem.parse(label)
    config = Config({param.name: param.values[0] for param in family.params})
    assert len(schedule_of(family, config, problem, workspace_limit=1).pieces) == 1
    for mode, value in (("CHUNK_HEADS", 4), ("CHUNK_ROWS", 256), ("STREAMS", 2)):
        assert not is_used(Config({**config, mode: value}), problem)
    assert is_used(Config({**config, "LAUNCH": "eager"}), problem)


@pytest.mark.parametrize("chunks", [{"CHUNK_HEADS": 2}, {"STREAMS": 4}, {"CHUNK_ROWS": 256}])
def test_heads_behind_rows_are_one_launch(chunks):
    """Some heads of all rows, or some rows, are no tensor in that order."""
    behind = family(order="bshd")
    selection = Selection({name: (value,) for name, value in chunks.items()})
    space = Space.build(behind, PROBLEM, ARCHS["sm_90a"], selection)
    assert (space.configs, space.removed[IN_CHUNKS.rule]) == ((), 2)
    config = next(iter(Space.build(behind, PROBLEM, ARCHS["sm_90a"]).configs))
    assert len(schedule_of(behind, config, PROBLEM, workspace_limit=1).pieces) == 1

"""Inputs of a paged cache, and references on them, against a loop over pages."""

import tracemalloc

import numpy as np
import pytest

from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.paged import pages_read
from attnsweep.core.cases import Case, small_cases
from attnsweep.core.problem import Problem
from attnsweep.verify import encoding
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.paging import gathered
from attnsweep.verify.rounded import log_sum_exp

PROBLEMS = [
    Problem.parse(label)
    for label in (
        "(3,4/2,1x40,32) bf16 causal paged(16,1x40+1x0+1x17)",
        "(3,4/2,3x40,32) fp16 causal paged(16,hnd,e4m3,1x40+1x2+1x33,seed3)",
        "(4,2,2x50,16) bf16 window(9,0) paged(1,2x50+1x1+1x20,shared5)",
        "(2,6/2,4x70,16) bf16 full paged(32,e4m3) softcap(5) sinks",
        "(4,6/1,3x50,24/16) bf16 causal paged(16,1x50+1x0+1x17+1x2) value_in_key",
    )
]


@pytest.mark.parametrize("p", [p for p in PROBLEMS if not p.value_in_key], ids=str)
def test_a_plain_read_loads_each_slot_that_is_used_once_for_each_request(p):
    inputs = make_inputs(Case(p), 1)
    used, numbers = pages_read(p)
    page, slot, size = (int(numbers[name].rstrip("u")) for name in ("PAGE", "SLOT", "PAGE_SIZE"))
    assert page * 16 == inputs["k"][0].nbytes
    found = [(at, i // slot % size) for at, slots in used for i in range(page) if i // slot % size < slots]
    expected = [
        (inputs["block_table"][request][key // size], key % size)
        for request, length in enumerate(inputs["seqused_k"])
        for key in range(length)
    ]
    assert sorted(found) == sorted(expected * (page // size))


def test_a_plain_read_of_rows_that_are_no_whole_loads_says_so():
    for columns in (8, 24):
        with pytest.raises(Unavailable, match=f"16 bytes, and rows of {columns} columns"):
            pages_read(Problem.parse(f"(2,4/2,1x64,{columns}) bf16 full paged(16,e4m3)"))


def by_loops(inputs, p):
    """Attention of each query over the slots of its pages, and its log-sum-exp."""
    layout, stored = p.layout, p.layout.cache_dtype or p.dtype
    q = encoding.from_bits(inputs["q"], p.dtype).astype(np.float64)
    k = encoding.from_bits(inputs["k"], stored).astype(np.float64)
    v = k[..., : p.value_dim] if p.value_in_key else encoding.from_bits(inputs["v"], stored).astype(np.float64)
    out, lse = np.zeros((p.batch, p.heads, p.seqlen_q, p.value_dim)), np.full((p.batch, p.heads, p.seqlen_q), -np.inf)
    left, right = p.mask.interval.sides
    for b, h, i in np.ndindex(p.batch, p.heads, p.seqlen_q):
        length, kv = int(inputs["seqused_k"][b]), h // (p.heads // p.heads_kv)
        scores, values = [], []
        for j in range(length):
            beside = j - (length - p.seqlen_q + i)
            if (right is not None and beside > right) or (left is not None and -beside > left):
                continue
            page, slot = inputs["block_table"][b, j // layout.page_size], j % layout.page_size
            at = (page, slot, kv) if layout.order == "nhd" else (page, kv, slot)
            k_scale, v_scale = (inputs[f"{n}_scale"][b, kv] if p.scales else 1.0 for n in "kv")
            score = q[b, h, i] @ (k[at] * np.float64(k_scale)) * p.scale
            cap = p.scores.softcap
            scores.append(cap * np.tanh(score / cap) if cap else score)
            values.append(v[at] * np.float64(v_scale))
        sink = float(inputs["sinks"][h]) if p.scores.sinks else -np.inf
        most = max([*scores, sink])
        if most == -np.inf:
            continue
        weights = np.exp(np.array(scores) - most)
        total = weights.sum() + np.exp(sink - most)
        out[b, h, i] = weights @ np.array(values) / total if scores else 0
        lse[b, h, i] = most + np.log(total)
    return out, lse


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_references_of_a_paged_cache_are_those_of_a_loop_over_its_pages(problem):
    inputs = make_inputs(Case(problem), 1)
    out, lse = by_loops(inputs, problem)
    exact, _ = oracle_of(problem).exact(inputs, problem)
    np.testing.assert_allclose(exact["o"], out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(log_sum_exp(inputs, problem, np.arange(problem.seqlen_q)), lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_what_no_request_has_is_nan_or_no_page(problem):
    inputs, layout = make_inputs(Case(problem), 1), problem.layout
    pages = problem.shape_of("k")[0]
    used = np.zeros((pages, layout.page_size), bool)
    for b, length in enumerate(inputs["seqused_k"]):
        blocks = -(-length // layout.page_size)
        row = inputs["block_table"][b]
        assert ((row[:blocks] >= 0) & (row[:blocks] < pages)).all()
        assert ((row[blocks:] < 0) | (row[blocks:] >= pages)).all()
        keys = np.arange(length)
        used[row[keys // layout.page_size], keys % layout.page_size] = True
    for name in {"k", "v"} & inputs.keys():
        values = encoding.from_bits(inputs[name], layout.cache_dtype or problem.dtype)
        slots = values if layout.order == "nhd" else values.swapaxes(1, 2)
        assert np.isnan(slots[~used]).all()
        assert np.isfinite(slots[used]).all()


def test_requests_that_share_pages_see_the_same_keys():
    problem = PROBLEMS[2]
    inputs = make_inputs(Case(problem), 1)
    made, _ = gathered(inputs, problem)
    keys = [made["k"][b, :, problem.seqlen_k - n :] for b, n in enumerate(inputs["seqused_k"])]
    one, *others = sorted(keys, key=lambda own: -own.shape[1])
    for other in others:
        both = min(5, other.shape[1])
        assert (one[:, :both] == other[:, :both]).all()
    assert not (one[:, 5:] == others[0][:, 5:]).any(axis=-1).all()


@pytest.mark.parametrize("problem", [*PROBLEMS, Problem.parse("(64,32/8,1x4096,128) bf16 causal paged(16,63x9+1x4k)")])
def test_small_cases_of_a_paged_problem_are_compiled_as_it_is(problem):
    cases = small_cases(problem)
    assert {len(c.problem.layout.lengths) for c in cases} >= {1, 4, 7}
    assert any(0 in c.problem.layout.lengths for c in cases)
    assert {c.inputs for c in cases if c.problem.layout.shared} == {"normal"}  # or they were not as hard
    for case in cases:
        own, whole = case.problem.layout, problem.layout
        assert (own.page_size, own.order, own.cache_dtype) == (whole.page_size, whole.order, whole.cache_dtype)
        assert case.problem.seqlen_q <= problem.seqlen_q
        assert case.problem.seqlen_k <= problem.seqlen_k
        assert Problem.parse(case.problem.label) == Problem.of(case.problem.facts) == case.problem


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("inputs", ["normal", "huge_scores"])
def test_one_long_request_among_short_ones_costs_no_keys_that_none_has(inputs, dtype, constants):
    stored = ",e4m3" * (dtype == "e4m3")
    p = Problem.parse(f"(16,4/2,1x4096,64) bf16 causal paged(16,1x4k+15x20{stored})")
    whole = make_inputs(Case(p, inputs), 1)
    constants(verify_inputs, _MANY=2**20)
    tracemalloc.start()
    made = make_inputs(Case(p, inputs), 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2 * 4096 * 64 * 4  # float32 values of every item's 4,096 keys, of one tensor
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in whole.items()}
    for name in "kv":
        used = encoding.from_bits(made[name], dtype).reshape(-1, 64)
        rows = used[~np.isnan(used).any(1)]
        assert len(rows) == 2 * (4096 + 15 * 20)
        pages = made[name][~np.isnan(encoding.from_bits(made[name], dtype)).all((1, 2, 3))].reshape(-1, 16 * 2 * 64)
        assert len(np.unique(pages, axis=0)) == len(pages)
    q = encoding.from_bits(made["q"], "bf16")
    if stored:  # what a head of keys is times as large, its queries are times as small
        assert len(np.unique(made["k_scale"])) == len(np.unique(made["v_scale"])) == made["k_scale"].size
        assert made["k_scale"].max() > 100 * made["k_scale"].min()
        q = q * (verify_inputs._FULL_SCALE * made["k_scale"].repeat(2, axis=1)[:, :, None, None])
        kept = encoding.from_bits(made["k"], dtype)
        assert np.nanstd(kept) == pytest.approx(verify_inputs._FULL_SCALE, rel=0.05)
    assert q.std() == pytest.approx({"normal": 1, "huge_scores": 64}[inputs], rel=0.05)


@pytest.mark.parametrize("many", [1, 2**29], ids=["windows", "drawn"])
@pytest.mark.parametrize("inputs", ["normal", "large_scores", "huge_scores"])
@pytest.mark.parametrize("scale", [2**-4.5, 1e-3, 1e-5, 64])
@pytest.mark.parametrize("label", ["64x70,64) fp16 causal paged(16,e4m3,1x70+1x17+1x0)", "64x64,64) fp16 full"])
def test_queries_of_fp16_have_room_for_a_scale_of_the_problems_own(label, scale, inputs, many, constants):
    constants(verify_inputs, _MANY=many)
    p = Problem.parse(f"(3,4/2,{label} scale({scale})")
    made = make_inputs(Case(p, inputs), 7)
    assert np.isfinite(encoding.from_bits(np.asarray(made["q"]), "fp16")).all()
    if made.keys() & {"k_scale"}:
        out, _ = by_loops(made, p)
        np.testing.assert_allclose(oracle_of(p).exact(made, p)[0]["o"], out, rtol=0, atol=1e-12 * np.abs(out).max())

"""flash_mla_wgmma on the CPU: schedules, splits, lengths, rows by query, and what should not lie on a device."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.oracle import oracle_of

from .harness import ARCH, COMPILER, SimtError, Simulator, config_of

KERNEL = discover()["flash_mla_wgmma"]
# At the end of its arguments: rows from query to query, pages of a request, columns of the table, factor.
QUERIES_APART = -4
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def latent(heads: int, queries: int, lengths: str, dtype: str = "bf16", mask: str = "causal") -> Problem:
    """A problem of MLA's decoding, of requests of such lengths."""
    every = [(int(count), int(keys)) for count, keys in (one.split("x") for one in lengths.split("+"))]
    batch, longest = sum(count for count, _ in every), max(keys for _, keys in every)
    said = f"({batch},{heads}/1,{queries}x{longest},576/512) {dtype} {mask} paged(64,{lengths}) value_in_key"
    return Problem.parse(said)


# SMs, config and problem. Few SMs: a block of a plan has several requests.
RUNS = (
    (132, "LAG=0", latent(16, 1, "1x640")),
    (132, "LAG=1", latent(16, 4, "1x640")),
    (132, "LAG=1 BLOCK_N=32", latent(20, 1, "1x640", "fp16", "full")),
    (132, "LAG=0 BLOCK_N=32", latent(3, 2, "1x640")),
    (132, "LAG=1 SPLITS=4", latent(16, 1, "1x640", "fp16")),
    (132, "LAG=0 SPLITS=2", latent(66, 1, "1x640")),
    (132, "LAG=1 BLOCK_N=32 SPLITS=16", latent(16, 2, "1x640", "bf16", "full")),
    (132, "LAG=1 PLAN=2", latent(16, 1, "1x640")),
    (5, "LAG=0 PLAN=4", latent(66, 1, "1x640", "fp16")),
    (2, "LAG=1 BLOCK_N=32 PLAN=2", latent(16, 2, "1x640", "bf16", "full")),
    (1, "LAG=0 PLAN=2", latent(16, 1, "1x640")),
    (132, "LAG=1 PLAN=2 JOIN=1", latent(16, 1, "1x640")),
    (7, "LAG=0 PLAN=4 JOIN=1", latent(66, 1, "1x640", "fp16")),
    (5, "LAG=1 BLOCK_N=32 PLAN=2 JOIN=1", latent(20, 3, "1x640", "bf16", "full")),
)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("sms", "words", "problem"), RUNS)
def test_right_whatever_the_lengths(simulator, some, sms, words, problem):
    config, arch = config_of(KERNEL, f"{words} LSE=1"), replace(ARCH, sm_count=sms)
    for case in some(small_cases(problem), 1):
        own = case.problem
        case = replace(case, problem=replace(own, heads=max(own.heads // own.heads_kv, 2), heads_kv=1))
        result = simulator.check(KERNEL, config, case, schedules=range(4), arch=arch)
        assert result.ok, (config.label, case.label, str(result))


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("number", range(60))
def test_random_config_of_random_requests_is_right(simulator, drawn_by, number):
    """Whatever the rules say of them: machine code serves problems that other configs are better for."""
    rng = random.Random(f"{drawn_by} mla {number}")
    queries = rng.choice((1, 1, 2, 4))
    edges = (0, 1, queries, 31, 33, 63, 64, 65, 129, rng.randint(1, 400))
    lengths = [rng.choice(edges) for _ in range(rng.choice((1, 2, 4)))]
    lengths[0] = max(lengths[0], 1)
    heads = rng.choice((1, 5, 16, 16, 64, 70))
    mask, dtype = rng.choice(("full", "causal")), rng.choice(KERNEL.dtypes)
    problem = latent(heads, queries, "+".join(f"1x{length}" for length in lengths), dtype, mask)
    inputs = rng.choice(("normal", "large_scores", "far_above", "one_hot"))
    values = {param.name: rng.choice(param.values) for param in KERNEL.params} | {"LSE": 1}
    values |= {"SPLITS": 1} if values["PLAN"] else {"JOIN": 0}
    arch = replace(ARCH, sm_count=rng.choice((1, 2, 5, 132)))
    try:
        case = Case(problem, inputs)
        result = simulator.check(KERNEL, Config(values), case, schedules=(0, 1, 2, number + 3), arch=arch)
    except SimtError as error:
        pytest.fail(f"{values} {case.label}\n{error}")
    assert result.ok, f"{values} {case.label}, {arch.sm_count} SMs: {result}"


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("words", ["LAG=0", "LAG=1 BLOCK_N=32 SPLITS=2", "LAG=1 PLAN=2", "LAG=1 PLAN=2 JOIN=1"])
def test_clean_under_the_sanitizers(simulator, words):
    case = Case(latent(3, 2, "1x70+1x0"))
    result = simulator.check(KERNEL, config_of(KERNEL, f"{words} LSE=1"), case, asan=True)
    assert result.ok, str(result)


@pytest.mark.parametrize("length", [1160, 1290])
def test_a_request_of_more_parts_than_a_block_joins_at_once(simulator, length):
    """Eight; 19 and 21 parts of two tiles here, beside a request of one."""
    case, config = Case(latent(3, 1, f"1x{length}+1x40")), config_of(KERNEL, "LAG=1 BLOCK_N=32 PLAN=2 JOIN=1 LSE=1")
    result = simulator.check(KERNEL, config, case, schedules=(0, 1))
    assert result.ok, str(result)


class Call:
    """One problem's inputs, and the launches of a config, which may be changed."""

    def __init__(self, simulator: Simulator, problem: Problem, words: str, sms: int = 132):
        self.simulator, self.problem = simulator, problem
        self.config = config_of(KERNEL, f"{words} LSE=1")
        self.inputs = dict(oracle_of(problem).make_inputs(Case(problem), 1))
        self.stages = simulator.build(KERNEL, self.config, Case(problem), arch=replace(ARCH, sm_count=sms))

    def run(self, **inputs):
        """The output, and the log-sum-exp (batch, heads, queries)."""
        p, sizes = self.problem, KERNEL.workspaces(self.config, self.problem)
        left = self.simulator.run(self.stages, self.inputs | inputs, {"o": p.bytes_of("o")}, sizes)
        lse = left["lse"].view(np.float32).reshape(p.batch, p.heads, p.seqlen_q)
        return left["o"].view(np.uint16).reshape(p.shape_of("o")), lse


@pytest.mark.parametrize("words", ["LAG=0", "LAG=1 SPLITS=2", "LAG=1 PLAN=2", "LAG=1 PLAN=2 JOIN=1"])
def test_rows_by_query_and_parts_of_a_table_as_engines_have_them(simulator, words):
    call = Call(simulator, latent(20, 3, "1x150+1x2"), words)
    plain, lse = call.run()
    batch, heads, queries, columns = plain.shape
    for name, (launch, made) in call.stages.items():
        args = [*launch.args]
        if name == "plan":
            continue
        at = QUERIES_APART if name == "fwd" else -1
        assert args[at] == 1
        args[at] = heads
        call.stages[name] = replace(launch, args=tuple(args)), made
    table = np.full((batch, 9), -5, np.int32)
    table[:, : call.inputs["block_table"].shape[1]] = call.inputs["block_table"]
    launch, made = call.stages["fwd"]
    call.stages["fwd"] = replace(launch, args=(*launch.args[:-2], 9, launch.args[-1])), made
    turned, same_lse = call.run(block_table=table, q=call.inputs["q"].swapaxes(1, 2).copy())
    assert np.array_equal(turned.reshape(batch, queries, heads, columns).swapaxes(1, 2), plain)
    assert np.array_equal(same_lse, lse)


@pytest.mark.parametrize("words", ["LAG=1", "LAG=0 SPLITS=2"])
def test_lengths_and_pages_that_cannot_be_are_the_nearest_that_can(simulator, words):
    """And nothing outside the tensors is read: a simulated run ends if it is. A page that is none is of zeros."""
    call = Call(simulator, latent(8, 1, "4x150"), words)
    table = call.inputs["block_table"].copy()
    _, blocks = table.shape
    right = call.run(seqused_k=np.int32([blocks * 64, 0, 30, 150]), block_table=table)
    wrong = call.run(seqused_k=np.int32([2**31 - 1, -(2**31), 30, 150]), block_table=table)
    assert np.array_equal(wrong[0], right[0], equal_nan=True)
    assert np.array_equal(wrong[1], right[1], equal_nan=True)
    assert not right[0][1].any()
    assert np.isneginf(right[1][1]).all()
    table[2, 0], table[3, 1] = -7, len(call.inputs["k"])
    out, lse = call.run(seqused_k=np.int32([64, 64, 30, 64]), block_table=table)
    assert not from_bits(out[2], "bf16").any()
    assert np.allclose(lse[2], np.log(30))


# Lengths, and the largest share of a block of 132 beside the mean of all: whole requests where they are as good.
PLANS = {
    "128x1k": 1.03,
    "128x4k": 1.04,
    "1x32k+127x1k": 1.14,
    "16x16k+112x512": 1.1,
    "1x4k": None,
    "3x0+1x64+40x1": None,
}


@pytest.mark.parametrize("lengths", PLANS)
@pytest.mark.parametrize("cost", [2, 4])
def test_a_plan_gives_each_tile_to_one_block_and_all_blocks_as_many(simulator, lengths, cost):
    p = latent(16, 1, re.sub(r"(\d+)k", lambda found: str(1024 * int(found[1])), lengths))
    config, keys = config_of(KERNEL, f"PLAN={cost}"), np.int32(p.layout.of_items(p.batch, p.seqlen_k))
    stages = {"plan": simulator.build(KERNEL, config, Case(p))["plan"]}
    sizes = {name: size for name, size in KERNEL.workspaces(config, p).items() if "partial" not in name}
    left = simulator.run(stages, {"seqused_k": keys}, {}, sizes)
    shares, first_slot = (left[f"{name}_64_{cost}"].view(np.int32) for name in ("shares", "first_slot"))
    tiles = np.maximum(-(-keys // 64), 1)
    pieces, loads = [[] for _ in tiles], []
    for first_request, first, last, end, slot, last_slot, *_ in shares.reshape(-1, 8)[:132]:
        loads.append(0)
        for request in range(first_request, last + 1):
            is_first, is_last = request == first_request, request == last
            begin, until = first * is_first, min(end, tiles[request]) if is_last else tiles[request]
            pieces[request].append((begin, until, slot if is_first else last_slot if is_last else -1))
            loads[-1] += until - begin + cost
    for request, own in enumerate(pieces):
        begins, ends, slots = zip(*own, strict=True)
        assert (begins, ends) == ((0, *ends[:-1]), (*begins[1:], tiles[request]))
        assert slots == (tuple(range(*first_slot[request : request + 2])) or (-1,))
    if PLANS[lengths] is not None:
        assert max(loads) <= (PLANS[lengths] * (tiles.sum() + cost * p.batch) / 132) + cost
    if lengths.startswith("128x"):
        assert first_slot[p.batch] == 0


@pytest.mark.parametrize("join", [0, 1])
def test_a_plan_of_other_lengths_is_right_for_any(simulator, join):
    """Engines plan once a step, and a graph may be replayed without: that costs time alone."""
    call = Call(simulator, latent(16, 2, "1x500+1x300+1x0+1x70"), f"PLAN=2 JOIN={join}", sms=5)
    right, lse = call.run()
    launch, made = call.stages["plan"]
    args = tuple("others" if arg == "seqused_k" else arg for arg in launch.args)
    call.stages["plan"] = replace(launch, args=args), made
    for others in ([1, 1, 500, 300], [500, 500, 500, 500], [0, 0, 0, 0], [130, 500, 64, 3]):
        out, same_lse = call.run(others=np.int32(others))
        apart = from_bits(out, "bf16") - from_bits(right, "bf16")
        assert np.linalg.norm(apart) < 5e-3 * np.linalg.norm(from_bits(right, "bf16"))
        assert np.allclose(same_lse, lse, atol=1e-5)

"""compare.cu's rows at random, and inputs drawn anew, against NumPy's."""

import itertools

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.core.scores import Scores
from attnsweep.verify import encoding
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.compare import row_bytes
from attnsweep.verify.device_case import regions_to_redraw
from attnsweep.verify.expected import contents_of
from attnsweep.verify.reference import exact_rows

from .device import HostBuffer, uploaded
from .harness import COMPILER
from .test_judge import SHAPES
from .test_masked_reference import PROBLEMS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

SCORED = (
    Problem(2, 4, 2, 9, 40, 16, "bf16", scores=Scores(softcap=5.0, sinks=True)),
    Problem(2, 4, 2, 9, 41, 16, "fp16", scores=Scores(bias=("item", "head"))),
)


def mixed(x):
    """SplitMix64's finaliser."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def drawn_rows(seed, count, rows):
    if rows <= count:
        return np.arange(rows)
    numbers = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed(np.uint64(seed) ^ numbers) % np.uint64(rows)).astype(int)


@pytest.mark.nightly(push=12)
@pytest.mark.parametrize("problem", [*SHAPES, *PROBLEMS, *SCORED], ids=lambda p: p.label)
def test_rows_are_attention_on_the_inputs_as_they_are(problem, device):
    inputs = verify_inputs.make_inputs(Case(problem), 1)
    ((exact, _),) = exact_rows(inputs, problem, np.arange(problem.seqlen_q))
    rows = exact.reshape(-1, problem.value_dim)
    bits = encoding.to_bits(rows.astype(np.float32), problem.out_dtype)
    out = encoding.from_bits(bits, problem.out_dtype).astype(np.float64)
    judge, at = device.judge(problem.dtype), {n: uploaded(b) for n, b in inputs.items()}
    at["o"] = uploaded(bits)
    for seed in (5, 6):
        judge.clear()
        judge.judge_rows([at], problem, 1e-3, seed, 2)
        found = judge.found(3)[2]
        chosen = drawn_rows(seed, min(judge.ROWS, len(rows)), len(rows))
        norms = np.maximum(np.linalg.norm(rows[chosen], axis=1), 1e-3)
        errors = np.linalg.norm((out - rows)[chosen], axis=1) / norms
        assert found["nans"] == 0
        assert found["norm"] == pytest.approx((rows[chosen] ** 2).sum(), rel=1e-11)
        assert found["row"] == pytest.approx(errors.max(), rel=1e-6, abs=1e-12)


def test_a_wrong_row_is_found_where_it_is_once_it_is_drawn(device):
    problem = Problem(2, 4, 2, 9, 20, 16, "bf16")
    inputs = verify_inputs.make_inputs(Case(problem), 1)
    ((exact, _),) = exact_rows(inputs, problem, np.arange(problem.seqlen_q))
    bits = encoding.to_bits(exact.astype(np.float32), "bf16").reshape(72, 16)
    bits[37, 15] = 0x7FC0  # NaN
    bits[40] ^= 0x8000
    judge, at = device.judge("bf16"), {n: uploaded(b) for n, b in inputs.items()}
    at["o"] = uploaded(bits)
    judge.ROWS = 50
    seen = set()
    for seed in range(1, 9):
        judge.clear()
        judge.judge_rows([at], problem, 1e-3, seed, 0)
        found, chosen = judge.found(1)[0], drawn_rows(seed, 50, 72)
        assert (found["nans"] == 0) == (37 not in chosen)
        assert (found["row"] > 1) == (40 in chosen)
        if 40 in chosen:
            assert found["row_at"] == 40
        seen |= set(chosen.tolist())
    assert seen > {37, 40}
    assert row_bytes(problem) == 8 * (16 + 8 * 18)


PAGED = Problem.parse("(2,4/2,3x40,16) bf16 causal paged(16)")


@pytest.mark.parametrize("problem", [Problem(2, 4, 2, 9, 20, 16, "bf16"), PAGED], ids=lambda p: p.label)
def test_calls_that_are_judged_together_are_judged_on_inputs_of_their_own(problem, device):
    """More of them than one launch takes, with log-sum-exps; one call is wrong in each of the two."""
    judge, every = device.judge("bf16"), []
    for number in range(18):
        inputs = verify_inputs.make_inputs(Case(problem), number)
        ((exact, lse),) = exact_rows(inputs, problem, np.arange(problem.seqlen_q))
        bits = encoding.to_bits(exact.astype(np.float32), "bf16").reshape(-1, 16)
        lse = lse.astype(np.float32)
        bits[10] ^= 0x8000 * (number == 5)
        lse.ravel()[11] += number == 17
        every.append({n: uploaded(b) for n, b in inputs.items()} | {"o": uploaded(bits), "lse": uploaded(lse)})
    judge.clear()
    judge.judge_rows(every, problem, 1e-3, 5, 2)
    found = judge.found(2 + len(every))
    assert np.isnan(found[1]["row"])
    assert [slot for slot, one in enumerate(found[2:]) if not one["row"] < 0.01] == [5]
    assert [slot for slot, one in enumerate(found[2:]) if not one["tile_gain"] < 1e-5] == [17]


def test_each_call_has_rows_of_its_own(device):
    problem = Problem(2, 4, 2, 9, 20, 16, "bf16")
    at = {n: uploaded(b) for n, b in verify_inputs.make_inputs(Case(problem), 1).items()}
    judge, at["o"] = device.judge("bf16"), uploaded(np.zeros((72, 16), np.uint16))
    judge.ROWS = 3
    judge.judge_rows([at] * 17, problem, 1e-3, 5, 0)
    assert len({one["norm"] for one in judge.found(17)}) == 17


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "e4m3"])
def test_inputs_drawn_anew_have_the_sizes_of_before_and_come_back(dtype, device):
    problem = Problem(2, 2, 2, 40, 70, 32, dtype)
    made = {name: bits.copy() for name, bits in verify_inputs.make_inputs(Case(problem), 1).items()}
    made["q"].ravel()[:2] = 0
    judge, at = device.judge(dtype), {name: uploaded(made[name]) for name in "qkv"}
    signs = {name: 1 if name == "v" or dtype != "e4m3" else 2 for name in "qkv"}
    regions = judge.regions([(at[n], signs[n], i) for i, n in enumerate("qkv")])
    contents = []
    for old, new in ((0, 7), (7, 8), (8, 2**63 + 5)):
        judge.redraw(regions, old, new)
        contents.append({n: at[n].of(made[n].dtype).reshape(made[n].shape).copy() for n in at})
        for name, bits in contents[-1].items():
            was, now = (np.abs(encoding.from_bits(x, dtype)) for x in (made[name], bits))
            assert np.isfinite(now).all()
            assert dtype == "e4m3" or (now[was == 0] == 0).all()
            inside = was > 2.0**-6  # smaller ones may be subnormal
            ratio, most = now[inside] / was[inside], 2 if dtype == "e4m3" else 1.125
            assert ratio.min() > 1 / most
            assert ratio.max() < most
            # A kernel's time may hang on how far scores are apart.
            assert dtype == "e4m3" or abs((now**2).sum() / (was**2).sum() - 1) < 0.02
            turned = np.signbit(encoding.from_bits(bits ^ made[name], dtype)).mean()
            assert (0.4 < turned < 0.6) if signs[name] == 1 else turned == 0
            # In FP8 a mantissa has three bits, and values of the largest size keep theirs.
            assert (bits != made[name]).mean() > (0.8 if dtype == "e4m3" else 0.9)
    for one, other in itertools.pairwise(contents):
        assert all((one[name] != other[name]).mean() > 0.8 for name in "qkv")
    assert (contents[0]["q"] ^ made["q"]).ravel()[:900].tolist() != (contents[0]["k"] ^ made["k"]).ravel()[
        :900
    ].tolist()
    drawn = (contents[0]["k"] ^ made["k"]).view(np.uint32).reshape(-1, 2)
    assert (drawn[:, 0] != drawn[:, 1]).mean() > 0.9  # which have halves of one number
    judge.redraw(regions, 2**63 + 5, 0)
    for name in "qkv":
        assert (at[name].of(made[name].dtype).reshape(made[name].shape) == made[name]).all()


def test_bytes_behind_the_last_word_stay(device):
    judge, buffer = device.judge("fp16"), HostBuffer(6)
    before = np.arange(0x3C00, 0x3C03, dtype=np.uint16)
    buffer.upload(before)
    judge.redraw(judge.regions([(buffer, 1, 0)]), 0, 9)
    now = buffer.of(np.uint16)
    assert now[2] == before[2]
    assert (now[:2] != before[:2]).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
@pytest.mark.parametrize("first", [1, 2**64 - 1])
def test_a_chain_draws_what_the_digests_of_outputs_say(dtype, first, device):
    problem = Problem(1, 2, 2, 20, 33, 16, dtype)
    made = verify_inputs.make_inputs(Case(problem), 1)
    judge, rng = device.judge(dtype), np.random.default_rng(first % 97)
    digests = rng.integers(0, 2**64, 5, dtype=np.uint64)
    of_digests, contents = uploaded(digests), uploaded(np.array([first, 0, 0, 0, 0], np.uint64))
    chained, drawn = ({name: uploaded(made[name]) for name in "qkv"} for _ in range(2))
    one, other = (regions_to_redraw(judge, problem, [buffers]) for buffers in (chained, drawn))
    expected, before = contents_of(first, digests.tolist()), 0
    for call, content in enumerate(expected):
        judge.chain(one, contents, of_digests, call)
        judge.redraw(other, before, content)
        before = content
        for name in "qkv":
            assert (chained[name].main == drawn[name].main).all()
    assert contents.of(np.uint64).tolist() == expected
    assert len({*expected}) == 5
    digests[1] ^= np.uint64(1)
    assert contents_of(first, digests.tolist())[2] != expected[2]

"""Steps of a serving engine on a card: packed tokens on a paged cache, appended keys, a whole loop."""

import itertools

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
paged = pytest.importorskip("attnsweep.serve.paged_attention")

from engine import served  # noqa: E402
from packed_step import Step, attended, check  # noqa: E402

import attnsweep  # noqa: E402

CARD = {"device": "cuda", "heads": 32, "heads_kv": 8, "dim": 128}
FP8 = torch.float8_e4m3fn


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Caches whose keys come by boxes of TMA, and by rows.
CACHES = [(None, 16), (FP8, 16), (None, 1)]


def by_kernel(call):
    before = paged.counters["kernel"]
    out = call()
    assert paged.counters["kernel"] == before + 1, dict(paged.counters)
    return out


STEPS = [
    {"tokens": [1] * 9, "keys": [40, 1, 300, 17, 16, 2000, 65, 129, 1000]},
    {"tokens": [4] * 4, "keys": [40, 4, 300, 2000], "cache": FP8},
    {"tokens": [512, 512], "keys": [512, 2100]},
    {"tokens": [1, 1, 300, 1, 7, 0, 1], "keys": [900, 40, 1300, 1, 7, 33, 64]},
    {"tokens": [1, 130, 64], "keys": [900, 130, 4000], "page": 64},
    {"tokens": [33, 200], "keys": [33, 700], "heads": 28, "heads_kv": 4},
    {"tokens": [33, 200], "keys": [33, 700], "dim": 64, "dtype": torch.float16, "heads": 8},
    {"tokens": [33, 200], "keys": [33, 700], "dim": 256, "heads": 8, "heads_kv": 2, "page": 32},
    {"tokens": [90, 2], "keys": [100, 700], "cache": FP8},
    {"tokens": [90, 2], "keys": [100, 700], "page": 1},
    {"tokens": [1, 1, 300, 1, 7, 0, 1], "keys": [900, 40, 1300, 1, 7, 33, 64], "cache": FP8, "page": 64},
    {"tokens": [33, 200], "keys": [33, 700], "cache": FP8, "page": 1, "dim": 64, "dtype": torch.float16, "heads": 8},
    {"tokens": [33, 200], "keys": [33, 4700], "cache": FP8, "dim": 256, "heads": 8, "heads_kv": 2},
    {"tokens": [512, 512], "keys": [512, 9000], "cache": FP8, "heads": 8, "heads_kv": 1, "page": 2},
    {"tokens": [33, 200], "keys": [33, 700], "page": 4, "dim": 96, "heads": 28, "heads_kv": 4},
]


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_each_request_attends_to_its_own_keys(shape):
    step = Step(**{**CARD, **shape})
    even = len({*step.tokens}) == 1 and step.tokens[0] * step.group <= 128
    call = lambda: step.call(return_softmax_lse=True)  # noqa: E731
    out, lse = by_kernel(call) if HOPPER or even else call()
    right, sums = step.right()
    check(out, right)
    seen = torch.isfinite(sums)
    assert torch.equal(torch.isfinite(lse), seen)
    torch.testing.assert_close(lse.double()[seen], sums[seen], rtol=1e-4, atol=2e-4)


@pytest.mark.skipif(not HOPPER, reason="the kernel is Hopper's")
@pytest.mark.parametrize(("cache", "page"), CACHES)
def test_long_requests_among_short_ones(cache, page):
    """Blocks share the keys of the long ones; calls that are equal are so to the bit."""
    tokens, keys = [*[1] * 30, 70, 1, 20], [*range(1, 31), 9000, 20_000, 5000]
    step = Step(tokens, keys, device="cuda", heads=8, heads_kv=1, dim=128, cache=cache, page=page)
    out = by_kernel(step.call)
    check(out, step.right()[0])
    assert "SPLITS=4" in explained(step)
    assert all(torch.equal(step.call(), out) for _ in range(5))


def explained(step):
    """Which kernel serves a step."""
    from attnsweep.serve import paged_plans, paged_varlen

    given, scales = (step.q, step.k, step.v, step.lengths, step.table), step.scales
    how = (*(scales if scales is not None else (None, None)), None, None, 0.0, True, (-1, -1), False)
    call = paged_varlen.understood(*given, *how, step.begins, max(step.tokens))
    return paged_plans.plan_of(call).why.kernel


def test_a_request_of_200_000_tokens():
    """Each looked-at row is a request of its own in float64."""
    step = Step([200_000, 1], [200_100, 33], device="cuda", heads=4, heads_kv=1, dim=64)
    out = by_kernel(step.call) if HOPPER else step.call()
    k, v = step.keys_of(0)
    for row in (0, 1, 77_777, 199_999):
        q = step.q[row : row + 1].double().transpose(0, 1)
        seen = row + 101
        right = attended(q, k[:, :seen], v[:, :seen], 64**-0.5, True, (-1, -1)).out
        check(out[row : row + 1], right.transpose(0, 1))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("cache", "page"), CACHES)
def test_masks_and_scores(cache, page):
    sinks = torch.randn(32, device="cuda")
    step = Step([1, 130, 5], [900, 130, 2000], **CARD, cache=cache, page=page)
    check(step.call(window_size=(100, 0)), step.right(window=(100, 0))[0])
    check(step.call(causal=False), step.right(causal=False)[0])
    check(step.call(softcap=20.0), step.right(softcap=20.0)[0])
    check(step.call(s_aux=sinks), step.right(sinks=sinks)[0])


@pytest.mark.parametrize(("cache", "page"), CACHES)
def test_a_graph_replays_with_other_numbers_of_tokens_lengths_and_tables(cache, page):
    how = {**CARD, "cache": cache, "page": page}
    steps = [Step(tokens, keys, **how, seed=n) for n, (tokens, keys) in enumerate(GRAPHS)]
    first = Step(*GRAPHS[0], **how, seed=9)
    first.call(max_seqlen_q=200)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = first.call(max_seqlen_q=200)
    for step in [*steps, *steps[::-1]]:
        for name in ("q", "k", "v", "begins", "lengths", "table", *["scales"] * bool(cache)):
            getattr(first, name).copy_(getattr(step, name))
        graph.replay()
        check(out, step.right()[0])


GRAPHS = [([1, 198, 1], [50, 2000, 900]), ([100, 0, 100], [2000, 7, 100]), ([67, 67, 66], [67, 1000, 2000])]


@pytest.mark.parametrize(("cache", "page"), [*itertools.product((None, FP8), (16, 1))])
def test_new_keys_are_appended_and_seen(cache, page):
    step = Step([3] * 4, [40, 16, 3, 1000], **CARD, cache=cache, page=page)
    bits = torch.uint8 if cache else torch.int16
    new, before = [], [each.clone() for each in (step.k, step.v)]
    for each in (step.k, step.v):
        rows = [torch.arange(n - 3, n, device="cuda") for n in step.keys]
        at = torch.stack([step.table[r].long()[own // page] * page + own % page for r, own in enumerate(rows)])
        flat = each.view(bits).flatten(0, 1)
        new.append(flat[at].clone().view(each.dtype))
        flat[at] = 0
    how = {"page_table": step.table, "causal": True, "cache_seqlens": step.lengths - 3}
    how |= {"k_descale": step.scales[0], "v_descale": step.scales[1]} if cache else {}
    call = lambda: attnsweep.flash_attn_with_kvcache(step.q.unflatten(0, (4, 3)), step.k, step.v, *new, **how)  # noqa: E731
    check(by_kernel(call).flatten(0, 1), step.right()[0])
    for each, was in zip((step.k, step.v), before, strict=True):
        assert torch.equal(each.view(bits), was.view(bits))


def test_what_is_appended_beyond_the_pages_is_stored_nowhere():
    step = Step([3, 3, 3], [32, 32, 32], **CARD)
    before = step.k.clone()
    step.table[2, 1] = 10**6
    lengths = torch.tensor([31, 10**6, 30], dtype=torch.int32, device="cuda")
    new = torch.ones(3, 3, 8, 128, device="cuda").bfloat16()
    how = {"cache_seqlens": lengths, "page_table": step.table, "causal": True}
    paged.flash_attn_with_kvcache(step.q.unflatten(0, (3, 3)), step.k, step.v, new, new, **how)
    changed = (step.k.view(torch.int16) != before.view(torch.int16)).any(-1).any(-1).nonzero()
    assert changed.tolist() == [[int(step.table[0, 1]), 15]]


@pytest.mark.parametrize(("cache", "page"), CACHES)
def test_wrong_numbers_on_the_device_read_nothing_outside(cache, page):
    step = Step([1, 130, 5], [900, 130, 2000], **CARD, cache=cache, page=page)
    for name, at, value in (
        ("lengths", 1, 10**9),
        ("lengths", 1, -5),
        ("table", (1, 0), -(2**31)),
        ("table", (2, 3), 2**31 - 1),
        ("begins", 1, 10**6),
        ("begins", 2, -4),
    ):
        was = getattr(step, name)[at].clone()
        getattr(step, name)[at] = value
        step.call()
        torch.cuda.synchronize()
        getattr(step, name)[at] = was
    check(step.call(), step.right()[0])


@pytest.mark.parametrize(("guesses", "graphed"), [(0, 0), (4, 0), (0, 90), (4, 90)])
def test_an_engines_tokens_are_those_of_a_dense_loop(guesses, graphed):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    engine, compared = served("cuda", torch.float16, guesses=guesses, graphed=graphed, **sizes)
    assert compared > 15
    assert (engine.replays > 0) == (graphed > 0)
    assert "mixed" in engine.kinds

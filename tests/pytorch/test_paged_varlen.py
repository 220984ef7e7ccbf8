"""Packed tokens on a paged cache, and keys that are appended to one: answers without a kernel."""

import pytest

torch = pytest.importorskip("torch")
attnsweep = pytest.importorskip("attnsweep")
paged = pytest.importorskip("attnsweep.serve.paged_attention")

from packed_step import PAGE, Step, check  # noqa: E402

FP8 = torch.float8_e4m3fn
STEPS = [
    ([1, 5, 0, 3], [40, 33, 20, 3]),
    ([1, 1, 1], [40, 1, 17]),
    ([7, 7], [50, 7]),
    ([0, 0], [30, 1]),
    ([20, 1], [20, 60]),
    ([9], [4]),
]


@pytest.mark.parametrize(("tokens", "keys"), STEPS)
def test_each_request_attends_to_its_own_keys(tokens, keys):
    step = Step(tokens, keys)
    out, lse = step.call(return_softmax_lse=True)
    right, sums = step.right()
    check(out, right)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=1e-4)
    check(step.call(), right)


def test_a_step_of_no_request_has_no_output():
    made, cache = torch.zeros(0, 8, 64).bfloat16(), torch.zeros(4, PAGE, 2, 64).bfloat16()
    none, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32)
    how = {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32), "max_seqlen_q": 0, "max_seqlen_k": 0}
    how |= {"seqused_k": none, "block_table": table, "return_softmax_lse": True}
    out, lse = attnsweep.flash_attn_varlen_func(made, cache, cache, causal=True, **how)
    assert (out.shape, lse.shape) == ((0, 8, 64), (8, 0))
    made, how = torch.zeros(0, 1, 8, 64).bfloat16(), {"cache_seqlens": none, "page_table": table}
    out, lse = paged.flash_attn_with_kvcache(made, cache, cache, causal=True, return_softmax_lse=True, **how)
    assert (out.shape, lse.shape) == ((0, 1, 8, 64), (0, 8, 1))


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"causal": False}, {"causal": False}),
        ({"window_size": [6, 0]}, {"window": (6, 0)}),
        ({"causal": False, "window_size": (3, 2)}, {"causal": False, "window": (3, 2)}),
        ({"softcap": 3.0}, {"softcap": 3.0}),
        ({"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}),
    ],
)
def test_masks_and_scores(options, how):
    step = Step([1, 5, 0, 3], [40, 33, 20, 3])
    check(step.call(**options), step.right(**how)[0])


def test_an_fp8_cache_and_scales_that_do_not_count():
    step = Step([1, 5], [40, 33], cache=FP8)
    check(step.call(), step.right()[0])
    plain = Step([1, 5], [40, 33])
    ones = torch.full((2, 2), 7.0)
    check(plain.call(q_descale=ones, k_descale=ones, v_descale=ones), plain.right()[0])


def test_keys_by_cu_seqlens_k_as_flash_attn_has_them():
    step = Step([1, 5, 3], [40, 33, 3])
    begins = torch.tensor([0, *step.keys]).cumsum(0).int()
    check(step.call(seqused_k=None, cu_seqlens_k=begins), step.right()[0])
    positional = (
        step.q,
        step.k,
        step.v,
        step.begins,
        begins,
        5,
        40,
        0.0,
        None,
        True,
        (-1, -1),
        0.0,
        None,
        False,
        False,
    )
    check(attnsweep.flash_attn_varlen_func(*positional, step.table), step.right()[0])


@pytest.mark.parametrize("tokens", [[1, 5], [3, 3]])
def test_the_output_goes_where_it_is_asked_for(tokens):
    step = Step(tokens, [40, 33])
    wide = torch.zeros(6, 8, 32, dtype=torch.bfloat16)
    for out in (torch.zeros_like(step.q), wide[:, ::2]):
        assert step.call(out=out) is out or torch.equal(step.call(out=out), out)
        check(out, step.right()[0])


def test_a_cascade_of_a_shared_prefix_is_the_whole():
    """The parts are merged by their log-sum-exps."""
    step = Step([2, 5], [40, 50])
    step.table[1, :2] = step.table[0, :2]  # 32 keys in common
    prefix = step.call(seqused_k=torch.tensor([32, 32]).int(), causal=False, return_softmax_lse=True)
    behind = step.call(block_table=step.table[:, 2:].contiguous(), seqused_k=step.lengths - 32, return_softmax_lse=True)
    both = torch.stack([prefix[1], behind[1]])
    weights = torch.softmax(both, 0).transpose(1, 2)[..., None]
    check(weights[0] * prefix[0].float() + weights[1] * behind[0].float(), step.right()[0])


def test_compiled_calls_are_as_eager_ones():
    step = Step([1, 5, 0, 3], [40, 33, 20, 3])
    compiled = torch.compile(lambda q: Step.call(_with(step, q)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(step.q), step.call())


def _with(step, q):
    step.q = q
    return step


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q and max_seqlen_q"),
        ({"max_seqlen_q": None}, TypeError, "cu_seqlens_q and max_seqlen_q"),
        ({"max_seqlen_q": -1}, TypeError, "the most tokens"),
        ({"seqused_k": None}, TypeError, "told by seqused_k"),
        ({"cu_seqlens_q": torch.zeros(3).long()}, TypeError, "cu_seqlens_q is torch.int64, not torch.int32"),
        ({"cu_seqlens_q": torch.zeros(4).int()}, ValueError, "page_table"),
        ({"seqused_k": torch.zeros(3).int()}, ValueError, "cache_seqlens"),
        ({"out": torch.zeros(3, 4, 32)}, ValueError, "out is"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 5]).int(), "validate": True}, ValueError, "does not rise"),
        ({"max_seqlen_q": 4, "validate": True}, ValueError, "a request has 5 tokens"),
    ],
)
def test_what_cannot_be_is_named(options, kind, said):
    with pytest.raises(kind, match=said):
        Step([1, 5], [40, 33]).call(**options)


@pytest.mark.parametrize("cache", [None, FP8])
def test_flash_attn_with_kvcache_takes_packed_queries(cache):
    for tokens in ([1, 5, 0, 3], [3, 3, 3]):
        step = Step(tokens, [40, 33, 20, 3][: len(tokens)], cache=cache)
        how = {"cache_seqlens": step.lengths, "page_table": step.table, "causal": True, "cu_seqlens_q": step.begins}
        how |= {"k_descale": step.scales[0], "v_descale": step.scales[1]} if cache else {}
        given = (step.q, step.k, step.v)
        out, lse = attnsweep.flash_attn_with_kvcache(*given, **how, max_seqlen_q=max(tokens), return_softmax_lse=True)
        right, sums = step.right()
        check(out, right)
        torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=1e-4)
        assert "cpu" in str(attnsweep.explain_flash_attn_with_kvcache(*given, **how, max_seqlen_q=max(tokens)))


@pytest.mark.parametrize("cache", [None, FP8])
def test_new_keys_are_appended_and_seen(cache):
    step = Step([3, 3, 3], [40, 16, 3], cache=cache)
    new = [cache_.new_empty(0) for cache_ in (step.k, step.v)]
    before = [each.clone() for each in (step.k, step.v)]
    for number, each in enumerate((step.k, step.v)):
        rows = [torch.arange(n - 3, n) for n in step.keys]
        at = torch.stack([step.table[r].long()[own // PAGE] * PAGE + own % PAGE for r, own in enumerate(rows)])
        bits = each.view(torch.uint8 if cache else torch.int16).flatten(0, 1)
        new[number] = bits[at].clone().view(each.dtype)
        bits[at] = 0
    how = {"page_table": step.table, "causal": True, "cache_seqlens": step.lengths - 3}
    how |= {"k_descale": step.scales[0], "v_descale": step.scales[1]} if cache else {}
    out = attnsweep.flash_attn_with_kvcache(step.q.unflatten(0, (3, 3)), step.k, step.v, *new, **how)
    check(out.flatten(0, 1), step.right()[0])
    for each, was in zip((step.k, step.v), before, strict=True):
        assert torch.equal(
            each.view(torch.int8 if cache else torch.int16), was.view(torch.int8 if cache else torch.int16)
        )


def test_what_is_appended_beyond_the_pages_is_stored_nowhere():
    step = Step([3, 3], [32, 32])
    before = step.k.clone()
    lengths = torch.tensor([31, 10**6], dtype=torch.int32)
    new = torch.ones(2, 3, 2, 32).bfloat16()
    how = {"cache_seqlens": lengths, "page_table": step.table, "causal": True}
    paged.flash_attn_with_kvcache(step.q.unflatten(0, (2, 3)), step.k, step.v, new, new, **how)
    changed = (step.k.view(torch.int16) != before.view(torch.int16)).any(-1).any(-1).nonzero()
    assert changed.tolist() == [[int(step.table[0, 1]), 15]]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda k, v: (k, None), TypeError, "give both"),
        (lambda k, v: (k.half(), v.half()), TypeError, "dtype"),
        (lambda k, v: (k[:1], v[:1]), ValueError, "not \\(2, new, 2, 32\\)"),
        (lambda k, v: (k, v[:, :2]), ValueError, "not \\(2, new"),
    ],
)
def test_new_keys_that_do_not_fit_are_named(change, kind, said):
    step, new = Step([3, 3], [32, 32]), torch.ones(2, 3, 2, 32).bfloat16()
    how = {"cache_seqlens": step.lengths - 3, "page_table": step.table}
    with pytest.raises(kind, match=said):
        paged.flash_attn_with_kvcache(step.q.unflatten(0, (2, 3)), step.k, step.v, *change(new, new), **how)

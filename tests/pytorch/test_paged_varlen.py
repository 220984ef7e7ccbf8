"""Packed tokens on a paged cache, and keys that are appended to one: answers without a kernel."""

import math

import pytest

torch = pytest.importorskip("torch")
attnsweep = pytest.importorskip("attnsweep")
paged = pytest.importorskip("attnsweep.serve.paged_attention")

PAGE, FP8 = 16, torch.float8_e4m3fn


class Step:
    """A step of an engine: requests with keys in pages, some of them new, and their packed tokens."""

    def __init__(self, tokens, keys, heads=4, heads_kv=2, dim=32, dtype=torch.bfloat16, seed=0, cache=None):
        self.random = torch.Generator().manual_seed(seed)
        self.tokens, self.keys, self.group = tokens, keys, heads // heads_kv
        self.cache = cache or dtype
        draw = lambda *shape: torch.randn(shape, generator=self.random)  # noqa: E731
        blocks, batch = -(-max(keys) // PAGE), len(keys)
        order = torch.randperm(batch * blocks + 2, generator=self.random).int()
        self.table = order[: batch * blocks].view(batch, blocks)
        self.scales = torch.rand(2, batch, heads_kv, generator=self.random) + 0.5 if cache else None
        self.k, self.v = draw(2, len(order), PAGE, heads_kv, dim).to(self.cache)
        self.q = draw(sum(tokens), heads, dim).to(dtype)
        self.begins = torch.tensor([0, *tokens]).cumsum(0).int()
        self.lengths = torch.tensor(keys).int()

    def call(self, **options):
        own = {"max_seqlen_q": max(self.tokens), "max_seqlen_k": max(self.keys), "causal": True}
        own |= {"cu_seqlens_q": self.begins, "seqused_k": self.lengths, "block_table": self.table}
        if self.scales is not None:
            own |= {"k_descale": self.scales[0], "v_descale": self.scales[1]}
        return attnsweep.flash_attn_varlen_func(self.q, self.k, self.v, **own | options)

    def keys_of(self, request):
        """k and v of a request, (heads, keys, head_dim), in float64."""
        at = torch.arange(self.keys[request])
        page = self.table[request].long()[at // PAGE]
        for cache, scale in zip(
            (self.k, self.v), self.scales if self.scales is not None else (None, None), strict=True
        ):
            own = cache[page, at % PAGE].double().transpose(0, 1)
            own = own if scale is None else own * scale[request].double()[:, None, None]
            yield own.repeat_interleave(self.group, 0)

    def right(self, causal=True, window=(-1, -1), softcap=0.0, sinks=None):
        """The output and log-sum-exps in float64."""
        outs, sums = [], []
        for request, (n, length) in enumerate(zip(self.tokens, self.keys, strict=True)):
            k, v = self.keys_of(request)
            q = self.q[self.begins[request] : self.begins[request + 1]].double().transpose(0, 1)
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            own, key = length - n + torch.arange(n)[:, None], torch.arange(length)
            seen = torch.ones(n, length, dtype=torch.bool)
            seen &= key <= own if causal else seen
            seen &= key >= own - window[0] if window[0] >= 0 else seen
            seen &= key <= own + window[1] if window[1] >= 0 else seen
            scores = scores.masked_fill(~seen, -math.inf)
            extra = scores.new_empty(*scores.shape[:2], 0)
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand(-1, n, 1)
            lse = torch.logsumexp(torch.cat([scores, extra], -1), -1)
            weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
            outs.append((weights @ v).transpose(0, 1))
            sums.append(lse)
        return torch.cat(outs), torch.cat(sums, 1)


def check(out, right):
    most = right.abs().max() if right.numel() else 0
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2.0**-7 * float(most))


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
        ({"q_v": torch.ones(4)}, NotImplementedError, "q_v"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q and max_seqlen_q"),
        ({"max_seqlen_q": None}, TypeError, "cu_seqlens_q and max_seqlen_q"),
        ({"max_seqlen_q": -1}, TypeError, "the most tokens"),
        ({"seqused_k": None}, TypeError, "told by seqused_k"),
        ({"cu_seqlens_q": torch.zeros(3).long()}, TypeError, "cu_seqlens_q is an int32"),
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
    changed = (step.k != before).any(-1).any(-1).nonzero()
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

"""`mla_decode` on a card: the kernel serves, with a plan and without, in graphs, and is right."""

import itertools

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
mla = pytest.importorskip("attnsweep.serve.mla")
paged = pytest.importorskip("attnsweep.serve.paged_attention")

from deepseeks import deepseek, near_after_steps  # noqa: E402

PAGE, DIM, VALUE, SCALE = 64, 576, 512, 0.0722
LENGTHS = ((1, 0, 64, 65, 700, 4096), (4096, 3, 129, 1000, 0, 63))


class Cache:
    """Pages in an order at random, NaN where no request is, and what a call must give."""

    def __init__(self, heads, rows, lengths):
        self.random = torch.Generator("cuda").manual_seed(heads + rows)
        self.blocks, batch = -(-4096 // PAGE), len(lengths)
        self.pages = batch * self.blocks
        self.kv = torch.empty(self.pages, PAGE, 1, DIM, dtype=torch.bfloat16, device="cuda")
        self.table = torch.zeros(batch, self.blocks, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.q = torch.empty(batch, rows, heads, DIM, dtype=torch.bfloat16, device="cuda")
        self.fill(lengths)

    def fill(self, lengths):
        """Other lengths, tables, queries and keys at the same addresses."""
        self.lengths.copy_(torch.tensor(lengths))
        self.table.copy_(torch.randperm(self.pages, generator=self.random, device="cuda").view_as(self.table))
        self.q.copy_(torch.randn(self.q.shape, generator=self.random, device="cuda"))
        keys = torch.randn(len(lengths), self.blocks * PAGE, DIM, generator=self.random, device="cuda")
        behind = torch.arange(self.blocks * PAGE, device="cuda") >= self.lengths[:, None]
        keys[behind] = float("nan")
        self.kv[self.table.long().flatten()] = keys.view(-1, PAGE, 1, DIM).bfloat16()

    def check(self, out):
        rows = self.q.shape[1]
        for item, length in enumerate(self.lengths.tolist()):
            keys = self.kv[self.table[item].long()].view(-1, DIM)[:length].double()
            scores = torch.einsum("rhd,kd->hrk", self.q[item].double(), keys) * SCALE
            last = length - rows + torch.arange(rows, device="cuda")
            hidden = torch.arange(length, device="cuda") > last[:, None]
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
            right = torch.einsum("hrk,kd->rhd", weights, keys[:, :VALUE])
            off = (out[item].double() - right).norm(dim=-1)
            assert (off <= 6e-3 * right.norm(dim=-1) + 1e-6).all(), (item, length)

    def call(self, plan=None):
        given = (self.q, self.kv, self.table, self.lengths, VALUE)
        return mla.mla_decode(*given, softmax_scale=SCALE, plan=plan)

    def in_parts(self, apart=False, **options):
        """The arguments of FlashAttention-3's form. apart: queries in two allocations."""
        (qv, q), (v, k) = (x.split((VALUE, DIM - VALUE), -1) for x in (self.q, self.kv))
        q, qv = (q.clone(), qv.clone()) if apart else (q, qv)
        of_cache = {"cache_seqlens": self.lengths, "page_table": self.table, "causal": True}
        return (q, k, v), {"qv": qv, "softmax_scale": SCALE, **of_cache, **options}


@pytest.mark.parametrize(("heads", "rows"), [*itertools.product((16, 64, 128), (1, 2, 4))])
def test_with_a_plan_and_without_and_replayed_with_other_lengths(heads, rows):
    cache, before = Cache(heads, rows, LENGTHS[0]), mla.counters["kernel"]
    cache.check(cache.call())
    cache.check(cache.call(mla.mla_plan(cache.lengths, heads * rows)))
    assert mla.counters["kernel"] == before + 2, dict(mla.counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.call(mla.mla_plan(cache.lengths, heads * rows))
    for lengths in LENGTHS[::-1]:
        cache.fill(lengths)
        graph.replay()
        cache.check(out)


@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 4), (128, 1)])
def test_many_requests_whose_parts_are_joined(heads, rows):
    """In one launch: on two streams at the same time and in a graph, always the same bits."""
    cache = Cache(heads, rows, LENGTHS[0] * 8)
    plan = mla.mla_plan(cache.lengths, heads * rows)
    out = cache.call(plan)
    cache.check(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        cache.call(plan)
        torch.cuda.synchronize()
    launched = [each.name for each in profile.events() if "flash_mla" in each.name]
    assert launched == ["flash_mla_wgmma"]
    streams, made = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(cache.call(plan))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [cache.call(plan) for _ in range(3)]
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(each, out) for each in (*made, *replayed))


@pytest.mark.parametrize("form", ["mla_decode", "qv"])
@pytest.mark.parametrize("heads", [4, 16, 128])
def test_a_model_of_deepseeks_kind_decodes_with_absorbed_weights(heads, form):
    counters = (mla if form == "mla_decode" else paged).counters
    counters.clear()
    near_after_steps(deepseek("cuda", heads), form)
    assert [*counters] == ["kernel"], dict(counters)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 4), (128, 2)])
def test_flash_attention_3s_form(heads, rows, apart):
    """With a plan and without, compiled, and in a graph with other lengths."""
    cache, before = Cache(heads, rows, LENGTHS[0]), paged.counters["kernel"]
    tensors, options = cache.in_parts(apart)
    told = paged.explain_flash_attn_with_kvcache(*tensors, **options)
    assert (told.code, paged.counters["kernel"]) == ("kernel", before), told
    call = paged.flash_attn_with_kvcache
    cache.check(call(*tensors, **options))
    plan = mla.mla_plan(cache.lengths, heads * rows)
    planned = call(*tensors, **options, scheduler_metadata=plan)
    assert torch.equal(planned, cache.call(plan))
    torch._dynamo.reset()
    cache.check(torch.compile(lambda *of: call(*of, **options) * 1.0, fullgraph=True)(*tensors))
    assert paged.counters["kernel"] == before + 3, dict(paged.counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensors, options = cache.in_parts(apart)
        plan = mla.mla_plan(cache.lengths, heads * rows)
        out = call(*tensors, **options, scheduler_metadata=plan)
    for lengths in LENGTHS[::-1]:
        cache.fill(lengths)
        graph.replay()
        cache.check(out)


def test_caches_that_are_no_rows_of_one_are_answered_by_others():
    cache = Cache(16, 2, LENGTHS[0])
    cache.kv.nan_to_num_(0.0)  # which FlashAttention-3 may read
    (q, k, v), options = cache.in_parts()
    before = paged.counters["layout"]
    cache.check(paged.flash_attn_with_kvcache(q, k.contiguous(), v.contiguous(), **options))
    assert paged.counters["layout"] == before + 1

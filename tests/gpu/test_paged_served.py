"""`flash_attn_with_kvcache` on a card: the kernel serves, in graphs and on streams, and is right."""

import itertools

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
paged = pytest.importorskip("attnsweep.serve.paged_attention")
plans = pytest.importorskip("attnsweep.serve.paged_plans")

from packed_step import Step  # noqa: E402

FP8 = torch.float8_e4m3fn


class Engine(Step):
    """A step in which each request has as many tokens, of a cache with room for more keys."""

    def __init__(self, lengths, rows=1, **how):
        super().__init__(
            [rows] * len(lengths), lengths, **{"heads": 32, "heads_kv": 8, "dim": 128} | how, device="cuda"
        )
        self.queries = self.q.unflatten(0, (len(lengths), rows))

    def call(self, **options):
        own = {"cache_seqlens": self.lengths, "page_table": self.table, "causal": True}
        if self.scales is not None:
            own |= {"k_descale": self.scales[0], "v_descale": self.scales[1]}
        return paged.flash_attn_with_kvcache(self.queries, self.k, self.v, **(own | options))

    def check(self, out, lse=None, **options):
        right, log_sums = self.right(**options)
        out = out.flatten(0, 1)
        assert torch.isfinite(out).all()
        off = (out.double() - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-3)
        assert float(off.max()) < (8e-3 if out.dtype == torch.bfloat16 else 2e-3)
        assert (out[(right == 0).all(-1)] == 0).all()
        if lse is not None:
            lse = lse.transpose(0, 1).flatten(1).double()
            assert torch.equal(lse == -torch.inf, log_sums == -torch.inf)
            seen = lse != -torch.inf
            assert torch.allclose(lse[seen], log_sums[seen], rtol=1e-4, atol=1e-4)


def served(of, **options):
    before = paged.counters["kernel"]
    out = of.call(**options)
    assert paged.counters["kernel"] == before + 1, (dict(paged.counters), plans._plans)
    return out


MIXED = (1, 0, 17, 300, 16, 2000, 65, 129)
SHAPES = [
    {"lengths": MIXED},
    {"lengths": MIXED, "page": 64, "order": "hnd"},
    {"lengths": MIXED, "page": 1, "dtype": torch.float16},
    {"lengths": MIXED, "cache": FP8},
    {"lengths": MIXED, "cache": FP8, "page": 128, "order": "hnd", "rows": 4},
    {"lengths": MIXED, "rows": 4, "page": 48},
    {"lengths": MIXED, "dim": 64, "heads": 8, "heads_kv": 8},
    {"lengths": MIXED, "dim": 256, "heads": 16, "heads_kv": 4},
    {"lengths": MIXED, "heads": 16, "heads_kv": 1, "rows": 16},
    {"lengths": [40000], "heads": 32, "heads_kv": 8, "page": 256},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_serves_and_is_right(shape):
    engine = Engine(**shape)
    out, lse = served(engine, return_softmax_lse=True)
    engine.check(out, lse)


def test_windows_softcap_and_sinks():
    engine, sinks = Engine(MIXED, rows=3), torch.randn(32, device="cuda")
    engine.check(served(engine, window_size=(100, 0)), window=(100, 0))
    engine.check(served(engine, softcap=20.0), softcap=20.0)
    engine.check(served(engine, sinks=sinks), sinks=sinks)
    engine.check(served(engine, causal=False), causal=False)
    engine.check(served(engine, softmax_scale=0.3), scale=0.3)


def test_a_graph_replays_with_other_lengths_tables_and_keys():
    engine = Engine(MIXED, capacity=2048)
    engine.call()
    graph, out = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out += [engine.call() for _ in range(3)]  # layers share a workspace
    random = torch.Generator().manual_seed(1)
    for _ in range(8):
        engine.fill(torch.randint(0, 2048, (len(MIXED),), generator=random).tolist())
        graph.replay()
        for each in out:
            engine.check(each)
    engine.check(engine.call())  # outside, as before


def test_blocks_that_share_keys_give_equal_bits_and_leave_their_counts_as_they_were():
    """64 packed rows of few requests: each of their tiles is shared, of some requests alone."""
    engine = Engine([8000, 77, 5000, 0, 1, 2047], heads=64, heads_kv=4, rows=4, capacity=8192)
    how = {"cache_seqlens": engine.lengths, "page_table": engine.table, "causal": True}
    config = paged.explain_flash_attn_with_kvcache(engine.queries, engine.k, engine.v, **how).kernel
    assert "append_paged_wgmma" in config
    assert "SPLITS=1" not in config
    first = engine.call(return_softmax_lse=True)
    engine.check(*first)
    for _ in range(20):
        again = engine.call(return_softmax_lse=True)
    assert all(torch.equal(*each) for each in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = engine.call(return_softmax_lse=True)
    for lengths in ([1, 8192, 300, 0, 4096, 4097], [8192] * 6):
        engine.fill(lengths)
        graph.replay()
        engine.check(out, lse)


def test_two_streams_at_once():
    engines = [Engine(MIXED, seed=seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in engines]
    torch.cuda.synchronize()
    made = []
    for _, (engine, stream) in itertools.product(range(30), zip(engines, streams, strict=True)):
        with torch.cuda.stream(stream):
            made.append((engine, engine.call()))
    torch.cuda.synchronize()
    for engine, out in made:
        engine.check(out)


def test_metadata_that_are_made_once_a_step_serve_all_its_layers():
    engine = Engine(MIXED, capacity=2048)
    sizes = (len(MIXED), 1, engine.blocks * engine.page, 32, 8, 128)
    how = {"page_size": 16, "causal": True}
    metadata = paged.get_scheduler_metadata(*sizes, engine.lengths, **how)
    for _ in range(3):
        engine.check(served(engine, scheduler_metadata=metadata))
    engine.check(*served(engine, scheduler_metadata=metadata, return_softmax_lse=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = paged.get_scheduler_metadata(*sizes, engine.lengths, **how)
        out = [engine.call(scheduler_metadata=inside) for _ in range(2)]
    for lengths in ((5,) * 8, (2048, 0, 0, 0, 1, 2, 3, 4), MIXED):
        engine.fill(lengths)
        graph.replay()
        for each in out:
            engine.check(each)


def test_wrong_numbers_on_the_device_read_nothing_outside_and_leave_the_next_call_right():
    engine = Engine(MIXED)
    lengths, table = engine.lengths.clone(), engine.table.clone()
    for name, value in (("lengths", 10**9), ("lengths", -5), ("table", -(2**31)), ("table", 2**31 - 1)):
        getattr(engine, name)[3] = value
        out = served(engine)
        torch.cuda.synchronize()
        assert out.shape == engine.queries.shape
        engine.lengths.copy_(lengths)
        engine.table.copy_(table)
    engine.check(served(engine))
    fp8 = Engine(MIXED, cache=FP8)
    fp8.scales[0, 2] = float("nan")
    served(fp8)
    torch.cuda.synchronize()


def test_a_cache_that_is_freed_and_made_again_at_its_address():
    for seed in range(4):
        engine = Engine(MIXED, seed=seed, page=16 if seed % 2 else 64)
        engine.check(served(engine))
        del engine


def test_a_cache_beyond_2_to_the_31_elements():
    engine = Engine([40] * 8, capacity=16 * 16400, heads=8, heads_kv=8, dim=128)
    assert engine.k.numel() > 2**31
    engine.check(served(engine))


def test_dense_and_compiled_calls():
    q, k, v = torch.randn(3, 1, 8, 64, device="cuda").half(), *torch.randn(2, 3, 512, 8, 64, device="cuda").half()
    lengths = torch.tensor([512, 3, 77], dtype=torch.int32, device="cuda")
    before = paged.counters["kernel"]
    out = paged.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert paged.counters["kernel"] == before + 1
    for item, length in enumerate(lengths.tolist()):
        own = (x[item : item + 1, :length].transpose(1, 2) for x in (k, v))
        right = torch.nn.functional.scaled_dot_product_attention(q[item : item + 1].transpose(1, 2), *own)
        assert torch.allclose(out[item], right[0].transpose(0, 1), atol=2e-3)
    called = lambda *t: paged.flash_attn_with_kvcache(*t[:3], cache_seqlens=t[3])  # noqa: E731
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, lengths), out)


def test_what_no_kernel_serves_is_answered_by_others():
    engine = Engine([5, 9], heads=3, heads_kv=1, dim=40, page=4)
    assert (
        paged.explain_flash_attn_with_kvcache(
            engine.queries, engine.k, engine.v, cache_seqlens=engine.lengths, page_table=engine.table
        ).kernel
        is None
    )
    engine.table.clamp_(min=0)
    engine.check(engine.call())

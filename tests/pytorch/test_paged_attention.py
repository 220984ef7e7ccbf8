"""`flash_attn_with_kvcache`: what calls mean, what is refused, and the answer without a kernel."""

from unittest.mock import ANY

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

torch = pytest.importorskip("torch")
paged = pytest.importorskip("attnsweep.serve.paged_attention")
plans = pytest.importorskip("attnsweep.serve.paged_plans")
varlen = pytest.importorskip("attnsweep.serve.paged_varlen")

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
LABELS = (
    "(3,4/2,1x40,32) bf16 causal paged(16,1x40+1x0+1x17)",
    "(3,4/2,3x40,32) fp16 causal paged(16,hnd,e4m3,1x40+1x2+1x33,seed3)",
    "(4,2,2x50,16) bf16 window(9,0) paged(1,2x50+1x1+1x20,shared5)",
    "(2,6/2,4x70,16) bf16 full paged(32,e4m3) softcap(5) sinks",
)


def tensor(bits, dtype):
    own = {1: np.uint8, 2: np.int16}[bits.itemsize]
    return torch.from_numpy(bits.view(own).copy()).view(TYPES[dtype])


def arguments(problem, seed=1):
    """The tensors and options of a call of a problem, as an engine has them."""
    inputs, layout = make_inputs(Case(problem), seed), problem.layout
    k, v = (tensor(inputs[name], layout.cache_dtype or problem.dtype) for name in "kv")
    if layout.order == "hnd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    left, right = (-1 if side is None else side for side in problem.mask.interval.sides)
    options = {
        "cache_seqlens": torch.from_numpy(np.array(inputs["seqused_k"])),
        "page_table": torch.from_numpy(np.array(inputs["block_table"])),
        "causal": right == 0,
        "window_size": (left, right),
        "softcap": problem.scores.softcap or 0.0,
    }
    options |= {f"{n}_descale": torch.from_numpy(inputs[f"{n}_scale"]) for n in "kv" if problem.scales}
    if problem.scores.sinks:
        options["sinks"] = torch.from_numpy(inputs["sinks"])
    return inputs, (tensor(inputs["q"], problem.dtype).transpose(1, 2), k, v), options


def call():
    return arguments(Problem.parse(LABELS[0]))[1:]


@pytest.mark.parametrize("label", LABELS)
def test_the_answer_behind_a_gather_is_right(label):
    problem = Problem.parse(label)
    inputs, tensors, options = arguments(problem)
    out, lse = paged.flash_attn_with_kvcache(*tensors, **options, return_softmax_lse=True)
    exact, _ = oracle_of(problem).exact(inputs, problem)
    right = log_sum_exp(inputs, problem, np.arange(problem.seqlen_q))
    found = out.transpose(1, 2).double().numpy()
    np.testing.assert_allclose(found, exact["o"], rtol=0, atol=2.0**-7 * np.abs(exact["o"]).max())
    np.testing.assert_allclose(lse.double().numpy(), right, rtol=1e-5, atol=1e-5)


def test_a_dense_cache_is_a_paged_one():
    problem = Problem.parse("(2,4/2,2x32,16) bf16 causal paged(16,1x32+1x20)")
    _, tensors, options = arguments(problem)
    expected = paged.flash_attn_with_kvcache(*tensors, **options)
    dense = [torch.zeros(2, 32, 2, 16, dtype=torch.bfloat16) for _ in range(2)]
    for item, length in enumerate(options["cache_seqlens"].tolist()):
        for at in range(length):
            page = options["page_table"][item, at // 16]
            for made, pages in zip(dense, tensors[1:], strict=True):
                made[item, at] = pages[page, at % 16]
    lengths = options["cache_seqlens"]
    assert torch.equal(paged.flash_attn_with_kvcache(tensors[0], *dense, cache_seqlens=lengths, causal=True), expected)
    long = [torch.cat([x, torch.full_like(x, float("nan"))], 1)[:, :33] for x in dense]  # no whole number of pages
    assert torch.equal(paged.flash_attn_with_kvcache(tensors[0], *long, cache_seqlens=lengths, causal=True), expected)


def test_a_dense_cache_whose_v_alone_has_heads_before_slots():
    """K could be read in pages of several slots, V cannot."""
    q, (k, v) = torch.randn(2, 3, 4, 16).half(), torch.randn(2, 2, 32, 2, 16).half()
    other = v.transpose(1, 2).contiguous().transpose(1, 2)
    how = {"cache_seqlens": torch.tensor([9, 30], dtype=torch.int32), "causal": True}
    right = paged.flash_attn_with_kvcache(q, k, v, **how)
    for given in ((k, other), (other, k)):
        wanted = right if given[0] is k else paged.flash_attn_with_kvcache(q, v, k, **how)
        assert torch.equal(paged.flash_attn_with_kvcache(q, *given, **how), wanted)
    new = torch.randn(2, 2, 2, 2, 16).half()
    caches = [each.clone() for each in (k, v)], [k.clone(), other.clone(memory_format=torch.preserve_format)]
    outs = [paged.flash_attn_with_kvcache(q, *each, *new, **how) for each in caches]
    assert torch.equal(*outs)
    assert all(torch.equal(*each) for each in zip(*caches, strict=True))


def test_one_length_is_of_all_requests_and_none_is_all_slots():
    _, _ = call()
    q, k, v = torch.randn(2, 1, 4, 16).half(), *torch.randn(2, 2, 32, 2, 16).half()
    by_tensor = paged.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([9, 9], dtype=torch.int32))
    assert torch.equal(paged.flash_attn_with_kvcache(q, k, v, cache_seqlens=9), by_tensor)
    assert torch.equal(paged.flash_attn_with_kvcache(q, k, v), paged.flash_attn_with_kvcache(q, k, v, cache_seqlens=32))


def changed(name, value):
    def of(tensors, options):
        if name in ("q", "k_cache", "v_cache"):
            at = ("q", "k_cache", "v_cache").index(name)
            tensors = (*tensors[:at], value(tensors[at]), *tensors[at + 1 :])
        else:
            options = options | {name: value(options.get(name))}
        return tensors, options

    return of


def in_pages_of(size):
    """The call with a cache whose pages have so many slots."""

    def of(tensors, options):
        q, *caches = tensors
        return (q, *(x.repeat(1, 4, 1, 1)[:, :size] for x in caches)), options

    return of


WRONG = [
    (changed("q", lambda q: q.float()), TypeError, "q is torch.float32"),
    (changed("q", lambda q: q[:, 0]), ValueError, "four dimensions"),
    (changed("q", lambda q: q.numpy if False else [1]), TypeError, "q is list"),
    (changed("k_cache", lambda k: k.half()), TypeError, "both are as q"),
    (changed("k_cache", lambda k: k[:, :0]), ValueError, "not the same|no slots"),
    (changed("k_cache", lambda k: k[..., :16]), ValueError, "not the same"),
    (changed("k_cache", lambda k: k[:1].expand(len(k), -1, -1, -1)), ValueError, "overlap"),
    (changed("k_cache", lambda k: k.transpose(2, 3).contiguous().transpose(2, 3)), ValueError, "not contiguous"),
    (
        changed("page_table", lambda t: t.long()),
        TypeError,
        "page_table is torch.int64, not torch.int32: give page_table.int()",
    ),
    (changed("page_table", lambda t: t[:2]), ValueError, "page_table is"),
    (
        changed("cache_seqlens", lambda t: t.long()),
        TypeError,
        "cache_seqlens is torch.int64, not torch.int32: give cache_seqlens.int()",
    ),
    (changed("cache_seqlens", lambda t: t[:2]), ValueError, "it has 3 numbers"),
    (in_pages_of(0), ValueError, "no slots"),
    (in_pages_of(3), ValueError, "pages of 3 slots, which no kernel reads: make pages of"),
    (in_pages_of(12), ValueError, "pages of 12 slots"),
    (changed("softcap", lambda _: -1.0), ValueError, "softcap"),
    (changed("softmax_scale", lambda _: float("nan")), ValueError, "softmax_scale is a finite number, not nan"),
    (changed("k_descale", lambda _: torch.ones(3, 2)), ValueError, "of an FP8 cache"),
    (changed("sinks", lambda _: torch.ones(3)), ValueError, "sinks"),
    (changed("out", lambda _: [1]), TypeError, "out is list, not a tensor"),
    (changed("out", lambda _: torch.ones(3)), ValueError, r"out is \(3,\), torch.float32 on cpu, and the output"),
    (changed("softmax_scale", lambda _: torch.tensor(0.5)), TypeError, "softmax_scale is a tensor, which may change"),
    (changed("softcap", lambda _: torch.tensor(0.5)), TypeError, "softcap is a tensor"),
    (changed("k", lambda _: torch.ones(3)), TypeError, "give both"),
    (changed("rotary_cos", lambda _: torch.ones(3)), NotImplementedError, "rotate q and k before"),
    (changed("rotary_cos", lambda _: torch.ones(3)), NotImplementedError, "rotary_cos"),
    (changed("attention_chunk", lambda _: 4), NotImplementedError, "attention_chunk"),
    (changed("block_table", lambda _: torch.ones(3)), TypeError, "two names"),
    (changed("cache_seqlens", lambda t: t.tolist()), TypeError, "cache_seqlens is list, not an int32 tensor"),
    (changed("page_table", lambda t: t[0]), ValueError, r"page_table is .* it is \(batch, blocks\)"),
    (changed("window_size", lambda _: 16), TypeError, r"window_size is 16, not \(left, right\), such as \(512, 0\)"),
    (changed("window_size", lambda _: (4, 2, 0)), TypeError, "window_size is .4, 2, 0., not"),
]


@pytest.mark.parametrize(("change", "kind", "said"), WRONG, ids=[f"{n} {said}" for n, (_, _, said) in enumerate(WRONG)])
def test_what_the_host_sees_is_refused_in_words(change, kind, said):
    tensors, options = change(*call())
    with pytest.raises(kind, match=said):
        paged.flash_attn_with_kvcache(*tensors, **options)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 24, 48])
def test_pages_that_kernels_read_are_answered(size):
    (q, *caches), options = in_pages_of(size)(*call())
    k, v = (pages.nan_to_num() for pages in caches)
    table = options["page_table"].clamp(0, len(k) - 1)
    lengths = options["cache_seqlens"].clamp(max=size * table.shape[1])
    how = {"cache_seqlens": lengths, "causal": True}
    dense = [pages[table.long()].flatten(1, 2) for pages in (k, v)]
    out = paged.flash_attn_with_kvcache(q, k, v, page_table=table, **how)
    assert torch.equal(out, paged.flash_attn_with_kvcache(q, *dense, **how))


@pytest.mark.parametrize(
    ("name", "at", "value", "said"),
    [
        ("cache_seqlens", (0,), -1, r"cache_seqlens\[0\] is -1"),
        ("cache_seqlens", (2,), 99, r"cache_seqlens\[2\] is 99: page_table has room for 0 to 48"),
        ("page_table", (0, 1), 77, r"page_table\[0, 1\] is 77"),
        ("page_table", (0, 0), -3, r"page_table\[0, 0\] is -3"),
    ],
)
def test_what_lies_on_the_device_is_named_if_asked_for_and_else_has_some_output(name, at, value, said):
    tensors, options = call()
    lengths = options["cache_seqlens"]
    longest = int(lengths.argmax())
    if name == "page_table":
        at = (longest, at[1])
        said = said.replace("[0,", f"[{longest},")
    options[name][at] = value
    with pytest.raises(ValueError, match=said):
        paged.flash_attn_with_kvcache(*tensors, **options, validate=True)
    assert paged.flash_attn_with_kvcache(*tensors, **options).shape == tensors[0].shape


def test_scales_that_cannot_be_are_named_if_asked_for():
    _, tensors, options = arguments(Problem.parse(LABELS[1]))
    options["v_descale"][1, 0] = float("nan")
    with pytest.raises(ValueError, match="v_descale has numbers"):
        paged.flash_attn_with_kvcache(*tensors, **options, validate=True)


def test_compiled_calls_are_as_eager_ones():
    tensors, options = call()
    called = lambda *t: paged.flash_attn_with_kvcache(*t, **options)  # noqa: E731
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), paged.flash_attn_with_kvcache(*tensors, **options))


def test_no_requests_no_slots_and_a_window_in_a_list():
    tensors, options = call()
    as_list = paged.flash_attn_with_kvcache(*tensors, **options | {"window_size": [5, 0]})
    assert torch.equal(as_list, paged.flash_attn_with_kvcache(*tensors, **options | {"window_size": (5, 0)}))
    none = {"cache_seqlens": options["cache_seqlens"][:0], "page_table": options["page_table"][:0]}
    assert paged.flash_attn_with_kvcache(tensors[0][:0], *tensors[1:], **none).shape == (0, *tensors[0].shape[1:])
    empty = {"cache_seqlens": options["cache_seqlens"] * 0, "page_table": options["page_table"][:, :0]}
    assert (paged.flash_attn_with_kvcache(*tensors, **empty) == 0).all()


def test_explain_says_who_answers():
    tensors, options = call()
    assert "cpu" in str(paged.explain_flash_attn_with_kvcache(*tensors, **options))


class Launches:
    """Launches of a plan that are noted, not made."""

    def __init__(self):
        self.issued = []

    def issue(self, addresses, stream):
        self.issued.append((addresses, stream))


@pytest.fixture
def launches(monkeypatch):
    """Every call is served by these launches, planned once; `launches.planned` has the calls that were."""
    made = Launches()
    made.planned = []
    plan = paged.Plan(paged.Explanation("a config", "kernel", "", 0.0, None), made)
    monkeypatch.setattr(paged, "plan_of", lambda call, config=None: made.planned.append(call) or plan)
    monkeypatch.setattr(paged, "current_device", lambda: 0)
    monkeypatch.setattr(paged, "raw_stream", lambda _: 7)
    monkeypatch.setattr(paged.known_calls, "kinds", ())
    return made


def test_a_call_of_a_known_kind_is_not_understood_again(launches):
    (q, k, v), options = call()
    first = paged.flash_attn_with_kvcache(q, k, v, **options)
    launches.planned.clear()
    other = [torch.empty_like(each) for each in (q, k, v)]
    second = paged.flash_attn_with_kvcache(*other, **options)
    assert (launches.planned, second.shape, second.stride()) == ([], first.shape, first.stride())
    (of_first, _), (of_second, stream) = launches.issued
    expected = [*(each.data_ptr() for each in other), second.data_ptr()]
    assert ([*of_second[:4]], of_second[4:], stream) == (expected, of_first[4:], 7)


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_output_that_is_given_is_filled(launches, scheduled):
    (q, k, v), options = call()
    if scheduled:
        runs = torch.zeros(64, dtype=torch.uint8)
        options["scheduler_metadata"] = paged.ScheduleMetadata(runs, "WARPS=4 SCHEDULE=1", (0, 3, 1, 4, 2, -1))
    for _ in range(2):
        out = torch.empty(q.shape, dtype=q.dtype)
        assert paged.flash_attn_with_kvcache(q, k, v, out=out, **options) is out
        addresses, _ = launches.issued[-1]
        assert addresses[3] == out.data_ptr()
        assert addresses[plans.NAMES.index("runs")] == (runs.data_ptr() if scheduled else 0)
    assert len(launches.planned) == 2  # the first call: when it is answered, and when it is noted
    wide = torch.empty(*q.shape[:3], 2 * q.shape[3], dtype=q.dtype)[..., : q.shape[3]]  # the kernel cannot fill it
    assert paged.flash_attn_with_kvcache(q, k, v, out=wide, **options) is wide
    assert launches.issued[-1][0][3] != wide.data_ptr()


@pytest.mark.parametrize(("name", "place"), [("q", 0), ("k_cache", 1), ("v_cache", 2)])
@pytest.mark.parametrize("head", [0, 1])
def test_an_output_that_lies_where_the_call_reads_is_refused(name, place, head):
    """The first rows of it begin where those of a tensor do, or one head behind."""
    tensors, options = call()
    columns, size = tensors[0].shape[-1], tensors[0].numel()
    one = torch.cat([tensors[place].flatten(), tensors[0].flatten()])
    own = [each if at != place else one[: each.numel()].view_as(each) for at, each in enumerate(tensors)]
    out = one[head * columns :][:size].view_as(tensors[0])
    with pytest.raises(ValueError, match=f"out and {name} share memory, and kernels read {name} while"):
        paged.flash_attn_with_kvcache(*own, **options, out=out)


def test_an_output_between_the_rows_of_q_is_filled():
    """They lie in one allocation, and have no element in common."""
    (q, k, v), options = call()
    right = paged.flash_attn_with_kvcache(q, k, v, **options)
    beside, out = torch.cat([q, q], 2).split(q.shape[2], 2)
    assert paged.flash_attn_with_kvcache(beside, k, v, **options, out=out) is out
    assert torch.equal(out, right)
    assert torch.equal(beside, q)


def test_an_output_over_q_is_refused_also_where_the_call_is_known(launches):
    (q, k, v), options = call()
    paged.flash_attn_with_kvcache(q, k, v, out=torch.empty_like(q, memory_format=torch.contiguous_format), **options)
    q = q.contiguous().as_strided(q.shape, q.stride()) if not q.is_contiguous() else q
    launches.issued.clear()
    both = torch.empty(2 * q.numel() + 8, dtype=q.dtype)
    for at, refused in ((0, True), (q.numel() - 8, True), (q.numel(), False)):
        given = both[: q.numel()].as_strided(q.shape, q.stride()), both[at:][: q.numel()].view(q.shape)
        if refused:
            with pytest.raises(ValueError, match="out and q share memory"):
                paged.flash_attn_with_kvcache(given[0], k, v, out=given[1], **options)
        else:
            paged.flash_attn_with_kvcache(given[0], k, v, out=given[1], **options)
        assert len(launches.issued) == 1 - refused


@pytest.mark.parametrize(("name", "place"), [("k_cache", 1), ("v_cache", 2)])
def test_an_output_over_a_cache_is_refused_also_where_the_call_is_known(launches, name, place):
    given, options = call()
    out = torch.empty_like(given[0], memory_format=torch.contiguous_format)
    paged.flash_attn_with_kvcache(*given, out=out, **options)
    launches.issued.clear()
    over = given[place].as_strided((out.numel(),), (1,)).view(out.shape)
    with pytest.raises(ValueError, match=f"out and {name} share memory"):
        paged.flash_attn_with_kvcache(*given, out=over, **options)
    assert not launches.issued
    paged.flash_attn_with_kvcache(*given, out=out, **options)
    assert launches.issued


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nested_tensor_in_a_known_call_is_an_error_and_not_the_processs_end(launches, place):
    given, options = call()
    paged.flash_attn_with_kvcache(*given, **options)
    given = [*given]
    given[place] = torch.nested.nested_tensor([*given[place]])
    with pytest.raises(RuntimeError, match="strides"):
        paged.flash_attn_with_kvcache(*given, **options)


def test_a_list_of_a_windows_sides_may_change_between_calls(launches):
    (q, k, v), options = call()
    options["window_size"] = sides = [5, 0]
    paged.flash_attn_with_kvcache(q, k, v, **options)
    launches.planned.clear()
    sides[0] = 2
    paged.flash_attn_with_kvcache(q, k, v, **options)
    assert launches.planned[0].sides == (2, 0)


@pytest.mark.parametrize(
    ("at", "said"),
    [(0, "device 9"), (1, "requests 9"), (2, "queries 9"), (3, "heads 9"), (4, "key heads 9"), (5, "left 9")],
)
def test_a_schedule_of_other_calls_is_refused_also_where_the_call_is_known(launches, at, said):
    """Its blocks would write to requests that the output has not."""
    (q, k, v), options = call()
    runs, of = torch.zeros(64, dtype=torch.uint8), [0, 3, 1, 4, 2, -1]
    own = paged.ScheduleMetadata(runs, "WARPS=4 SCHEDULE=1", tuple(of))
    paged.flash_attn_with_kvcache(q, k, v, scheduler_metadata=own, **options)
    launches.issued.clear()
    other = own._replace(of=(*of[:at], 9, *of[at + 1 :]))
    with pytest.raises(ValueError, match=f"made for .*{said}, and the call has {of[at]}: make"):
        paged.flash_attn_with_kvcache(q, k, v, scheduler_metadata=other, **options)
    assert not launches.issued


SIZES = {"max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 128}


def test_lengths_on_the_host_have_no_schedule():
    assert paged.get_scheduler_metadata(3, **SIZES, cache_seqlens=torch.ones(3).int()) is None


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"cache_seqlens": torch.ones(3).long()}, TypeError, "cache_seqlens is torch.int64, not torch.int32"),
        ({"cache_seqlens": torch.ones(4).int()}, ValueError, "batch_size is 3, and cache_seqlens has 4"),
        ({"window_size": 16}, TypeError, "window_size is 16, not"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_words(options, kind, said):
    with pytest.raises(kind, match=said):
        paged.get_scheduler_metadata(3, **SIZES, **{"cache_seqlens": torch.ones(3).int()} | options)


@pytest.mark.parametrize("known", [False, True])
def test_a_schedule_of_another_package_is_refused(launches, known):
    (q, k, v), options = call()
    if known:
        paged.flash_attn_with_kvcache(q, k, v, **options)
    with pytest.raises(TypeError, match="get_scheduler_metadata of attnsweep returned, not Tensor"):
        paged.flash_attn_with_kvcache(q, k, v, scheduler_metadata=torch.zeros(4).int(), **options)


def test_a_table_that_is_made_in_a_capture_serves_no_other_call(launches, monkeypatch):
    """It has no values before the graph is replayed."""
    calls = pytest.importorskip("attnsweep.serve.paged_call")
    calls._table_of.cache_clear()
    capturing = [True]
    for module in (paged, calls):
        monkeypatch.setattr(module, "is_capturing", lambda: capturing[0])
    monkeypatch.setattr(paged, "current_device", lambda: ANY)  # that of these CPU tensors
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    q, k, v = torch.zeros(2, 1, 4, 16).half(), *torch.zeros(2, 2, 32, 2, 16).half()
    lengths, tables = torch.full((2,), 32).int(), []
    for capturing[0] in (True, False, False, True):
        launches.planned.clear()
        paged.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
        tables += [each.table for each in launches.planned[:1]]
    in_capture, eager = tables  # which the two last calls have too
    assert in_capture.data_ptr() != eager.data_ptr()
    assert [addresses[4] for addresses, _ in launches.issued[1:]] == [eager.data_ptr()] * 3


@pytest.mark.parametrize(("tokens", "most"), [((0, 3, 4, 6), 3), ((0, 2, 4, 6), 2)])
def test_a_packed_call_of_a_known_kind_is_not_understood_again(launches, tokens, most):
    (_, k, v), options = call()
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    q, begins = torch.zeros(6, 4, 32).bfloat16(), ints(*tokens)
    how = {"max_seqlen_q": most, "seqused_k": options["cache_seqlens"], "block_table": options["page_table"]}
    first = varlen.flash_attn_varlen_func(q, k, v, cu_seqlens_q=begins, causal=True, **how)
    launches.planned.clear()
    others = ints(0, 1, 4, 6) if most == 3 else begins.clone()
    second = varlen.flash_attn_varlen_func(q.clone(), k, v, cu_seqlens_q=others, causal=True, **how)
    assert (launches.planned, second.shape, second.stride()) == ([], first.shape, first.stride())
    (of_first, _), (of_second, _) = launches.issued
    same = [*range(1, 3), *range(4, 10)]
    assert [of_first[at] for at in same] == [of_second[at] for at in same]
    assert of_second[3] == second.data_ptr()
    assert most == 2 or of_second[10:12] == (others.data_ptr(), others.data_ptr() + 4)
    wide = torch.zeros(6, 8, 32).bfloat16()[:, ::2]  # an output that the kernel cannot fill
    assert varlen.flash_attn_varlen_func(q, k, v, cu_seqlens_q=begins, causal=True, out=wide, **how) is wide
    assert launches.planned


@pytest.mark.parametrize(
    "change",
    [
        lambda g, o: g.update(q=torch.cat([g["q"]] * 2, -1)[..., :32]),
        lambda g, o: g.update(q=g["q"].half(), k=g["k"].half(), v=g["v"].half()),
        lambda g, o: g.update(k=g["k"].transpose(1, 2).contiguous().transpose(1, 2)),
        lambda g, o: g.update(k=g["k"].to(TYPES["e4m3"]), v=g["v"].to(TYPES["e4m3"])),
        lambda g, o: o.update(page_table=o["page_table"][:, :2]),
        lambda g, o: o.update(causal=False),
        lambda g, o: o.update(window_size=(5, 0)),
        lambda g, o: o.update(softcap=3.0),
        lambda g, o: o.update(softmax_scale=0.5),
        lambda g, o: o.update(return_softmax_lse=True),
        lambda g, o: o.update(cache_seqlens=17),
        lambda g, o: o.update(sinks=torch.zeros(4)),
    ],
)
def test_a_call_of_another_kind_is_planned(launches, change):
    (q, k, v), options = call()
    paged.flash_attn_with_kvcache(q, k, v, **options)
    launches.planned.clear()
    given = {"q": q, "k": k, "v": v}
    change(given, options)
    paged.flash_attn_with_kvcache(*given.values(), **options)
    assert launches.planned


def test_what_changed_in_place_is_another_kind(launches):
    (q, k, v), options = call()
    paged.flash_attn_with_kvcache(q, k, v, **options)
    launches.planned.clear()
    k.as_strided_(k.shape, (k.stride(0), k.stride(2) * k.shape[2], k.stride(2) // 2, 1))
    with pytest.raises(ValueError, match="overlap"):
        paged.flash_attn_with_kvcache(q, k, v, **options)


@pytest.mark.parametrize("name", ["v", "k_scale", "v_scale"])
def test_strides_of_each_tensor_are_of_a_calls_kind(name):
    """A plan that takes k's for v's would serve a call where they differ, and read beside the tensor."""
    _, tensors, options = arguments(Problem.parse(LABELS[1]))
    scales = options["k_descale"], options["v_descale"]
    given = (*tensors, options["cache_seqlens"], options["page_table"], *scales, None, None, 0.0, True, (-1, -1), False)
    call_ = paged.understood(*given)
    tensor_ = getattr(call_, name)
    other = call_._replace(**{name: tensor_[:1].expand(tensor_.shape)})
    assert call_.kind == call_._replace(**{name: tensor_.clone(memory_format=torch.preserve_format)}).kind
    assert call_.kind != other.kind


@pytest.mark.parametrize(("ratio", "installed", "serves"), [(0.9, True, False), (0.9, False, True), (0.98, True, True)])
def test_flash_attention_3_serves_where_it_was_faster(monkeypatch, ratio, installed, serves):
    label = "(8,64/8,8x8192,128) bf16 causal paged(16)"
    arch = arch_named("sm_90a")
    config = plans.Config(plans.DEFAULTS[plans.DECODE][0])
    recorded = plans._Recorded("H200", Problem.parse(label), ratio, {(plans.DECODE, config): 1.0})
    monkeypatch.setattr(plans, "_recorded", lambda: [recorded])
    monkeypatch.setattr(plans, "has_flash_3", lambda: installed)
    _, chosen, why = plans.chosen(Problem.parse(label), arch, "H200")
    assert (chosen is not None, "FlashAttention-3 took 0.9 of our time" in why) == (serves, not serves)


@pytest.mark.parametrize(
    ("label", "family", "packed"),
    [
        ("(3,32/8,1x4000,128) bf16 causal paged(16)", "decode_paged_mma", False),
        ("(5,8/4,3x700,64) fp16 window(40,0) paged(64,hnd) softcap(3)", "decode_paged_mma", False),
        ("(5,32/8,2x700,128) bf16 causal paged(16,e4m3)", "decode_paged_mma", False),
        ("(3,28/4,300x4000,128) bf16 causal paged(16)", "append_paged_wgmma", False),
        ("(3,28/4,300x4000,128) bf16 causal paged(16)", "append_paged_wgmma", True),
        ("(6,8/2,77x900,64) fp16 full paged(48,hnd)", "append_paged_wgmma", True),
        ("(6,8/2,77x900,64) fp16 full paged(4,hnd)", "append_paged_wgmma", True),
        ("(3,28/4,300x4000,128) bf16 causal paged(1)", "append_paged_wgmma", False),
        ("(3,28/4,300x4000,128) bf16 causal paged(16,e4m3)", "append_paged_wgmma", True),
        ("(3,16/8,300x4000,256) bf16 window(40,0) paged(64,e4m3)", "append_paged_wgmma", True),
    ],
)
def test_a_call_is_launched_as_its_own_problem_would_be(monkeypatch, label, family, packed):
    """It is planned with rounded sizes, so that the steps of an engine have one plan."""
    problem, arch, bound = Problem.parse(label), arch_named("sm_90a"), []
    monkeypatch.setattr(plans, "arch_of", lambda _: arch)
    monkeypatch.setattr(plans, "name_of", lambda _: "H200")
    monkeypatch.setattr(plans, "bound", lambda kernels, index, names, tensors=None: bound.append((kernels, tensors)))
    plans._choice.cache_clear()
    _, (q, k, v), options = arguments(problem)
    tensors = [x.to("meta").to(TYPES[problem.dtype]) if x is q else x for x in (q, k, v)]
    q = tensors[0].contiguous()
    extra = ()
    if packed:
        q = q.flatten(0, 1)
        extra = (torch.zeros(problem.batch + 1, dtype=torch.int32), problem.seqlen_q)
    scales = [options.get(f"{name}_descale") for name in "kv"]
    how = (*scales, None, None, options["softcap"], options["causal"], options["window_size"])
    given = (q.new_zeros(q.shape, device="cpu"), k, v, options["cache_seqlens"], options["page_table"])
    call_ = paged.understood(*given, *how, False, *extra)
    choice = plans._choice(plans._like(call_), 0, False, packed, None)
    assert choice.family == family
    (plans._decoding if family == plans.DECODE else plans._appending)(choice, call_, 0)
    plans._choice.cache_clear()
    (kernels, maps), own = bound[0], plans.families()[family]
    expected = own.launches(choice.config, problem, arch)["fwd"]
    args = kernels[0].launch.args
    assert len(args) == len(expected.args)
    numbers = [at for at, arg in enumerate(expected.args) if isinstance(arg, int | float)]
    by_rows = family == plans.APPEND and "k" in args
    strides = 12 if family == plans.DECODE else 10 if by_rows else 4
    told, right = ([a[at] for at in numbers[:-strides]] for a in (args, expected.args))
    if packed:  # one item has all tokens
        told[3] = told[4] = right[3] = right[4] = 0
        assert [*args[6:8]] == ["query_begins", "query_ends"]
        assert kernels[0].defines["QUERIES"] == "1"
    assert told == pytest.approx(right)
    assert kernels[0].launch.smem_bytes == expected.smem_bytes
    if family == plans.DECODE:
        assert args[-6:-2] == (*k.stride()[:3], call_.table.stride(0))
    elif by_rows:
        scales = (problem.scales, call_.k_scale.stride()) if problem.scales else (("lse", "lse"), (0, 0))
        assert args[-9:] == (call_.table.stride(0), *scales[0], len(k), *k.stride()[:3], *scales[1])
        assert [*args[1:3]] == ["k", "v"]
    else:
        assert maps["k"].sizes == tuple(next(a for a in expected.args if getattr(a, "buffer", 0) == "k").dims[::-1])


@pytest.mark.parametrize(
    "label", ["(12,28/4,2x5000,128) bf16 causal paged(16)", "(9,16/2,2x3000,128) fp16 full paged(64)"]
)
def test_rows_that_fit_a_tile_are_in_one(label):
    """Two tiles read the keys twice, which is as fast by luck alone."""
    _, config, _ = plans.chosen(Problem.parse(label), arch_named("sm_90a"), "H200")
    assert config["ROW_FRAGMENTS"] == 2


def test_a_card_that_nothing_was_recorded_on_is_served_too():
    problem = Problem.parse("(12,28/4,1x5000,128) bf16 causal paged(16)")
    family, config, why = plans.chosen(problem, arch_named("sm_80"), "A100")
    assert (family.name, config["ROW_FRAGMENTS"]) == (plans.DECODE, 1)
    assert "of an H200" in why


@pytest.mark.parametrize("lse", [False, True])
def test_log_sum_exps_are_written_behind_a_schedule_too(monkeypatch, lse):
    monkeypatch.setattr(plans, "arch_of", lambda _: arch_named("sm_90a"))
    plans._choice.cache_clear()
    sizes = (8, 32, 8, 1, 256, 128, "bf16", 16, None, plans.CAUSAL, plans.Scores())
    scheduled = plans.Config({**plans.DEFAULTS[plans.DECODE][0], "SCHEDULE": 1, "LSE": 0})
    choice = plans._choice(sizes, 0, lse, False, scheduled)
    plans._choice.cache_clear()
    assert choice.kernels["fwd"].defines["LSE"] == str(int(lse))
    assert choice.kernels["fwd"].defines["SCHEDULE"] == "1"


def test_a_schedule_beside_packed_queries_is_left_out(monkeypatch):
    made = []
    monkeypatch.setattr(plans, "_made", lambda call, scheduled: made.append(scheduled) or "a plan")
    monkeypatch.setattr(plans, "_plans", {})
    (q, k, v), options = call()
    given = (q.flatten(0, 1), k, v, options["cache_seqlens"], options["page_table"], None, None, None, None, 0.0, True)
    packed = paged.understood(*given, (-1, -1), False, torch.tensor([0, 1, 1, 3], dtype=torch.int32), 2)
    assert plans.plan_of(packed, plans.Config({"SCHEDULE": 1})) == "a plan"
    assert made == [None]


def test_new_keys_of_caches_with_other_strides_are_stored_apart(monkeypatch):
    store = pytest.importorskip("attnsweep.serve.paged_store")
    cards = []
    monkeypatch.setattr(store, "_on_the_card", lambda k, v, *_: cards.append((k.stride(), v.stride())) or k)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    k, v = torch.zeros(2, 4, 2, 8), torch.zeros(2, 2, 4, 8).transpose(1, 2)
    store._stored._init_fn(k, v, k, v, torch.zeros(2).int(), torch.zeros(2, 1).int())
    assert cards == [(k.stride(), k.stride()), (v.stride(), v.stride())]

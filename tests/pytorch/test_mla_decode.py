"""`mla_decode`: what calls mean, what is refused, the answer without a kernel, and what the kernel gets."""

import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import attnsweep
from attnsweep.core.cases import Case
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.family import TensorMap
from attnsweep.tools.simulator import COMPILER, Simulator, sources
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

torch = pytest.importorskip("torch")
mla = pytest.importorskip("attnsweep.serve.mla")
others = pytest.importorskip("attnsweep.serve.paged_others")
paged = pytest.importorskip("attnsweep.serve.paged_attention")
launch = pytest.importorskip("attnsweep.serve.paged_launch")

PROBLEM = Problem.parse("(4,20/1,3x150,576/512) bf16 causal paged(64,1x150+1x64+1x0+1x2) value_in_key")


def tensor(bits):
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def arguments(problem=PROBLEM):
    """The inputs of a problem; and as an engine has them: a table in a wider one, pages that lie apart."""
    inputs = make_inputs(Case(problem), 1)
    pages = tensor(inputs["k"])
    pool = torch.full((len(pages), 2, 64, 1, 576), float("nan"), dtype=torch.bfloat16)
    pool[:, 1] = pages
    table = torch.full((problem.batch, 7), -5, dtype=torch.int32)
    blocks = inputs["block_table"].shape[1]
    table[:, :blocks] = torch.from_numpy(np.array(inputs["block_table"]))
    q = tensor(inputs["q"]).transpose(1, 2)
    lengths = torch.from_numpy(np.array(inputs["seqused_k"]))
    return inputs, [q, pool[:, 1], table[:, :blocks], lengths]


def check(out, lse, inputs, problem=PROBLEM):
    exact, _ = oracle_of(problem).exact(inputs, problem)
    right = log_sum_exp(inputs, problem, np.arange(problem.seqlen_q))
    found = out.transpose(1, 2).double().numpy()
    np.testing.assert_allclose(found, exact["o"], rtol=0, atol=2.0**-7 * np.abs(exact["o"]).max())
    np.testing.assert_allclose(lse.double().numpy(), right, rtol=1e-5, atol=1e-4)


def test_the_answer_behind_a_gather_is_right():
    inputs, given = arguments()
    out, lse = attnsweep.mla_decode(*given, softmax_scale=PROBLEM.scale, return_lse=True)
    check(out, lse, inputs)
    alone = attnsweep.mla_decode(given[0], given[1][:, :, 0], *given[2:], softmax_scale=PROBLEM.scale)
    assert torch.equal(alone, out)
    assert attnsweep.mla_plan(given[3], 60) is None
    how = {"softmax_scale": PROBLEM.scale, "return_lse": True}
    compiled = torch.compile(lambda *x: attnsweep.mla_decode(*x, **how), backend="eager", fullgraph=True)
    assert all(torch.equal(*each) for each in zip(compiled(*given), (out, lse), strict=True))


def in_parts(given, scale):
    """The arguments of `flash_attn_with_kvcache` for a call of mla_decode, as engines have them."""
    q, kv, table, lengths = given
    options = {"qv": q[..., :512].clone(), "cache_seqlens": lengths, "page_table": table}
    return (q[..., 512:].clone(), kv[..., 512:], kv[..., :512]), options | {"softmax_scale": scale, "causal": True}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("sms", "planned", "apart"), [(132, 0, 1), (5, 0, 0), (132, 1, 0), (5, 1, 1)])
def test_the_kernel_gets_what_an_engine_has(monkeypatch, sms, planned, apart):
    """The launches that a card would get run in the simulator. apart: q and qv of FlashAttention-3's form."""
    monkeypatch.setattr(mla, "arch_of", lambda _: replace(ARCHS["sm_90a"], sm_count=sms))
    made = []
    monkeypatch.setattr(mla, "bound", lambda kernels, *_: made.extend(kernels))
    inputs, given = arguments()
    q, cache, table, lengths = given
    call = mla._understood(*given, 512, PROBLEM.scale)._replace(lse=True)
    if apart:
        tensors, options = in_parts(given, PROBLEM.scale)
        rest = [options[name] for name in ("cache_seqlens", "page_table")]
        own = (*tensors, *rest, None, None, None, PROBLEM.scale, 0.0, True, (-1, -1), True, None, None)
        call = mla.of_latent(paged.understood(*own, options["qv"]))
        q = call.q
    sizes = {}
    if planned:
        mla._of_plan.cache_clear()
        _, *makers = mla._of_plan(4, 60, torch.device("cpu"))
        sizes = {name: make().nbytes for name, make in zip(("shares", "first_slot"), makers, strict=True)}
        call = call._replace(shares=lengths, first_slot=lengths)
    kernels, spaces = mla._of_call(call, mla._config(call, 0), 0)
    sizes |= {name: spaces[name] for name in ("partial", "partial_lse", "counters") if name in spaces}
    sizes["lse"] = 4 * 4 * 60
    if "counters" in sizes:  # kept at 0 on a card, where a plan of the operator's does not write them
        args = [*made[0].launch.args]
        args[3], args[-1] = "counters", spaces["counters"] // 4
        made[0] = made[0]._replace(launch=replace(made[0].launch, args=tuple(args)))
    tensors = mla._in_maps(call)

    def run_as(launch):
        def of(arg):
            if not isinstance(arg, TensorMap):
                return arg
            told = tensors[arg.buffer]
            box = (*arg.box[: 4 if told.sizes[-1] == arg.dims[0] else 2], 1)[: len(told.sizes)]  # as the driver
            return TensorMap(arg.buffer, told.sizes[::-1], tuple(2 * s for s in told.strides[-2::-1]), box)

        return replace(launch, args=tuple(map(of, launch.args)))

    family, made = launch.families()["flash_mla_wgmma"], [*made, *kernels]
    with Simulator() as simulator:
        stages = {
            kernel.launch.function: (
                run_as(kernel.launch),
                simulator.stage(family, sources(family), kernel.launch.function, kernel.defines, asan=False),
            )
            for kernel in made
        }
        pool = torch.as_strided(cache, (len(cache) * 2 * 64 * 576 - 64 * 576,), (1,), cache.storage_offset())
        bits = {"q": q.contiguous(), "k": pool}
        bits = {name: x.view(torch.int16).numpy() for name, x in bits.items()}
        bits |= {
            "block_table": table.as_strided((table.stride(0) * 4 - 4,), (1,)).numpy(),
            "seqused_k": lengths.numpy(),
        }
        left = simulator.run(stages, bits, {"o": 2 * 4 * 60 * 512}, sizes)
    out = torch.from_numpy(left["o"].view(np.int16)).view(torch.bfloat16).view(4, 3, 20, 512)
    check(out, torch.from_numpy(left["lse"].view(np.float32)).view(4, 20, 3), inputs)


def changed(at, value):
    def of(given, options):
        if isinstance(at, int):
            given = [*given[:at], value(given[at]), *given[at + 1 :]]
        else:
            options = options | {at: value}
        return given, options

    return of


WRONG = [
    (changed(0, lambda q: q.float()), TypeError, "both have one dtype, float16 or bfloat16"),
    (changed(0, lambda q: q[..., :512]), ValueError, r"it is \(batch, seqlen_q, heads, 576\)"),
    (changed(0, lambda _: [1]), TypeError, "q is list|list"),
    (changed(1, lambda k: k.half()), TypeError, "both have one dtype, float16 or bfloat16"),
    (
        changed(1, lambda k: k[:, :32]),
        ValueError,
        r"is \(\d, 32, 1, 576\), not \(pages, 64, 1, 576\): .* pages of 64 keys",
    ),
    (changed(1, lambda k: k.expand(-1, -1, 2, -1)), ValueError, "one key head"),
    (changed(1, lambda k: k[:1].expand(len(k), -1, -1, -1)), ValueError, "rows overlap"),
    (changed(1, lambda k: k[..., :512]), ValueError, "kv_cache is"),
    (
        changed(1, lambda k: k.transpose(1, 3).contiguous().transpose(1, 3)),
        ValueError,
        "rows overlap, or are not whole",
    ),
    (changed(1, lambda k: k[:1].as_strided((1, 64, 1, 576), (0, 512, 576, 1))), ValueError, "rows overlap"),
    (changed(1, lambda k: k[:0]), ValueError, "kv_cache is"),
    (changed(0, lambda q: q[:, 0]), ValueError, r"it is \(batch, seqlen_q, heads, 576\)"),
    (changed(0, lambda q: q[:, :, :0]), ValueError, r"it is \(batch, seqlen_q, heads, 576\)"),
    (changed(2, lambda t: t.long()), TypeError, "block_table is torch.int64, not torch.int32: give block_table.int()"),
    (changed(2, lambda t: t[:2]), ValueError, "it has a row of each of 4"),
    (
        changed(3, lambda t: t.long()),
        TypeError,
        "cache_seqlens is torch.int64, not torch.int32: give cache_seqlens.int()",
    ),
    (changed(3, lambda t: t[:2]), ValueError, "it has 4 numbers"),
    (changed("softmax_scale", 0.0), ValueError, "softmax_scale is a number above 0"),
    *((changed("softmax_scale", x), ValueError, "is a number above 0") for x in (-1.0, np.nan, np.inf, None)),
    *((changed("head_dim_v", x), ValueError, "head_dim_v is 512") for x in (576, 256)),
    (changed(2, lambda t: t[:, ::2]), ValueError, "its rows are not contiguous"),
    (changed(2, lambda t: t[:, :0]), ValueError, "block_table is"),
    (changed("plan", 3), TypeError, "plan is what mla_plan returned"),
    (changed("plan", mla.MlaPlan(torch.zeros(8), torch.zeros(5), 59)), ValueError, "4 requests of 59 rows"),
    (changed("plan", mla.MlaPlan(torch.zeros(8), torch.zeros(4), 60)), ValueError, "3 requests of 60 rows"),
]


@pytest.fixture
def card(monkeypatch):
    """Launches that are noted, of a card that CPU tensors seem to be on."""

    class Launches(list):
        def issue(self, addresses, stream):
            self.append(dict(zip(mla._NAMES, addresses, strict=True)))

    made, zeros, empty = Launches(), torch.zeros, torch.empty
    monkeypatch.setattr(launch, "_spaces", {})
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda *of, device=None, **how: zeros(*of, **how))
    monkeypatch.setattr(torch, "empty", lambda *of, device=None, **how: empty(*of, **how))
    mla._of_plan.cache_clear()
    monkeypatch.setattr(mla, "arch_of", lambda _: ARCHS["sm_90a"])
    monkeypatch.setattr(mla, "name_of", lambda _: "H200")
    monkeypatch.setattr(mla, "bound", lambda *_: made)
    monkeypatch.setattr(mla, "_served", {})
    for known in (mla._known, mla._known_in_parts):
        monkeypatch.setattr(known, "kinds", ())
    monkeypatch.setattr(mla, "current_device", lambda: 0)
    monkeypatch.setattr(paged, "current_device", lambda: None)  # that of CPU tensors
    for module in (mla, paged):
        monkeypatch.setattr(module, "raw_stream", lambda _: 7)
        monkeypatch.setattr(module, "counters", type(module.counters)())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    return made


@pytest.mark.parametrize(("change", "kind", "said"), WRONG, ids=[f"{n} {said}" for n, (_, _, said) in enumerate(WRONG)])
def test_what_the_host_sees_is_refused_in_words(card, change, kind, said):
    """Also where a right call went before, so that its kind is known."""
    given, options = arguments()[1], {"softmax_scale": PROBLEM.scale}
    attnsweep.mla_decode(*given, **options, plan=plan_of(given))
    attnsweep.mla_decode(given[0].contiguous(), *given[1:], **options)
    given, options = change(given, options)
    with pytest.raises(kind, match=said):
        attnsweep.mla_decode(*given, **options)


def plan_of(given):
    """A plan for these arguments."""
    batch, queries, heads, _ = given[0].shape
    return mla.MlaPlan(torch.zeros(8).int(), torch.zeros(batch + 1).int(), queries * heads)


# ---- kinds of calls that are known ----
@pytest.fixture
def understood(monkeypatch):
    """The calls that were understood."""
    calls, real = [], mla._understood
    monkeypatch.setattr(mla, "_understood", lambda *given: calls.append(given) or real(*given))
    return calls


@pytest.mark.parametrize("planned", [False, True])
def test_a_call_of_a_known_kind_is_not_understood_again(card, understood, planned):
    given = arguments()[1]
    given[0] = given[0].contiguous()
    first, second = ([x.clone() if x is given[0] else x for x in given] for _ in range(2))
    plans = [plan_of(given) if planned else None for _ in range(2)]
    outs = [
        attnsweep.mla_decode(*each, softmax_scale=PROBLEM.scale, plan=plan, return_lse=True)
        for each, plan in zip((first, second), plans, strict=True)
    ]
    assert (len(understood), mla.counters) == (1, {"kernel": 2})
    for launch, each, plan, (out, lse) in zip(card, (first, second), plans, outs, strict=True):
        assert (launch["q"], launch["o"], launch["lse"]) == (each[0].data_ptr(), out.data_ptr(), lse.data_ptr())
        assert launch["shares"] == (plan.shares.data_ptr() if planned else 0)
        assert (out.shape, lse.shape) == ((4, 3, 20, 512), (4, 20, 3))
    assert [launch["k"] for launch in card] == [given[1].data_ptr()] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda g, o: g.__setitem__(0, g[0][:, :2].contiguous()),
        lambda g, o: g.__setitem__(0, torch.cat([g[0]] * 2, -1)[..., :576]),  # is copied into rows
        lambda g, o: g.__setitem__(1, g[1].contiguous()),
        lambda g, o: g.__setitem__(2, g[2][:, :2]),
        lambda g, o: g.__setitem__(slice(0, 2), [x.half() for x in g[:2]]),
        lambda g, o: o.update(softmax_scale=0.5),
        lambda g, o: o.update(causal=False),
        lambda g, o: o.update(return_lse=True),
        lambda g, o: o.update(plan=plan_of(g)),
    ],
    ids=["queries", "rows", "cache", "table", "dtype", "scale", "causal", "lse", "plan"],
)
def test_a_call_of_another_kind_is_understood(card, understood, change):
    given, options = arguments()[1], {"softmax_scale": PROBLEM.scale}
    given[0] = given[0].contiguous()
    attnsweep.mla_decode(*given, **options)
    change(given, options)
    attnsweep.mla_decode(*given, **options)
    assert len(understood) == 2


def test_an_address_that_the_kernel_cannot_take_is_answered_by_others(card):
    given = arguments()[1]
    given[0] = given[0].contiguous()
    attnsweep.mla_decode(*given, softmax_scale=PROBLEM.scale)
    odd = torch.empty(given[0].numel() + 4, dtype=torch.bfloat16)[4:].view_as(given[0]).copy_(given[0])
    out = attnsweep.mla_decode(odd, *given[1:], softmax_scale=PROBLEM.scale)
    assert (len(card), mla.counters) == (1, {"kernel": 1, "layout": 1})
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("sms", [16, 132])
def test_a_planned_call_is_one_launch(card, monkeypatch, sms):
    bound = []
    monkeypatch.setattr(mla, "arch_of", lambda _: replace(ARCHS["sm_90a"], sm_count=sms))
    monkeypatch.setattr(mla, "bound", lambda kernels, *_: bound.extend(kernels) or card)
    given = arguments()[1]
    attnsweep.mla_decode(*given, softmax_scale=PROBLEM.scale, plan=plan_of(given))
    assert [kernel.launch.function for kernel in bound] == ["flash_mla_wgmma"]
    assert card[0]["counters"]


def test_workspaces_are_kept_for_each_stream_and_each_capture(card, monkeypatch):
    """Counters are 0 when a call begins, so that no two calls that may overlap have the same ones."""
    monkeypatch.setattr(mla, "arch_of", lambda _: replace(ARCHS["sm_90a"], sm_count=16))
    given, capture = arguments()[1], [0]
    given[0] = given[0].contiguous()
    driver = SimpleNamespace(CUstream=int, cuStreamGetCaptureInfo=lambda _: (0, 1, capture[0]))
    monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
    monkeypatch.setattr(launch, "is_capturing", lambda: capture[0] > 0)
    where = {}
    for stream, capture[0] in ((7, 0), (7, 0), (8, 0), (7, 1), (7, 1), (7, 2), (7, 0), (8, 0)):
        monkeypatch.setattr(mla, "raw_stream", lambda _, stream=stream: stream)
        attnsweep.mla_decode(*given, softmax_scale=PROBLEM.scale, plan=plan_of(given))
        own = tuple(card[-1][name] for name in ("partial", "partial_lse", "counters"))
        assert all(own)
        assert where.setdefault((stream, capture[0]), own) == own
    every = [address for own in where.values() for address in own]
    assert len(set(every)) == len(every) == 12
    assert not any(spaces["counters"].any() for spaces in launch._spaces.values())


def test_threads_that_need_workspaces_at_once_have_them_large_enough_and_for_good(card, monkeypatch):
    made, zeros = [], torch.zeros

    def slowly(size, **how):
        time.sleep(0.1 if size > 100 else 0.15)  # a small one comes in place of a large one
        made.append(weakref.ref(tensor := zeros(size, **how)))
        return tensor

    monkeypatch.setattr(torch, "zeros", slowly)
    names = ("counters", "turns")
    kept = {size: launch.Kept(names, dict.fromkeys(names, size)) for size in (4096, 64)}
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda one: one.at(0, 7), kept.values())]
    sizes = {(each := ref()).data_ptr(): each.numel() for ref in made if ref() is not None}
    assert all(sizes.get(at, 0) >= size for own, size in zip(found, kept, strict=True) for at in own)


def test_a_plan_is_made_by_one_launch_each_time(card):
    lengths = arguments()[1][3]
    plans = [attnsweep.mla_plan(lengths, 60) for _ in range(2)]
    for made, plan in zip(card, plans, strict=True):
        assert (made["shares"], made["first_slot"]) == (plan.shares.data_ptr(), plan.first_slot.data_ptr())
        assert (made["seqused_k"], plan.first_slot.shape, plan.rows) == (lengths.data_ptr(), (5,), 60)
    assert plans[0].shares.data_ptr() != plans[1].shares.data_ptr()


def test_a_plan_has_rows():
    with pytest.raises(ValueError, match="heads times queries"):
        attnsweep.mla_plan(torch.zeros(3, dtype=torch.int32), 0)


# ---- FlashAttention-3's form ----
def test_qv_is_answered_behind_a_gather():
    inputs, given = arguments()
    tensors, options = in_parts(given, PROBLEM.scale)
    out, lse = attnsweep.flash_attn_with_kvcache(*tensors, **options, return_softmax_lse=True)
    check(out, lse, inputs)
    assert torch.equal(out, attnsweep.mla_decode(*given, softmax_scale=PROBLEM.scale))
    q, k, v = tensors
    apart = attnsweep.flash_attn_with_kvcache(q, k.clone(), v.clone(), **options)
    assert torch.equal(apart, out)
    called = lambda *of, qv: attnsweep.flash_attn_with_kvcache(*of, **options | {"qv": qv})  # noqa: E731
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, qv=options["qv"]), out)
    by_default = attnsweep.flash_attn_with_kvcache(*tensors, **options | {"softmax_scale": None})
    assert torch.equal(by_default, attnsweep.mla_decode(*given, softmax_scale=576**-0.5))


@pytest.mark.parametrize("counts", [(3, 3, 3, 3), (3, 0, 1, 2)])
def test_packed_queries_have_qv_too(counts):
    _, given = arguments()
    tensors, options = in_parts(given, PROBLEM.scale)
    expected = attnsweep.flash_attn_with_kvcache(*tensors, **options)
    rows = torch.tensor([[row >= 3 - count for row in range(3)] for count in counts])  # the last ones of each
    (q, k, v), qv = tensors, options["qv"]
    begins = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    out = torch.empty(sum(counts), 20, 512, dtype=q.dtype)
    how = {"seqused_k": options["cache_seqlens"], "block_table": options["page_table"], "causal": True, "out": out}
    given = {"cu_seqlens_q": begins, "max_seqlen_q": 3, "softmax_scale": PROBLEM.scale, "q_v": qv[rows]}
    made = attnsweep.flash_attn_varlen_func(q[rows], k, v, **given, **how)
    assert made is out
    assert torch.equal(out, expected[rows])
    how = {"cu_seqlens_q": begins, "max_seqlen_q": 3, "qv": qv[rows]}
    assert torch.equal(attnsweep.flash_attn_with_kvcache(q[rows], k, v, **options | how), out)


def test_qv_is_served_where_the_caches_are_rows_of_one(card):
    _, given = arguments()
    tensors, options = in_parts(given, PROBLEM.scale)
    out = attnsweep.flash_attn_with_kvcache(*tensors, **options)
    assert out.shape == (4, 3, 20, 512)
    row = given[0].contiguous()
    own = {"qv": row[..., :512]}
    attnsweep.flash_attn_with_kvcache(row[..., 512:], *tensors[1:], **options | own)
    first, second = card
    assert first["q"] not in (tensors[0].data_ptr(), options["qv"].data_ptr())  # copied into rows
    assert second["q"] == row.data_ptr()
    assert {each["k"] for each in card} == {given[1].data_ptr()}
    assert paged.counters == {"kernel": 2}
    told = paged.explain_flash_attn_with_kvcache(*tensors, **options)
    assert (told.code, len(card)) == ("kernel", 2)
    assert told.kernel.startswith("flash_mla_wgmma")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_qv_of_a_known_kind_is_not_understood_again(card, monkeypatch, joined, planned):
    given = arguments()[1]
    (_, k, v), options = in_parts(given, PROBLEM.scale)
    calls, real = [], paged.understood
    monkeypatch.setattr(paged, "understood", lambda *own: calls.append(own) or real(*own))
    if planned:
        options |= {"scheduler_metadata": plan_of(given)}

    def call(k, v, **changes):
        row = given[0].contiguous()
        q, qv = (row[..., 512:], row[..., :512]) if joined else (row[..., 512:].clone(), row[..., :512].clone())
        out = paged.flash_attn_with_kvcache(q, k, v, **options | {"qv": qv} | changes)
        return row, out

    (_, first), (row, second) = call(k, v), call(k, v)
    assert (len(calls), len(card), paged.counters) == (1, 2, {"kernel": 2})
    assert (first.shape, card[1]["o"], card[1]["k"]) == ((4, 3, 20, 512), second.data_ptr(), v.data_ptr())
    assert (card[1]["q"] == row.data_ptr()) == joined
    assert bool(card[1]["shares"]) == planned
    other = torch.empty(len(k) * 2 * 64 * 576, dtype=k.dtype).view(len(k), 2, 64, 1, 576)[:, 1]
    assert other.stride() == given[1].stride()
    call(k, other[..., :512])  # alike, but no row of k's
    assert (len(calls), len(card), paged.counters["layout"]) == (2, 2, 1)
    for n, changes in enumerate(({"softmax_scale": 0.5}, {"causal": False}, {"return_softmax_lse": True}), 3):
        call(k, v, **changes)
        assert (len(calls), len(card)) == (n, n)


def test_a_plan_is_given_as_scheduler_metadata(card):
    _, given = arguments()
    tensors, options = in_parts(given, PROBLEM.scale)
    plan = plan_of(given)
    attnsweep.flash_attn_with_kvcache(*tensors, **options, scheduler_metadata=plan)
    (launch,) = card
    assert (launch["shares"], launch["first_slot"]) == (plan.shares.data_ptr(), plan.first_slot.data_ptr())
    for other, kind in ((plan._replace(rows=59), ValueError), (3, TypeError)):
        with pytest.raises(kind, match=r"the plan is of|plan is what mla_plan returned"):
            attnsweep.flash_attn_with_kvcache(*tensors, **options, scheduler_metadata=other)


def other(at, value):
    """A change to arguments of `flash_attn_with_kvcache`."""

    def of(tensors, options):
        if isinstance(at, int):
            return (*tensors[:at], value(tensors[at]), *tensors[at + 1 :]), options
        return tensors, options | {at: value(options.get(at))}

    return of


def wide_pages(tensors, options):
    q, k, _ = tensors
    rows = torch.zeros(len(k), 128, 1, 576, dtype=q.dtype)
    return (q, rows[..., 512:], rows[..., :512]), options


def swapped(tensors, options):
    q, k, _ = tensors
    rows = torch.zeros(len(k), 64, 1, 576, dtype=q.dtype)  # rope first
    return (q, rows[..., :64], rows[..., 64:]), options


NOT_OURS = [
    (other(1, lambda k: k.clone()), "layout", "no rows of one tensor"),
    (other(2, lambda v: v.clone()), "layout", "no rows of one tensor"),
    (swapped, "layout", "no rows of one tensor"),
    (wide_pages, "not_served", "pages of 128 keys"),
    (other("softcap", lambda _: 3.0), "not_served", "softcap"),
    (other("sinks", lambda _: torch.zeros(20)), "not_served", "sinks"),
    (other("window_size", lambda _: (9, 0)), "not_served", "windows"),
    (other("softmax_scale", lambda _: -1.0), "not_served", "scale -1.0"),
]


@pytest.mark.parametrize(
    ("change", "code", "said"), NOT_OURS, ids=[f"{n} {said}" for n, (*_, said) in enumerate(NOT_OURS)]
)
def test_what_the_kernel_does_not_serve_is_explained_and_answered(card, change, code, said):
    tensors, options = change(*in_parts(arguments()[1], PROBLEM.scale))
    told = paged.explain_flash_attn_with_kvcache(*tensors, **options)
    assert (told.kernel, told.code) == (None, code)
    assert said in told.reason
    out = attnsweep.flash_attn_with_kvcache(*tensors, **options)
    assert (card, paged.counters) == ([], {code: 1})
    assert out.shape == (4, 3, 20, 512)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("off", [False, True])
def test_flash_attention_3_gets_what_the_kernel_does_not_serve(card, monkeypatch, off):
    """off: its build lacks the kernel, and would compute 64 of 512 columns without a word."""
    (q, k, v), options = in_parts(arguments()[1], PROBLEM.scale)
    given = []

    def flash(*tensors, return_softmax_lse, **how):
        given.append((*tensors, how["qv"]))
        return torch.ones(4, 3, 20, 512), torch.zeros(4, 20, 3)

    flash.__module__ = "flash_attn_interface"
    config = SimpleNamespace(CONFIG={"build_flags": {"FLASH_ATTENTION_DISABLE_HDIMDIFF64": off}})
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    monkeypatch.setattr(others, "_flash_3", lambda: flash)
    apart = k.clone()
    out = attnsweep.flash_attn_with_kvcache(q, apart, v, **options)
    assert (out == 1).all() != off
    theirs = [] if off else [(q, apart, v, options["qv"])]
    assert [[*map(id, each)] for each in given] == [[*map(id, each)] for each in theirs]
    assert card == []


def test_explain_says_that_the_kernel_is_of_cards():
    tensors, options = in_parts(arguments()[1], PROBLEM.scale)
    told = paged.explain_flash_attn_with_kvcache(*tensors, **options)
    assert (told.kernel, told.code, told.reason) == (None, "device", "q is on cpu")


WRONG_QV = [
    (other("qv", lambda qv: qv.float()), TypeError, "qv is torch.float32, and q torch.bfloat16"),
    (other("qv", lambda _: [1]), TypeError, "qv is list, not a tensor"),
    (other("qv", lambda qv: qv[:, 0]), ValueError, "qv is .* it has four dimensions"),
    (other("qv", lambda qv: qv[..., :256]), ValueError, "q's rows with v_cache's columns"),
    (other("qv", lambda qv: qv[:, :2]), ValueError, "q's rows with v_cache's columns"),
    (other("qv", lambda qv: qv.mT.contiguous().mT), ValueError, "head_dim is not contiguous"),
    (other("qv", lambda _: None), ValueError, "not the same"),
    (other(0, lambda q: q[..., :32]), ValueError, "rows of 64 elements, and q of 32"),
    (other(1, lambda k: k[:, :32]), ValueError, "not the same slots"),
    (other(2, lambda v: v.half()), TypeError, "both are as q"),
    (lambda t, o: ((t[0], *(x.expand(-1, -1, 2, -1).clone() for x in t[1:])), o), ValueError, "one, of latent keys"),
    (other("k", lambda _: torch.zeros(4, 1, 1, 64)), NotImplementedError, "k and v beside qv"),
]


@pytest.mark.parametrize(("change", "kind", "said"), WRONG_QV, ids=[str(n) for n in range(len(WRONG_QV))])
def test_wrong_qv_is_refused_in_words(change, kind, said):
    tensors, options = change(*in_parts(arguments()[1], PROBLEM.scale))
    with pytest.raises(kind, match=said):
        attnsweep.flash_attn_with_kvcache(*tensors, **options)


@pytest.mark.parametrize("batch", [0, 4])
def test_no_queries(card, batch):
    given = arguments()[1]
    given = [given[0][:0], given[1], *(x[:0] for x in given[2:])] if not batch else given
    assert attnsweep.mla_decode(*given, softmax_scale=0.1).shape == (batch, 3, 20, 512)
    tensors, options = in_parts(given, 0.1)
    for _ in range(2):
        assert attnsweep.flash_attn_with_kvcache(*tensors, **options).shape == (batch, 3, 20, 512)
    assert len(card) == (3 if batch else 0)

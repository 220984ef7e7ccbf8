"""softcap, sinks and packed sequences by the kernels that come with attnsweep."""

import pytest

torch = pytest.importorskip("torch")

import operators  # noqa: E402
from attending import seen  # noqa: E402
from on_card import near, served_since  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BATCH, ROWS = 2, 1500
CHANGES = {"sinks": (64, 8, 64), "softcap": (8, 4, 256)}
"""heads, heads_kv and head_dim of each: as in gpt-oss, and in Gemma 2."""
MASKS = {"causal": {"is_causal": True}, "window": {"window": (127, 0)}, "bottom-right": {"causal_offset": 0}}


@pytest.fixture(autouse=True)
def card():
    return served_since(lambda: attnsweep.explain_attention(*tensors("sinks"), window=(127, 0), **given("sinks")))


def tensors(change, rows=ROWS, keys=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    heads, heads_kv, head_dim = CHANGES[change]
    sizes = ((heads, rows), (heads_kv, keys or rows), (heads_kv, keys or rows))
    return [torch.randn(BATCH, *n, head_dim, device="cuda", dtype=dtype) for n in sizes]


def given(change, dtype=torch.float32):
    """Sinks that matter beside such scores, or a cap that changes them."""
    sinks = torch.linspace(-3, 8, CHANGES["sinks"][0], device="cuda", dtype=dtype)
    return {"enable_gqa": True} | ({"sinks": sinks} if change == "sinks" else {"softcap": 1.5})


def exact(q, k, v, mask=None, softcap=None, sinks=None, **_):
    """Attention in float64, one group of heads at a time, because all of them take much memory."""
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(k.shape[1]):
        own = slice(head * group, (head + 1) * group)
        of_keys = (each[:, head : head + 1] for each in (k, v))
        out.append(operators.exact(q[:, own], *of_keys, mask, softcap, None if sinks is None else sinks[own]))
    return torch.cat(out, 1)


def right(out, want):
    assert near(out, want)


def served(call):
    before = attnsweep.attention_counters().get("kernel", 0)
    out = call()
    assert attnsweep.attention_counters().get("kernel", 0) > before, attnsweep.attention_counters()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_kernel_and_pytorch_are_right(mask, change, dtype):
    qkv, how = tensors(change, dtype=dtype), given(change) | MASKS[mask]
    want = exact(*qkv, seen(*qkv[:2], **MASKS[mask]), **how)
    if (change, mask) == ("softcap", "window"):  # of which one is recorded, 64 times as long
        right(attnsweep.attention(*qkv, **how), want)
    else:
        right(served(lambda: attnsweep.attention(*qkv, **how)), want)
    inputs = [each.requires_grad_() for each in qkv]
    right(attnsweep.attention(*inputs, **how), want)  # PyTorch's operators


@pytest.mark.parametrize("change", CHANGES)
def test_gradients(change):
    q, k, v = tensors(change, 300)
    how = given(change) | {"is_causal": True}
    seed = torch.randn_like(q)
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    if change == "sinks":
        how["sinks"].requires_grad_()
    attnsweep.attention(*inputs, **how).backward(seed)
    got = [each.grad for each in inputs] + [each.grad for each in [how.get("sinks")] if each is not None]
    exacts = [each.double().requires_grad_() for each in (q, k, v)]
    if change == "sinks":
        how = how | {"sinks": how["sinks"].detach().double().requires_grad_()}
    exact(*exacts, seen(q, k, is_causal=True), **how).backward(seed.double())
    wanted = [each.grad for each in exacts]
    wanted += [how["sinks"].grad] if change == "sinks" else []
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensors_mask(change):
    qkv, how = tensors(change), given(change)
    mask = seen(*qkv[:2], window=(200, 0)) & (torch.rand(BATCH, 1, ROWS, 1, device="cuda") < 0.9)
    right(served(lambda: attnsweep.attention(*qkv, mask, **how)), exact(*qkv, mask, **how))


def test_in_a_graph_sinks_are_those_of_the_replay():
    qkv, how = tensors("sinks"), given("sinks") | {"window": (127, 0)}
    attnsweep.attention(*qkv, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = served(lambda: attnsweep.attention(*qkv, **how))
    for shift in (0, 3):
        how["sinks"] += shift
        graph.replay()
        right(out, exact(*qkv, seen(*qkv[:2], window=(127, 0)), sinks=how["sinks"]))


def test_compiled():
    qkv, how = tensors("softcap"), given("softcap") | {"is_causal": True}
    call = torch.compile(lambda q, k, v: attnsweep.attention(q, k, v, **how), fullgraph=True)
    right(served(lambda: call(*qkv)), exact(*qkv, seen(*qkv[:2], is_causal=True), **how))


# ---- packed sequences ----
PACKINGS = {
    "even": [2048] * 4,
    "uneven": [1, 63, 64, 65, 4000, 0, 7, 4000],
    "many": [20] * 400,
    "with tokens of none": [3000, 200, -5000],
}


def packed(lengths, heads=32, heads_kv=8, head_dim=128):
    torch.manual_seed(0)
    total = sum(map(abs, lengths))
    ends = torch.tensor([0, *(n for n in lengths if n >= 0)], device="cuda").cumsum(0)
    sizes = ((total, heads), (total, heads_kv), (total, heads_kv))
    made = [torch.randn(*n, head_dim, device="cuda", dtype=torch.bfloat16) for n in sizes]
    return made, ends.int()


def one_by_one(q, k, v, of_q, of_k, window=None, causal=False, **how):
    out, window = torch.zeros_like(q, dtype=torch.float64), window or (-1, -1)
    window = (window[0], 0) if causal else window
    begins = zip(of_q.tolist(), of_q.tolist()[1:], of_k.tolist(), of_k.tolist()[1:], strict=False)
    for first, end, first_k, end_k in begins:
        if first < end and first_k < end_k:
            own = [
                each[a:b].transpose(0, 1)[None]
                for each, a, b in ((q, first, end), (k, first_k, end_k), (v, first_k, end_k))
            ]
            mask = seen(*own[:2], window=window)
            out[first:end] = exact(*own, mask, **how)[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (100, 3)}], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_sequences(packing, how, head_dim):
    qkv, cu = packed(PACKINGS[packing], head_dim=head_dim)
    serve = (lambda call: call()) if packing == "many" else served  # short ones gain too little
    out = serve(lambda: attnsweep.attention_varlen(*qkv, cu, cu, **how))
    right(out, one_by_one(*qkv, cu, cu, **how))
    inputs = [each.requires_grad_() for each in qkv]  # PyTorch's flash attention
    longest = max(PACKINGS[packing])
    theirs = attnsweep.attention_varlen(*inputs, cu, cu, longest, longest, **how)
    right(theirs[: int(cu[-1])], one_by_one(*qkv, cu, cu, **how)[: int(cu[-1])])
    theirs[: int(cu[-1])].float().sum().backward()
    assert all(each.grad[: int(cu[-1])].isfinite().all() for each in inputs)


def test_other_keys_and_cu_seqlens_that_change():
    q, of_q = packed([100, 20, 80])
    kv, of_k = packed([30, 300, 0])
    qkv = (q[0], *kv[1:])
    for number in (130, 130, 10):
        of_q[1] = number % 120
        right(attnsweep.attention_varlen(*qkv, of_q, of_k, causal=True), one_by_one(*qkv, of_q, of_k, causal=True))


def test_cu_seqlens_that_decrease_touch_no_memory_of_others():
    qkv, cu = packed([500] * 4)
    for wrong in ([0, 1500, 200, 900, 2000], [-5, 10**6, 3, -(10**6), 2000], [2000, 0, 0, 0, 0]):
        cu.copy_(torch.tensor(wrong))
        assert attnsweep.attention_varlen(*qkv, cu, cu, causal=True).isfinite().all()
        torch.cuda.synchronize()


def test_flash_attns_functions():
    qkv, cu = packed([700, 300, 1000])
    out = served(lambda: attnsweep.flash_attn_varlen_func(*qkv, cu, cu, 1000, 1000, causal=True))
    right(out, one_by_one(*qkv, cu, cu, causal=True))
    q, k, v = (
        torch.randn(2, n, h, 128, device="cuda", dtype=torch.bfloat16) for n, h in ((700, 32), (1000, 8), (1000, 8))
    )
    out = attnsweep.flash_attn_func(q, k, v, causal=True, window_size=(300, 0))
    heads_first = [each.transpose(1, 2) for each in (q, k, v)]
    mask = seen(*heads_first[:2], window=(300, 0))
    right(out.transpose(1, 2), exact(*heads_first, mask))

"""Calls of head_dim 264 to 512, over a fake driver with kernels of NumPy's."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from attending import Kernel, seen  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from gemmas import float64, gemma4, logits, skip_with_masks  # noqa: E402
from operators import aten, close, exact, gradients_of, make, tensors, traced  # noqa: E402
from packages import PLAIN_WIDE, package_of, shape, winner, with_config  # noqa: E402

from attnsweep.core.masks import Interval  # noqa: E402
from attnsweep.serve.runtime import dispatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

DIMS = [264, 320, 512]
LAYOUTS = ["bhsd", "bshd", "packed"]


@pytest.fixture
def driver():
    return FakeDriver(Kernel())


def operator_of(directory, driver, head_dim=512, heads_kv=2, kernel=PLAIN_WIDE, gain=4.0, **how):
    """An operator with a kernel for (2,4,128) of this head_dim, that PyTorch takes as long for."""
    of = shape(2, 4, 128, heads_kv=heads_kv, head_dim=head_dim, **how)
    return make(directory, driver, winner(of, kernel, gain))


def call(head_dim=512, layout="bhsd", heads_kv=2, seqlen=128):
    return tensors(2, 4, seqlen, heads_kv, layout, torch.bfloat16, head_dim)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts_without_copies(tmp_path, driver, head_dim, layout, causal):
    made = operator_of(tmp_path, driver, head_dim, causal=causal)
    q, k, v = call(head_dim, layout)
    out = made.attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert close(out, exact(q, k, v, seen(q, k, is_causal=causal)))
    assert out.stride() == torch.empty_like(q).stride()
    assert [m["pointer"] for m in driver.maps] == [t.data_ptr() for t in (q, k, v, v, out)]
    assert all(m["dims"] == [head_dim, 128, heads, 2] for m, heads in zip(driver.maps, (4, 2, 2, 2, 4), strict=True))
    assert [m["box"] for m in driver.maps] == [[64, rows, 1, 1] for rows in (64, 128, 32, 32, 16)]
    assert made.explain(q, k, v, is_causal=causal, enable_gqa=True).code == "tuned"
    assert made.counters() == {"kernel": 1}


def test_calls_that_pytorch_gets(tmp_path, driver):
    made = operator_of(tmp_path, driver)
    q, k, v = call()
    for given, options, code in (
        *((call(of), {}, "head_dim") for of in (257, 260, 504, 520, 576)),
        ((q, k, v[..., :256]), {}, "head_dim"),
        ((q, k, v), {"is_causal": True}, "not_tuned"),
        ((q, k, v), {"attn_mask": torch.rand(128, 128) < 0.5}, "not_tuned"),
        ((q, k, v), {"softcap": 30.0}, "not_tuned"),
        ((q, k, v), {"window": (5, 0)}, "not_tuned"),
        ((q[:, :, :5], k, v), {}, "not_tuned"),
        ((q, k, v), {"scale": -1.0}, "scale"),
        ((q, k, v), {"scale": 0.0}, "scale"),
        ((q, k, v), {"scale": float("nan")}, "scale"),
        ((q, k, v), {"scale": float("inf")}, "scale"),
        ((q, k, v.mT.contiguous().mT), {}, "layout"),
        ((q[:0], k[:0], v[:0]), {}, "empty"),
        ((q[:, :, :0], k, v), {}, "empty"),
    ):
        assert made.explain(*given, enable_gqa=True, **options).code == code, options
    assert "head_dim 264 was not tuned" in made.explain(*call(264), enable_gqa=True).reason
    assert close(made.attention(*call(504), enable_gqa=True), exact(*call(504)))
    assert driver.launches == []


def test_any_scale(tmp_path, driver):
    made = operator_of(tmp_path, driver)
    q, k, v = call()
    for scale in (1.0, 0.01, None):
        assert close(made.attention(q, k, v, scale=scale, enable_gqa=True), exact(q, k, v, scale=scale))
    assert made.counters() == {"kernel": 3}


WINDOWS = {
    "window": ({"window": (20, 3)}, Interval(20, 3), False),
    "narrow": ({"window": (0, 0)}, Interval(20, 3), False),
    "lengths": ({"key_lengths": torch.tensor([128, 40])}, Interval(None, None), True),
    "ranges": ({"key_lengths": torch.tensor([[100, 128], [7, 7]]), "is_causal": True}, Interval(None, 0), True),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_windows_and_lengths(tmp_path, driver, name, how):
    """No scan is made of them: a block finds its keys itself. An item may have none."""
    options, mask, padded = WINDOWS[name]
    of = replace(shape(2, 4, 128, heads_kv=2, head_dim=512, padded=padded), mask=mask)
    made = make(tmp_path, driver, winner(of, PLAIN_WIDE, 4.0))
    q, k, v = call(layout="bshd")
    attention = made.attention
    if how == "compiled":
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out = attention(q, k, v, enable_gqa=True, **options)
        assert close(out, exact(q, k, v, seen(q, k, **options)))
    assert len(driver.launches) == 2
    assert made.counters() == {"kernel": 2}


def test_lengths_that_change(tmp_path, driver):
    made = operator_of(tmp_path, driver, padded=True)
    q, k, v = call()
    lengths = torch.tensor([128, 40])
    for own in ([128, 40], [1, 0], [77, 128]):
        lengths.copy_(torch.tensor(own))
        out = made.attention(q, k, v, key_lengths=lengths, enable_gqa=True)
        assert close(out, exact(q, k, v, seen(q, k, key_lengths=lengths)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", [1, 4])
def test_one_query_of_grouped_heads(tmp_path, driver, monkeypatch, layout, splits):
    monkeypatch.setattr(dispatch, "DIVIDED_GAIN_FEW", 0.0)
    kernel = with_config(PLAIN_WIDE, PACK_GQA=1, SPLITS=splits, BLOCK_N=64)
    made = make(tmp_path, driver, winner(shape(2, 4, 1, heads_kv=2, seqlen_k=512, head_dim=512), kernel, 4.0))
    q = tensors(2, 4, 1, 4, layout, torch.bfloat16, 512)[0]
    _, k, v = tensors(2, 4, 512, 2, layout, torch.bfloat16, 512)
    assert close(made.attention(q, k, v, enable_gqa=True), exact(q, k, v))
    assert driver.maps[0]["dims"] == [512, 2, 2, 2]
    assert len(driver.launches) == (2 if splits > 1 else 1)
    assert made.counters() == {"kernel": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["forward", "forward_lse"])
def test_opcheck(tmp_path, driver, layout, name):
    made = operator_of(tmp_path, driver)
    op = getattr(getattr(torch.ops, made.namespace), name).default
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, (*call(layout=layout), False, 0.1), test_utils=utilities)
    assert made.counters()["kernel"]


def test_enabled(tmp_path, driver):
    of = shape(2, 4, 128, heads_kv=2, head_dim=512)
    package = package_of(tmp_path, driver, winner(of, PLAIN_WIDE, 4.0))
    q, k, v = call(layout="bshd")
    with package.enable():
        eager = F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)
        attention = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
        compiled = attention(q, k, v, scale=1.0, enable_gqa=True)
    assert close(eager, exact(q, k, v, scale=1.0))
    assert close(compiled, eager)
    flash = package.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), softmax_scale=1.0)
    assert close(flash.transpose(1, 2), eager)
    assert package.counters()["kernel"] == 3


# ---- models ----
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_model_of_gemma_4s_kind(tmp_path, driver, registered, how):
    """Its logits are as near to those of float64 attention as with PyTorch's own."""
    of = shape(2, 4, 128, heads_kv=2, head_dim=512, causal=True)
    package = package_of(tmp_path, driver, winner(of, PLAIN_WIDE, 4.0))
    model, ids = gemma4(), torch.randint(1, 128, (2, 128), generator=torch.manual_seed(1))
    own, theirs = logits(float64(model), ids), logits(model, ids)
    model.set_attn_implementation(package.register() if registered else "sdpa")
    if how == "compiled" and not registered:
        skip_with_masks(model, ids)
    torch._dynamo.reset()
    step = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    with nullcontext() if registered else package.enable():
        ours = logits(step, ids)
    assert (ours - own).norm() <= 1.5 * (theirs - own).norm()
    assert package.counters().get("kernel") == 1, package.counters()
    heads = 2 if registered else 4  # transformers repeats keys for PyTorch's on the CPU
    assert [m["dims"] for m in driver.maps] == [[512, 128, n, 2] for n in (4, heads, heads, heads, 4)]


def test_grouped_wide_heads_of_a_model_that_no_kernel_serves_are_repeated(tmp_path, driver):
    """PyTorch has no fused attention of grouped heads this wide."""
    of = shape(2, 4, 128, heads_kv=2, head_dim=512)  # not causal
    package = package_of(tmp_path, driver, winner(of, PLAIN_WIDE, 4.0))
    model, ids = gemma4(), torch.randint(1, 128, (2, 128), generator=torch.manual_seed(1))
    theirs, seen = logits(model, ids), []
    model.set_attn_implementation(package.register())
    pytorchs = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, *a, **b: (seen.append(k.shape[1]), pytorchs(q, k, v, *a, **b))[1],
        )
        assert torch.equal(logits(model, ids), theirs)
    assert seen[-1] == 4
    assert package.counters()["not_tuned"] == 1


# ---- gradients ----
@pytest.fixture
def efficient():
    """PyTorch's efficient attention and its backward on the CPU, which read what they do on a GPU.

    As many key heads as query heads, and the log-sum-exps of whole tiles of 32 rows.
    """
    calls = []

    def scores_of(q, k, causal, scale):
        scores = q.double() @ k.double().mT * scale
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if causal else scores

    def rows(lse):
        return F.pad(lse.float(), (0, -lse.shape[2] % 32), value=torch.inf)

    def forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, scale=None):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert (bias, with_lse, dropout) == (None, True, 0.0)
        calls.append("forward")
        scores = scores_of(q, k, causal, scale)
        out = (torch.softmax(scores, -1) @ v.double()).to(q.dtype)
        return out.transpose(1, 2).contiguous().transpose(1, 2), rows(scores.logsumexp(-1)), *[torch.empty(0)] * 2

    def backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, scale=None):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert lse.shape == (*q.shape[:2], -(-q.shape[2] // 32) * 32)
        assert lse[..., q.shape[2] :].isposinf().all()
        assert (dropout, [*wanted]) == (0.0, [True, True, True, False])
        calls.append("backward")
        # Rows of the output, wherever its strides have them: on an H200 other layouts had wrong gradients.
        out = out.as_strided(out.shape, (out.stride(0), out.stride(1), out.shape[1] * out.shape[3], 1))
        p = (scores_of(q, k, causal, scale) - lse[..., : q.shape[2], None].double()).exp()
        delta = (grad.double() * out.double()).sum(-1, keepdim=True)
        ds = p * (grad.double() @ v.double().mT - delta) * scale
        dq, dk, dv = ds @ k.double(), ds.mT @ q.double(), p.mT @ grad.double()
        return *(each.to(q.dtype) for each in (dq, dk, dv)), torch.empty(0)

    name = "_scaled_dot_product_efficient_attention"
    with aten(**{name: forward, f"{name}_backward": backward}):
        yield calls


def alike(got, given, direction, **options):
    doubles = [t.double() for t in given]
    expected = gradients_of(F.scaled_dot_product_attention, doubles, direction.double(), **options)
    pairs = zip(got, expected, strict=True)
    return all(torch.allclose(a.double(), b, atol=4e-2, rtol=4e-2) for a, b in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("seqlen", [128, 100])
def test_gradients(tmp_path, driver, efficient, layout, heads_kv, seqlen):
    """By PyTorch's efficient backward, from our output and log-sum-exp; eager and compiled."""
    made = operator_of(tmp_path, driver, causal=True, heads_kv=heads_kv)
    given = call(layout=layout, heads_kv=heads_kv, seqlen=seqlen)
    options = {"is_causal": True, "enable_gqa": True}
    leaves = [t.requires_grad_() for t in given]
    out = made.attention(*leaves, **options)
    direction = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, direction)
    assert alike(got, given, direction, **options)
    assert [each.shape for each in got] == [each.shape for each in given]
    assert (efficient, made.counters()) == (["backward"], {"kernel": 1})
    graphs, got = traced(lambda *of: made.attention(*of, **options), given, direction)
    assert alike(got, given, direction, **options)
    assert any(f"{made.namespace}.forward_lse" in graph for graph in graphs)
    assert efficient == ["backward"] * 2


def test_what_a_compiled_training_step_cannot(tmp_path, driver, efficient):
    """In compiled code the kernel is refused inside the operator, which owes a log-sum-exp."""
    made = operator_of(tmp_path, driver)
    q, k, v = call(layout="bshd")
    out, lse = made.traced.ops.forward_lse(q, k, v.mT.contiguous().mT, False, 0.1)
    assert close(out, exact(q, k, v, scale=0.1))
    assert (out.stride(), lse.shape, lse.is_contiguous()) == (torch.empty_like(q).stride(), (2, 4, 128), True)
    assert (efficient, driver.launches, made.counters()) == (["forward"], [], {"layout": 1})


def test_gradients_in_a_fixed_order_are_pytorchs(tmp_path, driver):
    made = operator_of(tmp_path, driver)
    leaves = [t.requires_grad_() for t in call()]
    torch.use_deterministic_algorithms(True)
    try:
        assert made.explain(*leaves, enable_gqa=True).code == "deterministic"
        out = made.attention(*leaves, enable_gqa=True)
        graphs, _ = traced(lambda *of: made.attention(*of, enable_gqa=True), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert close(out, exact(*leaves))
    assert driver.launches == []
    assert not any(f"{made.namespace}.forward" in graph for graph in graphs)
    assert made.explain(*leaves, enable_gqa=True).kernel


def test_gradients_of_windows_are_pytorchs(tmp_path, driver):
    made = operator_of(tmp_path, driver, padded=True)
    leaves = [t.requires_grad_() for t in call()]
    lengths = torch.tensor([128, 40])
    told = made.explain(*leaves, key_lengths=lengths, enable_gqa=True)
    assert (told.kernel, told.code) == (None, "mask")

"""Calls whose v has another head_dim than q, over a fake driver with kernels of NumPy's."""

import struct
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from attending import BackwardKernel, Kernel  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from operators import aten, close, flash_backward, gradients_of, make, tensors, traced  # noqa: E402
from packages import PLAIN_BACKWARD, SPLIT, shape, winner  # noqa: E402

from attnsweep.core.layouts import Packed  # noqa: E402
from attnsweep.core.masks import FULL, Boolean  # noqa: E402
from attnsweep.core.ops import BACKWARD  # noqa: E402
from attnsweep.core.scores import Scores  # noqa: E402
from attnsweep.serve.runtime.packed import VarlenOperator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

DIMS = [(192, 128), (64, 128), (64, 40)]
LAYOUTS = ["bhsd", "bshd", "packed"]


def operator_of(directory, driver, head_dim=192, head_dim_v=128, heads_kv=4, **how):
    """An operator with a kernel for them, and one for as many columns of v as of q."""
    of = shape(2, 4, 256, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v)
    return make(directory, driver, winner(of, **how), winner(replace(of, head_dim_v=None)))


def call(head_dim=192, head_dim_v=128, layout="bhsd", heads_kv=None, seqlen=256):
    return tensors(2, 4, seqlen, heads_kv, layout, torch.bfloat16, head_dim, head_dim_v)


def rows(seqlen, columns, layout):
    """Strides of an output of 2 items of 4 heads."""
    if layout == "bhsd":
        return (4 * seqlen * columns, seqlen * columns, columns, 1)
    return (4 * seqlen * columns, columns, 4 * columns, 1)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_layouts_without_copies(tmp_path, driver, dims, layout, heads_kv):
    made = operator_of(tmp_path, driver, *dims, heads_kv)
    q, k, v = call(*dims, layout, heads_kv)
    out = made.attention(q, k, v, enable_gqa=True)
    assert close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert out.shape == (*q.shape[:3], dims[1])
    assert out.stride() == rows(256, dims[1], layout)
    assert [m["pointer"] for m in driver.maps] == [t.data_ptr() for t in (q, k, v, out)]
    assert [m["dims"][0] for m in driver.maps] == [dims[0], dims[0], dims[1], dims[1]]
    assert driver.launches[0]["values"][-3:] == list(out.stride()[:3])
    assert made.explain(q, k, v, enable_gqa=True).code == "tuned"
    assert made.counters() == {"kernel": 1}


def test_each_head_dim_of_v_has_code_of_its_own(tmp_path, driver):
    made = operator_of(tmp_path, driver)
    for of_v in (128, 192, 128):
        q, k, v = call(head_dim_v=of_v)
        assert close(made.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert [launch["code"].decode().split()[-3:-1] for launch in driver.launches] == [
        *(["full", "v128"], ["fwd", "full"], ["full", "v128"])
    ]
    assert len(driver.modules) == 2
    told = made.explain(*call(head_dim_v=64))
    assert (told.code, told.reason) == ("head_dim", "head_dim 192, 64 of value, was not tuned")
    q, k, v = call()
    assert "head_dim 192 and 128 of v, bf16, causal was tuned" in made.explain(q, k, v, is_causal=True).reason
    assert made.explain(*call(seqlen=300)).code == "near"
    for given, code in (
        ((q, k[:, :1], v[:, :1]), "shapes"),
        ((q, k[..., :128], v), "shapes"),
        ((q, k[:, :, :100], v), "shapes"),
        ((q, k, v.mT.contiguous().mT), "layout"),
    ):
        assert made.explain(*given).code == code


def test_splits_are_joined_into_rows_of_v(tmp_path, driver):
    driver.on_launch = None
    made = operator_of(tmp_path, driver, kernel=SPLIT)
    out = made.attention(*call(layout="bshd"))
    _, second = driver.launches
    assert second["config"].gridDimX == 2 * 4 * 256 * 128 // 4 // 128
    assert second["values"][7:] == list(out.stride()[:3])


# ---- operators and compilers ----
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["forward", "forward_lse"])
def test_opcheck(tmp_path, driver, layout, name):
    """The fake output has the sizes and strides of the real one, by a kernel or without."""
    made = operator_of(tmp_path, driver)
    op = getattr(getattr(torch.ops, made.namespace), name).default
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, (*call(layout=layout), False, 0.1), test_utils=utilities)
    assert made.counters()["kernel"]
    if name == "forward":
        given = (*call(layout=layout, seqlen=5), False, 0.1)
        torch.library.opcheck(op, given, test_utils=utilities)
        assert made.counters()["not_tuned"]


# ---- masks and packed sequences ----
HIDDEN = {
    "boolean": ({"mask": Boolean(FULL)}, lambda: torch.rand(256, 256) < 0.5),
    "bias": ({"scores": Scores(bias=())}, lambda: torch.randn(256, 256).bfloat16()),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_masks(tmp_path, name):
    changes, mask = HIDDEN[name]
    driver = FakeDriver(Kernel())
    of = replace(shape(2, 4, 256, head_dim=96, head_dim_v=64), **changes)
    made = make(tmp_path, driver, winner(of, gain=4.0))
    q, k, v = call(96, 64, "bshd")
    hides = mask()
    expected = F.scaled_dot_product_attention(q, k, v, hides)
    for attention in (made.attention, torch.compile(made.attention, backend="aot_eager")):
        out = attention(q, k, v, hides)
        assert close(out, expected)
        assert out.stride() == rows(256, 64, "bshd")
    assert made.counters() == {"kernel": 2}


def test_packed_sequences(tmp_path):
    driver = FakeDriver(Kernel())
    of = replace(shape(1, 4, 256, head_dim=96, head_dim_v=64), layout=Packed(3))
    varlen = VarlenOperator(made := make(tmp_path, driver, winner(of, gain=4.0)))
    q, k, v = (each[0].transpose(0, 1) for each in call(96, 64, "bshd"))
    begins = torch.tensor([0, 100, 256], dtype=torch.int32)
    options = dict.fromkeys(("window", "scale", "softcap", "sinks")) | {"causal": True}

    def attention(q, k, v):
        how = {"dropout_p": 0.0, "cache": True, **options}
        return varlen.attention(q, k, v, begins, begins, None, None, **how)

    parts = [(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 100), (100, 256))]
    parts = [[each.transpose(0, 1)[None] for each in part] for part in parts]
    each = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    expected = torch.cat([one[0].transpose(0, 1) for one in each])
    for how in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        out = how(q, k, v)
        assert close(out, expected)
        assert (out.shape, out.stride()) == ((256, 4, 64), (256, 64, 1))
    assert made.counters() == {"kernel": 2}


# ---- gradients ----
@pytest.fixture
def pytorchs():
    """PyTorch's own flash attention and its backward on the CPU: of one head_dim, as on a GPU."""
    calls = []

    def forward(q, k, v, dropout=0.0, causal=False, mask=False, scale=None):
        assert q.shape[3] == k.shape[3] == v.shape[3]
        assert (dropout, mask, *(t.stride(3) for t in (q, k, v))) == (0.0, False, 1, 1, 1)
        calls.append("forward")
        scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        out = (torch.softmax(scores, -1) @ v.double()).to(q.dtype)
        rest = (torch.empty(0),) * 2 + (q.shape[2], k.shape[2]) + (torch.empty(0),) * 3
        return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1).float(), *rest

    def backward(grad, q, k, v, out, *rest, scale=None):
        assert {t.shape[3] for t in (grad, q, k, v, out)} == {q.shape[3]}
        calls.append("backward")
        return flash_backward(grad, q, k, v, out, *rest, scale=scale)

    name = "_scaled_dot_product_flash_attention"
    with aten(**{name: forward, f"{name}_backward": backward}):
        yield calls


def exact(given, direction, **options):
    doubles = [t.double() for t in given]
    return gradients_of(F.scaled_dot_product_attention, doubles, direction.double(), **options)


def alike(got, expected):
    pairs = zip(got, expected, strict=True)
    return all(torch.allclose(a.double(), b, atol=3e-2, rtol=3e-2) for a, b in pairs)


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize("dims", [(192, 128), (64, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_q", [True, False])
def test_gradients(tmp_path, driver, pytorchs, dims, layout, of_q):
    """By PyTorch's flash backward, which gets zeros where rows are shorter; eager and compiled."""
    made = operator_of(tmp_path, driver, *dims, heads_kv=2)
    given = call(*dims, layout, heads_kv=2)
    leaves = [t.requires_grad_(of_q or t is given[2]) for t in given]
    out = made.attention(*leaves, enable_gqa=True)
    assert (out.shape[3], out.stride()) == (dims[1], rows(256, dims[1], layout))
    direction = torch.randn_like(out)
    wanted = [t for t in leaves if t.requires_grad]
    got = torch.autograd.grad(out, wanted, direction)
    expected = exact(given, direction, enable_gqa=True)
    assert alike(got, expected if of_q else expected[2:])
    assert (pytorchs, made.counters()) == (["backward"], {"kernel": 1})
    if of_q:
        graphs, got = traced(lambda *of: made.attention(*of, enable_gqa=True), given, direction)
        assert alike(got, expected)
        assert any(f"{made.namespace}.forward_lse" in graph for graph in graphs)
        assert [each.shape for each in got] == [each.shape for each in given]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cudnn_takes_both_head_dims(tmp_path, driver, layout):
    """Where PyTorch would call it, nothing is made longer for it.

    The output lies as q does, gradients as the first one did, by a plan that no call of PyTorch's own
    finds: it keeps these by the bytes of the parameters, without the layouts of output and gradient.
    """
    made, seen, lies = operator_of(tmp_path, driver), [], set()

    def cudnn(grad, q, k, v, out, lse, *rest, scale=None):
        seen.append([t.shape[3] for t in (grad, q, k, v, out)])
        lies.add(grad.stride())
        assert out.stride() == rows(256, 128, layout)
        assert struct.pack("d", rest[-2]) != struct.pack("d", 0.0)
        assert rest[-2] == 0
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    by = {"_scaled_dot_product_cudnn_attention_backward": cudnn, "_fused_sdp_choice": lambda *_, **how: 3}
    leaves = [t.requires_grad_() for t in call(layout=layout)]
    with aten(**by):
        for direction in (torch.ones(2, 4, 256, 128), torch.ones(2, 256, 4, 128).transpose(1, 2)):
            got = torch.autograd.grad(made.attention(*leaves), leaves, direction.to(leaves[0].dtype))
            assert all(torch.equal(each, torch.ones_like(each)) for each in got)
    assert seen == [[128, 192, 192, 128, 128]] * 2
    assert len(lies) == 1


@pytest.mark.parametrize("dims", [(192, 128), (64, 64)])
def test_flash_serves_what_a_compiled_training_step_cannot(tmp_path, driver, pytorchs, dims):
    """In compiled code the kernel is refused inside the operator, which owes a log-sum-exp."""
    made = operator_of(tmp_path, driver, *dims)
    q, k, v = call(*dims, layout="bshd")
    out, lse = made.traced.ops.forward_lse(q, k, v.mT.contiguous().mT, False, 0.1)
    assert close(out, F.scaled_dot_product_attention(q, k, v, scale=0.1))
    assert (out.stride(), lse.shape) == (rows(256, dims[1], "bshd"), (2, 4, 256))
    assert (driver.launches, made.counters()) == ([], {"layout": 1})


def test_no_backward_of_the_package_is_asked(tmp_path, pytorchs):
    """Even if it has one for q's head_dim."""
    driver = FakeDriver(BackwardKernel())
    of = shape(2, 4, 256, head_dim_v=128)
    both = replace(of, head_dim_v=None, op=BACKWARD)
    made = make(tmp_path, driver, winner(of), winner(both, PLAIN_BACKWARD))
    given = call(64, 128)
    leaves = [t.requires_grad_() for t in given]
    assert made.explain(*leaves).backward is None
    out = made.attention(*leaves)
    direction = torch.randn_like(out)
    assert alike(torch.autograd.grad(out, leaves, direction), exact(given, direction))
    assert pytorchs == ["backward"]
    assert made.counters() == {"kernel": 1, "pytorch_backward": 1}
    graphs, _ = traced(lambda q, k, v: made.attention(q, k, v), given)
    assert not any(f"{made.namespace}.backward" in graph for graph in graphs)

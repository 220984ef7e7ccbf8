"""head_dim 264 to 512 served by a package on a GPU: eager, compiled, enabled, with gradients."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import recorded

torch = pytest.importorskip("torch")

import on_card  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from attending import seen  # noqa: E402
from gemmas import float64, gemma4, logits, skip_with_masks  # noqa: E402
from operators import exact, traced  # noqa: E402

from attnsweep.choose.ranking import rank  # noqa: E402
from attnsweep.core.problem import Problem  # noqa: E402
from attnsweep.family.discover import discover  # noqa: E402
from attnsweep.serve.runtime import dispatch  # noqa: E402
from attnsweep.serve.runtime.families import WIDE  # noqa: E402
from attnsweep.store import run as store_run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

FAMILY = WIDE.kernel.name
NAME = "wide_heads_for_tests"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What rounding P and the output costs of an output's length, and of a gradient's.
MOST = {"fp16": (6e-4, 2e-3), "bf16": (4e-3, 1.5e-2)}
LAYOUTS = ("heads_first", "rows_first", "packed")
# What a problem has, and how a config differs from the first one.
CONFIGS = {
    "(1,32/8,1024,512) bf16 causal": {"ORDER": 1},
    "(2,8/4,1000,512) fp16 full": {"CLUSTER": 2, "HEAD_MEMBERS": 2},
    "(2,8,333,264) bf16 causal": {"BLOCK_N": 64},
    "(2,8/4,700,320) fp16 causal": {"LAG": 0},
    "(2,8/4,300x900,320) bf16 full": {"SPLITS": 2},
    "(1,8/4,1x4096,512) bf16 full": {"SPLITS": 4, "PACK_GQA": 1},
    "(2,8/4,512,512) bf16 window(100,3)": {},
    "(2,8/4,512,512) bf16 full padded(right,100)": {},
    "(2,8/4,512,512) bf16 causal padded(right,100)": {"BLOCK_N": 64},
}
SHAPES = {Problem.parse(label): changes for label, changes in CONFIGS.items()}
PLAIN = [shape for shape in SHAPES if shape.kind in ("full", "causal")]


def rows_of(run, shape, changes):
    """A winner of the run with a config of the family, and PyTorch's time, as if of the shape."""
    won = next(t for t in rank(run.trials, run.environment).query("winner")["trial"])
    (theirs, *_) = [t for t in run.trials if t.problem == won.problem and t.provider != "attnsweep"]
    values = {param.name: param.values[0] for param in discover()[FAMILY].params}
    own = won.with_(problem=shape, kernel=FAMILY, config=values | changes)
    return own, theirs.with_(problem=shape, provider="torch_efficient")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    place = tmp_path_factory.mktemp("wide_heads")

    def of_shapes(runs):
        run = store_run.open_run(next(each for each in runs if each.name == "flash_training"))
        trials = [row for shape, changes in SHAPES.items() for row in rows_of(run, shape, changes)]
        return [recorded.changed(run, place / "run", trials)]

    with on_card.exported_package(recorded.RUNS, place, NAME, of_shapes) as module:
        yield module


@pytest.fixture(scope="module")
def operator(package):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "DIVIDED_GAIN", 0.0)  # few tiles need a gain, whatever the guard is
        patch.setattr(dispatch, "DIVIDED_GAIN_FEW", 0.0)
        yield on_card.always(package, NAME)


@pytest.fixture(scope="module")
def enabled(package, operator):
    """The package, whose functions call the operator."""
    package.serve_by(operator)
    return package


def tensors(shape, layout="rows_first", scale=1.0):
    """q, k and v. packed: each is a slice of a larger tensor. scale: of the numbers."""
    torch.manual_seed(1)

    def made(seqlen, heads, columns):
        more = 3 if layout == "packed" else 0
        both = scale * torch.randn(shape.batch, seqlen, heads + more, columns, device="cuda")
        tensor = both.to(DTYPES[shape.dtype])[:, :, :heads].transpose(1, 2)
        return tensor.contiguous() if layout == "heads_first" else tensor

    q = made(shape.seqlen_q, shape.heads, shape.head_dim)
    return (q, *(made(shape.seqlen_k, shape.heads_kv, shape.head_dim) for _ in range(2)))


def options_of(shape):
    return {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.heads_kv}


def right(got, given, mask=None, scale=None):
    want = exact(*[t.detach() for t in given], mask, scale=scale)
    return on_card.error(got, want) <= MOST["fp16" if given[0].dtype is torch.float16 else "bf16"][0]


def hidden(shape, given):
    return seen(*given[:2], is_causal=True) if shape.causal else None


def check_gradients(got, given, direction, shape):
    doubles = [t.detach().double().requires_grad_() for t in given]
    out = F.scaled_dot_product_attention(*doubles, **options_of(shape))
    want = torch.autograd.grad(out, doubles, direction.double())
    for mine, theirs in zip(got, want, strict=True):
        assert on_card.error(mine, theirs) <= MOST[shape.dtype][1]


@pytest.mark.parametrize("shape", PLAIN, ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager(operator, shape, layout):
    given = tensors(shape, layout)
    assert operator.explain(*given, **options_of(shape)).kernel
    before = operator.counters().get("kernel", 0)
    for _ in range(2):
        out = operator.attention(*given, **options_of(shape))
        assert right(out, given, hidden(shape, given))
    assert operator.counters()["kernel"] == before + 2
    if shape.seqlen_q > 1:  # the stride of one row may be any
        assert out.stride() == torch.empty_like(given[0]).stride()


@pytest.mark.parametrize("scale", [1.0, 0.01, None])
@pytest.mark.parametrize("shape", PLAIN, ids=lambda shape: shape.label)
def test_any_scale_and_the_other_dtype(operator, shape, scale):
    """With scale 1.0, scores are those of normed queries and keys, as Gemma's."""
    other = replace(shape, dtype="bf16" if shape.dtype == "fp16" else "fp16")
    for own in (shape, other):
        given = tensors(own, scale=own.head_dim**-0.25 if scale == 1.0 else 1.0)
        out = operator.attention(*given, scale=scale, **options_of(own))
        assert right(out, given, hidden(own, given), scale)


LIMITS = {
    "window": {"window": (100, 3)},
    "itself": {"window": (0, 0)},
    "lengths": {"key_lengths": [512, 77]},
    "an item without a key": {"key_lengths": [0, 300]},
    "left": {"key_lengths": [[200, 512], [511, 512]]},
    "causal": {"key_lengths": [512, 77], "is_causal": True},
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("queries", [512, 300])
def test_windows_and_lengths(operator, name, how, queries):
    given = tensors(replace(SHAPE_OF_LIMITS, seqlen_q=queries))
    limits = dict(LIMITS[name])
    if limits.pop("is_causal", False):
        limits["causal_offset"] = 512 - queries
    if "key_lengths" in limits:
        limits["key_lengths"] = torch.tensor(limits["key_lengths"], device="cuda")
        given[2][0, :, :1].fill_(torch.nan if name == "left" else 0.5)
    attention = operator.attention
    if how == "compiled":
        torch._dynamo.reset()
        attention = torch.compile(attention, fullgraph=True)
    before = operator.counters().get("kernel", 0)
    out = attention(*given, enable_gqa=True, **limits)
    assert on_card.near(out, exact(*[t.nan_to_num(0.0) for t in given], seen(*given[:2], **limits)))
    assert operator.counters()["kernel"] == before + 1


SHAPE_OF_LIMITS = Problem.parse("(2,8/4,512,512) bf16 full")


def test_more_queries_than_keys_of_a_window(operator):
    """Some see no key."""
    given = tensors(replace(SHAPE_OF_LIMITS, seqlen_q=640))
    out = operator.attention(*given, enable_gqa=True, window=(100, 3))
    want = exact(*given, seen(*given[:2], window=(100, 3)))
    assert (want[:, :, 0] == 0).all()
    assert on_card.near(out, want)


@pytest.mark.parametrize("shape", [each for each in PLAIN if each.seqlen_q > 1], ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(operator, shape, layout):
    """By PyTorch's efficient backward, from the output and the log-sum-exp of the kernel."""
    given, options = tensors(shape, layout), options_of(shape)
    leaves = [t.detach().requires_grad_() for t in given]
    before = operator.counters().get("kernel", 0)
    out = operator.attention(*leaves, **options)
    direction = torch.randn_like(out)
    check_gradients(torch.autograd.grad(out, leaves, direction), given, direction, shape)
    out = operator.attention(*leaves, **options)
    other = direction.transpose(1, 2).contiguous().transpose(1, 2)
    other = direction.contiguous() if other.stride() == direction.stride() else other
    check_gradients(torch.autograd.grad(out, leaves, other), given, direction, shape)
    assert operator.counters()["kernel"] == before + 2


@pytest.mark.parametrize("shape", PLAIN[:4], ids=lambda shape: shape.label)
def test_compiled_with_gradients(operator, shape):
    given, options = tensors(shape, "packed"), options_of(shape)
    direction = torch.randn_like(given[0])
    graphs, got = traced(lambda *of: operator.attention(*of, **options), given, direction)
    assert f"{operator.namespace}.forward_lse" in graphs[0]
    check_gradients(got, given, direction, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled(operator, layout):
    torch._dynamo.reset()
    shape, *_ = PLAIN
    given, options = tensors(shape, layout), options_of(shape)
    compiled = torch.compile(lambda q, k, v: operator.attention(q * 1.0, k, v, **options) * 1.0, fullgraph=True)
    before = operator.counters().get("kernel", 0)
    assert right(compiled(*given), given, hidden(shape, given))
    assert operator.counters()["kernel"] == before + 1


def test_enabled(enabled):
    """PyTorch's own function, FlashAttention's, and both in compiled code."""
    shape, *_ = PLAIN
    given, options = tensors(shape, scale=shape.head_dim**-0.25), options_of(shape)
    mask = hidden(shape, given)
    torch._dynamo.reset()

    def block(q, k, v):
        return F.scaled_dot_product_attention(q * 1.0, k, v, scale=1.0, **options)

    def flash(q, k, v):
        rows = [t.transpose(1, 2) for t in (q, k, v)]
        return enabled.flash_attn_func(*rows, softmax_scale=1.0, causal=True).transpose(1, 2)

    before = enabled.counters().get("kernel", 0)
    with enabled.enable():
        for attention in (block, flash, torch.compile(block, fullgraph=True), torch.compile(flash, fullgraph=True)):
            assert right(attention(*given), given, mask, 1.0)
    assert enabled.counters()["kernel"] == before + 4


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(32, 8), (8, 4)])
def test_a_model_of_gemma_4s_kind(enabled, registered, how, heads, heads_kv):
    """Its logits are as near to those of float64 attention as with PyTorch's own."""
    model = gemma4("cuda", heads, heads_kv, 1024)
    ids = torch.randint(1, 128, (1, 1024), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    own, theirs = logits(float64(model), ids), logits(model, ids)
    model.set_attn_implementation(enabled.register() if registered else "sdpa")
    if how == "compiled" and not registered:
        skip_with_masks(model, ids)
    torch._dynamo.reset()
    step = torch.compile(model) if how == "compiled" else model
    before = enabled.counters().get("kernel", 0)
    with nullcontext() if registered else enabled.enable():
        ours = logits(step, ids)
    assert (ours - own).norm() <= 1.5 * (theirs - own).norm()
    assert enabled.counters().get("kernel", 0) == before + 1, enabled.counters()


def test_empty_and_refused(operator):
    shape, *_ = PLAIN
    q, k, v = tensors(shape)
    options = options_of(shape)
    assert operator.attention(q[:0], k[:0], v[:0], **options).shape == (0, *q.shape[1:])
    for given in ((q, k, v[..., :256]), tuple(t[..., :504] for t in (q, k, v))):
        told = operator.explain(*given, **options)
        assert (told.kernel, told.code) == (None, "head_dim")
        out = operator.attention(*given, **options)
        assert right(out, given, hidden(shape, given))


def test_in_a_cuda_graph(operator):
    shape, *_ = PLAIN
    q, k, v = tensors(shape)
    options = options_of(shape)
    assert right(operator.attention(q, k, v, **options), (q, k, v), hidden(shape, (q, k, v)))
    graph, out = on_card.captured(lambda: operator.attention(q, k, v, **options))
    v.copy_(torch.randn_like(v))
    graph.replay()
    torch.cuda.synchronize()
    assert right(out, (q, k, v), hidden(shape, (q, k, v)))

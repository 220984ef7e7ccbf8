"""v of another head_dim than q's, served by a package on a GPU: eager, compiled, with gradients."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import recorded

torch = pytest.importorskip("torch")

import on_card  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from deepseeks import deepseek  # noqa: E402
from gemmas import float64, logits, skip_with_masks  # noqa: E402
from operators import traced  # noqa: E402

from attnsweep.choose.ranking import rank  # noqa: E402
from attnsweep.core.problem import Problem  # noqa: E402
from attnsweep.family.discover import discover  # noqa: E402
from attnsweep.serve.export_code import FAMILY  # noqa: E402
from attnsweep.serve.runtime import dispatch  # noqa: E402
from attnsweep.store import run as store_run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NAME = "value_dims_for_tests"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# What rounding P and the output costs of an output's length, and of a gradient's.
MOST = {"fp16": (6e-4, 2e-3), "bf16": (4e-3, 1.5e-2)}
LAYOUTS = ("heads_first", "rows_first", "packed")
# What a problem has, and how a config differs from the first one.
SHAPES = {
    Problem.parse(label): {"WARPGROUPS": 2, "NUM_STAGES": 2, "BLOCKS_PER_SM": 1, **changes}
    for label, changes in {
        "(1,16,2048,192/128) bf16 causal": {"BLOCK_N": 128, "ORDER": 1},
        "(2,24/12,700,64/128) fp16 full": {"BLOCK_N": 128},
        "(2,8,333,96/64) bf16 causal": {"BLOCK_N": 96, "WARPGROUPS": 3, "ORDER": 1},
        "(2,4,512,128/256) bf16 causal": {"BLOCK_N": 96, "ORDER": 1},
        "(2,8/4,300x900,96/64) bf16 full": {"BLOCK_N": 64, "SPLITS": 2, "PDL": 2},
        "(1,8/2,1x4096,192/128) bf16 full": {"WARPGROUPS": 1, "BLOCKS_PER_SM": 2, "PACK_GQA": 1},
    }.items()
}


def rows_of(run, shape, changes):
    """A winner of the run with another config and PyTorch's time, as if of the shape."""
    won = next(t for t in rank(run.trials, run.environment).query("winner")["trial"])
    (theirs, *_) = [t for t in run.trials if t.problem == won.problem and t.provider != "attnsweep"]
    values = {param.name: param.values[0] for param in discover()[FAMILY].params}
    own = won.with_(problem=shape, kernel=FAMILY, config=values | changes)
    return own, theirs.with_(problem=shape, provider="torch_efficient")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    place = tmp_path_factory.mktemp("value_dims")

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
        yield on_card.always(package, NAME)


@pytest.fixture(scope="module")
def enabled(package, operator):
    """The package, whose functions call the operator."""
    package.serve_by(operator)
    return package


def tensors(shape, layout):
    """q, k and v. packed: each is a slice of a larger tensor."""
    torch.manual_seed(1)

    def made(seqlen, heads, columns):
        more = 3 if layout == "packed" else 0
        both = torch.randn(shape.batch, seqlen, heads + more, columns, device="cuda")
        tensor = both.to(DTYPES[shape.dtype])[:, :, :heads].transpose(1, 2)
        return tensor.contiguous() if layout == "heads_first" else tensor

    q = made(shape.seqlen_q, shape.heads, shape.head_dim)
    k, v = (made(shape.seqlen_k, shape.heads_kv, columns) for columns in shape.head_dims)
    return q, k, v


def options_of(shape):
    return {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.heads_kv}


def check(got, given, shape):
    doubles = [t.detach().double() for t in given]
    exact = F.scaled_dot_product_attention(*doubles, **options_of(shape))
    assert on_card.error(got, exact) <= MOST[shape.dtype][0]


def check_gradients(got, given, direction, shape):
    doubles = [t.detach().double().requires_grad_() for t in given]
    out = F.scaled_dot_product_attention(*doubles, **options_of(shape))
    exact = torch.autograd.grad(out, doubles, direction.double())
    for mine, right in zip(got, exact, strict=True):
        assert on_card.error(mine, right) <= MOST[shape.dtype][1]


def strides_of(shape, layout):
    columns, rows, heads = shape.value_dim, shape.seqlen_q, shape.heads
    if layout == "heads_first":
        return (heads * rows * columns, rows * columns, columns, 1)
    return (heads * rows * columns, columns, heads * columns, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager(operator, shape, layout):
    given = tensors(shape, layout)
    assert operator.explain(*given, **options_of(shape)).kernel
    before = operator.counters().get("kernel", 0)
    for _ in range(2):
        out = operator.attention(*given, **options_of(shape))
        check(out, given, shape)
    assert operator.counters()["kernel"] == before + 2
    if shape.seqlen_q > 1:  # the stride of one row may be any
        assert out.stride() == strides_of(shape, layout)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_the_other_dtype(operator, shape):
    other = replace(shape, dtype="bf16" if shape.dtype == "fp16" else "fp16")
    given = tensors(other, "rows_first")
    before = operator.counters().get("kernel", 0)
    check(operator.attention(*given, **options_of(other)), given, other)
    # Predicted by the times of the tuned dtype, one query may gain too little to be sure of.
    assert operator.counters()["kernel"] == before + 1 or shape.seqlen_q == 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", ["heads_first", "packed"])
def test_gradients(operator, shape, layout):
    """By PyTorch's own backward, from the output and the log-sum-exp of the kernel."""
    given, options = tensors(shape, layout), options_of(shape)
    leaves = [t.detach().requires_grad_() for t in given]
    before = operator.counters().get("kernel", 0)
    for _ in range(2):  # in turns: cuDNN's plans of PyTorch do not know how the gradient lies
        out = operator.attention(*leaves, **options)
        direction = torch.randn_like(out)
        check_gradients(torch.autograd.grad(out, leaves, direction), given, direction, shape)
        out = operator.attention(*leaves, **options)
        other = direction.transpose(1, 2).contiguous().transpose(1, 2)
        other = direction.contiguous() if other.stride() == direction.stride() else other
        check_gradients(torch.autograd.grad(out, leaves, other), given, direction, shape)
    assert operator.counters()["kernel"] == before + 4


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_compiled_with_gradients(operator, shape):
    given, options = tensors(shape, "packed"), options_of(shape)
    direction = torch.randn(*given[0].shape[:3], shape.value_dim, device="cuda").to(given[0].dtype)
    graphs, got = traced(lambda *of: operator.attention(*of, **options), given, direction)
    assert f"{operator.namespace}.forward_lse" in graphs[0]
    check_gradients(got, given, direction, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled(operator, layout):
    torch._dynamo.reset()
    shape, *_ = SHAPES
    given, options = tensors(shape, layout), options_of(shape)
    compiled = torch.compile(lambda q, k, v: operator.attention(q * 1.0, k, v, **options) * 1.0, fullgraph=True)
    before = operator.counters().get("kernel", 0)
    check(compiled(*given), given, shape)
    assert operator.counters()["kernel"] == before + 1


def test_in_a_cuda_graph(operator):
    shape, *_ = SHAPES
    q, k, v = tensors(shape, "rows_first")
    options = options_of(shape)
    check(operator.attention(q, k, v, **options), (q, k, v), shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator.attention(q, k, v, **options)
    v.copy_(torch.randn_like(v))
    graph.replay()
    torch.cuda.synchronize()
    check(out, (q, k, v), shape)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_model_of_deepseeks_kind(enabled, registered, how):
    """Its logits are as near to those of float64 attention as with PyTorch's own."""
    model = deepseek("cuda", 16, 2048)
    ids = torch.randint(1, 128, (1, 2048), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
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
    assert enabled.counters().get("kernel", 0) == before + 2, enabled.counters()

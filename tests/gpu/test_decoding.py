"""One query and a few of grouped heads on a GPU, by an export of the recorded run of decoding."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import on_card  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from attnsweep.core.problem import Problem  # noqa: E402
from attnsweep.serve.runtime import dispatch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NAME = "decoding_for_tests"
RUNS = {"decode", *(f"decode_{name}" for name in ("models", "heads", "queries", "dims"))}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("heads_first", "rows_first", "packed")
# Groups of 4, 8, 7 and 32, of one tile or more; keys that no tile divides, and a static cache's.
SHAPES = tuple(
    Problem(*sizes, dtype)
    for *sizes, dtype in (
        (8, 32, 8, 1, 4096, 128, "bf16"),
        (1, 64, 8, 1, 4096, 64, "fp16"),
        (3, 28, 4, 1, 1001, 128, "fp16"),
        (2, 32, 1, 1, 2085, 64, "bf16"),
        (64, 32, 8, 1, 1000, 128, "bf16"),
    )
)


@pytest.fixture(scope="module")
def always(tmp_path_factory):
    place = tmp_path_factory.mktemp("package")
    with on_card.exported_package(RUNS, place, NAME) as package, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "DIVIDED_GAIN_FEW", 0.0)  # few tiles need one, whatever the guard is
        yield on_card.always(package, "decoding_always")


def tensors(shape, layout="rows_first", slack=0):
    """q, k and v. packed: q is a slice of a larger tensor. slack: keys that a cache has besides."""
    torch.manual_seed(1)
    heads, heads_kv, head_dim = shape.heads, shape.heads_kv, shape.head_dim

    def made(seqlen, own, others=0):
        sizes = (shape.batch, seqlen, own + others, head_dim)
        tensor = torch.randn(sizes, device="cuda").to(DTYPES[shape.dtype])[:, :, :own]
        return tensor.transpose(1, 2)

    q = made(shape.seqlen_q, heads, 2 * heads_kv if layout == "packed" else 0)
    q = q.contiguous() if layout == "heads_first" else q
    k, v = (made(shape.seqlen_k + slack, heads_kv)[:, :, : shape.seqlen_k] for _ in range(2))
    return q, k, v


def check(got, given):
    exact = F.scaled_dot_product_attention(*(t.double() for t in given), enable_gqa=True)
    theirs = F.scaled_dot_product_attention(*given, enable_gqa=True)
    assert on_card.error(got, exact) <= 1.5 * on_card.error(theirs, exact) + 1e-5


def served(operator, given):
    """The output, of a kernel."""
    explained = operator.explain(*given, enable_gqa=True)
    assert explained.kernel is not None, str(explained)
    before = operator.counters().get("kernel", 0)
    got = operator.attention(*given, enable_gqa=True)
    assert operator.counters()["kernel"] == before + 1
    assert got.stride() == torch.empty_like(given[0]).stride()
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_one_query(always, shape, layout):
    given = tensors(shape, layout, slack=23)
    assert "PACK_GQA=1" in str(always.explain(*given, enable_gqa=True).kernel)
    check(served(always, given), given)


def test_every_winner(always):
    """On the shape that it won, in its own type and in the other: clusters and splits too."""
    for gpu in always.table.gpus.values():
        for winner in gpu.winners:
            for dtype in DTYPES if winner.problem.kind == "full" else ():
                given = tensors(replace(winner.problem, dtype=dtype), "heads_first")
                check(served(always, given), given)


FILLED = (
    Problem(8, 32, 8, 1, 4096, 128, "bf16"),
    Problem(3, 28, 4, 1, 1001, 128, "fp16"),
    Problem(1, 32, 8, 1, 32768, 128, "bf16"),
    Problem(64, 32, 8, 1, 1000, 128, "bf16"),
    Problem(16, 32, 8, 1, 2085, 64, "bf16"),
    Problem(2, 32, 32, 1, 2085, 128, "bf16"),
)


def filled(shape, begins=False):
    """(batch, 2): the first key of each item and the one after the last; the last item has none."""
    end = torch.linspace(shape.seqlen_k, 1, shape.batch, device="cuda").int()
    end[1:] = end[1:].roll(1)  # in no order
    first = end // 3 if begins else torch.zeros_like(end)
    if shape.batch > 2:
        first[-1] = end[-1] = 0
    return torch.stack((first, end), 1)


def check_seen(got, given, seen):
    """By float64. seen: (batch, 1, 1, keys)."""
    q, k, v = (t.double() for t in given)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    assert on_card.near(got, scores.softmax(-1).nan_to_num() @ v)


def by_item_keys(operator, given, **how):
    explained = operator.explain(*given, enable_gqa=True, **how)
    assert "ITEM_KEYS=1" in (explained.kernel or ""), str(explained)
    before = operator.counters().get("kernel", 0)
    got = operator.attention(*given, enable_gqa=True, **how)
    assert operator.counters()["kernel"] == before + 1
    return got


@pytest.mark.parametrize("how", ["lengths", "ranges", "mask", "mask of ranges", "holes"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", FILLED, ids=lambda shape: shape.label)
def test_a_cache_that_is_filled_in_part(always, shape, layout, how):
    given = tensors(shape, layout, slack=23)
    ranges = filled(shape, begins="ranges" in how)
    keys = torch.arange(shape.seqlen_k, device="cuda")
    seen = torch.zeros(shape.batch, 1, 1, shape.seqlen_k, device="cuda", dtype=torch.bool)
    said = {"key_lengths": ranges[:, 1] if how == "lengths" else ranges}
    said = said if how in ("lengths", "ranges") else {"attn_mask": seen}
    for _ in range(2):  # what was there before is not met again
        seen[:, 0, 0] = (keys >= ranges[:, :1]) & (keys < ranges[:, 1:])
        if how == "holes":
            seen &= keys % 7 != 3
        check_seen(by_item_keys(always, given, **said), given, seen)
        ranges //= 2


def test_one_mask_for_all_items(always):
    """As a static cache of a model has it: expanded over the batch."""
    given = tensors(FILLED[0])
    seen = (torch.arange(4096, device="cuda") < 300).expand(8, 1, 1, 4096)
    check_seen(by_item_keys(always, given, attn_mask=seen), given, seen)


def test_a_graph_decodes_a_cache_that_grows(always):
    """One graph: before each replay the lengths, and what they say is seen, are others."""
    given, lengths = tensors(FILLED[0]), torch.full((8,), 300, device="cuda", dtype=torch.int32)
    by_item_keys(always, given, key_lengths=lengths)
    graph, out = on_card.captured(lambda: always.attention(*given, enable_gqa=True, key_lengths=lengths))
    keys = torch.arange(4096, device="cuda")
    for length in (300, 301, 4096, 1, 0):
        lengths.fill_(length)
        graph.replay()
        torch.cuda.synchronize()
        check_seen(out, given, (keys < lengths[:, None])[:, None, None])


@pytest.mark.parametrize("queries", [2, 4, 7])
def test_several_queries(always, queries):
    """Also those that models have, whose groups' rows are not equally far apart."""
    shape = Problem(8, 32, 8, queries, 4096, 128, "bf16")
    given = tensors(shape, "heads_first")
    check(served(always, given), given)
    apart = tensors(shape)
    check(served(always, apart), apart)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.label)
def test_the_log_sum_exp(always, shape, layout):
    q, k, v = tensors(shape, layout)
    scale = shape.head_dim**-0.5
    out, lse = getattr(torch.ops, always.namespace).forward_lse.default(q, k, v, False, scale)
    check(out, (q, k, v))
    group = shape.heads // shape.heads_kv
    scores = q.double() @ k.double().repeat_interleave(group, 1).mT * scale
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 1e-3


def test_gradients(always):
    """By PyTorch's backward, which reads the output and the log-sum-exp."""
    given = tensors(SHAPES[0])

    def gradients(attention, leaves):
        leaves = [t.detach().requires_grad_() for t in leaves]
        out = attention(*leaves, enable_gqa=True)
        torch.manual_seed(2)
        direction = torch.randn(out.shape, device="cuda", dtype=torch.float32).to(out.dtype)
        return torch.autograd.grad(out, leaves, direction)

    before = always.counters().get("kernel", 0)
    ours = gradients(always.attention, given)
    assert always.counters()["kernel"] == before + 1
    theirs = gradients(F.scaled_dot_product_attention, given)
    exact = gradients(F.scaled_dot_product_attention, [t.double() for t in given])
    for got, other, right in zip(ours, theirs, exact, strict=True):
        assert on_card.error(got, right) <= 1.5 * on_card.error(other, right) + 1e-4


def test_a_graph_decodes_again(always):
    """A replayed CUDA graph reads what the cache has by then."""
    q, k, v = tensors(SHAPES[0], slack=8)
    served(always, (q, k, v))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = always.attention(q, k, v, enable_gqa=True)
    q.copy_(torch.randn_like(q))
    v.copy_(torch.randn_like(v))
    graph.replay()
    torch.cuda.synchronize()
    check(out, (q, k, v))


def test_compiled(always):
    torch._dynamo.reset()
    given = tensors(SHAPES[0])
    compiled = torch.compile(lambda q, k, v: always.attention(q * 1.0, k, v, enable_gqa=True) * 1.0, fullgraph=True)
    before = always.counters().get("kernel", 0)
    check(compiled(*given), given)
    assert always.counters()["kernel"] == before + 1

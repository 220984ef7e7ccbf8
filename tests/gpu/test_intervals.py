"""window, causal_offset and key_lengths by attnsweep's own kernels, against float64."""

import pytest

torch = pytest.importorskip("torch")

from attending import seen  # noqa: E402
from on_card import near, served_since  # noqa: E402
from operators import exact  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BATCH, HEADS, ROWS = 4, 16, 1024


@pytest.fixture
def served():
    """Counts the calls that kernels served since the test began."""
    return served_since(lambda: attnsweep.explain_attention(*tensors(), window=(100, 0)))


def tensors(batch=BATCH, heads=HEADS, rows=ROWS, keys=None, heads_kv=None, head_dim=128):
    torch.manual_seed(0)
    sizes = [(batch, heads, rows), *[(batch, heads_kv or heads, keys or rows)] * 2]
    return [torch.randn(*n, head_dim, device="cuda", dtype=torch.bfloat16) for n in sizes]


def check(got, given, **limits):
    assert near(got, exact(*given, seen(*given[:2], **limits))), limits


def lengths_of(batch, keys, dtype=torch.int32):
    return torch.linspace(0.3 * keys, keys, batch, device="cuda").to(dtype)


def limits_of(batch, rows, keys):
    """Arguments of each kind."""
    right = lengths_of(batch, keys)
    left = torch.stack((keys - right, torch.full_like(right, keys)), 1)
    some = right.clone()
    some[0] = 0
    return (
        {"window": (100, 0)},
        {"window": (63, 64)},
        {"window": (0, 0)},
        {"window": (None, 65)},
        {"window": (300, None)},
        {"window": (300, None), "is_causal": True},
        {"causal_offset": keys - rows},
        {"causal_offset": 5},
        {"causal_offset": -70},
        {"window": (40, None), "causal_offset": -300},
        {"key_lengths": right},
        {"key_lengths": right.long()},
        {"key_lengths": left},
        {"key_lengths": torch.stack((right // 2, right), 1)},
        {"key_lengths": some},
        {"key_lengths": torch.stack((right - 2 * keys, right + keys), 1)[:, [0, 1]]},
        {"key_lengths": right, "is_causal": True},
        {"key_lengths": left, "causal_offset": keys - rows},
        {"key_lengths": right, "window": (200, 0)},
        {"key_lengths": left, "window": (50, 30)},
    )


SIZES = ((4, 16, 1024, 1024, 16), (2, 32, 777, 1040, 8), (3, 8, 1500, 1501, 8), (2, 16, 1100, 900, 4))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_argument(served, sizes, head_dim):
    batch, heads, rows, keys, heads_kv = sizes
    given = tensors(batch, heads, rows, keys, heads_kv, head_dim)
    for limits in limits_of(batch, rows, keys):
        before, options = served(), {**limits, "enable_gqa": heads != heads_kv}
        check(attnsweep.attention(*given, **options), given, **limits)
        plain = limits == {"causal_offset": keys - rows} and rows <= keys  # PyTorch's may be faster
        explained = attnsweep.explain_attention(*given, **options)
        assert served() == before + 1 or plain, (limits, explained)


@pytest.mark.parametrize("layout", ["bshd", "packed"])
def test_strides(served, layout):
    torch.manual_seed(0)
    made = torch.randn(BATCH, ROWS, 3 * HEADS, 128, device="cuda", dtype=torch.bfloat16)
    given = [t.transpose(1, 2) for t in made.split(HEADS, 2)]
    if layout == "bshd":
        given = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    both = torch.stack((lengths_of(BATCH, ROWS), lengths_of(BATCH, ROWS)), 1)
    for number, limits in enumerate(
        (
            {"window": (100, 0)},
            {"key_lengths": lengths_of(BATCH, ROWS), "is_causal": True},
            {"key_lengths": both[:, 1]},
            {"key_lengths": both.mT.contiguous().mT // torch.tensor([2, 1], device="cuda")},
        )
    ):
        check(attnsweep.attention(*given, **limits), given, **limits)
        assert served() == number + 1


def test_equal_to_the_dense_mask_by_a_kernel(served):
    """To a few roundings: kernels for masks of both kinds take keys in the same order."""
    given = tensors()
    for limits in ({"window": (100, 0)}, {"key_lengths": lengths_of(BATCH, ROWS)}):
        mask = seen(*given[:2], **limits)
        ours, masked = attnsweep.attention(*given, **limits), attnsweep.attention(*given, mask)
        assert (ours - masked).abs().max() <= 2e-2
    assert served() == 4


def test_lengths_that_change(served):
    given, lengths = tensors(), lengths_of(BATCH, ROWS)
    for step in (0, 0, 100, 17):
        lengths -= step
        check(attnsweep.attention(*given, key_lengths=lengths), given, key_lengths=lengths)
    assert served() == 4


def test_nothing_waits_for_the_gpu(served):
    given, lengths = tensors(), lengths_of(BATCH, ROWS)
    grads = [t.clone().requires_grad_() for t in given]
    calls = (
        lambda: attnsweep.attention(*given, window=(100, 0), key_lengths=lengths),
        lambda: attnsweep.attention(*given, window=(70, 0)),
        lambda: attnsweep.attention(*grads, key_lengths=lengths),
    )
    for call in calls:  # kernels are loaded
        call()
    lengths += 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_windows_in_turn_on_two_streams(served):
    given = tensors()
    windows = [(100, 0), (30, 30)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn // 2 % 2]):
            outs.append(attnsweep.attention(*given, window=windows[turn % 2]))
    torch.cuda.synchronize()
    for turn, out in enumerate(outs):
        check(out, given, window=windows[turn % 2])
    assert served() == 12


def test_a_graph_scans_the_lengths_that_it_is_replayed_with(served):
    given, lengths = tensors(), lengths_of(BATCH, ROWS)
    limits = {"window": (200, 0), "key_lengths": lengths}
    attnsweep.attention(*given, **limits)
    attnsweep.attention(*given, window=(200, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attnsweep.attention(*given, **limits) for _ in range(2)]
        alone = [attnsweep.attention(*given, window=(200, 0)) for _ in range(2)]
    for _ in range(3):
        lengths.copy_(lengths.roll(1) - 5)
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            check(out, given, **limits)
        for out in alone:
            check(out, given, window=(200, 0))
    check(attnsweep.attention(*given, **limits), given, **limits)


def test_gradients(served):
    given = [t.requires_grad_() for t in tensors(rows=300)]
    limits = {"window": (50, 0), "key_lengths": lengths_of(BATCH, 300)}
    direction = torch.randn_like(given[0])
    got = torch.autograd.grad(attnsweep.attention(*given, **limits), given, direction)
    doubles = [t.detach().double().requires_grad_() for t in given]
    mask = seen(*doubles[:2], **limits)
    empty = ~mask.any(-1, keepdim=True)
    out = exact(*doubles, mask | empty).masked_fill(empty, 0)
    want = torch.autograd.grad(out, doubles, direction.double())
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
    assert served() == 0


def test_compiled_code_is_one_graph(served):
    def block(q, k, v, lengths):
        return attnsweep.attention(q * 1.0, k, v, window=(200, 0), key_lengths=lengths) * 1.0

    torch._dynamo.reset()
    given, compiled = tensors(), torch.compile(block, fullgraph=True)
    for least in (100, 900):
        lengths = torch.tensor([least, 1024, 500, 700], device="cuda")
        limits = {"window": (200, 0), "key_lengths": lengths}
        check(compiled(*given, lengths), given, **limits)
    assert served() == 2


def test_compiled_code_in_cuda_graphs(served):
    """Inductor's own graphs, whose memory is checked to be theirs."""

    def block(q, k, v, lengths):
        return attnsweep.attention(q * 1.0, k, v, is_causal=True, key_lengths=lengths) * 1.0

    torch._dynamo.reset()
    given, compiled = tensors(), torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for least in (100, 900, 300, 1000, 50):
        lengths = torch.tensor([least, 1024, 500, 700], device="cuda")
        got = compiled(*given, lengths).clone()
        check(got, given, is_causal=True, key_lengths=lengths)


def test_lengths_on_the_host_are_refused(served):
    with pytest.raises(ValueError, match="key_lengths is on cpu, and query on cuda:0"):
        attnsweep.attention(*tensors(), key_lengths=torch.tensor([1, 2, 3, 4]))

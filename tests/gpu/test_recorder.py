"""`attnsweep shapes` on a card: what Python calls counts as much as in PyTorch's dispatcher."""

import pytest

torch = pytest.importorskip("torch")
from attention_calls import counts, qkv, recorded  # noqa: E402  (it needs PyTorch)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
F = torch.nn.functional
SHAPE, CUDA = (1, 8, 256, 64), {"dtype": torch.bfloat16, "device": "cuda"}


def autocast():
    tensors = qkv(*SHAPE, device="cuda")
    for dtype in (torch.float16, torch.bfloat16) * 2:
        with torch.autocast("cuda", dtype):
            F.scaled_dot_product_attention(*tensors)


def gradients():
    q, k, v = (each.requires_grad_() for each in qkv(*SHAPE, **CUDA))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def padded_and_grouped():
    F.scaled_dot_product_attention(*qkv(1, 8, 256, 60, **CUDA))
    q, k, v = qkv(*SHAPE, **CUDA)
    F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def growing():
    q, k, v = qkv(*SHAPE, **CUDA)
    for seqlen in range(100, 200):
        F.scaled_dot_product_attention(q[:, :, :1], k[:, :, :seqlen], v[:, :, :seqlen])


@pytest.mark.parametrize("run", [autocast, gradients, padded_and_grouped, growing])
def test_both_ways_count_the_same(tmp_path, run):
    got = counts(tmp_path, lambda _: run())
    assert got == counts(tmp_path, lambda _: run(), every_call=True)
    assert got


def test_a_call_in_a_graph_counts_once_and_says_so(tmp_path):
    def program(_):
        tensors, graph = qkv(*SHAPE, **CUDA), torch.cuda.CUDAGraph()
        F.scaled_dot_product_attention(*tensors)
        with torch.cuda.graph(graph):
            F.scaled_dot_product_attention(*tensors)
        for _ in range(5):
            graph.replay()

    calls = recorded(tmp_path, program).calls
    assert [(call["captured"], n) for call, n in calls] == [(False, 1), (True, 1)]


def test_compiled_calls_and_a_layers_own_count_with_every_call(tmp_path):
    layer = torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).eval().cuda().half()
    block = torch.compile(lambda x: F.scaled_dot_product_attention(x * 2, x, x) + 1)

    def program(_):
        for _ in range(3):
            block(qkv(*SHAPE, **CUDA)[0])
        with torch.no_grad():
            layer(torch.randn(2, 8, 64, device="cuda", dtype=torch.float16))

    torch._dynamo.reset()
    assert sum(counts(tmp_path, program, every_call=True)) == 4

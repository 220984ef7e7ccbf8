"""`attnsweep shapes` on a card: it counts as much without the dispatcher's kernels as with them."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
from attention_calls import counted  # noqa: E402  (it needs PyTorch)

from attnsweep.serve.recorder.eager import CALM  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
F = torch.nn.functional


def qkv(*shape, dtype=torch.bfloat16):
    return tuple(torch.randn(3, *(shape or (1, 8, 256, 64)), dtype=dtype, device="cuda"))


def in_a_graph():
    tensors, graph = qkv(), torch.cuda.CUDAGraph()
    F.scaled_dot_product_attention(*tensors)
    with torch.cuda.graph(graph):
        for _ in range(3):
            F.scaled_dot_product_attention(*tensors)
    for _ in range(5):
        graph.replay()


def compiled():
    torch._dynamo.reset()
    block = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v) + 1, fullgraph=True
    )
    for _ in range(3):
        block(*qkv())


def fast_path_of_a_layer():
    layer = torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).eval().cuda().half()
    with torch.no_grad():
        layer(torch.randn(2, 8, 64, device="cuda", dtype=torch.float16))


def autocast():
    tensors = qkv(dtype=torch.float32)
    for dtype in (torch.float16, torch.bfloat16) * 2:
        with torch.autocast("cuda", dtype):
            for _ in range(2 * CALM):
                F.scaled_dot_product_attention(*tensors)


def gradients():
    for _ in range(2 * CALM):
        q, k, v = (each.requires_grad_() for each in qkv())
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def padded_and_grouped():
    for _ in range(2 * CALM):
        F.scaled_dot_product_attention(*qkv(1, 8, 256, 60))
    q, k, v = qkv()
    for _ in range(2 * CALM):
        F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def causal_of_other_lengths():
    q, k, v = qkv()
    for _ in range(2 * CALM):
        F.scaled_dot_product_attention(q[:, :, :64], k, v, is_causal=True)


def growing():
    q, k, v = qkv()
    for seqlen in range(100, 200):
        F.scaled_dot_product_attention(q[:, :, :1], k[:, :, :seqlen], v[:, :, :seqlen])


PROGRAMS = (
    *(in_a_graph, compiled, fast_path_of_a_layer, autocast, gradients, padded_and_grouped),
    *(causal_of_other_lengths, growing),
)


@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
def test_it_counts_what_the_kernels_count(tmp_path, run):
    def program(recording):
        for _ in range(2 * CALM):
            F.scaled_dot_product_attention(*qkv())
        assert recording.eager.gone or not recording.eager.watches
        run()
        F.scaled_dot_product_attention(*qkv())

    torch._dynamo.reset()
    want = counted(tmp_path, program, quick=False)
    torch._dynamo.reset()
    got = counted(tmp_path, program)
    assert got == want
    assert sum(n for _, n in got) > 2 * CALM
    assert all(json.loads(call)["device"] == "cuda" for call, _ in got)

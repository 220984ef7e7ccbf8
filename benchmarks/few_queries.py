"""Time 2 to 16 queries of grouped heads in the layout that models have, beside what else there is.

Needs a GPU that attnsweep has winners for. q, k and v are (batch, seqlen, heads, head_dim) tensors
seen as (batch, heads, seqlen, head_dim), and no recorded run has their sizes. Ways: attnsweep's
attention, PyTorch's own choice, its flash attention and, where its package is installed,
FlashAttention-3. They take turns in random order; microseconds a call of replayed CUDA graphs,
medians of the rounds; `ratio`: of the fastest other one to attnsweep, by rounds. `off`: how far the
output is from float64.
"""

from __future__ import annotations

import importlib
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from setting import described, options, write_rows
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnsweep

ROUNDS, CALLS, REPLAYS = 25, 20, 5
# batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim
SHAPES = (
    (4, 32, 8, 4, 8192, 128),
    (1, 32, 8, 8, 12000, 128),
    (8, 32, 8, 2, 3000, 128),
    (16, 28, 4, 4, 2500, 128),
    (2, 64, 8, 16, 6000, 64),
    (32, 16, 4, 3, 1700, 64),
    (6, 40, 8, 5, 5000, 128),
    (3, 16, 2, 12, 10000, 128),
)


def flash_3() -> Callable[..., Any] | None:
    """FlashAttention-3's function, if one of its packages is installed."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            found: Callable[..., Any] = importlib.import_module(name).flash_attn_func
            return found
        except ImportError:
            continue
    return None


def graph_of(call: Callable[[], Any]) -> Any:
    """A CUDA graph of CALLS calls, which ran before."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def replayed_us(graph: Any) -> float:
    """Microseconds of a call."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(REPLAYS):
        graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / CALLS / REPLAYS


def row_of(shape: tuple[int, ...]) -> dict[str, Any]:
    """Medians of each way's times, and how they compare."""
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim = shape
    sizes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    rows = [torch.randn(batch, n, h, head_dim, device="cuda", dtype=torch.bfloat16) for n, h in sizes]
    q, k, v = (each.transpose(1, 2) for each in rows)

    def flash() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    ways: dict[str, Callable[[], Any]] = {
        "attnsweep": lambda: attnsweep.attention(q, k, v, enable_gqa=True),
        "pytorch": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "pytorch_flash": flash,
    }
    fa3 = flash_3()
    if fa3 is not None:
        ways["flash_attn_3"] = lambda: fa3(*rows)
    why = attnsweep.explain_attention(q, k, v, enable_gqa=True)
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    off = float((ways["attnsweep"]().double() - right).norm() / right.norm())
    graphs = {name: graph_of(call) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name in random.sample([*ways], len(ways)):
            times[name].append(replayed_us(graphs[name]))
    middle = {name: round(statistics.median(each), 2) for name, each in times.items()}
    best = min((name for name in ways if name != "attnsweep"), key=middle.__getitem__)
    ratios = [b / a for a, b in zip(times["attnsweep"], times[best], strict=True)]
    label = f"({batch},{heads}/{heads_kv},{seqlen_q}x{seqlen_k},{head_dim})"
    ratio = round(statistics.median(ratios), 3)
    return {"shape": label, "code": why.code, "us": middle, "best": best, "ratio": ratio, "off": off}


def rows() -> Iterator[dict[str, Any]]:
    """A row of each shape."""
    with torch.no_grad():
        for shape in SHAPES:
            yield row_of(shape)


if __name__ == "__main__":
    file = options(__doc__).parse_args().file
    write_rows(file, described(), rows(), torch=torch.__version__)

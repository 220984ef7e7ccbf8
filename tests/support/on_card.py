"""What tests of the kernels that come with attnsweep share on a card. Needs PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnsweep


def served_since(explain: Callable[[], Any]) -> Callable[[], int]:
    """A count of the calls that kernels serve from now on; skips on a GPU that they are not for.

    explain: explains a call that one serves.
    """
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    explained = explain()
    if explained.code == "gpu":
        pytest.skip(explained.reason)
    assert explained.kernel is not None, str(explained)
    before = attnsweep.attention_counters().get("kernel", 0)
    return lambda: attnsweep.attention_counters().get("kernel", 0) - before


def near(out: Any, want: Any) -> bool:
    """Whether each row is within 1 % of its own length, so that rows without a key are 0."""
    error, norm = (each.norm(dim=-1) for each in (out.double() - want, want))
    return bool((error <= 1e-2 * norm).all())


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a step that ran before, and what its replays write to."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out

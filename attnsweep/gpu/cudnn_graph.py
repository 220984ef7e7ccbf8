"""The baseline `cudnn`: attention as a graph of cuDNN's own frontend (nvidia-cudnn-frontend).

The plan is built once, and its workspace allocated, before any call; a call only executes it, so
that it can be captured. Only `peers` imports this, and only where the package is installed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from attnsweep.problem import Problem

LAYOUTS = ("bhsd", "bshd")
"""Order of batch, heads, sequence and head_dim in memory: ours, and the one of most models."""
_Q, _K, _V, _O = 1, 2, 3, 4


def strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides of a tensor of shape (batch, heads, seqlen, head_dim) that lies in a layout."""
    _, heads, seqlen, head_dim = shape
    batch = heads * seqlen * head_dim
    if layout == "bhsd":
        return (batch, seqlen * head_dim, head_dim, 1)
    return (batch, head_dim, heads * head_dim, 1)


def build(
    torch: Any, cudnn: Any, problem: Problem, stream: int, layout: str
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """A call of the problem on `stream` (its address), and what converts inputs to the layout.

    Raises what cuDNN raises if none of its engines does the problem.
    """
    kind = {"fp16": "HALF", "bf16": "BFLOAT16"}[problem.dtype]
    io, fp32 = getattr(cudnn.data_type, kind), cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=stream)
    graph = cudnn.pygraph(
        handle=handle, io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32
    )

    def tensor(name: str, uid: int) -> Any:
        shape = tuple(problem.shape_of(name))
        return graph.tensor(
            name=name,
            dim=list(shape),
            stride=list(strides(shape, layout)),
            data_type=io,
            uid=uid,
        )

    alignment = cudnn.diagonal_alignment
    last = problem.seqlen_q != problem.seqlen_k  # the last query sees the last key
    out, _ = graph.sdpa(
        name="sdpa",
        q=tensor("q", _Q),
        k=tensor("k", _K),
        v=tensor("v", _V),
        attn_scale=problem.scale,
        generate_stats=False,
        diagonal_alignment=alignment.BOTTOM_RIGHT if last else alignment.TOP_LEFT,
        diagonal_band_right_bound=0 if problem.causal else None,
        compute_data_type=fp32,
    )
    shape = tuple(problem.shape_of("o"))
    own = strides(shape, layout)
    out.set_uid(_O).set_output(True).set_dim(list(shape)).set_stride(list(own))
    out.set_data_type(io)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def forward(q: Any, k: Any, v: Any) -> Any:
        out = torch.empty_strided(shape, own, dtype=q.dtype, device=q.device)
        graph.execute({_Q: q, _K: k, _V: v, _O: out}, workspace, handle=handle)
        return out

    weakref.finalize(forward, cudnn.destroy_handle, handle)
    if layout == "bhsd":
        return forward, None

    def convert(*inputs: Any) -> tuple[Any, ...]:
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)

    return forward, convert

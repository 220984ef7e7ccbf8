"""Operators of a package over fake drivers, and tensors to call them with. Needs PyTorch."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from packages import H100, table
from torch.utils._python_dispatch import TorchDispatchMode

from attnsweep.serve.runtime.operator import Operator

NUMBERS = itertools.count()


def make(directory: Path, driver: Any, *winners: Any) -> Operator:
    """An operator over a package of these winners, on the CPU as on an H100."""
    made = Operator(table(directory, *winners), f"t{next(NUMBERS)}", driver, devices=("cpu",))
    made.planner.gpus[0] = made.table.gpus[H100]
    return made


def tensors(
    batch: int = 1,
    heads: int = 4,
    seqlen: int = 256,
    heads_kv: int | None = None,
    layout: str = "bhsd",
    dtype: Any = torch.bfloat16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
) -> tuple[Any, ...]:
    """q, k and v. layout: bhsd is contiguous; bshd, heads beside each other; packed, in one."""
    torch.manual_seed(0)
    heads_kv = heads_kv or heads
    if head_dim_v is not None:
        others = tensors(batch, heads, seqlen, heads_kv, layout, dtype, head_dim_v)
        return (*tensors(batch, heads, seqlen, heads_kv, layout, dtype, head_dim)[:2], others[2])
    if layout == "packed":
        both = torch.randn(batch, seqlen, heads + 2 * heads_kv, head_dim).to(dtype)
        return tuple(t.transpose(1, 2) for t in both.split([heads, heads_kv, heads_kv], 2))
    each = (heads, heads_kv, heads_kv)
    made = [torch.randn(batch, seqlen, n, head_dim).to(dtype) for n in each]
    made = [t.transpose(1, 2) for t in made]
    return tuple(t.contiguous() if layout == "bhsd" else t for t in made)


def exact(
    q: Any, k: Any, v: Any, mask: Any = None, softcap: float = 0.0, sinks: Any = None, scale: float | None = None
) -> Any:
    """Attention in float64; 0 for a query that sees no key. mask: of booleans, or of numbers to add."""
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    e = scores.exp()
    total = e.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return e / total.masked_fill(total == 0, 1) @ v


def gradients_of(attention: Any, given: Any, direction: Any = None, **how: Any) -> Any:
    """dq, dk, dv. direction: of the output (default: drawn)."""
    leaves = [t.detach().requires_grad_() for t in given]
    out = attention(*leaves, **how)
    if direction is None:
        direction = torch.randn(out.shape, generator=torch.manual_seed(7)).to(given[0].dtype)
    return torch.autograd.grad(out, leaves, direction.to(out.dtype))


def flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: float) -> Any:
    """PyTorch's own backward of its flash attention, which the CPU has under another name."""
    group = q.shape[1] // k.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (k, v))
    p = (q.double() @ keys.mT * scale - lse.double()[..., None]).exp()
    p = p.tril() if rest[5] else p
    delta = (grad.double() * out.double()).sum(-1, keepdim=True)
    ds = p * (grad.double() @ values.mT - delta) * scale

    def of_keys(each: Any) -> Any:
        return each.unflatten(1, (k.shape[1], group)).sum(2).to(q.dtype)

    return (ds @ keys).to(q.dtype), of_keys(ds.mT @ q.double()), of_keys(p.mT @ grad.double())


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def close(got: Any, expected: Any) -> bool:
    """Within what bf16 rounds."""
    return bool(torch.allclose(got.float(), expected.float(), atol=2e-2, rtol=2e-2))


def alive(kind: type = torch.Tensor) -> int:
    """How many tensors there are, or objects of another kind, whoever holds them."""
    while gc.collect():  # what a weak reference still had to say goodbye to
        pass
    return sum(isinstance(each, kind) for each in gc.get_objects())


@contextmanager
def aten(**by: Any) -> Iterator[None]:
    """Operators of PyTorch's own on the CPU, by functions: aten(_fused_sdp_choice=f)."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in by.items():
        library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


def no_room(*_: Any, **how: Any) -> Any:
    """An allocation on a card whose memory is full: aten(new_empty=no_room)."""
    raise torch.OutOfMemoryError


def shifted(tensor: Any) -> Any:
    """The same values 2 bytes off."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def compiled(attention: Any) -> tuple[Any, list[Any]]:
    """A function compiled as one graph, and a list that gets the graphs when it is called."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(attention, fullgraph=True, backend=backend), graphs


def traced(attention: Any, given: Any, direction: Any = None) -> tuple[list[str], Any]:
    """The graphs that a compiler makes of a call with gradients, and the gradients.

    direction: the output's gradient (default: ones).
    """
    from torch._dynamo.backends.common import aot_autograd

    graphs = []
    torch._dynamo.reset()  # or what it knows of other tests' operators counts

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    leaves = [t.detach().requires_grad_() for t in given]
    out = torch.compile(attention, fullgraph=True, backend=backend)(*leaves)
    direction = torch.ones_like(out) if direction is None else direction
    return graphs, torch.autograd.grad(out, leaves, direction)

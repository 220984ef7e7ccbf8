"""The baseline `flex`: PyTorch's FlexAttention, compiled, with its BlockMask made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Way
from attnsweep.baselines.torch_sdpa import of_sequences
from attnsweep.core import drawn
from attnsweep.core.problem import Packed, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


def cannot(problem: Problem) -> str | None:
    """What it is not timed for, or does not do."""
    if problem.kind == "full" and not problem.scores.kinds:
        return "is for masks and other scores, and this problem has none"
    return "needs a head_dim of 16 or more" if min(problem.head_dims) < 16 else None


def mask_of(torch: Any, problem: Problem, device: str = "cuda") -> Callable[..., Any]:
    """The problem's mask as FlexAttention asks for it: of batch, head, query and key."""
    if problem.mask.boolean and problem.layout.kind == "dense":
        dense = torch.from_numpy(drawn.tensor(problem)).to(device)[:, 0]

        def element(batch: Any, _head: Any, query: Any, key: Any) -> Any:
            return dense[batch if problem.mask.of_item else 0, query, key]

        return element
    low, high = problem.diagonals

    def between(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key - query >= low) & (key - query <= high)

    if isinstance(problem.layout, Packed):
        begin, after_last, beside = (x[:, 0] for x in of_sequences(torch, problem, device))

        def in_sequence(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            inside = (key >= begin[query]) & (key < after_last[query])
            return inside & between(_batch, _head, query + beside[query], key)

        return in_sequence
    if problem.layout.kind != "padded":
        return between
    first, end = torch.tensor(problem.key_ranges, device=device).T

    def in_range(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return between(batch, head, query, key) & (key >= first[batch]) & (key < end[batch])

    return in_range


def flex(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """FlexAttention as its users compile it; the compiler works in the first call."""
    from torch.nn.attention import flex_attention

    p, how = problem, problem.scores
    items = p.batch if p.items_differ else None
    mask = None
    if p.kind != "full":
        mask = flex_attention.create_block_mask(
            mask_of(torch, p), items, None, p.seqlen_q, p.seqlen_k, device="cuda"
        )
    torch.compiler.reset()  # it compiles one function for eight problems at most
    attention = torch.compile(flex_attention.flex_attention, dynamic=False)
    options = {"block_mask": mask, "enable_gqa": p.heads != p.heads_kv}
    options["return_lse"] = how.sinks

    def forward(q: Any, k: Any, v: Any, *beside: Any) -> Any:
        own = how.bias or ()

        def score(s: Any, item: Any, head: Any, query: Any, key: Any) -> Any:
            if how.softcap:
                s = how.softcap * torch.tanh(s / how.softcap)
            if how.bias is not None:
                at = item if "item" in own else 0, head if "head" in own else 0, query, key
                s = s + beside[0][at]
            return s

        changed = score if how.softcap or how.bias is not None else None
        out = attention(q, k, v, score_mod=changed, **options)
        if not how.sinks:
            return out
        out, lse = out  # a sink takes weight from what the keys have together
        return out * torch.sigmoid(lse - beside[-1][:, None])[..., None].to(out.dtype)

    return [Way(forward)]

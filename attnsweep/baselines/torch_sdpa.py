"""The baselines that PyTorch brings: each backend of SDPA, FlexAttention, and unfused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from attnsweep.baselines.backend import TORCH, Builder, Unavailable, Way
from attnsweep.core import boolean_masks
from attnsweep.core.problem import CAUSAL, DTYPE_BYTES, Packed, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

_MOST_OF_FLASH = 256  # the largest head_dim of PyTorch's flash attention, and of cuDNN's


def import_torch() -> Any:
    """Import PyTorch. Raises Unavailable, with how to install it, if it or its CUDA is missing."""
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"PyTorch is not installed: {TORCH.fix}") from error
    if not torch.cuda.is_available():
        raise Unavailable("this PyTorch sees no CUDA GPU")
    return torch


def hidden_keys(torch: Any, problem: Problem, device: str = "cuda") -> Any:
    """A boolean tensor of the pairs that no query sees: (seqlen_q, seqlen_k), or of each item.

    Of a padded or packed problem, or a boolean mask, it has four dimensions, as models pass it.
    """
    if problem.mask.as_tensor and problem.layout.kind == "dense":
        return ~torch.from_numpy(boolean_masks.tensor(problem)).to(device)
    low, high = problem.diagonals
    rows = torch.arange(problem.seqlen_q, device=device)[:, None]
    keys = torch.arange(problem.seqlen_k, device=device)
    after = keys - rows
    if packed := isinstance(problem.layout, Packed):
        first, end, beside = of_sequences(torch, problem, device)
        after = after - beside
    hidden = (after < low) | (after > high)
    if packed:
        return (hidden | (keys < first) | (keys >= end))[None, None]
    if problem.mask.of_item:
        hidden = hidden.expand(problem.batch, 1, *hidden.shape).contiguous()
    if problem.layout.kind != "padded":
        return hidden
    first, end = torch.tensor(problem.key_ranges, device=device).T[:, :, None, None, None]
    return hidden | (keys < first) | (keys >= end)


def of_sequences(torch: Any, problem: Problem, device: str) -> tuple[Any, ...]:
    """(seqlen_q, 1) each: what `keys_of_sequences` says of each query of packed sequences."""
    found = boolean_masks.keys_of_sequences(problem, np.arange(problem.seqlen_q))
    return tuple(torch.from_numpy(each).to(device) for each in found)


def rows_of_heads(*inputs: Any) -> tuple[Any, ...]:
    """Tensors (batch, heads, seqlen, head_dim) that lie as (batch, seqlen, heads, head_dim)."""
    return tuple(
        x.transpose(1, 2).contiguous().transpose(1, 2) if len(x.shape) == 4 else x for x in inputs
    )


def packed_inputs(*inputs: Any) -> tuple[Any, ...]:
    """(tokens, heads, head_dim), as functions for packed sequences take them."""
    return tuple(x[0].transpose(0, 1).contiguous() for x in inputs)


def packed_lengths(torch: Any, problem: Problem) -> tuple[Any, Any, int, int]:
    """cu_seqlens of queries and of keys as tensors, and the longest sequence of each."""
    ends = [
        [0, *(end for _, end in ranges)] for ranges in zip(*problem.sequence_ranges, strict=True)
    ]
    longest = [max(end - first for first, end in pairwise(each)) for each in ends]
    begins = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in ends]
    return begins[0], begins[1], longest[0], longest[1]


def _varlen(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    lengths, causal = packed_lengths(torch, problem), problem.mask.interval.right == 0
    sides = tuple(-1 if side is None else side for side in problem.mask.interval.sides)
    options: dict[str, Any] = {"window_size": sides}
    if "window_size" not in known:
        if problem.mask.interval.left is not None:
            raise Unavailable("this PyTorch's varlen_attn has no window")
        options = {"is_causal": causal}
    if "enable_gqa" in known:
        options["enable_gqa"] = problem.heads != problem.heads_kv
    if problem.scores.scale is not None:
        if "scale" not in known:
            raise Unavailable("this PyTorch's varlen_attn has no scale")
        options["scale"] = problem.scale

    def forward(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, *lengths, **options).transpose(0, 1)[None]

    return [Way(forward, packed_inputs)]


def sdpa(backend: str) -> Builder:
    """SDPA by one of its backends."""

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)
        attention = torch.nn.functional.scaled_dot_product_attention
        # PyTorch aligns is_causal top-left.
        is_causal = problem.layout.kind == "dense" and problem.mask == replace(
            CAUSAL, top_left=problem.seqlen_q != problem.seqlen_k
        )
        options: dict[str, Any] = {"is_causal": is_causal}
        options |= {} if problem.scores.scale is None else {"scale": problem.scale}
        if problem.heads != problem.heads_kv:
            options["enable_gqa"] = True
        masked = problem.kind not in ("full", "causal") and not is_causal
        if masked:
            if backend == "FLASH_ATTENTION":
                raise Unavailable("PyTorch's flash attention takes no mask but causal")
            options |= {"attn_mask": ~hidden_keys(torch, problem)}
        elif problem.causal and not is_causal:
            if backend == "CUDNN_ATTENTION":
                raise Unavailable("PyTorch reaches cuDNN only with a causal mask aligned top-left")
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
            options |= {"attn_mask": mask}

        def forward(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
            own = (
                options if bias is None else options | {"attn_mask": bias[..., : problem.seqlen_k]}
            )
            with sdpa_kernel([chosen]):
                return attention(q, k, v, **own)

        def repeated(q: Any, k: Any, v: Any) -> Any:
            group = problem.heads // problem.heads_kv
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            with sdpa_kernel([chosen]):
                return attention(q, k, v, **options | {"enable_gqa": False})

        ways = [Way(forward)]
        # As models call it, since it takes no grouped heads; without a mask others do these.
        others = not masked and problem.head_dim <= _MOST_OF_FLASH
        if "enable_gqa" in options and backend == "EFFICIENT_ATTENTION" and not others:
            ways.append(Way(repeated))
        return ways

    return build


def sdpa_gradients(backend: str) -> Builder:
    """PyTorch's own backward by one of its backends."""
    return partial(_gradients, backend)


def _gradients(backend: str, torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """PyTorch's own backward, as its autograd calls it, from a forward that is not timed.

    Its tensors are (batch, heads, seqlen, head_dim), or lie as (batch, seqlen, heads, head_dim).
    """
    masked = problem.kind not in ("full", "causal")
    if masked and problem.has_empty_rows:
        raise Unavailable("PyTorch's backward of a mask takes no query that sees no key")
    if problem.kind == "padded" and backend == "FLASH_ATTENTION":
        raise Unavailable("PyTorch's flash attention has no mask for padding")
    if masked and problem.mask.interval.top_left and backend == "FLASH_ATTENTION":
        raise Unavailable("PyTorch's flash attention aligns windows bottom-right")
    if problem.kind == "causal" and problem.seqlen_q != problem.seqlen_k:
        raise Unavailable("PyTorch's backward has a causal mask aligned top-left alone")
    if masked and backend == "EFFICIENT_ATTENTION":
        raise Unavailable(
            "PyTorch's memory-efficient backward with a mask ends in an illegal memory access: "
            "PyTorch 2.11 on an H100, three of four problems"
        )
    bias = _as_numbers(torch, problem) if masked and backend != "FLASH_ATTENTION" else None
    if backend == "EFFICIENT_ATTENTION":
        return _efficient_gradients(torch, problem)
    aten, scale = torch.ops.aten, problem.scale
    seed = torch.empty((), dtype=torch.int64, device="cuda")  # of no dropout
    rest = (problem.seqlen_q, problem.seqlen_k, 0.0, problem.kind == "causal")

    def by_cudnn(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> Any:
        given = (do, q, k, v, o, lse.unsqueeze(-1), seed, seed, bias, None, None, *rest)
        return aten._scaled_dot_product_cudnn_attention_backward.default(*given, scale=scale)

    def by_flash(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> Any:
        given = (do, q, k, v, o, lse, None, None, *rest, seed, seed)
        return aten._scaled_dot_product_flash_attention_backward.default(*given, scale=scale)

    def by_flash_in_window(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> Any:
        """The operator below SDPA, called directly since SDPA has no argument for windows."""
        left, right = (-1 if side is None else side for side in problem.mask.interval.sides)
        given = (*(x.transpose(1, 2) for x in (do, q, k, v, o)), lse, None, None, *rest, seed, seed)
        found = aten._flash_attention_backward.default(
            *given, scale=scale, window_size_left=left, window_size_right=right
        )
        return tuple(x.transpose(1, 2) for x in found)

    flash = by_flash_in_window if masked else by_flash
    backward = by_cudnn if backend == "CUDNN_ATTENTION" else flash
    return [Way(backward), Way(backward, rows_of_heads)]


def _as_numbers(torch: Any, problem: Problem) -> Any:
    """A mask as a boolean one reaches a backward: 0 and minus infinity, of q's dtype."""
    hidden = hidden_keys(torch, problem)
    hidden = hidden if hidden.dim() == 4 else hidden[None, None]
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _efficient_gradients(torch: Any, problem: Problem) -> list[Way]:
    """Gradients from k and v that are repeated for all query heads, as the forward takes them.

    Rows of a head's lse begin at multiples of 32.
    """
    pad, group = torch.nn.functional.pad, problem.heads // problem.heads_kv
    no_seed = torch.empty((), dtype=torch.int64, device="cuda")
    rest = (no_seed, no_seed, 0.0, [True, True, True, False], problem.kind == "causal")

    def as_taken(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> tuple[Any, ...]:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return q, k, v, o, pad(lse, (0, -problem.seqlen_q % 32), value=float("inf")), do

    def of_groups(x: Any) -> Any:
        return x if group == 1 else x.unflatten(1, (problem.heads_kv, group)).sum(dim=2)

    def backward(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> Any:
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            *(do, q, k, v, None, o, lse), *rest, scale=problem.scale
        )
        return dq, of_groups(dk), of_groups(dv)

    return [
        Way(backward, as_taken),
        Way(backward, lambda *inputs: rows_of_heads(*as_taken(*inputs))),
    ]


def _unfused(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    item = DTYPE_BYTES[problem.dtype]
    if scores * item * 4 > session.free_bytes:
        raise Unavailable(f"its scores need four times {scores * item / 2**30:.0f} GiB")
    mask = None if problem.kind == "full" else hidden_keys(torch, problem)
    group, how = problem.heads // problem.heads_kv, problem.scores

    def forward(q: Any, k: Any, v: Any, *beside: Any) -> Any:
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) * problem.scale
        if how.softcap:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        if how.bias is not None:
            scores = scores + beside[0][..., : problem.seqlen_k]
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        if how.sinks:  # as transformers' models have it
            sinks = beside[-1].to(scores.dtype)[None, :, None, None]
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        return torch.matmul(weights[..., : problem.seqlen_k], v)

    return [Way(forward)]


def flex_cannot(problem: Problem) -> str | None:
    """Why FlexAttention is not timed on a problem, or cannot do it."""
    if problem.kind == "full" and not problem.scores.kinds:
        return "is for masks and other scores, and this problem has none"
    return "needs a head_dim of 16 or more" if min(problem.head_dims) < 16 else None


def mask_of(torch: Any, problem: Problem, device: str = "cuda") -> Callable[..., Any]:
    """The problem's mask as FlexAttention asks for it: of batch, head, query and key."""
    if problem.mask.as_tensor and problem.layout.kind == "dense":
        dense = torch.from_numpy(boolean_masks.tensor(problem)).to(device)[:, 0]

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
    options |= {"return_lse": how.sinks, "scale": how.scale}

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

"""Fallbacks for cache calls that our kernel does not serve: FlashAttention-3, then PyTorch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch

from attnsweep.serve.paged_call import FP8, Arguments

_FLASH_3 = ("flash_attn_interface", "fa3_fwd_interface")


def by_others(call: Arguments) -> tuple[Any, Any]:
    """The answer of FlashAttention-3 if it is installed and takes the call, or of PyTorch."""
    if call.q.is_cuda and call.sinks is None and (flash := _flash_3()) is not None:
        options: dict[str, Any] = {"softmax_scale": call.scale, "softcap": call.softcap}
        options |= {"causal": call.sides[1] == 0, "window_size": call.sides}
        if call.k_scale is None:
            given = (call.q, call.k, call.v)
            how = {"cache_seqlens": call.lengths, "page_table": call.table}
            try:
                out, lse, *_ = flash(*given, **how, **options, return_softmax_lse=True)
            except (RuntimeError, TypeError, ValueError):  # what it does not take
                pass
            else:
                seen = torch.isfinite(lse)
                return out * seen.transpose(1, 2)[..., None].to(out.dtype), lse
    return by_gather(call)


@functools.cache
def _flash_3() -> Any:
    """FlashAttention-3's function, if it is installed."""
    for name in _FLASH_3:
        if importlib.util.find_spec(name) is not None:
            try:
                return importlib.import_module(name).flash_attn_with_kvcache
            except (ImportError, OSError, AttributeError):
                continue
    return None


def has_flash_3() -> bool:
    """Whether FlashAttention-3 is installed."""
    return _flash_3() is not None


def by_gather(call: Arguments) -> tuple[Any, Any]:
    """The output and log-sum-exps by PyTorch, in float32, on keys gathered from their pages."""
    q, table = call.q, call.table.long().clamp(0, call.k.shape[0] - 1)
    batch, rows, heads, head_dim = q.shape
    size, heads_kv = call.k.shape[1:3]
    keys = torch.arange(table.shape[1] * size, device=q.device)
    lengths = call.lengths.clamp(0, len(keys))[:, None, None]
    own = lengths - rows + torch.arange(rows, device=q.device)[:, None]
    seen = keys < lengths
    left, right = call.sides
    if right >= 0:
        seen = seen & (keys <= own + right)
    if left >= 0:
        seen = seen & (keys >= own - left)
    seen = seen.expand(batch, rows, len(keys))[:, None, None]
    there = (keys < lengths)[:, 0, :, None, None]

    def gathered(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        bits = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        dense = bits[table].flatten(1, 2)
        dense = (dense.view(cache.dtype) if cache.dtype == FP8 else dense).float()
        dense = torch.where(there, dense, 0.0)
        return dense if scale is None else dense * scale[:, None, :, None]

    grouped = q.float().view(batch, rows, heads_kv, heads // heads_kv, head_dim)
    scores = torch.einsum("brhgd,bkhd->bhgrk", grouped, gathered(call.k, call.k_scale))
    scores = scores * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.view(1, heads_kv, heads // heads_kv, 1, 1).expand(batch, -1, -1, rows, 1)
        lse = torch.logsumexp(torch.cat([scores, sinks], -1), -1)
    else:
        lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = torch.einsum("bhgrk,bkhd->brhgd", weights, gathered(call.v, call.v_scale))
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, heads, rows)

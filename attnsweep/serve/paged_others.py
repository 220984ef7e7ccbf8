"""Fallbacks for cache calls that our kernel does not serve: FlashAttention-3, then PyTorch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch

from attnsweep.baselines.flash import FLASH_3, has_wide_values
from attnsweep.serve.paged_call import FP8, Arguments
from attnsweep.serve.runtime.pytorch_calls import attend


def by_others(call: Arguments) -> tuple[Any, Any]:
    """The answer of FlashAttention-3 if it is installed and takes the call, or of PyTorch."""
    flash = _flash_3() if call.q.is_cuda and call.sinks is None else None
    if flash is not None and call.v.shape[-1] > call.q.shape[-1]:
        flash = flash if has_wide_values(flash.__module__) else None
    if flash is not None:
        options: dict[str, Any] = {"softmax_scale": call.scale, "softcap": call.softcap}
        options |= {"causal": call.sides[1] == 0, "window_size": call.sides}
        if call.k_scale is None:
            given = (call.q, call.k, call.v)
            how = {"cache_seqlens": call.lengths, "page_table": call.table}
            if call.qv is not None:
                how["qv"] = call.qv
            if call.begins is not None:
                how |= {"cu_seqlens_q": call.begins, "max_seqlen_q": call.most_rows}
            try:
                out, lse, *_ = flash(*given, **how, **options, return_softmax_lse=True)
            except (RuntimeError, TypeError, ValueError):  # what it does not take
                pass
            else:
                none = ~torch.isfinite(lse)
                out = out.masked_fill(none.transpose(-1, -2)[..., None], 0.0)
                return out, lse.masked_fill(none, -math.inf)
    plain = not (call.lse or call.softcap) and call.sinks is call.qv is None
    by_pytorch = _by_attention if plain else by_gather
    return by_pytorch(call) if call.begins is None else _unpacked(call, by_pytorch)


@functools.cache
def _flash_3() -> Any:
    """FlashAttention-3's function, if it is installed."""
    for name in FLASH_3:
        if importlib.util.find_spec(name) is not None:
            try:
                return importlib.import_module(name).flash_attn_with_kvcache
            except (ImportError, OSError, AttributeError):
                continue
    return None


def has_flash_3() -> bool:
    """Whether FlashAttention-3 is installed."""
    return _flash_3() is not None


def _unpacked(call: Arguments, by: Any) -> tuple[Any, Any]:
    """The answer to a packed call: each request's tokens are the last rows of a padded one."""
    assert call.begins is not None
    tokens, rows = len(call.q), call.most_rows
    begins = call.begins.long().clamp(0, tokens)
    counts = begins.diff()
    of_rows = begins[1:, None] - rows + torch.arange(rows, device=call.q.device)
    if not (tokens and rows and len(counts)):
        return call.q.new_zeros(call.of_out), call.q.new_full(call.of_lse, -math.inf).float()
    of_rows = of_rows.clamp(0, tokens - 1)
    qv = None if call.qv is None else call.qv[of_rows]
    out, lse = by(call._replace(q=call.q[of_rows], begins=None, qv=qv))
    at = torch.arange(tokens, device=call.q.device)
    request = torch.searchsorted(begins[1:].contiguous(), at, right=True).clamp(max=len(counts) - 1)
    row = (at - begins[request + 1] + rows).clamp(0, rows - 1)
    return out[request, row], None if lse is None else lse[request, :, row].T.contiguous()


def _seen(call: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Boolean masks over gathered keys: visible to each query (batch, rows, keys), and existing."""
    rows, device = call.q.shape[1], call.q.device
    keys = torch.arange(call.table.shape[1] * call.k.shape[1], device=device)
    lengths = call.lengths.clamp(0, len(keys))[:, None, None]
    own = lengths - rows + torch.arange(rows, device=device)[:, None]
    there = keys < lengths
    seen, (left, right) = there, call.sides
    if right >= 0:
        seen = seen & (keys <= own + right)
    if left >= 0:
        seen = seen & (keys >= own - left)
    return seen.expand(len(lengths), rows, len(keys)), there[:, 0, :, None, None]


def _gathered(
    call: Arguments, cache: torch.Tensor, scale: torch.Tensor | None, there: torch.Tensor
) -> torch.Tensor:
    """k or v, (batch, keys, heads_kv, head_dim), 0 where there is no key; FP8 in float32."""
    table = call.table.long().clamp(0, cache.shape[0] - 1)
    bits = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    dense = bits[table].flatten(1, 2)
    if cache.dtype == FP8:
        dense = dense.view(cache.dtype).float()
    dense = dense.masked_fill(~there, 0.0)
    return dense if scale is None else dense * scale[:, None, :, None]


def _by_attention(call: Arguments) -> tuple[Any, None]:
    """The output alone, by PyTorch's attention."""
    seen, there = _seen(call)
    both = ((call.k, call.k_scale), (call.v, call.v_scale))
    keys, values = (_gathered(call, *each, there).to(call.q.dtype).transpose(1, 2) for each in both)
    how: Any = {"scale": call.scale, "enable_gqa": True, "fill": True}
    out = attend(call.q.transpose(1, 2), keys, values, seen[:, None], **how)
    return out.transpose(1, 2).contiguous(), None


def by_gather(call: Arguments) -> tuple[Any, Any]:
    """The output and log-sum-exps by PyTorch, in float32, on keys gathered from their pages."""
    q = call.q
    batch, rows, heads, _ = q.shape
    heads_kv = call.k.shape[2]
    seen, there = _seen(call)
    seen = seen[:, None, None]
    keys = _gathered(call, call.k, call.k_scale, there).float()
    values = _gathered(call, call.v, call.v_scale, there).float()

    def products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        grouped = queries.float().unflatten(2, (heads_kv, heads // heads_kv))
        return torch.einsum("brhgd,bkhd->bhgrk", grouped, keys)

    scores = products(q, keys)
    if call.qv is not None:
        scores = scores + products(call.qv, values)
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
    out = torch.einsum("bhgrk,bkhd->brhgd", weights, values)
    return out.reshape(call.of_out).to(q.dtype), lse.reshape(batch, heads, rows)

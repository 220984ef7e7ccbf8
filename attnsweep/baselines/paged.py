"""The baselines of a paged cache: FlashAttention-3, and PyTorch on the same keys in a row.

Before any call is timed, they get a cache and a table of their own, in which what no request has is
0: an engine's holds no NaN, and no call need withstand it.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Builder, Unavailable, Way
from attnsweep.baselines.flash import FLASH_3, installed, loaded, window
from attnsweep.core.layouts import Paged
from attnsweep.core.problem import FULL, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

_E4M3_MAX = 448.0


def flash_3(*, ready: bool = False, fp8: bool = False) -> Builder:
    """FlashAttention-3's decode. ready: its scheduler's metadata are made before any call.

    fp8: the cache is FP8, and so are its queries then, with a scale of each head of keys.
    """

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        layout = _layout(problem)
        module = installed("flash_attn_3", FLASH_3)[0]
        if (layout.cache_dtype is not None) != fp8:
            what = "its queries are FP8 if the cache is" if not fp8 else "the cache is not FP8"
            raise Unavailable(f"FlashAttention-3: {what}")
        attention = functools.cache(lambda: loaded(module).flash_attn_with_kvcache)
        table, lengths = _table(torch, problem)
        options: dict[str, Any] = {"causal": problem.mask.interval.right == 0, **window(problem)}
        if problem.scores.softcap:
            options["softcap"] = float(problem.scores.softcap)
        if ready:
            options["scheduler_metadata"] = importlib.import_module(module).get_scheduler_metadata(
                *(problem.batch, problem.seqlen_q, problem.seqlen_k),
                *(problem.heads, problem.heads_kv, problem.head_dim, lengths),
                qkv_dtype=torch.float8_e4m3fn if fp8 else _type(torch, problem),
                page_size=layout.page_size,
                causal=options["causal"],
                has_softcap="softcap" in options,
                **window(problem),
            )

        def convert(*inputs: Any) -> tuple[Any, ...]:
            q, k, v, *scales = inputs
            pages = [_slots(torch, x, layout) for x in (k, v)]
            q = q.transpose(1, 2).contiguous()
            if not fp8:
                return (q, *pages)
            batch, _, heads, _ = q.shape
            largest = q.abs().float().amax(dim=(1, 3)).view(batch, problem.heads_kv, -1)
            descale = (largest.amax(dim=2) / _E4M3_MAX).clamp(min=1e-12)
            each = descale.repeat_interleave(heads // problem.heads_kv, dim=1)
            stored = (q.float() / each[:, None, :, None]).to(torch.float8_e4m3fn)
            return (stored, *pages, descale.contiguous(), *scales)

        def forward(q: Any, k: Any, v: Any, *scales: Any) -> Any:
            how = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=False))
            out = attention()(q, k, v, cache_seqlens=lengths, page_table=table, **options, **how)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return [Way(forward, convert)]

    return build


def dense(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """PyTorch's attention on the same keys in a row, of requests as long as each other.

    A cache in FP8 is bf16 there: PyTorch reads no other.
    """
    if len({*_layout(problem).of_items(problem.batch, problem.seqlen_k)}) > 1:
        raise Unavailable("PyTorch has no lengths of a cache: these differ")
    if problem.mask != FULL and problem.seqlen_q > 1:
        raise Unavailable("PyTorch has no mask aligned bottom-right in its split-key kernels")
    attention = torch.nn.functional.scaled_dot_product_attention
    group = problem.heads // problem.heads_kv

    def convert(*inputs: Any) -> tuple[Any, ...]:
        return (inputs[0], *_in_a_row(torch, problem, *inputs[1:]))

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, enable_gqa=group > 1)

    def grouped(q: Any, k: Any, v: Any) -> Any:  # the queries of a key head are its rows
        return attention(q.reshape(problem.batch, problem.heads_kv, -1, q.shape[3]), k, v).reshape(
            q.shape
        )

    ways = [Way(forward, convert)]
    return [Way(grouped, convert), *ways] if group > 1 else ways


def gathered(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """PyTorch's attention on keys that the call gathers from their pages: what a program can do."""
    layout = _layout(problem)
    table, lengths = _table(torch, problem)
    table = table.long()
    attention = torch.nn.functional.scaled_dot_product_attention
    keys = torch.arange(table.shape[1] * layout.page_size, device="cuda")
    rows = torch.arange(problem.seqlen_q, device="cuda")
    own = lengths[:, None, None, None] - problem.seqlen_q + rows[:, None]
    left, right = problem.mask.interval.sides
    seen = keys < lengths[:, None, None, None]
    if right is not None:
        seen = seen & (keys <= own + right)
    if left is not None:
        seen = seen & (keys >= own - left)
    seen = seen.expand(problem.batch, 1, problem.seqlen_q, len(keys)).contiguous()

    def convert(q: Any, k: Any, v: Any, *scales: Any) -> tuple[Any, ...]:
        return (q, *(_slots(torch, x, layout) for x in (k, v)), *scales)

    def forward(q: Any, k: Any, v: Any, *scales: Any) -> Any:
        rows = []
        for at, pages in enumerate((k, v)):
            x = pages[table].flatten(1, 2).transpose(1, 2)
            if scales:
                x = x.to(q.dtype) * scales[at][:, :, None, None].to(q.dtype)
            rows.append(x)
        return attention(q, *rows, attn_mask=seen, enable_gqa=q.shape[1] != rows[0].shape[1])

    return [Way(forward, convert)]


def _layout(problem: Problem) -> Paged:
    assert isinstance(problem.layout, Paged)
    return problem.layout


def _type(torch: Any, problem: Problem) -> Any:
    return torch.float16 if problem.dtype == "fp16" else torch.bfloat16


def _table(torch: Any, problem: Problem) -> tuple[Any, Any]:
    """block_table without what is no page, and the lengths."""
    values = problem.layout.values(problem.batch, problem.seqlen_q, problem.seqlen_k)
    table, lengths = (
        torch.tensor(values[name], dtype=torch.int32, device="cuda")
        for name in ("block_table", "seqused_k")
    )
    pages = problem.shape_of("k")[0]
    return torch.where((table >= 0) & (table < pages), table, 0), lengths


def _slots(torch: Any, pages: Any, layout: Paged) -> Any:
    """(pages, page_size, heads_kv, head_dim), in the layout's order in memory, without NaN."""
    made = _without_nan(torch, pages)
    return made if layout.order == "nhd" else made.transpose(1, 2)


def _without_nan(torch: Any, x: Any) -> Any:
    if x.dtype != torch.float8_e4m3fn:
        return torch.nan_to_num(x)
    bits = x.view(torch.uint8)
    return torch.where(bits & 0x7F == 0x7F, 0, bits).to(torch.uint8).view(x.dtype)


def _in_a_row(torch: Any, problem: Problem, *pages: Any) -> list[Any]:
    """k and v as (batch, heads_kv, seqlen_k, head_dim) of q's dtype."""
    table, _ = _table(torch, problem)
    layout, scales = _layout(problem), pages[2:]
    made = []
    for at, x in enumerate(pages[:2]):
        rows = _slots(torch, x, layout)[table.long()].flatten(1, 2)[:, : problem.seqlen_k]
        rows = rows.transpose(1, 2)
        if scales:
            rows = rows.float() * scales[at][:, :, None, None]
        made.append(rows.to(_type(torch, problem)).contiguous())
    return made

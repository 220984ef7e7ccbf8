"""The baselines of a paged cache: FlashAttention-3, FlashMLA, and PyTorch on keys in a row.

`plain_read` is no rival but a bound: a kernel that reads the same keys and values, and no more.

Before any call is timed, they get a cache and a table of their own, in which what no request has is
0: an engine's holds no NaN, and no call need withstand it.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnsweep.baselines.backend import Builder, Unavailable, Way
from attnsweep.baselines.flash import FLASH_3, changes, has_wide_values, installed, loaded, window
from attnsweep.baselines.fp8 import quantised
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import arch_named
from attnsweep.core.layouts import Paged
from attnsweep.core.problem import DTYPE_BYTES, FULL, Problem
from attnsweep.core.user_code import type_of

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


def flash_3(*, ready: bool = False, fp8: bool = False) -> Builder:
    """FlashAttention-3's decode. ready: its scheduler's metadata are made before any call.

    fp8: the cache is FP8, and so are its queries then, with a scale of each head of keys.
    """

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        layout = layout_of(problem)
        module = installed("flash_attn_3", FLASH_3)[0]
        if (layout.cache_dtype is not None) != fp8:
            what = "its queries are FP8 if the cache is" if not fp8 else "the cache is not FP8"
            raise Unavailable(f"FlashAttention-3: {what}")
        if problem.value_in_key and not has_wide_values(module):
            what = "the installed build has no head_dim 64 beside values of 512, and so reads no qv"
            raise Unavailable(f"FlashAttention-3: {what}: build its hopper/ directory with it")
        attention = functools.cache(lambda: loaded(module).flash_attn_with_kvcache)
        table, lengths = table_of(torch, problem)
        options: dict[str, Any] = {"causal": problem.mask.interval.right == 0, **window(problem)}
        options |= changes(problem)
        of_v, in_key = problem.value_dim, problem.value_in_key
        columns = problem.head_dim - of_v if in_key else problem.head_dim
        if in_key:
            options["softmax_scale"] = problem.scale
        if ready:
            options["scheduler_metadata"] = importlib.import_module(module).get_scheduler_metadata(
                *(problem.batch, problem.seqlen_q, problem.seqlen_k),
                *(problem.heads, problem.heads_kv, columns, lengths),
                **({"headdim_v": of_v} if in_key else {}),
                qkv_dtype=torch.float8_e4m3fn if fp8 else type_of(torch, problem.out_dtype),
                page_size=layout.page_size,
                causal=options["causal"],
                has_softcap="softcap" in options,
                **window(problem),
            )

        def convert(*inputs: Any) -> tuple[Any, ...]:
            q, *pages = inputs
            pages, scales = [slots_of(torch, x, layout) for x in pages[:2]], pages[2:]
            q = q.transpose(1, 2).contiguous()
            if in_key:  # the queries of the values, and of the other columns, are apart
                (keys,) = pages
                parts = q[..., of_v:].contiguous(), q[..., :of_v].contiguous()
                return (parts[0], keys[..., of_v:], keys[..., :of_v], parts[1])
            if not fp8:
                return (q, *pages)
            stored, descale = quantised(torch, q, problem.heads_kv)
            return (stored, *pages, descale, *scales)

        def forward(q: Any, k: Any, v: Any, *more: Any) -> Any:
            names = ("qv",) if in_key else ("q_descale", "k_descale", "v_descale")
            how = dict(zip(names, more, strict=False))
            out = attention()(q, k, v, cache_seqlens=lengths, page_table=table, **options, **how)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return [Way(forward, convert)]

    return build


def flash_mla(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """FlashMLA's decode, whose first call makes the plan of all."""
    (module,) = installed("flash_mla", ("flash_mla",))
    package = functools.cache(lambda: importlib.import_module(module))
    plan = functools.cache(lambda: package().get_mla_metadata()[0])
    table, lengths = table_of(torch, problem)
    if (size := layout_of(problem).page_size) != 64:
        raise Unavailable(f"FlashMLA has pages of 64 keys, not {size}")
    how = {"softmax_scale": problem.scale, "causal": problem.mask.interval.right == 0}

    def convert(q: Any, k: Any) -> tuple[Any, ...]:
        return q.transpose(1, 2).contiguous(), slots_of(torch, k, layout_of(problem))

    def forward(q: Any, k: Any) -> Any:
        given = (q, k, table, lengths, problem.value_dim, plan())
        out, _ = package().flash_mla_with_kvcache(*given, **how, use_legacy=True)
        return out.transpose(1, 2)

    return [Way(forward, convert)]


def dense(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """PyTorch's attention on the same keys in a row, of requests as long as each other.

    A cache in FP8 is bf16 there: PyTorch reads no other.
    """
    if len({*layout_of(problem).of_items(problem.batch, problem.seqlen_k)}) > 1:
        raise Unavailable("PyTorch has no lengths of a cache: these differ")
    if problem.mask != FULL and problem.seqlen_q > 1:
        raise Unavailable("PyTorch has no mask aligned bottom-right in its split-key kernels")
    attention = torch.nn.functional.scaled_dot_product_attention
    group, scale = problem.heads // problem.heads_kv, problem.scores.scale

    def convert(*inputs: Any) -> tuple[Any, ...]:
        return (inputs[0], *_in_a_row(torch, problem, *inputs[1:]))

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, scale=scale, enable_gqa=group > 1)

    def grouped(q: Any, k: Any, v: Any) -> Any:  # the queries of a key head are its rows
        rows = q.reshape(problem.batch, problem.heads_kv, -1, q.shape[3])
        return attention(rows, k, v, scale=scale).reshape(*q.shape[:3], -1)

    ways = [Way(forward, convert)]
    if problem.value_in_key:
        return [Way(grouped, convert)]
    return [Way(grouped, convert), *ways] if group > 1 else ways


def gathered(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """PyTorch's attention on keys that the call gathers from their pages: what a program can do."""
    layout = layout_of(problem)
    table, lengths = table_of(torch, problem)
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
    of_heads = seen.repeat(1, 1, problem.heads if problem.value_in_key else 1, 1)

    def convert(q: Any, *pages: Any) -> tuple[Any, ...]:
        return (q, *(slots_of(torch, x, layout) for x in pages[:2]), *pages[2:])

    def latent(q: Any, k: Any) -> Any:  # the queries of all heads are the rows of one
        k = k[table].flatten(1, 2).transpose(1, 2)
        rows, v = q.reshape(problem.batch, 1, -1, q.shape[3]), k[..., : problem.value_dim]
        made = attention(rows, k, v, attn_mask=of_heads, scale=problem.scale)
        return made.reshape(*q.shape[:3], -1)

    def forward(q: Any, k: Any, v: Any, *scales: Any) -> Any:
        rows = []
        for at, pages in enumerate((k, v)):
            x = pages[table].flatten(1, 2).transpose(1, 2)
            if scales:
                x = x.to(q.dtype) * scales[at][:, :, None, None].to(q.dtype)
            rows.append(x)
        grouped = q.shape[1] != rows[0].shape[1]
        scale = problem.scores.scale
        return attention(q, *rows, attn_mask=seen, scale=scale, enable_gqa=grouped)

    return [Way(latent if problem.value_in_key else forward, convert)]


def plain_read(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """A kernel that reads the keys and values that there are, through the table: its output is 0.

    Nothing is converted: what unused slots hold is not read.
    """
    used, defines = pages_read(problem)
    with Compiler(arch_named(session.gpu.arch), threads=1) as compiler:
        cubin = compiler.compile(Path(__file__).with_name("plain_read.cu"), defines)
    function = session.kernel(str(cubin.path), "plain_read")
    listed = torch.from_numpy(used).cuda()
    (output,) = problem.outputs
    zeros = torch.zeros(
        problem.shape_of(output), dtype=type_of(torch, problem.out_dtype), device="cuda"
    )
    grid = (2 * session.gpu.sm_count, 1, 1)

    def forward(_: Any, k: Any, v: Any, *more: Any) -> Any:
        at = (np.uint64(x.data_ptr()) for x in (k, v, listed))
        args = (*at, np.uint32(len(used)), np.uint64(zeros.data_ptr()))
        with session.stream:
            function(grid, (512, 1, 1), args)
        return zeros

    return [Way(forward)]


def pages_read(problem: Problem) -> tuple[np.ndarray[Any, Any], dict[str, str]]:
    """Each request's pages with their used slots, int32 (pages, 2); and what plain_read.cu needs.

    Raises Unavailable where the kernel cannot make these loads, or count them.
    """
    layout = layout_of(problem)
    size = layout.page_size
    values = layout.values(problem.batch, problem.seqlen_q, problem.seqlen_k)
    table, lengths = (np.asarray(values[name]) for name in ("block_table", "seqused_k"))
    slots = np.clip(lengths[:, None] - size * np.arange(table.shape[1]), 0, size)
    used = np.stack([table[slots > 0], slots[slots > 0]], 1).astype(np.int32)
    of_row, rest = divmod(problem.head_dim * DTYPE_BYTES[problem.tensor("k").dtype], 16)
    if rest:
        raise Unavailable(f"it loads 16 bytes, and rows of {problem.head_dim} columns are no such")
    of_page = of_row * problem.heads_kv * size
    if len(used) * of_page >= 2**31:
        raise Unavailable("it counts up to 2^31 loads of 16 bytes")
    of_slot = of_row if layout.order == "hnd" else of_row * problem.heads_kv
    numbers = {"PAGE": f"{of_page}u", "SLOT": f"{of_slot}u", "PAGE_SIZE": str(size)}
    return used, numbers


def layout_of(problem: Problem) -> Paged:
    """The problem's layout, which is paged."""
    assert isinstance(problem.layout, Paged)
    return problem.layout


def table_of(torch: Any, problem: Problem) -> tuple[Any, Any]:
    """block_table without what is no page, and the lengths."""
    values = problem.layout.values(problem.batch, problem.seqlen_q, problem.seqlen_k)
    table, lengths = (
        torch.tensor(values[name], dtype=torch.int32, device="cuda")
        for name in ("block_table", "seqused_k")
    )
    pages = problem.shape_of("k")[0]
    return torch.where((table >= 0) & (table < pages), table, 0), lengths


def slots_of(torch: Any, pages: Any, layout: Paged) -> Any:
    """(pages, page_size, heads_kv, head_dim), in the layout's order in memory, without NaN."""
    made = _without_nan(torch, pages)
    return made if layout.order == "nhd" else made.transpose(1, 2)


def _without_nan(torch: Any, x: Any) -> Any:
    if x.dtype != torch.float8_e4m3fn:
        return torch.nan_to_num(x)
    bits = x.view(torch.uint8)
    return torch.where(bits & 0x7F == 0x7F, 0, bits).to(torch.uint8).view(x.dtype)


def _in_a_row(torch: Any, problem: Problem, *pages: Any) -> list[Any]:
    """k and v as (batch, heads_kv, seqlen_k, head_dim) of q's dtype; v may be a part of k."""
    table, _ = table_of(torch, problem)
    layout, scales = layout_of(problem), pages[2:]
    made = []
    for at, x in enumerate(pages[:2]):
        rows = slots_of(torch, x, layout)[table.long()].flatten(1, 2)[:, : problem.seqlen_k]
        rows = rows.transpose(1, 2)
        if scales:
            rows = rows.float() * scales[at][:, :, None, None]
        made.append(rows.to(type_of(torch, problem.out_dtype)).contiguous())
    return [*made, made[0][..., : problem.value_dim]] if problem.value_in_key else made

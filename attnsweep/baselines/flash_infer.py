"""FlashInfer's decoding from a paged cache: its own kernels, and XQA, which it brings.

Both are compiled, for minutes and by nvcc and ninja, at their first call with a dtype, a head_dim
and a page size; FlashInfer keeps the result. They take one scale for a whole E4M3 cache. So the
scales of each request and head are multiplied into the queries and the output, which is not timed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Unavailable, Way
from attnsweep.baselines.flash import installed
from attnsweep.baselines.paged import layout_of, slots_of, table_of
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.core.user_code import type_of

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession

_WORKSPACE = 256 << 20  # bytes, as its own tests have
_XQA_PAGES = (16, 32, 64, 128)


def decode(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """BatchDecodeWithPagedKVCacheWrapper, planned before any call, with tensor cores and without.

    Raises Unavailable.
    """
    package = _package(problem)
    size, own_type = layout_of(problem).page_size, type_of(torch, problem.out_dtype)
    table, lengths = (x.tolist() for x in table_of(torch, problem))
    pages = [row[: ceil_div(length, size)] for row, length in zip(table, lengths, strict=True)]
    first = [*itertools.accumulate(map(len, pages), initial=0)]
    last = [(length - 1) % size + 1 if length else 0 for length in lengths]
    ints = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")

    def way(cores: bool) -> Way:
        space = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
        call = package.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=cores)
        call.plan(
            *(ints(first), ints([*itertools.chain(*pages)]), ints(last)),
            *(problem.heads, problem.heads_kv, problem.head_dim, size),
            q_data_type=own_type,
            kv_data_type=torch.float8_e4m3fn if problem.scales else own_type,
            sm_scale=problem.scale,
            logits_soft_cap=float(problem.scores.softcap or 0) or None,
        )

        def forward(q: Any, k: Any, v: Any, *_: Any) -> Any:
            return call.run(q[:, 0], (k, v))[:, :, None]

        return _way(torch, problem, forward)

    return [way(cores=True), way(cores=False)]


def xqa(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """XQA, into an output of each call, as others have. Raises Unavailable."""
    package, size = _package(problem), layout_of(problem).page_size
    if size not in _XQA_PAGES:
        raise Unavailable(f"XQA has pages of 16, 32, 64 or 128 keys, not {size}")
    table, lengths = table_of(torch, problem)
    zeros = functools.partial(torch.zeros, device="cuda")
    space = zeros(_WORKSPACE, dtype=torch.uint8)
    counts = zeros(4 * problem.batch * problem.heads_kv + 64, dtype=torch.int32)
    shape = (problem.batch, 1, problem.heads, problem.head_dim)
    made = functools.partial(torch.empty, shape, dtype=type_of(torch, problem.out_dtype))
    where, again = (table, lengths.view(torch.uint32)[:, None]), (space, counts.view(torch.uint32))
    by = problem.scale * problem.head_dim**0.5  # it divides by the root itself

    def forward(q: Any, k: Any, v: Any, *_: Any) -> Any:
        out = made(device=q.device)
        package.xqa(q, k, v, *where, out, *again, problem.heads_kv, size, q_scale=by)
        return out.transpose(1, 2)

    return [_way(torch, problem, forward)]


def cannot(problem: Problem) -> str | None:
    """Why neither can compute a problem; None if they can."""
    return None if problem.seqlen_q == 1 else "decodes one query of a request"


def _package(problem: Problem) -> Any:
    (module,) = installed("flashinfer", ("flashinfer",))
    return importlib.import_module(module)


def _way(torch: Any, problem: Problem, forward: Any) -> Way:
    """The way to call it on q as (batch, 1, heads, head_dim), and on pages with slots first."""
    layout, group = layout_of(problem), problem.heads // problem.heads_kv

    def spread(scale: Any) -> Any:  # of each head of keys to those of queries
        return scale.repeat_interleave(group, dim=1)[:, None, :, None]

    def convert(q: Any, k: Any, v: Any, *scales: Any) -> tuple[Any, ...]:
        q = q.transpose(1, 2).contiguous()
        if scales:
            q = (q.float() * spread(scales[0])).to(q.dtype)
        return (q, *(slots_of(torch, x, layout) for x in (k, v)), *scales)

    def finish(out: Any, *given: Any) -> Any:
        return (out.float() * spread(given[-1]).transpose(1, 2)).to(out.dtype)

    return Way(forward, convert, finish=finish if problem.scales else None)

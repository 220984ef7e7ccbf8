"""Attention over a cache: FlashAttention-3's `flash_attn_with_kvcache`, by swept kernels.

The kernels serve paged caches, and dense ones of whole pages: see paged_plans for which. They are
compiled when a kind of call is first met, and lie in the cache of cubins then. Lengths and tables
stay on the device, so that a call waits for nothing and may be in a CUDA graph whose lengths
change. What no kernel of ours serves is answered by FlashAttention-3 if it is installed and can,
and else by PyTorch behind a gather.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from attnsweep.core.scores import Scores
from attnsweep.family.family import Config
from attnsweep.serve import mla
from attnsweep.serve.known_calls import KnownCalls
from attnsweep.serve.paged_call import (
    DTYPES,
    PAGE_OF_DENSE,
    STORED,
    UNMASKED,
    Arguments,
    check_output,
    check_values,
    check_whole,
    extent,
    sides_of,
    understood,
)
from attnsweep.serve.paged_launch import arch_of, maker, name_of
from attnsweep.serve.paged_others import by_others
from attnsweep.serve.paged_plans import (
    DECODE,
    NAMES,
    Plan,
    chosen,
    config_of,
    interval_of,
    plan_of,
    problem_of_sizes,
    schedule_of,
)
from attnsweep.serve.paged_store import with_new_keys
from attnsweep.serve.runtime.dispatch import Explanation
from attnsweep.serve.runtime.launcher import current_device, is_capturing, raw_stream

is_compiling = torch.compiler.is_compiling

counters: Counter[str] = Counter()
"""Calls by what served them: `kernel`, or why another did."""


class Known(NamedTuple):
    """The plan for a kind of call that a kernel serves, with facts that its tensors lack."""

    plan: Plan
    device: int
    table: torch.Tensor | None
    empty_lse: Callable[[], torch.Tensor] | None
    empty: Callable[[], torch.Tensor]  # an output
    extents: tuple[int, int, int, int]  # bytes of q, of both caches, and of an output


known_calls: KnownCalls[Known] = KnownCalls()


class ScheduleMetadata(NamedTuple):
    """The runs of blocks over the lengths of a step, made once for calls that are alike in them.

    of: the device, requests, queries, heads, key heads, and keys before a query's own of the calls.
    """

    runs: torch.Tensor
    config: str
    of: tuple[int, ...]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNMASKED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> Any:
    """Attention of a few queries with a cache of keys, with the arguments of FlashAttention-3.

    q: (batch, seqlen_q, heads, head_dim), fp16 or bf16. k_cache, v_cache: (pages, page_size,
    heads_kv, head_dim) with page_table int32 (batch, blocks), or (batch, seqlen_k, heads_kv,
    head_dim) without; of q's dtype or float8_e4m3fn, whose k_descale and v_descale are float32
    (batch, heads_kv). Strides may be any with contiguous head_dim, so that a page may have heads
    before slots. cache_seqlens: int32 (batch,), the keys of each request, the new ones counted;
    they stay on the device. block_table: another name of page_table. sinks: (heads,), one more
    score of each head. out: where the output goes, so that the call allocates none. validate: wait
    for the device, and raise ValueError for lengths, tables and scales that cannot be; without,
    such a call has some output and reads nothing outside the cache.

    Query i of a request with n keys sees key j if j <= n - seqlen_q + i, where it is causal. A
    query that sees no key has output 0. Returns the output, (batch, seqlen_q, heads, head_dim), or
    (output, lse) with lse (batch, heads, seqlen_q). Raises NotImplementedError for what
    FlashAttention-3 does beside: rotary embeddings, FP8 queries, chunks, and k and v beside qv.

    qv: (batch, seqlen_q, heads, head_dim_v), where there is one key head and v_cache has head_dim_v
    columns. The rows of v_cache are then keys too: scores are softmax_scale * (q k + qv v), and the
    default scale is that of both head_dims together. With qv, scheduler_metadata is what mla_plan
    returned.
    """
    table = page_table if block_table is None else block_table
    given = (q, k_cache, v_cache, table, cache_seqlens, k_descale, v_descale, sinks, out)
    numbers: tuple[Any, ...] | None = None
    in_parts = None
    if scheduler_metadata is not None and qv is None:
        kind = type(scheduler_metadata)
        if kind is not ScheduleMetadata:
            what = "scheduler_metadata is what get_scheduler_metadata of attnsweep returned"
            raise TypeError(f"{what}, not {kind.__name__}")
    if (
        k is v is rotary_cos is rotary_sin is rotary_seqlens is q_descale is cache_batch_idx is None
        and cache_leftpad is cu_seqlens_q is cu_seqlens_k_new is None
        and not (max_seqlen_q or attention_chunk or sm_margin or validate or is_compiling())
        and (page_table is None or block_table is None)
    ):
        numbers = (softmax_scale, causal, window_size, softcap, return_softmax_lse)
        if qv is None:
            answer = again(numbers, given, scheduler_metadata)
            if answer is not None:
                return answer
        elif k_descale is v_descale is sinks is out is None:
            in_parts = (q, k_cache, v_cache, qv, table, cache_seqlens)
            answer = mla.again(numbers, in_parts, scheduler_metadata)
            if answer is not None:
                counters["kernel"] += 1
                return answer if return_softmax_lse else answer[0]
    refuse(
        "flash_attn_with_kvcache",
        {
            "rotary_cos: rotate q and k before the call": rotary_cos is not None
            or rotary_sin is not None
            or rotary_seqlens is not None,
            "k and v beside qv: store them before the call": qv is not None
            and (k is not None or v is not None),
            "cache_batch_idx: index the table or the cache": cache_batch_idx is not None,
            "cache_leftpad": cache_leftpad is not None,
            "cu_seqlens_k_new": k is not None and cu_seqlens_k_new is not None,
            "q_descale: queries are fp16 or bf16": q_descale is not None,
            "attention_chunk": bool(attention_chunk),
            "sm_margin": bool(sm_margin),
        },
    )
    if cu_seqlens_q is None and max_seqlen_q is not None and max_seqlen_q < q.shape[1]:
        raise ValueError(f"max_seqlen_q is {max_seqlen_q}, and q has {q.shape[1]} rows")
    if block_table is not None and page_table is not None:
        raise TypeError("page_table and block_table are two names of one table: give one")
    how = (k_descale, v_descale, sinks, softmax_scale, softcap, causal, window_size)
    packed = (cu_seqlens_q, None if cu_seqlens_q is None else max_seqlen_q)
    own = (q, k_cache, v_cache, cache_seqlens, table, *how, return_softmax_lse)
    call = understood(*own, *packed, qv)
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise TypeError("k and v are appended behind cache_seqlens: give those too")
        call = with_new_keys(call, k, v)
    check_output(call, out)
    if validate:
        check_values(call)
    made, lse = answered(call, scheduler_metadata, out)
    if numbers is not None and in_parts is not None:
        mla.remember(numbers, in_parts, call, scheduler_metadata)
    elif numbers is not None and qv is None:
        remember(numbers, call, given, scheduler_metadata)
    return (made, lse) if return_softmax_lse else made


def answered(
    call: Arguments, metadata: Any = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """The output of a call, in `out` if that is given, and its log-sum-exps if it wants them.

    metadata: a ScheduleMetadata, or with qv an MlaPlan.
    """
    even = even_of(call)
    own = even or call
    to = out.view(own.of_out) if out is not None and out.is_contiguous() else None
    made, lse = _compiled(*own) if is_compiling() else _answer(own, metadata, to)
    if even is not None:
        made, lse = made.flatten(0, 1), lse.transpose(0, 1).flatten(1) if call.lse else None
    if out is None:
        return made, lse
    if is_compiling() or made.data_ptr() != out.data_ptr():
        out.copy_(made)
    return out, lse


def even_of(call: Arguments) -> Arguments | None:
    """A packed call as one that is not, if the host knows that requests have as many tokens."""
    rows, tokens = call.most_rows, len(call.q)
    if call.begins is None or not tokens or tokens != call.batch * rows:
        return None
    q, qv = (x if x is None else x.unflatten(0, (call.batch, rows)) for x in (call.q, call.qv))
    return call._replace(q=q, qv=qv, begins=None, most_rows=0)


def _kind(
    numbers: tuple[Any, ...], given: tuple[Any, ...], metadata: Any, begins: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What tells kinds of calls apart, and the tensors that are there."""
    q, k, v, table, lengths, k_scale, v_scale, sinks, out = given
    config = None if metadata is None else metadata[1:]
    if k_scale is v_scale is sinks is None and table is not None and lengths is not None:
        if begins is not None:
            packed = (q, k, v, table, lengths, begins)
            return (*numbers, out is None), packed if out is None else (*packed, out)
        if out is None:
            return (*numbers, config), (q, k, v, table, lengths)
        return (*numbers, config, True), (q, k, v, table, lengths, out)
    which = tuple([each is None for each in (*given, begins)])
    return (*numbers, config, which), tuple([x for x in (*given, begins) if x is not None])


def remember(
    numbers: tuple[Any, ...],
    call: Arguments,
    given: tuple[Any, ...],
    metadata: Any = None,
    begins: torch.Tensor | None = None,
) -> None:
    """Note that calls of this kind are understood: see `again`."""
    even = even_of(call)
    if even is not None and call.lse:
        return  # the log-sum-exps of the even one have another shape
    call = even or call
    plan = plan_of(call, metadata and config_of(metadata.config))
    *_, table, lengths, k_scale, v_scale, sinks, out = given
    as_given = lengths is call.lengths and sinks is call.sinks
    both = call.k_scale is None or not (k_scale is None or v_scale is None)
    served = plan.launches is not None and call.q.numel() > 0
    if not (served and as_given and both and (out is None or out.is_contiguous())):
        return
    own, index = call.table if table is None else None, call.q.device.index or 0
    if own is not None and call.q.is_cuda and is_capturing():
        return  # the table has no values before the graph is replayed
    q = given[0]
    sums = maker(call.of_lse, torch.float32, q.device) if call.lse else None
    of_out = call.q.numel() * call.q.element_size()
    extents = extent(call.q), extent(call.k), extent(call.v), of_out
    known = Known(plan, index, own, sums, maker(q.shape, q.dtype, q.device), extents)
    known_calls.add(*_kind(numbers, given, metadata, begins), known)


def again(
    numbers: tuple[Any, ...],
    given: tuple[Any, ...],
    metadata: Any = None,
    begins: torch.Tensor | None = None,
) -> Any:
    """The answer to a call of a kind that a kernel served before; None if it cannot this time.

    numbers: all arguments but tensors. given: q, k, v, the table, lengths, both scales, sinks and
    the output; None for what is not given. begins: cu_seqlens_q.
    """
    known = known_calls.find(*_kind(numbers, given, metadata, begins))
    if known is None:
        return None
    plan, index, own_table, empty_lse, empty, extents = known
    if current_device() != index:
        return None
    q, k, v, table, lengths, k_scale, v_scale, sinks, out = given
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if out is None:
        out = empty()
        at_out = out.data_ptr()
    else:
        at_out, (of_q, of_k, of_v, of_out) = out.data_ptr(), extents
        if (
            -of_out < at_out - at_q < of_q
            or -of_out < at_out - at_k < of_k
            or -of_out < at_out - at_v < of_v
        ):
            return None  # check_output looks closer
    if (at_q | at_k | at_v | at_out) & 15:
        return None
    log_sums = None if empty_lse is None else empty_lse()
    stream = raw_stream(index)
    begins_at = 0 if begins is None else begins.data_ptr()
    addresses = (
        *(at_q, at_k, at_v, at_out, (table if own_table is None else own_table).data_ptr()),
        lengths.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if log_sums is None else log_sums.data_ptr(),
        begins_at,
        begins_at and begins_at + 4,
        0 if metadata is None else metadata.runs.data_ptr(),
        *plan.kept.at(index, stream),
    )
    plan.launches.issue(addresses, stream)  # type: ignore[union-attr]
    counters["kernel"] += 1
    return out if log_sums is None else (out, log_sums)


def explain_flash_attn_with_kvcache(*args: Any, **options: Any) -> Explanation:
    """Which kernel would serve `flash_attn_with_kvcache` with these arguments; launches nothing."""
    given = inspect.signature(flash_attn_with_kvcache).bind(*args, **options)
    given.apply_defaults()
    a = given.arguments
    table = a["page_table"] if a["block_table"] is None else a["block_table"]
    how = (a["k_descale"], a["v_descale"], a["sinks"], a["softmax_scale"], a["softcap"])
    own = (a["q"], a["k_cache"], a["v_cache"], a["cache_seqlens"], table, *how)
    begins = a["cu_seqlens_q"]
    packed = (begins, None if begins is None else a["max_seqlen_q"])
    rest = (a["causal"], a["window_size"], a["return_softmax_lse"])
    call = understood(*own, *rest, *packed, a["qv"])
    call = even_of(call) or call
    return plan_of(call).why if call.qv is None else mla.explained(call)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    page_size: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNMASKED,
    has_softcap: bool = False,
    *,
    cache_dtype: torch.dtype | None = None,
) -> ScheduleMetadata | None:
    """Share a step's keys among blocks, once; pass it to each layer as `scheduler_metadata`.

    The calls are alike but for their tensors. Launches one small kernel; in a CUDA graph, too. None
    where no kernel of ours serves, and each call decides.
    """
    check_whole("cache_seqlens", cache_seqlens, 1)
    if len(cache_seqlens) != batch_size:
        raise ValueError(f"batch_size is {batch_size}, and cache_seqlens has {len(cache_seqlens)}")
    sides = sides_of(window_size)
    if not cache_seqlens.is_cuda or qkv_dtype not in DTYPES:
        return None
    size, blocks = page_size or PAGE_OF_DENSE, -(-max_seqlen_k // (page_size or PAGE_OF_DENSE))
    problem = problem_of_sizes(
        *(batch_size, num_heads_q, num_heads_kv, max_seqlen_q, blocks, headdim),
        *(DTYPES[qkv_dtype], size, STORED.get(cache_dtype or qkv_dtype)),
        *(interval_of(causal, sides), Scores(softcap=float(has_softcap))),
    )
    index = cache_seqlens.device.index or 0
    family, config, _ = chosen(problem, arch_of(index), name_of(index))
    if family is None or config is None or family.name != DECODE:
        return None
    config = Config({**config, "SCHEDULE": 1, "PDL": 0})
    space = family.workspace_of(config, problem)
    runs = torch.empty(space["runs"], dtype=torch.uint8, device=cache_seqlens.device)
    addresses = {"seqused_k": cache_seqlens.data_ptr(), "runs": runs.data_ptr()}
    with torch.cuda.device(index):  # its context must be the current one
        launches = schedule_of(problem, config, index)
        launches.issue(tuple(addresses.get(name, 0) for name in NAMES), raw_stream(index))
    of = (index, batch_size, max_seqlen_q, num_heads_q, num_heads_kv, sides[0])
    return ScheduleMetadata(runs, config.label, of)


def _fits(metadata: ScheduleMetadata, call: Arguments) -> None:
    """Raise ValueError for a schedule of other calls: its blocks would write beside the output."""
    _, rows, heads, _ = call.q.shape
    own = (call.q.device.index or 0, call.batch, rows, heads, call.k.shape[2], call.sides[0])
    names = ("device", "requests", "queries", "heads", "key heads", "keys to the left")
    for name, theirs, ours in zip(names, metadata.of, own, strict=True):
        if theirs != ours:
            raise ValueError(
                f"scheduler_metadata was made for {name} {theirs}, and the call has {ours}: make "
                "it by get_scheduler_metadata with the sizes of the call"
            )


def refuse(function: str, what: Mapping[str, bool]) -> None:
    """Raise NotImplementedError for the first argument that is given and not served."""
    for said, given in what.items():
        if given:
            raise NotImplementedError(f"{function} has no {said}")


def _answer(
    call: Arguments, metadata: Any = None, given: torch.Tensor | None = None
) -> tuple[Any, Any]:
    """The output and its log-sum-exps. given: a contiguous output, perhaps."""
    if call.q.is_cuda and current_device() != call.q.device.index:
        with torch.cuda.device(call.q.device):  # its context must be the current one
            return _answer(call, metadata, given)
    if call.qv is not None:
        made = mla.of_kernel(call, metadata)
        if not isinstance(made, Explanation):
            counters["kernel"] += 1
            return made
        counters[made.code] += 1
        return by_others(call)
    if metadata is not None and call.begins is None:
        _fits(metadata, call)
    plan = plan_of(call, metadata and config_of(metadata.config))
    q = call.q
    if plan.launches is None or not q.numel():
        counters[plan.why.code] += 1
        return by_others(call)
    out = q.new_empty(q.shape) if given is None else given
    lse = q.new_empty(call.of_lse, dtype=torch.float32) if call.lse else None
    index = q.device.index or 0
    stream = raw_stream(index)
    own = (q, call.k, call.v, out, call.table, call.lengths, call.k_scale, call.v_scale)
    begins = 0 if call.begins is None else call.begins.data_ptr()
    addresses = (
        *(0 if each is None else each.data_ptr() for each in (*own, call.sinks, lse)),
        *(begins, begins + 4 * (begins > 0)),
        0 if metadata is None else metadata.runs.data_ptr(),
        *plan.kept.at(index, stream),
    )
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15:
        counters["layout"] += 1
        return by_others(call)
    plan.launches.issue(addresses, stream)
    counters["kernel"] += 1
    return out, lse


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "attnsweep::flash_attn_with_kvcache",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor table, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? sinks, float scale, float softcap, SymInt[] sides, bool lse, "
    "Tensor? begins, SymInt most_rows, Tensor? qv) -> (Tensor, Tensor)",
)
def _compiled(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Arguments(q, *rest)
    out, log_sums = _answer(call._replace(sides=(call.sides[0], call.sides[1])))
    return out.contiguous(), log_sums.contiguous() if call.lse else q.new_empty(0).float()


@_compiled.register_fake  # type: ignore[untyped-decorator]
def _(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = Arguments(*call)
    shape = given.of_lse if given.lse else (0,)
    return given.q.new_empty(given.of_out), given.q.new_empty(shape, dtype=torch.float32)

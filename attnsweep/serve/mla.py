"""MLA's decoding from a paged cache, as FlashMLA has it, by `flash_mla_wgmma`.

The kernel is compiled when a kind of call is first met, and lies in the cache of cubins then.
Lengths, table and plan stay on the device, so that a call waits for nothing and may be in a CUDA
graph whose lengths change. Where the kernel does not run, others answer as for any paged cache.
FlashAttention-3's form, `flash_attn_with_kvcache(q, k_cache, v_cache, qv=...)`, is served too.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnsweep.core.errors import AttnsweepError
from attnsweep.core.layouts import Paged
from attnsweep.core.masks import CAUSAL, FULL
from attnsweep.core.problem import LOG2E, Problem
from attnsweep.family.family import Config
from attnsweep.serve.known_calls import KnownCalls
from attnsweep.serve.paged_call import DTYPES, Arguments, check_whole
from attnsweep.serve.paged_launch import (
    Kept,
    Kernel,
    arch_of,
    bound,
    families,
    kernels_of,
    maker,
    name_of,
)
from attnsweep.serve.paged_others import by_others
from attnsweep.serve.runtime.dispatch import Explanation
from attnsweep.serve.runtime.driver import BoundLaunches, DriverError, StridedTensor
from attnsweep.serve.runtime.launcher import current_device, raw_stream

HEAD_DIM, HEAD_DIM_V, PAGE = 576, 512, 64
_FAMILY = "flash_mla_wgmma"
# They won on all six problems of MLA that were recorded on an H200.
_CONFIG = {"BLOCK_N": 64, "LAG": 1}
# Joined in one launch calls took 1.3 to 16 % less on an H200 than with a combine stage, on six
# problems; 2 % more with eight requests of 32k keys, and 6 % with one among 127 of 1k.
_IN_PARTS = {"SPLITS": 1, "PLAN": 2, "JOIN": 1}
_MOST_KINDS = 4096
_ANY_BLOCKS = 2**24  # pages of a request that a plan takes
_NAMES = (
    *("q", "k", "v", "o", "block_table", "seqused_k", "lse", "shares", "first_slot"),
    *(_WORKSPACES := ("partial", "partial_lse", "counters")),
)
_PLANNED = ("shares", "first_slot")
_Maker = Callable[[], torch.Tensor]
is_compiling = torch.compiler.is_compiling
counters: Counter[str] = Counter()
"""Calls of mla_decode by what served them: `kernel`, or why another did."""


class MlaPlan(NamedTuple):
    """How blocks share the keys of a step's requests, for all of its layers: see mla_plan."""

    shares: torch.Tensor
    first_slot: torch.Tensor
    rows: int


class _Call(NamedTuple):
    """A call whose arguments fit together. cache: (pages, PAGE, HEAD_DIM)."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    causal: bool
    lse: bool
    shares: torch.Tensor | None = None
    first_slot: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What its launches depend on: all but addresses."""
        q, cache, table = self.q, self.cache, self.table
        sizes = (q.shape, q.stride(), cache.shape, cache.stride(), table.shape, table.stride(0))
        how = (self.scale, self.causal, self.lse, self.shares is None)
        return (*sizes, q.dtype, q.device.index, *how)


class _Served(NamedTuple):
    """Launches of calls of a kind, or why there are none; and what makes their outputs."""

    why: Explanation
    launches: BoundLaunches | None = None
    device: int = 0
    out: _Maker | None = None
    lse: _Maker | None = None
    kept: Kept = Kept(_WORKSPACES, {})


_known: KnownCalls[_Served] = KnownCalls()
# The same of calls with qv, and whether q and qv are parts of the same rows.
_known_in_parts: KnownCalls[tuple[_Served, bool]] = KnownCalls()


def mla_plan(cache_seqlens: torch.Tensor, rows: int) -> MlaPlan | None:
    """Which keys each block of a step's calls has, for `plan` of each of its layers.

    cache_seqlens: int32 (batch,), on the device. rows: heads times queries of a request. Launches
    one small kernel, in a CUDA graph too. Any plan of the batch is right for any lengths: one of
    others costs time alone. None where the kernel does not run.
    """
    _check_lengths(cache_seqlens)
    if type(rows) is not int or rows < 1:
        raise ValueError(f"rows are heads times queries of a request, not {rows!r}")
    batch, index = len(cache_seqlens), cache_seqlens.device.index or 0
    if not cache_seqlens.is_cuda or not batch:
        return None
    if current_device() != index:
        with torch.cuda.device(index):  # its context must be the current one
            return mla_plan(cache_seqlens, rows)
    try:
        launches, of_shares, of_slots = _of_plan(batch, rows, cache_seqlens.device)
    except (AttnsweepError, DriverError, OSError):
        return None
    shares, first_slot = of_shares(), of_slots()
    planned = (shares.data_ptr(), first_slot.data_ptr())
    own = (0, 0, 0, 0, 0, cache_seqlens.data_ptr(), 0, *planned, 0, 0, 0)
    launches.issue(own, raw_stream(index))
    return MlaPlan(shares, first_slot, rows)


@functools.lru_cache(maxsize=_MOST_KINDS)
def _of_plan(batch: int, rows: int, device: torch.device) -> tuple[BoundLaunches, _Maker, _Maker]:
    """The launch of a plan, and what makes the tensors that it writes."""
    index = device.index or 0
    # The plan of a joined config also clears counters, which are kept at 0 here: see Kept.
    config = Config({**_CONFIG, **_IN_PARTS, "JOIN": 0, "LSE": 0})
    problem = _problem(batch, rows, 1, 1, "bf16", causal=True)
    kernel = _kernels(problem, config, index)["plan"]
    names, (*before, blocks, parts, none) = kernel.launch.args[1:3], kernel.launch.args
    assert (blocks, none) == (1, 0)
    launch = replace(kernel.launch, args=(*before, _ANY_BLOCKS, parts, none))
    spaces = families()[_FAMILY].workspace_of(config, problem)
    kernel = _named(kernel._replace(launch=launch), names)
    shares, slots = (maker((spaces[str(name)] // 4,), torch.int32, device) for name in names)
    return bound([kernel], index, _NAMES), shares, slots


def _problem(
    batch: int, heads: int, queries: int, blocks: int, dtype: Any, *, causal: bool
) -> Problem:
    """The problem of a call, whose lengths are not known: one request has all keys."""
    layout = Paged(PAGE, lengths=(blocks * PAGE, *[0] * (batch - 1)))
    sizes = (batch, heads, 1, queries, blocks * PAGE, HEAD_DIM)
    mask = CAUSAL if causal else FULL
    return Problem(*sizes, dtype, mask, layout, head_dim_v=HEAD_DIM_V, value_in_key=True)


def _kernels(problem: Problem, config: Config, index: int) -> dict[str, Kernel]:
    """The kernels of a config by stage. Raises an AttnsweepError where it cannot run."""
    family, arch = families()[_FAMILY], arch_of(index)
    if (why := family.refusal(problem, arch)) is not None:
        raise AttnsweepError(why)
    return kernels_of(family, config, problem, arch)


def _named(kernel: Kernel, planned: Any) -> Kernel:
    """A kernel that gets what a plan wrote under our names."""
    ours = dict(zip(planned, _PLANNED, strict=True))
    args = tuple(ours.get(arg, arg) if isinstance(arg, str) else arg for arg in kernel.launch.args)
    return kernel._replace(launch=replace(kernel.launch, args=args))


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int = HEAD_DIM_V,
    *,
    softmax_scale: float,
    causal: bool = True,
    plan: MlaPlan | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of a few queries with latent keys, whose first head_dim_v columns are the values.

    q: (batch, seqlen_q, heads, 576), fp16 or bf16. kv_cache: (pages, 64, 576) or (pages, 64, 1,
    576), of q's dtype, any strides with contiguous rows. block_table: int32 (batch, blocks).
    cache_seqlens: int32 (batch,), the keys of each request, the new ones counted. Both stay on the
    device; what cannot be there gives some output and reads nothing outside the cache.
    softmax_scale: above 0. plan: of mla_plan.

    Query i of a request with n keys sees key j if j <= n - seqlen_q + i, where it is causal. A
    query that sees no key has output 0. Returns the output, (batch, seqlen_q, heads, 512), or
    (output, lse) with the natural log-sum-exps, float32 (batch, heads, seqlen_q).
    """
    given = (q, kv_cache, block_table, cache_seqlens)
    how = (head_dim_v, softmax_scale, causal, return_lse)
    compiling = is_compiling()
    kind, tensors = (how, given) if plan is None else _beside(how, given, plan)
    if not compiling:
        known = _known.find(kind, tensors)
        if known is not None and (made := _launched(known, *tensors)) is not None:
            counters["kernel"] += 1
            return made if return_lse else made[0]
    call = _understood(*given, head_dim_v, softmax_scale)
    call = call._replace(causal=bool(causal), lse=bool(return_lse))
    if plan is not None:
        call = _with_plan(call, plan)
    answer = _compiled(*call) if compiling else _answer(call)
    if not compiling and _in_rows(call) is call and (served := _serving(call)).launches:
        _known.add(kind, tensors, served)
    return answer if return_lse else answer[0]


def _beside(how: tuple[Any, ...], tensors: tuple[Any, ...], plan: Any) -> tuple[Any, Any]:
    """The numbers and tensors of a call with a plan."""
    _check_plan(plan)
    return (*how, plan.rows), (*tensors, plan.shares, plan.first_slot)


def of_latent(call: Arguments, plan: MlaPlan | None = None) -> _Call | Explanation:
    """Turn a call with `qv` into one whose rows of keys are values too, or say why not.

    q and qv are copied into one row each unless they lie so.
    """
    q, k, v, qv = call.q, call.k, call.v, call.qv
    assert qv is not None
    sizes = (k.shape[1], k.shape[3], v.shape[3])
    if sizes != (PAGE, HEAD_DIM - HEAD_DIM_V, HEAD_DIM_V):
        what = f"pages of {sizes[0]} keys of {sizes[1]} and {sizes[2]} columns"
        own = f"{PAGE} of {HEAD_DIM - HEAD_DIM_V} and {HEAD_DIM_V}"
        return Explanation(None, "not_served", f"{what}: the kernel takes {own}")
    for what, given in (
        ("queries that are packed unevenly", call.begins is not None),
        (f"a cache of {k.dtype}", k.dtype != q.dtype),
        ("windows", call.sides not in ((-1, -1), (-1, 0))),
        ("softcap", bool(call.softcap)),
        ("sinks", call.sinks is not None),
        (f"scale {call.scale}", not 0 < call.scale < math.inf),
    ):
        if given:
            return Explanation(None, "not_served", f"the kernel has no {what}")
    cache = _in_one_row(v[:, :, 0], k[:, :, 0])
    if cache is None or not _are_whole(cache):
        return Explanation(
            None,
            "layout",
            "v_cache and k_cache are no rows of one tensor: views of 512 and 64 columns",
        )
    rows = _joined(qv, q)
    rows = torch.cat((qv, q), -1) if rows is None else rows
    causal = call.sides[1] == 0
    made = _Call(rows, cache, call.table, call.lengths, call.scale, causal, call.lse)
    return made if plan is None else _with_plan(made, plan)


def explained(call: Arguments) -> Explanation:
    """Which kernel serves a call with qv, or why another does; launches nothing."""
    made = of_latent(_uncopied(call))
    return made if isinstance(made, Explanation) else _serving(made).why


def of_kernel(call: Arguments, plan: MlaPlan | None) -> tuple[torch.Tensor, Any] | Explanation:
    """The kernel's answer to a call with qv, or why it has none."""
    made = of_latent(call, plan)
    return made if isinstance(made, Explanation) else _by_kernel(made)


def remember(
    how: tuple[Any, ...], tensors: tuple[Any, ...], call: Arguments, plan: MlaPlan | None
) -> None:
    """Note that calls with qv are understood, if they are alike in what `again` gets."""
    assert call.qv is not None
    made = of_latent(_uncopied(call), plan)
    as_given = tensors[-2] is call.table and tensors[-1] is call.lengths
    if as_given and not isinstance(made, Explanation) and (served := _serving(made)).launches:
        kind, tensors = (how, tensors) if plan is None else _beside(how, tensors, plan)
        _known_in_parts.add(kind, tensors, (served, _joined(call.qv, call.q) is not None))


def again(how: tuple[Any, ...], tensors: tuple[Any, ...], plan: MlaPlan | None) -> Any:
    """The answer to a call with qv of a kind that the kernel served before; None if it cannot.

    how: its numbers. tensors: q, k, v, qv, the table and the lengths.
    """
    if plan is not None:
        how, tensors = _beside(how, tensors, plan)
    known = _known_in_parts.find(how, tensors)
    if known is None:
        return None
    (served, joined), (q, k, v, qv, *rest) = known, tensors
    apart = HEAD_DIM_V * 2
    if k.data_ptr() != v.data_ptr() + apart or (joined and q.data_ptr() != qv.data_ptr() + apart):
        return None
    return _launched(served, qv if joined else torch.cat((qv, q), -1), v, *rest)


def _uncopied(call: Arguments) -> Arguments:
    """The call with q and qv in one row: in another, of any numbers, unless they lie so."""
    q, qv = call.q, call.qv
    assert qv is not None
    if _joined(qv, q) is not None:
        return call
    columns = (qv.shape[-1], q.shape[-1])
    qv, q = q.new_empty((*q.shape[:-1], sum(columns))).split(columns, -1)
    return call._replace(q=q, qv=qv)


def _joined(qv: torch.Tensor, q: torch.Tensor) -> torch.Tensor | None:
    """Rows of qv and q, if they lie so, and those of a request one behind the other."""
    rows = _in_one_row(qv, q)
    return rows if rows is not None and _are_rows(rows) else None


def _in_one_row(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor | None:
    """A view of rows that have the columns of both side by side, if they lie so."""
    *outer, columns = first.shape
    of_first, of_rest = first.stride(), rest.stride()
    alike = all(a == b or n == 1 for n, a, b in zip(outer, of_first, of_rest, strict=False))
    apart = rest.data_ptr() - first.data_ptr()
    own, theirs = first.untyped_storage(), rest.untyped_storage()
    if not alike or apart != columns * first.element_size() or own.data_ptr() != theirs.data_ptr():
        return None
    return first.as_strided((*outer, columns + rest.shape[-1]), of_first)


def _are_whole(cache: torch.Tensor) -> bool:
    """Whether the rows of a cache (pages, PAGE, HEAD_DIM) are contiguous and do not overlap."""
    page, slot, one = cache.stride()
    apart = len(cache) == 1 or page >= slot * (PAGE - 1) + HEAD_DIM
    return one == 1 and slot >= HEAD_DIM and apart


def _understood(
    q: Any, cache: Any, table: Any, lengths: Any, head_dim_v: int, scale: float
) -> _Call:
    """The call that these arguments mean. Raises TypeError or ValueError."""
    for name, tensor in (("q", q), ("kv_cache", cache), ("block_table", table)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, and q on {q.device}")
    if q.dtype not in DTYPES or cache.dtype != q.dtype:
        what = f"q is {q.dtype} and kv_cache {cache.dtype}"
        raise TypeError(f"{what}: both have one dtype, float16 or bfloat16")
    if q.dim() != 4 or q.shape[3] != HEAD_DIM or not q.shape[1] or not q.shape[2]:
        raise ValueError(f"q is {tuple(q.shape)}: it is (batch, seqlen_q, heads, {HEAD_DIM})")
    given = tuple(cache.shape)
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache[:, :, 0]
    if cache.dim() != 3 or cache.shape[1:] != (PAGE, HEAD_DIM) or not len(cache):
        what = f"(pages, {PAGE}, 1, {HEAD_DIM}): one key head, pages of {PAGE} keys"
        raise ValueError(f"kv_cache is {given}, not {what}")
    if not _are_whole(cache):
        raise ValueError(f"kv_cache has strides {cache.stride()}: rows overlap, or are not whole")
    if head_dim_v != HEAD_DIM_V:
        raise ValueError(f"head_dim_v is {HEAD_DIM_V}, not {head_dim_v}")
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"softmax_scale is a number above 0, not {scale!r}")
    check_whole("block_table", table, 2)
    if table.stride(1) != 1:
        raise ValueError(f"block_table has strides {table.stride()}: its rows are not contiguous")
    if table.shape[0] != len(q) or not table.shape[1]:
        raise ValueError(f"block_table is {tuple(table.shape)}: it has a row of each of {len(q)}")
    _check_lengths(lengths)
    if lengths.shape != (len(q),) or lengths.device != q.device:
        what = f"cache_seqlens is {tuple(lengths.shape)} on {lengths.device}"
        raise ValueError(f"{what}: it has {len(q)} numbers on {q.device}")
    return _Call(q, cache, table, lengths, float(scale), causal=True, lse=False)


def _check_lengths(lengths: Any) -> None:
    check_whole("cache_seqlens", lengths, 1)
    if not lengths.is_contiguous():
        raise ValueError(f"cache_seqlens has strides {lengths.stride()}: it is not contiguous")


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, MlaPlan):
        raise TypeError(f"plan is what mla_plan returned, not {type(plan).__name__}")


def _with_plan(call: _Call, plan: Any) -> _Call:
    _check_plan(plan)
    batch, queries, heads, _ = call.q.shape
    if plan.rows != heads * queries or plan.first_slot.numel() != batch + 1:
        own = f"{plan.first_slot.numel() - 1} requests of {plan.rows} rows"
        raise ValueError(f"the plan is of {own}, and q has {batch} of {heads * queries}")
    if plan.shares.device != call.q.device:
        raise ValueError(f"the plan is on {plan.shares.device}, and q on {call.q.device}")
    return call._replace(shares=plan.shares, first_slot=plan.first_slot)


_served: dict[tuple[Any, ...], _Served] = {}


def _serving(call: _Call) -> _Served:
    """What serves calls of this kind, found now or before."""
    served = _served.get(kind := call.kind)
    if served is None:
        if len(_served) >= _MOST_KINDS:
            _served.clear()
        served = _served[kind] = _made(call)
    return served


def _made(call: _Call) -> _Served:
    """The launches of calls of this kind."""
    if not call.q.numel():
        return _Served(Explanation(None, "empty", f"q is {tuple(call.q.shape)}"))
    if not call.q.is_cuda:
        return _Served(Explanation(None, "device", f"q is on {call.q.device}"))
    page, slot, _ = call.cache.stride()
    if page % 8 or slot % 8:  # a copy has rows at multiples of 16 bytes
        what = f"the cache has strides {call.cache.stride()}: no multiples of 16 bytes"
        return _Served(Explanation(None, "layout", what))
    index = call.q.device.index or 0
    try:
        config = _config(call, index)
        kernels, spaces = _of_call(call, config, index)
        launches = bound(kernels, index, _NAMES, _in_maps(call))
    except (AttnsweepError, DriverError, OSError) as error:
        return _Served(Explanation(None, "not_served", str(error).splitlines()[0]))
    label = f"{_FAMILY} {config.label}"
    why = Explanation(label, "kernel", "keys are values too", 0.0, name_of(index))
    q, (batch, queries, heads, _) = call.q, call.q.shape
    out = maker((batch, queries, heads, HEAD_DIM_V), q.dtype, q.device)
    lse = maker((batch, heads, queries), torch.float32, q.device) if call.lse else None
    kept = Kept(_WORKSPACES, {name: spaces[name] for name in _WORKSPACES if name in spaces})
    return _Served(why, launches, index, out, lse, kept)


def _config(call: _Call, index: int) -> Config:
    """The config of a call: without a plan, it splits requests where they leave SMs idle."""
    batch, queries, heads, _ = call.q.shape
    blocks = arch_of(index).sm_count // -(-heads * queries // 64)  # of each row tile
    most = min(blocks // batch, call.table.shape[1])
    splits = max(n for n in (1, 2, 4, 8, 16) if n == 1 or n <= most)
    cut = {"SPLITS": splits, "PLAN": 0, "JOIN": 0}
    if call.shares is not None:
        cut = _IN_PARTS
    return Config({**_CONFIG, **cut, "LSE": int(call.lse)})


def _of_call(call: _Call, config: Config, index: int) -> tuple[list[Kernel], Mapping[str, int]]:
    """The kernels of a call, in order, and their workspaces. Raises an AttnsweepError."""
    batch, queries, heads, _ = call.q.shape
    blocks, rows = call.table.shape[1], heads * queries
    problem = _problem(batch, heads, queries, blocks, DTYPES[call.q.dtype], causal=call.causal)
    kernels = _kernels(problem, config, index)
    if plan := kernels.pop("plan", None):
        kernels = {name: _named(each, plan.launch.args[1:3]) for name, each in kernels.items()}
    of_rows = (rows, heads, queries, heads)
    of_fwd = (*of_rows, blocks, call.table.stride(0), call.scale * LOG2E)
    made = [each.ending(of_fwd if name == "fwd" else of_rows) for name, each in kernels.items()]
    return made, families()[_FAMILY].workspace_of(config, problem)


def _in_maps(call: _Call) -> dict[str, StridedTensor]:
    """q with its rows in one, and the cache in panels of 64 columns."""
    batch, queries, heads, _ = call.q.shape
    (pages, *_), (page, slot, _) = call.cache.shape, call.cache.stride()
    rows = (batch, queries * heads, HEAD_DIM)
    return {
        "q": StridedTensor(rows, (call.q.stride(0), HEAD_DIM, 1)),
        "k": StridedTensor((pages, HEAD_DIM // 64, PAGE, 64), (page, 64, slot, 1)),
    }


def _answer(call: _Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, if the call wants them, its log-sum-exps."""
    made = _by_kernel(call)
    if not isinstance(made, Explanation):
        counters["kernel"] += 1
        return made
    counters[made.code] += 1
    q, cache = call.q, call.cache[:, :, None]
    (qv, q), (v, k) = (x.split((HEAD_DIM_V, HEAD_DIM - HEAD_DIM_V), -1) for x in (q, cache))
    sides = (-1, 0 if call.causal else -1)
    how = (None, None, None, call.scale, 0.0, sides, call.lse, None, 0)
    out, lse = by_others(Arguments(q, k, v, call.lengths, call.table, *how, qv))
    return out, lse


def _in_rows(call: _Call) -> _Call:
    """The call with the rows of a request's queries one behind the other."""
    return call if _are_rows(call.q) else call._replace(q=call.q.contiguous())


def _are_rows(q: torch.Tensor) -> bool:
    """Whether a tensor map can have the queries of a request as rows, one behind the other."""
    _, queries, heads, _ = q.shape
    of_batch, of_query, of_head, one = q.stride()
    whole = queries == 1 or of_query == heads * HEAD_DIM
    return bool(one == 1 and whole and (heads == 1 or of_head == HEAD_DIM) and of_batch % 8 == 0)


def _by_kernel(call: _Call) -> tuple[torch.Tensor, torch.Tensor | None] | Explanation:
    """The kernel's output and, if the call wants them, log-sum-exps; or why it has none."""
    call = _in_rows(call)
    q, index = call.q, call.q.device.index or 0
    if q.is_cuda and current_device() != index:
        with torch.cuda.device(index):  # its context must be the current one
            return _by_kernel(call)
    served = _serving(call)
    if served.launches is None:
        return served.why
    own = (call.q, call.cache, call.table, call.lengths, call.shares, call.first_slot)
    made = _launched(served, *own)
    why = "q or the cache does not begin at a multiple of 16 bytes"
    return Explanation(None, "layout", why) if made is None else made


def _launched(
    served: _Served,
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    shares: torch.Tensor | None = None,
    first_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The answer of launches to a call of their kind; None if they cannot give it this time."""
    at_q, at_k, index = q.data_ptr(), cache.data_ptr(), served.device
    if (at_q | at_k) & 15 or current_device() != index:
        return None
    out = served.out()  # type: ignore[misc]
    lse = None if served.lse is None else served.lse()
    stream = raw_stream(index)
    addresses = (
        *(at_q, at_k, at_k, out.data_ptr(), table.data_ptr(), lengths.data_ptr()),
        0 if lse is None else lse.data_ptr(),
        0 if shares is None else shares.data_ptr(),
        0 if first_slot is None else first_slot.data_ptr(),
        *served.kept.at(index, stream),
    )
    served.launches.issue(addresses, stream)  # type: ignore[union-attr]
    return out, lse


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "attnsweep::mla_decode",
    mutates_args=(),
    schema="(Tensor q, Tensor cache, Tensor table, Tensor lengths, float scale, bool causal, "
    "bool lse, Tensor? shares, Tensor? first_slot) -> (Tensor, Tensor)",
)
def _compiled(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = _answer(_Call(q, *rest))
    return out.contiguous(), q.new_empty(0).float() if sums is None else sums.contiguous()


@_compiled.register_fake  # type: ignore[untyped-decorator]
def _(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = _Call(*call)
    batch, queries, heads, _ = given.q.shape
    shape = (batch, heads, queries) if given.lse else (0,)
    out = given.q.new_empty((batch, queries, heads, HEAD_DIM_V))
    return out, given.q.new_empty(shape, dtype=torch.float32)

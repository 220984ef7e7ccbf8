"""Decoding from a cache: FlashAttention-3's `flash_attn_with_kvcache`, by a swept kernel.

The kernel `decode_paged_mma` serves paged caches in fp16, bf16 and FP8, and dense ones of whole
pages. It is compiled when a kind of call is first met, and lies in the cache of cubins then. Which
config serves follows from what the host knows, by the recorded winners of `paged_winners.json`:
lengths and tables stay on the device, so that a call waits for nothing and may be in a CUDA graph
whose lengths change. What no kernel of ours serves is answered by FlashAttention-3 if it is
installed and can, and else by PyTorch behind a gather.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from attnsweep.core.errors import AttnsweepError, ProblemError
from attnsweep.core.layouts import Paged
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import LOG2E, Problem
from attnsweep.core.scores import Scores
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family
from attnsweep.serve.paged_call import (
    DTYPES,
    FP8,
    PAGE_OF_DENSE,
    UNMASKED,
    Arguments,
    check_values,
    understood,
)
from attnsweep.serve.paged_launch import (
    Kernel,
    arch_of,
    bound,
    current_device,
    is_capturing,
    raw_stream,
)
from attnsweep.serve.paged_others import by_others, has_flash_3
from attnsweep.serve.paged_store import with_new_keys
from attnsweep.serve.runtime.dispatch import Explanation
from attnsweep.serve.runtime.driver import BoundLaunches, DriverError, cuda_driver

FAMILY = "decode_paged_mma"
WINNERS = Path(__file__).with_name("paged_winners.json")
# Where a winner's kind of call took FlashAttention-3 less of its time than this, that serves.
_SLOWER = 0.97
# Graphs whose workspaces are kept: one is in use until its capture ends.
_MOST_CAPTURES = 8
# Plans that are kept; an engine meets one for each width of its tables.
_MOST_KINDS = 4096
# Kinds of calls that are looked through, the newest first: one for each kind of layer of a model.
_MOST_KNOWN = 16

counters: Counter[str] = Counter()
"""Calls by what served them: `kernel`, or why another did."""


@dataclass(slots=True, eq=False)
class Plan:
    """How calls of one kind are served: by launches, or None and why not."""

    why: Explanation
    config: Config | None = None
    launches: BoundLaunches | None = None
    workspaces: Mapping[str, int] = field(default_factory=dict)
    tails: dict[int, tuple[tuple[int, ...], Any]] = field(default_factory=dict)
    """Addresses of the workspaces on a stream, and what keeps them."""

    def tail(self, index: int, stream: int, runs: torch.Tensor | None) -> tuple[int, ...]:
        """Addresses of the workspaces of a call; the last is that of the runs, if it has them."""
        capturing = is_capturing()
        found = None if capturing else self.tails.get(stream)
        if found is None:
            spaces = _spaces.of(self.workspaces, index, stream)
            made = tuple(spaces[name].data_ptr() if name in spaces else 0 for name in _WORKSPACES)
            found = made, dict(spaces)
            if not capturing:
                self.tails[stream] = found
        return found[0] if runs is None else (*found[0][:-1], runs.data_ptr())


class Known(NamedTuple):
    """A kind of call that a kernel serves: what tells it, its plan, and what tensors do not give.

    kind: its numbers, and which tensors it has. are_alike: whether tensors are as those that it was
    made of, in shape, strides, dtype and device.
    """

    kind: tuple[Any, ...]
    are_alike: Callable[..., bool]
    plan: Plan
    table: torch.Tensor | None
    of_lse: tuple[int, ...] | None
    device: int


class ScheduleMetadata(NamedTuple):
    """The runs of blocks over the lengths of a step, made once for calls that are alike in them."""

    runs: torch.Tensor
    config: str


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
    scheduler_metadata: ScheduleMetadata | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    validate: bool = False,
) -> Any:
    """Attention of a few queries with a cache of keys, with the arguments of FlashAttention-3.

    q: (batch, seqlen_q, heads, head_dim), fp16 or bf16. k_cache, v_cache: (pages, page_size,
    heads_kv, head_dim) with page_table int32 (batch, blocks), or (batch, seqlen_k, heads_kv,
    head_dim) without; of q's dtype or float8_e4m3fn, whose k_descale and v_descale are float32
    (batch, heads_kv). Strides may be any with contiguous head_dim, so that a page may have heads
    before slots. cache_seqlens: int32 (batch,), the keys of each request, the new ones counted;
    they stay on the device. block_table: another name of page_table. sinks: (heads,), one more
    score of each head. validate: wait for the device, and raise ValueError for lengths, tables and
    scales that cannot be; without, such a call has some output and reads nothing outside the cache.

    Query i of a request with n keys sees key j if j <= n - seqlen_q + i, where it is causal. A
    query that sees no key has output 0. Returns the output, (batch, seqlen_q, heads, head_dim), or
    (output, lse) with lse (batch, heads, seqlen_q). Raises NotImplementedError for what
    FlashAttention-3 does beside: appending k and v, rotary embeddings, qv, FP8 queries, packed
    queries, chunks.
    """
    table = page_table if block_table is None else block_table
    given = (q, k_cache, v_cache, table, cache_seqlens, k_descale, v_descale, sinks)
    plain = page_table is None or block_table is None
    plain = (
        plain and k is v is qv is rotary_cos is rotary_sin is rotary_seqlens is q_descale is None
    )
    plain = plain and cache_batch_idx is cache_leftpad is cu_seqlens_q is cu_seqlens_k_new is None
    plain = plain and not (max_seqlen_q or attention_chunk or sm_margin or validate)
    kind = None
    if plain and not torch.compiler.is_compiling():
        which: tuple[bool, ...] = _FIVE
        tensors: tuple[Any, ...] = (q, k_cache, v_cache, table, cache_seqlens)
        if not (k_descale is v_descale is sinks is None) or table is None or cache_seqlens is None:
            which = tuple(each is not None for each in given)
            tensors = tuple(each for each in given if each is not None)
        of_run = None if scheduler_metadata is None else scheduler_metadata.config
        kind = (softmax_scale, causal, window_size, softcap, return_softmax_lse, of_run, which)
        for known in _known.kinds:
            if known.kind == kind and known.are_alike(*tensors):
                answer = _again(known, given, scheduler_metadata)
                if answer is not None:
                    return answer
                kind = None
                break
    _refuse(
        {
            "rotary_cos: rotate q and k before the call": rotary_cos is not None
            or rotary_sin is not None
            or rotary_seqlens is not None,
            "qv": qv is not None,
            "cache_batch_idx: index the table or the cache": cache_batch_idx is not None,
            "cache_leftpad": cache_leftpad is not None,
            "cu_seqlens_k_new": k is not None and cu_seqlens_k_new is not None,
            "q_descale: queries are fp16 or bf16": q_descale is not None,
            "attention_chunk": bool(attention_chunk),
            "sm_margin": bool(sm_margin),
        }
    )
    if cu_seqlens_q is None and max_seqlen_q is not None and max_seqlen_q < q.shape[1]:
        raise ValueError(f"max_seqlen_q is {max_seqlen_q}, and q has {q.shape[1]} rows")
    if block_table is not None and page_table is not None:
        raise TypeError("page_table and block_table are two names of one table: give one")
    how = (k_descale, v_descale, sinks, softmax_scale, softcap, causal, window_size)
    packed = (None, None) if cu_seqlens_q is None else (cu_seqlens_q, max_seqlen_q)
    own = (q, k_cache, v_cache, cache_seqlens, table, *how, return_softmax_lse)
    call = understood(*own, *packed)
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise TypeError("k and v are appended behind cache_seqlens: give those too")
        call = with_new_keys(call, k, v)
    if validate:
        check_values(call)
    out, lse = answered(call, scheduler_metadata)
    if kind is not None:
        _remember(kind, call, given, scheduler_metadata)
    return (out, lse) if return_softmax_lse else out


def answered(
    call: Arguments, metadata: ScheduleMetadata | None = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a call, in `out` if that is given, and its log-sum-exps if it wants them."""
    if torch.compiler.is_compiling():
        made, lse = _compiled(*call)
    else:
        made, lse = _answer(call, metadata, out)
    if out is not None and made is not out:
        out.copy_(made)
        made = out
    return made, lse


def _remember(
    kind: Any, call: Arguments, given: tuple[Any, ...], metadata: ScheduleMetadata | None
) -> None:
    """Note that calls of this kind are understood, if their tensors are those that are given."""
    plan = _plan(call, metadata and _config_of(metadata.config))
    *_, table, lengths, k_scale, v_scale, sinks = given
    as_given = lengths is call.lengths and sinks is call.sinks
    scaled = call.k_scale is None or not (k_scale is None or v_scale is None)
    if _Guard is None or plan.launches is None or not (as_given and scaled):
        return
    tensors = [each for each in given if each is not None]
    guard = _Guard(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    of_lse = call.of_lse if call.lse else None
    own, index = call.table if table is None else None, call.q.device.index or 0
    made = Known(kind, guard.check, plan, own, of_lse, index)
    _known.kinds = (made, *_known.kinds[: _MOST_KNOWN - 1])


def _again(known: Known, given: Any, metadata: ScheduleMetadata | None) -> Any:
    """The answer to a call of a kind that a kernel served before; None if it cannot this time."""
    index = known.device
    if current_device() != index:
        return None
    q, k, v, table, lengths, k_scale, v_scale, sinks = given
    out = _empty_like(q, memory_format=_CONTIGUOUS)  # half of what new_empty takes
    of_lse = known.of_lse
    log_sums = None if of_lse is None else q.new_empty(of_lse, dtype=torch.float32)
    stream = raw_stream(index)
    addresses = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        (table if known.table is None else known.table).data_ptr(),
        lengths.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if log_sums is None else log_sums.data_ptr(),
        *known.plan.tail(index, stream, None if metadata is None else metadata.runs),
    )
    if (addresses[0] | addresses[1] | addresses[2]) & 15:
        return None
    known.plan.launches.issue(addresses, stream)  # type: ignore[union-attr]
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
    call = understood(*own, a["causal"], a["window_size"], a["return_softmax_lse"])
    return _plan(call).why


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
    """What the blocks of a step's calls do, for `scheduler_metadata` of each of its layers.

    The calls are alike but for their tensors. Launches one small kernel; in a CUDA graph, too. None
    where no kernel of ours serves, and each call decides.
    """
    stored = cache_dtype or qkv_dtype
    size, blocks = page_size or PAGE_OF_DENSE, -(-max_seqlen_k // (page_size or PAGE_OF_DENSE))
    problem = _problem(
        *(batch_size, num_heads_q, num_heads_kv, max_seqlen_q, blocks, headdim),
        *(DTYPES[qkv_dtype], size, "e4m3" if stored == FP8 else None),
        *(_interval(causal, window_size), Scores(softcap=float(has_softcap))),
    )
    index = cache_seqlens.device.index or 0
    config, _ = _chosen(problem, index)
    if config is None:
        return None
    config = Config({**config, "SCHEDULE": 1, "PDL": 0})
    space = _family().workspace_of(config, problem)
    runs = torch.empty(space["runs"], dtype=torch.uint8, device=cache_seqlens.device)
    addresses = {"seqused_k": cache_seqlens.data_ptr(), "runs": runs.data_ptr()}
    with torch.cuda.device(index):  # its context must be the current one
        launches = _scheduled(problem, config, index)
        launches.issue(tuple(addresses.get(name, 0) for name in _NAMES), raw_stream(index))
    return ScheduleMetadata(runs, config.label)


def _refuse(what: Mapping[str, bool]) -> None:
    """Raise NotImplementedError for the first argument that is not served."""
    for said, given in what.items():
        if given:
            raise NotImplementedError(f"flash_attn_with_kvcache has no {said}")


# -- which kernel serves --------------------------------------------------------------------


def _interval(causal: bool, window: Sequence[int]) -> Interval:
    left, right = (None if side is None or side < 0 else int(side) for side in window)
    right = 0 if causal else right
    if left is None and right in (None, 0):
        return FULL if right is None else CAUSAL
    return Interval(left, right)


def _problem(
    batch: int,
    heads: int,
    heads_kv: int,
    seqlen_q: int,
    blocks: int,
    head_dim: int,
    dtype: Any,
    page_size: int,
    cache_dtype: str | None,
    mask: Interval,
    scores: Scores,
) -> Problem:
    """The problem of a call, whose lengths are not known: one request has all keys."""
    seqlen_k = blocks * page_size
    lengths = (seqlen_k, *[0] * (batch - 1))
    layout = Paged(page_size, lengths=lengths, cache_dtype=cache_dtype)
    sizes = (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim)
    return Problem(*sizes, dtype, mask, layout, scores)


def problem_of(call: Arguments) -> Problem:
    """The problem of a call. Raises ProblemError."""
    batch, rows, heads, head_dim = call.q.shape
    _, page_size, heads_kv, _ = call.k.shape
    mask = _interval(False, call.sides)
    scores = Scores(softcap=call.softcap, sinks=call.sinks is not None)
    sizes = (batch, heads, heads_kv, rows, call.table.shape[1], head_dim)
    cache_dtype = "e4m3" if call.k.dtype == FP8 else None
    return _problem(*sizes, DTYPES[call.q.dtype], page_size, cache_dtype, mask, scores)


@functools.cache
def _family() -> Family:
    return discover()[FAMILY]


@functools.cache
def _recorded() -> list[dict[str, Any]]:
    """The recorded winners: see scripts/paged_winners.py."""
    found: list[dict[str, Any]] = json.loads(WINNERS.read_text(encoding="utf-8"))["winners"]
    return found


def _distance(entry: Mapping[str, Any], problem: Problem, gpu: str) -> tuple[float, ...]:
    """How far a recorded winner is from a call, by what the host knows; the least serves."""
    p = Problem.parse(entry["problem"])
    here, there = problem.layout, p.layout
    assert isinstance(here, Paged)
    assert isinstance(there, Paged)
    group, own = problem.heads // problem.heads_kv, p.heads // p.heads_kv
    small = (here.page_size % 16 > 0) != (there.page_size % 16 > 0)
    sizes = (
        (problem.batch * problem.heads_kv, p.batch * p.heads_kv),
        (problem.seqlen_k, p.seqlen_k),
    )
    rows = (group * problem.seqlen_q, own * p.seqlen_q)
    kinds = (
        abs(problem.head_dim - p.head_dim),
        here.cache_dtype != there.cache_dtype,
        small,
        abs(_row_tiles(rows[0]) - _row_tiles(rows[1])),
        gpu != entry["gpu"],
    )
    logs = sum(abs(math.log2(a / b)) for a, b in sizes)
    return (*kinds, logs, abs(math.log2(here.page_size / there.page_size)))


def _row_tiles(rows: int) -> int:
    """0 for up to 8 packed rows, and one more for each doubling."""
    return max(0, math.ceil(math.log2(rows / 8)))


def _config_of(label: str) -> Config:
    texts = dict(part.split("=") for part in label.split())
    return Config({name: int(value) for name, value in texts.items()})


def _chosen(problem: Problem, index: int, *, lse: bool = False) -> tuple[Config | None, str]:
    """The config that serves a problem, and why, or None and why not."""
    arch, family = arch_of(index), _family()
    if (refused := family.refusal(problem, arch)) is not None:
        return None, refused
    gpu = torch.cuda.get_device_name(index).removeprefix("NVIDIA ")
    ordered = sorted(_recorded(), key=lambda entry: _distance(entry, problem, gpu))
    own = {"LSE": int(lse)}
    theirs = ordered[0].get("flash_3", 1.0) if ordered else 1.0
    if theirs < _SLOWER and not problem.scales and not problem.scores.sinks and has_flash_3():
        near = ordered[0]
        return None, f"FlashAttention-3 took {theirs} of our time on {near['problem']}"
    for entry in ordered:
        config = Config({**_config_of(entry["config"]), **own})
        if family.refused_by(config, problem, arch) is None:
            return config, f"won on {entry['problem']} of an {entry['gpu']}"
    for values in _DEFAULTS:
        config = Config(values | own)
        if family.refused_by(config, problem, arch) is None:
            return config, "no recorded winner fits: a config that the rules keep"
    return None, "no config that the family's rules keep"


_ORDER = ("WARPS", "NUM_STAGES", "KEYS", "BLOCKS_PER_SM", "HEADS", "ROW_FRAGMENTS", "ITEM_COST")
_DEFAULTS = tuple(
    dict(zip(_ORDER, values, strict=True)) | {"EVICT_FIRST": 1, "SCHEDULE": 0, "PDL": 0}
    for values in (
        (4, 2, 16, 2, 1, 1, 1),
        (8, 2, 16, 1, 1, 1, 1),
        (4, 2, 16, 1, 1, 1, 1),
        (4, 2, 16, 1, 1, 2, 1),
    )
)
_WORKSPACES = ("parts", "part_sums", "counters", "runs")
_NAMES = (
    *("q", "k", "v", "o", "block_table", "seqused_k", "k_scale", "v_scale", "sinks", "lse"),
    *_WORKSPACES,
)
"""The buffers of a launch, in the order in which their addresses are given."""
_plans: dict[tuple[Any, ...], Plan] = {}
_known = SimpleNamespace(kinds=())  # the newest first; a tuple, which threads may replace
_FIVE = (True,) * 5 + (False,) * 3  # a call without scales and sinks
_empty_like, _CONTIGUOUS = torch.empty_like, torch.contiguous_format
# What torch.compile asks whether it may take its code again: it compares all facts of many tensors
# in one call. In Python that took a third of a call's time.
_Guard = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


def _load(
    problem: Problem,
    config: Config,
    index: int,
    stages: Sequence[str],
    numbers: tuple[Any, ...] | None = None,
) -> BoundLaunches:
    """The launches of some stages. numbers: the last arguments of `fwd`."""
    family = _family()
    kernels = []
    for name, launch in family.launches(config, problem, arch_of(index)).items():
        if name not in stages:
            continue
        defines = family.stages[name].defines(config, problem, launch)
        if name == "fwd" and numbers is not None:
            launch = replace(launch, args=(*launch.args[: -len(numbers)], *numbers))
        kernels.append(Kernel(launch, family.source, defines))
    return bound(kernels, index, _NAMES)


@functools.lru_cache(maxsize=64)
def _scheduled(problem: Problem, config: Config, index: int) -> BoundLaunches:
    """The launch that makes a schedule."""
    return _load(problem, config, index, ("schedule",))


def _plan(call: Arguments, config: Config | None = None) -> Plan:
    """The plan of calls of this kind, made now or before. config: that of a schedule."""
    key = (*call.kind, config and config.label)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MOST_KINDS:
            _plans.clear()
        found = _plans[key] = _made(call, config)
    return found


def _made(call: Arguments, config: Config | None) -> Plan:
    def without(code: str, reason: str) -> Plan:
        return Plan(Explanation(None, code, reason, 0.0, None))

    if not call.q.is_cuda:
        return without("device", f"q is on {call.q.device}")
    if call.begins is not None:
        return without("not_served", "requests have other numbers of queries")
    if why := _unaligned(call):
        return without("layout", why)
    index = call.q.device.index or 0
    try:
        problem = problem_of(call)
        scheduled = config is not None
        if config is None:
            config, said = _chosen(problem, index, lse=call.lse)
        else:
            said = "the config of the schedule"
        if config is None:
            return without("not_served", said)
        q, k = call.q, call.k
        order = (0, 2, 1)  # batch, head, row of (batch, seqlen_q, heads, head_dim)
        _, rows, heads, columns = q.shape
        of_q = tuple(q.stride(at) for at in order)
        of_o = (rows * heads * columns, columns, heads * columns)
        of_scales = call.k_scale.stride() if call.k_scale is not None else (0, 0)
        strides = (*of_q, *of_o, k.stride(0), k.stride(1), k.stride(2), call.table.stride(0))
        window = (2**30 if side < 0 else side for side in call.sides)
        numbers = (
            *(k.shape[0], call.table.shape[1], *window, call.scale * LOG2E, call.softcap),
            *(*strides, *of_scales),
        )
        stages = ("fwd",) if scheduled else ("schedule", "fwd")
        launches = _load(problem, config, index, stages, numbers)
        spaces = dict(_family().workspace_of(config, problem))
    except (AttnsweepError, ProblemError, DriverError, OSError) as error:
        return without("not_served", str(error).splitlines()[0])
    spaces = {name: size for name, size in spaces.items() if name != "lse"}
    if scheduled:
        spaces.pop("runs", None)
    gpu = torch.cuda.get_device_name(index)
    return Plan(Explanation(config.label, "kernel", said, 0.0, gpu), config, launches, spaces)


def _unaligned(call: Arguments) -> str | None:
    """Why the kernel cannot read these tensors, which it does 16 bytes at a time; or None."""
    if call.k.stride() != call.v.stride():
        return f"k_cache and v_cache have strides {call.k.stride()} and {call.v.stride()}"
    for name, tensor in (("q", call.q), ("k_cache", call.k)):
        size = tensor.element_size()
        if any(
            n > 1 and s * size % 16
            for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        ):
            return f"{name} has strides {tensor.stride()}: no multiples of 16 bytes"
        if any(stride >= 2**31 for stride in tensor.stride()):
            return f"{name} has strides of 2^31 elements or more"
    if call.k_scale is not None and call.k_scale.stride() != call.v_scale.stride():  # type: ignore[union-attr]
        return "k_descale and v_descale have other strides"
    return None


class _Workspaces:
    """Memory of the calls of one stream, or of one capture: counters begin at 0, and end there."""

    def __init__(self) -> None:
        self._of: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}

    def of(self, sizes: Mapping[str, int], index: int, stream: int) -> dict[str, torch.Tensor]:
        """Each workspace, at least as large as asked for."""
        capture = 0
        if is_capturing():
            driver = cuda_driver()
            capture = int(driver.cuStreamGetCaptureInfo(driver.CUstream(stream))[2])
        key = (index, stream, capture)
        found = self._of.get(key)
        if found is None:
            captures = [each for each in self._of if each[2]]
            for old in captures[: max(0, len(captures) - _MOST_CAPTURES + 1)]:
                del self._of[old]
            found = self._of[key] = {}
        for name, size in sizes.items():
            if name not in found or found[name].numel() < size:
                found[name] = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{index}")
        return found


_spaces = _Workspaces()


# -- answers ------------------------------------------------------------------------------


def _answer(
    call: Arguments, metadata: ScheduleMetadata | None = None, given: torch.Tensor | None = None
) -> tuple[Any, Any]:
    """The output and its log-sum-exps, of a call that is understood. given: the output, perhaps."""
    if call.q.is_cuda and current_device() != call.q.device.index:
        with torch.cuda.device(call.q.device):  # its context must be the current one
            return _answer(call, metadata, given)
    plan = _plan(call, metadata and _config_of(metadata.config))
    q = call.q
    if plan.launches is None or not q.numel():
        counters[plan.why.code] += 1
        return by_others(call)
    out = q.new_empty(q.shape) if given is None or not given.is_contiguous() else given
    lse = q.new_empty(call.of_lse, dtype=torch.float32) if call.lse else None
    index = q.device.index or 0
    stream = raw_stream(index)
    own = (q, call.k, call.v, out, call.table, call.lengths, call.k_scale, call.v_scale)
    addresses = tuple(
        0 if each is None else each.data_ptr() for each in (*own, call.sinks, lse)
    ) + plan.tail(index, stream, None if metadata is None else metadata.runs)
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15:
        counters["layout"] += 1
        return by_others(call)
    plan.launches.issue(addresses, stream)
    counters["kernel"] += 1
    return out, lse


@torch.library.custom_op("attnsweep::flash_attn_with_kvcache", mutates_args=())  # type: ignore[untyped-decorator]
def _compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    sides: Sequence[int],
    lse: bool,
    begins: torch.Tensor | None,
    most_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = sides
    given = (q, k, v, lengths, table, k_scale, v_scale, sinks, scale, softcap, (left, right), lse)
    out, log_sums = _answer(Arguments(*given, begins, most_rows))
    return out.contiguous(), log_sums.contiguous() if lse else q.new_empty(0).float()


@_compiled.register_fake  # type: ignore[untyped-decorator]
def _(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = Arguments(*call)
    shape = given.of_lse if given.lse else (0,)
    return given.q.new_empty(given.q.shape), given.q.new_empty(shape, dtype=torch.float32)

"""Which kernel serves a kind of call on a paged cache, and its launches.

`decode_paged_mma` has few queries a request, and equally many; `append_paged_wgmma` many, or other
numbers. The config is the one that recorded runs have as the best of problems like a call, by what
the host knows: batch, heads, the most queries, page size, and the width of the table.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from attnsweep.core.errors import AttnsweepError, ProblemError
from attnsweep.core.hardware import Arch
from attnsweep.core.layouts import Paged
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import LOG2E, Problem
from attnsweep.core.scores import Scores
from attnsweep.family.family import Config, Family
from attnsweep.serve.paged_call import DTYPES, STORED, Arguments
from attnsweep.serve.paged_launch import (
    Kept,
    Kernel,
    arch_of,
    bound,
    families,
    kernels_of,
    name_of,
)
from attnsweep.serve.paged_others import has_flash_3
from attnsweep.serve.runtime.dispatch import Explanation
from attnsweep.serve.runtime.driver import BoundLaunches, DriverError, StridedTensor

DECODE, APPEND = "decode_paged_mma", "append_paged_wgmma"
TIMES = Path(__file__).with_name("paged_times.json")
# Where FlashAttention-3 took less than this of the best time on the nearest problem, it serves.
_SLOWER = 0.97
# What a config counts on a problem whose rules leave it out.
_LEFT_OUT = 1.3
# Packed rows of a key head that are decoded at most: each eight or sixteen read its keys again.
_MOST_DECODED = 128
# Blocks that share the keys of a tile of mixed calls, at most. Few long requests beside many short
# ones are 1.03 to 1.8 times as fast so, and others 1 to 3 % slower (18 mixes, H200).
_MIXED_SPLITS = 4
# Plans that are kept; an engine meets one for each width of its tables.
_MOST_KINDS = 4096
_UNLIMITED = 2**30  # a side of a window
_WORKSPACES = ("parts", "part_sums", "counters", "turns")
NAMES = (
    *("q", "k", "v", "o", "block_table", "seqused_k", "k_scale", "v_scale", "sinks", "lse"),
    *("query_begins", "query_ends", "runs", *_WORKSPACES),
)
"""The buffers of a launch, in the order in which their addresses are given."""
_plans: dict[tuple[Any, ...], Plan] = {}


@dataclass(slots=True, eq=False)
class Plan:
    """How calls of one kind are served: by launches, or None and why not."""

    why: Explanation
    launches: BoundLaunches | None = None
    kept: Kept = field(default_factory=lambda: Kept(_WORKSPACES, {}))


def interval_of(causal: bool, window: Sequence[int]) -> Interval:
    """The mask of a call's arguments."""
    left, right = (None if side is None or side < 0 else int(side) for side in window)
    right = 0 if causal else right
    if left is None and right in (None, 0):
        return FULL if right is None else CAUSAL
    return Interval(left, right)


def problem_of_sizes(
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


def _like(call: Arguments) -> tuple[Any, ...]:
    """The rounded sizes that stand for all calls with one plan."""
    heads, head_dim = call.q.shape[-2:]
    _, page_size, heads_kv, _ = call.k.shape
    sizes = alike(call.batch, max(call.rows, 1), call.table.shape[1], call.begins is not None)
    batch, rows, blocks = sizes
    cache_dtype = STORED.get(call.k.dtype)
    scores = Scores(softcap=call.softcap, sinks=call.sinks is not None)
    own = (batch, heads, heads_kv, rows, blocks, head_dim, DTYPES[call.q.dtype], page_size)
    return (*own, cache_dtype, interval_of(False, call.sides), scores)


def alike(batch: int, rows: int, blocks: int, packed: bool = False) -> tuple[int, int, int]:
    """Batch, rows and width of the table of calls that have one config, as an engine's steps vary.

    They are powers of two, but for few rows, of which there are equally many.
    """
    if packed or rows > 16:
        rows = max(16, _power_of_two(rows))
    return _power_of_two(batch), rows, _power_of_two(blocks)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


class _Recorded(NamedTuple):
    """A problem of a recorded run. times: of its configs over the best one's."""

    gpu: str
    problem: Problem
    flash_3: float | None
    times: Mapping[tuple[str, Config], float]


@functools.cache
def _recorded() -> list[_Recorded]:
    """The recorded problems: see scripts/paged_times.py."""
    found = json.loads(TIMES.read_text(encoding="utf-8"))
    configs = []
    for text in found["configs"]:
        kernel, label = text.split(" ", 1)
        configs.append((kernel, config_of(label)))
    return [
        _Recorded(
            entry["gpu"],
            Problem.parse(entry["problem"]),
            entry.get("flash_3"),
            {configs[int(number)]: time for number, time in entry["times"].items()},
        )
        for entry in found["problems"]
    ]


def _kind(recorded: _Recorded, problem: Problem, gpu: str) -> tuple[float, ...]:
    """Distance between a recorded problem's kind and a call's; only the nearest kind is used."""
    p, here = recorded.problem, problem.layout
    there = p.layout
    assert isinstance(here, Paged)
    assert isinstance(there, Paged)
    rows = [_rows_of(each) for each in (problem, p)]
    return (
        abs(problem.head_dim - p.head_dim),
        here.cache_dtype != there.cache_dtype,
        (here.page_size % 16 > 0) != (there.page_size % 16 > 0),
        abs(_row_tiles(rows[0]) - _row_tiles(rows[1])),
        gpu != recorded.gpu,
    )


def _distance(recorded: _Recorded, problem: Problem) -> float:
    """Distance in sizes, in doublings, between a recorded problem and a call of its kind."""
    p, here = recorded.problem, problem.layout
    there = p.layout
    assert isinstance(here, Paged)
    assert isinstance(there, Paged)
    pairs = (
        (problem.batch * problem.heads_kv, p.batch * p.heads_kv),
        (problem.seqlen_k, p.seqlen_k),
        (_rows_of(problem), _rows_of(p)),
    )
    logs = sum(abs(math.log2(a / b)) for a, b in pairs)
    pages = abs(math.log2(here.page_size / there.page_size))  # of many rows, what a copy has
    return logs + (pages if _rows_of(problem) > _MOST_DECODED else pages / 8)


def _rows_of(problem: Problem) -> int:
    """Packed rows of a key head."""
    return problem.heads // problem.heads_kv * problem.seqlen_q


def _row_tiles(rows: int) -> int:
    """0 for up to 8 packed rows, and one more for each doubling, as long as they are decoded."""
    return max(0, math.ceil(math.log2(min(rows, 2 * _MOST_DECODED) / 8)))


def config_of(label: str) -> Config:
    """The config of a label."""
    texts = dict(part.split("=") for part in label.split())
    return Config({name: int(value) for name, value in texts.items()})


def _fits(family: Family, config: Config, problem: Problem, arch: Arch) -> bool:
    """Whether a config can serve a problem; that another is better for it is no matter here."""
    if family.name == DECODE:
        return family.refused_by(config, problem, arch) is None
    # One rule by shape still counts: keys are shared only where there may be enough of them.
    can = (name for name in family.rules if name not in family.by_shape or name == "split_grid")
    fits = all(family.passes(name, config, problem, arch) for name in can)
    return fits and family.excess(config, problem, arch) is None


def chosen(
    problem: Problem, arch: Arch, gpu: str, *, lse: bool = False, packed: bool = False
) -> tuple[Family | None, Config | None, str]:
    """The family and config that serve a problem on a card, and why; or None and why not.

    packed: requests have other numbers of queries.
    """
    rows = _rows_of(problem)
    able, refused = {}, ""
    for name in (DECODE, APPEND):
        family = families()[name]
        if name == DECODE and (packed or rows > _MOST_DECODED):
            continue
        if (why := family.refusal(problem, arch)) is None:
            able[name] = family
        else:
            refused = refused or why
    if not able:
        return None, None, refused
    ranked = _ranked(problem, gpu, able)
    theirs = ranked.nearest.flash_3 if ranked.nearest else None
    plain = not problem.scales and not problem.scores.sinks
    if theirs is not None and theirs < _SLOWER and plain and has_flash_3():
        near = ranked.nearest.problem.label  # type: ignore[union-attr]
        return None, None, f"FlashAttention-3 took {theirs} of our time on {near}"
    for name, config, said in ranked.configs:
        if name == DECODE:
            ways: list[dict[str, int]] = [{"SCHEDULE": 0, "PDL": 0}]  # or it is made by a call
        else:
            ways = [{"SPLITS": _MIXED_SPLITS}, {}] if packed else [{}]
        for own in ways:
            made = Config({**config, **own, "LSE": int(lse)})
            if _fits(able[name], made, problem, arch):
                return able[name], made, said
    return None, None, "no config that the families' rules keep"


class _Ranked(NamedTuple):
    """Configs in the order in which they are tried, and the nearest recorded problem."""

    nearest: _Recorded | None
    configs: list[tuple[str, Config, str]]


def _ranked(problem: Problem, gpu: str, able: Mapping[str, Family]) -> _Ranked:
    """Configs by their mean loss on the recorded problems of the nearest kind, near ones more."""
    served = [each for each in _recorded() if any(kernel in able for kernel, _ in each.times)]
    said = "no recorded problem is like it: a config that the rules keep"
    rest = [(name, Config(values), said) for name in able for values in DEFAULTS[name]]
    if not served:
        return _Ranked(None, rest)
    kinds = [_kind(each, problem, gpu) for each in served]
    like = [each for each, kind in zip(served, kinds, strict=True) if kind == min(kinds)]
    distances = [_distance(each, problem) for each in like]
    nearest = like[distances.index(min(distances))]
    losses: dict[tuple[str, Config], float] = {}
    for config in dict.fromkeys(config for each in like for config in each.times):
        if config[0] in able:
            losses[config] = sum(
                2.0 ** (-distance / 2) * math.log(each.times.get(config, _LEFT_OUT))
                for each, distance in zip(like, distances, strict=True)
            )
    near = nearest.problem.label
    said = (
        f"the best by {len(like)} recorded problems, of which {near} of an {nearest.gpu} is nearest"
    )
    # Each tile of rows reads the keys. Two that do so at the same time find them in L2: then they
    # are up to 9 % faster than one, and otherwise up to 84 % slower.
    rows = _rows_of(problem)
    tiles = {
        each: math.ceil(rows / (8 * int(each[1].get("ROW_FRAGMENTS") or rows))) for each in losses
    }
    best = sorted(losses, key=lambda each: (tiles[each], losses[each]))
    return _Ranked(nearest, [*((*config, said) for config in best), *rest])


def _settings(names: str, *values: tuple[int, ...], **same: int) -> list[dict[str, int]]:
    return [dict(zip(names.split(), each, strict=True)) | same for each in values]


DEFAULTS = {
    DECODE: _settings(
        "WARPS KEYS BLOCKS_PER_SM ROW_FRAGMENTS",
        *((4, 16, 2, 1), (8, 16, 1, 1), (4, 16, 1, 1), (4, 16, 1, 2)),
        NUM_STAGES=2,
        HEADS=1,
        ITEM_COST=1,
        EVICT_FIRST=1,
        SCHEDULE=0,
        PDL=0,
    ),
    APPEND: _settings(
        "WARPGROUPS BLOCK_N",
        *((2, 128), (2, 96), (2, 64)),
        NUM_STAGES=2,
        BLOCKS_PER_SM=1,
        OVERLAP=1,
        PINGPONG=0,
        SPLITS=1,
        COPY_WARPS=4,
        MAXIMA=1,
    ),
}


@functools.lru_cache(maxsize=64)
def schedule_of(problem: Problem, config: Config, index: int) -> BoundLaunches:
    """The launch that makes a schedule of decode_paged_mma."""
    kernels = kernels_of(families()[DECODE], config, problem, arch_of(index))
    return bound([kernels["schedule"]], index, NAMES)


def plan_of(call: Arguments, config: Config | None = None) -> Plan:
    """The plan of calls of this kind, made now or before. config: that of a schedule."""
    if call.begins is not None:
        config = None  # schedules are of requests with as many queries
    key = (*call.kind, config and config.label)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MOST_KINDS:
            _plans.clear()
        found = _plans[key] = _made(call, config)
    return found


class _Choice(NamedTuple):
    """What serves calls that are alike: kernels by their stage, and bytes of their workspaces."""

    family: str
    config: Config
    said: str
    kernels: Mapping[str, Kernel]
    spaces: Mapping[str, int]


@functools.lru_cache(maxsize=_MOST_KINDS)
def _choice(
    sizes: tuple[Any, ...], index: int, lse: bool, packed: bool, scheduled: Config | None
) -> _Choice | str:
    """What serves such calls, or why nothing does. Raises an AttnsweepError."""
    problem, arch = problem_of_sizes(*sizes), arch_of(index)
    family: Family | None = families()[DECODE]
    config, said = None, "the config of the schedule"
    if scheduled is not None:
        config = Config({**scheduled, "LSE": int(lse)})
    else:
        family, config, said = chosen(problem, arch, name_of(index), lse=lse, packed=packed)
    if family is None or config is None:
        return said
    kernels = kernels_of(family, config, problem, arch)
    return _Choice(family.name, config, said, kernels, dict(family.workspace_of(config, problem)))


def _made(call: Arguments, scheduled: Config | None) -> Plan:
    def without(code: str, reason: str) -> Plan:
        return Plan(Explanation(None, code, reason))

    if not call.q.is_cuda:
        return without("device", f"q is on {call.q.device}")
    if why := _unaligned(call):
        return without("layout", why)
    index = call.q.device.index or 0
    try:
        choice = _choice(_like(call), index, call.lse, call.begins is not None, scheduled)
        if isinstance(choice, str):
            return without("not_served", choice)
        launches = (_decoding if choice.family == DECODE else _appending)(choice, call, index)
    except (AttnsweepError, ProblemError, DriverError, OSError) as error:
        return without("not_served", str(error).splitlines()[0])
    spaces = {name: size for name, size in choice.spaces.items() if name in _WORKSPACES}
    own = f"{choice.family} {choice.config.label}"
    return Plan(
        Explanation(own, "kernel", choice.said, 0.0, name_of(index)),
        launches,
        Kept(_WORKSPACES, spaces),
    )


def _decoding(choice: _Choice, call: Arguments, index: int) -> BoundLaunches:
    """The launch of decode_paged_mma, with the sizes and strides of a call."""
    q, k = call.q, call.k
    batch, rows, heads, columns = q.shape
    pages, _, heads_kv, _ = k.shape
    of_q = tuple(q.stride(at) for at in (0, 2, 1))  # batch, head, row
    of_o = (rows * heads * columns, columns, heads * columns)
    of_scales = call.k_scale.stride() if call.k_scale is not None else (0, 0)
    strides = (*of_q, *of_o, *k.stride()[:3], call.table.stride(0))
    window = (_UNLIMITED if side < 0 else side for side in call.sides)
    numbers = (
        *(batch, heads_kv, heads // heads_kv, rows, pages, call.table.shape[1], *window),
        *(call.scale * LOG2E, call.softcap, *strides, *of_scales),
    )
    return bound([choice.kernels["fwd"].ending(numbers)], index, NAMES)


def _appending(choice: _Choice, call: Arguments, index: int) -> BoundLaunches:
    """The launch of append_paged_wgmma, with the sizes and strides of a call."""
    q, (pages, page_size, heads_kv, columns) = call.q, call.k.shape
    packed = call.begins is not None
    four = q.unsqueeze(0) if packed else q
    items, tokens, heads, _ = four.shape
    page, slot, head, one = call.k.stride()
    of_cache = StridedTensor((pages, heads_kv, page_size, columns), (page, head, slot, one))
    tensors = {"q": StridedTensor(tuple(four.shape), four.stride()), "k": of_cache, "v": of_cache}
    window = (_UNLIMITED if side < 0 else side for side in call.sides)
    numbers = (
        *(call.batch, heads_kv, heads // heads_kv, tokens, items * tokens, call.table.shape[1]),
        *(*window, call.scale * LOG2E, call.softcap),
        *(tokens * heads * columns, columns, heads * columns, call.table.stride(0)),
    )
    if "k" in choice.kernels["fwd"].launch.args:  # copied by rows, and not by a map
        scales = ("lse", "lse") if call.k_scale is None else ("k_scale", "v_scale")
        of_scales = (0, 0) if call.k_scale is None else call.k_scale.stride()
        numbers += (*scales, pages, page, slot, head, *of_scales)
    grid = (arch_of(index).sm_count * choice.config.BLOCKS_PER_SM, 1, 1)
    kernel = choice.kernels["fwd"].ending(numbers, grid=grid)
    if packed:
        args = [*kernel.launch.args]
        at = args.index("seqused_k")
        args[at + 1 : at + 3] = ["query_begins", "query_ends"]
        launch = replace(kernel.launch, args=tuple(args))
        kernel = Kernel(launch, kernel.source, {**kernel.defines, "QUERIES": "1"})
    return bound([kernel], index, NAMES, tensors)


def _unaligned(call: Arguments) -> str | None:
    """Why the kernel cannot read these tensors, which it does 16 bytes at a time; or None."""
    if call.k.stride() != call.v.stride():
        return f"k_cache and v_cache have strides {call.k.stride()} and {call.v.stride()}"
    for name, tensor in (("q", call.q), ("k_cache", call.k)):
        size = tensor.element_size()
        if any(
            n > 1 and s * size % 16
            for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        ):
            return f"{name} has strides {tensor.stride()}: no multiples of 16 bytes"
        if any(stride >= 2**31 for stride in tensor.stride()):
            return f"{name} has strides of 2^31 elements or more"
    if call.k_scale is not None and call.k_scale.stride() != call.v_scale.stride():  # type: ignore[union-attr]
        return "k_descale and v_descale have other strides"
    return None

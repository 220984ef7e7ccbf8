"""Calls on paged caches at random in one process, each checked against float64. Needs PyTorch.

    PYTHONPATH=. python tests/support/net_paged.py --seconds 300 --seed 1

Caches, tables and lengths are filled again in the memory of earlier calls, or made anew where those
lay. `--device cpu` has kernels in PyTorch in the place of a card's.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from drawn_calls import DTYPES
from net import OUT, OUT_UNIT, Net, main, wrong_rows
from packed_step import Attended, attended
from paged_stand_in import paged_stand_in

import attnsweep
from attnsweep.serve import mla, paged_attention, paged_others

FP8 = torch.float8_e4m3fn
STEPS, VALUE = 40, 512
ORDERS = ("nhd", "hnd", "pairs", "apart", "wide", "v hnd")
"""How a cache lies: two halves of one allocation, heads before slots, K and V of each page side by
side, two allocations, rows with a gap behind them; V alone with heads before slots."""
LATENT = ("nhd", "pairs", "wide")
LIES = ("contiguous", "contiguous", "fused", "heads first", "2 bytes off", "ones")
"""How queries lie; `ones` have a stride of dimensions of one element that nothing could use."""
OUTS = ("", "contiguous", "rows apart", "heads apart", "columns apart")
SCALES = ("each", "each", "one", "none", "heads apart", "expanded", "k alone")
REFUSED = ("out is q", "out begins in q", "the schedule of more requests", "a length beyond the table")
"""What raises ValueError in each call, also where it is known: see `refusal`."""


@dataclass(frozen=True)
class Cache:
    """The sizes of a cache and of the calls on it. page: 0 for a dense one; latent: of mla_decode."""

    batch: int = 3
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    page: int = 16
    capacity: int = 96
    dtype: str = "bf16"
    fp8: bool = False
    order: str = "nhd"
    latent: bool = False


@dataclass(frozen=True)
class Paged:
    """A call. Its text, given to Python, makes it again.

    lengths: of the keys, `new` appended ones counted; tokens: queries of each request, which are
    packed if `packed`. kept: the cache is the one of an earlier call, filled anew. metadata: `step`
    is made for these lengths, `another` for others, which mla_plan allows. steps: how many calls
    follow each other, each with other data and lengths. how: on a card also in a graph that is
    replayed with other lengths, and on two streams. refused: why it is a ValueError.
    """

    cache: Cache = field(default_factory=Cache)
    lengths: tuple[int, ...] = (40, 17, 0)
    tokens: tuple[int, ...] = (1, 1, 1)
    packed: bool = False
    entry: str = "flash_attn_with_kvcache"
    new: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    scales: str = "each"
    lse: bool = False
    out: str = ""
    q: str = "contiguous"
    shared: bool = False
    metadata: str = ""
    validate: bool = False
    mode: str = "no_grad"
    kept: bool = True
    steps: int = 1
    how: str = "eager"
    refused: str = ""
    seed: int = 0


# ---- drawing ----
@dataclass(frozen=True)
class Sizes:
    """What calls are drawn from."""

    heads: tuple[tuple[int, int], ...] = ((4, 2), (4, 4), (8, 2), (16, 1), (6, 3))
    head_dims: tuple[int, ...] = (64, 64, 64, 96, 128, 256, 40)
    pages: tuple[int, ...] = (1, 2, 4, 8, 16, 16, 24, 48, 64)
    latent_heads: tuple[int, ...] = (4, 16)
    capacity: int = 200
    tokens: int = 40
    ways: tuple[str, ...] = ("eager",)


CARD = Sizes(
    heads=((32, 8), (28, 4), (8, 8), (16, 1), (64, 8), (6, 3)),
    latent_heads=(4, 16, 64, 128),
    pages=(1, 2, 4, 8, 16, 16, 24, 48, 64, 128),
    capacity=3000,
    tokens=300,
    ways=("eager",) * 6 + ("graph", "streams"),
)
STAND_IN = Sizes()


ONE_THING = ("seed", "lengths", "causal", "window", "softcap", "sinks", "scale", "scales", "lse", "mode", "cache")


def draw(sizes: Sizes, seed: int, number: int) -> Paged:
    """The call of this number. Three caches take turns for a while; many calls differ from the last in one thing."""
    rng = random.Random(f"{seed} paged {number}")
    if number % 60 and rng.random() < 0.4:
        last = draw(sizes, seed, number - 1)
        new: dict[str, Any] = {"seed": rng.randrange(10**6), "kept": True, "steps": 1}
        change = rng.choice((*ONE_THING, "out", "q", "metadata"))
        change = "seed" if change == "scale" and last.cache.latent else change  # mla_decode has no default
        if change == "lengths":
            new[change] = _lengths(last.cache, last.new, rng)
        elif change == "cache":  # of other strides
            new[change] = replace(last.cache, order=rng.choice(LATENT if last.cache.latent else ORDERS))
        elif change in ONE_THING:
            new[change] = getattr(_call(sizes, last.cache, rng), change)
        elif not last.refused:
            new[change] = _rest(last.cache, last.entry, last.tokens, rng)[change]
        return replace(last, **new)
    return _call(sizes, _cache(sizes, random.Random(f"{seed} cache {number // 60} {rng.randrange(3)}")), rng)


def _call(sizes: Sizes, cache: Cache, rng: random.Random) -> Paged:
    packed = cache.page > 0 and rng.random() < 0.4
    entry = "mla_decode" if cache.latent and not packed and rng.random() < 0.5 else "flash_attn_with_kvcache"
    entry = rng.choice(("flash_attn_varlen_func", entry)) if packed else entry
    rows = rng.choice((1, 1, 1, 2, 3, 4, 7, 16))
    tokens = (rows,) * cache.batch
    if packed and rng.random() < 0.7:
        tokens = tuple(rng.choice((0, 1, 1, 2, rng.randint(0, sizes.tokens))) for _ in range(cache.batch))
    appends = entry == "flash_attn_with_kvcache" and not cache.latent and rng.random() < 0.4
    new_keys = min(cache.capacity, rng.choice((1, rows, 5))) if appends else 0
    call: dict[str, Any] = {"cache": cache, "packed": packed, "tokens": tokens, "new": new_keys, "entry": entry}
    call |= {"lengths": _lengths(cache, new_keys, rng), "causal": rng.random() < 0.8, "lse": rng.random() < 0.4}
    # PyTorch gets the scaled keys of FP8 caches in 16 bits, which large scores would show.
    call["scale"] = rng.choice((None, None, 0.05, None if cache.fp8 else 0.3))
    call["scale"] = 0.07 if entry == "mla_decode" or (cache.latent and call["scale"]) else call["scale"]
    if not cache.latent:
        sides = (-1, 0, 1, 5, 16, 63, 200)
        call["window"] = (rng.choice(sides), rng.choice(sides)) if rng.random() < 0.3 else (-1, -1)
        call["softcap"] = rng.choice((0.0, 0.0, 0.0, 3.0, 30.0))
        call["sinks"] = rng.random() < 0.2
        call["scales"] = rng.choice(SCALES)
    call["shared"] = cache.page > 0 and rng.random() < 0.3
    call["mode"] = rng.choice(("no_grad", "grad", "q has a gradient", "inference"))
    call["kept"] = rng.random() < 0.8
    call["steps"] = STEPS if rng.random() < 1 / 40 else 1
    call["how"] = rng.choice(sizes.ways)
    call["validate"] = call["how"] == "eager" and not cache.latent and rng.random() < 0.1
    call |= _rest(cache, entry, tokens, rng)
    if call["how"] == "eager" and rng.random() < 0.1:
        call |= _refused(call, rng)
    return Paged(**call, seed=rng.randrange(10**6))


def _rest(cache: Cache, entry: str, tokens: tuple[int, ...], rng: random.Random) -> dict[str, Any]:
    """What may change from call to call."""
    alike = entry != "flash_attn_varlen_func" and {*tokens} == {tokens[0] or 1}
    metadata = ("", "step", "another") if cache.latent else ("", "step") if cache.page else ("",)
    made = {"q": rng.choice(LIES), "metadata": rng.choice(metadata) if alike else ""}
    return made | {"out": "" if entry == "mla_decode" else rng.choice(OUTS)}


def _refused(call: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    refused = rng.choice(REFUSED)
    if call["cache"].latent or (refused == REFUSED[2] and (call["packed"] or not call["cache"].page)):
        return {}
    made: dict[str, Any] = {"refused": refused, "steps": 1}
    if refused.startswith("out"):
        made |= {"q": "contiguous", "out": "", "mode": "no_grad"}
        made |= {"tokens": tuple(max(1, n) for n in call["tokens"])}
    if refused == REFUSED[2]:
        made |= {"metadata": "step"}
    if refused == REFUSED[3]:
        made |= {"validate": True, "new": 0}
    return made


def _cache(sizes: Sizes, rng: random.Random) -> Cache:
    latent = rng.random() < 0.2
    heads, heads_kv = (rng.choice(sizes.latent_heads), 1) if latent else rng.choice(sizes.heads)
    page = 64 if latent else rng.choice((*sizes.pages, 0))
    capacity = rng.choice((1, 16, 64, 65, 128, sizes.capacity // 3, sizes.capacity))
    unit = page or rng.choice((1, 16))  # dense caches are read in pages of 16 slots where they can be
    capacity = rng.randint(1, capacity) if page == 0 else capacity
    capacity = -(-max(5, capacity) // unit) * unit
    head_dim = 576 if latent else rng.choice(sizes.head_dims)
    own = (rng.randint(1, 6), heads, heads_kv, head_dim, page, capacity, rng.choice(("bf16", "bf16", "fp16")))
    order = rng.choice(LATENT if latent else ORDERS)
    return Cache(*own, fp8=not latent and rng.random() < 0.35, order=order, latent=latent)


def _lengths(cache: Cache, new: int, rng: random.Random) -> tuple[int, ...]:
    """Lengths of no keys, of all, at borders of pages and tiles, and any others."""
    page, most = cache.page or 16, cache.capacity
    borders = (0, 1, page - 1, page, page + 1, 15, 16, 17, 32, 63, 64, 65, 127, 128, 129, most - 1, most)
    drawn = [rng.choice((rng.choice(borders), rng.randint(0, most))) for _ in range(cache.batch)]
    drawn = drawn[:1] * cache.batch if rng.random() < 0.1 else drawn
    return tuple(min(most, max(new, length)) for length in drawn)


# ---- tensors ----
class Made:
    """The tensors of a call, in memory that calls on the same cache share."""

    def __init__(self, drawn: Paged, device: str, kept: dict[Any, Any]) -> None:
        self.drawn, self.device = drawn, device
        cache = drawn.cache
        if not drawn.kept:
            kept.clear()  # what comes next may lie where something lay
        key = cache, drawn.mode == "inference"  # whose tensors nobody else may write to
        self.page = cache.page or cache.capacity
        self.blocks = cache.capacity // self.page
        self.pages = cache.batch * self.blocks + (2 if cache.page else 0)
        if key not in kept:
            kept[key] = self._allocated()
        self.k, self.v, self._table, self.lengths = kept[key]
        width = self.blocks + 3 * (drawn.seed % 2)
        self.table = self._table[: cache.batch * width].view(cache.batch, width)[:, : self.blocks]
        self.begins = torch.tensor([0, *drawn.tokens], device=device).cumsum(0).int()
        self.sinks: Any = None
        self.scales: list[Any] = []
        self.new: list[Any] = []
        self.fill(0)

    def _allocated(self) -> tuple[Any, ...]:
        """k and v, (pages, page_size, heads_kv, head_dim), a table in a wider one, and lengths."""
        cache, page, pages = self.drawn.cache, self.page, self.pages
        dtype = FP8 if cache.fp8 else DTYPES[cache.dtype]
        inside = (page, cache.heads_kv, cache.head_dim)

        def new(*shape: int) -> Any:
            return torch.empty(shape, dtype=dtype, device=self.device)

        if cache.order == "hnd":
            k, v = new(2, pages, cache.heads_kv, page, cache.head_dim).transpose(2, 3)
        elif cache.order == "pairs":
            k, v = new(pages, 2, *inside).unbind(1)
        elif cache.order == "wide":
            k, v = new(2, pages, *inside[:2], cache.head_dim + 16)[..., : cache.head_dim]
        elif cache.order == "apart":
            k, v = new(pages, *inside), new(pages, *inside)
        else:
            k, v = new(2, pages, *inside)
        if cache.order == "v hnd":
            v = v.view(pages, cache.heads_kv, page, cache.head_dim).transpose(1, 2)
        if cache.latent:
            v = k[..., :VALUE]
        table = torch.empty(cache.batch * (self.blocks + 3), dtype=torch.int32, device=self.device)
        lengths = torch.empty(cache.batch, dtype=torch.int32, device=self.device)
        return k, v, table, lengths

    def fill(self, step: int) -> None:
        """Draw everything again, in the same memory: after the first step with the lengths of other requests."""
        drawn, cache, page = self.drawn, self.drawn.cache, self.page
        self.step, turned = step, step % cache.batch
        self.host = [*drawn.lengths[turned:], *drawn.lengths[:turned]]
        numbers = torch.Generator(self.device).manual_seed(drawn.seed + step)
        rng = random.Random(f"{drawn.seed} {step}")

        def normal(*shape: int) -> Any:
            return torch.randn(shape, device=self.device, generator=numbers)

        order = [*range(self.pages)]
        if cache.page:
            rng.shuffle(order)
        rows = [order[n * self.blocks : (n + 1) * self.blocks] for n in range(cache.batch)]
        for row, length in zip(rows[1:], self.host[1:], strict=True):
            if drawn.shared:  # whole pages of a prefix that nothing is appended to
                both = max(0, min(length, self.host[0]) - drawn.new) // page
                row[:both] = rows[0][:both]
        slots = [(row[at // page], at % page) for row, n in zip(rows, self.host, strict=True) for at in range(n)]
        used = torch.zeros(self.pages, page, dtype=torch.bool)
        if slots:
            used[tuple(torch.tensor(slots).T)] = True
        for each in (self.k, self.v)[: 1 if cache.latent else 2]:
            data = normal(*each.shape).masked_fill(~used.to(self.device)[..., None, None], math.nan)
            each.copy_(data.to(each.dtype))
        behind = [rng.choice((-9, 2**31 - 1, -(2**31), 10**6, self.pages, 0)) for _ in range(cache.batch * self.blocks)]
        told = torch.tensor(rows, dtype=torch.int32).view(cache.batch, self.blocks)
        self.right_table = told.clamp(0).tolist()
        blocks = torch.arange(self.blocks) * page
        unused = blocks >= torch.tensor(self.host)[:, None]
        told = torch.where(unused, torch.tensor(behind, dtype=torch.int32).view_as(told), told)
        self._table.fill_(-77)
        self.table.copy_(told)
        self.lengths.copy_(torch.tensor(self.host))
        shape = (cache.batch, drawn.tokens[0]) if not drawn.packed else (sum(drawn.tokens),)
        queries = normal(*shape, cache.heads, cache.head_dim).to(DTYPES[cache.dtype])
        sinks = normal(cache.heads).to(torch.float32 if drawn.seed % 2 else queries.dtype) if drawn.sinks else None
        rest = [sinks, *self._scales(normal), *self._taken()]
        if step:
            for old, values in zip((self.q, self.sinks, *self.scales, *self.new), (queries, *rest), strict=True):
                if old is not None:
                    at = tuple(slice(None) if step else slice(1) for step in old.stride())  # once, where it is expanded
                    as_bits(old.detach())[at].copy_(as_bits(values)[at])
            return
        self.sinks, *self.scales = rest[:3]
        self.new = rest[3:]
        if drawn.new and drawn.seed % 2:  # V lies otherwise than K
            self.new[1] = as_bits(self.new[1]).transpose(1, 2).contiguous().view(self.v.dtype).transpose(1, 2)
        self._place(queries)

    def _place(self, values: Any) -> None:
        """Have queries in memory of the call's layout, and an output."""
        drawn, cache, shape, dtype = self.drawn, self.drawn.cache, values.shape[:-2], values.dtype
        self.q = laid(values, drawn.q).requires_grad_(drawn.mode == "q has a gradient")
        self.around = self.out = None
        of_out = (*shape, cache.heads, VALUE if cache.latent else cache.head_dim)
        if drawn.refused == "out is q":
            self.out = self.q
        elif drawn.refused == "out begins in q":
            flat = torch.cat((values.flatten(), values.flatten()))
            self.q, self.out = (flat[at : at + values.numel()].view_as(values) for at in (0, cache.head_dim))
        elif drawn.out:
            # `rows apart`: the output is the first half of wider rows; `heads apart`: every other head.
            self.around = torch.empty(*of_out[:-2], 2 * of_out[-2], 2 * of_out[-1], dtype=dtype, device=self.device)
            if drawn.out == "contiguous":
                self.around = torch.empty(of_out[0] + 2, *of_out[1:], dtype=dtype, device=self.device)
                self.out = self.around[1:-1]
            elif drawn.out == "rows apart":
                self.out = self.around[..., : of_out[-2], : of_out[-1]]
            elif drawn.out == "columns apart":
                self.out = self.around[..., of_out[-2] :, ::2]
            else:
                self.out = self.around[..., ::2, of_out[-1] :]

    def _scales(self, normal: Callable[..., Any]) -> list[Any]:
        cache, how = self.drawn.cache, self.drawn.scales
        if not cache.fp8 or how == "none":
            return [None, None]
        shape = (cache.batch, cache.heads_kv)
        scales = normal(2, *((1,) if how in ("one", "expanded") else shape)).abs() + 0.5
        if how == "expanded":
            return [each.expand(shape) for each in scales]
        if how == "k alone":
            return [scales[0], None]
        return [each.T.contiguous().T if how == "heads apart" else each for each in scales]

    def _taken(self) -> list[Any]:
        """The last keys of each request, which are taken out of the cache: the call is given them."""
        new, self.wanted = self.drawn.new, self.bits()
        if not new:
            return [None, None]
        at = torch.tensor(self.host)[:, None] - new + torch.arange(new)
        page = torch.tensor(self.right_table).gather(1, at // self.page).to(self.device)
        slot, taken = (at % self.page).to(self.device), []
        for each in (self.k, self.v):
            bits = as_bits(each)
            taken.append(bits[page, slot].view(each.dtype))
            bits[page, slot] = -1  # which is NaN
        self.lengths.sub_(new)
        return taken

    def bits(self) -> list[Any]:
        """A copy of all slots."""
        return [as_bits(each).clone() for each in (self.k, self.v)]

    def right(self) -> Iterator[Attended]:
        """What is right for each request."""
        drawn, cache = self.drawn, self.drawn.cache
        ends = self.begins.tolist()
        q = self.q.detach() if drawn.packed else self.q.detach().flatten(0, 1)
        scale = drawn.scale or cache.head_dim**-0.5
        for request, n in enumerate(self.host):
            at = torch.arange(n, device=self.device)
            page = torch.tensor(self.right_table[request], device=self.device).long()[at // self.page]
            own = []
            for bits, cache_, of in zip(self.wanted, (self.k, self.v), self.scales, strict=True):
                rows = bits[page, at % self.page].view(cache_.dtype).double().transpose(0, 1)
                if of is not None:
                    rows = rows * of.expand(cache.batch, cache.heads_kv)[request].double()[:, None, None]
                own.append(rows.repeat_interleave(cache.heads // cache.heads_kv, 0))
            rows, (k, v) = q[ends[request] : ends[request + 1]].double().transpose(0, 1), own
            yield attended(rows, k, v, scale, drawn.causal, drawn.window, drawn.softcap, self.sinks)


def as_bits(tensor: Any) -> Any:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def laid(values: Any, how: str) -> Any:
    """These queries in memory of some layout."""
    if how == "fused":  # beside keys and values of the same tokens
        return torch.cat((values, values, values), -2)[..., : values.shape[-2], :]
    if how == "heads first":
        return values.transpose(-2, -3).contiguous().transpose(-2, -3)
    if how == "2 bytes off":
        flat = torch.cat((values.flatten()[:1], values.flatten())) if values.numel() else values.flatten()
        return flat[1:].view(values.shape) if values.numel() else values
    if how == "ones":
        steps = [3 if size == 1 else step for size, step in zip(values.shape, values.stride(), strict=True)]
        return values.as_strided(values.shape, steps)
    return values


# ---- calling ----
def invoke(made: Made) -> Any:
    """Make the call; (output, log-sum-exps or None)."""
    drawn, cache, q, k, v = made.drawn, made.drawn.cache, made.q, made.k, made.v
    how: dict[str, Any] = {"causal": drawn.causal, "softmax_scale": drawn.scale}
    if drawn.entry == "mla_decode":
        given = (q, k if drawn.seed % 2 else k[:, :, 0], made.table, made.lengths)
        got = attnsweep.mla_decode(*given, plan=metadata_of(made), return_lse=drawn.lse, **how)
        return got if drawn.lse else (got, None)
    how |= {"return_softmax_lse": drawn.lse, "validate": drawn.validate, "out": made.out}
    how |= {"window_size": drawn.window, "softcap": drawn.softcap}
    how |= {"k_descale": made.scales[0], "v_descale": made.scales[1]} if cache.fp8 else {}
    qv = None
    if cache.latent:  # in parts, which are views of one row or not
        other = q
        if (drawn.seed + made.step) % 3 == 0:  # q and qv are of two tensors, with one's strides
            other, q = q.clone(), q.clone()
            q[..., VALUE:] = math.nan
        qv, q, k = q[..., :VALUE], other[..., VALUE:], k[..., VALUE:]
        qv, q = (qv, q) if drawn.q == "contiguous" else (qv.clone(), q.clone())
    if drawn.refused == "a length beyond the table":
        made.lengths[-1] = cache.capacity + 1
    longest = max(drawn.tokens) + 3 * (drawn.seed % 4 == 0)
    if drawn.entry == "flash_attn_varlen_func":
        how |= {"seqused_k": made.lengths, "block_table": made.table, "s_aux": made.sinks, "q_v": qv}
        begins = None
        if drawn.seed % 5 == 0:  # as flash_attn has them
            begins, how["seqused_k"] = torch.nn.functional.pad(made.lengths.cumsum(0).int(), (1, 0)), None
        got = attnsweep.flash_attn_varlen_func(q, k, v, made.begins, begins, longest, max(made.host), **how)
    else:
        one = drawn.seed % 2 and len({*made.host}) == 1 and not drawn.refused
        said = made.host[0] - drawn.new if one else made.lengths
        how |= {"cache_seqlens": said, "page_table": made.table if cache.page else None}
        how |= {"sinks": made.sinks, "qv": qv, "scheduler_metadata": metadata_of(made)}
        how |= {"cu_seqlens_q": made.begins, "max_seqlen_q": longest} if drawn.packed else {}
        got = attnsweep.flash_attn_with_kvcache(q, k, v, *made.new, **how)
    return got if drawn.lse else (got, None)


def metadata_of(made: Made) -> Any:
    """What is made once a step, ahead of its calls; None if the call has none."""
    drawn, cache = made.drawn, made.drawn.cache
    if not drawn.metadata:
        return None
    if cache.latent:
        lengths = made.lengths if drawn.metadata == "step" else made.lengths.flip(0).clone()
        return attnsweep.mla_plan(lengths, cache.heads * drawn.tokens[0])
    more = drawn.refused == "the schedule of more requests"
    lengths = made.lengths + drawn.new
    lengths = torch.cat((lengths, lengths[:1])) if more else lengths
    sizes = (cache.batch + more, drawn.tokens[0], cache.capacity, cache.heads, cache.heads_kv, cache.head_dim)
    how = (DTYPES[cache.dtype], made.page, drawn.causal, drawn.window, drawn.softcap > 0)
    return attnsweep.get_scheduler_metadata(*sizes, lengths, *how, cache_dtype=made.k.dtype)


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class PagedNet(Net):
    """A sequence of calls on paged caches."""

    script: ClassVar[str] = "net_paged.py"
    open: ClassVar[dict[str, Any]] = {}

    def drawn(self, number: int) -> Paged:
        return draw(self.limits, self.seed, number)

    def made(self, drawn: Paged) -> Made:
        with MODES.get(drawn.mode, nullcontext)():
            return Made(drawn, self.device, self.kept)

    def counted(self) -> Counter[str]:
        return paged_attention.counters + mla.counters

    def explained(self, made: Made) -> str:
        return made.drawn.how

    def compared(self, made: Made) -> str:
        drawn = made.drawn
        with MODES.get(drawn.mode, nullcontext)():
            if drawn.refused:
                return self._refused(made)
            if drawn.how == "graph":
                return self._replayed(made)
            for step in range(drawn.steps):
                made.fill(step)
                answers = [self._answer(made)] if drawn.how == "eager" else self._on_two_streams(made)
                for answer in answers:
                    if what := self._checked(made, *answer):
                        return f"step {step}: {what}" if drawn.steps > 1 else what
        return ""

    def _answer(self, made: Made) -> Any:
        if made.around is not None:
            made.around.detach().fill_(7)
        return self.call(made)

    def _refused(self, made: Made) -> str:
        if made.drawn.metadata and metadata_of(made) is None:
            return ""
        out = "contiguous" if made.drawn.refused.startswith("out") else made.drawn.out
        known = copy.copy(made)
        known.drawn = replace(made.drawn, refused="", out=out)
        for each in (made, known, made):
            each.fill(0)
            if each is known:
                self.call(each)
                continue
            try:
                self.call(each)
            except ValueError:
                continue
            return f"nothing refuses {made.drawn.refused}"
        return ""

    def _replayed(self, made: Made) -> str:
        self._answer(made)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self.call(made)
        for step in range(1, 5):
            made.fill(step)
            if made.around is not None:
                made.around.fill_(7)
            graph.replay()
            if what := self._checked(made, *answer):
                return f"replay {step}: {what}"
        return ""

    def _on_two_streams(self, made: Made) -> list[Any]:
        made.out = made.around = None
        streams, answers = [torch.cuda.Stream() for _ in range(2)], []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                answers.append(self.call(made))
        torch.cuda.synchronize()
        return answers

    def _checked(self, made: Made, out: Any, lse: Any) -> str:
        drawn = made.drawn
        out = out.detach()
        if made.out is not None and out.data_ptr() != made.out.data_ptr():
            return "the output is not `out`"
        rows = out if drawn.packed else out.flatten(0, 1)
        rights = [*made.right()]
        want, unit = (torch.cat([getattr(r, name).transpose(0, 1) for r in rights]) for name in ("out", "unit"))
        most = OUT * want.norm(dim=-1, keepdim=True) + OUT_UNIT * unit + 1e-6
        if what := wrong_rows(rows, want, most):
            return f"output: {what}"
        if drawn.lse and (what := self._log_sums(made, lse, torch.cat([each.lse for each in rights], 1))):
            return f"log-sum-exps: {what}"
        for name, bits, wanted in zip("kv", made.bits(), made.wanted, strict=True):
            if not torch.equal(bits, wanted):
                at = (bits != wanted).flatten(2).any(-1).nonzero()[0].tolist()
                return f"{name}_cache is not what it must be, first in slot {at[1]} of page {at[0]}"
        if made.around is not None and made.out is not None:
            made.out.detach().fill_(7)
            if not bool((made.around == 7).all()):
                return "beside `out` something was written"
        return ""

    def _log_sums(self, made: Made, lse: Any, want: Any) -> str:
        shape = want.shape
        if not made.drawn.packed:
            batch = made.drawn.cache.batch
            shape = (batch, shape[0], shape[1] // batch)
            if lse.shape == shape:
                lse = lse.transpose(0, 1).flatten(1)
        if lse.shape != want.shape:
            return f"have shape {tuple(lse.shape)}, not {tuple(shape)}"
        none = want == -math.inf
        if not torch.equal(lse == -math.inf, none):
            return "are not -inf exactly where nothing is seen"
        off = (lse.double() - want).masked_fill(none, 0).abs()
        bad = ~(off <= 2e-3 + 1e-4 * want.masked_fill(none, 0).abs())
        return f"{int(bad.sum())} are wrong, most by {float(off.max()):.3g}" if bool(bad.any()) else ""


@contextmanager
def of_paged(asked: Any) -> Iterator[PagedNet]:
    """The net of paged caches. PyTorch answers what no kernel does: FlashAttention-3 reads what lies beside keys."""
    on_card = asked.device == "cuda"
    with patch.object(paged_others, "_flash_3", lambda: None), nullcontext() if on_card else paged_stand_in():
        yield PagedNet(CARD if on_card else STAND_IN, asked.device, asked.seed, call=invoke)


if __name__ == "__main__":
    sys.exit(main(of_paged, str(__doc__)))

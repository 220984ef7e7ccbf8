"""Calls of the operator drawn at random, with their tensors and what is right in float64. Needs PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

LAYOUTS = ("bhsd", "bshd", "packed", "cache", "one item", "one head", "2 bytes off", "odd rows", "head_dim apart")
DIRECTIONS = ("contiguous", "swapped", "expanded", "2 bytes off")
"""How the output's gradient lies."""
HIDES = ("-inf", "min", "min", "-1e30", "-1e9", "-1e4")
"""What an additive mask hides by; `min` is the least number of its dtype."""
SUMS = (*(2 * (by,) for by in HIDES), ("min", "-1e4"), ("-1e9", "-1e4"))
"""What whole rows are hidden by, twice."""
PATTERNS = ("causal", "bottom-right", "window", "right", "left", "documents", "hole", "half", "rows", "nothing")
SHAPES_OF_MASKS = ("whole", "of keys", "of queries", "two dimensions")
ORDERS = ("contiguous", "transposed", "sliced", "heads last", "expanded")
KINDS = {
    "attention": (
        "full",
        "causal",
        "offset",
        "window",
        "lengths",
        "ranges",
        "boolean",
        "boolean",
        "additive",
        "additive",
    ),
    "sdpa": ("full", "causal", "boolean", "additive"),
    "flash_attn_func": ("full", "causal", "window"),
    "attention_varlen": ("full", "causal", "window"),
    "flash_attn_varlen_func": ("full", "causal", "window"),
}
"""What each entry takes; `sdpa` is PyTorch's function while `enable` holds."""
VARLEN = ("attention_varlen", "flash_attn_varlen_func")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call."""

    batch: int = 2
    heads: int = 4
    heads_kv: int = 4
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "bf16"


@dataclass(frozen=True)
class Mask:
    """A mask's tensor. patterns: two, joined by `and` or `or`; hides: by what each hides, of an additive one.

    own: whether each item and each head has its own. lifted: what is added to the keys that are
    seen, besides noise.
    """

    patterns: tuple[str, str] = ("causal", "causal")
    join: str = "and"
    numbers: tuple[int, int] = (0, 0)
    own: tuple[bool, bool] = (False, False)
    form: str = "whole"
    order: str = "contiguous"
    empty_rows: bool = True
    hides: tuple[str, str] = ("-inf", "-inf")
    lifted: float = 0.0
    noise: bool = False
    dtype: str = "q"


@dataclass(frozen=True)
class Drawn:
    """A call. Its text, given to Python, makes it again.

    offset, window, lengths: arguments of the mask; of packed sequences, lengths are of queries and
    of keys. direction: how the output's gradient lies, None without gradients; needs: of which
    inputs. inputs: `apart` has all scores near -144. hidden_nan: what lies beyond lengths is NaN.
    kept: a mask's tensor, or lengths, are those of an earlier call, filled anew.
    """

    entry: str = "attention"
    kind: str = "full"
    sizes: Sizes = field(default_factory=Sizes)
    layouts: tuple[str, str, str] = ("bhsd", "bhsd", "bhsd")
    offset: int = 0
    window: tuple[int | None, int | None] = (None, None)
    causal: bool = False
    lengths: tuple[Any, ...] = ()
    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    direction: str | None = None
    needs: str = "qkv"
    inputs: str = "normal"
    hidden_nan: bool = False
    kept: bool = False
    longest: str = "said"
    seed: int = 0


# ---- drawing ----
@dataclass(frozen=True)
class Limits:
    """What calls are drawn from. known: sizes that kernels were tuned for. scores: most of a call.

    many_head_dim: of calls of 65536 items or heads.
    """

    known: tuple[Sizes, ...]
    seqlens: tuple[int, ...] = (1, 2, 7, 16, 17, 64, 65, 100, 128, 129, 192, 256, 300)
    batches: tuple[int, ...] = (1, 2, 3)
    head_dims: tuple[int, ...] = (64, 64, 64, 64, 8, 16, 40, 72, 96, 128, 192, 256)
    scores: int = 2**18
    many_head_dim: int = 8


HEADS = ((4, 4), (4, 4), (4, 2), (4, 2), (8, 2), (6, 3), (16, 1), (1, 1))


def draw(limits: Limits, seed: int, number: int) -> Drawn:
    """The call of this number of a sequence.

    Most calls of a sequence have one of a dozen sizes, and some differ from an earlier one in one
    thing alone: what was found for that one, a plan or a list, must not serve them where it is not theirs.
    """
    rng = random.Random(f"{seed} call {number}")
    if number and rng.random() < 0.35:
        return _changed(draw(limits, seed, number - rng.randint(1, min(8, number))), rng)
    if (which := rng.random()) < 0.15:
        return _served_bias(limits, rng) if which < 0.12 else _served_lengths(limits, rng)
    sizes = _sizes(limits, rng)
    if rng.random() < 0.8:
        sizes = _sizes(limits, random.Random(f"{seed} sizes {rng.randrange(12)}"))
    entry = rng.choice((*("attention",) * 5, *("sdpa",) * 3, "flash_attn_func", "flash_attn_func", *VARLEN))
    kind = rng.choice(KINDS[entry])
    many = rng.random() < 1 / 120
    if many:
        entry, kind = rng.choice(("attention", "sdpa")), rng.choice(("full", "causal"))
        (batch, heads), head_dim = rng.choice(((65536, 1), (1, 65536))), limits.many_head_dim
        sizes = Sizes(batch, heads, heads, 2, 2, head_dim, head_dim, sizes.dtype)
    call: dict[str, Any] = {"entry": entry, "kind": kind, "sizes": sizes}
    call |= _arguments(entry, kind, sizes, rng)
    layouts: tuple[str, ...] = (rng.choice(("bhsd", "bhsd", "bshd", "bshd", "packed")),) * 3
    if rng.random() < 0.4:
        layouts = tuple(rng.choice(LAYOUTS) for _ in range(3))
    call["layouts"] = ("bhsd",) * 3 if many else layouts
    call["scale"] = rng.choice((None, None, None, 0.3, 1.0, 0.05))
    if entry != "sdpa" and rng.random() < 0.25 and not many:
        call["softcap"] = rng.choice((2.5, 30.0))
    if entry in ("attention", "attention_varlen") and rng.random() < 0.2 and not many:
        call["sinks"] = True
    if many or rng.random() < 0.5:
        call["direction"] = rng.choice(DIRECTIONS)
        call["needs"] = "qkv" if rng.random() < 0.8 else rng.choice(("q", "k", "v", "qk", "kv"))
    if kind in ("full", "causal") and entry not in VARLEN and rng.random() < 0.2:
        call |= {"inputs": "apart", "scale": 1.0, "softcap": None}
    elif rng.random() < 0.15:
        call["inputs"] = "wide"
    if (mask := call.get("mask")) is not None and "-1e9" in mask.hides:
        # Beside it float32 rounds a score to a multiple of 64: no rounding of a score may decide which.
        call |= {"scale": None, "inputs": "normal"}
    if (kind in ("lengths", "ranges") or entry in VARLEN) and rng.random() < 0.4:
        call["hidden_nan"] = True
    call["kept"] = rng.random() < 0.5
    call["longest"] = rng.choice(("said", "said", "more") if entry != "attention_varlen" else ("said", "more", "none"))
    return Drawn(**call, seed=rng.randrange(10**6))


def _served_bias(limits: Limits, rng: random.Random) -> Drawn:
    """A call with an additive mask that kernels take, half of them with whole rows of what hides."""
    sizes = rng.choice([p for p in limits.known if p.head_dim == p.head_dim_v in (64, 128) and p.seqlen_q >= 64])
    mask = replace(
        _mask("additive", rng),
        form=rng.choice(("whole", "whole", "of keys", "two dimensions")),
        order=rng.choice(("contiguous", "contiguous", "sliced", "heads last")),
        empty_rows=True,
        dtype="q",
    )
    if rng.random() < 0.5:
        number, second = rng.randrange(3), rng.choice(("rows", "rows", rng.choice(PATTERNS)))
        mask = replace(mask, patterns=("rows", second), numbers=(number, number), hides=rng.choice(SUMS))
    return Drawn(
        entry=rng.choice(("attention", "attention", "attention", "sdpa")),
        kind="additive",
        sizes=sizes,
        layouts=(rng.choice(("bhsd", "bshd", "packed", "cache")),) * 3,
        mask=mask,
        kept=rng.random() < 0.5,
        seed=rng.randrange(10**6),
    )


def _served_lengths(limits: Limits, rng: random.Random) -> Drawn:
    """A call with lengths that kernels take, behind which all is NaN."""
    sizes = rng.choice([p for p in limits.known if p.head_dim == p.head_dim_v in (64, 128)])
    return Drawn(
        entry="attention",
        kind="lengths",
        sizes=sizes,
        layouts=(rng.choice(("bhsd", "bshd", "cache")),) * 3,
        hidden_nan=True,
        kept=rng.random() < 0.5,
        seed=rng.randrange(10**6),
        **_arguments("attention", "lengths", sizes, rng),
    )


def _changed(call: Drawn, rng: random.Random) -> Drawn:
    change = rng.choice(("values", "direction", "layouts", "mask"))
    new: dict[str, Any] = {"seed": rng.randrange(10**6), "kept": True}
    if change == "direction":
        new["direction"] = rng.choice(DIRECTIONS)
    elif change == "layouts" and call.sizes.batch * call.sizes.heads < 65536:
        new["layouts"] = tuple(rng.choice(LAYOUTS) for _ in range(3))
    elif change == "mask" and call.kind in ("boolean", "additive", "lengths", "ranges"):
        new |= _arguments(call.entry, call.kind, call.sizes, rng)
        if call.mask is not None:  # another in the same memory
            new["mask"] = replace(call.mask, patterns=new["mask"].patterns, numbers=new["mask"].numbers)
        else:
            new |= {"causal": call.causal, "window": call.window}
    return replace(call, **new)


def _sizes(limits: Limits, rng: random.Random) -> Sizes:
    if limits.known and rng.random() < 0.5:
        return rng.choice(limits.known)
    while True:
        heads, heads_kv = rng.choice(HEADS)
        seqlen_q, seqlen_k = rng.choice(limits.seqlens), rng.choice(limits.seqlens)
        seqlen_k = seqlen_q if rng.random() < 0.5 else seqlen_k
        batch, head_dim = rng.choice(limits.batches), rng.choice(limits.head_dims)
        head_dim_v = head_dim if rng.random() < 0.85 else rng.choice(limits.head_dims)
        if batch * heads * seqlen_q * seqlen_k <= limits.scores:
            of = (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)
            return Sizes(*of, rng.choice(("bf16", "bf16", "fp16")))


def _window(rng: random.Random, causal: bool = False) -> tuple[int | None, int | None]:
    side = (0, 1, 5, 30, 64, 127, 200, -1)
    left, right = rng.choice(side), 0 if causal else rng.choice(side)
    return (left, right)


def _arguments(entry: str, kind: str, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
    if entry in VARLEN:
        count, equal = rng.randint(1, 5), rng.random() < 0.5
        decoding = rng.random() < 0.3
        # All of them are no more than twice as long as one: what is right takes memory by the square.
        most_q, most_k = (max(1, 2 * n // (count + 1)) for n in (sizes.seqlen_q, sizes.seqlen_k))
        of_q = [0 if rng.random() < 0.2 else rng.randint(1, most_q) for _ in range(count)]
        of_q = [min(1, n) for n in of_q] if decoding else of_q
        of_q[rng.randrange(count)] = 1 if decoding else rng.randint(1, most_q)
        of_k = [0 if rng.random() < 0.2 else rng.randint(1, most_k) for _ in range(count)]
        of_k[rng.randrange(count)] = rng.randint(1, most_k)
        of_k = list(of_q) if equal and not decoding else of_k
        window = _window(rng) if kind == "window" else (None, None)
        causal = kind == "causal" or (kind == "window" and rng.random() < 0.3)
        return {"lengths": (tuple(of_q), tuple(of_k)), "window": window, "causal": causal}
    made: dict[str, Any] = {}
    if kind == "window":
        made["causal"] = rng.random() < 0.4
        made["window"] = _window(rng, made["causal"] and entry == "flash_attn_func")
    if kind in ("lengths", "ranges"):
        most = sizes.seqlen_k
        made["lengths"] = tuple(
            rng.randint(-2, most + 3) if kind == "lengths" else tuple(rng.randint(-2, most + 3) for _ in range(2))
            for _ in range(sizes.batch)
        )
        extra = rng.random()
        made |= {"causal": True} if extra < 0.3 else {"window": _window(rng)} if extra < 0.5 else {}
    if kind == "offset":
        made["offset"] = rng.choice((sizes.seqlen_k - sizes.seqlen_q, 0, -5, 3, rng.randint(-20, 60)))
    if kind in ("boolean", "additive"):
        made["mask"] = _mask(kind, rng)
    return made


def _mask(kind: str, rng: random.Random) -> Mask:
    alone = rng.random() < 0.5
    first = rng.choice(PATTERNS)
    return Mask(
        patterns=(first, first if alone else rng.choice(PATTERNS)),
        join=rng.choice(("and", "or")),
        numbers=(rng.randrange(300), rng.randrange(300)),
        own=(rng.random() < 0.4, rng.random() < 0.4),
        form=rng.choice((*SHAPES_OF_MASKS, "whole", "whole")),
        order=rng.choice((*ORDERS, "contiguous")),
        empty_rows=rng.random() < 0.5,
        hides=(rng.choice(HIDES), rng.choice(HIDES)),
        lifted=rng.choice((0.0, 0.0, 1e4)),
        noise=rng.random() < 0.5,
        dtype="float32" if kind == "additive" and rng.random() < 0.1 else "q",
    )


# ---- tensors ----
@dataclass
class Made:
    """The tensors of a call. q, k and v as (batch, heads, seqlen, head_dim), as the call gets them.

    seen: which keys each query sees, None for all; added: to scores. exact_inputs: as q, k and v,
    with zeros where they hide NaN. rows: which queries count, None for all.
    """

    drawn: Drawn
    q: Any
    k: Any
    v: Any
    seen: Any = None
    added: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    exact_inputs: tuple[Any, ...] = ()
    sinks: Any = None
    rows: Any = None


def make(drawn: Drawn, device: str, kept: dict[Any, Any]) -> Made:
    """The call's tensors on a device. kept: what earlier calls of a sequence left."""
    numbers = torch.Generator(device).manual_seed(drawn.seed)
    p, dtype = drawn.sizes, DTYPES[drawn.sizes.dtype]
    batch, seqlen_q, seqlen_k = p.batch, p.seqlen_q, p.seqlen_k
    if drawn.entry in VARLEN:
        tail = 5 if drawn.hidden_nan else 0
        batch, (seqlen_q, seqlen_k) = 1, (sum(each) + tail for each in drawn.lengths)

    def random_(*shape: int) -> Any:
        return torch.randn(shape, device=device, generator=numbers)

    values = [
        random_(batch, p.heads, seqlen_q, p.head_dim),
        random_(batch, p.heads_kv, seqlen_k, p.head_dim),
        random_(batch, p.heads_kv, seqlen_k, p.head_dim_v),
    ]
    if drawn.inputs == "wide":
        values[0] *= 4
    if drawn.inputs == "apart":
        values[0], values[1] = 1.5 + 0.1 * values[0], 0.1 * values[1] - 1.5
    values = [each.to(dtype) for each in values]
    values = [_shared(each, how) for each, how in zip(values, drawn.layouts, strict=True)]
    made = Made(drawn, *values)
    _see(made, random_, kept)
    hidden = None
    if drawn.hidden_nan and drawn.entry in VARLEN:
        hidden = torch.arange(seqlen_k, device=device) >= sum(drawn.lengths[1])
        made.rows = torch.arange(seqlen_q, device=device) < sum(drawn.lengths[0])
        hidden = hidden[:, None]
    elif drawn.hidden_nan:
        first, end = _ranges(drawn, device)
        keys = torch.arange(seqlen_k, device=device)
        hidden = ((keys < first) | (keys >= end)).view(batch, 1, seqlen_k, 1)
    given = [values[0], *values[1:]]
    if hidden is not None:
        made.exact_inputs = (values[0], *(each.masked_fill(hidden, 0) for each in values[1:]))
        given[1:] = [each.masked_fill(hidden, math.nan) for each in values[1:]]
        layouts = [how if not how.startswith("one") else "bhsd" for how in drawn.layouts]
    else:
        made.exact_inputs, layouts = tuple(values), list(drawn.layouts)
    made.q, made.k, made.v = (laid(each, how) for each, how in zip(given, layouts, strict=True))
    if drawn.sinks:
        made.sinks = random_(p.heads) * 3
    return made


def _shared(values: Any, layout: str) -> Any:
    """The values that a layout with a stride of 0 can hold."""
    own = {"one item": values[:1], "one head": values[:, :1]}.get(layout, values)
    return own.expand_as(values)


def laid(values: Any, layout: str) -> Any:
    """The values in memory of a layout."""
    batch, heads, seqlen, head_dim = values.shape

    def filled(view: Any) -> Any:
        return view.copy_(values)

    if layout == "bshd":
        return filled(values.new_empty(batch, seqlen, heads, head_dim).transpose(1, 2))
    if layout == "packed":  # beside others, as of one projection
        return filled(values.new_zeros(batch, seqlen, 3 * heads, head_dim)[:, :, heads : 2 * heads].transpose(1, 2))
    if layout == "cache":
        return filled(values.new_zeros(batch, heads, seqlen + 9, head_dim)[:, :, :seqlen])
    if layout == "one item":
        return values[:1].contiguous().expand_as(values)
    if layout == "one head":
        return values[:, :1].contiguous().expand_as(values)
    if layout == "odd rows":
        return filled(values.new_zeros(batch, heads, seqlen, head_dim + 1)[..., :head_dim])
    if layout == "head_dim apart":
        return filled(values.new_empty(batch, heads, head_dim, seqlen).mT)
    return off(values) if layout == "2 bytes off" else filled(values.new_empty(values.shape))


def off(values: Any) -> Any:
    """The values contiguous, from the second element of an allocation on."""
    return values.new_empty(values.numel() + 1)[1:].view(values.shape).copy_(values)


def direction_of(made: Made, out: Any) -> Any:
    """The output's gradient, as the call has it: 0 where a query does not count."""
    numbers = torch.Generator(out.device).manual_seed(made.drawn.seed + 1)
    values = torch.randn(out.shape, device=out.device, generator=numbers).to(out.dtype)
    if made.drawn.direction == "expanded":
        values = values[..., :1].expand(out.shape) if made.rows is None else values
    if made.rows is not None:  # (tokens, heads, head_dim)
        values = values * made.rows[:, None, None]
    if made.drawn.direction == "swapped":
        return values.transpose(-2, -3).contiguous().transpose(-2, -3)
    return off(values) if made.drawn.direction == "2 bytes off" else values


# ---- what queries see ----
def _ranges(drawn: Drawn, device: str) -> tuple[Any, Any]:
    """First key and end of each item, (batch, 1)."""
    of = torch.tensor(drawn.lengths, device=device).clamp(0, drawn.sizes.seqlen_k)
    first, end = (torch.zeros_like(of), of) if of.dim() == 1 else of.unbind(1)
    return first[:, None], end[:, None]


def _see(made: Made, random_: Callable[..., Any], kept: dict[Any, Any]) -> None:
    """Set what queries see, and the call's arguments that say so."""
    drawn, q, k = made.drawn, made.q, made.k
    rows, keys, device = q.shape[2], k.shape[2], q.device
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)
    if drawn.entry in VARLEN:
        _see_packed(made, i, j, kept)
        return
    seen, said = torch.ones(q.shape[0], 1, rows, keys, dtype=torch.bool, device=device), made.arguments
    bottom_right = drawn.entry == "flash_attn_func"
    own = i + keys - rows  # the key of a query, in windows
    if drawn.kind == "causal" or drawn.causal:
        said["causal" if bottom_right else "is_causal"] = True
        seen &= j <= (own if bottom_right else i)
    if drawn.window != (None, None):
        said["window_size" if bottom_right else "window"] = drawn.window
        seen &= _in_window(drawn.window, j - own)
    if drawn.kind == "offset":
        said["causal_offset"] = drawn.offset
        seen &= j <= i + drawn.offset
    if drawn.kind in ("lengths", "ranges"):
        first, end = _ranges(drawn, device)
        seen &= ((j >= first) & (j < end)).view(-1, 1, 1, keys)
        dtype = torch.int32 if drawn.seed % 2 else torch.int64
        said["key_lengths"] = _kept(drawn, torch.tensor(drawn.lengths, dtype=dtype, device=device), kept)
    if drawn.mask is not None:
        _see_mask(made, random_, kept)
    else:
        made.seen = None if bool(seen.all()) else seen


def _in_window(window: tuple[int | None, int | None], after: Any) -> Any:
    left, right = (None if side == -1 else side for side in window)
    inside = torch.ones_like(after, dtype=torch.bool)
    inside &= after >= -left if left is not None else inside
    return inside & (after <= right) if right is not None else inside


def _see_packed(made: Made, i: Any, j: Any, kept: dict[Any, Any]) -> None:
    drawn, said = made.drawn, made.arguments
    begins = [torch.tensor([0, *each]).cumsum(0) for each in drawn.lengths]
    seen = torch.zeros(len(i), len(j), dtype=torch.bool, device=i.device)
    for (q0, q1), (k0, k1) in zip(*(zip(at.tolist(), at[1:].tolist(), strict=False) for at in begins), strict=True):
        own = i[q0:q1] - q0 + (k1 - k0) - (q1 - q0)
        after = j[k0:k1] - k0 - own
        seen[q0:q1, k0:k1] = _in_window(drawn.window, after) & ((after <= 0) | (not drawn.causal))
    made.seen = seen
    dtype = torch.int32 if drawn.entry == "flash_attn_varlen_func" or drawn.seed % 2 else torch.int64
    tensors = [each.to(i.device, dtype) for each in begins]
    said["cu_seqlens_q"], said["cu_seqlens_k"] = (
        _kept(drawn, each, kept, name) for name, each in zip("qk", tensors, strict=True)
    )
    if drawn.longest != "none":
        most = [max(each) + (3 if drawn.longest == "more" else 0) for each in drawn.lengths]
        said["max_seqlen_q"], said["max_seqlen_k"] = most
    said |= {"causal": True} if drawn.causal else {}
    if drawn.window != (None, None):
        said["window_size" if drawn.entry == "flash_attn_varlen_func" else "window"] = drawn.window


def _kept(drawn: Drawn, values: Any, kept: dict[Any, Any], name: str = "") -> Any:
    """The values, in the tensor that an earlier call of such a kind got."""
    what = (name, values.shape, values.stride(), values.dtype)
    if drawn.kept and what in kept:
        return kept[what].copy_(values)
    kept[what] = values
    return values


def _pattern(name: str, number: int, i: Any, j: Any) -> Any:
    rows, keys = len(i), len(j)
    if name == "causal":
        return j <= i
    if name == "bottom-right":
        return j <= i + keys - rows
    if name == "window":
        return (i - j).abs() <= number % 200
    if name == "right":
        return (j < number % (keys + 1)).expand(rows, keys)
    if name == "left":
        return (j >= number % (keys + 1)).expand(rows, keys)
    if name == "documents":
        return i * 5 // rows == j * 5 // keys
    if name == "hole":
        return (i != number % rows) | (j != number % keys)
    if name == "half":
        return (i * 7919 + j * 104729 + number) % 13 < 6
    if name == "rows":
        return ((i + number) % 3 > 0).expand(rows, keys)
    return torch.ones(rows, keys, dtype=torch.bool, device=i.device)  # hides nothing


def _see_mask(made: Made, random_: Callable[..., Any], kept: dict[Any, Any]) -> None:
    drawn, mask = made.drawn, made.drawn.mask
    assert mask is not None
    batch, heads, rows, _ = made.q.shape
    keys = made.k.shape[2]
    rows_of, keys_of = 1 if mask.form == "of keys" else rows, 1 if mask.form == "of queries" else keys
    i = torch.arange(rows_of, device=made.q.device)[:, None]
    j = torch.arange(keys_of, device=made.q.device)
    sizes = [n if own and mask.form != "two dimensions" else 1 for n, own in zip((batch, heads), mask.own, strict=True)]
    parts = []
    for name, number in zip(mask.patterns, mask.numbers, strict=True):
        every = [_pattern(name, number + 31 * n, i, j) for n in range(sizes[0] * sizes[1])]
        parts.append(torch.stack(every).view(*sizes, rows_of, keys_of))
    if not mask.empty_rows:
        for part in parts:
            part[..., 0] = True
    if drawn.kind == "boolean":
        seen = parts[0] & parts[1] if mask.join == "and" else parts[0] | parts[1]
        given = _ordered(seen, mask)
        made.seen = seen.expand(batch, heads, rows, keys)
    else:
        dtype = made.q.dtype if mask.dtype == "q" else torch.float32
        added = random_(*sizes, rows_of, keys_of).to(dtype) if mask.noise else parts[0].new_zeros(1).to(dtype)
        if mask.lifted:
            added = added.masked_fill(parts[0], mask.lifted)
        for part, by in zip(parts, mask.hides, strict=True):
            least = torch.finfo(dtype).min if by == "min" else float(by)
            added = added + torch.zeros(part.shape, dtype=torch.float32, device=part.device).masked_fill(
                ~part, least
            ).to(dtype)
        given = _ordered(added, mask)
        made.added = added.expand(batch, heads, rows, keys)
    given = given[0, 0] if mask.form == "two dimensions" else given
    made.arguments["attn_mask"] = _kept(drawn, given, kept) if mask.order != "expanded" else given


def _ordered(values: Any, mask: Mask) -> Any:
    """A mask's values in memory of some order."""
    if mask.order == "transposed":
        return values.mT.contiguous().mT
    if mask.order == "sliced":
        return torch.cat((values, values), -1)[..., values.shape[-1] :]
    if mask.order == "heads last":  # as T5 makes its bias
        return values.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    if mask.order == "expanded":
        return values[:1].contiguous().expand_as(values) if _alike(values) else values.contiguous()
    return values.contiguous()


def _alike(values: Any) -> bool:
    return bool((values == values[:1]).all())


# ---- what is right ----
@dataclass
class Exact:
    """Output and gradients in float64, and sizes of what they are summed from, row by row.

    direction: the output's gradient.
    """

    out: Any
    out_unit: Any
    grads: dict[str, Any]
    units: dict[str, Any]
    empty: Any


def exact(made: Made, direction: Any = None) -> Exact:
    """Score and mask are added in float32, the softmax is in float64; 0 for a query that sees no key.

    direction: (batch, heads, seqlen_q, head_dim_v). Gradients of sinks are `s`.
    """
    drawn, (q, k, v) = made.drawn, (each.double() for each in made.exact_inputs)
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scale = q.shape[3] ** -0.5 if drawn.scale is None else drawn.scale
    scores = q @ k.mT * scale
    slope = None
    if drawn.softcap:
        capped = torch.tanh(scores / drawn.softcap)
        scores, slope = drawn.softcap * capped, 1 - capped**2
    if made.added is not None:
        scores = (scores.float() + made.added.float()).double()
    if made.seen is not None:
        scores = scores.masked_fill(~made.seen, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    top = scores.amax(-1, keepdim=True).masked_fill(empty, 0)
    sink = None
    if made.sinks is not None:
        sink = made.sinks.double()[:, None, None].expand_as(top)
        top = torch.maximum(top, sink)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True) + (0 if sink is None else (sink - top).exp())
    p = p / total.masked_fill(total == 0, 1)
    # Weights and sums that 16 bits make 0, or say with a few bits, are of keys that are seen.
    least = torch.finfo(DTYPES[drawn.sizes.dtype]).tiny
    seen = scores > -math.inf
    about = p + seen * max(least / 8, 1e-30)

    def norm(each: Any) -> Any:
        return each.pow(2).sum(-1, keepdim=True)

    def unit(squares: Any) -> Any:
        return squares.sqrt() + (squares > 0) * least

    out = p @ v
    found = Exact(out, unit(about**2 @ norm(v)), {}, {}, empty)
    if direction is None:
        return found
    grad = direction.double()
    dp, delta = grad @ v.mT, (grad * out).sum(-1, keepdim=True)
    # A score's gradient is rounded too, behind a softcap too and times the scale: fp16 says it to 3e-8, least / 2048,
    # of which a row sums many.
    ds, rough = p * (dp - delta), (about * dp) ** 2
    if slope is not None:
        ds, rough = ds * slope, rough * slope**2
    rough = rough + (seen * (least / 32 / min(1.0, abs(scale) or 1.0))) ** 2
    # What rounding the output makes delta uncertain by, in units of that rounding.
    unsure = (grad * out).pow(2).sum(-1, keepdim=True).sqrt()

    def of_keys(each: Any) -> Any:
        return each.unflatten(1, (each.shape[1] // group, group)).sum(2)

    found.grads = {"q": ds @ k * scale, "k": of_keys(ds.mT @ q) * scale, "v": of_keys(p.mT @ grad)}
    found.units = {
        "q": scale * (unit(rough @ norm(k)) + unsure * norm(p @ k).sqrt()),
        "k": scale * unit(of_keys((rough + (about * unsure) ** 2).mT @ norm(q))),
        "v": unit(of_keys((about**2).mT @ norm(grad))),
    }
    return found

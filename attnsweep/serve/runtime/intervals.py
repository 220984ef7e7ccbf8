"""Masks that are an interval of keys for each query, said by numbers and lengths: no dense mask."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from attnsweep.core.layouts import DENSE, Dense, Padded
from attnsweep.core.masks import FULL, Boolean, Interval, Mask
from attnsweep.core.scores import PLAIN as PLAIN_SCORES
from attnsweep.core.scores import Scores

from .call import Call, number
from .changed_scores import checked

_UNKNOWN = Padded("right", 100)
"""The layout of lengths that the device alone knows: they count as if every key were seen."""
Diagonals = tuple[int | None, int | None]
"""(low, high): query i sees the keys from i + low to i + high; None: all on that side."""


def forms(
    limits: Diagonals, seqlen_q: int, seqlen_k: int, padded: bool, scores: Scores = PLAIN_SCORES
) -> list[tuple[Mask, Dense | Padded, Scores]]:
    """(mask, layout, scores) forms of the call that a kernel may serve, the best first.

    The last is a boolean mask: a kernel of these has any diagonals, and queries without a key,
    which the shipped code for causal masks does not expect.
    """
    (low, high), layout = limits, _UNKNOWN if padded else DENSE
    found: list[tuple[Mask, Dense | Padded, Scores]] = []
    for top_left, diagonal in ((False, seqlen_k - seqlen_q), (True, 0)):
        left = None if low is None else diagonal - low
        right = None if high is None else high - diagonal
        if min(left or 0, right or 0) >= 0:
            mask = Interval(left, right, top_left).of_lengths(seqlen_q, seqlen_k)
            if padded or mask.kind == "window" or not mask.empty_rows(seqlen_q, seqlen_k):
                found.append((mask, layout, scores))
    return [*found[:1], (Boolean(FULL, of_item=padded), DENSE, scores)]


def opened(low: Any, high: Any, seqlen_q: int, seqlen_k: int) -> Diagonals:
    """Diagonals, open on a side that hides nothing: PyTorch's own attention takes no mask then."""
    low = None if low is None or low <= 1 - seqlen_q else low
    return low, None if high is None or high >= seqlen_k - 1 else high


def dense(
    limits: Diagonals, query: torch.Tensor, key: torch.Tensor, lengths: torch.Tensor | None
) -> torch.Tensor:
    """The boolean mask that says the same.

    It broadcasts to (batch, heads, seqlen_q, seqlen_k).
    """
    (low, high), keys = limits, torch.arange(key.shape[-2], device=query.device)
    parts = []
    if low is not None or high is not None:
        distance = keys - torch.arange(query.shape[-2], device=query.device)[:, None]
        parts += [] if low is None else [distance >= low]
        parts += [] if high is None else [distance <= high]
    if lengths is not None:
        first, end = (None, lengths) if lengths.dim() == 1 else lengths.unbind(1)
        parts += [] if first is None else [keys >= first[:, None, None, None]]
        parts += [keys < end[:, None, None, None]]
    return functools.reduce(torch.logical_and, parts or [keys >= 0])


def dense_of_packed(call: Call) -> torch.Tensor:
    """The boolean mask of packed sequences: (tokens_q, tokens_k)."""
    (of_q, of_k, _), (left, right) = call.mask, call.limits or (None, None)
    tokens = call.query.shape[2], call.key.shape[2]
    rows, keys = (torch.arange(n, device=of_q.device) for n in tokens)
    own = torch.searchsorted(of_q[1:].contiguous(), rows, right=True, out_int32=True)
    inside = (own < call.mask.sequences) & (rows >= of_q[0])
    own = own.clamp(max=call.mask.sequences - 1).long()
    first, end = of_k[own][:, None], of_k[own + 1][:, None]
    mask = (keys >= first) & (keys < end) & inside[:, None]
    after = keys - (rows + of_k[own + 1] - of_q[own + 1])[:, None]  # of a query's own key
    mask = mask if left is None else mask & (after >= -left)
    return mask if right is None else mask & (after <= right)


def scanned(
    name: str,
    limits: Diagonals,
    query: torch.Tensor,
    key: torch.Tensor,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The scan's input by name: `mask`, contiguous, or `key_range`, int32 (batch, 2)."""
    if name == "mask":
        items = 1 if lengths is None else query.shape[0]
        whole = (items, 1, query.shape[2], key.shape[2])
        return dense(limits, query, key, lengths).expand(whole).contiguous()
    if lengths is None:
        raise AssertionError
    if lengths.dim() == 1:
        lengths = torch.stack((torch.zeros_like(lengths), lengths), 1)
    return lengths.clamp(0, key.shape[2]).to(torch.int32).contiguous()


def understood(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
    given: tuple[Any, Any, Any],
    softcap: Any,
    sinks: Any,
    keep: bool,
) -> Call:
    """The Call that `attention`'s arguments describe.

    Without limits and changed scores, PyTorch checks them. given: window, causal_offset and
    key_lengths. Raises TypeError or ValueError.
    """
    mask, limits = attn_mask, None
    if any(each is not None for each in given):  # to compare tuples compares tensors
        is_causal, limits = diagonals(query, key, attn_mask, is_causal, *given)
        mask = given[2]
    cap, sinks = checked(softcap, sinks, query, attn_mask, is_causal)
    if (cap or sinks is not None) and limits is mask is None:
        is_causal, limits = False, (None, 0 if is_causal else None)
    how = (is_causal, number(scale), enable_gqa, limits, cap, sinks, dropout_p)
    return Call(query, key, value, mask, *how, keep=keep)


def diagonals(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: Any,
    is_causal: bool,
    window: Any,
    causal_offset: Any,
    key_lengths: Any,
) -> tuple[bool, Diagonals | None]:
    """What these arguments of `attention` let queries see, but for key_lengths, which are checked.

    As is_causal, if that alone says it, and diagonals otherwise. Raises TypeError or ValueError.
    """
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is given beside window, causal_offset or key_lengths: leave these out, and "
            "hide in attn_mask what they hide"
        )
    if key_lengths is not None:
        _check(key_lengths, query)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    low: Any = None
    high = 0 if is_causal else None
    if causal_offset is not None:
        high = _whole("causal_offset", causal_offset)
    if window is not None:
        diagonal = seqlen_k - seqlen_q
        left, right = sides(window)
        low = None if left is None else diagonal - left
        if right is not None:
            high = diagonal + right if high is None else min(high, diagonal + right)
    low, high = opened(low, high, seqlen_q, seqlen_k)
    if key_lengths is None and low is None and (high is None or high == 0):
        return high == 0, None
    return False, (low, high)


def check_integers(name: str, tensor: Any, query: torch.Tensor) -> None:
    """Raise TypeError or ValueError for what is no tensor of integers on query's device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor on {query.device}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {tensor.dtype}, not torch.int32 or torch.int64")
    if tensor.device != query.device:
        raise ValueError(
            f"{name} is on {tensor.device}, and query on {query.device}: move it there once, "
            "before the layers, since each copy waits"
        )


def _check(lengths: Any, query: torch.Tensor) -> None:
    check_integers("key_lengths", lengths, query)
    if query.dim() != 4:
        raise ValueError(
            f"with key_lengths, query is (batch, heads, seqlen, head_dim), not of "
            f"{query.dim()} dimensions"
        )
    # Size by size: a compiler of PyTorch 2.11 compares no tuples of sizes that vary.
    batch, sizes = query.shape[0], lengths.shape
    of_one = lengths.dim() == 1 or (lengths.dim() == 2 and sizes[1] == 2)
    if not of_one or sizes[0] != batch:
        raise ValueError(f"key_lengths is {tuple(sizes)}, not ({batch},) or ({batch}, 2)")


def sides(window: Any) -> tuple[int | None, int | None]:
    """How many keys a window shows before and after a query's own; None is all.

    Raises TypeError or ValueError.
    """
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {window!r}, not (left, right), such as (512, 0)")
    return _side(window, window[0]), _side(window, window[1])


def sides_of_flash_attn(window_size: Any) -> tuple[Any, Any]:
    """The sides of a window as flash_attn takes it: two numbers, also in a tensor."""
    sides = window_size.tolist() if isinstance(window_size, torch.Tensor) else window_size
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise TypeError(f"window_size is {window_size!r}, not (left, right), such as (512, 0)")
    return sides[0], sides[1]


def _side(window: Any, side: Any) -> int | None:
    """A side of a window; None if it is open."""
    if side is None:
        return None
    size = side if type(side) is int else _whole(f"window {window!r}", side)
    if size < -1:
        raise ValueError(f"window is {window!r}: its sides are at least 0, or -1 or None for open")
    return None if size == -1 else size


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}: {number!r} is no whole number") from None

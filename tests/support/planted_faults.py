"""Faults of an operator, of the kinds that were found in use, for the net of random calls. Needs PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from drawn_calls import VARLEN, Made
from net import as_heads_first, invoke

Call = Callable[..., Any]
"""Makes a call: call(made, q, k, v)."""


def _with(made: Made, **arguments: Any) -> Made:
    return replace(made, arguments={**made.arguments, **arguments})


def _after(change: Callable[[Made, Any, Any, Any, Any], Any]) -> Callable[[], Call]:
    """A fault that changes the output: change(made, q, k, v, out)."""

    def planted(made: Made, q: Any, k: Any, v: Any) -> Any:
        return change(made, q, k, v, invoke(made, q, k, v))

    return lambda: planted


def _ahead(change: Callable[[Made, Any, Any, Any], tuple[Any, ...]]) -> Callable[[], Call]:
    """A fault that changes what the call gets: change(made, q, k, v)."""
    return lambda: lambda made, q, k, v: invoke(*change(made, q, k, v))


def _heads_first(made: Made, out: Any, change: Callable[[Any], Any]) -> Any:
    """The output, changed as (batch, heads, seqlen, head_dim)."""
    return as_heads_first(made.drawn, change(as_heads_first(made.drawn, out)).contiguous()).reshape(out.shape)


def _with_hook(tensor: Any, hook: Callable[[Any], Any]) -> Any:
    """The tensor, or what stands for it, whose gradient goes through a hook."""
    if tensor.requires_grad:
        tensor = tensor.view_as(tensor)
        tensor.register_hook(hook)
    return tensor


def _least(made: Made) -> Any:
    """Where an additive mask has the least finite numbers of 16 bits."""
    return (made.added < -1e29) & (made.added > -math.inf)


def _mean(made: Made, v: Any) -> Any:
    """The mean of v, for each head of the queries."""
    return v.mean(2, keepdim=True).repeat_interleave(made.q.shape[1] // v.shape[1], 1)


def _by_rows(
    which: Callable[[Made], Any], instead: Callable[[Made, Any, Any, Any], Any] = lambda *_: math.nan
) -> Callable[[], Call]:
    """A fault in rows of additive masks. which: (…, seqlen_q, 1); instead: their output, of q, k and v."""

    def change(made: Made, q: Any, k: Any, v: Any, out: Any) -> Any:
        if made.added is None or not bool(which(made).any()):
            return out
        other = torch.as_tensor(instead(made, q, k, v), dtype=out.dtype)
        return _heads_first(made, out, lambda o: torch.where(which(made), other, o))

    return _after(change)


def _far(made: Made) -> Any:
    """Rows of -1e9 and less, of which float32 sums with scores are alike."""
    most = made.added.float().amax(-1, keepdim=True)
    return (most < -5e8) & (most > -math.inf)


def _added_up(made: Made) -> Any:
    """Rows that hide all by sums of finite numbers: the mask holds -inf, which nobody wrote."""
    finite = made.drawn.mask is not None and "-inf" not in made.drawn.mask.hides
    return (made.added == -math.inf).all(-1, keepdim=True) & finite


def _hidden_by_1e4(made: Made) -> Any:
    return (made.added.float() < -5e3).all(-1, keepdim=True) & (made.added > -5e4).any(-1, keepdim=True)


def without_mask(made: Made, q: Any, k: Any, v: Any) -> Any:
    return invoke(replace(made, arguments={}), q, k, v)


def softcap_with_nothing_hidden(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    if made.drawn.softcap and made.seen is None and made.added is None and not q.requires_grad:
        raise TypeError("reduce() of empty iterable with no initial value")
    return made, q, k, v


def idle_slot(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    if made.drawn.entry in VARLEN and max(made.drawn.lengths[0]) == 1 and 0 in made.drawn.lengths[0]:
        raise RuntimeError("shape is invalid for input")
    return made, q, k, v


def no_gradient_of_nothing(made: Made, q: Any, k: Any, v: Any, out: Any) -> Any:
    unseen = made.seen is not None and not bool(made.seen.any())
    return out.detach() if unseen else out


def another_layouts_plan() -> Call:
    """The backward takes the plan that was made for the first layout of the output's gradient."""
    first: dict[Any, Any] = {}

    def planted(made: Made, q: Any, k: Any, v: Any) -> Any:
        out = invoke(made, q, k, v)
        what = (made.drawn.entry, *((t.shape, t.stride()) for t in (q, k, v)))

        def hook(grad: Any) -> Any:
            strides = first.setdefault(what, grad.stride())
            return grad if strides == grad.stride() else grad.flip(-1, -2)

        return _with_hook(out, hook)

    return planted


def hidden_nan_leaks(made: Made, q: Any, k: Any, v: Any, out: Any) -> Any:
    return out + 0 * v.detach().sum().to(out.dtype)


def unaligned_is_misread(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    q, k, v = (t.roll(1, -1) if t.data_ptr() % 16 and t.shape[-1] > 1 else t for t in (q, k, v))
    return made, q, k, v


def empty_rows_see_all(made: Made, q: Any, k: Any, v: Any, out: Any) -> Any:
    if made.seen is None:
        return out
    empty = ~made.seen.any(-1, keepdim=True)
    return _heads_first(made, out, lambda o: torch.where(empty.expand_as(o), _mean(made, v), o))


def far_scores_have_nan_gradients(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    if float(q.detach().float().mean() * k.detach().float().mean()) < -2:
        q = _with_hook(q, lambda grad: grad * math.nan)
    return made, q, k, v


def no_backward_of_many(made: Made, q: Any, k: Any, v: Any, out: Any) -> Any:
    def refuse(_: Any) -> None:
        raise RuntimeError("grid is too large")

    return _with_hook(out, refuse) if q.shape[0] * q.shape[1] >= 65536 else out


def aligned_top_left(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """The mask of FlashAttention's functions, as PyTorch aligns it."""
    if made.drawn.entry == "flash_attn_func" and made.arguments.get("causal") and q.shape[2] < k.shape[2]:
        kept = k.shape[2] - q.shape[2]
        return made, q, k[:, :, :-kept], v[:, :, :-kept]
    return made, q, k, v


def stale(*names: str) -> Callable[[], Call]:
    """What was made of a tensor is used again after it was written to."""

    def begin() -> Call:
        first: dict[int, tuple[Any, Any]] = {}

        def planted(made: Made, q: Any, k: Any, v: Any) -> Any:
            changed = {}
            for name in names:
                tensor = made.arguments.get(name)
                if tensor is not None:
                    before = first.setdefault(id(tensor), (tensor, tensor.clone()))
                    changed[name] = before[1] if before[0] is tensor else tensor
            return invoke(_with(made, **changed), q, k, v)

        return planted

    return begin


def window_too_wide(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    name = "window_size" if "window_size" in made.arguments else "window"
    left, right = made.arguments.get(name, (None, None))
    return (made if left in (None, -1) else _with(made, **{name: (left + 1, right)})), q, k, v


def heads_in_wrong_groups(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return (made, q, k.roll(1, 1), v) if q.shape[1] != k.shape[1] else (made, q, k, v)


def scale_is_forgotten(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return replace(made, drawn=replace(made.drawn, scale=None)), q, k, v


def sinks_are_forgotten_in_training(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return (replace(made, sinks=None) if q.requires_grad else made), q, k, v


def softcaps_slope_is_forgotten(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return made, _with_hook(q, lambda grad: grad * 1.5) if made.drawn.softcap else q, k, v


def strides_of_a_mask_are_ignored(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    mask = made.arguments.get("attn_mask")
    if mask is not None and not mask.is_contiguous():
        read = mask.as_strided(mask.shape, mask.new_empty(mask.shape).stride()) if 0 not in mask.stride() else mask
        made = _with(made, attn_mask=read)
    return made, q, k, v


def masks_of_heads_are_the_first_ones(made: Made, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    mask = made.arguments.get("attn_mask")
    if mask is not None and mask.dim() == 4:
        made = _with(made, attn_mask=mask[:, :1])
    return made, q, k, v


def last_rows_are_lost(made: Made, q: Any, k: Any, v: Any, out: Any) -> Any:
    rows = torch.arange(q.shape[2], device=q.device)[:, None] < q.shape[2] // 8 * 8
    return _heads_first(made, out, lambda o: o * rows)


def first_answer_again() -> Call:
    """Outputs that a memory of the operator's holds are handed out again."""
    first: dict[Any, Any] = {}

    def planted(made: Made, q: Any, k: Any, v: Any) -> Any:
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return invoke(made, q, k, v)
        what = (str(replace(made.drawn, seed=0)), q.data_ptr())
        if what not in first:
            first[what] = invoke(made, q, k, v)
        return first[what]

    return planted


def steps_of_one_place() -> Call:
    """After many calls alike the output is another one."""
    last, count = None, 0

    def planted(made: Made, q: Any, k: Any, v: Any) -> Any:
        nonlocal last, count
        own = made.drawn, q.requires_grad
        last, count = own, count + 1 if own == last else 0
        out = invoke(made, q, k, v)
        return out * 1.5 if count > 32 else out

    return planted


PLANTED: dict[str, Callable[[], Call]] = {
    "1 a finite mask": _by_rows(lambda made: _least(made).any(-1, keepdim=True)),
    "2 a row of least numbers": _by_rows(lambda made: _least(made).all(-1, keepdim=True)),
    "two masks of least numbers": _by_rows(_added_up, lambda made, q, k, v: _mean(made, v)),
    "a row of -1e4 is hidden": _by_rows(_hidden_by_1e4, lambda *_: 0.0),
    "a row of -1e9 is as without": _by_rows(_far, without_mask),
    "3 softcap alone": _ahead(softcap_with_nothing_hidden),
    "4 an idle slot": _ahead(idle_slot),
    "5 no gradient where nothing is seen": _after(no_gradient_of_nothing),
    "6 another layout's plan": another_layouts_plan,
    "7 NaN where nothing is seen": _after(hidden_nan_leaks),
    "8 unaligned": _ahead(unaligned_is_misread),
    "many steps of one place": steps_of_one_place,
    "9 empty rows": _after(empty_rows_see_all),
    "10 scores far below 0": _ahead(far_scores_have_nan_gradients),
    "11 65536 items or heads": _after(no_backward_of_many),
    "alignment": _ahead(aligned_top_left),
    "a stale mask": stale("attn_mask"),
    "stale lengths": stale("key_lengths", "cu_seqlens_q", "cu_seqlens_k"),
    "a window": _ahead(window_too_wide),
    "groups": _ahead(heads_in_wrong_groups),
    "scale": _ahead(scale_is_forgotten),
    "sinks": _ahead(sinks_are_forgotten_in_training),
    "softcap's gradient": _ahead(softcaps_slope_is_forgotten),
    "strides of a mask": _ahead(strides_of_a_mask_are_ignored),
    "masks of heads": _ahead(masks_of_heads_are_the_first_ones),
    "last rows": _after(last_rows_are_lost),
    "an old answer": first_answer_again,
}
"""Makes the operator with a fault: of each finding by its number, and others."""

"""Faults of functions for paged caches, for their net of random calls. Needs PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import net_paged
import torch
from net_paged import Made, invoke

from attnsweep.serve import paged_attention

Call = Callable[[Made], Any]


def _with(made: Made, **facts: Any) -> Made:
    """The call with other tensors."""
    other = copy.copy(made)
    vars(other).update(facts)
    return other


def _ahead(change: Callable[[Made], dict[str, Any]]) -> Callable[[], Call]:
    """A fault that changes what the call gets."""
    return lambda: lambda made: invoke(_with(made, **change(made)))


def _after(change: Callable[[Made, Any], None]) -> Callable[[], Call]:
    """A fault that changes the output in its place."""

    def planted(made: Made) -> Any:
        out, lse = invoke(made)
        with torch.no_grad():
            change(made, out)
        return out, lse

    return lambda: planted


def _whole_pages(made: Made) -> dict[str, Any]:
    return {"lengths": made.lengths - (made.lengths % made.page) * (made.lengths > made.page)}


def _one_less_at_borders(made: Made) -> dict[str, Any]:
    return {"lengths": made.lengths - ((made.lengths % made.page == 0) & (made.lengths > 1)).int()}


def _appended_in_other_slots(made: Made) -> dict[str, Any]:
    return {"new": [each if each is None else each.roll(1, 1) for each in made.new]}


def _heads_before_slots(made: Made) -> dict[str, Any]:
    """Strides of a cache whose heads come before its slots are taken for those of slots before heads."""
    if made.drawn.cache.order != "hnd":
        return {}
    _, _, heads, columns = made.k.shape
    steps = (made.k.stride(0), heads * columns, columns, 1)
    return {name: getattr(made, name).as_strided(made.k.shape, steps) for name in "kv"}


def _window_too_wide(made: Made) -> dict[str, Any]:
    left, right = made.drawn.window
    return {"drawn": replace(made.drawn, window=(left + (left >= 0), right))}


def _first(*names: str) -> Callable[[], Call]:
    """What was read of a tensor is used again after it was written to."""

    def begin() -> Call:
        first: dict[Any, Any] = {}

        def planted(made: Made) -> Any:
            kept = {}
            for name in names:
                tensor = getattr(made, name)
                key = (name, tensor.data_ptr(), tensor.shape, made.drawn.new)
                kept[name] = first.setdefault(key, tensor.clone()) if not made.drawn.refused else tensor
            return invoke(_with(made, **kept))

        return planted

    return begin


def metadata_of_an_earlier_step() -> Call:
    first: dict[Any, Any] = {}
    make = net_paged.metadata_of

    def made_once(made: Made) -> Any:
        drawn = made.drawn
        key = (drawn.cache, drawn.tokens, drawn.window, drawn.causal, drawn.softcap > 0, drawn.refused)
        if key not in first:
            first[key] = make(made)
        return first[key] if drawn.metadata else None

    def planted(made: Made) -> Any:
        with patch.object(net_paged, "metadata_of", made_once):
            return invoke(made)

    return planted


def _unchecked(function: str) -> Callable[[], Call]:
    """A function that refuses what cannot be refuses nothing."""

    def planted(made: Made) -> Any:
        with patch.object(paged_attention, function, lambda *_: None):
            return invoke(made)

    return lambda: planted


def output_as_if_contiguous(made: Made) -> Any:
    if made.out is None or made.out.is_contiguous() or made.drawn.refused:
        return invoke(made)
    out, lse = invoke(_with(made, out=None))
    with torch.no_grad():
        made.out.as_strided(out.shape, out.stride()).copy_(out)
    return made.out, lse


def _packed_one_late(made: Made) -> dict[str, Any]:
    begins = made.begins.clone()
    begins[1:-1] += (begins[1:-1] < begins[-1]).int()
    return {"begins": begins}


def after_many_calls_alike() -> Call:
    last, count = None, 0

    def planted(made: Made) -> Any:
        nonlocal last, count
        last, count = made.drawn, count + 1 if made.drawn is last else 0
        return invoke(_with(made, lengths=(made.lengths - 1).clamp(min=0)) if count > 32 else made)

    return planted


def an_outputs_memory_is_used_again() -> Call:
    last: dict[Any, Any] = {}

    def planted(made: Made) -> Any:
        out, lse = invoke(made)
        if made.out is not None or made.drawn.refused:
            return out, lse
        before = last.get(key := (out.shape, out.dtype))
        last[key] = out
        return out if before is None else before, lse

    return planted


PLANTED: dict[str, Callable[[], Call]] = {
    "the last page": _ahead(_whole_pages),
    "a length at a page's border": _ahead(_one_less_at_borders),
    "a neighbour's scale": _ahead(
        lambda made: {"scales": [each if each is None else each.roll(1, -1) for each in made.scales]}
    ),
    "stale metadata": metadata_of_an_earlier_step,
    "a schedule of other calls": _unchecked("_fits"),
    "an output over q": _unchecked("check_output"),
    "appended in other slots": _ahead(_appended_in_other_slots),
    "strides of the output": lambda: output_as_if_contiguous,
    "strides of a cache": _ahead(_heads_before_slots),
    "a stale table": _first("table"),
    "stale lengths": _first("lengths"),
    "sinks": _ahead(lambda made: {"sinks": None}),
    "a window": _ahead(_window_too_wide),
    "a packed call's borders": _ahead(_packed_one_late),
    "no keys": _after(lambda made, out: out.masked_fill_(out == 0, 0.5)),
    "NaN beside the keys": _after(lambda made, out: out.add_(0 * made.k.float().sum() * math.inf)),
    "many calls alike": after_many_calls_alike,
    "an old output": an_outputs_memory_is_used_again,
}
"""Makes the functions with a fault. What no check refuses may write beside tensors: those are for the CPU."""
ON_CPU = ("a schedule of other calls",)

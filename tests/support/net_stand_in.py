"""The operator with kernels of each kind over a fake driver, for calls at random on the CPU. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attending import BackwardKernel
from fake_driver import FakeDriver
from operators import aten, flash_backward, make
from packages import H100, PLAIN_BACKWARD, shape, winner
from unguarded import unguarded

from attnsweep.core.layouts import Packed, Padded
from attnsweep.core.masks import CAUSAL, FULL, Interval, Mask
from attnsweep.core.ops import BACKWARD
from attnsweep.core.scores import Scores
from attnsweep.serve.runtime import package


def flash_forward(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, causal: bool = False, *_: Any, scale: float | None = None
) -> Any:
    """PyTorch's flash attention, which the CPU has under another name."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = own(q, k, v, dropout_p, causal, scale=scale)
    none = q.new_empty((), dtype=torch.int64)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, q.new_empty(0)


def winners() -> list[Any]:
    """Winners for each kind of mask, layout and scores, and for backward.

    None hides nothing and has a softcap: kernels of masks serve those calls.
    """
    made = []
    for heads_kv in (4, 2):
        one = shape(2, 4, 128, heads_kv=heads_kv)
        packed = replace(shape(1, 4, 256, heads_kv=heads_kv), layout=Packed(3))
        masks: list[Mask] = [FULL, CAUSAL, Interval(30, 0), *(FULL.as_boolean(own) for own in ((), ("item",)))]
        scores = (Scores(), Scores(2.0), Scores(0, True), Scores(2.0, True))
        of = [replace(one, mask=mask, scores=how) for mask in masks for how in scores]
        of = [each for each in of if each.mask != FULL or not each.scores.softcap]
        of += [replace(one, scores=Scores(bias=own)) for own in ((), ("item",), ("head",), ("item", "head"))]
        padded = Padded("right", 40)
        of += [replace(one, layout=padded), replace(one, mask=CAUSAL, layout=padded)]
        of += [replace(packed, mask=mask, scores=how) for mask in (FULL, CAUSAL) for how in scores[:3]]
        made += [winner(each, gain=4.0) for each in of]
        of_backward = [one, replace(one, mask=CAUSAL), replace(one, layout=padded)]
        made += [winner(replace(each, op=BACKWARD), PLAIN_BACKWARD, gain=4.0) for each in of_backward]
    return made


@contextmanager
def stand_in(place: Path, kernel: Any = None) -> Iterator[Any]:
    """Have attnsweep's functions serve tensors of the CPU; its operator. kernel: what a launch computes."""
    driver = FakeDriver(kernel or BackwardKernel())
    made = make(place, driver, *winners())
    made.planner.gpus[0] = unguarded(made.table.gpus[H100])
    before = dict(vars(package))
    package.serve_by(made)
    try:
        with aten(
            _scaled_dot_product_flash_attention=flash_forward,
            _scaled_dot_product_flash_attention_backward=flash_backward,
        ):
            yield made
    finally:
        vars(package).update(before)

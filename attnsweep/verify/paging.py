"""A cache of pages, from tensors (batch, heads_kv, seqlen_k, head_dim) and back. NumPy only.

References compute on gathered tensors: see core.layouts.Gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.layouts import Paged
from attnsweep.core.problem import Problem
from attnsweep.verify.encoding import Bits, Tensor, from_bits, mask_of, to_bits


def stored_dtype(problem: Problem) -> str:
    """How k and v of a paged problem are stored."""
    return problem.layout.cache_dtype or problem.dtype


def in_pages(gathered: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """The inputs of a paged problem, from those of the gathered one.

    k and v of `gathered` are in storage form of the cache. Slots that no item has hold NaN; of
    items that share a page, the first one's keys are there.
    """
    layout = problem.layout
    assert isinstance(layout, Paged)
    table = mask_of(problem)
    pools = [name for name in ("k", "v") if name in gathered]
    made = {name: x for name, x in gathered.items() if name not in (*pools, "key_range")}
    nothing = to_bits(np.full(1, np.nan), stored_dtype(problem))
    lengths = layout.of_items(problem.batch, problem.seqlen_k)
    for name in pools:
        shape, dense = problem.shape_of(name), gathered[name]
        of_dense: Any = dense
        pages = np.full(shape, nothing)
        slots = pages if layout.order == "nhd" else pages.swapaxes(1, 2)  # page, slot, head
        for item in range(problem.batch - 1, -1, -1):
            length, rows = lengths[item], np.arange(lengths[item])
            own = table["block_table"][item, rows // layout.page_size]
            for head in range(problem.heads_kv):
                keys = of_dense[item, head][problem.seqlen_k - length :]
                slots[own, rows % layout.page_size, head] = keys
        made[name] = pages
    return made | table


def gathered(
    inputs: Mapping[str, Tensor], problem: Problem
) -> tuple[Mapping[str, Tensor], Problem]:
    """A problem and its inputs, of a paged one with its pages gathered."""
    layout = problem.layout
    if not isinstance(layout, Paged):
        return inputs, problem
    dense = layout.gathered(problem)
    made = {name: bits for name, bits in inputs.items() if name in dense.inputs}
    for name in {"k", "v"} & inputs.keys():
        made[name] = _gather(np.asarray(inputs[name]), inputs, problem, dense.shape_of(name))
    return made | mask_of(dense), dense


def _gather(
    pages: Bits, inputs: Mapping[str, Tensor], problem: Problem, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """k or v with an item's keys at its end, in q's dtype, which has every value of e4m3."""
    layout = problem.layout
    assert isinstance(layout, Paged)
    slots = pages if layout.order == "nhd" else pages.swapaxes(1, 2)
    table, lengths = np.asarray(inputs["block_table"]), np.asarray(inputs["seqused_k"])
    # An FP8 cache holds 256 different values at most, which a table decodes.
    every = None if (stored := layout.cache_dtype) is None else _in_dtype(stored, problem.dtype)
    made: npt.NDArray[Any] = np.zeros(shape, pages.dtype if every is None else every.dtype)
    for item, length in enumerate(lengths):
        rows = np.arange(length)
        keys = slots[table[item, rows // layout.page_size], rows % layout.page_size]
        keys = keys.swapaxes(0, 1)
        made[item, :, problem.seqlen_k - length :] = keys if every is None else every[keys]
    return made


def _in_dtype(stored: str, dtype: str) -> Bits:
    """The bits, in `dtype`, of each code of a dtype of one byte."""
    return to_bits(from_bits(np.arange(256, dtype=np.uint8), stored), dtype)

"""Boolean masks as NumPy draws them from their seed, some rows at a time; keys of sequences."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.layouts import Padded
from attnsweep.core.masks import mixed
from attnsweep.core.problem import Problem, ceil_div

Mask = npt.NDArray[np.bool_]
_BLOCK = 128
_ROWS = 256  # that are drawn at once


def seen(problem: Problem, rows: npt.NDArray[np.int64], item: int) -> Mask:
    """(rows, seqlen_k): whether a key is seen by these rows of an item, by the mask alone."""
    mask, seqlen_q, seqlen_k = problem.mask.pattern, problem.seqlen_q, problem.seqlen_k
    keys, rows = np.arange(seqlen_k), rows[:, None]
    made: Mask
    if mask is None:
        low, high = problem.diagonals
        made = (keys - rows >= low) & (keys - rows <= high)
    elif mask.name == "blocks":
        blocks, of_row = np.arange(ceil_div(seqlen_k, _BLOCK)), rows // _BLOCK
        kept = _percent(mask.seed, of_row, blocks) < mask.density
        kept |= _random(mask.seed, of_row, 2**20) % np.uint64(len(blocks)) == blocks
        made = kept.repeat(_BLOCK, axis=1)[:, :seqlen_k]
    elif mask.name == "documents":
        parts = np.arange(mask.density)
        # The first begins at 0, and the others in the first half of an even part.
        begins = 200 * parts + _percent(mask.seed, parts, 0).astype(np.int64) * (parts > 0)
        of_rows, of_keys = (begins * n // (200 * mask.density) for n in (seqlen_q, seqlen_k))
        own = np.searchsorted(of_rows, rows, side="right")
        made = own == np.searchsorted(of_keys, keys, side="right")
    elif mask.name == "padding":
        layout = Padded("right", mask.density, mask.seed)
        first, end = layout.ranges(problem.batch, seqlen_k)[item]
        made = np.broadcast_to((keys >= first) & (keys < end), (len(rows), seqlen_k))
    else:
        last = rows + seqlen_k - seqlen_q
        kept = (_percent(mask.seed, rows, keys) < mask.density) | (keys == last)
        made = kept & (keys <= last)
    return made


def tensor(problem: Problem) -> Mask:
    """The input `mask` of a call."""
    made = np.empty(problem.shape_of("mask"), np.bool_)
    keys = np.arange(problem.seqlen_k)
    for item, (first, end) in enumerate(problem.key_ranges[: len(made)]):
        for rows in _tiles(problem):
            own = seen(problem, rows, item) & (keys >= first) & (keys < end)
            made[item, :, rows[0] : rows[-1] + 1] = own
    return made


@lru_cache(maxsize=64)
def fewest(problem: Problem, most: int) -> npt.NDArray[np.int64]:
    """The `most` rows of the first item that see the fewest keys, but one at least."""
    tiles = list(_tiles(problem))
    seen_keys = np.concatenate([seen(problem, rows, 0).sum(axis=1) for rows in tiles])
    order = np.argsort(np.where(seen_keys > 0, seen_keys, problem.seqlen_k + 1), kind="stable")
    return np.sort(np.concatenate(tiles)[order[:most]])


@lru_cache(maxsize=64)
def counts(problem: Problem) -> tuple[int, int]:
    """Count visible pairs, and rows that see a key, of one head over the whole batch."""
    pairs = rows_with_keys = 0
    items = problem.batch if problem.mask.of_item else 1
    for item in range(items):
        for rows in _tiles(problem):
            of_rows = seen(problem, rows, item).sum(axis=1)
            pairs += int(of_rows.sum())
            rows_with_keys += int((of_rows > 0).sum())
    times = problem.batch // items
    return times * pairs, times * rows_with_keys


def keys_of_rows(problem: Problem, rows: npt.NDArray[np.int64], item: int) -> tuple[Any, ...]:
    """The first key that there is for each of these queries of an item, the one after the last, and
    from the number of a query to that of the key from which its diagonals count.

    (rows, 1) each, or numbers that hold for all of them.
    """
    if problem.layout.sequences:
        return keys_of_sequences(problem, rows)
    return (*problem.key_ranges[item], 0)


def keys_of_sequences(
    problem: Problem, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], ...]:
    """`keys_of_rows` of packed sequences."""
    of_q, of_k = (np.array(ranges) for ranges in zip(*problem.sequence_ranges, strict=True))
    own = np.searchsorted(of_q[:, 1], rows, side="right")
    beside = of_k[own, 1] - of_q[own, 1]
    return of_k[own, :1], of_k[own, 1:], beside[:, None]


def _tiles(problem: Problem) -> list[npt.NDArray[np.int64]]:
    return np.split(np.arange(problem.seqlen_q), range(_ROWS, problem.seqlen_q, _ROWS))


def _random(seed: int, rows: Any, columns: Any) -> npt.NDArray[np.uint64]:
    """Sixty-four random bits for each (row, column): SplitMix64 of the pair's number."""
    x = np.asarray(rows, np.uint64) << np.uint64(32) | np.asarray(columns, np.uint64)
    x = np.atleast_1d(x ^ np.uint64(mixed(seed + 1))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    made: npt.NDArray[np.uint64] = x ^ x >> np.uint64(31)
    return made


def _percent(seed: int, rows: Any, columns: Any) -> npt.NDArray[np.uint64]:
    """A random whole number below 100 for each (row, column)."""
    return _random(seed, rows, columns) % np.uint64(100)

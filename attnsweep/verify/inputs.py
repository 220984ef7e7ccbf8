"""The inputs of each case, by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnsweep.core import boolean_masks
from attnsweep.core.layouts import Gathered
from attnsweep.core.long_problems import is_long
from attnsweep.core.problem import SCALE_BLOCK, Padded, Paged, Problem, ceil_div
from attnsweep.core.threads import parallel
from attnsweep.verify.encoding import Bits, Tensor, Windows, from_bits, mask_of, stored, to_bits
from attnsweep.verify.paging import in_pages
from attnsweep.verify.reference import hidden_keys

if TYPE_CHECKING:
    from attnsweep.core.cases import Case

# exp overflows float32 at 88 and underflows to 0 at -104: scores of this size are beyond both.
_FAR = 200.0
# The score of a selected key is about this or more, and any other is mostly 88 below it: exp of
# the difference overflows.
_SELECTED = 128.0
# How far the first key is above all others where it is a sink, whose value counts for as little: of
# 640 others, each has a weight of 5e-5. In FP8 a weight of that size may have no bits left, and
# has 1e-3.
_SINK, _SINK_IN_FEW_BITS, _VALUE_OF_SINK = 10.0, 7.0, 2.0**-12
# The value of k and v in padding that no query may see, in one case: its products are finite.
_HUGE = {"fp16": 2.0**15, "bf16": 2.0**40, "fp32": 2.0**40}
# How many times as large as usual queries are, where scores are: powers of two.
_TIMES = {"large_scores": 8, "huge_scores": 64}
# Deviation of a bias, and the share of the keys that it hides.
_BIAS, _HIDDEN_BY_BIAS = 1.5, 0.02
# The least finite number of a dtype, with which models hide keys.
_LEAST = {"fp16": -65504.0, "bf16": -(2.0**128 - 2.0**120), "fp32": -(2.0**128 - 2.0**104)}
# How inputs with scales are drawn. The magnitude of a head of K, and of V, lies within this many
# octaves of 1: small heads of K lose bits if all heads share one scale, and rows of V stay above
# numerics' thousandth. One channel of K in 32 is an outlier, and is offset by 8.
_OCTAVES_K, _OCTAVES_V = 7.0, 3.5
_OUTLIER = 8.0
_CHANNELS_AN_OUTLIER = 32
# What makes 5.6, about the largest of normal values, the largest of e4m3.
_FULL_SCALE = np.float32(80)
# Rows from a head's first value to the next head's in their pool; see Windows.
_STEPS = {"q": 61, "k": 97, "v": 131}
# Values of a tensor above which heads are windows also where a call is short.
_MANY = 2**29
# Values that one thread draws at a time.
_PART = 2**21


def harder(q: Bits, case: Case) -> Bits:
    """q of a case with large scores, from q of normal inputs with the same seed, without scales."""
    dtype, times = case.problem.dtype, np.float32(_TIMES[case.inputs])
    if dtype == "fp32":
        return (q.view(np.float32) * times).view(np.uint32)
    with np.errstate(all="ignore"):  # of numbers that q does not have
        every = to_bits(from_bits(np.arange(2**16, dtype=np.uint16), dtype) * times, dtype)
    return every[q]


def make_inputs(case: Case, seed: int, *, windows: bool | None = None) -> Mapping[str, Tensor]:
    """Make the inputs of a forward, encoded in its dtype; the same seed gives the same inputs.

    windows: whether normal values without scales are windows, by default those of long problems.
    """
    if isinstance(layout := case.problem.layout, Paged):
        dense = replace(case, problem=layout.gathered(case.problem))
        if _is_sparse(dense):
            made = _of_lengths(dense, seed, layout.cache_dtype)
        else:
            made = stored(draw(dense, seed), dense.problem, layout.cache_dtype)
        return {**in_pages(made, case.problem), **beside(dense, seed, hidden=False)}
    return {**_qkv(case, seed, windows), **beside(case, seed)}


def beside(case: Case, seed: int, *, hidden: bool = True) -> Mapping[str, Bits]:
    """The inputs beside q, k, v and their scales: what hides keys, and what changes scores.

    hidden: without, what changes scores alone.

    A bias hides some keys of each query, and not all; of items that have their own, the last keys
    of all but one as padding does. The weight of a sink is about that of all keys together.
    """
    problem = case.problem
    made = mask_of(problem) if hidden else {}
    how, rng = problem.scores, np.random.default_rng((seed, 9))
    if how.bias is not None and case.inputs == "finite_mask":
        made["bias"] = to_bits(_finite_masks(problem), problem.dtype)
    elif how.bias is not None:
        bias = rng.standard_normal(shape := problem.shape_of("bias"), dtype=np.float32)
        bias *= np.float32(_BIAS)
        rows, keys = np.arange(problem.seqlen_q)[:, None], np.arange(shape[3])
        without = rng.random(shape, dtype=np.float32) < _HIDDEN_BY_BIAS
        if "item" in how.bias:
            ends = Padded("right", 40).ranges(problem.batch, problem.seqlen_k)
            without |= keys >= np.array(ends)[:, 1, None, None, None]
        bias[without & (keys != rows % max(1, problem.seqlen_k // 3))] = -np.inf
        bias[..., problem.seqlen_k :] = np.nan
        made["bias"] = to_bits(bias, problem.dtype)
    if how.sinks:
        of_all = {"far_below": -_FAR, "far_above": _FAR}.get(case.inputs, 0.0)
        sinks = rng.uniform(-1, 1, problem.heads) + np.log(problem.seqlen_k) + of_all
        made["sinks"] = sinks.astype(np.float32)
    return made


def _finite_masks(problem: Problem) -> npt.NDArray[np.float32]:
    """A bias that hides keys by finite numbers, as models do: rows are of eight kinds, in turns.

    Keys from a row's own on have the least number, or all keys do, so that the row is the mean of
    v; or they have -1e30, or -1e4, or minus infinity, as a sum of two of the least is; one key has
    1e4; all have -1e9; all others are at minus infinity. An item of its own is hidden whole.
    """
    shape, least = problem.shape_of("bias"), _LEAST[problem.dtype]
    keys, rows = np.arange(shape[3]), np.arange(problem.seqlen_q)[:, None]
    own = rows * problem.seqlen_k // problem.seqlen_q
    later = keys > own
    kinds = (
        np.where(later, least, 0),
        least + 0 * later,
        np.where(later, max(least, -1e30), 0),
        np.where(later, -1e4, 0),
        np.where(later, -np.inf, keys % 2 * least),
        np.where(keys == own, 1e4, 0),
        max(least, -1e9) + 0 * later,
        np.where(later, least, -np.inf),
    )
    bias = np.broadcast_to(np.choose(rows % 8, kinds), shape).astype(np.float32)
    if "item" in (problem.scores.bias or ()) and problem.batch > 1:
        bias[1] = least
    bias[..., problem.seqlen_k :] = np.nan
    return bias


def _qkv(case: Case, seed: int, windows: bool | None) -> Mapping[str, Tensor]:
    """q, k and v, with their scales if they have any."""
    windows = is_long(case.problem) if windows is None else windows
    if windows and case.inputs == "normal" and not case.problem.scales:
        return _windows(case.problem, seed)
    return stored(draw(case, seed), case.problem)


def _is_sparse(case: Case) -> bool:
    """Whether a case's items, as long as the longest, have far more keys than its cache holds.

    For (128,16/1,1x32768,576/512) 2.4e9 values were drawn where a cache held 160,000 keys, and no
    candidate was tried in 58 s.
    """
    hard = case.inputs in _TIMES
    return math.prod(case.problem.shape_of("k")) > _MANY and (hard or case.inputs == "normal")


def _of_lengths(case: Case, seed: int, cache_dtype: str | None) -> Mapping[str, Tensor]:
    """q, k and v of such a case: each head of k and v is a window, in FP8 with a scale of its own.

    Scales are such that they matter; see _as_in_models, whose outliers windows cannot have.
    """
    problem = case.problem
    made: dict[str, Tensor] = {**_windows(problem, seed, cache_dtype)}
    batch, heads, *_ = problem.shape_of("q")
    q = np.array([[made["q"][item, head] for head in range(heads)] for item in range(batch)])
    if cache_dtype is not None:
        rng = np.random.default_rng((seed, 8))
        octaves = {"k_scale": _OCTAVES_K, "v_scale": _OCTAVES_V}
        of_heads = {
            n: np.exp2(rng.uniform(-most, most, problem.shape_of(n))) for n, most in octaves.items()
        }
        of_q = of_heads["k_scale"].repeat(heads // problem.heads_kv, axis=1)[:, :, None, None]
        q = to_bits(from_bits(q, problem.dtype) / of_q, problem.dtype)
        of_heads["k_scale"] *= _of_scale(problem)
        made |= {name: (each / _FULL_SCALE).astype(np.float32) for name, each in of_heads.items()}
    return made | {"q": harder(q, case) if case.inputs in _TIMES else q}


def _windows(problem: Problem, seed: int, cache_dtype: str | None = None) -> dict[str, Windows]:
    """Normal values in whose pool each head is a window.

    cache_dtype: that of k and v, if not the problem's; in FP8 they are times _FULL_SCALE.
    """
    made = {}
    for number, (name, rows) in enumerate(_STEPS.items()):
        if name not in problem.inputs:
            continue
        shape = problem.shape_of(name)
        # Not whole rows, so that no row of a head is one of another.
        step = rows * shape[3] + 8 * (number + 1)
        size = math.prod(shape[2:]) + (shape[0] * shape[1] - 1) * step
        dtype: str = problem.dtype
        if name == "q":
            times = np.float32(1) if cache_dtype else _of_scale(problem)
        else:
            dtype = cache_dtype or dtype
            times = _FULL_SCALE if cache_dtype else np.float32(1)
        pool = np.empty(size, to_bits(np.empty(0), dtype).dtype)

        def one(
            begin: int,
            rng: np.random.Generator,
            into: Bits = pool,
            dtype: str = dtype,
            times: np.float32 = times,
        ) -> None:
            part = into[begin : begin + _PART]
            drawn = rng.standard_normal(len(part), dtype=np.float32)
            part[:] = to_bits(drawn * times, dtype)

        begins = range(0, len(pool), _PART)
        parallel(one, begins, np.random.default_rng((seed, number)).spawn(len(begins)))
        made[name] = Windows(pool, (shape[0], shape[1], shape[2], shape[3]), step)
    return made


def draw(case: Case, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """q, k and any v of the case before they are rounded to its dtype, in float32.

    normal: independent normal values. large_scores: a softmax that is nearly one-hot. equal_keys:
    a uniform softmax. far_below, far_above: normal scores shifted beyond what exp can take; below,
    the keys that half of a causal problem's queries must not see are not shifted; above, queries at
    random have all scores below instead, so that neighbours share nothing. tiny_ends: the first and
    the last keys are far below those between, so that whichever tile comes first has no weight.
    one_hot: every query selects one key, and exp overflows if it is referred to any other. wide:
    values whose sums over the keys overflow fp16 (and which fp16 cannot hold at all, if the dtype
    is wider). sink: the first key has nearly all the weight, and others all that is in the output.
    exact: q is 0, k and v are small whole numbers, and keys of the second half have the opposite
    values of those of the first, so that of 2^n keys that all queries see nothing is rounded.
    finite_mask: normal values; in fp16, beside whose least number float32 has eight bits of a
    score, keys are equal. huge_padding, nan_padding: huge values of k and v in padding, or NaN;
    padding of a boolean mask is what it hides of all queries on either side. Elsewhere padding is
    drawn as all keys are, but that in far_below it is far above them.

    Normal values of a dtype with scales are such that scales matter: see _as_in_models. With
    value_in_key, v is a part of k, so that k has what v has elsewhere. Beside a scale of the
    problem's own, q, or a k with scales, is such that scores are as elsewhere: see _of_scale.
    """
    problem = case.problem
    tied, of_v = problem.value_in_key, slice(problem.value_dim)
    rng_q, rng_k, rng_v = np.random.default_rng(seed).spawn(3)
    sized = problem.min_bytes > 2**20

    def one(name: str, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        return rng.standard_normal(problem.shape_of(name), dtype=np.float32)

    made = dict.fromkeys(name for name in "qkv" if name in problem.inputs)
    q, k, *rest = (parallel if sized else map)(one, made, (rng_q, rng_k, rng_v))
    v = k[..., of_v] if tied else rest[0]
    if case.inputs == "normal" and problem.scales:
        _as_in_models(q, k, v, problem, np.random.default_rng((seed, 8)))
    elif case.inputs in _TIMES:
        q *= _TIMES[case.inputs]
    elif case.inputs == "equal_keys" or (case.inputs == "finite_mask" and problem.dtype == "fp16"):
        if tied:  # values differ, so scores are of the columns that are none
            q[..., of_v] = 0
            k[..., problem.value_dim :] = k[:, :, :1, problem.value_dim :]
        else:
            k[:] = k[:, :, :1]
    elif case.inputs in ("far_below", "far_above", "tiny_ends"):
        # Every product is near ±each², so scores are near ±_FAR, and spread by about one.
        # In few bits few channels have it: shifting every value would leave none for others.
        few = problem.head_dim // 16 if problem.format.lossy else 0
        size = _FAR * np.sqrt(problem.head_dim) / (few or problem.head_dim)
        each = np.float32(np.sqrt(size))
        sign = 1 if case.inputs == "far_above" else -1
        shift = np.full((problem.batch, 1, problem.seqlen_k, 1), sign * each, np.float32)
        if case.inputs == "tiny_ends":
            shift *= _at_ends(problem)
        elif case.inputs == "far_below" and problem.mask.interval.right is not None:
            # Not at the edge of a tile, so that the last tile of some queries has such keys.
            half = min(problem.seqlen_q, problem.seqlen_k) // 2
            shift[:, :, max(1, problem.seqlen_k - half - 3) :] = 0
        if case.inputs == "far_below":
            shift *= _in_range(problem)
        side = np.ones((problem.seqlen_q, 1), np.float32)
        if case.inputs == "far_above":
            side[1:] = rng_q.choice(np.array([1, -1], np.float32), (problem.seqlen_q - 1, 1))
        if few:
            q[..., :few], k[..., :few] = side * each, shift
        else:
            q, k = q * np.float32(0.5 / each) + side * each, k * np.float32(0.5) + shift
    elif case.inputs == "one_hot":
        # The one of some keys that is farthest from all others: beside a near one those matter, and
        # what rounding their scores costs is then as rare as it is large.
        shape, keys = (problem.seqlen_q, 32), problem.seqlen_k
        rows = np.arange(problem.seqlen_q)
        if problem.kind == "full":  # row i then draws of as many keys as in a causal problem
            last = np.minimum(rows + max(0, keys - problem.seqlen_q), keys - 1)
            drawn = rng_q.integers(0, last[:, None] + 1, shape)[None, None]
        else:
            # Items that see the same keys draw the same.
            items = range(problem.batch if problem.items_differ else 1)
            hidden = np.stack([hidden_keys(problem, rows, item) for item in items])
            seen_first = np.argsort(hidden, axis=-1, kind="stable")
            count = np.maximum(1, np.sum(~hidden, axis=-1, keepdims=True))
            draws = rng_q.integers(0, count, (len(items), *shape))
            drawn = np.take_along_axis(seen_first, draws, -1)[:, None]
        heads = np.repeat(k, problem.heads // problem.heads_kv, axis=1)
        products = heads @ heads.swapaxes(2, 3)
        others = np.where(np.eye(keys, dtype=bool), -np.inf, products).max(-1)
        apart = np.diagonal(products, axis1=2, axis2=3) - np.maximum(others, 0)
        drawn = np.broadcast_to(drawn, (*q.shape[:3], 32))
        farthest = np.take_along_axis(apart[:, :, None], drawn, -1).argmax(-1)[..., None]
        chosen = np.take_along_axis(drawn, farthest, -1)
        size = np.float32(_SELECTED / np.sqrt(problem.head_dim))
        q = size * np.take_along_axis(heads, chosen, 2)
    elif case.inputs == "wide":
        scale = 2.0**12 if problem.dtype == "fp16" else 2.0**18
        v[:] = (1 + v * np.float32(0.25)) * np.float32(scale)
        if tied:  # scores stay as they are elsewhere
            q[..., of_v] /= np.float32(scale)
    elif case.inputs == "sink":
        of_scores = -1 if tied else 0  # a column that is no value
        q[..., of_scores], k[..., of_scores], k[:, :, 0] = 4, 0, 0
        above = _SINK_IN_FEW_BITS if problem.format.lossy else _SINK
        k[:, :, 0, of_scores] = above * np.sqrt(problem.head_dim) / 4
        v[:, :, 0] *= np.float32(_VALUE_OF_SINK)
    elif case.inputs == "exact":
        q[:] = 0
        k = np.clip(np.rint(k), -2, 2)
        v = k[..., of_v] if tied else np.clip(np.rint(v), -1, 1)
        half = problem.seqlen_k // 2
        v[:, :, half : 2 * half] = -v[:, :, :half]
    elif case.inputs == "huge_padding":
        # What a kernel weighs by 0, or sees before it hides it, is finite yet.
        inside = _in_range(problem)
        for x in (k, v):
            huge = np.abs(x).max() if problem.scales else _HUGE[problem.dtype]
            np.copyto(x, np.copysign(np.float32(huge), x), where=~inside)
    elif case.inputs == "nan_padding":  # one that is multiplied by a weight of 0 stays NaN
        for x in (k, v):
            np.copyto(x, np.float32(np.nan), where=~_in_range(problem))
    if (times := _of_scale(problem)) != 1:
        q, k = (q, k * times) if problem.scales else (q * times, k)
    return {"q": q, "k": k} | ({} if tied else {"v": v})


def _of_scale(problem: Problem) -> np.float32:
    """The power of two by which q, or a k with scales, grows for a problem's own scale.

    No rounding changes. In fp16, a q of huge scores has room for no more octaves, and one beside
    small keys for none.
    """
    octaves = round(math.log2(problem.head_dim**-0.5 / problem.scale))
    return np.float32(2.0 ** min(7, max(-7, octaves)))


def _at_ends(problem: Problem) -> npt.NDArray[np.bool_]:
    """(batch, 1, seqlen_k, 1): whether a key is among the first or the last.

    Of a paged cache, those of each request: beside a sink, a short one of such keys alone has
    weights that fp16 rounds by 2e-3, while limits come from a long one.
    """
    ranges = np.full((problem.batch, 2), (0, problem.seqlen_k))
    if isinstance(problem.layout, Gathered):
        ranges = np.array(problem.key_ranges)
    first, end = ranges.T[:, :, None, None, None]
    keys, few = np.arange(problem.seqlen_k)[:, None], np.minimum(256, 2 * (end - first) // 5)
    at_ends: npt.NDArray[np.bool_] = (keys < first + few) | (keys >= end - few)
    return at_ends


def _in_range(problem: Problem) -> npt.NDArray[np.bool_]:
    """(batch, 1, seqlen_k, 1): whether a key is in its item's range, or among those of a mask."""
    ranges = np.array(problem.key_ranges)
    if problem.mask.pattern is not None:
        seen: Any = boolean_masks.tensor(problem).any(axis=(1, 2))
        last = seen.shape[1] - seen[:, ::-1].argmax(axis=1)
        ranges = np.stack([seen.argmax(axis=1), last * seen.any(axis=1)], axis=1)
        ranges = np.broadcast_to(ranges, (problem.batch, 2))
    first, end = ranges.T[:, :, None, None, None]
    keys = np.arange(problem.seqlen_k)[:, None]
    inside: npt.NDArray[np.bool_] = (keys >= first) & (keys < end)
    return inside


def _as_in_models(
    q: npt.NDArray[np.float32],
    k: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32],
    problem: Problem,
    rng: np.random.Generator,
) -> None:
    """Change q, k, v: heads of other magnitudes, blocks of keys too, few channels of K far from 0.

    Without their scales, scores and outputs are wrong by large factors. A channel's offset is
    the same in all keys, as in real K, so it costs K's format bits and hardly changes the softmax.
    """
    heads = (problem.batch, problem.heads_kv, 1, 1)
    blocks = (*heads[:2], ceil_div(problem.seqlen_k, SCALE_BLOCK), 1)

    def factors(octaves: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return np.exp2(rng.uniform(-octaves, octaves, shape)).astype(np.float32)

    def of_keys(octaves: float) -> npt.NDArray[np.float32]:
        return factors(octaves, blocks).repeat(SCALE_BLOCK, axis=2)[:, :, : problem.seqlen_k]

    of_k, of_v = factors(_OCTAVES_K, heads), factors(_OCTAVES_V, heads)
    warmth = factors(0.5, heads)
    offset = np.zeros((*heads[:3], problem.head_dim), np.float32)
    channels = max(1, problem.head_dim // _CHANNELS_AN_OUTLIER)
    chosen = rng.permuted(np.broadcast_to(np.arange(problem.head_dim), offset.shape), axis=-1)
    signs = rng.choice(np.array([-_OUTLIER, _OUTLIER], np.float32), (*heads[:3], channels))
    np.put_along_axis(offset, chosen[..., :channels], signs, axis=-1)
    q *= (warmth / of_k).repeat(problem.heads // problem.heads_kv, axis=1)
    k *= of_keys(0.25)
    k += offset
    k *= of_k
    v *= of_keys(1.0)
    v *= of_v

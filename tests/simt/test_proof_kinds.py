"""Mistakes of flash-attention kernels that a right output on most inputs hides.

A kernel here is the online softmax in NumPy, by tiles of keys, of which one step is wrong.
"""

import numpy as np
import pytest

from attnsweep.core.cases import small_cases
from attnsweep.core.problem import Problem
from attnsweep.verify import encoding, reference
from attnsweep.verify.device_case import WrongResult

from .device import Device
from .harness import COMPILER
from .proving import Bench, inputs_in

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

CAUSAL, FULL = (Problem(1, 2, 1, 40, 640, 32, "bf16", causal=causal) for causal in (True, False))
TILE = 64


class Right:
    """One head by the online softmax; what is wrong of another replaces a method."""

    def tiles(self, keys):
        """All keys, by tiles."""
        return np.split(keys, range(TILE, len(keys), TILE))

    def maximum(self, scores, unmasked, old):
        return scores.max(1, keepdims=True)

    def shrink(self, old, new, last):
        return np.exp(old - new)

    def weights(self, p):
        return p

    def hidden(self, rows, keys, problem):
        return keys > rows + problem.seqlen_k - problem.seqlen_q

    def head(self, q, k, v, problem):
        unmasked = q @ k.T * np.float32(problem.scale)
        scores = unmasked.copy()
        keys = np.arange(len(k))
        if problem.causal:
            scores[self.hidden(np.arange(len(q))[:, None], keys, problem)] = -np.inf
        largest = np.full((len(q), 1), -np.inf, np.float32)
        total, out = np.zeros_like(largest), np.zeros_like(q)
        tiles = self.tiles(keys)
        for number, some in enumerate(tiles):
            own = self.maximum(scores[:, some], unmasked[:, some], largest)
            grown = np.maximum(largest, own)
            known = np.where(np.isfinite(grown), grown, np.float32(0))
            by = self.shrink(largest, known, number == len(tiles) - 1)
            p = self.weights(np.exp(scores[:, some] - known))
            total = total * np.exp(largest - known) + p.sum(1, keepdims=True)
            out = out * by + encoding.round_to(p, problem.dtype) @ v[some]
            largest = grown
        return out / total

    def __call__(self, problem, buffers, number):
        stored = inputs_in(problem, buffers)
        x = {name: encoding.from_bits(bits, problem.dtype) for name, bits in stored.items()}
        out = np.empty(problem.shape_of("o"), np.float32)
        group = problem.heads // problem.heads_kv
        with np.errstate(all="ignore"):
            for batch, head in np.ndindex(problem.batch, problem.heads):
                keys = (x[name][batch, head // group] for name in "kv")
                out[batch, head] = self.head(x["q"][batch, head], *keys, problem)
        buffers["o"].upload(encoding.to_bits(out, problem.dtype))


class Backwards(Right):
    def tiles(self, keys):
        return super().tiles(keys)[::-1]


class LargestOfTheWholeRowLate(Right):
    """A maximum is raised only where it grows by more than 5."""

    def maximum(self, scores, unmasked, old):
        own = scores.max(1, keepdims=True)
        return np.where(np.isfinite(old) & (own - old < 5), old, own)


class MaximumOverMaskedKeys(Right):
    def maximum(self, scores, unmasked, old):
        return unmasked.max(1, keepdims=True)


class MaximumOfHalfATile(Right):
    half = slice(0, TILE // 2)

    def maximum(self, scores, unmasked, old):
        some = scores[:, self.half]
        return (some if some.size else scores).max(1, keepdims=True)


class MaximumOfTheOtherHalf(MaximumOfHalfATile):
    half = slice(TILE // 2, TILE)


class MaximumOfTheLowerOfTwoRows(Right):
    def maximum(self, scores, unmasked, old):
        own = scores.max(1, keepdims=True)
        return np.minimum(own, own[np.arange(len(own)) ^ 1]) if len(own) % 2 == 0 else own


class MaximumOfSixteenRows(Right):
    def maximum(self, scores, unmasked, old):
        starts = np.arange(0, len(scores), 16)
        return np.maximum.reduceat(scores.max(1), starts).repeat(16)[: len(scores), None]


class SmallWeightsAreDropped(Right):
    def weights(self, p):
        return np.where(p < np.exp(-9), 0, p).astype(np.float32)


class ShortTailIsLost(Right):
    def tiles(self, keys):
        return [each for each in super().tiles(keys) if len(each) >= 8 or len(keys) < TILE]


class SecondOfTwoTilesTwice(Right):
    def tiles(self, keys):
        tiles = super().tiles(keys)
        return [*tiles, tiles[-1]] if len(tiles) == 2 else tiles


class OutputNotRescaledInTheLastTile(Right):
    def shrink(self, old, new, last):
        return np.float32(1) if last else super().shrink(old, new, last)


class DiagonalOfPaddedQueries(Right):
    def hidden(self, rows, keys, problem):
        return keys > np.maximum(0, rows + problem.seqlen_k - -(-problem.seqlen_q // TILE) * TILE)


class ExchangesKAndV(Right):
    """In small cases, whose call is the only one."""

    def __call__(self, problem, buffers, number):
        super().__call__(problem, buffers, number)
        if problem not in (CAUSAL, FULL):
            k, v = (buffers[name].main for name in "kv")
            k[:], v[:] = v.copy(), k.copy()


@pytest.fixture(scope="module", params=[CAUSAL, FULL], ids=["causal", "full"])
def bench(request, simulator):
    device = Device(simulator)
    with pytest.MonkeyPatch.context() as patch:
        device.take_place(patch)
        yield Bench(device, request.param)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("call", [Right, Backwards, LargestOfTheWholeRowLate])
def test_a_right_order_passes(call, bench):
    accuracy, _ = bench.prove(call(), small=True)
    assert max(accuracy.shares.values()) <= 1


@pytest.mark.nightly(push=3, of="steps that are refused")
@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (MaximumOverMaskedKeys, "causal, far_below"),
        (MaximumOfHalfATile, "far_below|one_hot"),
        (MaximumOfTheOtherHalf, "one_hot|large_scores"),
        (MaximumOfTheLowerOfTwoRows, "far_above"),
        (MaximumOfSixteenRows, "far_above|equal_keys|far_below|one_hot"),
        (SmallWeightsAreDropped, "sink"),
        (ShortTailIsLost, "large_scores|far_above"),
        (SecondOfTwoTilesTwice, "far_above"),
        (OutputNotRescaledInTheLastTile, "normal"),
        (DiagonalOfPaddedQueries, "causal, normal"),
        (ExchangesKAndV, "wrote to its inputs"),
    ],
)
def test_a_wrong_step_is_refused(wrong, case, bench):
    if case.startswith("causal") and not bench.problem.causal:
        pytest.skip("of causal problems alone")
    with pytest.raises(WrongResult, match=case):
        bench.prove(wrong(), small=True)


def plainly(problem, buffers, number=0):
    """Attention in float32 and base 2, whose exponents are s * log2(e) - m * log2(e)."""
    inputs, out = inputs_in(problem, buffers), np.empty(problem.shape_of("o"), np.float32)
    group, rows = problem.heads // problem.heads_kv, np.arange(problem.seqlen_q)
    with np.errstate(all="ignore"):
        for batch, head in np.ndindex(problem.batch, problem.heads):
            q, k, v = (
                encoding.from_bits(inputs[name][batch, own], problem.dtype)
                for name, own in (("q", head), ("k", head // group), ("v", head // group))
            )
            scores = reference.finished(q @ k.T * np.float32(problem.scale), inputs, problem, rows, batch, head)
            scores[reference.hidden_keys(problem, rows, batch)] = -np.inf
            base_2 = scores * np.float32(1.4426950408889634)
            largest = base_2.max(1, keepdims=True)
            p = np.exp2(base_2 - np.where(np.isneginf(scores.max(1, keepdims=True)), np.float32(0), largest))
            total = p.sum(1, keepdims=True)
            out[batch, head] = encoding.round_to(p, problem.dtype) @ v / np.where(total == 0, 1, total)
    buffers["o"].upload(encoding.to_bits(out, problem.dtype))


@pytest.mark.nightly(push=3, of="steps that are refused")
@pytest.mark.parametrize(
    ("label", "inputs"),
    [
        ("(1,2,40x640,32) bf16 full bias()", "finite_mask"),
        ("(1,2,40x640,32) bf16 full padded(right,40)", "nan_padding"),
    ],
)
def test_exponents_that_overflow_and_padding_that_is_multiplied_are_refused(label, inputs, device):
    problem = Problem.parse(label)
    cases = small_cases(problem)
    bench = Bench(device, problem)
    bench.prove(plainly, small=True, cases=tuple(case for case in cases if case.inputs != inputs))
    bench = Bench(device, problem)
    with pytest.raises(WrongResult, match=inputs):
        bench.prove(plainly, small=True, cases=tuple(case for case in cases if case.inputs == inputs))

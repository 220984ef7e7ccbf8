"""What compare.cu reads of a buffer: digests of all words, and some rows for the host."""

from types import SimpleNamespace

import numpy as np
import pytest

from .device import HostBuffer
from .harness import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


def digest_in_numpy(words):
    """The sum over all words of SplitMix64's finaliser of the word and its place."""
    x = words.astype(np.uint64) << np.uint64(32)
    x ^= np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int((x ^ x >> np.uint64(31)).sum(dtype=np.uint64))


@pytest.mark.parametrize("words", [1, 4, 7, 4 * 256, 40_003])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("poison", [False, True])
def test_a_digest_takes_every_word_once_wherever_they_lie(words, offset, poison, device):
    """Sixteen bytes at a time, or a word where they do not lie so, and no word next to them."""
    data = np.random.default_rng(words).integers(0, 2**32, words + 8, dtype=np.uint32)
    judge, whole = device.judge("fp16"), HostBuffer(data.nbytes)
    whole.upload(data)
    buffer = SimpleNamespace(pointer=whole.pointer + 4 * offset, nbytes=4 * words)
    judge.clear()
    judge.digest([buffer], 2, poison=poison)
    own = slice(offset, offset + words)
    assert int(judge.counts(3)[2]) == digest_in_numpy(data[own])
    if poison:
        data[own] = 0xFFFFFFFF
    assert (whole.of(np.uint32) == data).all()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 70, 9), (2, 2, 40, 64)])
def test_rows_of_every_head_come_in_the_order_of_asking(shape, device):
    rng = np.random.default_rng(0)
    values, buffer = rng.standard_normal(shape), HostBuffer(8 * int(np.prod(shape)))
    buffer.upload(values)
    rows = rng.integers(0, shape[2], 13)
    found = device.judge("fp16").rows(buffer, shape, rows)
    assert (found == values[:, :, rows]).all()

"""The kernels of compare.cu that watch many calls: digests, guards, poison and mixes."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnsweep.core.problem import Problem
from attnsweep.device.buffers import GUARD_BYTES
from attnsweep.verify import compare as judge_module
from attnsweep.verify import encoding
from attnsweep.verify.compare import ComparedOutput
from attnsweep.verify.expected import OPPOSITE, PLAIN, negated_heads

from .device import DTYPES, HostBuffer, few_examples, sign_of, small, uploaded
from .harness import COMPILER, SimtError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


def digest_of(device, data, parts=1, sm_count=2, poison=False):
    device.gpu.sm_count = sm_count
    judge, buffer, sums = device.judge("fp16"), uploaded(data), HostBuffer(8 * parts)
    sums.fill(0)
    if poison:
        judge.clear()
        judge.digest([buffer], 5, poison=True)
        return int(judge.counts(6)[5]), buffer
    judge.digest_parts(buffer, sums, 0, parts)
    return sums.of(np.uint64).tolist(), buffer


@small
@given(size=st.integers(1, 5000), place=st.integers(0, 10**6), bit=st.integers(0, 7))
@example(size=1, place=0, bit=7)
@example(size=4098, place=4097, bit=0)  # half a word at the end
def test_a_digest_sees_every_bit_and_place(device, size, place, bit):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before, _ = digest_of(device, data)
    other_order, _ = digest_of(device, data, sm_count=7)
    assert before == other_order
    place %= size
    changed = data.copy()
    changed[place] ^= 1 << bit
    assert digest_of(device, changed)[0] != before
    swapped = data.copy()
    other = (place + 1) % size
    swapped[[place, other]] = data[[other, place]]
    assert (digest_of(device, swapped)[0] == before) == (data[place] == data[other])


@pytest.mark.parametrize("poison", [False, True])
def test_digests_that_are_asked_for_together_have_slots_of_their_own(poison, device):
    """There are more buffers than one launch takes."""
    data = np.random.default_rng(0).integers(0, 256, (18, 70), dtype=np.uint8)
    judge, buffers = device.judge("fp16"), [uploaded(one) for one in data]
    judge.clear()
    for slot, buffer in enumerate(buffers):
        judge.digest([buffer], slot)
    judge.digest(buffers, 20, poison=poison)
    counts = judge.counts(40)
    assert counts[20:38].tolist() == counts[:18].tolist()
    assert len({*counts[:18].tolist()}) == 18
    assert not counts[[18, 19, 38, 39]].any()
    for one, buffer in zip(data, buffers, strict=True):
        assert (buffer.main == (0xFF if poison else one)).all()


def test_a_digest_depends_on_no_order_of_threads(device):
    data = np.random.default_rng(0).integers(0, 256, 70_000, dtype=np.uint8)
    seen = set()
    for device.schedule in (0, 1, 2):
        seen.add(digest_of(device, data)[0][0])
    assert len(seen) == 1


@pytest.fixture
def few_blocks(constants):
    """Blocks that take several parts."""
    constants(judge_module, _PARTS=4)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("parts", [1, 3, 11])
def test_the_parts_of_a_digest_add_up(parts, device):
    data = np.random.default_rng(0).integers(0, 256, (parts, 52), dtype=np.uint8)
    of_parts, _ = digest_of(device, data, parts)
    (whole,), _ = digest_of(device, data)
    assert sum(of_parts) % 2**64 == whole
    changed = data.copy()
    changed[parts // 2, 51] ^= 1
    differs = np.array(digest_of(device, changed, parts)[0]) != np.array(of_parts)
    assert np.flatnonzero(differs).tolist() == [parts // 2]


@few_examples(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=7),
    damaged=st.lists(st.tuples(st.integers(0, 6), st.integers(-9, 5009)), max_size=5),
    sm_count=st.integers(1, 9),
)
@example(sizes=[4099, 2], damaged=[(0, -1), (1, 2), (0, 4098)], sm_count=2)
def test_regions_are_looked_at_as_each_apart(device, sizes, damaged, sm_count):
    """Their digests and guards; then they are renewed as each apart."""
    device.gpu.sm_count = sm_count
    judge, rng = device.judge("fp16"), np.random.default_rng(len(sizes))
    buffers = [HostBuffer(size, guard=0xA5 if size % 2 else 0xFF) for size in sizes]
    for buffer in buffers:
        buffer.upload(rng.integers(0, 256, buffer.nbytes, dtype=np.uint8))
    for number, place in damaged:
        buffers[number % len(buffers)].all[GUARD_BYTES + place] ^= 0x40
    # Two of a slot where there are that many; the digest of every second.
    table = judge.regions([(each, int(i % 2 == 0), i // 2) for i, each in enumerate(buffers)])
    judge.clear()
    judge.look(table, 3)
    for number, buffer in enumerate(buffers):
        judge.count_outside(buffer, 10 + number // 2)
        if number % 2 == 0:
            judge.digest([buffer], 10 + number // 2)
    counts = judge.counts(14)
    assert counts[3:7].tolist() == counts[10:14].tolist()
    assert not counts[7:10].any()
    before = [one.all.copy() for one in buffers]
    judge.renew(table, 0)
    for one, was in zip(buffers, before, strict=True):
        was[GUARD_BYTES : GUARD_BYTES + one.nbytes] = 0xFF
        assert (one.all == was).all()
    judge.renew(table)
    for one in buffers:
        apart = HostBuffer(one.nbytes, guard=one.guard_byte)
        apart.poison()
        assert (one.all == apart.all).all()


@pytest.mark.parametrize("nbytes", [2, 1030])
def test_no_two_regions_of_a_slot_can_change_places(nbytes, device):
    judge = device.judge("fp16")
    pair = [HostBuffer(nbytes), HostBuffer(nbytes)]
    pair[0].fill(0x3C)
    looks = []
    for each in (pair, pair[::-1]):
        judge.clear()
        judge.look(judge.regions([(buffer, 1 + i, 0) for i, buffer in enumerate(each)]), 0)
        looks.append(judge.counts(1)[0])
    assert looks[0] != looks[1]


def test_outputs_are_compared_as_each_apart(device):
    """Shapes differ, and the largest is not the first; some have mixed inputs, some tilted ones."""
    shapes = [(1, 1, 3, 8), (2, 3, 130, 16), (1, 300, 1, 5), (1, 2, 64, 70)]
    judge, rng = device.judge("bf16"), np.random.default_rng(0)
    written, every = [], []
    for number, shape in enumerate(shapes):
        batch, heads, rows, head_dim = shape
        plain, opposite, tilted = rng.standard_normal((3, *shape))
        written.append(uploaded(encoding.to_bits((plain * 1.01).astype(np.float32), "bf16")))
        every.append(
            ComparedOutput(
                written[-1].pointer,
                Problem(batch, heads, heads, rows, rows, head_dim, "bf16"),
                [uploaded(plain), *([uploaded(opposite)] if number % 2 else [])],
                uploaded(np.array([77], np.uint64)) if number % 2 else None,
                uploaded(tilted) if number < 2 else None,
                0.01 * number,
                "o",
            )
        )
    judge.clear()
    judge.compare_each(judge.outputs(every))
    together = judge.found(len(shapes) + 1)
    assert math.isnan(together.pop()["row"])
    judge.clear()
    for number, one in enumerate(every):
        judge.compare(one, number)
    assert together == judge.found(len(shapes))
    assert len({found["row"] for found in together}) == len(shapes)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 1030, 4101])
def test_poison_fills_every_byte_and_no_other(size, device):
    data = np.zeros(size, np.uint8)
    digest, buffer = digest_of(device, data, poison=True)
    assert [digest] == digest_of(device, data)[0]
    assert (buffer.main == 0xFF).all()
    assert (buffer.all == 0xFF).sum() == size


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "each", "of_v"), [(1, 7, 7), (1, 1, 5), (5, 6, 6), (5, 40, 6), (11, 2, 24)])
def test_heads_are_negated_each_for_itself(dtype, heads, each, of_v, device):
    """An odd number of elements is one piece, and the guards behind it stay as they are."""
    made = np.random.default_rng(0).standard_normal((heads, each), np.float32)
    bits = encoding.to_bits(made, dtype)
    other = np.random.default_rng(1).standard_normal((heads, of_v), np.float32)
    other = encoding.to_bits(other, dtype)
    buffers, mix = (uploaded(bits), uploaded(other)), uploaded(np.zeros(1, np.uint64))
    judge, now = device.judge(dtype), PLAIN
    for to in (OPPOSITE, 12345, 2**64 - 1, PLAIN):
        if heads == 1 and to not in (PLAIN, OPPOSITE):
            continue
        judge.negate(buffers, dtype, heads, mix, now, to)
        now = to
        assert mix.of(np.uint64)[0] == to
        turned = negated_heads(to, heads)[:, None]
        for buffer, first in zip(buffers, (bits, other), strict=True):
            expected = np.where(turned, first ^ sign_of(dtype), first)
            assert (buffer.of(bits.dtype).reshape(first.shape) == expected).all()
    for buffer in buffers:
        assert (buffer.all[:GUARD_BYTES] == 0xA5).all()
        assert (buffer.all[-GUARD_BYTES:] == 0xA5).all()


@pytest.mark.parametrize("heads", [1, 5])
def test_heads_of_fp8_are_negated_by_their_sign_bits(heads, device):
    bits = np.random.default_rng(0).integers(0, 256, (heads, 48), dtype=np.uint8)
    bits[(bits & 0x7F) == 0x7F] ^= 1  # no NaN is ever drawn, and none appears
    buffer, mix = uploaded(bits), uploaded(np.zeros(1, np.uint64))
    other, judge = uploaded(bits), device.judge("e4m3")
    for now, to in ((PLAIN, 12345), (12345, OPPOSITE)):
        judge.negate([buffer, other], "e4m3", heads, mix, now, to)
        turned = negated_heads(to, heads)[:, None]
        expected = np.where(turned, bits ^ np.uint8(0x80), bits)
        assert (buffer.main.reshape(bits.shape) == expected).all()
        values = encoding.from_bits(expected, "e4m3")
        assert (values == np.where(turned, -1, 1) * encoding.from_bits(bits, "e4m3")).all()


@pytest.mark.parametrize("nbytes", [5, 6, 64])
@pytest.mark.parametrize("places", [(), (-1,), (0, 9), (-131072, 131071)])
def test_bytes_changed_in_guards_are_counted(nbytes, places, device):
    """Guards of buffers of any size: a workspace may have five bytes."""
    buffer, judge = HostBuffer(nbytes), device.judge("fp16")
    begin = buffer.pointer - buffer.guards[0]
    for place in places:
        buffer.all[begin + place if place < 0 else begin + nbytes + place] ^= 1
    buffer.fill(0)
    judge.clear()
    judge.count_outside(buffer, 2)
    judge.count_outside(buffer, 2)
    assert judge.counts(3)[2] == 2 * len(places)


# -- what these tests stand on --------------------------------------------------------------------


def test_a_launch_that_fails_says_why_and_the_next_one_runs(device):
    buffer, path = HostBuffer(8), device.library("fp16")
    with pytest.raises(AssertionError, match="summary takes"):
        device.kernel(path, "summary")((1, 1, 1), (256, 1, 1), (np.uint64(0), np.int32(0), np.uint64(0)))
    # 40 lanes ask each other for their sums, and eight have no partner.
    args = [np.full(16, buffer.pointer, np.uint64).view("V128"), np.int64(8), np.int32(1), np.int32(0)]
    launch = device.kernel(path, "digest", 64)
    with pytest.raises(SimtError, match=r"deadlock in digest(.|\n)*shfl"):
        launch((1, 1, 1), (40, 1, 1), (*args, np.uint64(buffer.pointer)), shared_mem=64)
    assert digest_of(device, np.zeros(8, np.uint8))[0] != [0]

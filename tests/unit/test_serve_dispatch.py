"""Which kernel of a package a shape gets, and how its time is predicted."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages import H100, PLAIN, PLAIN_BACKWARD, SPLIT, gpu, shape, winner, with_config

from attnsweep.core.masks import FULL, pattern
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import CAUSAL, Interval, Padded
from attnsweep.serve.runtime.cost_model import ALONE, SDPA, learn, memory_us, nearness, tiling, work
from attnsweep.serve.runtime.dispatch import choose
from attnsweep.serve.runtime.table import Guard

SMS = H100.sm_count
CARD = gpu().card
FREE = Guard(margin=-9.0, per_octave=0.0, reach=99.0)
SMALL = with_config(PLAIN, WARPGROUPS=1, BLOCKS_PER_SM=2)


def predict(made, times, asked, key):
    """The prediction for a shape from times on others."""
    nearby = nearness(asked, [known for known, _ in times], key)
    return learn(made, numbered(times), key).predict(asked, nearby, key)


def numbered(times):
    return [(number, of, us) for number, (of, us) in enumerate(times)]


def timed(of, time_us=10.0, sdpa_us=20.0, kernel=PLAIN, others=()):
    """A winner with its time, that of PyTorch, and those of other kernels."""
    made = winner(of, kernel, sdpa_us / time_us)
    kind = {"head_dim": of.head_dim, "dtype": of.dtype, "mask": of.mask.kind}
    own = tuple((replace(other, **kind), us) for other, us in others)
    return replace(made, time_us=time_us, sdpa_us=sdpa_us, others=own)


# ---- which kernel ----
def test_a_tuned_shape_gets_its_winner_only_if_that_is_faster():
    known = gpu(winner(shape()), winner(shape(2), gain=1.01, low=0.99))
    assert choose(known, shape()).code == "tuned"
    refused = choose(known, shape(2))
    assert (refused.kernel, refused.code) == (None, "not_faster")


def test_the_kernel_that_is_predicted_fastest_serves():
    """Where 133 tiles of 128 queries are two waves, and 265 of 64 are little more than one."""
    full = shape(1, 132, 128, seqlen_k=4096)
    known = gpu(timed(full, 100.0, 200.0, others=((SMALL, 105.0),)), guard=FREE)
    assert choose(known, shape(1, 131, 128, seqlen_k=4096)).kernel.config == PLAIN.config
    beyond = choose(known, shape(1, 133, 128, seqlen_k=4096))
    assert (beyond.kernel.config, beyond.code) == (SMALL.config, "near")


def test_heads_of_a_group_share_a_tile_below_64_queries():
    """At 64 a kernel that packs them is as one that does not: it is left out for these."""
    packed, grouped = with_config(PLAIN, PACK_GQA=1), {"heads_kv": 1, "seqlen_k": 4096}
    few, many = (shape(64, 8, queries, **grouped) for queries in (63, 64))
    assert work(tiling(packed), few, SMS) < 0.6 * work(tiling(PLAIN), few, SMS)
    assert work(tiling(packed), many, SMS) == work(tiling(PLAIN), many, SMS)


def test_a_kernel_of_the_other_dtype_serves_as_its_twin():
    known = gpu(timed(shape(dtype="fp16"), kernel=replace(PLAIN, dtype="fp16")))
    asked = shape(seqlen=300, dtype="bf16")
    assert choose(known, asked).code == "not_tuned"
    twin = replace(PLAIN, dtype="bf16")
    chosen = choose(replace(known, twins=(twin,)), asked)
    assert (chosen.kernel, chosen.code) == (twin, "near")
    same = choose(replace(known, twins=(twin,)), shape(dtype="bf16"))
    assert (same.kernel, same.code) == (twin, "near"), "its sizes were tuned, its dtype was not"


@pytest.mark.parametrize("other", [shape(head_dim=128), shape(dtype="fp16"), shape(causal=True)], ids=lambda s: s.label)
def test_other_machine_code_never_serves(other):
    foreign = replace(PLAIN, dtype="fp16", head_dim=96)
    assert choose(replace(gpu(timed(shape())), twins=(foreign,)), other).code == "not_tuned"
    assert choose(gpu(), other).kernel is None


def test_a_twin_without_a_time_never_serves():
    unknown = with_config(PLAIN, PINGPONG=1)
    known = replace(gpu(timed(shape())), twins=(unknown,))
    assert choose(known, shape(seqlen=300)).kernel.config == PLAIN.config


def test_a_kernel_whose_rules_do_not_hold_is_passed_over():
    split = timed(shape(1, 4, 128, seqlen_k=8192), 1.0, kernel=with_config(SPLIT, WARPGROUPS=1))
    plain = timed(shape(4, 16, 128, seqlen_k=8192), 50.0, 90.0)
    # With 80 heads the queries fill the SMs, where no kernel splits the keys.
    asked = shape(1, 80, 128, seqlen_k=8192)
    assert choose(gpu(split, plain, guard=FREE), asked).kernel is plain.kernel
    alone = choose(gpu(split, guard=FREE), asked)
    assert (alone.kernel, alone.code) == (None, "far")


def test_more_queries_than_a_grid_scans_of_a_boolean_mask_are_pytorchs():
    """Its scan has a block in y for each 64 queries, and there can be 65,535."""
    sizes = {"heads": 1, "seqlen_k": 256}
    for boolean, code in (((), "far"), (None, "near")):
        known = gpu(winner(shape(seqlen=64 * 65_000, boolean=boolean, **sizes)), guard=FREE)
        most, more = (choose(known, shape(seqlen=n, boolean=boolean, **sizes)) for n in (64 * 65_535, 64 * 65_535 + 1))
        assert (most.code, more.code) == ("near", code)


# ---- the guard ----
def test_the_guard_asks_for_more_the_farther_a_shape_is():
    guard = Guard(margin=0.02, per_octave=0.05, reach=9.0)
    known = gpu(timed(shape(4, 16, 1024), 100.0, 112.0), guard=guard)
    near = choose(known, shape(4, 16, 1152))
    assert near.code == "near"
    assert near.gain == pytest.approx(1.12, abs=0.06)
    far = choose(known, shape(4, 16, 4096))
    assert (far.kernel, far.code) == (None, "not_faster")
    assert 1 < far.gain < 1 + guard.margin + guard.per_octave * 4
    wide = replace(known, guard=Guard(margin=0.02, per_octave=0.0, reach=9.0))
    assert choose(wide, shape(4, 16, 4096)).code == "near"


def test_nothing_is_believed_beyond_the_reach():
    known = gpu(timed(shape(4, 16, 1024), 10.0, 900.0), guard=Guard(reach=3.0))
    assert choose(known, shape(4, 16, 1200)).code == "near"
    far = choose(known, shape(4, 16, 16384))
    assert (far.kernel, far.code) == (None, "far")
    # 1,024 tiles of queries, and 2,112 of the 16,384 that there are.
    assert "(4,16,1024,64) bf16 full (9.0 octaves)" in far.reason


def test_a_reason_says_what_is_predicted_and_from_what():
    known = gpu(timed(shape(4, 16, 1024), 100.0, 150.0), timed(shape(4, 16, 2048), 400.0, 600.0))
    reason = choose(known, shape(4, 16, 1024, heads_kv=4)).reason
    assert reason.startswith("predicted ")
    assert "from (4,16,1024,64) bf16 full (0.0 octaves) and 1 more" in reason
    assert "PyTorch's own 1" in reason


def test_the_order_of_the_table_does_not_matter():
    shapes = [shape(b, 16, s) for b in (1, 2, 8) for s in (256, 1024, 3000)]
    rows = [timed(s, 5.0 + i, 9.0 + i, others=((SMALL, 5.2 + i),)) for i, s in enumerate(shapes)]
    asked = [shape(b, h, s) for b in (1, 3) for h in (4, 20) for s in (300, 777, 5000)]
    first = [choose(gpu(*rows), each) for each in asked]
    for seed in range(3):
        mixed = random.Random(seed).sample(rows, len(rows))
        again = [choose(gpu(*mixed), each) for each in asked]
        assert [(c.code, c.kernel and c.kernel.config) for c in again] == [
            (c.code, c.kernel and c.kernel.config) for c in first
        ]


# ---- the prediction ----
PLAINLY = tiling(PLAIN)


def test_work_of_blocks_that_take_turns_is_that_of_the_busiest():
    """16 heads of 16384 rows in groups that share L2 leave some SMs a fifth more than others."""
    turns = tiling(with_config(PLAIN, BLOCK_N=128, ORDER=1, PERSISTENT=132))
    uneven = shape(1, 16, 16384, head_dim=128, causal=True)
    even = shape(4, 16, 4096, head_dim=128, causal=True)

    def to_mean(of):
        tiles = of.seqlen_q // 128
        mean = sum(n + turns.block_keys / 128 for n in range(1, tiles + 1))
        return work(turns, of, SMS) / (mean * of.batch * of.heads / SMS)

    assert to_mean(uneven) > 1.15
    assert 1 <= to_mean(even) < 1.05


@given(
    heads=st.integers(1, 400),
    seqlen=st.integers(1, 3000),
    causal=st.booleans(),
    block_m=st.sampled_from([64, 128, 192]),
    blocks_per_sm=st.integers(1, 3),
)
def test_more_keys_are_more_work(heads, seqlen, causal, block_m, blocks_per_sm):
    made = replace(PLAINLY, block_m=block_m, blocks_per_sm=blocks_per_sm)
    fewer = shape(1, heads, seqlen, seqlen_k=seqlen, causal=causal)
    more = replace(fewer, seqlen_k=seqlen + 64)
    assert 0 < work(made, fewer, SMS) <= work(made, more, SMS)


def test_a_time_that_memory_took_says_least_of_computing():
    bound, free = shape(64, 32, 256), shape(1, 32, 4096)
    units = learn(PLAINLY, numbered([(bound, memory_us(PLAINLY, bound, CARD)), (free, 900.0)]), CARD).units
    of_bound, of_free = (trust for _, _, trust in units)
    assert of_bound < 0.1
    assert of_free > 0.99


def test_a_second_launch_takes_time():
    """Where two kernels tie on many keys, the one that joins its parts in a cluster wins on few."""
    split = with_config(SPLIT, WARPGROUPS=1)
    many, few = (shape(1, 4, 128, seqlen_k=n) for n in (8192, 512))
    each = (split, with_config(split, SPLIT_CLUSTER=1))
    slow, fast = (choose(gpu(timed(many, 20.0, 400.0, kernel)), few) for kernel in each)
    assert slow.sdpa_us / slow.gain > fast.sdpa_us / fast.gain + 1.0


def test_longest_blocks_of_all_heads_first_share_sms_with_short_ones():
    """12 heads of 13 blocks: 24 SMs hold two."""
    asked = shape(2, 6, 777, head_dim=128, causal=True)
    made = replace(PLAINLY, block_m=64, blocks_per_sm=2)
    mixed, ordered = (work(replace(made, ordered=each), asked, SMS) for each in (False, True))
    longest = 13 + made.block_keys / 64
    assert ordered == pytest.approx(longest / ALONE, rel=0.2)
    assert mixed > 1.2 * ordered


@pytest.mark.parametrize("head_dim", [64, 128])
def test_pytorch_takes_longer_for_a_last_tile_of_keys_that_is_not_whole(head_dim):
    whole = shape(4, 16, 1024, head_dim=head_dim)
    ragged, causal = replace(whole, seqlen_k=1020), replace(whole, mask=CAUSAL)
    more = work(SDPA, ragged, SMS) / work(SDPA, whole, SMS)
    assert more == pytest.approx(1 + 8 / head_dim)
    assert work(PLAINLY, ragged, SMS) == work(PLAINLY, whole, SMS)
    of_causal = replace(causal, seqlen_q=1020, seqlen_k=1020)
    assert work(SDPA, of_causal, SMS) == work(SDPA, causal, SMS)


@pytest.mark.parametrize(
    "hidden",
    [
        {"mask": Interval(100, 0)},
        {"mask": CAUSAL.as_boolean()},
        {"layout": Padded("right", 0)},
        {"mask": CAUSAL, "layout": Padded("left", 40)},
    ],
)
def test_pytorch_passes_nothing_by_that_a_dense_mask_hides(hidden):
    plain = shape(8, 16, 1000, seqlen_k=1100)
    masked = replace(plain, **hidden)
    assert work(SDPA, masked, SMS) == work(SDPA, plain, SMS)
    assert work(PLAINLY, masked, SMS) < 0.8 * work(PLAINLY, plain, SMS)


def test_a_kernel_that_was_fast_on_few_documents_is_not_taken_for_every_mask():
    """It was timed on an eighth of the pairs alone, and nobody has read the mask of a call."""
    asked = shape(4, 16, 4096, boolean=("item",))
    every = timed(replace(asked, mask=FULL.as_boolean()), 700.0, 1700.0)
    documents = timed(replace(asked, mask=pattern("documents", 8)), 100.0, 1700.0, SMALL)
    assert choose(gpu(every, documents), asked).kernel.config == PLAIN.config
    assert choose(gpu(documents), asked).kernel.config == SMALL.config  # nothing else is known


def test_a_wrong_time_spoils_no_other_shape():
    """A busy host may hold up the calls of one shape of a sweep."""
    shapes = [shape(2, 16, 256 * n) for n in (1, 2, 3, 4, 6)]
    right = [(each, 2 + 0.3 * work(PLAINLY, each, SMS)) for each in shapes]
    asked = shape(2, 16, 300)
    known = predict(PLAINLY, right, asked, CARD).time_us
    for times in (4.0, 0.25):
        wrong = [(right[0][0], times * right[0][1]), *right[1:]]
        assert predict(PLAINLY, wrong, asked, CARD).time_us == pytest.approx(known, rel=0.25)
    doubtful = [(right[0][0], 4 * right[0][1]), right[1]]  # of two, nobody knows which
    assert predict(PLAINLY, doubtful, asked, CARD).time_us > 2 * known


def test_what_is_worked_out_once_does_not_grow():
    known = gpu(timed(shape()))
    for n in range(1, 300):
        choose(known, shape(seqlen=n))
        choose(known, shape(head_dim=8 * n + 128))
    assert len(known.kinds) == 1
    assert replace(known, winners=()).kinds == {}, "it is worked out anew for another table"


# ---- few queries ----
@pytest.mark.parametrize("queries", [1, 16, 63])
def test_few_queries_are_served_by_no_shape_of_64_or_more(queries):
    """Whatever the guard is: 64 queries and one are six octaves apart, and no alike."""
    tile = with_config(PLAIN, WARPGROUPS=1)
    known = gpu(timed(shape(1, 32, 64, seqlen_k=32768), 10.0, 900.0, tile), guard=FREE)
    asked = shape(1, 32, queries, seqlen_k=32768)
    assert choose(known, asked).kernel is None
    assert choose(known, shape(1, 32, 65, seqlen_k=32768)).kernel
    few = gpu(timed(shape(1, 32, 8, seqlen_k=32768), 10.0, 900.0, tile), guard=FREE)
    assert choose(few, asked).kernel
    assert choose(few, shape(1, 32, 64, seqlen_k=32768)).kernel is None


# ---- gradients ----
def backward(of, gain=1.2, time_us=900.0):
    own = winner(replace(of, op=BACKWARD), PLAIN_BACKWARD, gain)
    return replace(own, time_us=time_us, sdpa_us=time_us * gain)


BIG = shape(2, 16, 4096, head_dim=128, causal=True)


def test_a_backward_says_nothing_of_a_forward_nor_the_reverse():
    made = gpu(winner(BIG), backward(BIG))
    assert choose(made, replace(BIG, op=BACKWARD)).kernel.family == "flash_bwd_wgmma"
    assert choose(made, BIG).kernel.family == "flash_fwd_wgmma"
    assert choose(gpu(winner(BIG)), replace(BIG, op=BACKWARD)).code == "not_tuned"
    assert choose(gpu(backward(BIG)), BIG).code == "not_tuned"


def test_queries_of_a_group_are_work_of_its_keys():
    """As many products with a quarter of the key heads."""
    grouped = replace(BIG, op=BACKWARD, heads_kv=4)
    choice = choose(gpu(backward(BIG)), grouped)
    assert 900 * 1.2 * 0.8 < choice.sdpa_us < 900 * 1.2 * 1.2


def test_a_backward_that_was_not_timed_must_gain_more():
    other = replace(BIG, op=BACKWARD, batch=3)
    assert choose(gpu(backward(BIG, 1.05)), other).code == "not_faster"
    assert choose(gpu(backward(BIG, 1.12)), other).code == "near"
    assert choose(gpu(backward(BIG, 1.05)), replace(BIG, op=BACKWARD)).code == "tuned"

"""The runs of one GPU in the place of those of another: when they serve, and how good they are."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import dispatch_judged
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages import H100, PLAIN, gpu, shape, winner

from attnsweep.core.errors import StoreError
from attnsweep.serve.runtime import dispatch
from attnsweep.serve.runtime.dispatch import choose
from attnsweep.serve.runtime.table import GpuKey, Guard, known, read_table

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "attnsweep/serve/runtime"
MIB = 1 << 20
H200 = GpuKey((9, 0), 132, 60 * MIB)
CHOSEN_ON = ("batched", "flash_dims", "flash_long", "flash_short", "flash_training")
"""The runs of the H200 that the conditions were chosen on, beside those of the H100."""
LATER = ("h200", "between", "between_short", "held_out", "held_out_later")
CARDS = {"H100": (*CHOSEN_ON, "h100", "decode", *LATER[1:]), "H200": (*CHOSEN_ON, *LATER)}
FOLDERS = {"H100": "h100-80gb-hbm3", "H200": "h200"}
ASKED = shape(2, 8, 512)


def table(*gpus):
    return {each.key: each for each in gpus}


def on_h200(*winners, of=(), guard=None):
    """An H200 with these winners, in a table with an H100 that has those of `of`."""
    own = [replace(gpu(*winners), key=H200, names=("NVIDIA H200",))] if winners else []
    return known(table(*own, gpu(*of, guard=guard)), H200)


# ---- whose rows ----
def test_a_gpu_that_no_other_is_like_has_its_own_rows_alone():
    one = gpu(winner(shape()))
    assert known(table(one), H100) is one
    assert known({}, H100) is None


@pytest.mark.parametrize(
    "other",
    [
        GpuKey((9, 0), 114, 50 * MIB),  # an H100 PCIe
        GpuKey((9, 0), 78, 60 * MIB),  # an H20
        GpuKey((10, 0), 132, 50 * MIB),
        GpuKey((8, 9), 132, 50 * MIB),
    ],
    ids=lambda key: key.label,
)
def test_other_machine_code_or_another_number_of_sms_is_no_stand_in(other):
    of_h100 = gpu(winner(shape()))
    assert known(table(of_h100), other) is None
    own = replace(gpu(winner(shape(2))), key=other)
    assert known(table(of_h100, own), other) is own
    assert known(table(of_h100, own), H100) is of_h100


def test_of_several_the_one_whose_l2_is_nearest_stands_in():
    keys = [GpuKey((9, 0), 132, n * MIB) for n in (50, 60, 100)] + [GpuKey((9, 0), 114, 96 * MIB)]
    gpus = table(*(replace(gpu(winner(shape())), key=key) for key in keys))
    for l2, nearest in ((40, 50), (54, 50), (55, 50), (56, 60), (60, 50), (50, 60), (96, 100)):
        asked = GpuKey((9, 0), 132, l2 * MIB)
        found = known(gpus, asked)
        assert found.key == asked
        assert found.stand_in.key.l2_bytes == nearest * MIB, l2
        assert found.stand_in.stand_in is None, "no stand-in of a stand-in"
        assert bool(found.winners) == (l2 in (50, 60))


# ---- which calls ----
def test_a_gpu_without_rows_is_served_by_those_of_another():
    found = choose(on_h200(of=[winner(ASKED, gain=1.3)]), ASKED)
    assert (found.code, found.gain) == ("stand_in", 1.3)
    assert found.kernel.config == PLAIN.config
    assert found.reason == ("by the runs of NVIDIA H100 80GB HBM3, which stand in for this GPU's: this shape was tuned")
    beside = choose(on_h200(of=[winner(ASKED, gain=1.3)]), replace(ASKED, seqlen_k=500))
    assert beside.code == "stand_in"
    assert "predicted" in beside.reason


def test_where_pytorch_is_as_fast_on_this_gpu_nothing_overrides_that():
    """Measured at the shape, in the other dtype of it, or predicted from near."""
    better = [winner(each, gain=9.0) for each in (ASKED, replace(ASKED, dtype="fp16"))]
    slow = winner(ASKED, gain=1.05, low=0.99)
    twin = winner(replace(ASKED, dtype="fp16"), gain=0.9)
    near = winner(replace(ASKED, seqlen_k=550), gain=0.9)
    for own in (slow, twin, near):
        both = replace(on_h200(own, of=better), twins=(PLAIN,))
        found = choose(both, ASKED)
        assert (found.kernel, found.code) == (None, "not_faster"), own.problem.label


@pytest.mark.parametrize(("gain", "serves"), [(1.09, False), (1.11, True)])
def test_a_gain_must_be_larger_than_on_the_gpu_itself(gain, serves):
    of = [winner(ASKED, gain=gain)]
    assert choose(gpu(*of), ASKED).kernel is not None
    found = choose(on_h200(of=of), ASKED)
    assert (found.kernel is not None) == serves
    if not serves:
        assert (found.code, found.gain) == ("not_tuned", gain)
        assert found.reason.startswith("this GPU was not tuned; by the runs of NVIDIA H100")
        assert found.reason.endswith("too little for another GPU's")


def test_a_guard_that_asks_for_more_counts_at_tuned_shapes_too():
    shy = Guard(margin=0.5)
    assert choose(on_h200(of=[winner(ASKED, gain=1.4)], guard=shy), ASKED).kernel is None
    assert choose(on_h200(of=[winner(ASKED, gain=1.6)], guard=shy), ASKED).code == "stand_in"


@pytest.mark.parametrize("queries", [1, 16, 63, 64, 256])
def test_few_queries_are_left_to_pytorch(queries):
    """Decoding, and few queries for each key; with rows of many queries the code is `far`."""
    for keys in (queries, 4 * queries, 4 * queries + 1, 40 * queries):
        asked = shape(1, 32, queries, seqlen_k=keys)
        of = [winner(asked, gain=3.0)]
        serves = queries >= 64 and keys <= 4 * queries
        found = choose(on_h200(of=of), asked)
        assert (found.kernel is not None) == serves, asked.label
        if not serves:
            assert found.reason.endswith("do not stand in for it: too few queries")
            far = on_h200(winner(shape(64, 16, 8192, seqlen_k=1 << 20)), of=of)
            assert choose(far, asked).code == ("far" if queries >= 64 else "not_tuned")


def test_what_memory_takes_long_for_is_left_to_pytorch():
    moved, computed = shape(64, 32, 256), shape(4, 16, 4096)
    for asked, sdpa_us in ((moved, 150.0), (computed, 900.0)):
        of = [replace(winner(asked, gain=1.5), sdpa_us=sdpa_us, time_us=sdpa_us / 1.5)]
        assert choose(gpu(*of), asked).code == "tuned"
        found = choose(on_h200(of=of), asked)
        assert (found.kernel is None) == (asked is moved)
        if asked is moved:
            assert "memory's time, which differs here" in found.reason


@given(
    batch=st.integers(1, 64),
    heads=st.integers(1, 64),
    seqlen=st.integers(1, 1 << 14),
    head_dim=st.sampled_from([64, 96, 128, 192, 256]),
    causal=st.booleans(),
    dtype=st.sampled_from(["fp16", "bf16"]),
)
def test_a_stand_in_changes_only_what_the_rows_say_nothing_of(batch, heads, seqlen, head_dim, causal, dtype):
    asked = shape(batch, heads, seqlen, head_dim=head_dim, causal=causal, dtype=dtype)
    for own, both in shipped():
        alone, found = choose(own, asked), choose(both, asked)
        if alone.code not in ("far", "not_tuned"):
            assert found == alone
        elif found.kernel is None:
            assert found.code == alone.code
            assert found.reason.startswith(alone.reason)
        else:
            assert found.code == "stand_in"
            assert found.kernel is choose(both.stand_in, asked).kernel
            assert found.gain >= 1.1
        if found.kernel:
            assert (found.kernel.head_dim, found.kernel.dtype, found.kernel.mask) == (head_dim, dtype, asked.variant)


@cache
def shipped():
    gpus = read_table(SHIPPED).gpus
    return [(gpus[key], known(gpus, key)) for key in (H100, H200)]


# ---- how good they are ----
@cache
def judged(by, on, leave_one_out, shapes_of=None):
    runs, held_out = (
        [ROOT / "results" / FOLDERS[card] / run for run in names]
        for card, names in ((by, CARDS[by]), (on, shapes_of or CARDS[on]))
    )
    return [*dispatch_judged.judged(runs, held_out, leave_one_out=leave_one_out)]


def row(by, on, leave_one_out):
    """A row of the page, of what benchmarks/dispatch.py prints."""
    found = dispatch_judged.summary(judged(by, on, leave_one_out))
    kernels = found["of_kernels"]
    served = found["codes"]["stand_in"]
    assert kernels["timed"] == served - found["not_timed"]
    regret = " | ".join(f"{100 * kernels['regret'][n]:.1f} %" for n in ("median", "p95", "worst"))
    return (
        f"| {by} → {on} | {'left out' if leave_one_out else 'as they are'} | {found['shapes']} | "
        f"{served} | {found['not_timed']} | {regret} | {kernels['gain']['least']:.2f} |"
    )


@pytest.mark.nightly(push=0)
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize(("by", "on"), [("H100", "H200"), ("H200", "H100")])
def test_the_page_says_how_good_a_stand_in_is(by, on, leave_one_out):
    page = (ROOT / "docs/tutorials/your-model.md").read_text()
    assert row(by, on, leave_one_out) in page
    rows = judged(by, on, leave_one_out)
    assert {row.code for row in rows} == {"stand_in", "not_tuned"}
    assert all(row.gain is None or row.gain >= 1 for row in rows if row.config)


@pytest.mark.nightly(push=0)
def test_the_page_says_what_the_conditions_keep_away(constants):
    constants(dispatch, STAND_IN_GAIN=1.0, STAND_IN_MEMORY=99.0)
    gains = {}
    for by, on in (("H100", "H200"), ("H200", "H100")):
        rows = judged.__wrapped__(by, on, True)
        gains[on] = sorted(row.gain for row in rows if row.config and (row.gain or 1.0) < 1)
    assert gains["H200"] == []
    page = " ".join((ROOT / "docs/tutorials/your-model.md").read_text().split())
    slower = gains["H100"]
    told = f"{len(slower)} shapes of the H100, left out in turn, would have been slower"
    assert f"{told} than PyTorch's attention, by {100 * (1 / slower[0] - 1):.1f} % at most" in page


@pytest.mark.nightly(push=1, of="the rule on many recorded runs")
def test_the_page_says_how_the_shapes_did_that_came_after_the_conditions():
    found = dispatch_judged.summary(judged("H100", "H200", False, LATER))
    kernels = found["of_kernels"]
    served = found["codes"]["stand_in"]
    page = " ".join((ROOT / "docs/tutorials/your-model.md").read_text().split())
    assert f"**The other {found['shapes']} came later" in page
    assert f"{served} of them get kernels, at most" in page
    assert kernels["timed"] == served - 1
    assert "one of which was not timed" in page
    assert f"at most {100 * kernels['regret']['worst']:.1f} % slower than the best" in page
    assert f"and {kernels['gain']['least']:.2f} times as fast as PyTorch's attention or more" in page


def test_a_shape_is_left_out_of_the_stand_ins_rows_too():
    own = replace(gpu(winner(shape())), key=H200)
    both = known(table(own, gpu(winner(shape(dtype="fp16")), winner(shape(2)))), H200)
    left = dispatch_judged.without(both, shape())
    assert left.winners == ()
    assert [each.problem for each in left.stand_in.winners] == [shape(2)]


def test_runs_that_no_gpu_stands_in_for_cannot_be_judged(tmp_path):
    place = tmp_path / "pcie"
    shutil.copytree(ROOT / "results/h200/flash_short", place)
    facts = json.loads((place / "environment.json").read_text())
    (place / "environment.json").write_text(json.dumps(facts | {"sm_count": 114}))
    run = ROOT / "results/h100-80gb-hbm3/flash_short"
    with pytest.raises(StoreError, match="or of one that stands in for it"):
        [*dispatch_judged.judged([run], [place])]

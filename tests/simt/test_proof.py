"""verify/verifier.py tells right calls from wrong ones, with the kernels of compare.cu on the CPU.

A call is a function in Python that writes to the buffers which a GPU's would.
"""

import itertools
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from attnsweep.compile.launches import Candidate, LaunchPlan
from attnsweep.core import cases, timings
from attnsweep.core.cases import Case
from attnsweep.core.layouts import Packed, Padded
from attnsweep.core.masks import CAUSAL, pattern
from attnsweep.core.problem import Problem
from attnsweep.core.scores import Scores
from attnsweep.verify import compare as judge_module
from attnsweep.verify import encoding, reference
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.compare import Comparer
from attnsweep.verify.device_case import BrokenComparison, DeviceCase, WrongResult
from attnsweep.verify.expected import OPPOSITE, PLAIN
from attnsweep.verify.reference_pool import ReferencePool
from attnsweep.verify.verifier import Verifier

from .device import Device, HostBuffer
from .harness import COMPILER
from .proving import Bench, Call, attend, attend_with_lse, inputs_in

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

PROBLEM = Problem(2, 4, 2, 9, 20, 16, "bf16")
ODD = Problem(1, 2, 1, 5, 7, 3, "fp16")  # a head has half a word
OTHER_V = Problem(2, 4, 2, 9, 20, 24, "bf16", head_dim_v=8)
ODD_V = Problem(1, 2, 1, 5, 7, 8, "fp16", head_dim_v=3)


@pytest.fixture(scope="module")
def opened(simulator):
    """A problem without small cases, for all tests: none may leave damage to the next."""
    device = Device(simulator)
    with pytest.MonkeyPatch.context() as patch:
        device.take_place(patch)
        patch.setattr(cases, "small_cases", lambda problem: ())
        return Bench(device, PROBLEM)


@pytest.fixture
def bench(opened, device, no_small_cases):
    opened.proof.timed.go_to(PLAIN)
    return opened


@pytest.mark.parametrize("problem", [ODD, Problem(1, 1, 1, 3, 5, 8, "fp32"), PROBLEM, OTHER_V, ODD_V], ids=str)
def test_calls_of_any_size_are_compared_on_mixed_inputs(problem, device, no_small_cases):
    bench = Bench(device, problem)
    assert bench.repeat(attend) >= 12

    def last_element_is_wrong_once(problem, buffers, number):
        attend(problem, buffers)
        if number == 9:  # two checked calls, two that tell the time, then six and six
            buffers["o"].main[-2] ^= 1

    with pytest.raises(WrongResult, match=r"a race.*1 of \d+ repeated"):
        bench.repeat(last_element_is_wrong_once)


# -- answers that were kept -----------------------------------------------------------------------


def kept_for(key):
    """A call that keeps its output for each key, which it gets from the inputs."""
    kept = {}

    def write(problem, buffers, number):
        now = key(inputs_in(problem, buffers))
        if now not in kept:
            attend(problem, buffers)
            kept[now] = buffers["o"].main.copy()
        buffers["o"].main[:] = kept[now]

    return write


@pytest.mark.parametrize(
    "key",
    [
        lambda inputs: inputs["k"].ravel()[0],  # tells plain from opposite
        lambda inputs: inputs["v"].ravel()[-1],
        lambda inputs: (inputs["k"].ravel()[0], inputs["k"].ravel()[-1]),
    ],
    ids=["first key", "last value", "both ends"],
)
def test_answers_kept_for_what_some_inputs_are_do_not_pass(key, bench):
    with pytest.raises(WrongResult, match="an answer kept from an earlier call"):
        bench.repeat(kept_for(key))


def test_a_call_that_finds_its_output_written_must_write_it_still(bench):
    """In a timed replay only the first call would compute."""

    def write(problem, buffers, number):
        if buffers["o"].of(np.uint16)[0] == 0xFFFF:
            attend(problem, buffers)

    _, proven = bench.prove(write)

    def replay_twice():
        for _ in range(2):  # once with a poisoned output
            bench.proof.begin()
            bench.call.enqueue()
            bench.proof.end(proven)

    with pytest.raises(WrongResult, match=r"relative error .* drawn anew"):
        replay_twice()


# -- hard inputs at the timed size ----------------------------------------------------------------


def wrong_where_scores_are_large(problem, buffers, number):
    attend(problem, buffers)
    q = encoding.from_bits(inputs_in(problem, buffers)["q"], problem.dtype)
    if np.abs(q).max() > 9 and number > 1:
        buffers["o"].main[-2:] = 0xFF


def on_hard(bench, write=attend, **facts):
    _, proven = bench.prove(write, **facts)
    bench.proof.prepare_hard(0)
    return bench.proof.on_hard(proven, bench.call.enqueue)


HARD = [PROBLEM, OTHER_V, replace(PROBLEM, dtype="fp16", mask=CAUSAL), replace(PROBLEM, dtype="fp32")]
HARD += [replace(PROBLEM, layout=Padded("right", 0)), replace(PROBLEM, mask=pattern("holes", 50))]
HARD += [replace(PROBLEM, scores=Scores(30.0, True)), replace(PROBLEM, batch=1, seqlen_q=20, layout=Packed(3, 40))]


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("problem", HARD, ids=str)
def test_finalists_are_judged_on_hard_inputs_of_the_timed_size(problem, device, no_small_cases):
    bench = Bench(device, problem)
    before = {name: bench.proof.timed.buffers[name].main.copy() for name in "qkv"}
    said = r"NaN or were never written \(.*, (huge|large)_scores, drawn anew\)"
    with pytest.raises(WrongResult, match=said):
        on_hard(bench, wrong_where_scores_are_large)
    assert on_hard(bench) == on_hard(bench, deterministic=False) == 1
    assert all((bench.proof.timed.buffers[name].main == before[name]).all() for name in "qkv")
    assert bench.repeat(attend) >= 12  # as if nothing had been


def test_a_finalist_waits_for_no_reference_on_the_host(device, no_small_cases, monkeypatch):
    bench = Bench(device, PROBLEM)
    monkeypatch.setattr(reference, "exact_rows", None)
    assert on_hard(bench) == 1


def test_what_every_candidate_waits_for_is_computed_before_what_finalists_do(device, no_small_cases, monkeypatch):
    begun = []

    def begin_rounding(pool, problem, rounds_scores, *, hard=False):
        begun.append((rounds_scores, hard))

    monkeypatch.setattr(ReferencePool, "begin_rounding", begin_rounding)
    Verifier(PROBLEM, 3, device, rounds_scores={0, 1, 2})
    assert begun == [(1, False), (2, False), (0, True), (1, True), (2, True)]


def test_a_finalist_is_not_lost_where_hard_inputs_have_no_room(device, no_small_cases):
    device.free_bytes = 1 << 12
    assert on_hard(Bench(device, PROBLEM), wrong_where_scores_are_large) == 0


def test_an_output_is_poisoned_before_every_other_replay(bench):
    poisoned = []
    for _ in range(4):
        bench.proof.outputs["o"].fill(0)
        bench.proof.begin()
        poisoned.append(bool((bench.proof.outputs["o"].main == 0xFF).all()))
    assert poisoned in ([True, False] * 2, [False, True] * 2)


def test_every_call_one_by_one_has_a_poisoned_output(bench):
    seen = []

    def write(problem, buffers, number):
        seen.append((buffers["o"].main == 0xFF).all())
        attend(problem, buffers)

    bench.repeat(write)
    assert all(seen[4:])  # after two that are checked, and two that tell the time


def test_replays_follow_on_other_inputs_each(bench):
    seen = []
    for _ in range(30):
        bench.proof.begin()
        seen.append(bench.proof.timed.buffers["k"].main.tobytes())
    assert all(one != other for one, other in itertools.pairwise(seen))
    assert len(set(seen)) > 4


# -- the sets of inputs ---------------------------------------------------------------------------


def test_turning_back_gives_the_first_inputs(bench):
    timed = bench.proof.timed
    made = verify_inputs.make_inputs(Case(PROBLEM), 3)
    for _ in range(5):
        timed.draw()
    timed.go_to(OPPOSITE)
    for name in "kv":
        assert (timed.buffers[name].of(np.uint16) == made[name].ravel() ^ 0x8000).all()
    timed.go_to(PLAIN)
    timed.go_to(PLAIN)
    for name in "qkv":
        assert (timed.buffers[name].of(np.uint16) == made[name].ravel()).all()


def copies_of(bench, count):
    bench.proof.timed.go_to(PLAIN)
    buffers = bench.proof.timed.buffers
    copies = []
    for _ in range(count):
        copy = {name: HostBuffer(buffer.nbytes) for name, buffer in buffers.items()}
        for name, buffer in copy.items():
            buffer.copy_from(buffers[name])
        copies.append(copy)
    return copies


def test_seconds_that_the_judges_code_takes_are_no_inputs(device, no_small_cases, timed_by, monkeypatch):
    now, found = [0.0], judge_module.judge_cubin
    timed_by(lambda: now[0], timings)

    def compiled(*how):
        now[0] = 4.0
        return found(*how)

    monkeypatch.setattr(judge_module, "judge_cubin", compiled)
    timings.proof_taken()
    Bench(device, PROBLEM)
    taken = timings.proof_taken()
    assert (taken["the judge's code"], taken["inputs"]) == (4.0, 0.0)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("wrong", [None, 0, 4])
def test_every_copy_is_compared_also_beyond_the_slots(wrong, deterministic, bench, constants):
    constants(Comparer, SLOTS=2)
    _, proven = bench.prove(attend, deterministic=deterministic)
    copies = bench.call.copies = copies_of(bench, 4)
    bench.proof.timed.draw()
    bench.proof.begin_cold(copies)
    all_of = [bench.proof.timed.buffers, *copies]
    for buffers in all_of:
        assert (buffers["o"].main == 0xFF).all()
        attend(PROBLEM, buffers)
    if wrong is None:
        bench.proof.end(proven, copies)
        return
    all_of[wrong]["o"].of(np.uint16)[33] ^= 0x4000
    with pytest.raises(WrongResult):
        bench.proof.end(proven, copies)


@pytest.mark.parametrize("wrong", [None, "a bit", "idle"])
def test_cold_copies_are_looked_at_while_the_device_replays(wrong, device, no_small_cases, monkeypatch):
    bench = Bench(device, PROBLEM)
    _, proven = bench.prove(attend)
    copies = bench.call.copies = copies_of(bench, 3)
    bench.proof.begin_cold(copies)
    for buffers in (bench.proof.timed.buffers, *copies):
        attend(PROBLEM, buffers)
    if wrong == "a bit":
        copies[1]["o"].of(np.uint16)[33] ^= 0x0001  # the last one, which float64 does not refuse
    if wrong == "idle":  # once its output is there
        bench.call.write = lambda *given: None
    timings.proof_taken()
    monkeypatch.setattr(Device, "elapsed_us", lambda device, begin, end: 5e6)
    bench.proof.look(proven, copies)
    refused = pytest.raises(WrongResult, match="another output than the same call alone") if wrong else nullcontext()
    with refused:
        assert bench.proof.end(proven, copies, looked=True) == 4
    # Two waits: for the inputs to be drawn, and for the look at the outputs.
    assert timings.proof_taken()["replays"] >= (5.0 if wrong else 9.9)


def test_a_family_without_equal_bits_is_compared_on_mixed_inputs(bench):
    def write(problem, buffers, number):
        attend(problem, buffers)
        buffers["o"].of(np.uint16)[number % 50] ^= 1  # the last bit

    assert bench.repeat(write, deterministic=False) >= 12
    with pytest.raises(WrongResult, match="a race"):
        bench.repeat(write)

    def wrong_once(problem, buffers, number):
        attend(problem, buffers)
        if number == 11:
            buffers["o"].of(np.uint16)[100] ^= 0x0040

    with pytest.raises(WrongResult, match="over the limit"):
        bench.repeat(wrong_once, deterministic=False)


# -- short turns ----------------------------------------------------------------------------------

SHORT = Problem(5, 2, 1, 9, 7, 16, "bf16")  # more heads than the timed problem has


def wrong_from(first, change):
    """A call that is right up to this one, counted on SHORT alone."""
    count = itertools.count()

    def write(problem, buffers, number):
        attend(problem, buffers)
        if problem == SHORT and next(count) >= first:
            change(buffers)

    return write


def test_calls_that_are_right_in_short_turns_pass(bench):
    assert bench.repeat_turns(attend, SHORT) >= 12
    made = bench.turns.device_case
    assert bench.repeat_turns(attend, SHORT, deterministic=False) >= 12
    assert bench.turns.device_case is made  # made once
    assert bench.repeat(attend) >= 12  # the timed problem is as it was
    without = Candidate("k", {}, None, (), 0)
    assert bench.proof.of_turns(without, None, {}) is None


def last_bit(buffers):
    buffers["o"].of(np.uint16)[-1] ^= 1


def sign(buffers):
    buffers["o"].of(np.uint16)[-1] ^= 0x8000


def one_key(buffers):
    buffers["k"].of(np.uint16)[5] ^= 0x8000


@pytest.mark.parametrize(
    ("first", "change", "said"),
    [
        (0, sign, "over the limit"),  # wrong in every call
        (1, sign, "over the limit"),  # on the opposite inputs
        (9, last_bit, r"a race.* repeated calls gave another output"),
        (9, one_key, "a race"),
        (1, one_key, "wrote to its inputs"),
    ],
)
def test_what_only_short_turns_show_is_refused_and_the_next_call_is_not(first, change, said, bench):
    assert bench.repeat(wrong_from(first, change)) >= 12
    with pytest.raises(WrongResult, match=f"{said}.*{re.escape(SHORT.label)}"):
        bench.repeat_turns(wrong_from(first, change), SHORT)
    assert bench.repeat_turns(attend, SHORT) >= 12


def test_an_answer_kept_in_short_turns_is_refused(bench):
    with pytest.raises(WrongResult, match="an answer kept from an earlier call"):
        bench.repeat_turns(kept_for(lambda inputs: inputs["k"].ravel()[0]), SHORT)


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list("qkv"))
@pytest.mark.parametrize("place", [0, -1, "guard"])
def test_a_call_that_writes_to_its_inputs_is_refused_and_the_next_is_not(name, place, bench):
    def write(problem, buffers, number):
        attend(problem, buffers)
        if place == "guard":
            buffers[name].all[3] = 0
        else:
            buffers[name].main[place] = 0x77

    with pytest.raises(WrongResult, match="wrote to its inputs"):
        bench.prove(write)
    bench.prove(attend)


def test_inputs_that_a_race_wrote_to_are_made_again(bench):
    def write(problem, buffers, number):
        attend(problem, buffers)
        if number == 10:
            buffers["k"].main[7] ^= 0x40

    with pytest.raises(WrongResult, match="a race"):
        bench.repeat(write)
    bench.repeat(attend)


@pytest.mark.parametrize("nbytes", [5, 64])
def test_bytes_next_to_a_workspace_are_counted_by_name(nbytes, bench):
    def write(problem, buffers, number):
        attend(problem, buffers)
        buffers["sums"].all[-1] = 0

    with pytest.raises(WrongResult, match=r"wrote 1 bytes outside 'sums'"):
        bench.prove(write, workspaces={"counts": 12, "sums": nbytes})
    bench.prove(attend, workspaces={"counts": 12, "sums": nbytes})


def test_an_element_that_is_not_written_is_counted(bench):
    def write(problem, buffers, number):
        last = buffers["o"].main[-2:].copy()
        attend(problem, buffers)
        buffers["o"].main[-2:] = last

    with pytest.raises(WrongResult, match="1 of 1152 outputs are NaN or were never written"):
        bench.prove(write)


# -- the log-sum-exp ------------------------------------------------------------------------------

ROWS = 2 * 4 * 9


def test_the_log_sum_exp_is_checked_in_every_call(bench):
    how = {"lse": True, "workspaces": {"other": 24, "lse": 4 * ROWS}}
    assert bench.repeat(attend_with_lse, **how) >= 12

    def wrong_once(problem, buffers, number):
        attend_with_lse(problem, buffers)
        if number == 8:
            buffers["lse"].of(np.float32)[-1] += 1e-6

    with pytest.raises(WrongResult, match="a race"):
        bench.repeat(wrong_once, **how)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("wrong", "words"), [(2e-3, "off by 2.0e-03"), (np.nan, "off by 1.0e+300")])
def test_a_wrong_log_sum_exp_is_refused(side, wrong, words, bench):
    def write(problem, buffers, number):
        attend_with_lse(problem, buffers)
        if number == side:
            lse = buffers["lse"].of(np.float32)
            lse[5] += wrong * max(1, abs(lse[5]))

    with pytest.raises(WrongResult, match=r"log-sum-exp .*over the limit 1e-04") as refused:
        bench.prove(write, lse=True, workspaces={"lse": 4 * ROWS})
    assert words in refused.value.detail


def test_a_log_sum_exp_that_has_no_room_is_refused(bench):
    with pytest.raises(WrongResult, match=f"has 16 bytes, and {ROWS} rows of float32 need"):
        bench.prove(attend, lse=True, workspaces={"lse": 16})


# ------------------------------------------------------------------


def test_a_baseline_is_refused_for_nan_alone(bench):
    attend(PROBLEM, bench.proof.timed.buffers)
    right = bench.proof.outputs["o"].of(np.uint16).copy()

    def judged(output, **how):
        def collect(copy, to):
            if output is not None:
                to["o"].upload(output)

        call = Call(lambda *_: None, LaunchPlan(PROBLEM, (), {}), {})
        return bench.proof.of_baseline(call, collect, 0, **how)[0]

    assert max(judged(right).shares.values()) <= 1
    wrong = right.copy()
    wrong[70] ^= 0x4000
    shown = judged(wrong)
    assert shown.shares["row"] > 1
    assert shown.rel_err > shown.limit
    with pytest.raises(WrongResult, match="over the limit"):  # of a callable of the user's
        judged(wrong, held=True)
    wrong[70] = 0x7FC0
    with pytest.raises(WrongResult, match="1 of 1152 outputs are NaN"):
        judged(wrong)
    with pytest.raises(WrongResult, match="1152 of 1152 outputs are NaN or were never written"):
        judged(None)


@pytest.mark.parametrize("what", ["output", "log_sum_exp"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_reference_that_is_off_breaks_the_judge(what, side, device, monkeypatch):
    right = reference.exact_rows

    def off(*args):
        sides = right(*args)
        assert len(sides) == 2
        sides[side][what == "log_sum_exp"][0, -1, 3] *= 1 + 1e-6
        return sides

    monkeypatch.setattr(reference, "exact_rows", off)
    with pytest.raises(BrokenComparison, match="the float64 reference on this GPU is off by"):
        DeviceCase(Case(PROBLEM), 3, device, device.judge("bf16"), two_sided=True)


def test_no_two_looks_share_a_slot(bench, monkeypatch):
    judge, slots = bench.proof.timed.comparer, []
    looks = [(judge, "count_outside"), (judge, "compare_lse"), (bench.proof.timed, "look_at_inputs")]
    for owner, name in looks:

        def look(*args, right=getattr(owner, name)):  # noqa: B008
            before = len(slots)
            right(*args)
            slots[before:] = [args[-1]]

        monkeypatch.setattr(owner, name, look)
    bench.prove(attend_with_lse, lse=True, workspaces={"a": 8, "lse": 4 * ROWS, "b": 5})
    # twice: o, a, lse, b, and the error of lse; the inputs once
    assert sorted(slots) == list(range(11))

"""Attacks on the strict judge: each does not pass, and without its defence it does."""

from __future__ import annotations

import itertools
import math
import re
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from attacks import card, host, strangers
from attacks.strict_bench import said_of
from attacks.test_attacks import judged as judged_friendly
from attacks.test_attacks import no_hard_inputs, no_limits
from attnsweep.baselines.backend import Unavailable
from attnsweep.bench import strict
from attnsweep.core.cases import Case
from attnsweep.verify.compare import Comparer
from attnsweep.verify.device_case import DeviceCase
from attnsweep.verify.verifier import Verifier

# Each starts processes that import PyTorch: too many for a push.
pytestmark = pytest.mark.nightly(push=12, of="attacks")


def place_of(name):
    return "strangers" if hasattr(strangers, name.partition("?")[0]) else "kernels"


def judged(bench, name, rounds=2):
    """What the strict judge says of a callable: `confirmed` and its time, or why not."""
    return said_of(bench, f"attacks.{place_of(name)}:{name}", rounds)


# -- the defences, as what is there without them ---------------------------------------------------


def same_inputs(patch):
    """The first judged call has those that a callable may tune on."""
    patch.setattr(DeviceCase, "redraw", lambda self: self.go_to(0))


def no_chain(patch):
    same_inputs(patch)
    no_hard_inputs(patch)
    patch.setenv(host.NO_CHAIN, "1")


def chains_unseen(patch):
    patch.setattr(Verifier, "of_chain", lambda *args, **how: None)


def no_clock(patch):
    patch.setattr(strict.EmptyChains, "hidden_us", lambda *args: (0.0, 1.0))


def late_and_awake(patch):
    """Outputs are taken when all is done, of a process that goes on."""
    patch.setattr(strict.Caller, "_signal", lambda self, what: None)
    chain = strict.Chains.run

    def later(self, side, name, calls, *of):
        digests, end = self.shared.memory["digests"].of("uint64"), time.monotonic() + 10
        digests[:] = 0
        made = chain(self, side, name, calls, *of)
        while not digests[:calls].all() and time.monotonic() < end:
            time.sleep(0.01)
        return made

    patch.setattr(strict.Chains, "run", later)


def busy_and_awake(patch):
    patch.setattr(strict.Caller, "_signal", lambda self, what: None)
    patch.setattr(strict, "_BUSY", 1e9)
    no_clock(patch)


def inputs_unseen(patch):
    patch.setattr(DeviceCase, "look_at_inputs", lambda self, slot: None)
    patch.setattr("attnsweep.verify.compare.Comparer.look", lambda *args: None)


# Name, what is off, what is said with it, what is said without, and whether it needs a process of
# its own, since it changes the one that it is called in.
OF_CHAINS = ("by_pointer", "by_fingerprint", "smoothed", "knows_the_check")
ATTACKS = [
    *((name, no_chain, "relative error", "confirmed", False) for name in OF_CHAINS),
    ("one_row_late", chains_unseen, "row 8 of head 3", "confirmed", False),
    ("takes_what_was_shared", chains_unseen, "relative error|NaN", "confirmed", False),
    ("writes_beside", inputs_unseen, "wrote to its inputs, or next to them", "confirmed", False),
    ("window", no_limits, "relative error", "confirmed", False),
    ("gain", no_limits, "relative error|scaled", "confirmed", False),
    ("low_precision", no_limits, "relative error", "confirmed", False),
    ("says_less", no_clock, "its events say .* and the judge's clock 100", "confirmed", True),
    ("says_it_ran", chains_unseen, "NaN or were never written", "confirmed", True),
    ("one_behind_outside_chains", same_inputs, "relative error|NaN", "confirmed", True),
    ("runs_later", late_and_awake, "NaN or were never written", "confirmed", True),
]
"""Those that need no more than the chain, its judging, its clock and its sealing."""


def of(make_strict, alone):
    return make_strict("AloneBench" if alone else "HostBench")


@pytest.mark.parametrize(("name", "off", "said", "_", "alone"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_an_attack_does_not_pass(name, off, said, _, alone, make_strict):
    assert re.search(said, judged(of(make_strict, alone), name))


@pytest.mark.parametrize(("name", "off", "_", "said", "alone"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_it_passes_without_its_defence(name, off, _, said, alone, make_strict, monkeypatch):
    off(monkeypatch)
    assert said in judged(of(make_strict, alone), name)


# -- Python in the judge's process: the friendly judge confirms it ---------------------------------


@pytest.mark.parametrize("name", ["refuses_nothing", "finds_the_judge", "says_less"])
def test_the_friendly_judge_confirms_what_attacks_its_process(name, bench, monkeypatch):
    monkeypatch.setattr(DeviceCase, "_refuse", DeviceCase._refuse)  # to be restored
    monkeypatch.setattr(card.Card, "time_us", card.Card.time_us)
    monkeypatch.setattr(f"attacks.kernels.{name}", getattr(strangers, name), raising=False)
    assert judged_friendly(bench, name) == "confirmed"


@pytest.mark.parametrize(
    ("name", "said"), [("refuses_nothing", "relative error"), ("finds_the_judge", "relative error")]
)
def test_the_strict_judge_has_nothing_there(name, said, make_strict):
    assert re.search(said, judged(of(make_strict, True), name))


# -- what pays nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["computes_once", "every_other", "by_content", "in_a_file"])
def test_what_is_computed_once_is_computed_for_each_call(name, make_strict):
    assert judged(make_strict(), name) == "confirmed 100"


@pytest.mark.parametrize(("name", "us"), [("computes_once", 28.75), ("every_other", 52.5)])
def test_it_would_save_time_if_calls_had_the_same_inputs(name, us, make_strict, monkeypatch):
    no_chain(monkeypatch)
    assert float(judged(make_strict(), name).removeprefix("confirmed ")) < us + 1


# -- what others would pay for ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keeps_the_card_busy", "keeps_it_busy_elsewhere"])
def test_a_busy_stranger_stands_still_while_others_are_timed(name, make_strict):
    bench = of(make_strict, True)
    # Its own chain may have much of that work, or none: a thread of it has its turn when it comes.
    assert "busy after its calls" not in judged(bench, name)
    assert judged(bench, "honest") == "confirmed 100"


def test_a_card_that_stays_busy_is_refused(make_strict, monkeypatch):
    monkeypatch.setattr(strict.Caller, "_signal", lambda self, what: None)
    assert "the card is busy after its calls" in judged(of(make_strict, True), "keeps_the_card_busy")


def all_empty_chains_count(patch):
    """As those that follow a stranger's calls did."""
    is_busy = strict.EmptyChains.is_busy

    def counted(self, calls, times):
        self.add(calls, [times])
        return is_busy(self, calls, times)

    patch.setattr(strict.EmptyChains, "is_busy", counted)


def goes_on(bench, patch, before_us, within_us):
    """Have a stranger's kernel go on where its process stands still, until a chain of empty calls.

    It works then: before their events, which the judge's clock sees, or between them.
    """
    own = bench.sides[True, None]
    run = own.run

    def slowed(name, calls):
        before, within = next(before_us), next(within_us)
        bench._chains.host.clock[0] += before + within
        return run(name, calls) + within

    patch.setattr(own, "run", slowed)


def of_one_that_slows_what_is_taken_off(make_strict, patch):
    bench, name = make_strict(), "attacks.kernels:honest"
    bench.add_baseline(name)
    goes_on(bench, patch, itertools.repeat(0.0), itertools.repeat(160.0))
    return bench.replay(name, "warm")


def test_a_kernel_that_goes_on_makes_no_call_shorter(make_strict, monkeypatch):
    assert of_one_that_slows_what_is_taken_off(make_strict, monkeypatch) > 99.9


def test_it_would_if_all_that_empty_calls_take_were_taken_off(make_strict, monkeypatch, constants):
    constants(strict, _DRIFT=math.inf)
    assert of_one_that_slows_what_is_taken_off(make_strict, monkeypatch) < 85


def of_one_that_makes_the_clock_vary(make_strict, patch):
    bench = of(make_strict, True)
    goes_on(bench, patch, itertools.cycle((20.0, 180.0)), itertools.repeat(0.0))
    return judged(bench, "says_a_little_less", rounds=12)


def test_a_stranger_does_not_choose_by_how_much_its_events_may_be_off(make_strict, monkeypatch):
    assert "its events say 88 " in of_one_that_makes_the_clock_vary(make_strict, monkeypatch)


def test_it_would_if_chains_that_follow_its_own_counted(make_strict, monkeypatch):
    all_empty_chains_count(monkeypatch)
    assert of_one_that_makes_the_clock_vary(make_strict, monkeypatch) == "confirmed 88"


def test_a_process_of_the_judges_that_dies_is_no_fault_of_a_callable(make_strict):
    bench, name = make_strict(), "attacks.kernels:honest"
    bench.add_baseline(name)
    bench.sides[True, None].process.kill()
    with pytest.raises(strict.JudgeError, match="its process died"):
        bench.replay(name, "warm")


# -- other shapes and inputs, if it says that it supports them -------------------------------------

SMALL = tuple(
    Case(replace(card.PROBLEM, batch=1, seqlen_q=q, seqlen_k=k), inputs)
    for q, k, inputs in ((5, 17, "normal"), (9, 20, "far_above"), (7, 40, "large_scores"))
)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("promises_all", "NaN or were never written .*, far_above"),
        ("raises_elsewhere", "it supports .* full, but .* raised ValueError: never tried"),
        ("promises_one", "NaN or were never written .*, far_above"),
        ("keeps_its_promise", "confirmed 100"),
    ],
)
def test_it_is_held_to_what_it_says_that_it_supports(name, said, make_strict):
    assert re.search(said, judged(make_strict(small=SMALL), name))


def test_what_it_promises_is_not_looked_at_without_small_cases(make_strict, monkeypatch):
    no_hard_inputs(monkeypatch)
    assert judged(make_strict(), "promises_all") == "confirmed 100"


def test_hard_inputs_are_judged_at_the_timed_size_whatever_it_supports(make_strict):
    assert re.search("NaN .*9x20.*, huge_scores", judged(make_strict(), "without_a_maximum"))


def test_one_that_sleeps_in_a_small_case_is_not_spared_the_others(make_strict, monkeypatch, constants):
    no_hard_inputs(monkeypatch)
    assert "relative error" in judged(make_strict(small=SMALL), "sleeps_in_a_case")
    constants(strict, _LEAST_CASES=1)
    assert judged(make_strict(small=SMALL), "sleeps_in_a_case") == "confirmed 100"


def test_without_them_a_callable_is_right_on_normal_inputs_alone(make_strict, monkeypatch):
    no_hard_inputs(monkeypatch)
    assert judged(make_strict(small=SMALL), "without_a_maximum") == "confirmed 100"


# -- what is judged, and what is said of it --------------------------------------------------------


def test_one_call_of_a_chain_is_judged_in_every_element(make_strict, monkeypatch, constants):
    rows = Comparer.judge_rows
    constants(Comparer, ROWS=1)  # the same one in all calls, which is right
    monkeypatch.setattr(Comparer, "judge_rows", lambda self, *how: rows(self, *how[:3], 1, *how[4:]))
    assert "row 8 of head 3" in judged(make_strict(), "one_row_late", rounds=2)


def test_a_card_whose_clock_was_set_meanwhile_is_refused(make_strict, monkeypatch):
    bench, name = make_strict(), "attacks.kernels:honest"
    bench.add_baseline(name)
    bench.replay(name, "warm")
    bench.confirm(name, 800.0)
    monkeypatch.setitem(card.SETTINGS, "SM clock for programs (MHz)", 1200)
    with pytest.raises(Unavailable, match=r"SM clock for programs \(MHz\) is 1200, and was 1980"):
        bench.confirm(name, 800.0)


def test_calls_are_counted_and_the_judges_clock_agrees(make_strict):
    bench, name = make_strict(), "attacks.kernels:honest"
    bench.add_baseline(name)
    before = bench.confirm(name, 0.0)
    assert bench.trusted_us(name) == pytest.approx(100.0)
    assert bench.replay(name, "warm") == 100.0
    assert bench.confirm(name, 0.0) == before + 4
    with pytest.raises(ValueError, match="no cold time"):
        bench.replay(name, "cold")


# -- what ends its process, and what it says -------------------------------------------------------

ENDS = ("exits", "crashes", "forges")
"""Those that need a process of their own."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exits", r"its process died \(exit code 3\)"),
        ("crashes", r"its process died \(signal SIGSEGV\)"),
        ("forges", "its process wrote what is no answer|says no time|NaN or were never written"),
        ("raises_in_the_third_call", r"raised ValueError: not today \(kernels.py:\d+\)"),
        ("returns_an_input", "returned memory of an input"),
        ("three_outputs", "returned 3 outputs, not 1"),
        ("lazy", "returned Lazy"),
        ("sets_flags", "changed settings of PyTorch"),
        ("nothing_is_here", "cannot import attacks.kernels:nothing_is_here"),
    ],
)
def test_what_fails_is_a_sentence_and_the_next_is_judged(name, said, make_strict):
    bench = of(make_strict, name in ENDS)
    assert re.search(said, judged(bench, name))
    assert judged(bench, "honest") == "confirmed 100"


@pytest.mark.parametrize(
    ("name", "us"),
    [
        *(("honest", 100), ("prints", 100), ("forks", 100), ("waits", 100)),
        *(("with_lse", 200), ("writes", 200), ("turned?layout=bshd", 100)),
    ],
)
def test_a_right_callable_is_confirmed(name, us, make_strict):
    assert judged(of(make_strict, name == "forks"), name) == f"confirmed {us}"


@pytest.mark.parametrize("name", ["with_log2", "with_lse_of_before"])
def test_a_wrong_log_sum_exp_is_wrong(name, make_strict):
    assert "log-sum-exp off by" in judged(make_strict(), name)

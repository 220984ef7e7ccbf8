"""Attacks on the strict judge of gradients: each does not pass, and without its defence it does."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from attacks import card
from attacks.strict_bench import said_of
from attacks.test_attacks import no_limits
from attacks.test_strict import chains_unseen, no_chain
from attnsweep.core.cases import Case
from attnsweep.core.problem import BACKWARD
from attnsweep.verify import calls
from attnsweep.verify.compare import Comparer

# Each starts processes that import PyTorch: too many for a push.
pytestmark = pytest.mark.nightly(push=12, of="attacks")

PROBLEM = replace(card.PROBLEM, op=BACKWARD)


def judged(make_strict, name, rounds=2, **how):
    """What the strict judge says of a backward: `confirmed` and its time, or why not."""
    return said_of(make_strict(problem=PROBLEM, **how), f"attacks.gradients:{name}", rounds)


ATTACKS = [
    ("by_pointer", no_chain, "d[qkv], "),
    ("by_fingerprint", no_chain, "d[qkv], "),
    ("keeps_weights", no_chain, "d[qkv], "),
    ("one_row_late", chains_unseen, "row 19 of head 1 .dv, .*, drawn anew"),
    ("swapped_late", chains_unseen, "d[kv], .*, drawn anew"),
    ("swapped", no_limits, "d[kv], "),
]


@pytest.mark.parametrize(("name", "off", "said"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_an_attack_does_not_pass(name, off, said, make_strict):
    assert re.search(said, judged(make_strict, name, rounds=4))


@pytest.mark.parametrize(("name", "off", "said"), ATTACKS, ids=[a[0] for a in ATTACKS])
def test_it_passes_without_its_defence(name, off, said, make_strict, monkeypatch):
    off(monkeypatch)
    assert judged(make_strict, name) == "confirmed 100"


def test_right_gradients_are_confirmed(make_strict):
    assert judged(make_strict, "honest") == "confirmed 100"


def test_what_is_computed_once_is_computed_for_each_call(make_strict):
    assert judged(make_strict, "computes_once") == "confirmed 100"


def test_it_would_save_time_if_calls_had_the_same_inputs(make_strict, monkeypatch):
    no_chain(monkeypatch)
    assert float(judged(make_strict, "computes_once").removeprefix("confirmed ")) < 30


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two_late", "returned 2 outputs, not 3"),
        ("one_buffer_late", "returned the same memory for two outputs"),
        ("of_its_own_forward", "must be taken as they are given"),
    ],
)
def test_what_breaks_the_contract_is_a_sentence(name, said, make_strict):
    assert said in judged(make_strict, name)


def test_it_is_held_to_what_it_says_that_it_supports(make_strict):
    small = (Case(replace(PROBLEM, batch=1, seqlen_q=5, seqlen_k=17), "normal"),)
    assert re.search("d[qkv], .1,2/1,5x17", judged(make_strict, "promises_all", small=small))
    assert judged(make_strict, "promises_all") == "confirmed 100"


def the_same_row(patch):
    """The judge compares one row of each call, and not the wrong one."""
    rows = Comparer.judge_gradient_rows
    patch.setattr(Comparer, "ROWS", 1)
    patch.setattr(Comparer, "judge_gradient_rows", lambda self, *how: rows(self, *how[:3], 1, how[4]))


def the_first_call(patch):
    """Only the first call of each chain is compared in every element."""
    patch.setattr(calls, "_WHOLE_FLOPS", 0.0)
    random = SimpleNamespace(sample=lambda of, most: [*of][:most])
    patch.setattr(calls.secrets, "SystemRandom", lambda: random)


@pytest.mark.parametrize("off", [the_same_row, the_first_call])
def test_rows_of_each_call_are_compared_and_all_of_some(off, make_strict, monkeypatch):
    off(monkeypatch)
    assert "row 19 of head 1 (dv" in judged(make_strict, "one_call_wrong", rounds=1)


def test_one_wrong_row_of_one_call_passes_without_either(make_strict, monkeypatch):
    the_same_row(monkeypatch)
    the_first_call(monkeypatch)
    assert judged(make_strict, "one_call_wrong", rounds=1) == "confirmed 100"

"""Small cases of a trial are renewed, compared and looked at together: wrong calls are told apart.

As test_proof.py, whose calls are judged on the timed problem.
"""

import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from attnsweep.core import cases as verify_cases
from attnsweep.core.problem import Problem
from attnsweep.verify.device_case import WrongResult

from .device import Device
from .harness import COMPILER
from .proving import Bench, attend, attend_with_lse

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

PROBLEM = Problem(2, 4, 2, 9, 20, 16, "bf16")
ODD = Problem(1, 2, 1, 5, 7, 3, "fp16")  # a head has half a word


def fixture_of(bench, case):
    return next(each for each in bench.proof.small if each.case == case)


def test_right_calls_pass_and_one_wrong_element_of_any_case_does_not(device, few):
    bench = Bench(device, PROBLEM)
    accuracy, proven = bench.prove(attend, small=True)
    assert max(accuracy.shares.values()) <= 1
    assert accuracy.seed == 3
    assert bench.proof.repeat(proven, 12, 1e3) >= 12
    cases = verify_cases.small_cases(PROBLEM)
    # The kinds of padding, of a bias, of backwards and of callables.
    of_others = {"huge_padding", "nan_padding", "finite_mask", "exact", "huge_scores"}
    assert {case.inputs for case in cases} == {*get_args(verify_cases.Inputs)} - of_others
    for wrong in few([*cases], 2):
        fixture = fixture_of(bench, wrong)

        def write(problem, buffers, number, fixture=fixture):
            attend(problem, buffers)
            if buffers["o"] is fixture.buffers["o"]:
                buffers["o"].of(np.uint16)[-1] ^= 0xC000

        with pytest.raises(WrongResult, match=re.escape(f"({wrong.label})")):
            bench.prove(write, small=True)


def test_a_family_is_proved_on_the_cases_that_it_serves(device):
    """It is right on them alone; one that is wrong on some of them is refused by its case."""
    whole, bench = replace(PROBLEM, seqlen_q=64, seqlen_k=64), None

    def serves(problem):
        return problem.heads == problem.heads_kv and problem.seqlen_q == problem.seqlen_k

    def square(problem, buffers, number=0):
        attend(problem, buffers)
        if not serves(problem):
            buffers["o"].fill(0)

    def wrong_above_one(problem, buffers, number=0):
        attend(problem, buffers)
        if 1 < problem.seqlen_q < 64:
            buffers["o"].fill(0)

    whole = replace(whole, heads_kv=4)
    cases = verify_cases.served_cases(verify_cases.small_cases(whole), whole, serves)
    bench = Bench(device, whole)
    bench.prove(square, small=True, cases=cases)
    with pytest.raises(WrongResult):
        bench.prove(square, small=True)
    with pytest.raises(WrongResult, match="1,1,17,16"):
        bench.prove(wrong_above_one, small=True, cases=cases)


@pytest.fixture(scope="module")
def odd(simulator):
    device = Device(simulator)
    with pytest.MonkeyPatch.context() as patch:
        device.take_place(patch)
        yield Bench(device, ODD)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("q", "value", "wrote to its inputs"),
        ("v", "guard behind", "wrote to its inputs"),
        ("k", "guard before", "wrote to its inputs"),
        ("o", "guard behind", "wrote 1 bytes outside 'o'"),
        ("o", "guard before", "wrote 1 bytes outside 'o'"),
        ("sums", "guard behind", "wrote 1 bytes outside 'sums'"),
    ],
)
def test_damage_in_a_small_case_is_refused_and_the_next_call_is_not(name, place, said, odd, few):
    for wrong in few(verify_cases.small_cases(ODD), 2):
        fixture = fixture_of(odd, wrong)

        def write(problem, buffers, number, fixture=fixture):
            attend(problem, buffers)
            if buffers["o"] is fixture.buffers["o"]:
                if place == "value":
                    buffers[name].main[-1] ^= 0x40
                else:
                    buffers[name].all[-1 if place == "guard behind" else 0] ^= 0x40

        with pytest.raises(WrongResult, match=f"{said}.*{re.escape(wrong.label)}"):
            odd.prove(write, small=True, workspaces={"sums": 24})
        odd.prove(attend, small=True, workspaces={"sums": 24})


@pytest.mark.parametrize("victim", [0, -1])
def test_a_small_case_that_writes_to_another_is_refused(victim, odd):
    """Whether its own call comes before or after."""
    fixtures = odd.proof.small
    damaged, by = fixtures[victim], fixtures[len(fixtures) // 2]

    def write(problem, buffers, number):
        attend(problem, buffers)
        if buffers["o"] is by.buffers["o"]:
            damaged.buffers["k"].main[0] ^= 0x40

    with pytest.raises(WrongResult, match=re.escape(damaged.case.label)):
        odd.prove(write, small=True)
    odd.prove(attend, small=True)


def test_an_output_of_a_small_case_that_is_not_written_is_refused(odd):
    """Also where the call before wrote it: outputs are renewed."""
    odd.prove(attend, small=True)
    lazy = odd.proof.small[1]

    def write(problem, buffers, number):
        if buffers["o"] is not lazy.buffers["o"]:
            attend(problem, buffers)

    with pytest.raises(WrongResult, match=f"were never written.*{re.escape(lazy.case.label)}"):
        odd.prove(write, small=True)


def test_log_sum_exps_of_small_cases_are_compared(odd):
    how = {"small": True, "lse": True, "workspaces": {"lse": 4096}}
    odd.prove(attend_with_lse, **how)
    wrong = odd.proof.small[-1]

    def write(problem, buffers, number):
        attend_with_lse(problem, buffers)
        if buffers["o"] is wrong.buffers["o"]:
            buffers["lse"].of(np.float32)[0] += 1

    with pytest.raises(WrongResult, match=f"log-sum-exp off.*{re.escape(wrong.case.label)}"):
        odd.prove(write, **how)

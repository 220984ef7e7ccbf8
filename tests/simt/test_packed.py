"""Packed sequences: the queries of each see its own keys, wherever tiles begin and end."""

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.verify.inputs import make_inputs

from .harness import COMPILER, config_of
from .test_window import CONFIGS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wgmma"]
PROBLEMS = (
    "(1,4/2,300,64) bf16 causal packed(4,0)",
    "(1,2,300x420,64) bf16 window(20,5) packed(3)",
    "(1,2,420x200,64) fp16 causal packed(5,0,1)",  # sequences with more queries than keys
    "(1,2,500,64) bf16 full packed(9,10) sinks",  # mostly shorter than a tile, which has several
    "(1,2,420,72) bf16 window(63,0) packed(3,10)",
)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("words", CONFIGS["flash_fwd_wgmma"])
def test_right_wherever_sequences_begin(simulator, words):
    for number, label in enumerate(PROBLEMS):
        case = Case(Problem.parse(label))
        result = simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=(number % 3,))
        assert result.ok, (words, label, str(result))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_sequences_that_begin_one_token_later_are_wrong(simulator, name):
    case = Case(Problem.parse("(1,2,300,64) bf16 full packed(4)"))
    given = make_inputs(case, 1)
    later = given[name].copy()
    later[1:-1] += 1
    config = config_of(FAMILY, CONFIGS["flash_fwd_wgmma"][0])
    assert simulator.check(FAMILY, config, case, schedules=(0,)).ok
    given |= {name: later}
    assert not simulator.check(FAMILY, config, case, schedules=(0,), inputs=given).ok


@pytest.mark.nightly(push=5)
@pytest.mark.parametrize("words", CONFIGS["flash_fwd_wgmma"][:3])
@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("cu_seqlens_q", [0, 250, 20, 150, 300]),
        ("cu_seqlens_q", [-5, 10**6, 3, -(10**6), 300]),
        ("cu_seqlens_q", [300, 0, 0, 0, 0]),
        ("cu_seqlens_q", [30, 100, 100, 200, 270]),  # tokens before the first, behind the last
        ("cu_seqlens_k", [300, 10, 500, -7, 0]),
    ],
)
def test_each_row_is_written_wherever_a_caller_says_that_sequences_begin(simulator, words, name, begins):
    case = Case(Problem.parse("(1,2,300,64) bf16 full packed(4)"))
    given = make_inputs(case, 1) | {name: np.array(begins, np.int32)}
    result = simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=(0,), inputs=given)
    assert np.isfinite(result.error), (words, begins, str(result))

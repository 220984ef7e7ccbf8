"""A family that serves some problems only: its cases, and what a user reads of it."""

from dataclasses import replace

import pytest

from attnsweep.core.cases import TILE, served_cases, short_turns, small_cases
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config
from attnsweep.family.space import Selection, Space

WHOLE = Problem(4, 32, 32, 4096, 4096, 128, causal=True)
RULES = {
    "no groups": lambda p: p.heads == p.heads_kv,
    "one length": lambda p: p.seqlen_q == p.seqlen_k,
    "whole tiles": lambda p: p.seqlen_q % TILE == 0 == p.seqlen_k % TILE,
    "its heads": lambda p: p.heads == 32,
    "its batch": lambda p: p.batch == 4,
    "all": lambda p: p.heads == p.heads_kv and p.seqlen_q == p.seqlen_k and p.seqlen_q % 128 == 0,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("causal", [True, False])
def test_each_small_case_has_one_that_is_served(name, causal):
    whole, serves = replace(WHOLE, causal=causal), RULES[name]
    cases = small_cases(whole)
    served = served_cases(cases, whole, serves)
    assert all(serves(case.problem) for case in served)
    assert {case.inputs for case in served} == {case.inputs for case in cases}
    kept = [case for case in cases if serves(case.problem)]
    assert set(kept) <= set(served)
    for case in served:
        assert case.problem.seqlen_k <= whole.seqlen_k
        assert (case.problem.head_dim, case.problem.causal) == (128, causal)
        assert not case.problem.has_empty_rows
        assert case.problem.bytes_of("q") < 2**26
    (turns,) = served_cases([short_turns(whole, 132)], whole, serves)
    assert serves(turns.problem)


def test_what_no_small_case_can_be_has_none():
    only = {WHOLE}.__contains__
    assert served_cases(small_cases(WHOLE), WHOLE, only) == ()


DECLARED = """
from attnsweep.family.family import Family, Launch, Param

kernel = Family(
    "mine",
    summary="for squares",
    params=(Param("A", (1, 2), ""),),
    supports=(("one length", lambda p: p.seqlen_q == p.seqlen_k),),
)


@kernel.stage("fwd")
def fwd(config, problem, arch):
    return Launch("mine", (1, 1, 1), 32, ("o",))
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.cu").write_text('extern "C" __global__ void mine(short* o) {}')
    (tmp_path / "mine.py").write_text(DECLARED)
    return tmp_path


def test_a_problem_that_is_not_served_is_refused_with_the_sentence(mine, attnsweep):
    shape = "{batch: 1, heads: 2, seqlen_q: 64, seqlen_k: 128, head_dim: 64}"
    (mine / "s.yaml").write_text(f"arch: sm_90a\nproblems:\n  - {shape}\nkernels:\n  mine: {{}}\n")
    asked = ("run", mine / "s.yaml", "--kernels", mine, "--dry-run")
    result = attnsweep(*asked)
    assert result.returncode == 2
    assert "mine: serves only one length" in result.stderr
    assert "one length" in attnsweep("list", "--kernels", mine).stdout


def test_a_rule_that_raises_names_itself_and_the_problem(mine, attnsweep):
    (mine / "mine.py").write_text(DECLARED.replace("p.seqlen_q ==", "p.length =="))
    shape = "{batch: 1, heads: 2, seqlen: 64, head_dim: 64}"
    (mine / "s.yaml").write_text(f"arch: sm_90a\nproblems:\n  - {shape}\nkernels:\n  mine: {{}}\n")
    result = attnsweep("run", mine / "s.yaml", "--kernels", mine, "--dry-run")
    assert result.returncode == 2
    assert "supports 'one length' of mine raised AttributeError" in result.stderr
    assert "(1,2,64,64) fp16 full" in result.stderr


def test_chunks_that_are_not_served_are_no_candidates(mine):
    from attnsweep.family.discover import load_kernel

    kernel, problem = load_kernel(mine / "mine.py"), Problem(1, 2, 2, 256, 256, 64)
    chosen = Selection({"CHUNK_ROWS": (0, 64), "CHUNK_HEADS": (0, 1)})
    configs = Space.build(kernel, problem, ARCHS["sm_90a"], chosen).configs
    assert {(c["CHUNK_ROWS"], c["CHUNK_HEADS"]) for c in configs} == {(0, 0), (0, 1)}
    assert all(isinstance(config, Config) for config in configs)

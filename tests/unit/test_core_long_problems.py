"""Problems whose calls take long: shorter ones of their kind, and their inputs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attnsweep.core.cases import Case
from attnsweep.core.errors import ProblemError
from attnsweep.core.long_problems import has_shorter, is_long, shorter
from attnsweep.core.problem import Problem
from attnsweep.verify.encoding import Windows, to_bits, values_of
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.measures import row_error
from attnsweep.verify.rounded import reference

LONG = Problem.parse("(1,32,131072,128) bf16 causal")
LONGEST_CALL = 3e12


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("(1,32,131072,128) bf16 causal", "(1,32,16384,128) bf16 causal"),
        ("(16,32,32768,128) fp16 full", "(1,32,8192,128) fp16 full"),
        ("(64,32/8,16384,128) bf16 full", "(1,32/8,8192,128) bf16 full"),
        ("(1,32,16384x262144,64) fp16 causal", "(1,32,4096x65536,64) fp16 causal"),
        ("(1,32,20001x524289,64) fp16 full", "(1,32,5000x131072,64) fp16 full"),
    ],
)
def test_a_long_problem_has_a_shorter_one(label, short):
    problem = Problem.parse(label)
    assert is_long(problem)
    assert has_shorter(problem)
    assert shorter(problem).label == short
    assert not is_long(shorter(problem))


@st.composite
def problems(draw):
    seqlen_q = draw(st.integers(1, 2**20))
    causal = draw(st.booleans())
    try:
        return Problem(
            batch=draw(st.integers(1, 512)),
            heads=(heads := draw(st.sampled_from([1, 2, 8, 24, 32, 128]))),
            heads_kv=draw(st.sampled_from([n for n in (1, 2, 8, 24, 32, 128) if heads % n == 0])),
            seqlen_q=seqlen_q,
            seqlen_k=draw(st.integers(seqlen_q if causal else 1, 2**20)),
            head_dim=draw(st.sampled_from([64, 128, 256])),
            dtype=draw(st.sampled_from(["fp16", "bf16", "fp32", "e4m3"])),
            causal=causal,
        )
    except ProblemError:
        assume(False)


@given(problems())
def test_a_shorter_problem_is_of_the_same_kind(problem):
    short = shorter(problem)
    kind = ("heads", "heads_kv", "head_dim", "dtype", "causal")
    assert [getattr(short, name) for name in kind] == [getattr(problem, name) for name in kind]
    assert short.flops <= LONGEST_CALL or (short.batch == 1 and short.seqlen_q < 2 * 4096)
    assert short.flops <= problem.flops
    assert shorter(short) == short
    if short.seqlen_q < problem.seqlen_q:
        assert short.batch == 1, "sequences go before their length"
        assert short.seqlen_q >= 4096
        halvings = (problem.seqlen_q // short.seqlen_q).bit_length() - 1
        assert short.seqlen_q == problem.seqlen_q >> halvings
        assert short.seqlen_k == max(1, problem.seqlen_k >> halvings)
    if problem.flops <= LONGEST_CALL:
        assert short == problem


SMALL = Problem(2, 4, 2, 40, 56, 64, "bf16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_heads_of_long_inputs_are_normal_values_of_their_seed_and_share_no_row(dtype):
    problem = replace(SMALL, dtype=dtype)
    made, again, other = (make_inputs(Case(problem), seed, windows=True) for seed in (5, 5, 6))
    assert list(made) == ["q", "k", "v"]
    for name, tensor in made.items():
        shape = problem.shape_of(name)
        heads = [*itertools.product(range(shape[0]), range(shape[1]))]
        assert tensor.shape == shape
        assert tensor.nbytes == len(heads) * tensor[0, 0].nbytes
        for at in heads:
            assert tensor[at].shape == shape[2:]
            assert (tensor[at] == again[name][at]).all()
            assert (tensor[at] != other[name][at]).mean() > 0.9
        rows = [row.tobytes() for at in heads for row in tensor[at]]
        assert len(set(rows)) == len(rows)
    values = values_of(made, problem, "q", 1, 3)
    assert (to_bits(values.astype(np.float32), dtype) == made["q"][1, 3]).all()
    assert abs(values.mean()) < 0.1
    assert values.std() == pytest.approx(1, abs=0.05)


def test_a_kernel_that_takes_another_heads_keys_and_values_is_wrong_on_long_inputs():
    """Were keys and values moved by as much, it would often be right."""
    problem = Problem(1, 3, 3, 4, 4000, 64, "bf16")
    made = make_inputs(Case(problem), 0, windows=True)
    alone, rows = replace(problem, heads=1, heads_kv=1), np.arange(4)

    def out(head_kv):
        of = {"q": made["q"][0, 0], "k": made["k"][0, head_kv], "v": made["v"][0, head_kv]}
        return reference({name: bits[None, None] for name, bits in of.items()}, alone, rows)

    right = out(0)
    for other in (1, 2):
        assert row_error(out(other), right) > 0.5


def test_inputs_of_long_problems_alone_are_windows():
    small = make_inputs(Case(SMALL), 3)
    assert all(isinstance(small[name], np.ndarray) for name in "qkv")
    long = Problem(8, 8, 8, 40_000, 40_000, 64, "bf16")
    assert is_long(long)
    assert all(isinstance(tensor, Windows) for tensor in make_inputs(Case(long), 3).values())

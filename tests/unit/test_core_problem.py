"""Problem: its counts against brute force, and the shapes it refuses."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attnsweep.core.errors import ProblemError
from attnsweep.core.problem import DTYPE_BYTES, Problem

small = st.integers(1, 6)


@st.composite
def problems(draw):
    heads_kv = draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    return Problem(
        batch=draw(small),
        heads=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=draw(small) * (16 if dtype.startswith("e4m3") else 1),
        dtype=dtype,
        causal=draw(st.booleans()) and seqlen_q <= seqlen_k,
    )


@given(problems())
def test_min_bytes_is_every_tensor_once(problem):
    elements = scales = 0
    for tensor in "qkvo":
        batch, heads, rows, columns = problem.shape_of(tensor)
        assert (batch, columns) == (problem.batch, problem.head_dim)
        assert heads == (problem.heads if tensor in "qo" else problem.heads_kv)
        assert rows == (problem.seqlen_q if tensor in "qo" else problem.seqlen_k)
        elements += batch * heads * rows * columns
    if not problem.scales:
        assert problem.min_bytes == elements * DTYPE_BYTES[problem.dtype]
        return
    outputs = problem.batch * problem.heads * problem.seqlen_q * problem.head_dim
    for name in ("q", "k", "v"):
        batch, heads, *blocks = problem.shape_of(f"{name}_scale")
        assert (batch, heads) == (problem.batch, problem.heads_kv)
        blocked = problem.dtype == "e4m3_block" and name != "q"
        assert blocks == ([-(-problem.seqlen_k // 128)] if blocked else [])
        scales += batch * heads * math.prod(blocks)
    assert problem.min_bytes == elements + outputs + 4 * scales  # o has two bytes


def test_counts_of_a_shape_from_the_literature():
    """FlashAttention counts 4 * seqlen^2 * head_dim * heads * batch, halved when causal."""
    full = Problem(4, 16, 16, 4096, 4096, 128)
    causal = Problem(4, 16, 16, 4096, 4096, 128, causal=True)
    assert full.flops == 549_755_813_888
    assert causal.flops / full.flops == pytest.approx(0.5, rel=1e-3)
    assert causal.flops * 2 > full.flops  # the diagonal is seen
    assert full.scale == pytest.approx(128**-0.5, rel=1e-12)


@pytest.mark.parametrize("name", ["batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_is_smaller_than_one(name, value):
    shape = {"batch": 1, "heads": 1, "heads_kv": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 1}
    with pytest.raises(ProblemError, match=f"^{name} must be at least 1, not {value}$"):
        Problem(**{**shape, name: value})


@given(st.integers(1, 64), st.integers(1, 64))
def test_heads_kv_must_divide_heads(heads, heads_kv):
    assume(heads % heads_kv)
    with pytest.raises(ProblemError, match=f"{heads} is not a multiple of {heads_kv}"):
        Problem(1, heads, heads_kv, 1, 1, 64)


def test_unknown_dtype():
    with pytest.raises(ProblemError, match="unknown dtype 'fp8': use one of fp16, bf16, fp32"):
        Problem(1, 1, 1, 1, 1, 64, "fp8")


@pytest.mark.parametrize("dtype", ["e4m3", "e4m3_tensor", "e4m3_block"])
def test_an_fp8_row_has_a_multiple_of_16_bytes(dtype):
    with pytest.raises(ProblemError, match="head_dim 72: FP8 tiles have rows of 16 bytes"):
        Problem(1, 1, 1, 8, 8, 72, dtype)
    made = Problem(1, 4, 2, 8, 300, 80, dtype)
    assert made.inputs == ("q", "k", "v", "q_scale", "k_scale", "v_scale")
    assert made.out_dtype == "bf16"

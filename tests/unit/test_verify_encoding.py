"""e4m3 to the bit, scales that fit their parts, and scales that cannot be."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.core import cases
from attnsweep.core.cases import Case
from attnsweep.core.errors import ProblemError
from attnsweep.core.problem import Problem
from attnsweep.verify import encoding, inputs

CODES = np.arange(256, dtype=np.uint8)
# The format by its definition: OCP's 8-bit floating point, E4M3.
VALUES = [
    (-1) ** (code >> 7)
    * ((code & 7) * 2.0**-9 if code >> 3 & 15 == 0 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7))
    for code in range(127)
]


def test_every_code_has_its_value():
    values = encoding.from_bits(CODES, "e4m3")
    assert values[:127].tolist() == VALUES
    assert values[128:255].tolist() == [-value for value in VALUES]
    assert np.isnan(values[[127, 255]]).all()
    assert VALUES[-1] == encoding.E4M3_MAX == 448


@given(st.floats(width=32, allow_nan=False))
def test_rounding_is_to_the_nearest_and_half_way_to_an_even_code(value):
    code = int(encoding.to_bits(np.array([value], np.float32), "e4m3")[0])
    assert code >> 7 == (np.signbit(np.float32(value)))
    away = [abs(min(abs(value), 448.0) - known) for known in VALUES]
    nearest = [known for known, gap in enumerate(away) if gap == min(away)]
    assert code & 0x7F in nearest
    if len(nearest) == 2:
        assert code % 2 == 0


def test_nan_is_kept_and_all_other_values_are_finite():
    stored = encoding.to_bits(np.array([np.nan, np.inf, -np.inf, 1e30], np.float32), "e4m3")
    assert stored.tolist() == [0x7F, 0x7E, 0xFE, 0x7E]


DTYPES = ("e4m3", "e4m3_tensor", "e4m3_block")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", sorted({*get_args(cases.Inputs)} - {"exact"}))  # its q is 0
def test_scales_fill_the_range_and_no_input_is_nan(dtype, case):
    problem = Problem(2, 4, 2, 70, 300, 32, dtype)
    made = inputs.make_inputs(Case(problem, case), 7)
    assert tuple(made) == problem.inputs
    encoding.check_scales(made, problem)
    for name in "qkv":
        bits = made[name]
        assert bits.dtype == np.uint8
        assert ((bits & 0x7F) != 0x7F).all()
        largest = (bits & 0x7F).reshape(2, 2, -1).max(axis=-1)
        scales = made[f"{name}_scale"]
        if dtype == "e4m3_tensor":
            assert largest.max() == 0x7E
            assert np.unique(scales).size == 1
        else:
            assert (largest == 0x7E).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_heads_are_those_that_were_drawn_but_for_rounding(dtype):
    problem = Problem(2, 4, 2, 70, 300, 32, dtype)
    drawn = inputs.draw(Case(problem), 7)
    made = encoding.stored(drawn, problem)
    for name in "qkv":
        for batch in range(2):
            for head in range(4 if name == "q" else 2):
                values = encoding.values_of(made, problem, name, batch, head)
                exact = drawn[name][batch, head]
                head_kv = head // 2 if name == "q" else head
                least = made[f"{name}_scale"][batch, head_kv].max() * 2.0**-10
                assert (np.abs(values - exact) <= np.maximum(np.abs(exact) / 16.0, least)).all()
                some = np.array([0, 3, 69])
                chosen = encoding.values_of(made, problem, name, batch, head, some)
                assert (chosen == values[some]).all()


def test_a_part_of_zeros_has_scale_1():
    problem = Problem(1, 2, 2, 4, 4, 16, "e4m3")
    drawn = inputs.draw(Case(problem), 0) | {"v": np.zeros((1, 2, 4, 16), np.float32)}
    made = encoding.stored(drawn, problem)
    assert (made["v_scale"] == 1).all()
    assert (made["v"] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_cannot_be_are_refused_in_words(dtype):
    problem = Problem(2, 4, 2, 8, 200, 16, dtype)
    made = inputs.make_inputs(Case(problem), 0)
    for name in problem.inputs[3:]:
        with pytest.raises(ProblemError, match=f"{name} is missing: {dtype} has a scale"):
            encoding.check_scales({n: x for n, x in made.items() if n != name}, problem)
        with pytest.raises(ProblemError, match=f"{name} is float64"):
            encoding.check_scales(made | {name: made[name].astype(float)}, problem)
        with pytest.raises(ProblemError, match=f"{name} is float32 .* takes float32"):
            encoding.check_scales(made | {name: made[name][:1]}, problem)
        for wrong in (0.0, -0.5, np.inf, np.nan):
            scale = made[name].copy()
            scale.flat[-1] = wrong
            with pytest.raises(ProblemError, match="a scale is finite and above 0"):
                encoding.check_scales(made | {name: scale}, problem)

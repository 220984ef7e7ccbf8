"""The proof of calls in FP8: scales that are left out, taken from elsewhere, or written to."""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.errors import ProblemError
from attnsweep.core.problem import Problem
from attnsweep.verify import encoding, measures
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify import rounded as verify_rounded
from attnsweep.verify.device_case import DeviceCase, WrongResult
from attnsweep.verify.oracle import oracle_of

from .harness import COMPILER
from .proving import Bench, attend, inputs_in

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

FP8 = [Problem(2, 4, 2, 65, 130, 16, dtype) for dtype in ("e4m3", "e4m3_tensor", "e4m3_block")]


@pytest.fixture(params=FP8, ids=lambda p: p.dtype)
def in_fp8(request, device, no_small_cases):
    return Bench(device, request.param)


@pytest.mark.nightly(push=1)
def test_a_right_call_in_fp8_passes_in_every_call(in_fp8):
    accuracy, _ = in_fp8.prove(attend)
    assert 0 < accuracy.rel_err <= accuracy.limit
    assert in_fp8.repeat(attend) >= 12
    assert in_fp8.repeat_turns(attend, replace(in_fp8.problem, batch=3, seqlen_k=20)) >= 12


@pytest.mark.nightly(push=1)
def test_what_the_format_costs_is_shown_beside_what_the_kernel_adds(in_fp8):
    accuracy, _ = in_fp8.prove(attend)
    assert accuracy.format_err > accuracy.rel_err  # outlying channels cost more than P's rounding
    assert abs(accuracy.total_err - accuracy.format_err) <= accuracy.rel_err * 1.01

    def exact(problem, buffers, number=0):
        rows = np.arange(problem.seqlen_q)
        out = verify_rounded.reference(inputs_in(problem, buffers), problem, rows)
        buffers["o"].upload(encoding.to_bits(out.astype(np.float32), "bf16"))

    problem, rows = in_fp8.problem, np.arange(in_fp8.problem.seqlen_q)
    drawn = verify_inputs.draw(Case(problem), 3)
    before = verify_rounded.reference(drawn, replace(problem, dtype="fp32"), rows)
    rounded = verify_rounded.reference(verify_inputs.make_inputs(Case(problem), 3), problem, rows)
    assert accuracy.format_err == pytest.approx(measures.row_error(rounded, before), rel=0.05)
    better, _ = in_fp8.prove(exact)
    assert better.rel_err <= 2.0**-8
    assert better.format_err == accuracy.format_err
    assert better.total_err == pytest.approx(better.format_err, abs=2.0**-8)


def with_scale(name, change):
    """A call that is right, except that it changes one scale first."""

    def write(problem, buffers, number=0):
        inputs = inputs_in(problem, buffers)
        inputs[name] = change(inputs[name])
        out = verify_rounded.reference(inputs, problem, np.arange(problem.seqlen_q))
        buffers["o"].upload(encoding.to_bits(out.astype(np.float32), "bf16"))

    return write


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_call_that_leaves_out_a_scale_is_refused(name, in_fp8):
    with pytest.raises(WrongResult, match="over the limit"):
        in_fp8.prove(with_scale(name, np.ones_like))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_call_that_takes_another_heads_scale_is_refused(name, device, no_small_cases):
    with pytest.raises(WrongResult, match="over the limit"):
        Bench(device, FP8[0]).prove(with_scale(name, lambda scale: np.roll(scale, 1, axis=1)))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_call_that_takes_another_blocks_scale_is_refused(name, head_dim, device, no_small_cases):
    problem = Problem(1, 2, 2, 65, 300, head_dim, "e4m3_block")
    with pytest.raises(WrongResult, match="over the limit"):
        Bench(device, problem).prove(with_scale(name, lambda scale: np.roll(scale, 1, axis=2)))


@pytest.mark.nightly(push=1)
def test_a_call_that_writes_to_a_scale_is_refused(in_fp8):
    def write(problem, buffers, number=0):
        attend(problem, buffers)
        buffers["v_scale"].of(np.float32)[-1] *= 2

    with pytest.raises(WrongResult, match="wrote to its inputs"):
        in_fp8.prove(write)


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.inf, np.nan])
def test_no_fp8_case_is_opened_with_a_scale_that_cannot_be(wrong, device):
    case = Case(FP8[0])
    known = oracle_of(case.problem).expected(case, 3)
    known.inputs["k_scale"][1, 0] = wrong
    with pytest.raises(ProblemError, match=r"k_scale\[1, 0\] is .*finite and above 0"):
        DeviceCase(case, 3, device, device.judge("e4m3"), known=known)

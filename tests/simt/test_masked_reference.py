"""compare.cu's reference of problems that hide more than causal ones, against NumPy's."""

import math

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.layouts import Packed, Padded
from attnsweep.core.masks import CAUSAL, FULL, Interval, pattern
from attnsweep.core.problem import Problem
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify import measures
from attnsweep.verify.device_case import DeviceCase
from attnsweep.verify.reference import exact_rows

from .device import HostBuffer, uploaded
from .harness import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

TOP_LEFT = Interval(None, 0, top_left=True)
PROBLEMS = (
    Problem(1, 2, 1, 9, 140, 64, "bf16", TOP_LEFT),
    Problem(1, 1, 1, 140, 70, 24, "fp32", TOP_LEFT),
    Problem(2, 2, 1, 5, 300, 16, "fp16", Interval(7, 2, top_left=True)),
    Problem(1, 2, 2, 200, 70, 64, "bf16", CAUSAL),  # two tiles of queries see no key
    Problem(2, 4, 2, 130, 20, 32, "e4m3", Interval(3, 0)),
    Problem(1, 1, 1, 200, 70, 130, "fp16", Interval(8, 3, top_left=True)),  # the last see none
    Problem(3, 2, 1, 130, 200, 64, "bf16", CAUSAL, Padded("left", 0)),
    Problem(5, 4, 2, 70, 300, 24, "fp32", FULL, Padded("right", 0, 1)),
    Problem(2, 4, 4, 150, 150, 32, "e4m3_block", Interval(30, 3), Padded("right", 40)),
    Problem(2, 2, 1, 200, 300, 64, "bf16", pattern("blocks", 20)),
    Problem(2, 4, 2, 130, 70, 24, "fp16", pattern("holes", 30)),
    Problem(3, 2, 1, 70, 300, 32, "e4m3", pattern("padding", 0)),
    Problem(1, 1, 1, 150, 90, 130, "fp32", pattern("documents", 5)),
    Problem(1, 4, 2, 300, 300, 64, "bf16", CAUSAL, Packed(4, 0)),
    Problem(1, 2, 1, 200, 330, 24, "fp32", Interval(30, 7), Packed(5, 10, 1)),
    Problem(1, 2, 2, 330, 100, 64, "fp16", CAUSAL, Packed(6, 0, 2)),  # queries without keys
    Problem.parse("(3,4/2,3x70,24) bf16 causal paged(16,1x70+1x2+1x33)"),
    Problem.parse("(3,6/1,3x70,96/64) bf16 causal paged(16,1x70+1x2+1x33) value_in_key"),
    Problem.parse("(4,2,2x90,64) fp16 window(9,0) paged(1,hnd,e4m3,2x90+1x0+1x20,shared5) softcap(5) sinks"),
)


def of_device(device, problem, inputs):
    """The device's output and log-sum-exp."""
    shape = problem.shape_of("o")
    out, lse = HostBuffer(8 * math.prod(shape)), HostBuffer(8 * math.prod(shape[:3]))
    buffers = {name: uploaded(bits) for name, bits in inputs.items()}
    device.judge(problem.dtype).reference(buffers, problem, out, lse)
    return out.of(np.float64).reshape(shape), lse.of(np.float64).reshape(shape[:3])


@pytest.mark.nightly(push=6)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_the_device_sees_the_keys_that_numpy_sees(problem, device):
    inputs = verify_inputs.make_inputs(Case(problem), 1)
    out, lse = of_device(device, problem, inputs)
    ((expected, log_sums),) = exact_rows(inputs, problem, np.arange(problem.seqlen_q))
    assert (np.isneginf(lse) == np.isneginf(log_sums)).all()
    assert (out[np.isneginf(log_sums)] == 0).all()
    assert measures.row_error(out, expected) <= 1e-12
    assert measures.apart(lse, log_sums).max() <= 1e-12


@pytest.mark.parametrize("inputs", ["huge_padding", "far_below", "one_hot"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_hard_padding(inputs, dtype, device):
    problem = Problem(3, 2, 1, 70, 200, 64, dtype, CAUSAL, Padded("left", 0))
    made = verify_inputs.make_inputs(Case(problem, inputs), 1)
    out, lse = of_device(device, problem, made)
    ((expected, log_sums),) = exact_rows(made, problem, np.arange(problem.seqlen_q))
    assert measures.row_error(out, expected) <= 1e-11
    size = np.maximum(1, np.abs(np.where(np.isfinite(log_sums), log_sums, 1)))
    assert (measures.apart(lse, log_sums) / size).max() <= 1e-12


@pytest.mark.parametrize(
    "label",
    [
        "(3,4/2,2x70,64) bf16 causal paged(16,1x70+1x0+1x33)",
        "(3,4/2,2x70,64) bf16 causal paged(16,e4m3,1x70+1x0+1x33)",
        "(3,4/1,2x70,96/64) bf16 causal paged(16,1x70+1x0+1x33) value_in_key",
    ],
)
def test_a_paged_case_on_the_device_is_proved_and_drawn_anew(label, device):
    problem = Problem.parse(label)
    case = DeviceCase(Case(problem), 1, device, device.judge("bf16"), two_sided=True)
    before = {name: buffer.main.copy() for name, buffer in case.buffers.items()}
    case.go_to(1)
    assert (case.buffers["k"].main != before["k"]).any()
    case.redraw()
    changed = {name for name, buffer in case.buffers.items() if (buffer.main != before[name]).any()}
    assert {"q"} <= changed <= {"q", "k", "v", "o"}
    case.go_to(0)
    assert all((case.buffers[name].main == before[name]).all() for name in problem.inputs)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_a_padded_case_on_the_device_is_proved_and_timed_in_two_sides(dtype, device):
    problem = Problem(3, 2, 1, 70, 200, 64, dtype, CAUSAL, Padded("left", 0))
    case = DeviceCase(Case(problem), 1, device, device.judge(dtype), two_sided=True)
    assert case.judged_rows == 2 * problem.rows_with_keys < case.rows
    case.comparer.clear()
    case.look_at_inputs(0)
    before = case.comparer.counts(1)[0]
    case.buffers["key_range"].main[0] ^= 1  # a kernel that writes to it is found
    case.comparer.clear()
    case.look_at_inputs(0)
    assert case.comparer.counts(1)[0] != before
    assert case.renew_inputs(0)
    case.comparer.clear()
    case.look_at_inputs(0)
    assert case.comparer.counts(1)[0] == before


def test_log_sum_exps_of_rows_without_keys(device):
    problem = Problem(1, 1, 1, 200, 70, 64, "bf16", CAUSAL)
    case = DeviceCase(Case(problem), 1, device, device.judge("bf16"))
    right = case.sides[0]["lse"].of(np.float64).astype(np.float32)
    for row, value, worst in ((0, -np.inf, 0), (0, 1.0, 1e300), (199, -np.inf, np.inf)):
        written = right.copy()
        written[row] = value
        case.comparer.clear()
        case.compare_lse(uploaded(written), 3)
        found = case.comparer.counts(4).view(np.float64)[3]
        assert found == pytest.approx(worst, abs=1e-6)

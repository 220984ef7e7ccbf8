"""FP8 on a GPU: the judge proves its reference, and baselines take the same bytes."""

import numpy as np
import pytest

from attnsweep.bench.gpu import WorkerError
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.specs.model import OWN_BF16
from attnsweep.verify import fp8
from attnsweep.verify.encoding import round_to

pytestmark = pytest.mark.gpu

DTYPES = ("e4m3", "e4m3_tensor", "e4m3_block")
# Most that a row of `opened`'s problem may err by because bf16 holds the values of the bytes with 8
# bits: about twice what NumPy finds. numerics.row_error of float64 attention on q, k and v rounded
# to bf16 is 0.009 to 0.021 for seeds 0 to 8 and each dtype, nearly all of it K's, whose outlying
# channels are 8 from 0. A median row errs by 0.004; P and the output in bf16 add up to 0.001.
OWN_BF16_MOST = 0.04


def opened(worker, dtype, causal=True):
    """Opening proves the device's reference against NumPy's, or raises."""
    problem = Problem(2, 8, 4, 1024, 1024, 128, dtype, causal=causal)
    worker.open(problem, replay_us=200, seed=5)
    return problem


def baseline(worker, name):
    """The accuracy of a baseline, or why it cannot run."""
    try:
        return worker.add_baseline(name)[0]
    except WorkerError as error:
        return error.detail if error.status is Status.SKIPPED else f"{error.status}!"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_of_scaled_inputs_is_numpys(worker, dtype, causal):
    opened(worker, dtype, causal)


@pytest.mark.parametrize("name", ["flash_attn_3_fp8", "cudnn", OWN_BF16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_baseline_is_near_the_values_that_the_bytes_stand_for_or_says_why_not(worker, name, dtype):
    if arch_named(worker.describe().arch).compute_capability < (8, 9):
        pytest.skip("this GPU has no FP8")
    opened(worker, dtype)
    found = baseline(worker, name)
    if isinstance(found, str):
        assert found
        assert not found.endswith("!"), found
        pytest.skip(f"{name}: {found}")
    # A scale that is left out, or another head's, is wrong by far more than a half.
    assert found.timed_err <= (OWN_BF16_MOST if name == OWN_BF16 else 0.25)
    assert found.format_err > 0.02
    assert abs(found.total_err - found.format_err) <= 1.1 * found.timed_err


def test_baselines_that_have_no_such_scales_say_so(worker):
    opened(worker, "e4m3_block")
    for name in ("flash_attn_3_fp8", "cudnn", "torch_flash", "unfused"):
        assert isinstance(baseline(worker, name), str)


@pytest.mark.parametrize("k", [32, 64, 128])
@pytest.mark.parametrize("spread", [0, 6], ids=["alike", "spread"])
def test_the_tensor_cores_sum_products_as_fp8_sums_does(k, spread):
    """Limits count on it: most sums are equal, and the others err by as much on average."""
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the model is of Hopper's products")
    rng = np.random.default_rng(k + spread)
    a, b = (rng.standard_normal((64, k)).astype(np.float32) for _ in range(2))
    a *= 2.0 ** rng.integers(-spread, spread + 1, a.shape).astype(np.float32)
    a, b = round_to(a, "e4m3"), round_to(b, "e4m3")
    left, right = (torch.tensor(x).cuda().to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device="cuda")
    # Without fast accumulation cuBLAS adds sums of 128 products in fp32.
    product = torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
    found, exact = product.cpu().numpy().astype(np.float64), a.astype(np.float64) @ b.T
    model = fp8.matmul(a, b.T, by_term=True)
    assert (found == model).mean() > 0.5
    assert abs(found - exact).mean() == pytest.approx(abs(model - exact).mean(), rel=0.15)

"""A model of DeepSeek's kind: served with head_dim 192 and 128 of v, and decoded with absorbed weights."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("attnsweep.serve.mla")

from attending import Kernel  # noqa: E402
from deepseeks import deepseek, near_after_steps  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from gemmas import float64, logits, skip_with_masks  # noqa: E402
from packages import package_of, shape, winner  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_model_of_deepseeks_kind(tmp_path, registered, how):
    """Its logits are as near to those of float64 attention as with PyTorch's own."""
    driver = FakeDriver(Kernel())
    package = package_of(
        tmp_path, driver, winner(shape(2, 4, 128, head_dim=192, head_dim_v=128, causal=True), gain=4.0)
    )
    model, ids = deepseek(), torch.randint(1, 128, (2, 128), generator=torch.manual_seed(1))
    own, theirs = logits(float64(model), ids), logits(model, ids)
    model.set_attn_implementation(package.register() if registered else "sdpa")
    if how == "compiled" and not registered:
        skip_with_masks(model, ids)
    torch._dynamo.reset()
    step = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    with nullcontext() if registered else package.enable():
        ours = logits(step, ids)
    assert (ours - own).norm() <= 1.5 * (theirs - own).norm()
    assert package.counters() == {"kernel": 2}, package.counters()
    assert [m["dims"][0] for m in driver.maps][:4] == [192, 192, 128, 128]


@pytest.mark.parametrize("form", ["mla_decode", "qv"])
def test_decoding_with_absorbed_weights(form):
    near_after_steps(deepseek(), form)

"""Models of benchmarks/, small and on the CPU: what it says of right and of wrong kernels."""

import contextlib
import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SDPA = F.scaled_dot_product_attention


@pytest.fixture(scope="module")
def models():
    sys.path.insert(0, str(BENCHMARKS))
    module = importlib.import_module("models")
    module.MOST_S, module.NEW = 0.1, 8
    yield module
    sys.path.remove(str(BENCHMARKS))


class Package:
    """Stands for an exported package whose output is `factor` times what it should be."""

    __version__ = "0"

    def __init__(self, factor=1.0):
        self.factor, self.calls = factor, 0

    def attention(self, *args, **options):
        self.calls += 1
        return self.factor * SDPA(*args, **options)

    @contextlib.contextmanager
    def enable(self):
        F.scaled_dot_product_attention = self.attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = SDPA

    def counters(self):
        return {"kernel": self.calls} if self.calls else {}


def run(models, package, names=("llama", "qwen", "diffusion"), **options):
    made = [models.built(name, "cpu", tiny=True) for name in names]
    options = {"tokens": (64,), "modes": ("eager",), **options}
    return models.measured(made, package, **options)


def test_a_right_package_has_the_error_of_pytorch(models):
    result = run(models, Package())
    assert not result["left_out"]
    for name, model in result["models"].items():
        prefill = model["prefill"]["64"]
        assert prefill["eager"]["rounds"] >= 1, name
        assert 0 < prefill["error"]["package"] == prefill["error"]["sdpa"] < 0.02
        assert prefill["eager"]["calls"] == {"kernel": 2}, "one call for each of two blocks"
    assert result["models"]["llama"]["greedy"]["same_as_sdpa"]["package"] == models.NEW
    assert "greedy" not in result["models"]["diffusion"]
    assert SDPA is F.scaled_dot_product_attention, "it was put back"


def test_a_wrong_package_is_seen_everywhere(models):
    model = run(models, Package(1.5), ["llama"])["models"]["llama"]
    error = model["prefill"]["64"]["error"]
    assert error["package"] > 5 * error["sdpa"]
    assert model["greedy"]["same_as_sdpa"]["package"] < models.NEW


def test_gradients_of_a_wrong_package_are_off(models):
    errors = importlib.import_module("training_models").gradient_errors
    model = models.built("llama", "cpu", tiny=True)
    right, wrong = (errors(model, model.ids(1, 64), Package(factor)) for factor in (1.0, 1.5))
    assert 0 < right["package"] == right["sdpa"] < 0.05
    assert wrong["package"] > 5 * wrong["sdpa"]


@pytest.mark.parametrize(("hidden", "grouped"), [("", False), ("causal", False), ("causal", True), ("mask", True)])
def test_attention_in_float64_is_pytorchs(models, hidden, grouped, constants):
    constants(models, ELEMENTS=1)  # the fewest rows at a time
    q = torch.randn(2, 4, 200, 32, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2 if grouped else 4, 200, 32, dtype=torch.float64)
    options = {"is_causal": hidden == "causal", "enable_gqa": grouped}
    if hidden == "mask":
        options["attn_mask"] = torch.randn(2, 1, 200, 200, dtype=torch.float64)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(models.float64_attention(q, k, v, **options), SDPA(q, k, v, **options), **close)
    with pytest.raises(NotImplementedError):
        models.float64_attention(q, k, v, attn_mask=torch.ones(200, 200, dtype=torch.bool))


def test_a_sink_takes_its_share_and_a_softcap_bounds_scores(models):
    q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.float64)
    scores = 2.0 * torch.tanh(q @ k.mT * 0.25 / 2.0)
    sinks = torch.tensor([0.5, -1.0])
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.double().exp().view(1, 2, 1, 1))
    torch.testing.assert_close(models.float64_attention(q, k, v, softcap=2.0, sinks=sinks), weights @ v)


def test_what_fails_or_comes_too_late_is_said(models):
    class Broken(Package):
        def attention(self, *args, **options):
            raise ValueError("no such kernel")

    found = run(models, Broken(), ["diffusion"])["models"]["diffusion"]
    assert found["prefill"]["64"]["eager"] == {"failed": "ValueError: no such kernel"}
    assert SDPA is F.scaled_dot_product_attention
    result = run(models, Package(), ["diffusion"], seconds=-1.0)
    assert "diffusion eager 64" in result["left_out"]
    assert result["models"]["diffusion"]["prefill"] == {"64": {}}


def test_before_over_after_is_paired_by_rounds(models):
    found = models.before_and_after([2.0, 20.0, 2.0], [1.0, 10.0, 4.0])
    assert found == {"before_ms": 2.0, "after_ms": 4.0, "gain": 2.0, "rounds": 3}

"""Models of benchmarks/, small and on the CPU: what it says of right and of wrong kernels."""

import contextlib
import importlib
import sys
from functools import partial
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
    timing, module.NEW = importlib.import_module("timing"), 8
    timing.MOST_S = 0.1
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


def run(models, package, *names):
    found = []
    modules = {name: models.built(name, "cpu", tiny=True) for name in names}
    models.prefill(modules, package, found.append, tokens=(64,), modes=("eager",))
    return found[-1]


def test_a_right_package_has_the_error_of_pytorch(models):
    result = run(models, Package(), *models.MODELS)
    for name, model in result.items():
        prefill = model["prefill"]["64"]
        assert prefill["eager"]["gain"] > 0, name
        assert 0 < prefill["error"]["package"] == prefill["error"]["sdpa"] < 0.02
        assert prefill["eager"]["calls"] == {"kernel": 2}, "one call for each of two blocks"
    assert result["llama"]["greedy"]["same_as_sdpa"]["package"] == models.NEW
    assert "greedy" not in result["diffusion"]
    assert SDPA is F.scaled_dot_product_attention, "it was put back"


def test_a_wrong_package_is_seen_everywhere(models):
    model = run(models, Package(1.5), "llama")["llama"]
    error = model["prefill"]["64"]["error"]
    assert error["package"] > 5 * error["sdpa"]
    assert model["greedy"]["same_as_sdpa"]["package"] < models.NEW


def test_gradients_of_a_wrong_package_are_off(models):
    model = models.built("llama", "cpu", tiny=True)
    ids = models.ids_of(model, 1, 64)
    right, wrong = (models.gradient_errors(model, ids, Package(factor)) for factor in (1.0, 1.5))
    assert 0 < right["package"] == right["sdpa"] < 0.05
    assert wrong["package"] > 5 * wrong["sdpa"]


def test_a_training_step_is_timed_in_both_ways(models):
    model = models.built("diffusion", "cpu", tiny=True)
    step = partial(models.step, model, models.ids_of(model, 2, 16))
    found = models.eager(model, step, Package(), 2)
    assert found["gain"] > 0
    assert found["calls"] == {"kernel": 2}


def test_recorded_calls_take_turns_with_others(models):
    q = torch.zeros(1, 1, 16, 64)
    times = models.recorded(lambda: F.scaled_dot_product_attention(q, q, q), every_call=False)
    assert {name: len(each) for name, each in times.items()} == dict.fromkeys(("plain", "recorded", "again"), 21)


@pytest.mark.parametrize(("hidden", "grouped"), [("", False), ("causal", False), ("causal", True), ("mask", True)])
def test_attention_in_float64_is_pytorchs(models, hidden, grouped):
    float64_attention = importlib.import_module("random_models").float64_attention
    q = torch.randn(2, 4, 200, 32, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2 if grouped else 4, 200, 32, dtype=torch.float64)
    options = {"is_causal": hidden == "causal", "enable_gqa": grouped}
    if hidden == "mask":
        options["attn_mask"] = torch.randn(2, 1, 200, 200, dtype=torch.float64)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(float64_attention(q, k, v, **options), SDPA(q, k, v, **options), **close)
    with pytest.raises(NotImplementedError):
        float64_attention(q, k, v, attn_mask=torch.ones(200, 200, dtype=torch.bool))


def test_a_sink_takes_its_share_and_a_softcap_bounds_scores(models):
    q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.float64)
    scores = 2.0 * torch.tanh(q @ k.mT * 0.25 / 2.0)
    sinks = torch.tensor([0.5, -1.0])
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.double().exp().view(1, 2, 1, 1))
    float64_attention = importlib.import_module("random_models").float64_attention
    torch.testing.assert_close(float64_attention(q, k, v, softcap=2.0, sinks=sinks), weights @ v)


def test_before_over_after_is_paired_by_rounds(models):
    found = models.gains({"sdpa": [2.0, 20.0, 2.0], "package": [1.0, 10.0, 4.0]})
    assert found == {"before_ms": 2.0, "after_ms": 4.0, "gain": 2.0}

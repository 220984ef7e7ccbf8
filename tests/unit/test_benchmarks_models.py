"""benchmarks/models.py on small models and the CPU: what it says of right and of wrong kernels."""

import importlib
import json
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

    def explain(self, query, *_, **options):
        causal, grouped = options.get("is_causal", False), options.get("enable_gqa", False)
        return f"{tuple(query.shape)} causal={causal} gqa={grouped}"

    def counters(self):
        return {"kernel": self.calls} if self.calls else {}


def run(models, package, names=("llama", "qwen", "diffusion"), **options):
    made = [models.built(name, "cpu", tiny=True) for name in names]
    options = {"tokens": (64,), "modes": ("eager",), "device": "cpu", **options}
    return models.measured(made, package, **options)


def test_a_right_package_has_the_error_of_pytorch(models):
    result = run(models, Package())
    assert not result["left_out"]
    for name, model in result["models"].items():
        prefill = model["prefill"]["64"]
        assert prefill["eager"]["rounds"] >= 1, name
        assert 0 < prefill["error"]["package"] == prefill["error"]["sdpa"] < 0.02
        assert 0 < model["training"]["package"]["error"] == model["training"]["sdpa"]["error"]
        assert prefill["served"]["calls"] == {"kernel": 2}, "one call for each of two blocks"
    assert result["models"]["llama"]["greedy"]["same_as_sdpa"]["package"] == models.NEW
    assert "greedy" not in result["models"]["diffusion"]
    assert SDPA is F.scaled_dot_product_attention, "it was put back"


def test_a_wrong_package_is_seen_everywhere(models):
    model = run(models, Package(1.5), ["llama"])["models"]["llama"]
    error = model["prefill"]["64"]["error"]
    assert error["package"] > 5 * error["sdpa"]
    assert model["training"]["package"]["error"] > 5 * model["training"]["sdpa"]["error"]
    assert model["greedy"]["same_as_sdpa"]["package"] < models.NEW


@pytest.mark.parametrize(("causal", "grouped"), [(False, False), (True, False), (True, True)])
def test_attention_in_float64_is_pytorchs(models, causal, grouped, constants):
    constants(models, ELEMENTS=1)  # the fewest rows at a time
    q = torch.randn(2, 4, 200, 32, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2 if grouped else 4, 200, 32, dtype=torch.float64)
    options = {"is_causal": causal, "enable_gqa": grouped}
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(models.float64_attention(q, k, v, **options), SDPA(q, k, v, **options), **close)
    with pytest.raises(NotImplementedError):
        models.float64_attention(q, k, v, attn_mask=torch.ones(200, 200))


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
    found = models.before_and_after({"sdpa": [2.0, 20.0, 2.0], "package": [1.0, 10.0, 4.0]})
    assert found == {"before_ms": 2.0, "after_ms": 4.0, "gain": 2.0, "rounds": 3}


def test_a_result_has_its_origin(models, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "package_at", lambda _: Package())
    out = tmp_path / "deep/models.json"
    options = ["--tiny", "--tokens", "64", "--modes", "eager", "--models", "diffusion"]
    models.main([str(out), "--package", str(tmp_path), *options])
    found = json.loads(out.read_text())
    assert torch.__version__.startswith(found["environment"]["packages"]["torch"])
    assert found["environment"]["date"]
    assert found["models"]["diffusion"]["facts"]["parameters"] > 0
    with pytest.raises(SystemExit):
        models.main([str(out)])

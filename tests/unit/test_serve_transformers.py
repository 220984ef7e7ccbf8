"""A package as an attention implementation of transformers, on tiny models of random weights."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attending import Kernel  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from packages import imported, shape, winner  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = itertools.count()
SEQLEN = 256


@pytest.fixture
def driver():
    return FakeDriver(Kernel(causal=True))


@pytest.fixture
def package(tmp_path, driver):
    """Tuned for the prefill of the models below."""
    tuned = winner(shape(2, 4, SEQLEN, heads_kv=2, causal=True))
    made = imported(tmp_path, f"tuned_{next(NUMBERS)}", driver, tuned)
    yield made
    made.disable()
    for name in [n for n in sys.modules if n.startswith("tuned_")]:
        del sys.modules[name]


def llama(**options):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **options)


def qwen3(**options):
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, **options)


SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def built(kind, **options):
    made, config = kind(**options)
    torch.manual_seed(0)
    return made(config).to(torch.bfloat16).eval()


def tokens(batch=2, seqlen=SEQLEN):
    torch.manual_seed(1)
    return torch.randint(1, 128, (batch, seqlen))


def logits(model, *arguments, **options):
    with torch.no_grad():
        return model(*arguments, **options).logits.float()


def exact(model, ids, **options):
    """By PyTorch's attention in float64, from the same weights."""
    reference = type(model)(model.config).double().eval()
    reference.load_state_dict(model.state_dict())
    reference.set_attn_implementation("sdpa")
    return logits(reference, ids, **options)


def check(model, package, ids):
    """As near to float64 attention as PyTorch's own."""
    model.set_attn_implementation("sdpa")
    theirs, right = logits(model, ids), exact(model, ids)
    model.set_attn_implementation(package.register())
    ours = logits(model, ids)
    error, own = (ours - right).norm(), (theirs - right).norm()
    assert error <= 1.5 * own + 1e-6 * right.norm()


@pytest.mark.parametrize("kind", [llama, qwen3])
def test_a_prefill_is_served_by_kernels(package, driver, kind):
    model = built(kind)
    check(model, package, tokens())
    assert package.counters() == {"kernel": 2}, "one call of each layer, without a mask"
    groups = {launch["values"][7] for launch in driver.launches}
    assert groups == {2}, "keys and values are not repeated"


def test_it_is_chosen_when_a_model_is_made(package):
    name = package.register()
    kind, config = llama(attn_implementation=name)
    model = kind(config).to(torch.bfloat16).eval()
    logits(model, tokens())
    assert package.counters() == {"kernel": 2}


def test_padding_gets_pytorchs_attention(package):
    model, ids = built(llama), tokens()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = logits(model, ids, attention_mask=mask)
    model.set_attn_implementation(package.register())
    assert torch.equal(logits(model, ids, attention_mask=mask), expected)
    assert package.counters() == {"not_tuned": 2}, "by the function that transformers has for it"
    everything = torch.ones_like(ids)
    logits(model, ids, attention_mask=everything)
    assert package.counters()["kernel"] == 2, "a mask of ones hides nothing"


def test_padding_is_served_where_a_kernel_for_masks_is_known(tmp_path):
    """k and v are not repeated, and a mask is scanned once for all layers."""
    from attending import MaskedKernel
    from fake_driver import FakeDriver
    from operators import make
    from packages import shape, winner

    from attnsweep.serve.runtime.transformers_hook import _implementation

    kernel = MaskedKernel()
    own = make(
        tmp_path, FakeDriver(kernel), winner(shape(2, 4, 256, heads_kv=2, boolean=("item",)))
    )
    forward = _implementation(own.attention, own.masked, None)
    q, k, v = (torch.randn(2, n, 256, 64).bfloat16() for n in (4, 2, 2))
    mask = torch.rand(2, 1, 256, 256) < 0.5
    for _ in range(2):
        out, _ = forward(None, q, k, v, mask)
        k_all, v_all = (t.float().repeat_interleave(2, 1) for t in (k, v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        assert torch.allclose(
            out.transpose(1, 2).float(), sdpa(q.float(), k_all, v_all, mask), atol=3e-2
        )
    assert (own.counters(), kernel.scans) == ({"kernel": 2}, 1)


def test_generated_tokens_are_the_same(package, driver):
    """Prefill by kernels; single queries are PyTorch's."""
    model = built(qwen3).float().to(torch.bfloat16)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens(), **options)
    model.set_attn_implementation(package.register())
    assert torch.equal(model.generate(tokens(), **options), expected)
    counted = package.counters()
    assert counted.pop("kernel") == 2
    assert sum(counted.values()) == 2 * 5


def test_a_static_cache_is_cut_to_its_queries(package, driver):
    model, ids = built(llama), tokens()
    model.set_attn_implementation("sdpa")
    expected = logits(model, ids)
    model.set_attn_implementation(package.register())
    cache = transformers.StaticCache(config=model.config, max_cache_len=400)
    got = logits(model, ids, past_key_values=cache)
    assert torch.allclose(got, expected, atol=3e-2, rtol=3e-2)
    assert package.counters() == {"kernel": 2}
    assert {m["dims"][1] for m in driver.maps} == {SEQLEN}, "not 400 keys"


def test_a_training_step(package):
    """Dropout is PyTorch's; without it the kernels' gradients are used."""
    model = built(llama, attention_dropout=0.1)
    model.set_attn_implementation(package.register())
    model.train()
    model(tokens(), labels=tokens()).loss.backward()
    assert package.counters() == {}
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("exporting", [False, True])
def test_a_compiled_model_is_one_graph(package, monkeypatch, exporting):
    """Older versions of PyTorch say that they are exporting while they compile."""
    if exporting:
        monkeypatch.setattr(transformers.masking_utils, "is_torchdynamo_exporting", lambda: True)
    torch._dynamo.reset()
    model, ids = built(llama), tokens()
    model.set_attn_implementation(package.register())
    expected = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids).logits.float()
        assert torch.allclose(got, expected, atol=3e-2, rtol=3e-2)
        assert package.counters()["kernel"] == 2 * (1 if exporting else 2)
        # Without a cache compiled code cannot know that no sequences are packed: a mask it is.
        assert torch.allclose(compiled(ids, use_cache=False).logits.float(), expected, atol=3e-2)


def test_enable_serves_an_unmodified_model(package):
    model, ids = built(llama), tokens()
    expected = logits(model, ids)
    with package.enable():
        got = logits(model, ids)
    assert torch.allclose(got, expected, atol=3e-2, rtol=3e-2)
    assert package.counters() == {"kernel": 2}


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_what_a_kernel_does_not_compute_is_an_error(package, option):
    attend = transformers.AttentionInterface()[package.register()]
    q = torch.randn(1, 4, 8, 64)
    with pytest.raises(ValueError, match=f"{option}.*eager"):
        attend(torch.nn.Module(), q, q, q, None, **{option: torch.ones(1)})


def test_an_encoder_is_not_causal(package):
    attend = transformers.AttentionInterface()[package.register()]
    theirs = transformers.AttentionInterface()["sdpa"]
    q, module = torch.randn(1, 4, 8, 64), torch.nn.Module()
    for is_causal in (None, True, False):
        module.is_causal = False
        got, weights = attend(module, q, q, q, None, scaling=0.3, is_causal=is_causal)
        expected, _ = theirs(module, q, q, q, None, scaling=0.3, is_causal=is_causal)
        assert torch.equal(got, expected)
        assert weights is None
        assert got.shape == (1, 8, 4, 64)


def test_names(package):
    assert package.register() == package.__name__
    assert package.register() == package.__name__, "again, for the same package"
    for name in ("sdpa", "eager", "flash_attention_2", "my_flash", "paged|x", "someone/kernel"):
        with pytest.raises(package.PackageError, match="another name"):
            package.register(name)
    assert transformers.AttentionInterface()["sdpa"].__module__.startswith("transformers.")


def test_a_package_that_is_imported_anew(package, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(package.__file__).parent.parent))
    before = transformers.AttentionInterface()[package.register()]
    importlib.reload(package).register()
    now = transformers.AttentionInterface()[package.__name__]
    assert now.attention is package.attention is not before.attention


def test_without_transformers(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        package.register()

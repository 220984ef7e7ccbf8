"""A package as an attention implementation of transformers, on tiny models of random weights."""

import copy
import ctypes
import importlib
import pickle
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packages import imported, package_of, shape, winner  # noqa: E402

from attnsweep.core.layouts import DENSE, Padded  # noqa: E402
from attnsweep.core.masks import CAUSAL, FULL, Interval  # noqa: E402
from attnsweep.core.scores import Scores  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SEQLEN = 256


@pytest.fixture
def package(tmp_path, driver):
    """Tuned for the prefill of the models below."""
    tuned = winner(shape(2, 4, SEQLEN, heads_kv=2, causal=True))
    made = package_of(tmp_path, driver, tuned)
    yield made
    made.disable()


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


def exact(model, ids, by="sdpa", **options):
    """By PyTorch's attention in float64, or another in float32, from the same weights."""
    dtype = torch.float64 if by == "sdpa" else torch.float32  # which experts take
    reference = type(model)(model.config).to(dtype).eval()
    reference.load_state_dict(model.state_dict())
    reference.set_attn_implementation(by)
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


def deepseek(**options):
    own = {"q_lora_rank": 32, "kv_lora_rank": 32, "first_k_dense_replace": 2, "head_dim": 32}
    own |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    own |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    own |= {"n_group": 2, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(**SIZES | own, **options)


def test_latent_attention_has_v_of_another_head_dim(tmp_path, driver):
    of = shape(2, 4, SEQLEN, head_dim=96, head_dim_v=64, causal=True)
    made = package_of(tmp_path, driver, winner(of))
    model = built(deepseek)
    check(model, made, tokens())
    assert made.counters() == {"kernel": 2}


def mistral(**options):
    return transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=100, **options)


def gemma3(**options):
    config = transformers.Gemma3TextConfig(**SIZES | {"sliding_window": 100}, query_pre_attn_scalar=64, **options)
    return transformers.Gemma3ForCausalLM, config


def bert(**options):
    own = {"hidden_size": 256, "is_decoder": False}
    return transformers.BertForMaskedLM, transformers.BertConfig(**SIZES | own, **options)


def padded(how):
    """A mask of tokens, of which the first sequence has fewer."""
    mask = torch.ones(2, SEQLEN, dtype=torch.long)
    rows = {"left": slice(0, 7), "right": slice(-9, None), "with a hole": slice(40, 47), "not": slice(0, 0)}
    mask[0, rows[how]] = 0
    return mask


@pytest.fixture
def served(tmp_path, driver):
    """A package with kernels for what the models here hide, their stand-in, and the driver's."""
    one, window, lengths = shape(2, 4, SEQLEN), Interval(99, 0), Padded("right", 100)
    hidden = [(FULL, DENSE), (CAUSAL, DENSE), (window, DENSE), (FULL.as_boolean(("item",)), DENSE)]
    hidden += [(FULL, lengths), (CAUSAL, lengths), (window, lengths)]
    each = [replace(one, mask=mask, layout=layout, heads_kv=n) for mask, layout in hidden for n in (2, 4)]
    return package_of(tmp_path, driver, *map(winner, each)), driver


def dense_masks(monkeypatch):
    """Sizes of the dense masks that transformers makes from here on."""
    found, own = [], transformers.masking_utils._non_vmap_expansion_sdpa

    def noted(batch, head, rows, keys):
        found.append((len(batch), len(rows), len(keys)))
        return own(batch, head, rows, keys)

    monkeypatch.setattr(transformers.masking_utils, "_non_vmap_expansion_sdpa", noted)
    return found


@pytest.mark.nightly(push=6)
@pytest.mark.parametrize("how", ["left", "right", "not", "with a hole"])
@pytest.mark.parametrize("kind", [llama, mistral, gemma3, bert])
def test_no_dense_mask_is_made_of_what_is_an_interval(served, monkeypatch, kind, how):
    made, driver = served
    model, ids, mask = built(kind), tokens(), padded(how)
    theirs, right = (by(model, ids, attention_mask=mask) for by in (logits, exact))
    model.set_attn_implementation(made.register())
    dense = dense_masks(monkeypatch)
    ours = logits(model, ids, attention_mask=mask)
    error, own = ((each - right)[mask == 1].norm() for each in (ours, theirs))
    assert error <= 1.5 * own + 1e-6 * right.norm()
    read = [launch["function"][1] for launch in driver.launches if b" boolean " in launch["code"]]
    assert bool(dense) == bool(read) == (how == "with a hole")
    assert made.counters() == {"kernel": 2}
    scans = [launch for launch in driver.launches if launch["function"][1].endswith("_mask")]
    assert len(scans) <= (2 if kind is gemma3 else 1), "once for all layers of a kind"


def test_a_dense_mask_is_made_once_where_no_kernel_serves(package, monkeypatch):
    model, ids, mask = built(llama), tokens(), padded("left")
    expected = logits(model, ids, attention_mask=mask)
    model.set_attn_implementation(package.register())
    dense = dense_masks(monkeypatch)
    assert torch.equal(logits(model, ids, attention_mask=mask), expected)
    assert dense == [(2, SEQLEN, SEQLEN)]
    assert package.counters() == {"not_tuned": 2}, "by the function that transformers has for it"


def lazy(package, **options):
    """What a model gets as its mask."""
    utils = transformers.masking_utils
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": utils.causal_mask_function}
    given |= {"attention_mask": padded("left")[:, :8].bool(), "allow_is_causal_skip": True} | options
    if given["mask_function"] is utils.bidirectional_mask_function or options.get("both_sides"):
        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    found = transformers.AttentionMaskInterface()[package.register()](**given)
    return found, transformers.AttentionMaskInterface()["sdpa"](**given)


def windows(name, size):
    return getattr(transformers.masking_utils, f"sliding_window_{name}mask_function")(size)


READ = {
    "sliced": lambda mask: mask[:, :, 2:, :5],
    "inverted": lambda mask: ~mask,
    "added": lambda mask: mask + torch.zeros(8),
    "chosen by": lambda mask: torch.where(mask, 0.0, -1.0),
    "of another dtype": lambda mask: mask.to(torch.bfloat16),
    "copied": lambda mask: mask.clone(),
    "expanded": lambda mask: mask.expand(2, 4, 8, 8),
    "written": lambda mask: mask.masked_fill_(torch.arange(8) == 1, False),
    "listed": lambda mask: torch.tensor(mask.tolist()),
    "of another library": lambda mask: torch.from_numpy(mask.numpy()),
    "copied deeply": copy.deepcopy,
    "sent": lambda mask: pickle.loads(pickle.dumps(mask)),
    "shared": lambda mask: mask.share_memory_(),
    "read by its address": lambda mask: torch.tensor(
        list((ctypes.c_uint8 * mask.numel()).from_address(mask.data_ptr()))
    ),
}


@pytest.mark.parametrize("how", READ)
def test_code_that_reads_a_mask_gets_a_dense_one(package, how):
    mask, theirs = lazy(package)
    assert (mask.shape, mask.dtype, mask.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(READ[how](mask), READ[how](theirs))
    assert torch.equal(mask.clone(), theirs), "with what was written"


def test_a_mask_that_was_written_hides_what_it_then_says(served):
    made, _ = served
    attend = transformers.AttentionInterface()[made.register()]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(2, 4, SEQLEN, 64).bfloat16()
    for change in (lambda mask: None, lambda mask: mask[:, :, 9:, 3].fill_(False)):
        sizes = {"q_length": SEQLEN, "kv_length": SEQLEN, "attention_mask": padded("right").bool()}
        mask, theirs = lazy(made, **sizes)
        change(mask), change(theirs)
        out, _ = attend(torch.nn.Module(), q, q, q, mask, scaling=0.125)
        assert torch.allclose(out.transpose(1, 2).float(), sdpa(*[q.float()] * 3, theirs), atol=3e-2)


def function_of(said):
    """A mask function by what it is called here."""
    return transformers.masking_utils.bidirectional_mask_function if said == "bidirectional" else windows(*said)


SAID = {
    "causal": ({}, {"limits": (None, 0)}),
    "later part": ({"q_length": 4, "q_offset": 4}, {"limits": (None, 4)}),
    "bidirectional": ({"mask_function": "bidirectional"}, {"limits": (None, None)}),
    "window": ({"mask_function": ("causal_", 3)}, {"limits": (-2, 0)}),
    "window, wide": ({"mask_function": ("causal_", 30)}, {"limits": (None, 0)}),
    "both sides": ({"mask_function": ("bidirectional_", 2), "both_sides": True}, {"limits": (-2, 2)}),
    "cache of a window": (
        {"mask_function": ("causal_", 5), "q_length": 3, "q_offset": 9, "kv_offset": 4, "attention_mask": None},
        {"limits": (1, 5)},
    ),
    "fewer tokens than keys": ({"attention_mask": torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]).bool()}, {}),
    "nothing seen": ({"attention_mask": torch.tensor([[False], [True]]).expand(2, 8)}, {}),
}


@pytest.mark.parametrize("what", SAID)
def test_intervals_say_what_the_dense_mask_says(package, what):
    from attnsweep.serve.runtime.intervals import dense

    options, said = dict(SAID[what][0]), SAID[what][1]
    if "mask_function" in options:
        options["mask_function"] = function_of(options["mask_function"])
    mask, theirs = lazy(package, **options)
    assert mask.limits == said.get("limits", mask.limits)
    q, k = torch.empty(2, 1, theirs.shape[2], 8), torch.empty(2, 1, theirs.shape[3], 8)
    assert torch.equal(dense(mask.limits, q, k, mask.lengths).expand_as(theirs), theirs)
    assert torch.equal(mask.clone(), theirs)


MADE = {
    "a hole": {"attention_mask": torch.tensor([[True, False, True, True]] * 2).repeat(1, 2)},
    "one query": {"q_length": 1, "q_offset": 7},
    "an offset of the device": {"q_offset": torch.tensor(0), "kv_length": 12},
    "a function of the caller": {"mask_function": lambda b, h, q, k: (k <= q) & (k != 3)},
    "packed": {"mask_function": "packed"},
    "chunks": {"mask_function": "chunks"},
    "a part of another": {"allow_is_causal_skip": False},
    "index by index": {"use_vmap": True},
}


@pytest.mark.parametrize("what", MADE)
def test_other_masks_are_made_by_transformers(package, what):
    utils = transformers.masking_utils
    options = dict(MADE[what])
    if options.get("mask_function") == "packed":
        packed = utils.packed_sequence_mask_function(torch.tensor([[0] * 3 + [1] * 5] * 2))
        options["mask_function"] = utils.and_masks(utils.causal_mask_function, packed)
    if options.get("mask_function") == "chunks":
        options["mask_function"] = utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int))
    mask, theirs = lazy(package, **options)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, theirs)


NONE = {
    "causal": {},
    "bidirectional": {"mask_function": "bidirectional"},
    "window, wide": {"mask_function": ("causal_", 9), "local_size": 9},
    "an empty static cache": {"kv_length": 12},
}


@pytest.mark.parametrize("what", NONE)
def test_what_hides_nothing_else_has_no_mask(package, what):
    options, every = dict(NONE[what]), torch.ones(2, 8, dtype=torch.bool)
    if "mask_function" in options:
        options["mask_function"] = function_of(options["mask_function"])
    for mask in (every, None):
        assert lazy(package, **options, attention_mask=mask) == (None, None)


def test_layers_that_are_compiled_alone_take_such_a_mask(package):
    torch._dynamo.reset()
    mask, theirs = lazy(package)
    q = torch.randn(2, 4, 8, 64)
    attend = transformers.AttentionInterface()[package.register()]
    compiled = torch.compile(
        lambda q, mask: attend(None, q, q, q, mask, scaling=0.125)[0] * 2, fullgraph=True, backend="aot_eager"
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, theirs).transpose(1, 2) * 2
    assert torch.allclose(compiled(q, mask), expected, atol=1e-5)


def test_a_step_with_gradients_and_checkpoints_has_the_same_gradients(package):
    ids, mask = tokens(), padded("left")
    found = []
    for by in ("sdpa", package.register()):
        model = built(llama).float()
        model.set_attn_implementation(by)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": by == "sdpa"})
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


def test_generated_tokens_are_the_same(package, driver):
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


@pytest.mark.nightly(push=1, of="compiled models")
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


@pytest.mark.nightly(push=1, of="compiled models")
@pytest.mark.parametrize("served", [True, False])
def test_a_compiled_model_with_padding_and_grouped_heads(tmp_path, driver, served):
    """Where no kernel serves it is transformers' own."""
    torch._dynamo.reset()
    one = shape(2, 4, SEQLEN, heads_kv=2, boolean=("item",))
    made = package_of(tmp_path, driver, *[winner(one)] * served)
    model, ids = built(llama), tokens()
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0
    expected = logits(model, ids, attention_mask=mask)
    model.set_attn_implementation(made.register())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, attention_mask=mask).logits.float()
    keep = mask.bool()
    assert torch.allclose(got[keep], expected[keep], atol=3e-2, rtol=3e-2)
    assert made.counters().get("kernel", 0) == 2 * served


def gemma2(**options):
    own = {"attn_logit_softcapping": 2.0, "sliding_window": 100, "query_pre_attn_scalar": 4}
    config = transformers.Gemma2Config(**SIZES | own, **options)
    return transformers.Gemma2ForCausalLM, config


def gpt_oss(**options):
    own = {"sliding_window": 100, "num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(**SIZES | own, **options)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [gemma2, gpt_oss])
@pytest.mark.parametrize("served", [True, False])
def test_softcap_and_sinks(tmp_path, driver, kind, padded, served):
    """A layer in two has a window, which a model gives as a boolean mask."""
    scores = Scores(2.0) if kind is gemma2 else Scores(0, True)
    one = shape(2, 4, SEQLEN, heads_kv=2)
    masks = (CAUSAL, FULL.as_boolean(("item",)))
    tuned = [winner(replace(one, mask=mask, scores=scores), gain=4.0) for mask in masks]
    made = package_of(tmp_path, driver, *tuned * served)
    model, ids = built(kind), tokens()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("sinks"):
                each.copy_(torch.tensor([1.0, 4.0, -3.0, 0.0]))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0 if padded else 1
    wanted = logits(model, ids, attention_mask=mask)
    right = exact(model, ids, by="eager", attention_mask=mask)
    model.set_attn_implementation(made.register())
    ours = logits(model, ids, attention_mask=mask)
    error, own = ((each - right)[mask == 1].norm() for each in (ours, wanted))
    assert error <= 1.5 * own + 1e-6 * right.norm()
    assert made.counters() == {"kernel" if served else "head_dim": 2}


@pytest.mark.parametrize("padded", [False, True])
def test_a_bias_of_positions_is_served(tmp_path, driver, kernel, padded):
    """T5's, of one tensor for all layers."""
    config = {"vocab_size": 128, "d_model": 128, "d_kv": 64, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(**config)).to(torch.bfloat16).eval()
    own = ("item", "head") if padded else ("head",)
    tuned = winner(shape(2, 4, SEQLEN, bias=own), gain=4.0)
    made = package_of(tmp_path, driver, tuned)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 200:] = 0 if padded else 1
    double = copy.deepcopy(model).double()

    def states(of):
        with torch.no_grad():
            return of(ids, attention_mask=mask).last_hidden_state.float()[mask == 1]

    wanted, right = states(model), states(double)
    model.set_attn_implementation(made.register())
    ours = states(model)
    assert (ours - right).norm() <= 1.5 * (wanted - right).norm()
    assert made.counters() == {"kernel": 2}


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_what_nobody_computes_beside_a_changed_score_is_an_error(package, option):
    attend = transformers.AttentionInterface()[package.register()]
    q = torch.randn(1, 4, 8, 64)
    changed = {option: 2.0 if option == "softcap" else torch.ones(4)}
    with pytest.raises(ValueError, match=r"position_bias.*eager"):
        attend(torch.nn.Module(), q, q, q, None, position_bias=q, **changed)


def test_a_traced_call_is_pytorchs(package):
    """While torch.jit.trace looks, sizes are tensors, which PyTorch takes for no booleans."""
    attention = transformers.AttentionInterface()[package.register()]
    q, k, v = (torch.randn(2, 4, SEQLEN, 64).bfloat16() for _ in "qkv")
    traced = torch.jit.trace(lambda *qkv: attention(torch.nn.Module(), *qkv, None)[0], (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(traced(q, k, v), expected.transpose(1, 2))


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


def test_a_package_that_is_imported_anew(tmp_path, driver, monkeypatch):
    package = imported(tmp_path, "anew", driver)
    monkeypatch.syspath_prepend(tmp_path)
    before = transformers.AttentionInterface()[package.register()]
    importlib.reload(package).register()
    now = transformers.AttentionInterface()[package.__name__]
    assert now.attention is package.attention is not before.attention


def test_without_transformers(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        package.register()

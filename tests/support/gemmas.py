"""A small model of Gemma 4's kind, with random weights. Needs PyTorch and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def gemma4(device: str = "cpu", heads: int = 4, heads_kv: int = 2, seqlen: int = 256) -> Any:
    """A layer with a window, and a global one of head_dim 512 and scale 1.0. Skips without Gemma 4."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    sizes = {"vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size": 128, "intermediate_size": 64}
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads_kv, "head_dim": 64}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}
    more = {"hidden_size_per_layer_input": 16, "max_position_embeddings": seqlen}
    config = transformers.Gemma4TextConfig(**sizes, **of_heads, **layers, **more)
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).to(device, torch.bfloat16).eval()
    assert [layer.self_attn.head_dim for layer in model.model.layers] == [64, 512]
    assert model.model.layers[1].self_attn.scaling == 1.0
    return model


def float64(model: Any) -> Any:
    """The same model in float64, by PyTorch's own attention."""
    exactly = type(model)(model.config).to(model.device, torch.float64).eval()
    exactly.load_state_dict(model.state_dict())
    exactly.set_attn_implementation("sdpa")
    return exactly


def logits(step: Any, ids: Any) -> Any:
    """A model's logits, or those of its compiled code."""
    with torch.no_grad():
        return step(ids).logits.double()


def skip_with_masks(model: Any, ids: Any) -> None:
    """Skip where transformers gives compiled code of the last layer a mask, though it is causal."""
    masks: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") is not None for node in calls)
        return graph.forward

    logits(torch.compile(model, backend=backend), ids)
    torch._dynamo.reset()
    if masks[-1]:
        pytest.skip("this transformers gives compiled code a mask in place of is_causal")

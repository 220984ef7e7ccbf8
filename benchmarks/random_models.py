"""Models with random weights, for benchmarks: a Llama, a Qwen, a stack of diffusion-like blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ATTENTION = "attention_without_masks"


class Block(nn.Module):
    """A diffusion-like block: full attention and an MLP, each scaled and shifted by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulate = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, width); condition: (batch, 1, width)."""
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulate(condition).chunk(6, -1)
        packed = self.qkv(self.norms[0](x) * (1 + scale) + shift)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in packed.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.out(attended)
        return x + gate_2 * self.down(F.gelu(self.up(self.norms[1](x) * (1 + scale_2) + shift_2)))


class Blocks(nn.Module):
    """A stack of them. The input is made of token numbers, so that all models take the same."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(1024, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, tokens). Returns (batch, tokens, width)."""
        x = self.embed(ids)
        condition = x.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, condition)
        return self.norm(x)


@dataclass(frozen=True)
class Model:
    """A model on its device. layers: the blocks that are compiled. vocabulary: 0 without tokens."""

    name: str
    module: nn.Module
    layers: Sequence[nn.Module]
    facts: Mapping[str, Any]
    vocabulary: int

    def ids(self, batch: int, tokens: int) -> torch.Tensor:
        """Random token numbers, the same for the same number of tokens."""
        device = next(self.module.parameters()).device
        draw = torch.Generator(device).manual_seed(tokens)
        most = self.vocabulary or 1024
        return torch.randint(0, most, (batch, tokens), generator=draw, device=device)

    def rows(self, ids: torch.Tensor, last: int) -> torch.Tensor:
        """The last rows of the output: logits, or what the last block gives."""
        if not self.vocabulary:
            return self.module(ids)[:, -last:]
        return self.module(input_ids=ids, use_cache=False, logits_to_keep=last).logits

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of a training step."""
        if not self.vocabulary:
            return self.module(ids).float().pow(2).mean()
        return self.module(input_ids=ids, labels=ids, use_cache=False).loss


SIZES = {"hidden_size": 2048, "num_hidden_layers": 16, "num_key_value_heads": 8, "tie_word_embeddings": False}
TINY = {"hidden_size": 128, "num_hidden_layers": 2}
TINY_HEADS = {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}


def llama(tiny: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A Llama of 1B with an output layer of its own, or it would repeat its input; D = 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {"intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
    own |= {"vocab_size": 128256, "rope_theta": 500000.0}
    facts = SIZES | own | (TINY | TINY_HEADS if tiny else {})
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=32768, **facts)), facts


def qwen(tiny: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A Qwen 3 of 1.7B with 16 of its 28 layers and an output layer of its own; D = 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    own = {"intermediate_size": 6144, "num_attention_heads": 16, "head_dim": 128}
    own |= {"vocab_size": 151936, "rope_theta": 1000000.0}
    facts = SIZES | own | (TINY | TINY_HEADS if tiny else {})
    return Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=32768, **facts)), facts


def diffusion(tiny: bool) -> tuple[nn.Module, dict[str, Any]]:
    """28 blocks of 16 heads of 64."""
    facts = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28}
    facts |= {**TINY, "num_attention_heads": 2} if tiny else {}
    return Blocks(*facts.values()), facts | {"head_dim": 64}


MODELS = {"llama": llama, "qwen": qwen, "diffusion": diffusion}


def built(name: str, device: str, tiny: bool) -> Model:
    """A model with random weights in bf16; the same for the same name."""
    torch.manual_seed(sum(map(ord, name)))
    with torch.device(device):
        module, facts = MODELS[name](tiny)
    module = module.to(torch.bfloat16).eval()
    vocabulary = facts.get("vocab_size", 0)
    if vocabulary:
        _without_masks(module)
    layers = module.model.layers if vocabulary else module.layers
    parameters = sum(each.numel() for each in module.parameters())
    return Model(name, module, list(layers), {**facts, "parameters": parameters}, vocabulary)


def _without_masks(module: Any) -> None:
    """Let transformers call scaled_dot_product_attention as it does, but never make a mask.

    It makes none in eager code. In a compiled model and in a CUDA graph it may, although nothing is
    padded, and then neither PyTorch's fused kernels nor a package can serve the call.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    module.set_attn_implementation(ATTENTION)

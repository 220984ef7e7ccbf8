"""Models with random weights in bf16, and whose attention they take.

As a program it runs one of them, as a stranger's would that knows nothing of attnsweep:

  attnsweep speedup OUT -- python benchmarks/random_models.py llama|qwen|diffusion|vit|all
      [--tokens N ...] [--passes 100]

llama and qwen: prefills by transformers' classes, of about 1B (grouped queries, head_dim 64 and
128). vit: 64 images of 384 pixels by transformers' ViT-L. diffusion: 28 blocks of full attention in
plain PyTorch, two items unless tokens are given. all: the first three. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from timing import Way
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION = "attention_without_masks"


# ---- the models ----
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
    """A stack of them, which is called as models of transformers are."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=1024)
        self.embed, self.norm = nn.Embedding(1024, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, input_ids: Any, labels: Any = None, logits_to_keep: int = 0, **_: Any) -> Any:
        """input_ids: (batch, tokens). Returns logits (batch, tokens, width), and a loss."""
        x = self.embed(input_ids)
        condition = x.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, condition)
        rows = self.norm(x)
        loss = None if labels is None else rows.float().pow(2).mean()
        return SimpleNamespace(logits=rows[:, -logits_to_keep:], loss=loss)


# Both with an output layer of their own, or they would repeat their input.
LARGE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_key_value_heads": 8, "tie_word_embeddings": False}
# A Llama of 1B, and a Qwen 3 of 1.7B with 16 of its 28 layers.
LLAMA = {"intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64, "vocab_size": 128256}
QWEN = {"intermediate_size": 6144, "num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936}
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = ("llama", "qwen", "diffusion")


def module_of(name: str, tiny: bool = False) -> Any:
    """A model in bf16 on the default device, as it comes."""
    import transformers as t

    if name == "diffusion":
        module: nn.Module = Blocks(128, 2, 2) if tiny else Blocks(1024, 16, 28)
    else:
        config, make, sizes = {
            "llama": (t.LlamaConfig, t.LlamaForCausalLM, LLAMA | {"rope_theta": 500000.0}),
            "qwen": (t.Qwen3Config, t.Qwen3ForCausalLM, QWEN | {"rope_theta": 1000000.0}),
        }[name]
        sizes = LARGE | sizes | (TINY if tiny else {})
        module = make(config(max_position_embeddings=32768, **sizes))
    return module.to(torch.bfloat16).eval()


def built(name: str, device: str = "cuda", tiny: bool = False) -> Any:
    """A model with the same random weights for the same name, which never makes a mask.

    Transformers calls scaled_dot_product_attention without one in eager code. In a compiled model
    and in a CUDA graph it may make one, although nothing is padded, and then neither PyTorch's
    fused kernels nor a package can serve the call.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(sum(map(ord, name)))
    with torch.device(device):
        module = module_of(name, tiny)
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    if name != "diffusion":
        module.set_attn_implementation(ATTENTION)
    return module


def ids_of(module: Any, batch: int, tokens: int) -> torch.Tensor:
    """Random token numbers, the same for the same number of tokens."""
    device = next(module.parameters()).device
    draw = torch.Generator(device).manual_seed(tokens)
    return torch.randint(0, module.config.vocab_size, (batch, tokens), generator=draw, device=device)


def rows_of(module: Any, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
    """The last rows of the logits of a prefill."""
    return module(input_ids=ids, use_cache=False, logits_to_keep=last).logits


def step(module: Any, ids: torch.Tensor) -> float:
    """A training step without an optimizer, which leaves no gradients. Returns the loss."""
    loss = module(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    module.zero_grad(set_to_none=True)
    return float(loss.detach())


@contextlib.contextmanager
def compiled_layers(module: Any) -> Iterator[None]:
    """Compile each block of a model anew, for as long as the context lasts."""
    torch.compiler.reset()
    layers = getattr(module, "model", module).layers
    for layer in layers:
        layer.compile(dynamic=False)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


# ---- whose attention ----
def float64_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """scaled_dot_product_attention in float64, head by head.

    attn_mask: is added. Groups of queries are seen by the shapes.
    """
    if dropout_p or (attn_mask is not None and attn_mask.dtype == torch.bool):
        raise NotImplementedError("dropout, or a boolean mask")
    heads, keys, outputs = query.shape[1], key.shape[2], []
    scale = query.shape[3] ** -0.5 if scale is None else scale
    for head in range(heads):
        of = head * key.shape[1] // heads
        scores = query[:, head].double() @ key[:, of].double().mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attn_mask is not None:
            scores = scores + attn_mask[:, min(head, attn_mask.shape[1] - 1)]
        if is_causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks[head].double().expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, sink), -1)
        outputs.append(scores.softmax(-1)[..., :keys] @ value[:, of].double())
    return torch.stack(outputs, 1).to(query.dtype)


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = float64_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def attention_of(who: str, package: Any) -> Any:
    """A context with PyTorch's attention (sdpa), its flash backend's, float64's or the package's."""
    if who == "package":
        return package.enable()
    flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    return {"sdpa": contextlib.nullcontext, "flash": flash, "float64": _float64}[who]()


def ways_of(calls: Mapping[str, Callable[[], Any]], package: Any) -> dict[str, Way]:
    """Calls, each with the attention of its name."""
    return {who: Way(call, partial(attention_of, who, package)) for who, call in calls.items()}


# ---- the program ----
def vit() -> Callable[[], Any]:
    """A pass of a ViT-L on a batch of images."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    config = ViTConfig(image_size=384, patch_size=16, num_attention_heads=16, **sizes)
    module = ViTModel(config, add_pooling_layer=False).to(torch.bfloat16).eval()
    images = torch.randn(64, 3, 384, 384, dtype=torch.bfloat16)
    return lambda: module(pixel_values=images).last_hidden_state


def prefills(name: str, tokens: Sequence[int] | None) -> list[Callable[[], Any]]:
    """A pass of a model at each number of tokens."""
    module = module_of(name)
    usual = (2, 4096) if name == "diffusion" else (1, 8192)
    sizes = [(1, count) for count in tokens] if tokens else [usual]
    return [partial(rows_of, module, ids_of(module, *size)) for size in sizes]


def main() -> None:
    """Make the model, and run it so often at each number of tokens."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", choices=(*MODELS, "vit", "all"))
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="default: 8192; of diffusion 4096")
    parser.add_argument("--passes", type=int, default=100)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    with torch.inference_mode():
        for name in MODELS if given.model == "all" else [given.model]:
            for call in [vit()] if name == "vit" else prefills(name, given.tokens):
                for _ in range(given.passes):
                    call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

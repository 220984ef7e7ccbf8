"""A program that runs one model, as a stranger's would: for `attnsweep speedup`.

Usage: attnsweep speedup OUT -- python benchmarks/programs.py llama|vit|diffusion [--passes N]

llama: prefills of 8,192 tokens by transformers' Llama of about 1B (grouped queries, head_dim 64).
vit: batches of 64 images of 384 pixels by transformers' ViT-L. diffusion: two items of 4,096 tokens
by 28 blocks of full attention in plain PyTorch. Weights are random, in bf16; nothing is compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from random_models import MODELS


def llama() -> Callable[[], object]:
    """Logits of the last token of a prefill."""
    module = MODELS["llama"](False)[0].to(torch.bfloat16).eval()
    ids = torch.randint(0, module.config.vocab_size, (1, 8192))
    return lambda: module(input_ids=ids, use_cache=False, logits_to_keep=1).logits


def vit() -> Callable[[], object]:
    """Features of a batch of images."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 1024, "intermediate_size": 4096}
    layers = {"num_hidden_layers": 24, "num_attention_heads": 16}
    config = ViTConfig(image_size=384, patch_size=16, **sizes, **layers)
    module = ViTModel(config, add_pooling_layer=False).to(torch.bfloat16).eval()
    images = torch.randn(64, 3, 384, 384, dtype=torch.bfloat16)
    return lambda: module(pixel_values=images).last_hidden_state


def diffusion() -> Callable[[], object]:
    """A denoising step of two items."""
    module = MODELS["diffusion"](False)[0].to(torch.bfloat16).eval()
    ids = torch.randint(0, 1024, (2, 4096))
    return lambda: module(ids)


def main() -> None:
    """Make the model, and run it so often."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    programs = {each.__name__: each for each in (llama, vit, diffusion)}
    parser.add_argument("model", choices=programs)
    parser.add_argument("--passes", type=int, default=100)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    with torch.inference_mode():
        once = programs[arguments.model]()
        for _ in range(arguments.passes):
            once()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

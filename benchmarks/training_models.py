"""Time training steps of whole models, by PyTorch alone and with a package enabled.

Needs transformers, and a GPU that attnsweep has winners for: its attention is the package.

The models of random_models.py: a Llama kind (head_dim 64) and a Qwen kind (head_dim 128) at
4 x 2048 and 1 x 8192 tokens, and a stack of full attention at 64 x 197, the shape of a ViT. A step
is loss and gradients of all parameters, without an optimizer.

- eager, compiled: milliseconds of a step, and tokens a second, before and after, as models.py times
  prefills.
- error: of all gradients of one step, relative to those with attention in float64, by the norm of
  the difference. Measured at each model's first size, on one item of the batch.
- curve: STEPS steps of AdamW of a small Llama on text of a random Markov chain, three times from
  the same weights: the loss of every tenth step by SDPA, by its flash backend, and by the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from models import compiled, eager, rounded
from random_models import Model, attention_of, built
from setting import described, options, package_at, write_rows

SIZES = {"llama": ((4, 2048), (1, 8192)), "qwen": ((4, 2048), (1, 8192)), "diffusion": ((64, 197),)}
STEPS, EVERY, VOCABULARY, ROUNDS = 200, 10, 512, 10


def gradient_errors(model: Model, ids: torch.Tensor, package: Any) -> dict[str, float]:
    """Errors of all gradients, relative to those with attention in float64."""

    def gradients(who: str) -> list[torch.Tensor]:
        with attention_of(who, package):
            model.loss(ids).backward()
        found = [each.grad for each in model.module.parameters() if each.grad is not None]
        model.module.zero_grad(set_to_none=True)
        return found

    right, errors = gradients("float64"), {}
    size = sum(float(each.double().norm()) ** 2 for each in right) ** 0.5
    for who in ("sdpa", "package"):
        off = zip(gradients(who), right, strict=True)
        squares = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in off)
        errors[who] = rounded(squares**0.5 / size)
    return errors


def step(model: Model, ids: torch.Tensor) -> float:
    """A step, which leaves no gradients. Returns the loss."""
    loss = model.loss(ids)
    loss.backward()
    model.module.zero_grad(set_to_none=True)
    return float(loss.detach())


def rows(package: Any) -> Iterator[dict[str, Any]]:
    """What is measured of each model at each size."""
    for name, sizes in SIZES.items():
        model = built(name)
        for batch, tokens in sizes:
            ids = model.ids(batch, tokens)
            found: dict[str, Any] = {"model": name, "batch": batch, "tokens": tokens}
            for mode in (eager, compiled):
                of = mode(model, partial(step, model, ids), package, ROUNDS)
                for when in ("before", "after"):
                    of[f"{when}_tokens_per_s"] = round(batch * tokens / of[f"{when}_ms"] * 1e3)
                found[mode.__name__] = of
            if (batch, tokens) == sizes[0]:
                found["error"] = gradient_errors(model, ids[:1], package)
            yield found
        del model


# ---- a short training ----
def markov_text(count: int, length: int) -> torch.Tensor:
    """Items of a chain, each of whose tokens has four that may follow."""
    draw = torch.Generator("cpu").manual_seed(7)
    follow = torch.randint(0, VOCABULARY, (VOCABULARY, 4), generator=draw)
    text = [torch.randint(0, VOCABULARY, (count,), generator=draw)]
    for _ in range(length - 1):
        chosen = torch.randint(0, 4, (count,), generator=draw)
        text.append(follow[text[-1], chosen])
    return torch.stack(text, 1).cuda()


def curve(package: Any, length: int = 4096) -> dict[str, Any]:
    """Losses of three trainings from the same weights, on the same text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)
    text = markov_text(4 * STEPS, length).split(4)
    losses: dict[str, list[float]] = {}
    for who in ("sdpa", "flash", "package"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        found = []
        with attention_of(who, package):
            for ids in text:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                found.append(loss.detach())
        losses[who] = [round(float(each), 4) for each in found[EVERY - 1 :: EVERY]]
    apart = {
        who: round(max(abs(a - b) for a, b in zip(own, losses["sdpa"], strict=True)), 4) for who, own in losses.items()
    }
    return {"steps": STEPS, "tokens": length, "losses": losses, "apart": apart}


def main() -> None:
    """Train, then measure each model and size; write the file if one is named."""
    file, package = options(__doc__).parse_args().file, package_at(None)
    write_rows(file, described(), rows(package), curve=curve(package))


if __name__ == "__main__":
    main()

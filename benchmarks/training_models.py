"""Time training steps of whole models, by PyTorch alone and with a package enabled.

Usage: python benchmarks/training_models.py [FILE.json] [--seconds 300]. Needs transformers, and a
GPU that attnsweep has winners for: its attention is the package.

The models of random_models.py, in bf16: a Llama kind (head_dim 64) and a Qwen kind (head_dim 128)
at 4 x 2048 and 1 x 8192 tokens, and a stack of full attention at 64 x 197, the shape of a ViT. A
step is loss and gradients of all parameters, without an optimizer.

- eager, compiled: milliseconds of a step, and tokens a second, before and after. Eager steps take
  turns; compiled ones (torch.compile of each block) run one after the other.
- error: of all gradients of one step, relative to those with attention in float64, by the norm of
  the difference; also of PyTorch's flash backend, so that one sees what two implementations in bf16
  differ by. Measured at each model's first size, on one item of the batch.
- calls: what the package's counters say of one step.
- curve: STEPS steps of AdamW of a small Llama on text of a random Markov chain, three times from
  the same weights: the loss of every tenth step by SDPA, by its flash backend, and by the package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from models import attention_of, before_and_after, compiled_layers, counted, rounded, turns
from random_models import Model, built
from setting import console, described, options, package_at, write

SIZES = {"llama": ((4, 2048), (1, 8192)), "qwen": ((4, 2048), (1, 8192)), "diffusion": ((64, 197),)}
STEPS, EVERY, VOCABULARY, ROUNDS = 200, 10, 512, 10


def step_of(model: Model, ids: torch.Tensor) -> Callable[[], float]:
    """A step, which leaves no gradients and returns the loss."""

    def step() -> float:
        loss = model.loss(ids)
        loss.backward()
        model.module.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def compiled(model: Model, step: Callable[[], float], package: Any) -> dict[str, Any]:
    """Steps whose blocks torch.compile has compiled, each way with its own attention."""
    times: dict[str, list[float]] = {}
    for who in ("sdpa", "package"):
        with compiled_layers(model), attention_of(who, package):
            times |= turns({who: step}, rounds=ROUNDS)
    return before_and_after(*times.values())


def gradient_errors(model: Model, ids: torch.Tensor, package: Any) -> dict[str, float]:
    """Errors of all gradients, relative to those with attention in float64."""
    parameters = [each for each in model.module.parameters() if each.requires_grad]

    def gradients(who: str) -> list[torch.Tensor]:
        with attention_of(who, package):
            model.loss(ids).backward()
        found = [each.grad for each in parameters if each.grad is not None]
        model.module.zero_grad(set_to_none=True)
        return found

    right, errors = gradients("float64"), {}
    size = sum(float(each.double().norm()) ** 2 for each in right) ** 0.5
    for who in ("sdpa", "flash", "package"):
        off = zip(gradients(who), right, strict=True)
        squares = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in off)
        errors[who] = rounded(squares**0.5 / size)
    return errors


def row(model: Model, batch: int, tokens: int, package: Any, *, first: bool) -> dict[str, Any]:
    """What is measured of a model at one size."""
    ids = model.ids(batch, tokens)
    step = step_of(model, ids)
    found: dict[str, Any] = {"model": model.name, "batch": batch, "tokens": tokens}
    with attention_of("package", package), counted(package) as calls:
        step()
    found["calls"] = calls
    found["eager"] = before_and_after(*turns({"sdpa": step, "package": step}, package, ROUNDS).values())
    found["compiled"] = compiled(model, step, package)
    for way in (found["eager"], found["compiled"]):
        for when in ("before", "after"):
            way[f"{when}_tokens_per_s"] = round(batch * tokens / way[f"{when}_ms"] * 1e3)
    if first:
        found["error"] = gradient_errors(model, ids[:1], package)
    return found


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
    served: dict[str, int] = {}
    for who in ("sdpa", "flash", "package"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        found = []
        with attention_of(who, package), counted(package) as calls:
            for ids in text:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                found.append(loss.detach())
        served, losses[who] = calls, [round(float(each), 4) for each in found[EVERY - 1 :: EVERY]]
    off = {who: [abs(a - b) for a, b in zip(own, losses["sdpa"], strict=True)] for who, own in losses.items()}
    apart = {who: round(max(each), 4) for who, each in off.items()}
    return {"steps": STEPS, "tokens": length, "losses": losses, "apart": apart, "calls": served}


def main() -> None:
    """Print a line for each model and size; write the file."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    given, package = parser.parse_args(), package_at(None)
    began, rows, left_out = time.monotonic(), [], []
    short = curve(package)
    console.print(f"losses are apart by {short['apart']} at most")
    for name, sizes in SIZES.items():
        if time.monotonic() - began > given.seconds:
            left_out.append(name)
            continue
        model = built(name, "cuda", False)
        for batch, tokens in sizes:
            rows.append(row(model, batch, tokens, package, first=(batch, tokens) == sizes[0]))
            console.print(rows[-1])
        del model
    write(given.file, described(), {"rows": rows, "curve": short, "left_out": left_out})


if __name__ == "__main__":
    main()

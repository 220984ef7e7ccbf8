"""Time models with random weights: with a package and without, or while calls are recorded.

The models are those of random_models.py: a Llama kind (head_dim 64), a Qwen kind (head_dim 128),
and a stack of full attention. `before` is PyTorch's own scaled_dot_product_attention, `after` the
same model while the package is enabled. DIR is what `attnsweep export --out DIR` wrote (default:
the package that comes with attnsweep). Milliseconds have the host's share; `gain` is the median of
the ratios of rounds, in which before and after take turns. `compiled`: each block is compiled by
torch.compile; the two are timed one after the other. `graph`: a CUDA graph is replayed. An error is
the norm of the difference from the same model with attention in float64, over its norm.

prefill: times; errors of the last LAST rows; greedy: how many of the first NEW tokens are those of
PyTorch's own attention.

training: a step is loss and gradients of all parameters, without an optimizer: times, tokens a
second; errors of all gradients at each model's first size, of one item. curve: STEPS steps of AdamW
of a small Llama on text of a random Markov chain, three times from the same weights: the loss of
every tenth step by SDPA, by its flash backend, and by the package.

recording: in each round three prefills take turns: plain, recorded by attnsweep.shapes, and plain
again; a time is the fastest of RUNS. cost: median over the rounds of recorded over the mean of both
plain ones, less 1; noise: the same of plain again over plain. call_us: host time of a call on
tensors that take no time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_models import MODELS, attention_of, built, compiled_layers, ids_of, rows_of, step, ways_of
from setting import console, described, options, package_at, write, write_rows
from timing import WARM_UP, Way, counted, gains, timed_ms, turns

import attnsweep

TOKENS, LAST, NEW, PROMPT, ROUNDS = (1024, 4096, 16384), 256, 32, 512, 20
SIZES = {"llama": ((4, 2048), (1, 8192)), "qwen": ((4, 2048), (1, 8192)), "diffusion": ((64, 197),)}
STEPS, EVERY, VOCABULARY, STEP_ROUNDS = 200, 10, 512, 10
RECORDED, RECORDED_ROUNDS, RUNS, CALLS = (128, 1024, 4096), 21, 3, 2000
BOTH = ("sdpa", "package")
Call = Callable[[], Any]


def eager(_: Any, call: Call, package: Any, rounds: int = ROUNDS) -> dict[str, Any]:
    """Launch by launch, and what the package's counters say of a call."""
    times = turns(ways_of(dict.fromkeys(BOTH, call), package), rounds)
    with attention_of("package", package):
        return gains(times) | {"calls": counted(package, call)}


def compiled(module: Any, call: Call, package: Any, rounds: int = ROUNDS) -> dict[str, Any]:
    """Blocks that torch.compile has compiled, each time with its own attention."""
    times: dict[str, list[float]] = {}
    for who in BOTH:
        with compiled_layers(module), attention_of(who, package):
            times |= turns({who: Way(call)}, rounds)
    return gains(times)


def graph(_: Any, call: Call, package: Any) -> dict[str, Any]:
    """Replayed as a CUDA graph."""
    graphs = {}
    for who in BOTH:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with attention_of(who, package), torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graphs[who] = torch.cuda.CUDAGraph()
        with attention_of(who, package), torch.cuda.graph(graphs[who]):
            call()
    return gains(turns({who: Way(each.replay) for who, each in graphs.items()}, ROUNDS))


def rounded(error: Any) -> float:
    """An error with four digits."""
    return float(f"{float(error):.4g}")


# ---- prefill ----
MODES = {"eager": eager, "graph": graph, "compiled": compiled}


def errors(module: Any, ids: torch.Tensor, package: Any) -> dict[str, float]:
    """Errors of the last rows."""
    rows = {}
    for who in ("float64", *BOTH):
        with attention_of(who, package):
            rows[who] = rows_of(module, ids, LAST).double()
    right = rows.pop("float64")
    return {who: rounded((own - right).norm() / right.norm()) for who, own in rows.items()}


def greedy(module: Any, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """How many of the first NEW tokens are those of PyTorch's own attention."""
    new = {}
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for who in (*BOTH, "float64"):
        with attention_of(who, package):
            made = module.generate(ids, attention_mask=torch.ones_like(ids), **how)
        new[who] = made[0, ids.shape[1] :].tolist()
    right = new.pop("sdpa")
    equal = {who: [a == b for a, b in zip(right, own, strict=True)] for who, own in new.items()}
    same = {who: [*each, False].index(False) for who, each in equal.items()}
    return {"tokens": NEW, "same_as_sdpa": same}


@torch.inference_mode()
def prefill(
    modules: dict[str, Any],
    package: Any,
    put: Callable[[dict[str, Any]], Any],
    tokens: tuple[int, ...] = TOKENS,
    modes: tuple[str, ...] = tuple(MODES),
) -> None:
    """Figures of all models; `put` gets those there are after each size."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        found[name] = {"prefill": {}}
        if hasattr(module, "generate"):
            ids = ids_of(module, 1, min(PROMPT, max(tokens)))
            found[name]["greedy"] = greedy(module, ids, package)
    for count, name in itertools.product(tokens, modules):
        module, ids = modules[name], ids_of(modules[name], 1, count)
        of = {mode: MODES[mode](module, partial(rows_of, module, ids), package) for mode in modes}
        found[name]["prefill"][str(count)] = of | {"error": errors(module, ids, package)}
        console.print(f"{name} {count}: {found[name]['prefill'][str(count)]}")
        put(found)


# ---- training ----
def gradient_errors(module: Any, ids: torch.Tensor, package: Any) -> dict[str, float]:
    """Errors of all gradients."""

    def gradients(who: str) -> list[torch.Tensor]:
        with attention_of(who, package):
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found = [each.grad for each in module.parameters() if each.grad is not None]
        module.zero_grad(set_to_none=True)
        return found

    right, found = gradients("float64"), {}
    size = sum(float(each.double().norm()) ** 2 for each in right) ** 0.5
    for who in BOTH:
        off = zip(gradients(who), right, strict=True)
        squares = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in off)
        found[who] = rounded(squares**0.5 / size)
    return found


def training(package: Any) -> Iterator[dict[str, Any]]:
    """A row of each model at each size."""
    for name, sizes in SIZES.items():
        module = built(name)
        for batch, tokens in sizes:
            ids = ids_of(module, batch, tokens)
            found: dict[str, Any] = {"model": name, "batch": batch, "tokens": tokens}
            for mode in (eager, compiled):
                of = mode(module, partial(step, module, ids), package, STEP_ROUNDS)
                for when in ("before", "after"):
                    of[f"{when}_tokens_per_s"] = round(batch * tokens / of[f"{when}_ms"] * 1e3)
                found[mode.__name__] = of
            if (batch, tokens) == sizes[0]:
                found["error"] = gradient_errors(module, ids[:1], package)
            yield found
        del module


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
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-4), []
        with attention_of(who, package):
            for ids in text:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                found.append(loss.detach())
        losses[who] = [round(float(each), 4) for each in found[EVERY - 1 :: EVERY]]
    off = {who: [abs(a - b) for a, b in zip(own, losses["sdpa"], strict=True)] for who, own in losses.items()}
    apart = {who: round(max(each), 4) for who, each in off.items()}
    return {"steps": STEPS, "tokens": length, "losses": losses, "apart": apart}


# ---- recording ----
def recorded(call: Call, every_call: bool) -> dict[str, list[float]]:
    """Milliseconds of a call in each round, by who made it."""

    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
            path = Path(place) / "calls.yaml"
            with attnsweep.shapes(path, arch="sm_90a", every_call=every_call):
                yield

    def fastest(call: Call) -> float:
        call()
        return min(timed_ms(call) for _ in range(RUNS))

    ways = {"plain": Way(call), "recorded": Way(call, recording), "again": Way(call)}
    return turns(ways, RECORDED_ROUNDS, fastest, math.inf)


def recordings(every_call: bool) -> Iterator[dict[str, Any]]:
    """A row of each model and size."""
    for name in MODELS:
        module = built(name)
        for count in RECORDED:
            times = recorded(partial(rows_of, module, ids_of(module, 1, count)), every_call)
            rounds = list(zip(*times.values(), strict=True))
            cost = statistics.median(2 * b / (a + c) - 1 for a, b, c in rounds)
            noise = statistics.median(c / a - 1 for a, _, c in rounds)
            yield {"model": name, "tokens": count, "cost": round(cost, 4), "noise": round(noise, 4)}


def call_us(every_call: bool) -> dict[str, float]:
    """Microseconds of a call on small tensors, by who made it."""
    q, k, v = torch.zeros(3, 1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")

    def calls() -> None:
        for _ in range(CALLS):
            F.scaled_dot_product_attention(q, k, v)

    times = recorded(calls, every_call).items()
    return {who: round(statistics.median(ms) / CALLS * 1e3, 2) for who, ms in times}


def main() -> None:
    """Measure what is asked for, and write the file as it goes if one is named."""
    parser = options(__doc__, "what", ("prefill", "training", "recording"))
    parser.add_argument("--package", type=Path, metavar="DIR")
    parser.add_argument("--every-call", action="store_true", help="record in PyTorch's dispatcher")
    given = parser.parse_args()
    package, here = package_at(given.package), described()
    if given.what == "prefill":
        modules = {name: built(name) for name in MODELS}
        prefill(modules, package, lambda found: write(given.file, here, {"models": found}))
    elif given.what == "training":
        write_rows(given.file, here, training(package), curve=curve(package))
    else:
        with torch.inference_mode():
            facts = {"every_call": given.every_call, "call_us": call_us(given.every_call)}
            write_rows(given.file, here, recordings(given.every_call), "models", **facts)


if __name__ == "__main__":
    main()

"""Use an exported package in models: time, error, tokens and gradients, before and after.

Usage: python benchmarks/models.py --package DIR OUT.json [--models NAME ...] [--tokens N ...]
[--modes eager compiled graph] [--seconds 360]; or, to record what the models call:
attnsweep shapes models.yaml -- python benchmarks/models.py --once.

The models have random weights: a Llama and a Qwen of transformers' own classes (about 1B, grouped
queries, head_dim 64 and 128), and a stack of diffusion-like blocks (full attention, head_dim 64) of
plain PyTorch, all in bf16. `before` is PyTorch's own scaled_dot_product_attention, `after` the same
model while the package is enabled. DIR is what `attnsweep export --out DIR` wrote.

- time: of a prefill, in milliseconds, with the host's share: before and after take turns, and
  `gain` is the median of the ratios of the rounds. `compiled`: each block is compiled by
  torch.compile; the two are compiled and timed one after the other. `graph`: a CUDA graph is
  replayed.
- error: of the last LAST rows of the output, relative to the same model with attention in float64,
  by the norm of the difference; also of PyTorch's flash backend, so that one sees what two
  implementations in bf16 differ by. `top`: share of rows with the reference's most likely token.
- greedy: how many of the first NEW tokens are those of PyTorch's own attention.
- training: the gradients of one step, relative to those with attention in float64, and its time,
  also with PyTorch's flash backend.
- served: what the package's counters say of one prefill, and why.

A measurement that would begin after --seconds is left out, and named under `left_out`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_models import MODELS, Model, built
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnsweep import __version__

TOKENS = (1024, 4096, 16384)
MODES = ("eager", "compiled", "graph")
LAST, NEW, PROMPT, TRAINED = 256, 32, 512, 1024
ROUNDS, WARM_UP, MOST_S = 20, 2, 4.0
LEAST, ELEMENTS = 1e-3, 1 << 27


# ---- whose attention ----
@contextlib.contextmanager
def _replaced(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def float64_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention in float64, some rows of queries at a time."""
    if attn_mask is not None or dropout_p:
        raise NotImplementedError("a mask, or dropout")
    repeats = query.shape[1] // key.shape[1] if enable_gqa else 1
    q, k, v = (t.double() for t in (query, key, value))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    batch, heads, seqlen, head_dim = q.shape
    rows = max(64, ELEMENTS // (batch * heads * k.shape[2]))
    parts = []
    for first in range(0, seqlen, rows):
        last = min(first + rows, seqlen)
        keys = last if is_causal else k.shape[2]
        scores = q[:, :, first:last] @ k[:, :, :keys].transpose(2, 3)
        scores = scores * (scale if scale is not None else head_dim**-0.5)
        if is_causal:
            places = torch.arange(keys, device=q.device)
            scores = scores.masked_fill(places > places[first:last, None], float("-inf"))
        parts.append((scores.softmax(-1) @ v[:, :, :keys]).to(query.dtype))
    return torch.cat(parts, 2)


@contextlib.contextmanager
def attention_of(who: str, package: Any) -> Iterator[None]:
    """Run a block of code with PyTorch's attention, its flash backend's, float64's, the package's.

    who: sdpa, flash, float64, package.
    """
    with contextlib.ExitStack() as stack:
        if who == "flash":
            on_gpu = torch.cuda.is_available()
            backends = [SDPBackend.FLASH_ATTENTION, *([] if on_gpu else [SDPBackend.MATH])]
            stack.enter_context(sdpa_kernel(backends))
        elif who == "float64":
            stack.enter_context(_replaced(float64_attention))
        elif who == "package" and hasattr(package, "enable"):
            stack.enter_context(package.enable())
        elif who == "package":
            stack.enter_context(_replaced(package.attention))
        yield


def package_at(directory: Path) -> Any:
    """The package that `attnsweep export --out directory` wrote."""
    found = sorted(directory.glob("*/table.json"))
    if len(found) != 1:
        raise SystemExit(f"{directory}: is not what `attnsweep export --out` wrote")
    sys.path.insert(0, str(directory))
    return importlib.import_module(found[0].parent.name)


# ---- measurements ----
def settle() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of one run on the host's clock, until the device has finished."""
    settle()
    began = time.perf_counter()
    run()
    settle()
    return (time.perf_counter() - began) * 1e3


@contextlib.contextmanager
def counted(package: Any) -> Iterator[dict[str, int]]:
    """What a block of code adds to the package's counters, once it is left."""
    calls: dict[str, int] = {}
    before = package.counters()
    yield calls
    now = package.counters()
    calls |= {n: c - before.get(n, 0) for n, c in now.items() if c != before.get(n, 0)}


def turns(runs: Mapping[str, Callable[[], Any]], package: Any = None, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of each run in each round; they take turns, and each begins every other time.

    package: if given, each run has the attention of its name. To enable one is not timed.
    """

    def attention(who: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if package is None else attention_of(who, package)

    for who, run in runs.items():
        with attention(who):
            for _ in range(WARM_UP):
                run()
    times: dict[str, list[float]] = {who: [] for who in runs}
    names, began = list(runs), time.perf_counter()
    while len(times[names[0]]) < rounds and time.perf_counter() - began < MOST_S:
        for who in names if len(times[names[0]]) % 2 else names[::-1]:
            with attention(who):
                times[who].append(timed_ms(runs[who]))
    return times


def before_and_after(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and before over after: by rounds if they took turns."""
    before, after = times["sdpa"], times["package"]
    paired = [a / b for a, b in zip(before, after, strict=False)]
    return {
        "before_ms": round(statistics.median(before), 4),
        "after_ms": round(statistics.median(after), 4),
        "gain": round(statistics.median(paired), 4),
        "rounds": len(paired),
    }


def eager(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """A prefill, launch by launch."""

    def prefill() -> None:
        model.rows(ids, 1)

    return before_and_after(turns({"sdpa": prefill, "package": prefill}, package))


@contextlib.contextmanager
def compiled_layers(model: Model) -> Iterator[None]:
    """Compile each block of a model anew, for as long as the context lasts."""
    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(dynamic=False)
    try:
        yield
    finally:
        for layer in model.layers:
            layer._compiled_call_impl = None


def compiled(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """A prefill whose blocks torch.compile has compiled, each with its own attention."""
    times: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for who in ("sdpa", "package"):
        with compiled_layers(model), attention_of(who, package):
            times |= turns({who: lambda: model.rows(ids, 1)})
            with counted(package) as calls:
                model.rows(ids, 1)
    return before_and_after(times) | {"calls": calls}


def graph(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """A prefill replayed as a CUDA graph."""
    graphs = {}
    for who in ("sdpa", "package"):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with attention_of(who, package), torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                model.rows(ids, 1)
        torch.cuda.current_stream().wait_stream(aside)
        graphs[who] = torch.cuda.CUDAGraph()
        with attention_of(who, package), torch.cuda.graph(graphs[who]):
            model.rows(ids, 1)
    return before_and_after(turns({who: each.replay for who, each in graphs.items()}))


def error(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """Errors of the last rows, relative to attention in float64; shares of equal top tokens."""
    rows = {}
    for who in ("float64", "sdpa", "flash", "package"):
        with attention_of(who, package):
            rows[who] = model.rows(ids, LAST).double()
    right = rows.pop("float64")
    size = right.norm()
    found: dict[str, Any] = {who: float(f"{float((own - right).norm() / size):.4g}") for who, own in rows.items()}
    if model.vocabulary:
        found["top"] = {
            who: round(float((own.argmax(-1) == right.argmax(-1)).double().mean()), 4) for who, own in rows.items()
        }
    return found


def served(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """What serves the calls of one prefill: the counters, and the reasons that `explain` gives."""
    reasons: set[str] = set()

    def explained(*args: Any, **options: Any) -> torch.Tensor:
        reasons.add(str(package.explain(*args, **options)))
        return package.attention(*args, **options)

    with _replaced(explained), counted(package) as calls:
        model.rows(ids, 1)
    return {"calls": calls, "reasons": sorted(reasons)}


def greedy(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """How many of the first NEW tokens are those of PyTorch's own attention."""
    new = {}
    for who in ("sdpa", "package", "float64"):
        with attention_of(who, package):
            made = model.module.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
            )
        new[who] = made[0, ids.shape[1] :].tolist()
    right = new.pop("sdpa")
    same = {who: _leading(right, own) for who, own in new.items()}
    return {"prompt": ids.shape[1], "tokens": NEW, "same_as_sdpa": same}


def _leading(one: Sequence[int], other: Sequence[int]) -> int:
    equal = [a == b for a, b in zip(one, other, strict=True)]
    return equal.index(False) if False in equal else len(equal)


def training(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """One training step: its gradients, relative to attention in float64, and its time."""
    parameters = [each for each in model.module.parameters() if each.requires_grad]

    def step() -> float:
        loss = model.loss(ids)
        loss.backward()
        return float(loss.detach())

    def gradients(who: str) -> tuple[float, list[torch.Tensor]]:
        with attention_of(who, package):
            loss = step()
        found = [each.grad for each in parameters if each.grad is not None]
        model.module.zero_grad(set_to_none=True)
        return loss, found

    right_loss, right = gradients("float64")
    result: dict[str, Any] = {"tokens": ids.shape[1], "loss": {"float64": right_loss}}
    size = sum(float(g.double().norm()) ** 2 for g in right) ** 0.5
    for who in ("sdpa", "flash", "package"):
        loss, found = gradients(who)
        each = [float((a - b.double()).norm()) for a, b in zip(found, right, strict=True)]
        own = [float(g.double().norm()) for g in right]
        # A gradient that is zero but for rounding, as that of a bias of the keys, has no error.
        worst = max(e / n for e, n in zip(each, own, strict=True) if n > LEAST * size)
        result["loss"][who] = loss
        result[who] = {
            "error": float(f"{sum(e**2 for e in each) ** 0.5 / size:.4g}"),
            "worst_parameter": float(f"{worst:.4g}"),
        }
    del right, found

    def whole() -> None:
        step()
        model.module.zero_grad(set_to_none=True)

    times = turns({"sdpa": whole, "flash": whole, "package": whole}, package)
    # The package's gradient is that of PyTorch's flash backend: what that alone costs or gains.
    result["time"] = before_and_after(times) | {"flash_ms": round(statistics.median(times["flash"]), 4)}
    return result


# ---- all of it ----
def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def measured(
    models: Sequence[Model],
    package: Any,
    *,
    tokens: Sequence[int] = TOKENS,
    modes: Sequence[str] = MODES,
    seconds: float = 360.0,
    device: str = "cuda",
) -> dict[str, Any]:
    """All measurements, the most telling first, until the seconds are spent."""
    began = time.monotonic()
    results: dict[str, Any] = {
        model.name: {"facts": dict(model.facts), "prefill": {str(n): {} for n in tokens}} for model in models
    }
    left_out: list[str] = []

    def inputs(model: Model, count: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(count)
        most = model.vocabulary or 1024
        return torch.randint(0, most, (1, count), generator=generator, device=device)

    def take(model: Model, what: Callable[[Model, torch.Tensor, Any], dict[str, Any]], count: int) -> None:
        name = what.__name__
        label = f"{model.name} {name} {count}"
        if time.monotonic() - began > seconds:
            left_out.append(label)
            return
        with torch.inference_mode() if what is not training else contextlib.nullcontext():
            try:
                found = what(model, inputs(model, count), package)
            except Exception as failure:  # one that fails must not cost the others
                found = {"failed": f"{type(failure).__name__}: {failure}"[:400]}
        say(f"{time.monotonic() - began:6.1f} s  {label}: {json.dumps(found)}")
        place = results[model.name]
        if what in (training, greedy):
            place[name] = found
        else:
            place["prefill"][str(count)][name] = found

    timings = {"eager": eager, "graph": graph, "compiled": compiled}
    quick = [timings[mode] for mode in ("eager", "graph") if mode in modes]
    for what in (served, *quick, error):
        for count in tokens:
            for model in models:
                take(model, what, count)
    for model in models:
        take(model, training, min(TRAINED, max(tokens)))
        if model.vocabulary:
            take(model, greedy, min(PROMPT, max(tokens)))
    for count in sorted(tokens) if "compiled" in modes else ():
        for model in models:
            take(model, compiled, count)
    return {"models": results, "left_out": left_out, "seconds": round(time.monotonic() - began, 1)}


def environment() -> dict[str, Any]:
    """Card, driver, versions, date."""
    packages = {}
    for name in ("torch", "transformers", "triton", "cuda-bindings"):
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    found: dict[str, Any] = {
        "attnsweep": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": sys.version.split()[0],
        "packages": packages,
    }
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            asked = subprocess.run(query, capture_output=True, text=True, check=False)
            found["driver"] = asked.stdout.split("\n")[0].strip()
        found |= {"gpu": facts.name, "sm_count": facts.multi_processor_count}
        found |= {"cuda": torch.version.cuda, "l2_bytes": facts.L2_cache_size}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write OUT.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.json")
    parser.add_argument("--package", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--once", action="store_true", help="only run each model once")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [built(name, device, given.tiny) for name in given.models]
    if given.once:
        with torch.inference_mode():
            for model in models:
                for count in given.tokens:
                    model.rows(torch.ones(1, count, dtype=torch.long, device=device), 1)
        settle()
        return
    if given.out is None or given.package is None:
        parser.error("OUT.json and --package are needed, or --once")
    package = package_at(given.package)
    modes = [mode for mode in given.modes if device == "cuda" or mode != "graph"]
    options: dict[str, Any] = {"tokens": given.tokens, "modes": modes, "seconds": given.seconds}
    result = measured(models, package, device=device, **options)
    facts = {"environment": environment(), "package": package.__version__, **result}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(facts, indent=1) + "\n")
    say(f"written: {given.out}")


if __name__ == "__main__":
    main()

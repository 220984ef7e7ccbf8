"""Use a package in models: time, error and tokens, before and after.

Usage: python benchmarks/models.py [FILE.json] [--package DIR] [--seconds 360]; or, to record what
the models call: attnsweep shapes models.yaml -- python benchmarks/models.py --once.

The models have random weights: a Llama and a Qwen of transformers' own classes (about 1B, grouped
queries, head_dim 64 and 128), and a stack of diffusion-like blocks (full attention, head_dim 64) of
plain PyTorch, all in bf16. `before` is PyTorch's own scaled_dot_product_attention, `after` the same
model while the package is enabled. DIR is what `attnsweep export --out DIR` wrote (default: the
package that comes with attnsweep).

- time: of a prefill, in milliseconds, with the host's share: before and after take turns, and
  `gain` is the median of the ratios of the rounds. `compiled`: each block is compiled by
  torch.compile; the two are compiled and timed one after the other. `graph`: a CUDA graph is
  replayed. `calls`: what the package's counters say of a prefill.
- error: of the last LAST rows of the output, relative to the same model with attention in float64,
  by the norm of the difference; also of PyTorch's flash backend, so that one sees what two
  implementations in bf16 differ by. `top`: share of rows with the reference's most likely token.
- greedy: how many of the first NEW tokens are those of PyTorch's own attention.

A measurement that would begin after --seconds is left out, and named under `left_out`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_models import MODELS, Model, built
from setting import console, described, options, package_at, write
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = (1024, 4096, 16384)
MODES = ("eager", "compiled", "graph")
LAST, NEW, PROMPT = 256, 32, 512
ROUNDS, WARM_UP, MOST_S = 20, 2, 4.0
ELEMENTS = 1 << 27


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
    """scaled_dot_product_attention in float64, some rows of queries at a time.

    attn_mask: is added. Groups of queries are seen by the shapes.
    """
    del enable_gqa
    if dropout_p or (attn_mask is not None and attn_mask.dtype == torch.bool):
        raise NotImplementedError("dropout, or a boolean mask")
    batch, heads, seqlen, head_dim = query.shape
    q, k, v = (t.double().repeat_interleave(heads // t.shape[1], 1) for t in (query, key, value))
    rows = max(64, ELEMENTS // (batch * heads * k.shape[2]))
    parts = []
    for first in range(0, seqlen, rows):
        last = min(first + rows, seqlen)
        scores = q[:, :, first:last] @ k.mT * (scale if scale is not None else head_dim**-0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attn_mask is not None:
            scores += attn_mask[..., first:last, :]
        if is_causal:
            places = torch.arange(k.shape[2], device=q.device)
            scores = scores.masked_fill(places > places[first:last, None], float("-inf"))
        if sinks is not None:
            sink = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        parts.append((weights @ v).to(query.dtype))
    return torch.cat(parts, 2)


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = float64_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


@contextlib.contextmanager
def attention_of(who: str, package: Any) -> Iterator[None]:
    """Run a block of code with PyTorch's attention, its flash backend's, float64's, the package's.

    who: sdpa, flash, float64, package.
    """
    flash = [SDPBackend.FLASH_ATTENTION] + [SDPBackend.MATH] * (not torch.cuda.is_available())
    contexts = {"flash": partial(sdpa_kernel, flash), "float64": _float64, "package": getattr(package, "enable", None)}
    with contexts.get(who, contextlib.nullcontext)():
        yield


# ---- measurements ----
settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None  # waits for the device


def timed_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of one run on the host's clock, until the device has finished."""
    settle()
    began = time.perf_counter()
    run()
    settle()
    return (time.perf_counter() - began) * 1e3


def device_us(call: Callable[[], Any], calls: int, sleep_cycles: int = 0) -> float:
    """Microseconds of a call on the device, the mean of `calls` in a row.

    sleep_cycles: the device sleeps so long before, while the host queues the calls.
    """
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / calls


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


def before_and_after(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Medians, and before over after: by rounds if they took turns."""
    paired = [a / b for a, b in zip(before, after, strict=False)]
    return {
        "before_ms": round(statistics.median(before), 4),
        "after_ms": round(statistics.median(after), 4),
        "gain": round(statistics.median(paired), 4),
        "rounds": len(paired),
    }


def eager(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """A prefill, launch by launch."""
    prefill = partial(model.rows, ids, 1)
    times = turns({"sdpa": prefill, "package": prefill}, package)
    with attention_of("package", package), counted(package) as calls:
        prefill()
    return before_and_after(*times.values()) | {"calls": calls}


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
            times |= turns({who: partial(model.rows, ids, 1)})
            with counted(package) as calls:
                model.rows(ids, 1)
    return before_and_after(*times.values()) | {"calls": calls}


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
    return before_and_after(*turns({who: each.replay for who, each in graphs.items()}).values())


def error(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """Errors of the last rows, relative to attention in float64; shares of equal top tokens."""
    rows = {}
    for who in ("float64", "sdpa", "flash", "package"):
        with attention_of(who, package):
            rows[who] = model.rows(ids, LAST).double()
    right = rows.pop("float64")
    found: dict[str, Any] = {who: rounded((own - right).norm() / right.norm()) for who, own in rows.items()}
    if model.vocabulary:
        same = {who: own.argmax(-1) == right.argmax(-1) for who, own in rows.items()}
        found["top"] = {who: round(float(each.double().mean()), 4) for who, each in same.items()}
    return found


def rounded(error: Any) -> float:
    """An error with four digits."""
    return float(f"{float(error):.4g}")


def greedy(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """How many of the first NEW tokens are those of PyTorch's own attention."""
    new = {}
    for who in ("sdpa", "package", "float64"):
        with attention_of(who, package):
            how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            made = model.module.generate(ids, attention_mask=torch.ones_like(ids), **how)
        new[who] = made[0, ids.shape[1] :].tolist()
    right = new.pop("sdpa")
    equal = {who: [a == b for a, b in zip(right, own, strict=True)] for who, own in new.items()}
    same = {who: [*each, False].index(False) for who, each in equal.items()}
    return {"prompt": ids.shape[1], "tokens": NEW, "same_as_sdpa": same}


# ---- all of it ----
def measured(
    models: Sequence[Model],
    package: Any,
    *,
    tokens: Sequence[int] = TOKENS,
    modes: Sequence[str] = MODES,
    seconds: float = 360.0,
) -> dict[str, Any]:
    """All measurements, the most telling first, until the seconds are spent."""
    began = time.monotonic()
    results: dict[str, Any] = {
        model.name: {"facts": dict(model.facts), "prefill": {str(n): {} for n in tokens}} for model in models
    }
    left_out: list[str] = []

    def take(model: Model, what: Callable[[Model, torch.Tensor, Any], dict[str, Any]], count: int) -> None:
        name, label = what.__name__, f"{model.name} {what.__name__} {count}"
        if time.monotonic() - began > seconds:
            left_out.append(label)
            return
        with torch.inference_mode():
            try:
                found = what(model, model.ids(1, count), package)
            except Exception as failure:  # one that fails must not cost the others
                found = {"failed": f"{type(failure).__name__}: {failure}"[:400]}
        console.print(f"{time.monotonic() - began:6.1f} s  {label}: {json.dumps(found)}")
        of = results[model.name]
        (of if what is greedy else of["prefill"][str(count)])[name] = found

    quick = [what for what in (eager, graph) if what.__name__ in modes]
    for what, count, model in itertools.product((*quick, error), tokens, models):
        take(model, what, count)
    for model in models:
        if model.vocabulary:
            take(model, greedy, min(PROMPT, max(tokens)))
    for count, model in itertools.product(sorted(tokens) if "compiled" in modes else (), models):
        take(model, compiled, count)
    return {"models": results, "left_out": left_out, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Measure, and write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--package", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--once", action="store_true", help="only run each model once")
    given = parser.parse_args()
    models = [built(name, "cuda", False) for name in MODELS]
    if given.once:
        with torch.inference_mode():
            for model, count in itertools.product(models, TOKENS):
                model.rows(torch.ones(1, count, dtype=torch.long, device="cuda"), 1)
        settle()
        return
    package = package_at(given.package)
    told = measured(models, package, seconds=given.seconds)
    write(given.file, described(), {"package": package.__version__, **told})


if __name__ == "__main__":
    main()

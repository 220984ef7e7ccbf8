"""Use a package in models: time, error and tokens, before and after.

Usage: python benchmarks/models.py [FILE.json] [--package DIR] [--models NAME ...] [--tokens N ...]
[--modes eager compiled graph] [--seconds 360]; or, to record what the models call:
attnsweep shapes models.yaml -- python benchmarks/models.py --once.

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
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        elif who == "package":
            stack.enter_context(package.enable())
        yield


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

    def prefill() -> None:
        model.rows(ids, 1)

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
            times |= turns({who: lambda: model.rows(ids, 1)})
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
    size = right.norm()
    found: dict[str, Any] = {who: float(f"{float((own - right).norm() / size):.4g}") for who, own in rows.items()}
    if model.vocabulary:
        found["top"] = {
            who: round(float((own.argmax(-1) == right.argmax(-1)).double().mean()), 4) for who, own in rows.items()
        }
    return found


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
        name = what.__name__
        label = f"{model.name} {name} {count}"
        if time.monotonic() - began > seconds:
            left_out.append(label)
            return
        with torch.inference_mode():
            try:
                found = what(model, model.ids(1, count), package)
            except Exception as failure:  # one that fails must not cost the others
                found = {"failed": f"{type(failure).__name__}: {failure}"[:400]}
        console.print(f"{time.monotonic() - began:6.1f} s  {label}: {json.dumps(found)}")
        place = results[model.name]
        if what is greedy:
            place[name] = found
        else:
            place["prefill"][str(count)][name] = found

    timings = {"eager": eager, "graph": graph, "compiled": compiled}
    quick = [timings[mode] for mode in ("eager", "graph") if mode in modes]
    for what in (*quick, error):
        for count in tokens:
            for model in models:
                take(model, what, count)
    for model in models:
        if model.vocabulary:
            take(model, greedy, min(PROMPT, max(tokens)))
    for count in sorted(tokens) if "compiled" in modes else ():
        for model in models:
            take(model, compiled, count)
    return {"models": results, "left_out": left_out, "seconds": round(time.monotonic() - began, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--package", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--once", action="store_true", help="only run each model once")
    given = parser.parse_args(arguments)
    models = [built(name, "cuda", False) for name in given.models]
    if given.once:
        with torch.inference_mode():
            for model in models:
                for count in given.tokens:
                    model.rows(torch.ones(1, count, dtype=torch.long, device="cuda"), 1)
        settle()
        return
    package = package_at(given.package)
    told = measured(models, package, tokens=given.tokens, modes=given.modes, seconds=given.seconds)
    write(given.file, described(), {"package": package.__version__, **told})


if __name__ == "__main__":
    main()

"""Use a package in models: time of a prefill, error and tokens, before and after.

The models are those of random_models.py. `before` is PyTorch's own scaled_dot_product_attention,
`after` the same model while the package is enabled. DIR is what `attnsweep export --out DIR` wrote
(default: the package that comes with attnsweep).

- eager, compiled, graph: milliseconds of a prefill with the host's share, by which before and after
  take turns; `gain` is the median of the ratios of the rounds. `compiled`: each block is compiled
  by torch.compile; the two are timed one after the other. `graph`: a CUDA graph is replayed.
- error: of the last LAST rows of the output, relative to the same model with attention in float64,
  by the norm of the difference.
- greedy: how many of the first NEW tokens are those of PyTorch's own attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_models import MODELS, Model, attention_of, built, compiled_layers, ways_of
from setting import console, described, options, package_at, write
from timing import WARM_UP, Way, counted, gains, turns

TOKENS = (1024, 4096, 16384)
LAST, NEW, PROMPT, ROUNDS = 256, 32, 512, 20
BOTH = ("sdpa", "package")
Call = Callable[[], Any]


def eager(_: Model, call: Call, package: Any, rounds: int = ROUNDS) -> dict[str, Any]:
    """Launch by launch, and what the package's counters say of a call."""
    times = turns(ways_of(dict.fromkeys(BOTH, call), package), rounds)
    with attention_of("package", package):
        return gains(times) | {"calls": counted(package, call)}


def compiled(model: Model, call: Call, package: Any, rounds: int = ROUNDS) -> dict[str, Any]:
    """Blocks that torch.compile has compiled, each time with its own attention."""
    times: dict[str, list[float]] = {}
    for who in BOTH:
        with compiled_layers(model), attention_of(who, package):
            times |= turns({who: Way(call)}, rounds)
    return gains(times)


def graph(_: Model, call: Call, package: Any) -> dict[str, Any]:
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


MODES = {"eager": eager, "graph": graph, "compiled": compiled}


def error(model: Model, ids: torch.Tensor, package: Any) -> dict[str, float]:
    """Errors of the last rows, relative to attention in float64."""
    rows = {}
    for who in ("float64", *BOTH):
        with attention_of(who, package):
            rows[who] = model.rows(ids, LAST).double()
    right = rows.pop("float64")
    return {who: rounded((own - right).norm() / right.norm()) for who, own in rows.items()}


def rounded(error: Any) -> float:
    """An error with four digits."""
    return float(f"{float(error):.4g}")


def greedy(model: Model, ids: torch.Tensor, package: Any) -> dict[str, Any]:
    """How many of the first NEW tokens are those of PyTorch's own attention."""
    new = {}
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for who in (*BOTH, "float64"):
        with attention_of(who, package):
            made = model.module.generate(ids, attention_mask=torch.ones_like(ids), **how)
        new[who] = made[0, ids.shape[1] :].tolist()
    right = new.pop("sdpa")
    equal = {who: [a == b for a, b in zip(right, own, strict=True)] for who, own in new.items()}
    same = {who: [*each, False].index(False) for who, each in equal.items()}
    return {"tokens": NEW, "same_as_sdpa": same}


def measured(
    models: Sequence[Model],
    package: Any,
    found: dict[str, Any],
    tokens: Sequence[int] = TOKENS,
    modes: Sequence[str] = tuple(MODES),
    done: Callable[[], None] = lambda: None,
) -> None:
    """Put the figures of all models into `found`, and call `done` after those of each size."""
    for model in models:
        found[model.name] = {"prefill": {str(n): {} for n in tokens}}
    with torch.inference_mode():
        for model in models:
            if model.vocabulary:
                ids = model.ids(1, min(PROMPT, max(tokens)))
                found[model.name]["greedy"] = greedy(model, ids, package)
        for count, model in itertools.product(tokens, models):
            ids, of = model.ids(1, count), found[model.name]["prefill"][str(count)]
            for mode in modes:
                of[mode] = MODES[mode](model, partial(model.rows, ids, 1), package)
            of["error"] = error(model, ids, package)
            console.print(f"{model.name} {count}: {of}")
            done()


def main() -> None:
    """Measure, and write the file after each size if one is named."""
    parser = options(__doc__)
    parser.add_argument("--package", type=Path, metavar="DIR")
    given, found = parser.parse_args(), {}
    package, here = package_at(given.package), described()
    measured([built(name) for name in MODELS], package, found, done=lambda: write(given.file, here, {"models": found}))


if __name__ == "__main__":
    main()

"""Measure what recording a model's attention calls costs it.

In each round three prefills of a model of random_models.py take turns: plain, recorded by
attnsweep.shapes, and plain again; a time is the fastest of RUNS, after one that is not timed. cost:
median over the rounds of recorded over the mean of both plain ones, less 1; noise: the same of
plain again over plain. call_us: host time of a call on tensors that take no time.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_models import MODELS, built
from setting import console, described, options, write_rows
from timing import Way, timed_ms, turns

import attnsweep

TOKENS, ROUNDS, RUNS, CALLS = (128, 1024, 4096), 21, 3, 2000


def times_of(run: Callable[[], Any], every_call: bool) -> dict[str, list[float]]:
    """Milliseconds of a run in each round, by who ran it."""

    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
            path = Path(place) / "calls.yaml"
            with attnsweep.shapes(path, arch="sm_90a", every_call=every_call):
                yield

    def fastest(call: Callable[[], Any]) -> float:
        call()
        return min(timed_ms(call) for _ in range(RUNS))

    ways = {"plain": Way(run), "recorded": Way(run, recording), "again": Way(run)}
    return turns(ways, ROUNDS, fastest, math.inf)


def rows(every_call: bool) -> Iterator[dict[str, Any]]:
    """Medians of each model and size, and what recording added."""
    for name in MODELS:
        model = built(name)
        for count in TOKENS:
            ids = torch.ones(1, count, dtype=torch.long, device="cuda")
            times = times_of(partial(model.rows, ids, 1), every_call)
            rounds = list(zip(*times.values(), strict=True))
            yield {
                "model": name,
                "tokens": count,
                **{f"{who}_ms": round(statistics.median(each), 4) for who, each in times.items()},
                "cost": round(statistics.median(2 * b / (a + c) - 1 for a, b, c in rounds), 4),
                "noise": round(statistics.median(c / a - 1 for a, _, c in rounds), 4),
            }


def main() -> None:
    """Measure, print each result, and write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--every-call", action="store_true", help="count in PyTorch's dispatcher")
    given = parser.parse_args()
    with torch.inference_mode():
        q, k, v = torch.zeros(3, 1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")

        def calls() -> None:
            for _ in range(CALLS):
                F.scaled_dot_product_attention(q, k, v)

        times = times_of(calls, given.every_call)
        call_us = {who: round(statistics.median(ms) / CALLS * 1e3, 2) for who, ms in times.items()}
        console.print(f"microseconds of a call: {call_us}")
        facts = {"every_call": given.every_call, "call_us": call_us}
        write_rows(given.file, described(), rows(given.every_call), "models", **facts)


if __name__ == "__main__":
    main()

"""Measure what recording a model's attention calls costs it.

Usage: python benchmarks/recorder.py [FILE.json] [--every-call]

The models are those of random_models.py. In each round three prefills take turns: plain, recorded
by attnsweep.shapes, and plain again; a time is the fastest of RUNS, after one that is not timed.
cost: median over the rounds of recorded over the mean of both plain ones, less 1; noise: the same
of plain again over plain. call_us: host time of a call on tensors that take no time.
"""

from __future__ import annotations

import io
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import timed_ms
from random_models import MODELS, built
from setting import console, described, options, write

import attnsweep

TOKENS, WHO = (128, 1024, 4096), ("plain", "recorded", "again")
ROUNDS, RUNS, CALLS = 21, 3, 2000


def turns(run: Callable[[], Any], every_call: bool) -> dict[str, list[float]]:
    """Milliseconds of a run in each round, by who ran it; who begins changes with each round."""
    times: dict[str, list[float]] = {who: [] for who in WHO}
    for first in (number % len(WHO) for number in range(ROUNDS)):
        for who in (*WHO[first:], *WHO[:first]):
            with ExitStack() as stack:
                if who == "recorded":
                    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "calls.yaml"
                    stack.enter_context(redirect_stderr(io.StringIO()))
                    stack.enter_context(attnsweep.shapes(path, arch="sm_90a", every_call=every_call))
                run()
                times[who].append(min(timed_ms(run) for _ in range(RUNS)))
    return times


def cost(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and what recording added."""
    rounds = list(zip(*(times[who] for who in WHO), strict=True))
    return {f"{who}_ms": round(statistics.median(times[who]), 4) for who in WHO} | {
        "cost": round(statistics.median(2 * b / (a + c) - 1 for a, b, c in rounds), 4),
        "noise": round(statistics.median(c / a - 1 for a, _, c in rounds), 4),
    }


def main() -> None:
    """Measure, print each result, and write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--every-call", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        q, k, v = torch.zeros(3, 1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")

        def calls() -> None:
            for _ in range(CALLS):
                F.scaled_dot_product_attention(q, k, v)

        times = turns(calls, given.every_call)
        call_us = {who: round(statistics.median(times[who]) / CALLS * 1e3, 2) for who in WHO}
        console.print(f"a call: {call_us['plain']} us, recorded {call_us['recorded']} us")
        for name in MODELS:
            model = built(name, "cuda", False)
            for count in TOKENS:
                ids = torch.ones(1, count, dtype=torch.long, device="cuda")
                found = cost(turns(partial(model.rows, ids, 1), given.every_call))
                rows.append({"model": name, "tokens": count, **found})
                console.print(f"{name} {count}: {found}")
    facts = {"every_call": given.every_call, "call_us": call_us, "models": rows}
    write(given.file, described(), facts)


if __name__ == "__main__":
    main()

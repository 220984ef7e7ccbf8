"""Measure what recording a model's attention calls costs it.

Usage: python benchmarks/recorder.py OUT.json [--models NAME ...] [--tokens N ...] [--rounds N]
[--tiny]

The models are those of benchmarks/models.py. In each round three prefills take turns: plain,
recorded by attnsweep.shapes, and plain again; each follows an untimed one. They are launched one by
one, without graphs, since a graph's replay costs no more than a look-up. Times are the host's,
until the device has finished.

- cost: median over the rounds of recorded over plain, less 1. noise: the same of both plain ones.
- added_us: median of recorded less plain, for each attention call.
- call_us: host time of one call on tensors that take no time, plain and recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import environment, say, timed_ms
from random_models import MODELS, built

import attnsweep

TOKENS = (128, 1024, 4096)
WHO = ("plain", "recorded", "again")
ROUNDS, CALLS = 40, 200


@contextlib.contextmanager
def recording(who: str) -> Iterator[None]:
    """Record the calls of a block of code, if `who` is recorded."""
    with contextlib.ExitStack() as stack:
        if who == "recorded":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # what it found
            stack.enter_context(attnsweep.shapes(Path(folder) / "calls.yaml", arch="sm_90a"))
        yield


def turns(run: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a run in each round, by who ran it; who begins changes with each round."""
    times: dict[str, list[float]] = {who: [] for who in WHO}
    for number in range(rounds):
        first = number % len(WHO)
        for who in (*WHO[first:], *WHO[:first]):
            with recording(who):
                run()
                times[who].append(timed_ms(run))
    return times


def cost(times: dict[str, list[float]], calls: int) -> dict[str, Any]:
    """Medians, and what recording added; see above. calls: attention calls of a round."""

    def added(who: str) -> float:
        ratios = [a / b for a, b in zip(times[who], times["plain"], strict=True)]
        return round(statistics.median(ratios) - 1, 5)

    medians = {f"{who}_ms": round(statistics.median(times[who]), 4) for who in WHO}
    more = [a - b for a, b in zip(times["recorded"], times["plain"], strict=True)]
    added_us = round(statistics.median(more) / calls * 1e3, 1)
    return {**medians, "cost": added("recorded"), "noise": added("again"), "added_us": added_us}


def call_us(device: str, rounds: int) -> dict[str, float]:
    """Host microseconds of one call, plain and recorded: medians of rounds of CALLS calls."""
    q = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)

    def calls() -> None:
        for _ in range(CALLS):
            F.scaled_dot_product_attention(q, q, q)

    times = turns(calls, rounds)
    return {who: round(statistics.median(times[who]) / CALLS * 1e3, 3) for who in WHO[:2]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, say each result, and write OUT.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="small models")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with torch.inference_mode():
        one = call_us(device, given.rounds)
        say(f"a call: {one['plain']} us, recorded {one['recorded']} us")
        for name in given.models:
            model = built(name, device, given.tiny)
            for count in given.tokens:
                ids = torch.ones(1, count, dtype=torch.long, device=device)
                found = cost(turns(partial(model.rows, ids, 1), given.rounds), len(model.layers))
                results.append({"model": name, "tokens": count, **found})
                say(f"{name} {count}: {found}")
    facts = {
        "environment": environment(),
        "rounds": given.rounds,
        "tiny": given.tiny,
        "call_us": one,
        "models": results,
        "seconds": round(time.monotonic() - began, 1),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(facts, indent=1) + "\n")
    say(f"written: {given.out}")


if __name__ == "__main__":
    main()

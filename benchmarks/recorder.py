"""Measure what recording a model's attention calls costs it.

Usage: python benchmarks/recorder.py OUT.json [--models NAME ...] [--tokens N ...] [--rounds N]
[--seconds S] [--tiny]

The models are those of benchmarks/models.py. In each round three prefills take turns: plain,
recorded by attnsweep.shapes, and plain again; each follows untimed ones of WARM_CALLS attention
calls, after which recording knows them, and its time is the fastest of RUNS. They are launched one
by one, without graphs, since a graph's replay costs no more than a look-up. Times are the host's,
until the device has finished. Each model and number of tokens has as many rounds as fit into the
seconds, and --rounds at most.

- cost: median over the rounds of recorded over the mean of both plain ones, less 1. noise: the same
  of plain again over plain.
- added_us: median of recorded less that mean, for each attention call.
- cost_interval, noise_interval, added_us_interval: 95 % of such medians of rounds drawn at random
  with replacement.
- call_us: host time of one call on tensors that take no time, plain and recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
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
ROUNDS, SECONDS, WARM_CALLS, RUNS, CALLS = 200, 5.0, 64, 3, 200
DRAWS = 1000


@contextlib.contextmanager
def recording(who: str) -> Iterator[None]:
    """Record the calls of a block of code, if `who` is recorded."""
    with contextlib.ExitStack() as stack:
        if who == "recorded":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # what it found
            stack.enter_context(attnsweep.shapes(Path(folder) / "calls.yaml", arch="sm_90a"))
        yield


def turns(
    run: Callable[[], Any], rounds: int, seconds: float = SECONDS, calls: int = CALLS
) -> dict[str, list[float]]:
    """Milliseconds of a run in each round, by who ran it; who begins changes with each round.

    seconds: after them no round begins, but three there are always. calls: of attention in a run.
    """
    times: dict[str, list[float]] = {who: [] for who in WHO}
    began = time.perf_counter()
    for number in range(rounds):
        if number >= len(WHO) and time.perf_counter() - began > seconds:
            break
        first = number % len(WHO)
        for who in (*WHO[first:], *WHO[:first]):
            with recording(who):
                for _ in range(-(-WARM_CALLS // calls)):
                    run()
                times[who].append(min(timed_ms(run) for _ in range(RUNS)))
    return times


def middle(values: Sequence[float], digits: int) -> tuple[float, list[float]]:
    """The median, and the interval of 95 % of medians of values drawn from these."""
    drawn = random.Random(len(values))
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(DRAWS))
    ends = medians[DRAWS // 40], medians[-DRAWS // 40 - 1]
    return round(statistics.median(values), digits), [round(end, digits) for end in ends]


def cost(times: dict[str, list[float]], calls: int) -> dict[str, Any]:
    """Medians, and what recording added; see above. calls: attention calls of a run."""
    rounds = list(zip(*(times[who] for who in WHO), strict=True))
    found: dict[str, Any] = {f"{who}_ms": round(statistics.median(times[who]), 4) for who in WHO}
    found["rounds"] = len(rounds)
    for name, values, digits in (
        ("cost", [2 * b / (a + c) - 1 for a, b, c in rounds], 5),
        ("noise", [c / a - 1 for a, _, c in rounds], 5),
        ("added_us", [(b - (a + c) / 2) / calls * 1e3 for a, b, c in rounds], 1),
    ):
        found[name], found[f"{name}_interval"] = middle(values, digits)
    return found


def call_us(device: str, rounds: int) -> dict[str, float]:
    """Host microseconds of one call, plain and recorded: medians of rounds of CALLS calls."""
    q, k, v = torch.zeros(3, 1, 1, 16, 64, dtype=torch.bfloat16, device=device)

    def calls() -> None:
        for _ in range(CALLS):
            F.scaled_dot_product_attention(q, k, v)

    times = turns(calls, rounds)
    return {who: round(statistics.median(times[who]) / CALLS * 1e3, 3) for who in WHO[:2]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, say each result, and write OUT.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each model and number")
    parser.add_argument("--tiny", action="store_true", help="small models")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with torch.inference_mode():
        one = call_us(device, min(given.rounds, 30))
        say(f"a call: {one['plain']} us, recorded {one['recorded']} us")
        for name in given.models:
            model = built(name, device, given.tiny)
            for count in given.tokens:
                ids = torch.ones(1, count, dtype=torch.long, device=device)
                run, calls = partial(model.rows, ids, 1), len(model.layers)
                times = turns(run, given.rounds, given.seconds, calls)
                found = cost(times, calls)
                results.append({"model": name, "tokens": count, **found})
                say(f"{name} {count}: {found}")
    facts = {
        "environment": environment(),
        "seconds_each": given.seconds,
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

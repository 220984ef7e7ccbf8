"""Measure the noise floor of a paired ratio: how far two measurements of the same thing differ.

Usage: python benchmarks/noise.py [FILE.json] [--rounds 120]. One config of each of several kernels,
shapes and lengths takes part twice, under two names: in pairs as `check` takes them (replays of
2 ms: first, second, second, first, with nothing between), and in rounds of random order as in a
sweep's finals. The file holds the share of ratios within 1 % (calls over 5 us) and 0.3 % (over
50 us) of 1, for pairs, for rounds, and for medians of 15.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setting import console, options, spec_of, write

from attnsweep import Worker, builds

# (kernel, problem): from about 8 us to about a millisecond on an H200.
CASES = (
    ("flash_fwd_mma", "{batch: 1, heads: 8, seqlen: 512, head_dim: 64}"),
    ("flash_fwd_mma", "{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}"),
    ("three_kernel_mma", "{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}"),
    ("ladder_5_swizzled", "{batch: 2, heads: 16, seqlen: 1024, head_dim: 64}"),
    ("flash_fwd_mma", "{batch: 4, heads: 16, seqlen: 2048, head_dim: 64}"),
    ("flash_fwd_mma", "{batch: 2, heads: 16, seqlen: 4096, head_dim: 128, causal: true}"),
)
REPLAY_US = 2000.0
WARM_UP = 5
ROUNDS_OF_A_SWEEP = 15
# Microseconds of a call, and how far from 1 the ratios of a longer call may be.
LIMITS = ((50.0, 0.003), (5.0, 0.01))


def facts(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Reduce the times of one config against itself to shares within the limit, and quantiles."""
    time_us = statistics.median(time for pair in pairs for time in pair)
    limit = next((limit for above, limit in LIMITS if time_us > above), None)
    ratios = [a / b for a, b in pairs]
    blocks = [ratios[n : n + ROUNDS_OF_A_SWEEP] for n in range(0, len(ratios), ROUNDS_OF_A_SWEEP)]
    medians = [statistics.median(b) for b in blocks if len(b) == ROUNDS_OF_A_SWEEP]

    def within(values: Sequence[float]) -> float | None:
        if limit is None or not values:
            return None
        return round(sum(abs(value - 1) <= limit for value in values) / len(values), 4)

    distances = sorted(100 * abs(ratio - 1) for ratio in ratios)
    return {
        "time_us": round(time_us, 3),
        "limit_percent": None if limit is None else 100 * limit,
        "count": len(ratios),
        "share_within": within(ratios),
        "share_of_medians_within": within(medians),
        "percent_off_of_95_in_100": round(distances[int(0.95 * (len(distances) - 1))], 4),
        "median_ratio": round(statistics.median(ratios), 5),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Time every case against itself."""
    parser = options(__doc__, "noise.json")
    parser.add_argument("--rounds", type=int, default=120)
    asked = parser.parse_args(arguments)
    cases, order = [], random.Random(0)
    with tempfile.TemporaryDirectory() as place, Worker(timeout_s=60) as worker:
        environment = worker.describe()
        for kernel, problem in CASES:
            text = f"problems: [{problem}]\nkernels: {{{kernel}: {{}}}}\nbaselines: []\n"
            spec = spec_of(text, Path(place))
            build = builds(spec, arch=environment.arch, limit=2)[0]
            worker.open(spec.problems[0].problem, replay_us=REPLAY_US, seed=0)
            for name in "ab":
                worker.add(name, build.candidate(), cold=False)
            rounds, pairs = [], []
            for number in range(WARM_UP + asked.rounds):
                alone = {name: worker.replay(name, "warm") for name in order.sample("ab", 2)}
                names = order.sample("ab", 2)
                paired = dict(zip(names, worker.pair(*names), strict=True))
                if number >= WARM_UP:
                    rounds.append((alone["a"], alone["b"]))
                    pairs.append((paired["a"], paired["b"]))
            found = {"pairs": facts(pairs), "rounds": facts(rounds)}
            label = spec.problems[0].problem.label
            console.print(kernel, label, found)
            config = dict(build.config)
            cases.append({"kernel": kernel, "problem": label, "config": config, **found})
    write(asked.file, environment, {"cases": cases})


if __name__ == "__main__":
    main()

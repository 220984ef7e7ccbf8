"""Count right candidates that the judge refuses: none should be, on any inputs.

Usage: python benchmarks/refusals.py [FILE.json] [--trials 1000] [--seconds 300]. Every problem is
opened with new inputs again and again, and in each opening every candidate is checked as a sweep
checks it: on both sets of inputs of the problem and on all small cases. The file holds the counts,
and for each measure the largest share of its limit that a right candidate took, and which one it
was. Needs a GPU.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from setting import console, described, label_of, options, spec_of, write

from attnsweep import Status, Worker, WorkerError, builds, proportion_interval

# One problem of each kind of maths, and the families that a user would run on it.
SPECS = (
    ("{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}", "{flash_fwd_wgmma: {}}"),
    ("{batch: 2, heads: 8, heads_kv: 2, seqlen: 700, head_dim: 128, dtype: bf16, causal: true}",
     "{flash_fwd_wgmma: {}, flash_fwd_mma: {}}"),
    ("{batch: 2, heads: 8, seqlen: 1000, head_dim: 64, dtype: bf16, causal: true}",
     "{three_kernel_wgmma: {STATS: [0, 1, 2, 3]}, wmma_pipeline: {}}"),
    ("{batch: 1, heads: 16, seqlen_q: 500, seqlen_k: 900, head_dim: 64}",
     "{three_kernel_mma: {}, ladder_5_swizzled: {}, naive: {}}"),
    ("{batch: 1, heads: 4, seqlen: 64, head_dim: 2048, dtype: fp32}",
     "{flash_fwd_fp32_wgmma: {}, flash_fwd_fp32_wide: {}}"),
    # The worst of half a million rows: it came nearest to a limit in a recorded run.
    ("{batch: 1, heads: 32, seqlen: 16384, head_dim: 64, dtype: e4m3_tensor}",
     "{flash_fwd_fp8_wgmma: {BLOCK_N: 128, SUMS: [0, 1, 2], MAXIMA: [1, 2], HEADROOM: [0, 2, 5],"
     " INTERVAL: [0, 64, 128]}}"),
)  # fmt: skip
# Candidates of each problem, spread over their spaces.
CANDIDATES = 16


def count(trials: int, seconds: float, seed: int, card: Any = Worker, made: Any = builds) -> dict[str, Any]:
    """Try right candidates on new inputs until `trials` are done or the time is up.

    card, made: make the GPU's process, and the candidates of a spec.
    """
    draw = random.Random(seed)
    begun, done = time.monotonic(), 0
    refused: list[dict[str, object]] = []
    nearest: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as place, card(timeout_s=60) as worker:
        arch = worker.describe().arch
        cases = []
        for number, (problem, kernels) in enumerate(SPECS):
            text = f"problems: [{problem}]\nkernels: {kernels}\n"
            spec = spec_of(text, Path(place), f"case{number}")
            every = made(spec, arch=arch, limit=48)  # of each family
            cases.append((spec.problems[0].problem, every[:: max(1, len(every) // CANDIDATES)]))
        while done < trials and time.monotonic() - begun < seconds:
            for problem, candidates in cases:
                inputs = draw.randrange(2**32)
                worker.open(problem, replay_us=100, seed=inputs)
                for build in candidates:
                    done += 1
                    try:
                        accuracy, _ = worker.trial(build.candidate())
                    except WorkerError as error:
                        if error.status is not Status.WRONG:
                            raise
                        refused.append({"seed": inputs, "candidate": label_of(build), "why": error.detail})
                        console.print(f"refused: {refused[-1]}")
                        continue
                    for name, share in accuracy.shares.items():
                        if share > nearest.get(name, (-1.0,))[0]:
                            nearest[name] = share, f"{label_of(build)}, {accuracy.case}, seed {inputs}"
                console.print(f"{done} tried, {len(refused)} refused: {problem.label}")
    return {
        "trials": done,
        "refused": refused,
        "refused_bounds": proportion_interval(len(refused), done),
        "nearest": {name: share for name, (share, _) in nearest.items()},
        "nearest_of": {name: of for name, (_, of) in nearest.items()},
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Count, print, and write."""
    parser = options(__doc__, "refusals.json")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = count(asked.trials, asked.seconds, asked.seed)
    console.print(f"{len(found['refused'])} of {found['trials']} right candidates refused")
    console.print({name: found[name] for name in ("refused_bounds", "nearest")})
    write(asked.file, described(), found)


if __name__ == "__main__":
    main()

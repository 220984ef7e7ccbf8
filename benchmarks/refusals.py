"""Count right candidates that the judge refuses: none should be, on any inputs. Needs a GPU.

Every problem is opened with new inputs again and again, and in each opening every candidate is
checked as a sweep checks it: on both sets of inputs of the problem and on all small cases. The file
holds the counts, and for each measure the largest share of its limit that a right candidate took.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from setting import builds, console, described, label_of, options, spec_of, write

from attnsweep import Status
from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from proportions import proportion_interval

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
CANDIDATES = 16  # of each problem, spread over their spaces


def count(trials: int, seed: int, card: Any = Worker, made: Any = builds) -> dict[str, Any]:
    """Try right candidates on new inputs until `trials` are done.

    card, made: make the GPU's process, and the candidates of a spec.
    """
    draw, done = random.Random(seed), 0
    refused: list[dict[str, object]] = []
    nearest: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as place, card(timeout_s=60) as worker:
        arch, cases = worker.describe().arch, []
        for number, (problem, kernels) in enumerate(SPECS):
            text = f"problems: [{problem}]\nkernels: {kernels}\n"
            spec = spec_of(text, Path(place), f"case{number}")
            every = made(spec, arch=arch, limit=48)  # of each family
            cases.append((spec.problems[0].problem, every[:: max(1, len(every) // CANDIDATES)]))
        while done < trials:
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
                        continue
                    for name, share in accuracy.shares.items():
                        nearest[name] = max(nearest[name], share)
                console.print(f"{done} tried, {len(refused)} refused: {problem.label}")
    bounds = proportion_interval(len(refused), done)
    return {"trials": done, "refused": refused, "refused_bounds": bounds, "nearest": dict(nearest)}


def main() -> None:
    """Count, print, and write."""
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = count(asked.trials, asked.seed)
    console.print(found)
    write(asked.file, described(), found)


if __name__ == "__main__":
    main()

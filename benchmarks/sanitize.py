"""Run Hopper kernels on small problems under NVIDIA's compute-sanitizer.

Each of memcheck, racecheck and synccheck runs a process for each case, N at a time, which compiles
it and checks it as a sweep does, on its small problems with tails too. The file holds each tool's
own summaries, how many cases it saw and how many errors it counted. A tool that ran out of time has
not passed, and its row says so. Errors that the driver's functions return do not count
(--report-api-errors no): attnsweep looks at each itself, and libraries ask for functions that a
driver may not have.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from setting import builds, console, described, options, spec_of, write

from attnsweep.bench.bench import Bench

TOOLS = ("racecheck", "memcheck", "synccheck")  # the slowest first
TILES = "QK_BLOCK_M: 64, QK_BLOCK_K: 32, PV_BLOCK_M: 64, PV_BLOCK_K: 32"
WIDE = "CLUSTER: 8, BLOCK_M: 32, WARPGROUPS: 2"
TWO = "BLOCK_N: 64, WARPGROUPS: 2"
FP8 = f"{TWO}, PINGPONG: 1, OVERLAP: 1, INTERVAL: 0"
# Blocks that take turns need two tiles each, so PERSISTENT is as small as the problem.
CASES = (
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 0, MAXIMA: 1, PINGPONG: 1"),
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 1, MAXIMA: 2, PERSISTENT: 2"),
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 0, MAXIMA: 2, PERSISTENT: 2, Q_REGISTERS: 4"),
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 0, MAXIMA: 2, PERSISTENT: 2, O_OVER_Q: 1"),
    ("flash_fwd_wgmma", f"{TWO}, KEY_GROUPS: 2, P_SHARED: 1, PDL: 2"),
    ("flash_fwd_wgmma", f"{TWO}, CLUSTER: 2, MAXIMA: 1, P_SHARED: 0"),
    ("flash_fwd_wgmma", f"{TWO}, SPLITS: 2, MAXIMA: 1, P_SHARED: 0"),
    ("flash_fwd_wgmma", f"{TWO}, SPLITS: 4, SPLIT_CLUSTER: 1, MAXIMA: 1"),
    ("flash_fwd_fp32_wgmma", f"SLICES: 8, {WIDE}"),
    ("flash_fwd_fp32_wgmma", f"SLICES: 16, {WIDE}, OUTPUT_SLICES: 8, OUTPUT_WARPGROUPS: 4"),
    ("flash_fwd_fp8_wgmma", f"{FP8}, SUMS: 0, MAXIMA: 1, PERSISTENT: 0"),
    ("flash_fwd_fp8_wgmma", f"{FP8}, SUMS: 2, MAXIMA: 2, HEADROOM: 1, PERSISTENT: 2"),
    ("flash_fwd_fp8_wgmma", "BLOCK_N: 128, WARPGROUPS: 2, OVERLAP: 2, INTERVAL: 128, SUMS: 1, "
     "PERSISTENT: 2, V_STAGES: 1"),
    ("three_kernel_wgmma", f"{TILES}, QK_BLOCK_N: 64, STATS: 0"),
    ("three_kernel_wgmma", f"{TILES}, QK_BLOCK_N: 128, STATS: 3, SOFTMAX_THREADS: 32"),
)  # fmt: skip
PROBLEM = "batch: 1, heads: 4, seqlen: 300, head_dim: 64"
PROBLEMS = {
    "flash_fwd_fp8_wgmma": f"{PROBLEM}, heads_kv: 2, dtype: e4m3",
    "flash_fwd_fp32_wgmma": "batch: 1, heads: 2, seqlen: 40, head_dim: 2048, dtype: fp32",
}


def check(kernel: str, values: str, arch: str) -> None:
    """Check the first candidate of a case, full and causal, and count them."""
    # Blocks of a cluster that share keys need the same number of them: full attention alone.
    masks = ("false",) if ", CLUSTER: 2" in values else ("false", "true")
    with tempfile.TemporaryDirectory() as place:
        for seen, causal in enumerate(masks, 1):
            problem = f"{{{PROBLEMS.get(kernel, PROBLEM)}, causal: {causal}}}"
            spec = spec_of(f"problems: [{problem}]\nkernels: {{{kernel}: {{{values}}}}}\n", Path(place))
            (build,) = builds(spec, arch=arch, limit=1)
            Bench(spec.problems[0].problem, replay_us=50, seed=0).trial(build.candidate())
            console.print(f"checked {seen}")


class Done(NamedTuple):
    """What a tool said of a case. code: its exit status; None if it ran out of time."""

    output: str
    code: int | None


def run(command: Sequence[str], budget_s: float) -> Done:
    """Run a command for at most so long; without time left, not at all."""
    if budget_s <= 0:
        return Done("", None)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=budget_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Done(((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace"), None)
    return Done(done.stdout + done.stderr, done.returncode)


def row(tool: str, found: Sequence[Done]) -> dict[str, Any]:
    """Read a tool's outputs, one of each case."""
    said, seen, total, failed = set(), 0, 0, []
    for done in found:
        summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", done.output, re.MULTILINE)
        errors = re.search(r"SUMMARY: (\d+) (?:error|hazard)", "\n".join(summary))
        cases = re.findall(r"^checked (\d+)$", done.output, re.MULTILINE)
        said |= {*summary}
        seen += int(cases[-1]) if cases else 0
        total += int(errors[1]) if errors else 0
        if done.code != 0 or not cases or not errors or int(errors[1]):
            failed.append(done)
    return {
        "tool": tool,
        "cases": seen,
        "summary": sorted(said),
        "errors": total,
        "finished": all(done.code is not None for done in found),
        "clean": bool(found) and not failed,
        "output": failed[0].output[-2000:] if failed else None,
    }


def main() -> None:
    """Run every tool on every case, and write what they found."""
    parser = options(__doc__)
    parser.add_argument("--budget-s", type=float, default=300.0, help="of all tools")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), metavar="N")
    parser.add_argument("--where", metavar="TEXT", default="", help="cases whose family or config has it")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        check(*CASES[int(given.child[0])], given.child[1])
        return
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment, end = described(), time.monotonic() + given.budget_s
    asked = [number for number, case in enumerate(CASES) if given.where in " ".join(case)]

    def one(tool: str, number: int) -> Done:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, __file__, "--child", str(number), environment.arch]
        return run(command, end - time.monotonic())

    with ThreadPoolExecutor(given.jobs) as pool:
        running = {tool: [pool.submit(one, tool, n) for n in asked] for tool in TOOLS}
        found = [row(tool, [future.result() for future in each]) for tool, each in running.items()]
    console.print(found)
    write(given.file, environment, {"cases": [" ".join(CASES[n]) for n in asked], "tools": found})


if __name__ == "__main__":
    main()

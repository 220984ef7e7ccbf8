"""Run Hopper kernels on small problems under NVIDIA's compute-sanitizer.

Usage: python benchmarks/sanitize.py [FILE.json] [--budget-s 300] [--jobs N] [--kernel FAMILY]
[--where PARAMETER].
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setting import console, described, options, spec_of, write

from attnsweep import Bench, builds

TOOLS = ("racecheck", "memcheck", "synccheck")  # the slowest first
# Blocks that take turns need two tiles each, so PERSISTENT is as small as the problem.
# All blocks of a cluster have the same number of keys, so CLUSTER goes with full attention alone.
FULL, BOTH = ("false",), ("false", "true")
TILES = "QK_BLOCK_M: 64, QK_BLOCK_K: 32, PV_BLOCK_M: 64, PV_BLOCK_K: 32"
WIDE = "CLUSTER: 8, BLOCK_M: 32, WARPGROUPS: 2"
TWO = "BLOCK_N: 64, WARPGROUPS: 2"
FP8 = f"{TWO}, PINGPONG: 1, OVERLAP: 1, INTERVAL: 0"
CASES = (
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 0, MAXIMA: 1, PINGPONG: 1", BOTH),
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 1, MAXIMA: 2, PERSISTENT: 2", BOTH),
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 0, MAXIMA: 2, PERSISTENT: 2, Q_REGISTERS: 4", BOTH),
    ("flash_fwd_wgmma", f"{TWO}, P_SHARED: 0, MAXIMA: 2, PERSISTENT: 2, O_OVER_Q: 1", BOTH),
    ("flash_fwd_wgmma", f"{TWO}, KEY_GROUPS: 2, P_SHARED: 1, PDL: 2", BOTH),
    ("flash_fwd_wgmma", f"{TWO}, CLUSTER: 2, MAXIMA: 1, P_SHARED: 0", FULL),
    ("flash_fwd_wgmma", f"{TWO}, SPLITS: 2, MAXIMA: 1, P_SHARED: 0", BOTH),
    ("flash_fwd_wgmma", f"{TWO}, SPLITS: 4, SPLIT_CLUSTER: 1, MAXIMA: 1", BOTH),
    ("flash_fwd_fp32_wgmma", f"SLICES: 8, {WIDE}", BOTH),
    ("flash_fwd_fp32_wgmma", f"SLICES: 16, {WIDE}, OUTPUT_SLICES: 8, OUTPUT_WARPGROUPS: 4", BOTH),
    ("flash_fwd_fp8_wgmma", f"{FP8}, SUMS: 0, MAXIMA: 1, PERSISTENT: 0", BOTH),
    ("flash_fwd_fp8_wgmma", f"{FP8}, SUMS: 2, MAXIMA: 2, HEADROOM: 1, PERSISTENT: 2", BOTH),
    (
        "flash_fwd_fp8_wgmma",
        "BLOCK_N: 128, WARPGROUPS: 2, OVERLAP: 2, INTERVAL: 128, SUMS: 1, PERSISTENT: 2, V_STAGES: 1",
        BOTH,
    ),
    ("three_kernel_wgmma", f"{TILES}, QK_BLOCK_N: 64, STATS: 0", BOTH),
    ("three_kernel_wgmma", f"{TILES}, QK_BLOCK_N: 128, STATS: 3, SOFTMAX_THREADS: 32", BOTH),
)
PROBLEM = "{{batch: 1, heads: 4, seqlen: 300, head_dim: 64, causal: {}}}"
PROBLEMS = {
    "flash_fwd_fp8_wgmma": "{{batch: 1, heads: 4, heads_kv: 2, seqlen: 300, head_dim: 64, dtype: e4m3, causal: {}}}",
    "flash_fwd_fp32_wgmma": "{{batch: 1, heads: 2, seqlen: 40, head_dim: 2048, dtype: fp32, causal: {}}}",
}


def check(kernel: str, values: str, masks: Sequence[str], arch: str) -> None:
    """Check the first candidate of a case with each mask, and count them."""
    seen = 0
    with tempfile.TemporaryDirectory() as place:
        for causal in masks:
            problem = PROBLEMS.get(kernel, PROBLEM).format(causal)
            spec = spec_of(f"problems: [{problem}]\nkernels: {{{kernel}: {{{values}}}}}\n", Path(place))
            for build in builds(spec, arch=arch, limit=1):
                Bench(spec.problems[0].problem, replay_us=50, seed=0).trial(build.candidate())
                seen += 1
                sys.stdout.write(f"checked {seen}\n")
                sys.stdout.flush()


@dataclass(frozen=True)
class Done:
    """What a tool said of a case. code: its exit status; None if it ran out of time."""

    output: str
    code: int | None
    seconds: float


def run(command: Sequence[str], budget_s: float) -> Done:
    """Run a command for at most so long; without time left, not at all."""
    begun = time.monotonic()
    if budget_s <= 0:
        return Done("", None, 0.0)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=budget_s, check=False)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = ((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace"), None
    return Done(output, code, time.monotonic() - begun)


def row(tool: str, found: Sequence[Done]) -> dict[str, Any]:
    """Read a tool's outputs, one of each case."""
    said, seen, counted = [], 0, []
    for done in found:
        summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", done.output, re.MULTILINE)
        errors = re.search(r"SUMMARY: (\d+) (?:error|hazard)", "\n".join(summary))
        cases = re.findall(r"^checked (\d+)$", done.output, re.MULTILINE)
        said += summary
        seen += int(cases[-1]) if cases else 0
        counted.append(int(errors[1]) if errors and cases else None)
    known = [each for each in counted if each is not None]
    failed = [d for d, n in zip(found, counted, strict=True) if d.code != 0 or n != 0]
    return {
        "tool": tool,
        "cases": seen,
        "summary": sorted(set(said)),
        "errors": sum(known) if known else None,
        "finished": all(done.code is not None for done in found),
        "clean": bool(found) and not failed,
        "seconds": round(sum(done.seconds for done in found), 1),
        "output": failed[0].output[-2000:] if failed else None,
    }


def main() -> None:
    """Run every tool on every case, and write what they found."""
    parser = options(__doc__, "sanitizer.json")
    parser.add_argument("--budget-s", type=float, default=300.0, help="of all tools")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--kernel", choices=sorted({c[0] for c in CASES}), help="this one alone")
    parser.add_argument("--where", metavar="NAME", default="", help="configs with this parameter")
    parser.add_argument("--child", metavar="ARCH", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        check(*CASES[arguments.case], arguments.child)
        return
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment = described()
    of = [arguments.kernel in (None, kernel) and arguments.where in config for kernel, config, _ in CASES]
    numbers = [number for number, asked in enumerate(of) if asked]
    end = time.monotonic() + arguments.budget_s

    def one(tool: str, number: int) -> Done:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, __file__, "--child", environment.arch, "--case", str(number)]
        return run(command, end - time.monotonic())

    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {tool: [pool.submit(one, tool, n) for n in numbers] for tool in TOOLS}
        found = []
        for tool, each in running.items():
            found.append(row(tool, [future.result() for future in each]))
            console.print(f"{tool}: {found[-1]['cases']} cases, {found[-1]['summary']}")
    write(arguments.file, environment, {"cases": [" ".join(CASES[n][:2]) for n in numbers], "tools": found})


if __name__ == "__main__":
    main()

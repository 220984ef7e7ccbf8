"""Run Hopper kernels on small problems under NVIDIA's compute-sanitizer.

Usage: python benchmarks/sanitize.py [FILE.json] [--budget-s 60] [--kernel FAMILY]. Each of
memcheck, racecheck and synccheck runs one process that compiles every case and checks it as a sweep
does, on its small problems with tails too. The file holds each tool's own summary, how many cases
it saw and how many errors it counted. A tool that ran out of time has not passed, and its row says
so. Errors that the driver's functions return do not count (--report-api-errors no): attnsweep looks
at each itself, and libraries ask for functions that a driver may not have.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import setting
from setting import console

from attnsweep import Bench, Worker, builds

TOOLS = ("memcheck", "racecheck", "synccheck")
# Blocks that take turns need two tiles each, so PERSISTENT is as small as the problem.
# All blocks of a cluster have the same number of keys, so CLUSTER goes with full attention alone.
FULL, BOTH = ("false",), ("false", "true")
TILES = "QK_BLOCK_M: 64, QK_BLOCK_K: 32, PV_BLOCK_M: 64, PV_BLOCK_K: 32"
CASES = (
    ("flash_fwd_wgmma", "BLOCK_N: 64, WARPGROUPS: 2, P_SHARED: 0, MAXIMA: 1, PINGPONG: 1", BOTH),
    ("flash_fwd_wgmma", "BLOCK_N: 64, WARPGROUPS: 2, P_SHARED: 1, MAXIMA: 2, PERSISTENT: 2", BOTH),
    ("flash_fwd_wgmma", "BLOCK_N: 64, WARPGROUPS: 2, KEY_GROUPS: 2, P_SHARED: 1, PDL: 2", BOTH),
    ("flash_fwd_wgmma", "BLOCK_N: 64, WARPGROUPS: 2, CLUSTER: 2, MAXIMA: 1, P_SHARED: 0", FULL),
    ("flash_fwd_wgmma", "BLOCK_N: 64, WARPGROUPS: 2, SPLITS: 2, MAXIMA: 1, P_SHARED: 0", BOTH),
    ("flash_fwd_wgmma", "BLOCK_N: 64, WARPGROUPS: 2, SPLITS: 4, SPLIT_CLUSTER: 1, MAXIMA: 1", BOTH),
    ("flash_fwd_fp32_wgmma", "SLICES: 8, CLUSTER: 8, BLOCK_M: 32, WARPGROUPS: 2", BOTH),
    (
        "flash_fwd_fp32_wgmma",
        "SLICES: 16, CLUSTER: 8, BLOCK_M: 32, WARPGROUPS: 2, OUTPUT_SLICES: 8, "
        "OUTPUT_WARPGROUPS: 4",
        BOTH,
    ),
    (
        "flash_fwd_fp8_wgmma",
        "BLOCK_N: 64, WARPGROUPS: 2, PINGPONG: 1, OVERLAP: 1, INTERVAL: 0, SUMS: 0, MAXIMA: 1, "
        "PERSISTENT: 0",
        BOTH,
    ),
    (
        "flash_fwd_fp8_wgmma",
        "BLOCK_N: 64, WARPGROUPS: 2, PINGPONG: 1, OVERLAP: 1, INTERVAL: 0, SUMS: 2, MAXIMA: 2, "
        "HEADROOM: 5, PERSISTENT: 2",
        BOTH,
    ),
    (
        "flash_fwd_fp8_wgmma",
        "BLOCK_N: 128, WARPGROUPS: 2, OVERLAP: 2, INTERVAL: 128, SUMS: 1, PERSISTENT: 2, "
        "V_STAGES: 1",
        BOTH,
    ),
    ("three_kernel_wgmma", f"{TILES}, QK_BLOCK_N: 64, STATS: 0", BOTH),
    ("three_kernel_wgmma", f"{TILES}, QK_BLOCK_N: 128, STATS: 3, SOFTMAX_THREADS: 32", BOTH),
)
PROBLEM = "{{batch: 1, heads: 4, seqlen: 300, head_dim: 64, causal: {}}}"
PROBLEMS = {
    "flash_fwd_fp8_wgmma": "{{batch: 1, heads: 4, heads_kv: 2, seqlen: 300, head_dim: 64, "
    "dtype: e4m3, causal: {}}}",
    "flash_fwd_fp32_wgmma": "{{batch: 1, heads: 2, seqlen: 40, head_dim: 2048, dtype: fp32, "
    "causal: {}}}",
}


def check(cases: Sequence[tuple[str, str, tuple[str, ...]]], arch: str) -> int:
    """Check the first candidate of every case with each mask. Returns how many there were."""
    seen = 0
    with tempfile.TemporaryDirectory() as place:
        for kernel, values, masks in cases:
            for causal in masks:
                problem = PROBLEMS.get(kernel, PROBLEM).format(causal)
                text = f"problems: [{problem}]\nkernels: {{{kernel}: {{{values}}}}}\n"
                spec = setting.spec_of(text, Path(place))
                for build in builds(spec, arch=arch, limit=1):
                    Bench(spec.problems[0].problem, replay_us=50, seed=0).trial(build.candidate())
                    seen += 1
                    sys.stdout.write(f"checked {seen}\n")
                    sys.stdout.flush()
    return seen


def row(tool: str, output: str, code: int | None, seconds: float) -> dict[str, Any]:
    """Read a tool's output. code: its exit status; None if it ran out of time."""
    summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.MULTILINE)
    counted = re.search(r"SUMMARY: (\d+) (?:error|hazard)", "\n".join(summary))
    cases = re.findall(r"^checked (\d+)$", output, re.MULTILINE)
    errors = int(counted[1]) if counted else None
    return {
        "tool": tool,
        "cases": int(cases[-1]) if cases else 0,
        "summary": summary,
        "errors": errors,
        "finished": code is not None,
        "clean": code == 0 and errors == 0 and bool(cases),
        "seconds": round(seconds, 1),
        "output": None if code == 0 and errors == 0 else output[-2000:],
    }


def main() -> None:
    """Run every tool, and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("sanitizer.json"))
    parser.add_argument("--budget-s", type=float, default=60.0, help="for each tool")
    parser.add_argument("--kernel", choices=sorted({c[0] for c in CASES}), help="this one alone")
    parser.add_argument("--child", metavar="ARCH", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [c for c in CASES if arguments.kernel in (None, c[0])]
    if arguments.child:
        check(cases, arguments.child)
        return
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with Worker(timeout_s=60) as worker:
        environment = worker.describe()
    found = []
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, __file__, "--child", environment.arch]
        command += ["--kernel", arguments.kernel] if arguments.kernel else []
        begun, code = time.monotonic(), None
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=arguments.budget_s, check=False
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode() + (late.stderr or b"").decode()
        found.append(row(tool, output, code, time.monotonic() - begun))
        console.print(f"{tool}: {found[-1]['cases']} cases, {found[-1]['summary']}")
    setting.write(
        arguments.file,
        environment,
        {"cases": [f"{kernel} {values}" for kernel, values, _ in cases], "tools": found},
    )


if __name__ == "__main__":
    main()

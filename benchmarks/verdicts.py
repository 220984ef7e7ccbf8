"""Record what `attnsweep check` says in each case: pass, timed and not, regression, and so on.

Usage: python benchmarks/verdicts.py DIRECTORY. It needs a GPU and the `ci` extra, and writes JSON,
JUnit XML and Markdown for each case. The kernel is tests/families/burns.cu, whose blocks take a
known number of clock cycles, with one line changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setting import console

from attnsweep import find_runs

ROOT = Path(__file__).parent.parent
FAMILIES = ROOT / "tests" / "families"
SPEC = """\
problems:
  - {batch: 1, heads: 2, seqlen: 64, head_dim: 64}
kernels: {burns: {}}
baselines: []
check: {slower: 0.02, budget_s: 60}
"""
CYCLES = "EXTRA_CYCLES 0"
# Name to the line changed and the exit code that it must give.
CASES = {
    "pass-same-code": (None, 0),
    "pass-timed": (("float largest = -1e30f", "float largest = -2e30f"), 0),
    "regression": ((CYCLES, "EXTRA_CYCLES 12000"), 1),  # 3 % of 400,000
    "improvement": ((CYCLES, "EXTRA_CYCLES -20000"), 0),
    "wrong": (("out / sum", "out / (1.01f * sum)"), 1),
    "inconclusive": (None, 4),  # a problem that the baseline does not have
}


def main() -> int:
    """Record them all; returns 1 if one ended otherwise than it should."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "burns.yaml").write_text(SPEC)
        (place / "more.yaml").write_text(SPEC.replace("seqlen: 64", "seqlen: [64, 128]"))
        shutil.copytree(FAMILIES, place / "families")
        source = place / "families" / "burns.cu"
        text = source.read_text()
        call(place, "run", "burns.yaml", "--kernels", "families", "--results", "runs")
        (run,) = find_runs(place / "runs")
        call(place, "accept", str(run.relative_to(place)), "baseline")
        for name, (edit, expected) in CASES.items():
            source.write_text(text.replace(*edit) if edit else text)
            spec = "more.yaml" if name == "inconclusive" else "burns.yaml"
            files = ["--junit", f"{name}.xml", "--markdown", f"{name}.md", "--json"]
            options = ["--against", "baseline", "--kernels", "families", *files]
            done = call(place, "check", spec, *options)
            (place / f"{name}.json").write_text(done.stdout)
            for path in place.glob(f"{name}.*"):
                (out / path.name).write_text(path.read_text().replace(f"{place}/", ""))
            console.print(f"{name}: exit code {done.returncode}")
            if done.returncode != expected:
                failed = 1
                sys.stderr.write(f"  it should be {expected}: {done.stderr}\n")
    return failed


def call(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command in the directory whose files it names."""
    command = [sys.executable, "-m", "attnsweep", *arguments]
    # The child finds this attnsweep where it is not installed or PYTHONPATH is relative.
    path = os.pathsep.join(filter(None, [str(ROOT.resolve()), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())

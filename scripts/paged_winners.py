"""Write attnsweep/serve/paged_winners.json: the configs behind calls on paged caches.

Usage: python scripts/paged_winners.py [--check]. They are the winners of the recorded runs of paged
caches; flash_3: the time of FlashAttention-3, without metadata, over theirs. With --check it writes
nothing, and returns 1 if the file is not what results/ gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attnsweep import find_runs, open_run, winners

ROOT = Path(__file__).parent.parent
WRITTEN = ROOT / "attnsweep" / "serve" / "paged_winners.json"
FAMILIES = ("decode_paged_mma", "append_paged_wgmma")


def recorded() -> list[Path]:
    """The runs of paged caches."""
    return [run for run in find_runs(ROOT / "results") if run.name.startswith(("paged", "append"))]


def text() -> str:
    """The file, a line a winner."""
    found = {}
    for path in recorded():
        run = open_run(path)
        gpu = (run.environment.gpu or "" if run.environment else "").removeprefix("NVIDIA ")
        flash_3 = {
            row.problem: row.time_us.median
            for row in run.trials
            if row.provider == "flash_attn_3" and row.time_us
        }
        for trial in winners(run):
            if trial.kernel not in FAMILIES:
                continue
            config = {name: value for name, value in trial.config.items() if name != "LSE"}
            label = " ".join(f"{name}={value}" for name, value in config.items())
            entry: dict[str, object] = {"gpu": gpu, "problem": trial.problem.label}
            entry |= {"kernel": trial.kernel, "config": label}
            if (theirs := flash_3.get(trial.problem)) and trial.time_us:
                entry["flash_3"] = round(theirs / trial.time_us.median, 3)
            found[gpu, trial.problem.label] = json.dumps(entry)
    lines = ",\n  ".join(found[key] for key in sorted(found))
    return f'{{"winners": [\n  {lines}\n]}}\n' if found else '{"winners": []}\n'


def main(arguments: Sequence[str]) -> int:
    """Write the file, or say that it is stale."""
    made = text()
    if "--check" not in arguments:
        WRITTEN.write_text(made, encoding="utf-8")
        return 0
    if made != WRITTEN.read_text(encoding="utf-8"):
        print(f"stale: {WRITTEN.relative_to(ROOT)}; python scripts/paged_winners.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

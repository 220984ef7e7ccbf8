"""Write attnsweep/serve/paged_times.json: what calls on paged caches are planned by.

Usage: python scripts/paged_times.py [--check]. Of each problem of the recorded runs of paged
caches, the times of configs over that of the best, and flash_3: that of FlashAttention-3, without
metadata. With --check it writes nothing, and returns 1 if the file is not what results/ gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attnsweep import find_runs, open_run
from attnsweep.family.discover import discover

ROOT = Path(__file__).parent.parent
WRITTEN = ROOT / "attnsweep" / "serve" / "paged_times.json"
FAMILIES = ("decode_paged_mma", "append_paged_wgmma")


def recorded() -> list[Path]:
    """The runs of paged caches."""
    return [run for run in find_runs(ROOT / "results") if run.name.startswith(("paged", "append"))]


def text() -> str:
    """The file: the configs, then a line a problem."""
    families = discover()
    configs: dict[str, int] = {}
    found: dict[tuple[str, str], str] = {}
    for path in recorded():
        run = open_run(path)
        gpu = (run.environment.gpu or "" if run.environment else "").removeprefix("NVIDIA ")
        times: dict[str, dict[str, float]] = {}
        for trial in run.trials:  # the last row of a config is the longest measured
            if trial.kernel in FAMILIES and trial.time_us:
                config = families[trial.kernel].of_today(trial.config)
                label = " ".join(f"{n}={v}" for n, v in config.items() if n != "LSE")
                own = times.setdefault(trial.problem.label, {})
                own[f"{trial.kernel} {label}"] = trial.time_us.median
            elif trial.provider == "flash_attn_3" and trial.time_us:
                times.setdefault(trial.problem.label, {})[""] = trial.time_us.median
        for problem, own in times.items():
            theirs = own.pop("", None)
            if not own:
                continue
            best = min(own.values())
            entry: dict[str, object] = {"gpu": gpu, "problem": problem}
            if theirs is not None:
                entry["flash_3"] = round(theirs / best, 3)
            entry["times"] = {
                configs.setdefault(config, len(configs)): round(own[config] / best, 3)
                for config in sorted(own, key=own.__getitem__)
            }
            found[gpu, problem] = json.dumps(entry)
    of_configs = ",\n  ".join(map(json.dumps, configs))
    of_problems = ",\n  ".join(found[key] for key in sorted(found))
    return f'{{"configs": [\n  {of_configs}\n],\n"problems": [\n  {of_problems}\n]}}\n'


def main(arguments: Sequence[str]) -> int:
    """Write the file, or say that it is stale."""
    made = text()
    if "--check" not in arguments:
        WRITTEN.write_text(made, encoding="utf-8")
        return 0
    if made != WRITTEN.read_text(encoding="utf-8"):
        print(f"stale: {WRITTEN.relative_to(ROOT)}; python scripts/paged_times.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

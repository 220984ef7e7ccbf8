"""Count what is in the machine code of the best config of each rung of a recorded ladder.

Usage: python benchmarks/ladder_code.py RUN. It needs NVRTC and nvdisasm, and no GPU. It writes
RUN/code.json: for each rung its config, registers, spills, cubin size, branches and predicated
branches on full attention, and the same for the best config with no data-dependent branch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from setting import console

from attnsweep import Trial, open_run, rank


def inspected(trial: Trial) -> dict[str, Any]:
    """Ask `attnsweep inspect` about a row's config on its problem."""
    p = trial.problem
    config = " ".join(f"{name}={value}" for name, value in trial.config.items())
    shape = f"{p.batch},{p.heads},{p.seqlen_q},{p.head_dim}"
    command = [sys.executable, "-m", "attnsweep", "inspect", trial.kernel, config]
    command += ["--problem", shape, "--arch", "sm_90a", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    (stage,) = found["stages"].values()
    kept = ("registers", "spill_bytes", "cubin_bytes", "branches", "predicated_branches")
    return {"config": config, "nvrtc": found["nvrtc"], **{name: stage[name] for name in kept}}


def main() -> None:
    """Inspect, print, and write the file."""
    directory = Path(sys.argv[1])
    ranking = rank(open_run(directory))
    best: dict[str, Trial] = {}
    for trial in ranking[ranking["rank"].notna() & ~ranking["baseline"]]["trial"]:
        if not trial.problem.causal:
            best.setdefault(trial.kernel, trial)
            if trial.config.get("BRANCHES") == 0:
                best.setdefault(f"{trial.kernel}, no branches", trial)
    code = {name: inspected(trial) for name, trial in best.items()}
    for name, facts in code.items():
        console.print(f"{name}: {facts}")
    (directory / "code.json").write_text(json.dumps(code, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

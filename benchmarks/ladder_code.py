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

from setting import write

from attnsweep import Trial, open_run, rank

KEPT = ("registers", "spill_bytes", "cubin_bytes", "branches", "predicated_branches")


def inspected(trial: Trial) -> dict[str, Any]:
    """Ask `attnsweep inspect` about a row's config on its problem."""
    p = trial.problem
    config = " ".join(f"{name}={value}" for name, value in trial.config.items())
    command = [sys.executable, "-m", "attnsweep", "inspect", trial.kernel, config, "--arch", "sm_90a", "--json"]
    command += ["--problem", f"{p.batch},{p.heads},{p.seqlen_q},{p.head_dim}"]
    found = json.loads(
        subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=True).stdout
    )
    (stage,) = found["stages"].values()
    return {"config": config, "nvrtc": found["nvrtc"], **{name: stage[name] for name in KEPT}}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    ranking = rank(open_run(directory))
    best: dict[str, Trial] = {}
    for trial in ranking[ranking["rank"].notna() & ~ranking["baseline"]]["trial"]:
        if not trial.problem.causal:
            best.setdefault(trial.kernel, trial)
            if trial.config.get("BRANCHES") == 0:
                best.setdefault(f"{trial.kernel}, no branches", trial)
    write(directory / "code.json", None, {name: inspected(trial) for name, trial in best.items()})

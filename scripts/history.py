"""Write attnsweep/choose/strategies/history.json.xz: the times with which strategy `gp` begins.

Usage: python scripts/history.py [--check]. With --check it writes nothing and returns 1 if the file
is not what results/ gives.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnsweep import Family, Problem, Trial, families, find_runs, open_run
from attnsweep.choose.strategies.history import History
from attnsweep.core.trial import OURS
from attnsweep.family.discover import rows_of_today

ROOT = Path(__file__).parent.parent
FILE = ROOT / "attnsweep" / "choose" / "strategies" / "history.json.xz"
# Rows kept of each problem: the ROWS fastest, and at most ROWS of the others.
ROWS = 24


def recorded_history(
    trials: Sequence[Trial], run: str, kernels: Mapping[str, Family]
) -> list[History]:
    """The history of each family and problem of a run: ROWS of the fastest and ROWS others.

    Rows whose config lacks a parameter that their family has today are left out (unless
    Param.absent says its value), and so are rows that were replayed.
    """
    params = {name: {param.name for param in kernel.params} for name, kernel in kernels.items()}
    groups: dict[tuple[str, Problem], list[tuple[float, str, Trial]]] = {}
    for trial in map(rows_of_today(kernels), trials):
        today = trial.kernel in params and params[trial.kernel] <= set(trial.config)
        if trial.provider == OURS and today and trial.screened_us and not trial.recorded:
            timed = (trial.screened_us, repr(trial.key), trial)
            groups.setdefault((trial.kernel, trial.problem), []).append(timed)
    found = []
    for (kernel, problem), rows in groups.items():
        rows.sort(key=lambda row: row[:2])
        others = rows[ROWS:]
        kept = rows[:ROWS] + others[:: max(1, -(-len(others) // ROWS))]
        if len(kept) > 1:
            configs = tuple(trial.config for _, _, trial in kept)
            found.append(History(kernel, problem, run, configs, tuple(us for us, _, _ in kept)))
    return found


def main(arguments: Sequence[str]) -> int:
    """Write the file, or compare it."""
    histories = [
        history
        for run in find_runs(ROOT / "results")
        for history in recorded_history(
            open_run(run).trials, f"{run.parent.name}/{run.name}", families()
        )
    ]
    data = History.pack(histories)
    if "--check" not in arguments:
        FILE.write_bytes(data)
    elif History.unpack(FILE.read_bytes()) != History.unpack(data):  # compressors differ
        print(f"{FILE.name} is not what results/ gives: run python scripts/history.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write attnsweep/choose/strategies/history.json.xz: the times with which strategy `gp` begins.

Usage: python scripts/history.py [--check]. With --check it writes nothing and returns 1 if the file
is not what results/ gives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from attnsweep import families, find_runs, open_run
from attnsweep.choose.strategies.history import History, recorded_history

ROOT = Path(__file__).parent.parent
FILE = ROOT / "attnsweep" / "choose" / "strategies" / "history.json.xz"


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

"""Check all that is generated from results/: pages, history.json.xz, and the shipped tables.

Usage: python scripts/generated.py. One process reads and ranks the recorded runs once for all
four, which take twice as long one by one. Returns 1 if one is stale.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
os.environ["COLUMNS"] = "120"  # as docs.py has it when it is the program

import history
import paged_times
import winners
from once import once

import docs


def main() -> int:
    """Say all that is stale."""
    with once():
        return max(part.main(["--check"]) for part in (docs, history, winners, paged_times))


if __name__ == "__main__":
    sys.exit(main())

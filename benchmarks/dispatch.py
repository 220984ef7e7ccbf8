"""Judge the dispatch of an exported package on shapes that were not tuned. Nothing is measured.

The table is the one that `attnsweep export TUNED_RUN...` writes, and the rule is the package's own
code (attnsweep/serve/runtime/dispatch.py). A held-out run swept other shapes on the same kind of
GPU, or any shapes on another kind: then its own runs are left out, and the tuned ones stand in for
them (`stand_in`), if both GPUs have the same compute capability and number of SMs. With
--leave-one-out each shape is judged by a table without it, and without its twin in the other dtype:
the tuned runs' shapes if none are held out.

- regret: time of what the package calls over the best of the shape's own sweep, PyTorch's attention
  included, less 1. Where the package calls PyTorch, its time is that of PyTorch's fastest backend.
- gain: time of PyTorch's fastest backend over that of what the package calls.
- held: regret of the best kernel that the package holds for the shape: what a perfect rule would
  have left.

A choice that the sweep has not timed is counted as such, and in no other figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from setting import console, recorded_on

from attnsweep import AttnsweepError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from dispatch_judged import judged, summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each shape, the worst last, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tuned", type=Path, nargs="+", metavar="TUNED_RUN")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], metavar="RUN")
    parser.add_argument("--leave-one-out", action="store_true")
    given = parser.parse_args(arguments)
    if not given.held_out and not given.leave_one_out:
        parser.error("give --held-out RUN..., or --leave-one-out, or both")
    try:
        rows = [*judged(given.tuned, given.held_out, leave_one_out=given.leave_one_out)]
        cards = {"by": recorded_on(given.tuned), "on": recorded_on(given.held_out or given.tuned)}
        facts = cards | summary(rows)
    except AttnsweepError as error:
        raise SystemExit(str(error)) from error
    for row in sorted(rows, key=lambda row: row.regret if row.regret is not None else -1.0):
        regret = "not timed" if row.regret is None else f"{row.regret:8.2%}"
        gain = "" if row.gain is None else f"gain {row.gain:.3f}, expected {row.expected_gain:.3f}"
        console.print(f"{regret:>9}  {row.shape:34} {row.code:10} {gain}; held {row.served:.2%}")
    console.print_json(data=facts)


if __name__ == "__main__":
    main()

"""Judge the dispatch of an exported package on shapes that were not tuned.

Usage: python benchmarks/dispatch.py TUNED_RUN... (--held-out RUN... | --leave-one-out)
[--json FILE] [--rows]. Nothing is measured, and no compiler is needed.

The table is the one that `attnsweep export TUNED_RUN...` writes, and the rule is the package's own
code (attnsweep/use/runtime/dispatch.py). A held-out run swept other shapes on the same kind of GPU.
With --leave-one-out each tuned shape is judged by a table without it, and without its twin in the
other dtype.

- regret: time of what the package calls over the best of the shape's own sweep, PyTorch's attention
  included, less 1. Where the package calls PyTorch, its time is that of PyTorch's fastest backend.
- gain: time of PyTorch's fastest backend over that of what the package calls.
- served: regret of the best kernel that the package holds for the shape: what a perfect rule would
  have left.
- error: predicted over measured time of the chosen kernel, less 1.

A choice that the sweep has not timed is counted as such, and in no other figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from setting import console

from attnsweep import AttnsweepError, dispatch_summary, judge_dispatch


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each shape, the worst last, and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tuned", type=Path, nargs="+", metavar="TUNED_RUN")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], metavar="RUN")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if bool(given.held_out) == given.leave_one_out:
        parser.error("give --held-out RUN..., or --leave-one-out")
    try:
        rows = judge_dispatch(given.tuned, given.held_out)
        result = dispatch_summary(rows)
    except AttnsweepError as error:
        raise SystemExit(str(error)) from error
    for row in sorted(rows, key=lambda row: row.regret if row.regret is not None else -1.0):
        regret = "not timed" if row.regret is None else f"{row.regret:8.2%}"
        gain = "" if row.gain is None else f"gain {row.gain:.3f}, expected {row.expected_gain:.3f}"
        console.print(f"{regret:>9}  {row.shape:34} {row.code:10} {gain}; held {row.served:.2%}")
    console.print(json.dumps(result, indent=1))
    if given.json is not None:
        runs = {"tuned": [run.name for run in given.tuned]}
        runs["held_out"] = [run.name for run in given.held_out]
        facts = {**runs, **result, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

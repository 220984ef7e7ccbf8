"""Print how much of each limit of error the recorded kernels and baselines use.

Usage: python benchmarks/accuracy.py RUN... [--json FILE]. Nothing is measured. Rows since protocol
4 say, for the case in which they came nearest to a limit, what share of each limit they used there;
runs without such rows are passed over. For each family and baseline and each dtype, the Markdown
table has the largest share of each limit, and the error and the limit of the row whose error was
the largest share of its limit. Wrong rows are left out; a baseline over a limit is not wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from setting import console, write

from attnsweep import Run, Status, Trial, open_run

OURS = "attnsweep"
# As attnsweep gives them: what each is of, for the head of the table.
MEASURES = {
    "row": "row",
    "element": "element",
    "rms": "RMS",
    "row_gain": "gain of a row",
    "tile_gain": "gain of 64 rows",
    "gain": "gain of all",
    "scale": "softmax scale",
}


def judged(run: Run) -> list[Trial]:
    """The rows of a run that say what share of each limit they used. Those with a NaN are wrong."""
    return [
        trial
        for trial in run.trials
        if trial.status in (Status.OK, Status.NOISY) and trial.accuracy is not None and trial.accuracy.shares
    ]


def figures(who: str, dtype: str, rows: Sequence[Trial]) -> dict[str, Any]:
    """The largest shares of one family or baseline in one dtype, and its largest error."""
    found = [row.accuracy for row in rows if row.accuracy is not None]
    shares: dict[str, float] = {}
    for accuracy in found:
        for name, share in accuracy.shares.items():
            shares[name] = max(shares.get(name, 0.0), share)
    errors = [(a.rel_err, a.limit) for a in found if a.rel_err is not None]
    error, limit = max(errors, key=lambda pair: pair[0] / pair[1], default=(None, None))
    nearest = max(found, key=lambda accuracy: max(accuracy.shares.values()))
    return {
        "who": who,
        "baseline": rows[0].provider != OURS,
        "dtype": dtype,
        "rows": len(rows),
        "shares": {name: shares[name] for name in (*MEASURES, *shares) if name in shares},
        "nearest": nearest.case,
        "error": error,
        "limit": limit,
    }


def summary(runs: Iterable[Run]) -> dict[str, Any]:
    """The figures of every family and baseline in each dtype, ours first; `of` may be empty."""
    groups: dict[tuple[bool, str, str], list[Trial]] = {}
    read, places = [], set()
    for run in runs:
        rows = judged(run)
        if not rows:
            continue
        card = run.environment
        read.append(f"{run.directory.parent.name}/{run.directory.name}")
        places |= {card.gpu} if card is not None else set()
        for row in rows:
            baseline = row.provider != OURS
            key = (baseline, row.provider if baseline else row.kernel, row.problem.dtype)
            groups.setdefault(key, []).append(row)
    each = [figures(who, dtype, rows) for (_, who, dtype), rows in sorted(groups.items())]
    return {"runs": read, "recorded_on": sorted(places), "of": each}


def markdown(found: dict[str, Any]) -> str:
    """The table; nothing if no row has shares."""
    if not found["of"]:
        return ""
    names = [n for n in MEASURES if any(n in one["shares"] for one in found["of"])]
    names += sorted({n for one in found["of"] for n in one["shares"]} - {*names})
    header = ["kernel or baseline", "dtype", "rows", *(MEASURES.get(n, n) for n in names)]
    header += ["largest error", "its limit"]
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    lines = [header, rule]
    for one in found["of"]:
        name = f"{one['who']} (baseline)" if one["baseline"] else f"`{one['who']}`"
        cells = [_percent(one["shares"].get(n)) for n in names]
        error = "–" if one["error"] is None else f"{one['error']:.2g}"
        limit = "–" if one["limit"] is None else f"{one['limit']:.2g}"
        over = one["error"] is not None and one["error"] > one["limit"]
        error += ", over the limit" if over else ""
        lines.append([name, one["dtype"], str(one["rows"]), *cells, error, limit])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the runs, print the table, and write the file if one is named."""
    parser = argparse.ArgumentParser(description="How much of each limit of error is used.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    found = summary(map(open_run, asked.runs))
    console.print(markdown(found) or "no row of these runs says what share of a limit it used")
    write(asked.json, None, found)


if __name__ == "__main__":
    main()

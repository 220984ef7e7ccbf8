"""How much of each limit of error the recorded kernels and baselines use: a table for a page.

Rows since protocol 4 say, for the case in which they came nearest to a limit, what share of each
limit they used there; runs without such rows are passed over. For each family and baseline and each
dtype, the Markdown table has the largest share of each limit, and the error and the limit of the
row whose error was the largest share of its limit. Wrong rows are left out; a baseline over a limit
is not wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from attnsweep import Run, Status, Trial
from attnsweep.specs.model import PLAIN_READ

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


def figures(baseline: bool, who: str, dtype: str, rows: Sequence[Trial]) -> dict[str, Any]:
    """The largest shares of one family or baseline in one dtype, and its largest error."""
    found = [row.accuracy for row in rows]
    names = dict.fromkeys(name for each in found for name in each.shares)
    errors = [(each.rel_err, each.limit) for each in found if each.rel_err is not None]
    error, limit = max(errors, key=lambda pair: pair[0] / pair[1], default=(None, None))
    return {
        "who": who,
        "baseline": baseline,
        "dtype": dtype,
        "rows": len(rows),
        "shares": {n: max(each.shares[n] for each in found if n in each.shares) for n in names},
        "error": error,
        "limit": limit,
    }


def summary(runs: Iterable[Run]) -> dict[str, Any]:
    """The figures of every family and baseline in each dtype, ours first; `of` may be empty."""
    groups: dict[tuple[bool, str, str], list[Trial]] = defaultdict(list)
    read, places = [], set()
    for run in runs:
        rows = [
            t
            for t in run.trials
            if t.status in (Status.OK, Status.NOISY) and t.accuracy and t.accuracy.shares
            if t.provider != PLAIN_READ  # which computes nothing
        ]
        if rows:
            read.append(f"{run.directory.parent.name}/{run.directory.name}")
            places |= {run.environment.gpu} if run.environment else set()
        for row in rows:
            baseline = row.provider != "attnsweep"
            groups[baseline, row.provider if baseline else row.kernel, row.problem.dtype].append(
                row
            )
    each = [figures(*key, groups[key]) for key in sorted(groups)]
    return {"runs": read, "recorded_on": sorted(places), "of": each}


def markdown(found: dict[str, Any]) -> str:
    """The table; nothing if no row has shares."""
    if not found["of"]:
        return ""
    used = {name for one in found["of"] for name in one["shares"]}
    names = [*(name for name in MEASURES if name in used), *sorted(used - {*MEASURES})]
    header = [
        "kernel or baseline",
        "dtype",
        "rows",
        *(MEASURES.get(n, n) for n in names),
        "largest error",
        "its limit",
    ]
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
    for one in found["of"]:
        name = f"{one['who']} (baseline)" if one["baseline"] else f"`{one['who']}`"
        shares = (one["shares"].get(n) for n in names)
        cells = ["–" if share is None else f"{100 * share:.0f} %" for share in shares]
        error, limit = ("–" if one[n] is None else f"{one[n]:.2g}" for n in ("error", "limit"))
        if one["error"] is not None and one["error"] > one["limit"]:
            error += ", over the limit"
        lines.append([name, one["dtype"], str(one["rows"]), *cells, error, limit])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

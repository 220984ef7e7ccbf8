"""What benchmarks/gate.py counted: its figures, in one file, in several together, and in print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from attnsweep import Verdict, proportion_interval

console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)


def spoken(count: int, trials: int) -> str:
    """`0 of 300 (0.0 to 1.2 %)`."""
    low, high = (100 * limit for limit in proportion_interval(count, trials))
    return f"{count} of {trials} ({low:.1f} to {high:.1f} %)"


def counted(count: int, trials: int) -> dict[str, Any]:
    """A count with the 95 % bounds of its share."""
    return {"count": count, "bounds": [round(p, 5) for p in proportion_interval(count, trials)]}


def summary(rows: Sequence[dict[str, Any]], processes: int, opened_s: float | None) -> dict[str, Any]:
    """All figures: false alarms and misses with bounds, detections, and each series."""

    def total(rows: Sequence[dict[str, Any]], verdict: Verdict) -> int:
        return sum(row["verdicts"].get(verdict.value, 0) for row in rows)

    itself = [row for row in rows if not row["share"]]
    comparisons = sum(row["comparisons"] for row in itself)
    false_alarms = total(itself, Verdict.REGRESSION)
    inconclusive = total(itself, Verdict.INCONCLUSIVE)
    spread = [row["process_sd"] for row in rows if row["process_sd"] is not None]
    totals = {}
    for share in sorted({row["share"] for row in rows} - {0.0}):
        of = [row for row in rows if row["share"] == share]
        tried = sum(row["comparisons"] for row in of)
        totals[f"{100 * share:g} %"] = {
            "comparisons": tried,
            "detected": total(of, Verdict.REGRESSION),
            "detected_bounds": counted(total(of, Verdict.REGRESSION), tried)["bounds"],
            "passed": counted(total(of, Verdict.PASS), tried),
            "inconclusive": counted(total(of, Verdict.INCONCLUSIVE), tried),
            "unfinished": sum(row["unfinished"] for row in of),
            "seconds_most": max((row["seconds_most"] or 0.0 for row in of), default=None),
        }
    return {
        "processes": processes,
        # Standard deviation of a process's ratio, of all kernels and slowdowns together.
        "process_sd": round(fmean(sd**2 for sd in spread) ** 0.5, 5) if spread else None,
        "process_sd_most": max(spread, default=None),
        "itself": {
            "comparisons": comparisons,
            "false_alarms": false_alarms,
            "false_alarms_bounds": counted(false_alarms, comparisons)["bounds"],
            "false_improvements": total(itself, Verdict.IMPROVEMENT),
            "inconclusive": inconclusive,
            "inconclusive_bounds": counted(inconclusive, comparisons)["bounds"],
            "unfinished": sum(row["unfinished"] for row in itself),
            "cases": itself,
        },
        "slowed": {
            "totals": totals,
            "opening_a_second_process_s": opened_s,
            "cases": [row for row in rows if row["share"]],
        },
    }


def pooled(files: Sequence[Path]) -> dict[str, Any]:
    """The figures of several series together; ValueError if they asked for different things.

    A slowdown was calibrated in each, so processes differ by their spread within a series.
    """
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    told = {(facts["environment"]["gpu"], facts["slower"]) for facts in found}
    if len(told) > 1:
        raise ValueError(f"these do not belong together: {sorted(told)}")
    alike: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for facts in found:
        for row in (*facts["itself"]["cases"], *facts["slowed"]["cases"]):
            alike.setdefault((row["case"], row["share"]), []).append(row)
    rows = [_together(each) for each in alike.values()]
    processes = sum(facts["processes"] for facts in found)
    opened_s = max(facts["slowed"]["opening_a_second_process_s"] for facts in found)
    newest = max((facts["environment"] for facts in found), key=lambda each: str(each["date"]))
    return {
        "environment": newest,
        "slower": found[0]["slower"],
        **summary(rows, processes, opened_s),
        "series": [
            {
                **{k: facts["environment"].get(k) for k in ("date", "driver", "uuid", "host")},
                "processes": facts["processes"],
                "seconds": facts["seconds"],
            }
            for facts in found
        ],
        "seconds": round(sum(facts["seconds"] for facts in found), 1),
    }


def _together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    verdicts: Counter[str] = Counter()
    for row in rows:
        verdicts.update(row["verdicts"])
    ratios = [ratio for row in rows for ratio in row["ratios"]]
    within = [(len(row["ratios"]) - 1, row["process_sd"]) for row in rows if row["process_sd"]]
    freedom = sum(count for count, _ in within)
    squares = sum(count * sd**2 for count, sd in within)
    most = [row["seconds_most"] for row in rows if row["seconds_most"] is not None]
    return {
        **{name: rows[-1][name] for name in ("case", "share", "seconds_median")},
        "comparisons": sum(row["comparisons"] for row in rows),
        "verdicts": dict(verdicts),
        "detected": verdicts[Verdict.REGRESSION.value],
        "failed": [why for row in rows for why in row["failed"]],
        "unfinished": sum(row["unfinished"] for row in rows),
        "processes": [count for row in rows for count in row["processes"]],
        "seconds_most": max(most, default=None),
        "ratio": round(fmean(ratios), 5) if ratios else None,
        "process_sd": round((squares / freedom) ** 0.5, 5) if freedom else None,
        "ratios": ratios,
    }


def show(facts: dict[str, Any]) -> None:
    """Print a line for each series, and the totals."""
    head = f"{'slowed':>6}  {'kernel':54} {'pass':>5} {'slower':>6} {'open':>5} {'faster':>6}"
    console.print(f"{head} {'ratio':>8} {'sd':>7}")
    for row in [*facts["itself"]["cases"], *facts["slowed"]["cases"]]:
        counts = [row["verdicts"].get(verdict, 0) for verdict in ("pass", "regression", "inconclusive", "improvement")]
        said = f"{100 * row['share']:>4g} %  {row['case']:54} "
        said += "{:>5} {:>6} {:>5} {:>6} ".format(*counts)
        console.print(f"{said} {row['ratio'] or 0:>7.4f} {100 * (row['process_sd'] or 0):>5.2f} %")
    itself = facts["itself"]
    console.print(
        f"{itself['comparisons']} comparisons of a kernel with itself: "
        f"{spoken(itself['false_alarms'], itself['comparisons'])} false alarms, "
        f"{itself['false_improvements']} false improvements, "
        f"{spoken(itself['inconclusive'], itself['comparisons'])} inconclusive"
    )
    for share, of in facts["slowed"]["totals"].items():
        console.print(
            f"slower by {share}: detected {spoken(of['detected'], of['comparisons'])}, "
            f"passed {spoken(of['passed']['count'], of['comparisons'])}"
        )
    if facts["process_sd"] is not None:
        console.print(
            f"a process's ratio: standard deviation {100 * facts['process_sd']:.2f} %, "
            f"at most {100 * facts['process_sd_most']:.2f} % of one kernel"
        )


def write(file: Path | None, facts: dict[str, Any]) -> None:
    """Write the figures so far if a file is named."""
    if file is not None:
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")

"""docs/performance.csv: a row for each problem of each recorded run, with every baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas
from cards import TIMED, Record, Recordings
from records import OURS, Row

FIRST = ("card", "spec", "problem", "ours_us", "base", "base_us", "x_base", "x_fa3")
LAST = ("kernel", "config", "protocol", "driver", "pytorch", "date")
DIGITS = 4


def csv(cards: Sequence[Recordings], baselines: Sequence[str]) -> str:
    """The whole table. baselines: the order of their columns."""
    table = pandas.DataFrame(row for card in cards for row in _rows(card))
    table = table.dropna(axis="columns", how="all")
    known = {name: at for at, name in enumerate(baselines)}

    def place(name: str) -> tuple[int, int]:
        if name in FIRST or name in LAST:
            return (0, FIRST.index(name)) if name in FIRST else (3, LAST.index(name))
        baseline = name.removesuffix("_error").removesuffix("_us")
        return (1, known[baseline]) if baseline in known else (2, 0)

    ordered = table[sorted(table.columns, key=place)]
    return str(ordered.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n"))


def _rows(card: Recordings) -> Iterator[dict[str, Any]]:
    for name, records in card.tables.items():
        environment, counted = card.book.card(name), card.book.counters(name)
        errors = any(
            row.provider.endswith("_fp8") for r in records for row in r["baselines"].values()
        )
        for record in records:
            best, base = record["best"], record["baseline"]
            counters = [
                facts["stages"]
                for facts in counted
                if facts["problem"] == record["problem"].label and facts["config"] == best.config
            ]
            yield {
                "card": card.gpu,
                "spec": name,
                "problem": record["problem"].label,
                "ours_us": best.us,
                "base": base.provider,
                "base_us": base.us,
                **_ratio("x_base", record),
                **_ratio("x_fa3", record["fa3"] or {}),
                **{f"{baseline}_us": row.us for baseline, row in record["baselines"].items()},
                "notes": "; ".join(_notes(card, record)),
                "tflops": best.tflops,
                "bound": best.bound,
                "bound_percent": 100 * best.bound_us / best.us,
                "launch_percent": 100 * (best.launch_us or 0) / best.us,
                **_chained(record["chained"]),
                "eager_us": best.eager_us,
                "us_per_sequence": best.sequence,
                **(_errors(record) if errors else {}),
                **(_counters(counters[0]) if counters else {}),
                "kernel": best.kernel,
                "config": " ".join(f"{key}={value}" for key, value in best.config.items()),
                "protocol": str(card.book.protocol(name)),
                "driver": environment.driver,
                "pytorch": environment.packages.get("torch", "none"),
                "date": environment.date[:10],
            }


def _ratio(name: str, of: Mapping[str, Any]) -> dict[str, Any]:
    """A ratio, its interval, and what it comes from: rounds, medians, or bound (at least)."""
    return {
        name: of.get("ratio"),
        f"{name}_low": of.get("low"),
        f"{name}_high": of.get("high"),
        f"{name}_of": of.get("of"),
    }


def _chained(row: Row | None) -> dict[str, float]:
    return {"chained_us": row.chained_us, "chained_alone_us": row.us} if row else {}


def _notes(card: Recordings, record: Record) -> Iterator[str]:
    """Which baselines are noisy, over the limit of errors, or without a time, and why."""
    for baseline, row in record["baselines"].items():
        if row.status == "noisy":
            yield f"{baseline} noisy"
        if row.over_limit:
            yield f"{baseline} over the limit"
    for row in card.book.rows(record["run"]):
        if row.problem == record["problem"] and row.provider != OURS and row.status not in TIMED:
            yield f"{row.provider} {row.status.replace('_', ' ')}, not timed"


def _errors(record: Record) -> dict[str, float]:
    """The error of our fastest config, of the most exact one in the rounds, and of baselines."""
    timed = [row for row in record["rows"] if row.rank and not row.timed_once]
    exact = min(timed, key=lambda row: row.rel_err)
    return {
        "ours_error": record["best"].rel_err,
        "most_exact_us": exact.us,
        "most_exact_error": exact.rel_err,
        **{f"{baseline}_error": row.rel_err for baseline, row in record["baselines"].items()},
    }


def _counters(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Hardware counters; those of several launches are joined by a slash, in their order."""

    def joined(values: Iterator[str]) -> str:
        return " / ".join(values)

    figures = [stage["figures"] for stage in stages]
    return {
        "stages": joined(stage["stage"] for stage in stages),
        "tensor_percent": joined(f"{f['tensor_percent']:.0f}" for f in figures),
        "exp2_percent": joined(f"{f['exp2_percent']:.0f}" for f in figures),
        "issue_percent": joined(f"{f['issue_percent']:.0f}" for f in figures),
        "l2_mb": joined(f"{(f['l2_read_bytes'] + f['l2_write_bytes']) / 1e6:.1f}" for f in figures),
        "dram_mb": joined(
            f"{(f['dram_read_bytes'] + f['dram_write_bytes']) / 1e6:.1f}" for f in figures
        ),
        "warps_waited_for": joined(
            ", ".join(f"{why} {warps:.1f}" for why, warps in [*stage["stalls"].items()][:3])
            for stage in stages
        ),
    }

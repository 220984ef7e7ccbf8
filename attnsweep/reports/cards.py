"""The report's part on several cards: what each measured, and its winners.

A problem's rows are of one card, so a run does not show whether two would choose alike.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attnsweep.reports.sections import Section
from attnsweep.reports.text import figure

NONE = "–"
ALIGN = "lrlrl"
UNKNOWN = (
    "no problem was measured on two cards, so this run does not show whether their winners agree; "
    "attnsweep compare sets two runs side by side"
)


def by_card(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """The cards of a run whose rows name several, as plain data; otherwise none.

    uuid: hashed, as in rows. over_base: geometric mean over the problems
    of the fastest baseline's time over the winner's.
    """
    gpus: dict[str, str] = {}
    on: dict[str, dict[str, None]] = {}
    for section in sections:
        label = section.problem.label
        for row in section.in_order:
            if uuid := row["machine"].get("uuid"):
                gpus.setdefault(str(uuid), str(row["machine"].get("gpu", "unknown")))
                on.setdefault(str(uuid), {})[label] = None
    if len(on) < 2:
        return []
    won = {section.problem.label: section.winner for section in sections}
    lost = {section.problem.label for section in sections if section.lost}
    found = []
    for uuid, labels in on.items():
        rows = {label: row for label, row in won.items() if label in labels and row is not None}
        known = [row["ratio_to_best_baseline"] for label, row in rows.items() if label not in lost]
        ratios = [*filter(None, known)]
        winners = {
            label: {
                "kernel": row["kernel"],
                "config": dict(row.facts.config),
                "time_us": row["time_us"],
            }
            for label, row in rows.items()
        }
        found.append(
            {
                "uuid": uuid,
                "gpu": gpus[uuid],
                "problems": [label for label in won if label in labels],
                "winners": winners,
                "over_base": statistics.geometric_mean(ratios) if ratios else None,
            }
        )
    return found


def table(cards: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header and a line for each card."""
    lines = [["card", "problems", "GPU", "× base", "winners"]]
    for card in cards:
        base = NONE if card["over_base"] is None else figure(card["over_base"], 3)
        families = Counter(row["kernel"] for row in card["winners"].values()).most_common()
        won = ", ".join(f"{n} {family}" for family, n in families) or NONE
        lines.append([card["uuid"], str(len(card["problems"])), card["gpu"], base, won])
    return lines

"""A run of several cards: what each of them measured, and its winners.

A problem's rows are of one card, so a run does not show whether two would choose alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnsweep.core.trial import Trial
from attnsweep.reports.text import Row, Section, figure

NONE = "–"
ALIGN = "lrlrl"
UNKNOWN = (
    "no problem was measured on two cards, so this run does not show whether their winners agree; "
    "attnsweep compare sets two runs side by side"
)


@dataclass(frozen=True, slots=True)
class OnCard:
    """What one card measured. uuid: hashed, as in rows. winners: problem label to its best row."""

    uuid: str
    gpu: str
    problems: tuple[str, ...]
    winners: dict[str, Row]

    @property
    def over_base(self) -> float | None:
        """Geometric mean over the problems of the fastest baseline's time over the winner's."""
        known = [row["ratio_to_best_baseline"] for row in self.winners.values()]
        ratios = [ratio for ratio in known if ratio]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""

        def winner(row: Row) -> dict[str, Any]:
            config = dict(row["trial"].config)
            return {"kernel": row["kernel"], "config": config, "time_us": row["time_us"]}

        return {
            "uuid": self.uuid,
            "gpu": self.gpu,
            "problems": list(self.problems),
            "winners": {label: winner(row) for label, row in self.winners.items()},
            "over_base": self.over_base,
        }


def by_card(trials: Sequence[Trial], sections: Sequence[Section]) -> list[OnCard]:
    """The cards of a run whose rows name several, otherwise none. sections: of its report."""
    gpus: dict[str, str] = {}
    on: dict[str, dict[str, None]] = {}
    for trial in trials:
        if uuid := trial.machine.get("uuid"):
            gpus.setdefault(str(uuid), str(trial.machine.get("gpu", "unknown")))
            on.setdefault(str(uuid), {})[trial.problem.label] = None
    if len(on) < 2:
        return []
    won = {section.problem.label: section.winner for section in sections}
    return [
        OnCard(
            uuid,
            gpus[uuid],
            tuple(label for label in won if label in labels),
            {label: row for label, row in won.items() if label in labels and row is not None},
        )
        for uuid, labels in on.items()
    ]


def table(cards: Sequence[OnCard]) -> list[list[str]]:
    """Header and a line for each card."""
    lines = [["card", "problems", "GPU", "× base", "winners"]]
    for card in cards:
        base = NONE if card.over_base is None else figure(card.over_base, 3)
        families = Counter(str(row["kernel"]) for row in card.winners.values()).most_common()
        won = ", ".join(f"{n} {family}" for family, n in families) or NONE
        lines.append([card.uuid, str(len(card.problems)), card.gpu, base, won])
    return lines

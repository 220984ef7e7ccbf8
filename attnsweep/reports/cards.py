"""A run of several cards: what each of them measured, its winners, and whether they agree.

Nothing here needs a GPU. Winners can only be compared where two cards measured one problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnsweep.core.trial import Trial
from attnsweep.reports.terminal import counted
from attnsweep.reports.text import Row, Section, by_problem, figure

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

    @property
    def families(self) -> dict[str, int]:
        """Family to the number of problems that it won."""
        return dict(Counter(str(row["kernel"]) for row in self.winners.values()).most_common())


@dataclass(frozen=True, slots=True)
class ByCard:
    """All cards of a run. agreement: label of a problem that several measured to whether the
    winners are the same, or each shares the best rank on the other's card."""

    cards: tuple[OnCard, ...]
    agreement: dict[str, bool]

    @property
    def sentence(self) -> str:
        """Whether the winners agree, as far as the run shows it."""
        if not self.agreement:
            return UNKNOWN
        differ = [label for label, agree in self.agreement.items() if not agree]
        said = (
            f"{counted(len(self.agreement), 'problem')} measured on several cards, whose candidates"
            f" are ranked together above: the cards' winners agree on "
            f"{len(self.agreement) - len(differ)}"
        )
        return said + (f", and differ on {', '.join(differ)}" if differ else "")

    def rows(self) -> list[list[str]]:
        """Header and a line for each card."""
        lines = [["card", "problems", "GPU", "× base", "winners"]]
        for card in self.cards:
            base = card.over_base
            lines.append(
                [
                    card.uuid,
                    str(len(card.problems)),
                    card.gpu,
                    NONE if base is None else figure(base, 3),
                    ", ".join(f"{n} {family}" for family, n in card.families.items()) or NONE,
                ]
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""

        def winner(row: Row) -> dict[str, Any]:
            config = dict(row["trial"].config)
            return {"kernel": row["kernel"], "config": config, "time_us": row["time_us"]}

        return {
            "cards": [
                {
                    "uuid": card.uuid,
                    "gpu": card.gpu,
                    "problems": list(card.problems),
                    "winners": {label: winner(row) for label, row in card.winners.items()},
                    "over_base": card.over_base,
                }
                for card in self.cards
            ],
            "agreement": self.agreement,
        }


def by_card(trials: Sequence[Trial], sections: Sequence[Section]) -> ByCard | None:
    """The cards of a run whose rows name several, otherwise None. sections: those of its report."""
    of: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.machine.get("uuid"):
            of.setdefault(str(trial.machine["uuid"]), []).append(trial)
    if len(of) < 2:
        return None
    whole = {section.problem: section for section in sections}
    on: dict[str, dict[str, Section]] = {}
    for uuid, rows in of.items():
        alone = {trial.problem for trial in rows}
        for other, others in of.items():
            if other != uuid:
                alone -= {trial.problem for trial in others}
        on[uuid] = {problem.label: whole[problem] for problem in alone if problem in whole}
        shared = [trial for trial in rows if trial.problem not in alone]
        environment = sections[0].environment if sections else None
        for section in by_problem(shared, environment) if shared else []:
            on[uuid][section.problem.label] = section
    order = [section.problem.label for section in sections]
    cards = tuple(
        OnCard(
            uuid,
            str(of[uuid][0].machine.get("gpu", "unknown")),
            tuple(label for label in order if label in found),
            {
                label: winner
                for label in order
                if label in found and (winner := found[label].winner) is not None
            },
        )
        for uuid, found in on.items()
    )
    agreement = {}
    for label in order:
        measured = [found[label] for found in on.values() if label in found]
        won = [section for section in measured if section.winner is not None]
        if len(won) > 1:
            agreement[label] = all(_shares(one, other) for one in won for other in won)
    return ByCard(cards, agreement)


def _shares(section: Section, other: Section) -> bool:
    """Whether the other's winner is the best here, or shares its rank."""
    mine, theirs = section.winner, other.winner
    assert mine is not None
    assert theirs is not None
    there = next((row for row in section.rows if row["trial"].key == theirs["trial"].key), None)
    return there is not None and there["rank"] == mine["rank"]

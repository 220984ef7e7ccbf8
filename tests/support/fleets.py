"""Sweeps on fake cards, and what must hold of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_cards import FakeCards
from sweeping import FAMILIES

from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Status, Trial, cards_of
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session
from attnsweep.sweep.fleet import Fleet
from attnsweep.sweep.session import SweepOutcome

SPEC = f"""
kernel_dir: {FAMILIES}
problems:
  - {{batch: 1, heads: 2, seqlen: [256, 512, 1024, 2048], head_dim: 64}}
kernels: {{simple: {{THREADS: [32, 64, 128]}}}}
baselines: []
measure: {{rounds: 4}}
"""
TWO = SPEC.replace("[256, 512, 1024, 2048]", "[256, 512]")
"""The same on two problems."""
LABELS = [f"(1,2,{seqlen},64) fp16 full" for seqlen in (256, 512, 1024, 2048)]
TIMES = {"THREADS=32": 30.0, "THREADS=64": 20.0, "THREADS=128": 40.0}


class Heard(Observer):
    """What an observer hears of all cards."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tried: Any = []
        """Labels of rows, and (label, candidates) where those of another problem begin."""
        self.opened_on: list[tuple[int, str, int, int]] = []
        self.counts: list[int] | None = None
        self.ranking: list[str] = []

    def on(self, card: int, name: str) -> Observer:
        return OnCard(self, card)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        self.counts = list(candidates)

    def ranked(self, trials: Sequence[Trial], environment: Environment) -> None:
        self.ranking.append(trials[0].problem.label)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text)


class OnCard(Observer):
    """What it hears of one card."""

    def __init__(self, everywhere: Heard, card: int) -> None:
        self.everywhere, self.card = everywhere, card

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        self.everywhere.opened_on.append((self.card, problem.label, candidates, kept))

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        self.everywhere.tried.append(trial.problem.label)

    def trying_on(self, label: str, candidates: int) -> None:
        self.everywhere.tried.append((label, candidates))

    def note(self, text: str) -> None:
        self.everywhere.note(text)


def swept(
    place: Path, cards: FakeCards, text: str = SPEC, on: Sequence[int] | None = None, **options: Any
) -> tuple[SweepOutcome, Heard]:
    """A sweep in a directory. text: of its spec. on: the numbers of some of the cards."""
    for met in place.glob("GPU-* here"):
        met.unlink()
    cards.facts["all"]["together"] = len(cards.cards if on is None else on)
    path = place / "test.yaml"
    path.write_text(text)
    heard = Heard()
    of_fleet = {name: options.pop(name) for name in ("silence_s", "arrivals") if name in options}
    these = cards.cards if on is None else [cards.cards[number] for number in on]
    outcome = session.run(
        load_spec(path, discover),
        Fleet(these, start_child=cards.start_child, **of_fleet),
        results=place / "results",
        cache_dir=place / "cache",
        observer=heard,
        **options,
    )
    return outcome, heard


def is_whole(outcome: SweepOutcome, labels: Sequence[str] = LABELS) -> bool:
    """Every problem has every row, with rounds, and all of a problem are of one card."""
    rows = outcome.run.trials
    assert Counter(t.problem.label for t in rows) == dict.fromkeys(labels, 3)
    assert all(t.status is Status.OK and t.time_us and t.time_us.rounds for t in rows)
    for label in labels:
        assert len(cards_of(t for t in rows if t.problem.label == label)) == 1
    assert outcome.exit_code == 0
    return True


def measured(cards: FakeCards) -> Counter[str]:
    """How often each problem's candidates were tried, on all cards."""
    return Counter(label for _, label in cards.calls("trial"))

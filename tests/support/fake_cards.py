"""Cards for tests of several: each is a process of `fake_child`, with faults as a test wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery

import attnsweep
from attnsweep.device import cards as installed_cards
from attnsweep.device.cards import VISIBLE, InstalledCard
from attnsweep.sweep import messages
from attnsweep.sweep.messages import Child, Deliver, Process


class FakeCards:
    """Some cards. facts: of one card by its number: what `fake_child.FaultyGpu` reads.

    nursery: forks their processes; without it each is a program that imports everything.
    """

    def __init__(self, place: Path, count: int = 2, nursery: Nursery | None = None, **everywhere: Any) -> None:
        self._nursery = nursery
        self.cards = [InstalledCard(number, f"GPU-{number:08d}", "NVIDIA Test 1") for number in range(count)]
        self.facts: dict[str, Any] = {"all": everywhere, "log": str(place / "calls.log")}
        self.children: list[Process] = []
        self.started: Counter[int] = Counter()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have commands find these cards on this machine, and use them."""
        patch.setattr(installed_cards, "installed", lambda: self.cards)
        patch.setattr(messages, "start_child", self.start_child)

    def on(self, number: int, **facts: Any) -> None:
        """What happens on one card."""
        self.facts[self.cards[number].uuid] = facts

    def start_child(self, card: InstalledCard, deliver: Deliver) -> Child:
        """As process.start_child, which it stands in for."""
        support = Path(__file__).parent
        path = [str(support), str(Path(attnsweep.__file__).parent.parent)]
        environment = {VISIBLE: card.uuid, "FAKE_CARDS": json.dumps(self.facts), "PYTHONPATH": os.pathsep.join(path)}
        self.started[card.number] += 1
        command = [sys.executable, str(support / "fake_child.py")]
        popen = subprocess.Popen if self._nursery is None else self._nursery.popen
        self.children.append(Process(command, environment, deliver, popen=popen))
        return self.children[-1]

    def go_on(self) -> None:
        """Let every card go on that `holds` a candidate."""
        Path(self.facts["log"]).with_name("go on").touch()

    def calls(self, what: str) -> list[tuple[int, str]]:
        """(number of the card, problem) of every `open` or `trial`, in order."""
        log = Path(self.facts["log"])
        lines = log.read_text().splitlines() if log.exists() else []
        words = [line.split(" ", 2) for line in lines]
        numbers = {card.uuid: card.number for card in self.cards}
        return [(numbers[uuid], label) for uuid, called, label in words if called == what]

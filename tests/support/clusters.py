"""A Dask cluster of fake cards: a local scheduler, and a process for each worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
from fake_cards import FakeCards

import attnsweep
from attnsweep.core.observer import Observer
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.sweep import dask_cluster, session
from attnsweep.sweep.fleet import Fleet
from attnsweep.sweep.session import SweepOutcome

SUPPORT = Path(__file__).parent
# At the end, of a scheduler that is gone.
QUICK = {"distributed.comm.timeouts.connect": "2s"}


class Notes(Observer):
    """Keeps what is noted, and which cards have a line."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.lines: dict[int, str] = {}

    def on(self, card: int, name: str) -> Observer:
        self.lines[card] = name
        return self

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text)

    def about(self, words: str) -> list[str]:
        """The notes that have these words."""
        return [note for note in self.notes if words in note]


def find_fakes(patch: pytest.MonkeyPatch) -> None:
    """Have the processes of workers import the fakes and this package."""
    path = [str(SUPPORT), str(Path(attnsweep.__file__).parent.parent), *filter(None, sys.path)]
    patch.setenv("PYTHONPATH", os.pathsep.join(path))


@contextmanager
def local(cards: FakeCards, place: Path) -> Iterator[Any]:
    """A cluster with a worker for each fake card, whose number is its CUDA_VISIBLE_DEVICES."""
    specification = {
        f"card{card.number}": {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "resources": {"GPU": 1},
                "env": {"CUDA_VISIBLE_DEVICES": card.uuid},
                "dashboard_address": None,
                "local_directory": str(place),
            },
        }
        for card in cards.cards
    }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"dashboard_address": None, "dashboard": False},
    }
    with (
        dask.config.set(QUICK),
        distributed.SpecCluster(
            workers=specification, scheduler=scheduler, silence_logs=50
        ) as started,
    ):
        yield started


def dask_process(what: str, *arguments: object, uuid: str = "") -> subprocess.Popen[bytes]:
    """`dask worker` or `dask scheduler`, as users start them."""
    words = [sys.executable, "-m", "dask", what, *map(str, arguments), "--no-dashboard"]
    return subprocess.Popen(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid})


def script_of(place: Path) -> str:
    """The fake child, which reads from `place` what happens on which card."""
    return (
        f"import os, runpy; os.environ['FAKE_CARDS'] = open({str(place / 'cards.json')!r})"
        f".read(); runpy.run_path({str(SUPPORT / 'fake_child.py')!r}, run_name='__main__')"
    )


def swept(
    place: Path,
    cards: FakeCards,
    address: str,
    text: str,
    families: Path | None = None,
    **options: Any,
) -> tuple[SweepOutcome, Notes]:
    """A sweep on a cluster, as the command line runs it."""
    path = place / "test.yaml"
    path.write_text(text)
    notes = Notes()
    for met in place.glob("GPU-* here"):
        met.unlink()
    (place / "cards.json").write_text(json.dumps(cards.facts))
    with dask_cluster.connected(address) as client:
        fleet = Fleet(
            dask_cluster.cards_of(client, notes.note),
            start_child=dask_cluster.starter(client, [sys.executable, "-c", script_of(place)]),
            arrivals=dask_cluster.arrivals(client),
            silence_s=options.pop("silence_s", None),
        )
        outcome = session.run(
            load_spec(path, discover(families)),
            fleet,
            results=place / "results",
            cache_dir=place / "cache",
            observer=notes,
            **options,
        )
    return outcome, notes

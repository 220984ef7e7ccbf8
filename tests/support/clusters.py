"""A Dask cluster of fake cards: a local scheduler, and a process for each worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
from fake_cards import FakeCards
from fleets import SPEC

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
    """Keeps what is noted, and which cards have a line. when: what a note with some words starts,
    the first time.
    """

    def __init__(self, when: Mapping[str, Callable[[], Any]]) -> None:
        self.notes: list[str] = []
        self.lines: dict[int, str] = {}
        self._when = dict(when)

    def on(self, card: int, name: str) -> Observer:
        self.lines[card] = name
        return self

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text)
        for words in [words for words in self._when if words in text]:
            self._when.pop(words)()

    def about(self, words: str) -> list[str]:
        """The notes that have these words."""
        return [note for note in self.notes if words in note]


def find_fakes(patch: pytest.MonkeyPatch) -> None:
    """Have the processes of workers import the fakes and this package."""
    path = [str(SUPPORT), str(Path(attnsweep.__file__).parent.parent), *filter(None, sys.path)]
    patch.setenv("PYTHONPATH", os.pathsep.join(path))


@contextmanager
def local_cards(place: Path, count: int = 2) -> Iterator[Any]:
    """A cluster with a worker for each of some fake cards."""
    workers = {}
    for card in FakeCards(place, count).cards:
        options = {"nthreads": 1, "resources": {"GPU": 1}, "env": {"CUDA_VISIBLE_DEVICES": card.uuid}}
        options |= {"dashboard_address": None, "local_directory": str(place)}
        workers[f"card{card.number}"] = {"cls": distributed.Nanny, "options": options}
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": None, "dashboard": False}}
    with pytest.MonkeyPatch.context() as patch, dask.config.set(QUICK):
        find_fakes(patch)
        with distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50) as started:
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


@contextmanager
def meanwhile(ready: Callable[[], bool], do: Callable[[], Any]) -> Iterator[None]:
    """Do something beside the block as soon as something is true, if that is before its end."""

    def act() -> None:
        while not ended.wait(0.02):
            if ready():
                do()
                return

    ended = threading.Event()
    acting = threading.Thread(target=act)
    acting.start()
    try:
        yield
    finally:
        ended.set()
        acting.join()


def swept(
    place: Path,
    cards: FakeCards,
    address: str,
    text: str = SPEC,
    *,
    when: Mapping[str, Callable[[], Any]] | None = None,
    **options: Any,
) -> tuple[SweepOutcome, Notes]:
    """A sweep on a cluster, as the command line runs it. when: see Notes."""
    path = place / "test.yaml"
    path.write_text(text)
    notes = Notes(when or {})
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
            load_spec(path, discover),
            fleet,
            results=place / "results",
            cache_dir=place / "cache",
            observer=notes,
            **options,
        )
    return outcome, notes

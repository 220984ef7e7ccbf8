"""Workers that join a run late, leave it and come back, as processes of Dask's own command line."""

from __future__ import annotations

import contextlib
import signal
import threading

import fleets
import pytest
from fake_cards import FakeCards
from fake_compiler import FakeCompiler
from fleets import LABELS, SPEC, is_whole, measured

from attnsweep.core.trial import cards_of
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.sweep import dask_cluster, start

distributed = pytest.importorskip("distributed")
clusters = pytest.importorskip("clusters")
pytestmark = pytest.mark.filterwarnings("default")  # of Dask's own code


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Fake cards, whose number is their worker's CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(
        start, "compiler_for", lambda spec, arch, cache_dir: FakeCompiler(arch, cache_dir)
    )
    clusters.find_fakes(monkeypatch)
    return FakeCards(tmp_path, times=fleets.TIMES, together=1, trial_s=0.3)


class Processes(contextlib.ExitStack):
    """A scheduler and workers, started and killed as a test wants."""

    def __init__(self, place, cards):
        super().__init__()
        self.place, self.cards = place, cards
        self.schedulers = []
        self.address = f"tcp://127.0.0.1:{distributed.utils.open_port()}"

    def start(self, what, *arguments, uuid=""):
        process = clusters.dask_process(what, *arguments, uuid=uuid)
        self.callback(process.wait)
        self.callback(process.kill)
        return process

    def scheduler(self):
        host, port = self.address.removeprefix("tcp://").split(":")
        self.schedulers.append(self.start("scheduler", "--host", host, "--port", port))

    def worker(self, number, *options):
        """A worker with a GPU, without a nanny: what kills it is not made good."""
        return self.start(
            "worker", self.address, "--nthreads", 1, "--resources", "GPU=1", "--no-nanny",
            "--local-directory", self.place, *options, uuid=self.cards.cards[number].uuid,
        )  # fmt: skip


@pytest.fixture
def dask(tmp_path, cards):
    """Processes with a scheduler."""
    with Processes(tmp_path, cards) as processes:
        processes.scheduler()
        yield processes


@pytest.fixture
def go(tmp_path, cards, dask):
    """Runs a sweep, and does something once a given number of candidates were tried."""

    def run(*todo):
        def act():
            for after, do in todo:
                while not ended.wait(0.02) and len(cards.calls("trial")) < after:
                    pass
                if not ended.is_set():
                    do()

        ended = threading.Event()
        acting = threading.Thread(target=act)
        acting.start()
        try:
            outcome, heard = clusters.swept(tmp_path, cards, dask.address, SPEC)
        finally:
            ended.set()
            acting.join()
        return outcome, heard

    return run


def test_a_worker_that_joins_late_gets_problems(go, cards, dask):
    cards.on(0, trial_s=2.0)  # longer than the other worker takes to start
    dask.worker(0)
    outcome, heard = go((1, lambda: dask.worker(1)))
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    assert {card for card, _ in cards.calls("open")} == {0, 1}
    assert set(cards_of(outcome.run.trials)) == {card.hashed for card in cards.cards}
    (joined,) = heard.about("joins the run")
    assert joined.startswith("worker tcp://")
    assert heard.lines == {card.number: card.hashed for card in cards.cards}  # as in rows


def test_a_run_waits_for_its_first_worker(go, cards, dask, monkeypatch):
    def note(self, text):
        self.notes.append(text)
        if "no worker has come to tcp://127.0.0.1" in text:
            dask.worker(0)  # not before: it may start sooner than the run

    monkeypatch.setattr(clusters.Notes, "note", note)
    outcome, _ = go()
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)


@pytest.mark.parametrize(
    ("options", "how"), [((), signal.SIGKILL), (("--name", "mine"), signal.SIGTERM)]
)
def test_a_preempted_worker_is_replaced_by_a_new_one(go, cards, dask, options, how):
    """Slurm and Kubernetes ask it to end first; its card comes back under another address."""
    first = dask.worker(0, *options)
    outcome, heard = go((5, lambda: first.send_signal(how)), (5, lambda: dask.worker(0, *options)))
    assert is_whole(outcome)
    assert sum(measured(cards).values()) <= 12 + 1
    assert heard.about("its worker left the cluster")
    assert heard.about("no card is left: waiting up to 60 s")
    (joined,) = heard.about("joins the run")
    assert ("with the card that was worker tcp" in joined) is not options
    assert list(heard.lines) == [0]


def test_a_late_worker_of_another_kind_is_refused_once_and_costs_nothing(go, cards, dask):
    cards.on(1, environment={"gpu": "NVIDIA Other"})
    cards.on(0, trial_s=0.6)
    dask.worker(0)
    outcome, heard = go((1, lambda: dask.worker(1)))
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    (note,) = heard.about("another gpu than the others: NVIDIA Other, not NVIDIA Test 1")
    assert note.startswith("worker tcp://")
    assert note.endswith("the card is left out")
    assert {card for card, _ in cards.calls("open")} == {0}


def test_a_late_worker_of_another_version_is_refused_once(go, cards, dask, monkeypatch):
    cards.on(0, trial_s=0.6)
    dask.worker(0)

    def come():
        monkeypatch.setattr(dask_cluster, "__version__", "9.9")
        dask.worker(1)

    outcome, heard = go((1, come))
    assert is_whole(outcome)
    (note,) = heard.about("not 9.9; the card is left out")
    assert note.startswith("worker tcp://")


def test_a_scheduler_that_is_started_again_costs_what_was_in_flight(go, cards, dask):
    """Its workers end with it; whatever started them starts them again."""
    before = [dask.worker(number) for number in (0, 1)]
    cards.facts["all"]["together"] = 2

    def restart():
        dask.schedulers.pop().kill()
        for worker in before:
            worker.wait()
        dask.scheduler()
        for number in (0, 1):
            dask.worker(number)

    outcome, heard = go((5, restart))
    assert is_whole(outcome)
    assert heard.about("the scheduler is lost")
    assert len(heard.about("it joins the run with the card that was")) == 2
    assert set(heard.lines) == {0, 1}

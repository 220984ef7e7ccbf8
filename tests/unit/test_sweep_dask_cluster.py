"""A sweep on a Dask cluster of fake cards: LocalCluster with a process for each worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import fleets
import psutil
import pytest
from fake_cards import FakeCards
from fake_compiler import FakeCompiler
from fleets import LABELS, SPEC

from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.trial import Status, cards_of
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.store.run import read_trials
from attnsweep.sweep import cards as sweep_cards
from attnsweep.sweep import dask_cluster, dask_worker, start

distributed = pytest.importorskip("distributed")
clusters = pytest.importorskip("clusters")
script_of = clusters.script_of
pytestmark = pytest.mark.filterwarnings("default")  # of Dask's own code
FAMILIES = Path(__file__).parent.parent / "families"
TIMES = fleets.TIMES | {"CYCLES=400000": 5.0}


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Fake cards, whose number is their worker's CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(
        start, "compiler_for", lambda spec, arch, cache_dir: FakeCompiler(arch, cache_dir)
    )
    return FakeCards(tmp_path, times=TIMES, together=2, trial_s=0.05)


@pytest.fixture
def workers(cards, tmp_path, monkeypatch):
    """Two workers of a local cluster, one for each fake card."""
    clusters.find_fakes(monkeypatch)
    with clusters.local(cards, tmp_path) as local:
        yield local


@pytest.fixture
def go(tmp_path, cards, workers):
    def run(text=SPEC, families=None, through=None, **options):
        address = through or workers.scheduler_address
        outcome, heard = clusters.swept(tmp_path, cards, address, text, families, **options)
        return outcome, heard.notes

    return run


def is_whole(outcome):
    rows = outcome.run.trials
    assert Counter(t.problem.label for t in rows) == dict.fromkeys(LABELS, 3)
    assert all(t.status is Status.OK and t.time_us.rounds for t in rows)
    for label in LABELS:
        assert len(cards_of(t for t in rows if t.problem.label == label)) == 1
    return outcome.exit_code == 0


def measured(cards):
    return Counter(label for _, label in cards.calls("trial"))


def test_each_worker_takes_whole_problems_and_the_run_is_here(go, cards):
    outcome, _ = go()
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    assert {card for card, _ in cards.calls("open")} == {0, 1}
    assert len(list((outcome.run.directory / "cubins").glob("*.cubin"))) == 4
    outcome, _ = go()
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == 12


def test_why_a_search_ended_comes_back_too(go):
    outcome, _ = go(SPEC + "search: {strategy: gp}\n")
    assert is_whole(outcome)
    spaces = json.loads((outcome.run.directory / "spaces.json").read_text())
    assert {facts["ended"] for facts in spaces} == {"all are tried"}


class SlowNetwork(socketserver.ThreadingTCPServer):
    """A way to a scheduler on which whatever is sent arrives late; a context manager."""

    daemon_threads = True
    late_s = 0.1
    carried = 0

    def __init__(self, scheduler):
        self.there = urlsplit(scheduler)
        super().__init__(("127.0.0.1", 0), self.carry)
        self.address = f"tcp://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)

    def carry(self, here, *_):
        with socket.create_connection((self.there.hostname, self.there.port)) as there:
            back = threading.Thread(target=self.forward, args=(there, here), daemon=True)
            back.start()
            self.forward(here, there)
            back.join()

    def forward(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                time.sleep(self.late_s)
                other.sendall(data)
                self.carried += 1
            other.shutdown(socket.SHUT_WR)


def test_a_slow_network_loses_nothing(go, cards, workers):
    with SlowNetwork(workers.scheduler_address) as network:
        outcome, _ = go(through=network.address)
        assert network.carried > 20
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)


def test_kernels_of_the_user_travel(go, cards, tmp_path):
    text = SPEC.replace("naive: {THREADS: [32, 64, 128]}", "burns: {}").replace(
        "256, 512, 1024, 2048", "64, 128"
    )
    outcome, _ = go(text, FAMILIES)
    assert {t.kernel for t in outcome.run.trials} == {"burns"}
    assert {t.status for t in outcome.run.trials} == {Status.OK}


@pytest.mark.parametrize("fault", ["kill", "off", "stop", "memory"])
def test_a_lost_child_costs_its_problem_alone(go, cards, fault):
    cards.on(0, fault=fault, after=2, once=True)
    outcome, notes = go(silence_s=3.0 if fault == "stop" else None)
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == 12 + 2
    assert [n for n in notes if n.startswith("worker card0: ") and "goes to another card" in n]
    assert not [n for n in notes if "another run" in n]  # that is what is left of the lost child


def test_a_killed_worker_is_replaced_by_its_nanny_or_left_out(go, cards, workers):
    cards.facts["all"]["trial_s"] = 0.3

    def kill():
        log = Path(cards.facts["log"])
        while not log.exists() or "GPU-00000000 trial" not in log.read_text():
            time.sleep(0.02)
        os.kill(workers.workers["card0"].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome, notes = go()
    thread.join()
    assert is_whole(outcome)
    assert [n for n in notes if n.startswith("worker card0: ") and "goes to another card" in n]


def test_a_worker_that_hangs_costs_its_problem_alone(go, cards, workers):
    """The whole worker hangs, so nobody there can tell its child to stop."""
    cards.facts["all"]["trial_s"] = 0.3
    hung = []

    def stop():
        log = Path(cards.facts["log"])
        while not log.exists() or "GPU-00000000 trial" not in log.read_text():
            time.sleep(0.02)
        hung.append(psutil.Process(workers.workers["card0"].pid))
        hung[0].suspend()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        outcome, notes = go(silence_s=3.0)
    finally:
        thread.join()
        hung[0].resume()
    assert is_whole(outcome)
    [note] = [n for n in notes if "no word for 3 s" in n]
    assert note.startswith("worker card0: ")
    assert "goes to another card" in note


@pytest.mark.parametrize("ends", [True, False])
def test_a_worker_of_another_run_is_waited_for_and_then_left_out(
    go, cards, workers, monkeypatch, ends
):
    """The other run may be of an asker that was killed, and its worker free within a minute."""
    monkeypatch.setattr(dask_cluster, "_IN_USE_S", 60.0 if ends else 2.0)
    cards.facts["all"]["together"] = 1
    cards.on(1, trial_s=0.2)
    with distributed.Client(workers.scheduler_address, set_as_default=False) as other:
        asked = other.submit(
            time.sleep, 4.0 if ends else 30.0, key="attnsweep-other", resources={"GPU": 1},
            workers=["card0"], allow_other_workers=False,
        )  # fmt: skip
        while "attnsweep-other" not in str(other.processing()):
            time.sleep(0.02)
        outcome, notes = go()
        asked.cancel()
    assert is_whole(outcome)
    assert [n for n in notes if n.startswith("worker card0: it works for another run, perhaps")]
    out = [n for n in notes if "run the same command" in n and n.endswith("the card is left out")]
    assert bool(out) is not ends
    assert {card for card, _ in cards.calls("open")} == ({0, 1} if ends else {1})


def test_another_version_is_left_out_by_name(go, cards, monkeypatch):
    monkeypatch.setattr(dask_cluster, "__version__", "9.9")
    with pytest.raises(NoGpuError) as caught:
        go()
    assert "worker card" in caught.value.hint
    assert "it has attnsweep" in caught.value.hint
    assert "not 9.9" in caught.value.hint


def test_other_shipped_kernels_are_left_out(go, cards, monkeypatch):
    monkeypatch.setattr(dask_worker, "digest_of", lambda texts: "another")
    outcome, notes = go()
    assert outcome.no_card
    assert [n for n in notes if "the kernels of its attnsweep are not those of the asker" in n]


def test_no_worker_with_a_gpu_is_waited_for_and_says_how_to_start_one(workers, monkeypatch):
    monkeypatch.setattr(dask_cluster, "COMING_S", 1.0)
    said = []
    with dask_cluster.connected(workers.scheduler_address) as client:
        assert [card.uuid for card in dask_cluster.cards_of(client, said.append)] == [
            "card0",
            "card1",
        ]
        assert not said
        workers.scale(0)
        client.retire_workers()
        with pytest.raises(NoGpuError, match=r"no worker has come to tcp.*waited 1 s") as caught:
            dask_cluster.cards_of(client, said.append)
    assert f"dask worker {workers.scheduler_address} --nthreads 1" in caught.value.hint
    (waits,) = said
    assert "no worker has come" in waits
    assert "waiting up to 1 s" in waits
    assert "--resources GPU=1" in waits


def test_no_scheduler_is_an_error(monkeypatch):
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 0.5)
    with (
        pytest.raises(NoGpuError, match="no scheduler answers"),
        dask_cluster.connected("tcp://127.0.0.1:9"),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "why"),
    [
        *(("nonsense", "port"), ("tcp://host", "port"), ("tls://host", "port"), ("", "port")),
        *(("host:port", "invalid"), ("tcp://:8786", "tcp://HOST"), ("tcp://h:99999", "tcp://HOST")),
        *(("other://h:1", "tcp://HOST"), ("inproc://1", "port"), ("ucx://h:1", "tcp://HOST")),
        ("tls://host:8786", "needs certificates"),
    ],
)
def test_what_is_no_address_is_refused_at_once(monkeypatch, address, why):
    """A Client took 20 s to say so and to end, or told of it in a traceback."""
    monkeypatch.setattr(distributed, "Client", None)
    with pytest.raises(SpecError, match=why) as caught, dask_cluster.connected(address):
        pass
    assert caught.value.where == "--scheduler"
    assert caught.value.hint


def test_ctrl_c_keeps_every_row_and_resumes(go, cards):
    cards.facts["all"]["trial_s"] = 0.4

    def interrupt():
        log = Path(cards.facts["log"])
        while not log.exists() or log.read_text().count("trial") < 5:
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    asked = threading.Thread(target=interrupt)
    asked.start()
    outcome, _ = go()
    asked.join()
    assert outcome.exit_code == 130
    stored = len(outcome.run.trials)
    tried = sum(measured(cards).values())
    assert stored >= 2
    assert tried - stored <= 4
    cards.facts["all"]["trial_s"] = 0.02
    outcome, _ = go()
    assert is_whole(outcome)
    assert sum(measured(cards).values()) <= tried + 12 - stored + 2


def test_a_scheduler_that_ends_ends_the_run_which_resumes(go, cards, workers, monkeypatch):
    monkeypatch.setattr(sweep_cards, "AWAY_S", 1.0)
    cards.facts["all"]["trial_s"] = 0.4

    def end():
        log = Path(cards.facts["log"])
        while not log.exists() or log.read_text().count("trial") < 5:
            time.sleep(0.02)
        workers.sync(workers.scheduler.close)

    thread = threading.Thread(target=end)
    thread.start()
    outcome, _ = go()
    thread.join()
    assert outcome.no_card
    assert outcome.exit_code == 3
    assert len(outcome.run.trials) >= 2


def fake_children(place):
    """The processes of fake cards on all workers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == ["-c", script_of(place)]:
                found.append(process)
    return found


ASKER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from fake_compiler import FakeCompiler
from attnsweep.sweep import start
from attnsweep.family.discover import discover
from attnsweep.sweep import dask_worker as bridge, dask_cluster as cluster, session
from attnsweep.sweep.fleet import Fleet
from attnsweep.specs.load import load_spec
bridge.ALIVE_S, bridge.SILENT_S = 0.3, 1.5
start.compiler_for = lambda spec, arch, cache_dir: FakeCompiler(arch, cache_dir)
place = Path({place!r})
with cluster.connected({address!r}) as client:
    start_child = cluster.starter(client, [sys.executable, "-c", {script!r}])
    session.run(load_spec(place / "test.yaml", discover()),
                Fleet(cluster.cards_of(client, print), start_child=start_child),
                results=place / "results", cache_dir=place / "cache")
"""


def test_a_killed_asker_frees_the_cards_and_resumes(go, cards, workers, tmp_path):
    cards.facts["all"]["trial_s"] = 0.5
    (tmp_path / "test.yaml").write_text(SPEC)
    (tmp_path / "cards.json").write_text(json.dumps(cards.facts))
    code = ASKER.format(
        paths=sys.path, place=str(tmp_path), address=workers.scheduler_address,
        script=script_of(tmp_path),
    )  # fmt: skip
    log = Path(cards.facts["log"])
    with subprocess.Popen([sys.executable, "-c", code]) as asker:
        while not log.exists() or log.read_text().count("trial") < 4:
            assert asker.poll() is None
            time.sleep(0.02)
        asker.kill()
        children = fake_children(tmp_path)
        assert len(children) == 2
    psutil.wait_procs(children, timeout=20)
    tried = sum(measured(cards).values())
    assert not [child for child in children if child.is_running()]
    assert tried < 12
    rows, _ = read_trials(tmp_path / "results" / "test-1" / "test" / "trials.jsonl")
    cards.facts["all"]["trial_s"] = 0.02
    outcome, _ = go()
    assert is_whole(outcome)
    done_again = sum(measured(cards).values()) - 12
    assert done_again == tried - len(rows)  # what its cards told to nobody


def test_the_command_line_refuses_what_cannot_be(attnsweep, tmp_path):
    (tmp_path / "small.yaml").write_text(SPEC)
    both = attnsweep("run", tmp_path / "small.yaml", "--gpus", "0", "--scheduler", "tcp://h:1")
    wait = attnsweep("run", tmp_path / "small.yaml", "--wait", "--scheduler", "tcp://h:1")
    assert both.returncode == wait.returncode == 2
    assert "exclude each other" in both.stderr
    assert "--wait does nothing with --scheduler" in wait.stderr

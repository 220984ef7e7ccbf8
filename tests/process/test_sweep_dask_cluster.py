"""A sweep on a Dask cluster of fake cards, which has a process for each worker.

Faults happen where a card holds a candidate, so that no test waits for longer than it must.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fleets
import psutil
import pytest
from fake_cards import FakeCards
from fleets import LABELS, SPEC, is_whole, measured
from sweeping import use_fake_compiler

from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.trial import Status, cards_of
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.store.run import read_trials
from attnsweep.sweep import cards as sweep_cards
from attnsweep.sweep import dask_cluster, dask_worker

distributed = pytest.importorskip("distributed")
clusters = pytest.importorskip("clusters")
pytestmark = pytest.mark.filterwarnings("default")  # of Dask's own code
FAMILIES = Path(__file__).parent.parent / "families"
TIMES = fleets.TIMES | {"CYCLES=400000": 5.0}
LEFT = "its worker left the cluster"
# tests/process/test_sweep_fleet.py and test_sweep_late.py have each of these without Dask.
LOST = pytest.mark.nightly(push=2, of="what is lost on a cluster")
LATE = pytest.mark.nightly(push=1, of="workers that come late")


@pytest.fixture
def cards(tmp_path, monkeypatch, constants):
    """Fake cards, whose number is their worker's CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    use_fake_compiler(monkeypatch)
    constants(dask_cluster, _LOOK_S=0.1)
    constants(dask_worker, ALIVE_S=0.5)
    constants(sweep_cards, _END_S=1.0)
    return FakeCards(tmp_path, times=TIMES, together=2, trial_s=0.02)


@pytest.fixture
def own_workers(tmp_path):
    """Two workers of a local cluster, for fake cards 0 and 1, to be killed as a test wants."""
    with clusters.local_cards(tmp_path) as local:
        yield local


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """The same for tests that leave them as they are."""
    with clusters.local_cards(tmp_path_factory.mktemp("workers")) as local:
        yield local


class Processes(contextlib.ExitStack):
    """A scheduler and workers of Dask's own command line, started and killed as a test wants."""

    def __init__(self, place, cards):
        super().__init__()
        self.place, self.cards = place, cards
        self.schedulers = []
        self.scheduler_address = f"tcp://127.0.0.1:{distributed.utils.open_port()}"

    def start(self, what, *arguments, uuid=""):
        process = clusters.dask_process(what, *arguments, uuid=uuid)
        self.callback(process.wait)
        self.callback(process.kill)
        return process

    def scheduler(self):
        host, port = self.scheduler_address.removeprefix("tcp://").split(":")
        self.schedulers.append(self.start("scheduler", "--host", host, "--port", port))

    def worker(self, number, *options):
        """A worker with a GPU, without a nanny: what kills it is not made good."""
        return self.start(
            "worker", self.scheduler_address, "--nthreads", 1, "--resources", "GPU=1",
            "--no-nanny", "--local-directory", self.place, *options,
            uuid=self.cards.cards[number].uuid,
        )  # fmt: skip


@pytest.fixture
def dask(tmp_path, cards, monkeypatch):
    """Processes with a scheduler; a card waits for no other."""
    clusters.find_fakes(monkeypatch)
    cards.facts["all"]["together"] = 1
    with Processes(tmp_path, cards) as processes:
        processes.scheduler()
        yield processes


@pytest.fixture
def go(tmp_path, cards):
    """Sweeps on a cluster, and calls `do` once `after` candidates were tried on the cards `on`.

    Every card that holds a candidate then goes on.
    """

    def run(cluster, text=SPEC, *, after=1, on=(0, 1), do=None, **options):
        def ready():
            return sum(card in on for card, _ in cards.calls("trial")) >= after

        def act():
            do()
            if "when" not in options:
                cards.go_on()

        with contextlib.nullcontext() if do is None else clusters.meanwhile(ready, act):
            address = cluster.scheduler_address
            return clusters.swept(tmp_path, cards, address, text, **options)

    return run


def test_each_worker_takes_whole_problems_and_the_run_is_here(go, cards, workers):
    outcome, _ = go(workers)
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    assert {card for card, _ in cards.calls("open")} == {0, 1}
    assert len(list((outcome.run.directory / "cubins").glob("*.cubin.xz"))) == 4
    outcome, _ = go(workers)
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == 12


@pytest.mark.parametrize("family", ["burns", "naive"])
def test_kernels_of_the_user_travel_and_shipped_ones_are_there(go, cards, workers, family):
    own = f"kernel_dir: {FAMILIES}\n"
    assert own in SPEC
    text = SPEC.replace(own, own if family == "burns" else "")
    text = text.replace("simple: {THREADS: [32, 64, 128]}", f"{family}: {{}}").replace(
        "256, 512, 1024, 2048", "64, 128"
    )
    outcome, _ = go(workers, text)
    assert {t.kernel for t in outcome.run.trials} == {family}
    assert {t.status for t in outcome.run.trials} == {Status.OK}


@LOST
@pytest.mark.parametrize("fault", ["kill", "off", "stop", "memory"])
def test_a_lost_child_costs_its_problem_alone(go, cards, workers, fault):
    cards.on(0, fault=fault, after=2, once=True)
    outcome, heard = go(workers, silence_s=2.0 if fault == "stop" else None)
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == 12 + 2
    assert [n for n in heard.about("goes to another card") if n.startswith("worker card0: ")]
    assert not heard.about("another run")  # that is what is left of the lost child


@pytest.mark.parametrize("ends", [True, False])
def test_a_worker_of_another_run_is_waited_for_and_then_left_out(go, cards, workers, constants, tmp_path, ends):
    """The other run may be of an asker that was killed, and its worker free within a minute."""
    constants(dask_cluster, _IN_USE_S=60.0 if ends else 0.5)
    cards.facts["all"]["together"] = 1
    cards.on(1, holds=1)
    over, waits = tmp_path / "over", "worker card0: it works for another run, perhaps"

    def until(path):
        while not os.path.exists(path):
            time.sleep(0.02)

    with distributed.Client(workers.scheduler_address, set_as_default=False) as other:
        asked = other.submit(
            until, str(over), key="attnsweep-other", resources={"GPU": 1},
            workers=["card0"], allow_other_workers=False,
        )  # fmt: skip
        while "attnsweep-other" not in str(other.processing()):
            time.sleep(0.02)
        left_out = "the card is left out"
        if ends:  # card 1 goes on once card 0 is free
            outcome, heard = go(workers, on=[0], do=cards.go_on, when={waits: over.touch})
        else:
            outcome, heard = go(workers, when={left_out: cards.go_on})
        over.touch()
        asked.cancel()
    assert is_whole(outcome)
    assert heard.about(waits)
    out = [n for n in heard.about("run the same command") if n.endswith(left_out)]
    assert bool(out) is not ends
    assert {card for card, _ in cards.calls("open")} == ({0, 1} if ends else {1})


def test_another_version_is_left_out_by_name(go, workers, constants):
    constants(dask_cluster, __version__="9.9")
    with pytest.raises(NoGpuError) as caught:
        go(workers)
    assert "worker card" in caught.value.hint
    assert "it has attnsweep" in caught.value.hint
    assert "not 9.9" in caught.value.hint


def test_other_shipped_kernels_are_left_out(go, workers, monkeypatch):
    monkeypatch.setattr(dask_worker, "digest_of", lambda texts: "another")
    outcome, heard = go(workers)
    assert outcome.no_card
    assert heard.about("the kernels of its attnsweep are not those of the asker")


def test_no_worker_with_a_gpu_is_waited_for_and_says_how_to_start_one(own_workers, constants):
    constants(dask_cluster, COMING_S=1.0)
    said = []
    with dask_cluster.connected(own_workers.scheduler_address) as client:
        assert [card.uuid for card in dask_cluster.cards_of(client, said.append)] == ["card0", "card1"]
        assert not said
        own_workers.scale(0)
        client.retire_workers()
        with pytest.raises(NoGpuError, match=r"no worker has come to tcp.*waited 1 s") as caught:
            dask_cluster.cards_of(client, said.append)
    assert f"dask worker {own_workers.scheduler_address} --nthreads 1" in caught.value.hint
    (waits,) = said
    assert "no worker has come" in waits
    assert "waiting up to 1 s" in waits
    assert "--resources GPU=1" in waits


def test_a_worker_without_a_gpu_is_no_card(dask, constants):
    constants(dask_cluster, COMING_S=0.5)
    dask.start("worker", dask.scheduler_address, "--no-nanny")
    with dask_cluster.connected(dask.scheduler_address) as client:
        client.wait_for_workers(1)
        with pytest.raises(NoGpuError, match=r"none of the 1 workers of tcp.* has a GPU"):
            dask_cluster.cards_of(client, print)


def test_no_scheduler_is_an_error(constants):
    constants(dask_cluster, CONNECT_S=0.5)
    with pytest.raises(NoGpuError, match="no scheduler answers"), dask_cluster.connected("tcp://127.0.0.1:9"):
        pass


@pytest.mark.parametrize(
    ("address", "why"),
    [
        *(("nonsense", "port"), ("tcp://host", "port"), ("tls://host", "port"), ("", "port")),
        *(("host:port", "invalid"), ("tcp://:8786", "tcp://HOST"), ("tcp://h:99999", "tcp://HOST")),
        ("tls://host:8786", "needs certificates"),
    ],
)
def test_what_is_no_address_is_refused_at_once(address, why):
    with pytest.raises(SpecError, match=why) as caught, dask_cluster.connected(address):
        pass
    assert caught.value.where == "--scheduler"
    assert caught.value.hint


def fake_children(place):
    """The processes of fake cards on all workers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == ["-c", clusters.script_of(place)]:
                found.append(process)
    return found


ASKER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from fake_compiler import FakeCompiler
from attnsweep.family.discover import discover
from attnsweep.sweep import dask_worker as bridge, dask_cluster as cluster, session
from attnsweep.sweep.fleet import Fleet
from attnsweep.specs.load import load_spec
bridge.ALIVE_S, bridge.SILENT_S = 0.3, 1.5
session.compiler_for = lambda spec, arch, cache_dir: FakeCompiler(arch, cache_dir)
place = Path({place!r})
with cluster.connected({address!r}) as client:
    start_child = cluster.starter(client, [sys.executable, "-c", {script!r}])
    session.run(load_spec(place / "test.yaml", discover),
                Fleet(cluster.cards_of(client, print), start_child=start_child),
                results=place / "results", cache_dir=place / "cache")
"""


@LOST
def test_a_killed_asker_frees_the_cards_and_resumes(go, cards, workers, tmp_path):
    cards.facts["all"]["holds"] = 3
    (tmp_path / "test.yaml").write_text(SPEC)
    (tmp_path / "cards.json").write_text(json.dumps(cards.facts))
    code = ASKER.format(
        paths=sys.path, place=str(tmp_path), address=workers.scheduler_address,
        script=clusters.script_of(tmp_path),
    )  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code]) as asker:
        while len(cards.calls("trial")) < 6:
            assert asker.poll() is None
            time.sleep(0.02)
        asker.kill()
        children = fake_children(tmp_path)
        assert len(children) == 2
    cards.go_on()
    psutil.wait_procs(children, timeout=20)
    tried = sum(measured(cards).values())
    assert not [child for child in children if child.is_running()]
    assert tried < 12
    rows, _ = read_trials(tmp_path / "results" / "test-1" / "test" / "trials.jsonl")
    outcome, _ = go(workers)
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


# ---- workers that join a run late, leave it and come back ----
@LATE
def test_a_run_waits_for_its_first_worker_and_one_that_joins_late_gets_problems(go, cards, dask):
    cards.on(0, holds=2)
    when = {"no worker has come to tcp://127.0.0.1": lambda: dask.worker(0), "joins the run": cards.go_on}
    outcome, heard = go(dask, do=lambda: dask.worker(1), when=when)
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    assert {card for card, _ in cards.calls("open")} == {0, 1}
    assert set(cards_of(outcome.run.trials)) == {card.hashed for card in cards.cards}
    (joined,) = heard.about("joins the run")
    assert joined.startswith("worker tcp://")
    assert heard.lines == {card.number: card.hashed for card in cards.cards}  # as in rows


@LATE
@pytest.mark.parametrize(("options", "how"), [((), signal.SIGKILL), (("--name", "mine"), signal.SIGTERM)])
def test_a_preempted_worker_is_replaced_by_a_new_one(go, cards, dask, options, how):
    """Slurm and Kubernetes ask it to end first; its card comes back under another address."""
    cards.on(0, holds=5)
    first = dask.worker(0, *options)

    def replace():
        first.send_signal(how)
        dask.worker(0, *options)

    outcome, heard = go(dask, after=5, do=replace, when={LEFT: cards.go_on})
    assert is_whole(outcome)
    # What was in flight, and what a worker began that was asked to end.
    assert sum(measured(cards).values()) <= 12 + (1 if how == signal.SIGKILL else 2)
    assert heard.about(LEFT)
    assert heard.about("no card is left: waiting up to 60 s")
    (joined,) = heard.about("joins the run")
    assert ("with the card that was worker tcp" in joined) is not options
    assert list(heard.lines) == [0]


@LATE
def test_a_scheduler_that_is_started_again_costs_what_was_in_flight(go, cards, dask):
    """Its workers end with it; whatever started them starts them again."""
    before = [dask.worker(number) for number in (0, 1)]
    cards.facts["all"] |= {"together": 2, "holds": 3}

    def restart():
        dask.schedulers.pop().kill()
        cards.go_on()
        for worker in before:
            worker.wait()
        dask.scheduler()
        for number in (0, 1):
            dask.worker(number)

    outcome, heard = go(dask, after=6, do=restart)
    assert is_whole(outcome)
    assert heard.about("the scheduler is lost") or heard.about(LEFT)
    assert len(heard.about("it joins the run with the card that was")) == 2
    assert set(heard.lines) == {0, 1}


@LOST
def test_a_killed_worker_is_replaced_by_its_nanny_or_left_out(go, cards, own_workers):
    cards.on(0, holds=1)
    worker = own_workers.workers["card0"]
    outcome, heard = go(own_workers, on=[0], do=lambda: os.kill(worker.pid, signal.SIGKILL))
    assert is_whole(outcome)
    assert [n for n in heard.about("goes to another card") if n.startswith("worker card0: ")]


@LOST
def test_a_worker_that_hangs_costs_its_problem_alone(go, cards, own_workers):
    """The whole worker hangs, so nobody there can tell its child to stop."""
    cards.on(0, holds=1)
    hung = psutil.Process(own_workers.workers["card0"].pid)
    try:
        outcome, heard = go(own_workers, on=[0], do=hung.suspend, silence_s=2.0)
    finally:
        hung.resume()
    assert is_whole(outcome)
    [note] = heard.about("no word for 2 s")
    assert note.startswith("worker card0: ")
    assert "goes to another card" in note


@LOST
def test_a_scheduler_that_ends_ends_the_run_which_resumes(go, cards, own_workers, constants):
    constants(sweep_cards, AWAY_S=1.0)
    cards.facts["all"]["holds"] = 3
    outcome, _ = go(own_workers, after=6, do=lambda: own_workers.sync(own_workers.scheduler.close))
    assert outcome.no_card
    assert outcome.exit_code == 3
    assert len(outcome.run.trials) >= 2

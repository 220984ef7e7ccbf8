"""Two runs on one card: the second fails and says who holds it, or waits; no lock is ever stale."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import FAMILIES, use

from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.errors import NoGpuError
from attnsweep.device import lock
from attnsweep.device.cards import hashed
from attnsweep.device.lock import BusyError, held
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.sweep import loop, session

UUID = hashed("GPU-1b2c3d4e")
HOLD = """
import sys, time
sys.argv[1:] = ["run", "h100"]
from attnsweep.device.lock import held
with held({uuid!r}, "NVIDIA Test 1"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(lock.LOCK_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def other(tmp_path):
    """Another process that holds the card until its stdin is closed."""
    script = tmp_path / "attnsweep"
    script.write_text(HOLD.format(uuid=UUID))
    env = os.environ | {"PYTHONPATH": str(Path(loop.__file__).parent.parent)}
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def is_busy():
    """Whether another process is refused the card."""
    code = f"from attnsweep.device.lock import held\nwith held({UUID!r}, 'card'): pass"
    return "BusyError" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_a_second_process_is_told_who_holds_the_card(other):
    with pytest.raises(BusyError) as caught, held(UUID, "NVIDIA Test 1"):
        pass
    text = caught.value.render()
    assert f"NVIDIA Test 1 is in use by process {other.pid} on " in text
    assert ": attnsweep run h100" in text
    assert "--wait" in text
    assert caught.value.exit_code == 3


def test_waiting_says_so_and_goes_on_when_the_card_is_free(other, constants):
    constants(lock, _POLL_S=0.01)
    said, free = [], threading.Event()

    def end():
        free.set()
        other.stdin.close()

    threading.Timer(0.3, end).start()
    with held(UUID, "NVIDIA Test 1", wait=True, say=said.append):
        assert free.is_set()
        other.wait(10)
    assert said[0].startswith(f"waiting for NVIDIA Test 1, in use by process {other.pid} on ")
    assert said[1].startswith("NVIDIA Test 1 is free after ")


def test_a_killed_holder_leaves_nothing_that_blocks(other, place):
    other.kill()
    other.wait(10)
    assert json.loads((place / f"{UUID}.json").read_text())["pid"] == other.pid
    with held(UUID, "NVIDIA Test 1"):
        assert json.loads((place / f"{UUID}.json").read_text())["pid"] == os.getpid()


def test_other_cards_and_unknown_ones_are_free(other):
    with held(hashed("GPU-2"), "NVIDIA Test 1"), held(None, "NVIDIA Test 1"):
        pass


def test_one_process_may_hold_a_card_twice():
    with held(UUID, "card"):
        with held(UUID, "card"):
            pass
        assert is_busy()


@pytest.mark.parametrize("damage", ["", "[]", '{"pid": 1}', "\xff"])
def test_a_damaged_note_of_the_holder_still_refuses(other, place, damage):
    (place / f"{UUID}.json").write_text(damage, encoding="latin-1")
    with pytest.raises(BusyError, match="in use by another run"), held(UUID, "card"):
        pass


def test_without_a_place_for_locks_the_card_is_used_and_that_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(lock.LOCK_VARIABLE, str(tmp_path / "file" / "locks"))
    said = []
    with held(UUID, "NVIDIA Test 1", say=said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith("no lock for NVIDIA Test 1: ")
    assert lock.LOCK_VARIABLE in said[0]


def test_the_usual_place_needs_no_session(tmp_path, monkeypatch):
    """In a container there is no $XDG_RUNTIME_DIR; the test turns any warning into an error."""
    monkeypatch.delenv(lock.LOCK_VARIABLE)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert lock.lock_dir().name == "cards"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert lock.lock_dir() == tmp_path / "attnsweep" / "cards"


# -- what takes it ------------------------------------------------------------------------------

SPEC = f"""
kernel_dir: {FAMILIES}
problems:
  - {{batch: 1, heads: 2, seqlen: 256, head_dim: 64}}
kernels: {{simple: {{THREADS: [32]}}}}
baselines: []
measure: {{rounds: 4}}
"""


@pytest.fixture
def gpu(monkeypatch):
    environment = TEST_GPU.model_copy(update={"uuid": UUID})
    return use(monkeypatch, FakeGpu({"THREADS=32": 1.0}, environment=environment))


@pytest.fixture
def go(tmp_path, gpu):
    path = tmp_path / "test.yaml"
    path.write_text(SPEC)
    kernels = discover(FAMILIES)

    def run(**options):
        return session.run(load_spec(path, kernels), results=tmp_path / "results", **options)

    return run


def test_a_second_run_on_one_card_measures_nothing(go, other, tmp_path):
    with pytest.raises(BusyError):
        go()
    assert not (tmp_path / "results").exists()
    other.stdin.close()
    other.wait(10)
    assert go().exit_code == 0


def test_the_card_is_held_while_a_run_measures_and_no_longer(go, gpu):
    seen, first_times = [], gpu.first_times

    def look(candidate):
        seen.append(is_busy())
        return first_times(candidate) if candidate else None

    gpu.first_times = look
    go()
    assert seen == [True]
    look(None)
    assert seen == [True, False]


class Described(Worker):
    """One that knows its card, and whose process fails to open a problem."""

    def describe(self, **_):
        return TEST_GPU.model_copy(update={"uuid": UUID})


def test_a_worker_that_opens_a_problem_takes_the_lock(other):
    """Whatever times through it: scripts and benchmarks too."""
    with Described(5) as gpu, pytest.raises(BusyError):
        gpu.open("problem")
    with Described(5, card_held=True) as gpu, pytest.raises((NoGpuError, WorkerError)) as failed:
        gpu.open("problem")
    assert not isinstance(failed.value, BusyError)
    other.stdin.close()
    other.wait(10)
    with Described(5) as gpu:
        for _ in range(2):
            with pytest.raises((NoGpuError, WorkerError)):
                gpu.open("problem")
        assert is_busy()
    assert not is_busy()

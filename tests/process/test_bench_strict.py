"""What a called process answers the strict judge, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults import ended, runs

from attnsweep.baselines.backend import Unavailable, Unconfirmed
from attnsweep.bench import strict
from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.device.buffers import GUARD_BYTES
from attnsweep.device.shared import Arena

SUPPORT = Path(__file__).parent.parent / "support"
linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


def side_of(card, scratch):
    class Caller(strict.Caller):
        pass

    Caller.answers_by = f"called_cards:{card}"
    return Caller(scratch)


@pytest.fixture
def called(monkeypatch, tmp_path):
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    sides = []

    def side(card, scratch=tmp_path):
        sides.append(side_of(card, scratch))
        return sides[-1]

    yield side
    for one in sides:
        one.end()


def test_it_does_what_it_is_asked_for(called):
    side = called("Right")
    with side.awake():
        assert side.ask("open", problem="a", spans=[1]) == {"problem": "a", "spans": [1]}
        assert side.ask("ready") == {}


@pytest.mark.nightly(push=4)
@linux
@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("Refuses", "^not this one$"),
        ("Faults", "^CUDARuntimeError: an illegal memory access"),
        ("Floods", "wrote what is no answer to the judge"),
        ("Nests", "wrote what is no answer to the judge"),
        ("Pickles", "wrote what is no answer to the judge"),
        ("Ahead", "wrote what is no answer to the judge"),
        ("NoMapping", "wrote what is no answer to the judge"),
        ("Exits", r"its process died \(exit code 3\)"),
        ("Crashes", r"its process died \(signal SIGSEGV\)"),
        ("Closes", "its process died"),
        # In code of ours, which is no fault of a callable.
        ("Fails", r"^ValueError: no \(called_cards.py:\d+\)$"),
        ("Lacks", "^OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_another_answer_is_a_reason(card, said, called):
    side, ours = called(card), card in ("Fails", "Lacks")
    with pytest.raises(strict.JudgeError if ours else Unavailable, match=said), side.awake():
        side.ask("ready" if ours else "open")


def test_what_is_no_time_is_no_claim(called):
    side = called("Says")
    for claim in ("0.0", "-1.0", "NaN", "Infinity", "true", "3", '"5.0"', "[]"):
        with pytest.raises(Unavailable, match="says no time"):
            pytest.fail(f"{claim} is the time {side.run(claim, 8)}")
        assert side.run("2.5", 8) == 2.5


def test_what_it_prints_goes_nowhere(called, capfd):
    assert called("Prints").ask("run") == 1.0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@linux
def test_it_stands_still_between_calls(called, tmp_path):
    side, file = called("Counts"), tmp_path / "count"
    file.touch()

    def grows(for_s):
        before, end = file.stat().st_size, time.monotonic() + for_s
        while file.stat().st_size == before and time.monotonic() < end:
            time.sleep(0.01)
        return file.stat().st_size > before

    with side.awake():
        side.ask("open", place=str(tmp_path))
        assert grows(20.0)
    time.sleep(0.05)  # a signal takes effect when the process runs next
    assert not grows(0.3)
    with side.awake():
        assert grows(20.0)


def test_a_stranger_gets_no_secrets_and_no_path_to_files_here(called, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.chdir(tmp_path)
    names, paths, place = called("Surroundings").ask("open")
    assert "SECRET_TOKEN" not in names
    assert "PATH" in names
    assert not {"", str(tmp_path)} & {*paths}
    assert place == str(tmp_path)
    assert "SECRET_TOKEN" in called("Surroundings", None).ask("open")[0]


@linux
def test_nothing_that_it_started_is_left(called):
    side = called("Leaves")
    left = side.ask("open")
    assert all(map(runs, left))
    with side.awake():
        side.end()
    assert ended(left)


class Hanging:
    """A bench whose called process never answers."""

    def replay(self, name):
        raise Unconfirmed(name)

    def __init__(self, problem, card):
        self.side = side_of(card, None)

    def add_baseline(self, name):
        return self.side.process.pid, self.side.ask("open") if name else None

    session = SimpleNamespace(poisoned=lambda error: False)


@pytest.mark.nightly(push=1)
@linux
@pytest.mark.parametrize("card", ["Hangs", "Half"])
@pytest.mark.usefixtures("called")
def test_one_that_hangs_is_a_row_and_is_gone(card):
    with Worker(timeout_s=2.0, bench=Hanging) as worker:
        worker.open(Problem(1, 2, 2, 8, 8, 64), card=card)
        pid, _ = worker.call("add_baseline", "")
        with pytest.raises(WorkerError, match="no answer within 2 s") as failure:
            worker.call("add_baseline", "f")
        assert failure.value.status is Status.TIMEOUT
        assert ended([pid])


def test_a_clock_that_does_not_confirm_has_a_status_of_its_own():
    with Worker(timeout_s=20.0, bench=Hanging) as worker:
        worker.open(Problem(1, 2, 2, 8, 8, 64), card="Right")
        with pytest.raises(WorkerError, match="its events say less") as failure:
            worker.call("replay", "its events say less")
        assert failure.value.status is Status.DAMAGED


class Spans:
    """Memory as where it begins, and buffers as where they lie."""

    def __init__(self):
        self.nbytes = 0

    def made(self, nbytes):
        self.nbytes = nbytes
        return 1000, "handle"

    def opened(self, handle, nbytes):
        return self.made(nbytes)[0]

    def buffer(self, memory, at, nbytes, guard):
        return at, nbytes, guard


def test_buffers_of_an_arena_lie_apart_and_alike_in_both_processes():
    spans = [("q", 10, 255), ("out 0", 3 << 20, 165), ("digests", 8, 165)]
    own, theirs = Spans(), Spans()
    made = Arena(own, spans)
    opened = Arena(theirs, spans, made.handle)
    assert made.buffers == opened.buffers
    assert own.nbytes == theirs.nbytes
    assert own.nbytes % (2 << 20) == 0
    end = 0
    for name, nbytes, guard in spans:
        at, size, byte = made[name]
        assert (size, byte) == (nbytes, guard)
        assert at >= end
        assert at % 256 == 0
        end = at + nbytes + 2 * GUARD_BYTES
    assert end <= own.nbytes


ATTACHES = """
import ctypes, os, sys, time
from pathlib import Path
from attnsweep.device import process

def begin():
    if os.getuid() == 0:  # root may read all
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as any program begins

read, write = os.pipe()
judge = os.fork()
if not judge:
    begin(), process.{does}(), os.write(write, b"x"), time.sleep(60), os._exit(0)
os.read(read, 1)
if not (attacker := os.fork()):
    begin()
    for name, do in (
        ("memory", lambda: open(f"/proc/{{judge}}/mem", "r+b").close()),
        ("maps", lambda: Path(f"/proc/{{judge}}/maps").read_text() or 1 / 0),
        ("trace", lambda: ctypes.CDLL(None).ptrace(16, judge, 0, 0) and 1 / 0),
    ):
        try:
            do(), print(name)
        except (OSError, ZeroDivisionError):
            pass
    sys.stdout.flush(), os._exit(0)
os.waitpid(attacker, 0), os.kill(judge, 9)
"""


def reached(does):
    """What another process of the same user reaches of one that has done this."""
    script = [sys.executable, "-c", ATTACHES.format(does=does)]
    return subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()


@linux
def test_a_process_of_the_same_user_reaches_no_memory_of_the_judge():
    assert reached("keep_out") == []


@linux
def test_it_would_reach_it_where_debuggers_may_attach():
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0":
        pytest.skip("only a parent may attach here")
    assert reached("gain_nothing") == ["memory", "maps", "trace"]

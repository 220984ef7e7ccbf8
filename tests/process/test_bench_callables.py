"""Callables that fail their process: each is a row and a sentence, and nothing of it is left."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from faults import ended, runs

from attnsweep.baselines.registry import backend_of
from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status

SOURCE = """
import ctypes, os, signal, subprocess, sys, threading, time

def hangs(q, k, v):
    while True:
        time.sleep(1)

def exits(q, k, v):
    os._exit(3)

def crashes(q, k, v):
    ctypes.string_at(0)

def takes_all_memory(q, k, v):
    return bytearray(1 << 62)

def recurses(q, k, v):
    return recurses(q, k, v)

def closes_all(q, k, v):
    os.closerange(3, 4096)

def prints(q, k, v):
    for _ in range(64):
        print("x" * (1 << 20))
    return q

def forks(q, k, v):
    if os.fork() == 0:
        return "of the child"
    return q

def leaves(q, k, v):
    own = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (0, 1)]
    shell = "setsid sleep 1000 >/dev/null & echo $!"
    own.append(int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE).stdout or 0))
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return own
"""


class OfCallables:
    """A bench that calls a callable once, and has no GPU."""

    def __init__(self, problem):
        self.problem = problem

    def add_baseline(self, name):
        (way,) = backend_of(name).ways(None, self.problem, None)
        return way.forward("q", "k", "v"), None

    session = SimpleNamespace(poisoned=lambda error: False)


@pytest.fixture
def called(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(SOURCE)
    with Worker(timeout_s=2.0, bench=OfCallables) as worker:
        worker.open(Problem(1, 2, 2, 8, 8, 64))
        call = worker.call
        worker.of = lambda name: call("add_baseline", f"{path}:{name}")[0]
        yield worker


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("hangs", Status.TIMEOUT, "no answer within 2 s; its process was killed"),
        ("exits", Status.LAUNCH_ERROR, r"the GPU process died \(exit code 3\)"),
        ("crashes", Status.LAUNCH_ERROR, r"the GPU process died \(signal SIGSEGV\)"),
        ("closes_all", Status.LAUNCH_ERROR, "the GPU process died"),
        ("takes_all_memory", Status.SKIPPED, r"raised MemoryError.* \(bad.py:\d+\)"),
        ("recurses", Status.SKIPPED, r"raised RecursionError: maximum recursion depth"),
    ],
)
def test_what_fails_is_a_sentence_and_the_next_is_called(called, name, status, says, capfd):
    with pytest.raises(WorkerError, match=says) as failure:
        called.of(name)
    assert failure.value.status is status
    assert called.of("prints") == "q"
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_child_that_goes_on_as_the_judge_answers_nothing(called):
    assert [called.of("forks") for _ in range(3)] == ["q"] * 3


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_nothing_that_it_started_is_left(called):
    started = called.of("leaves")
    assert sum(map(runs, started)) == 3
    called.stop()
    assert ended(started)

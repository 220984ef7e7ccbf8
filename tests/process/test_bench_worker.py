"""The process that owns the GPU may hang, die or be poisoned: the parent goes on."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import fake_bench
import pytest
from fake_bench import FakeBench
from faults import ended, runs
from samples import TEST_GPU

from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.errors import CardLostError, NoGpuError
from attnsweep.core.trial import Status


@pytest.fixture
def worker():
    with Worker(timeout_s=1.0, bench=FakeBench) as worker:
        worker.open("problem")
        yield worker


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize(
    ("method", "status", "words"),
    [
        ("hang", Status.TIMEOUT, "no answer within 1 s"),
        ("crash", Status.LAUNCH_ERROR, "signal SIGSEGV"),
        ("leave", Status.LAUNCH_ERROR, "exit code 7"),
        ("fault", Status.LAUNCH_ERROR, "illegal memory access"),
    ],
)
def test_a_lost_process_is_replaced_with_its_state(worker, method, status, words):
    worker.call("admit", "a", keep=True)
    worker.call("admit", "b")  # not kept: it belonged to a call that is over
    before, _, _ = worker.call("state")
    with pytest.raises(WorkerError, match=words) as failure:
        worker.call(method)
    assert failure.value.status is status
    after, problem, admitted = worker.call("state")
    assert after != before
    assert (problem, admitted) == ("problem", ["a"])
    assert worker.restarts == 1


@pytest.mark.parametrize("name", ["m:f", "m:raises"])
def test_no_process_that_ran_a_callable_judges_strictly(worker, name):
    """It could have changed there what judges the others: where it fails, too."""

    def process_of(*baselines, strict=""):
        worker.open("problem", **({"strict": strict} if strict else {}))
        for baseline in baselines:
            with contextlib.suppress(WorkerError):
                worker.add_baseline(baseline)
        return worker.call("state")[0]

    friendly = process_of("torch_flash", name)
    worker.open("another")
    strict = process_of(name, strict="/tmp")
    assert strict != friendly
    assert process_of(name, strict="/tmp") == strict  # which calls it in a process of its own
    assert process_of("torch_flash") == process_of(strict="/tmp") == strict
    assert worker.restarts == 0


def test_what_is_computed_beside_is_waited_for_longer_than_a_call_may_take(worker):
    """NumPy's work for the next problem is no fault of the entry whose host time is taken."""
    assert worker.eager_us("a") == 1.0


def test_what_a_callable_starts_ends_with_the_process_and_what_it_prints_is_nowhere(worker, capfd):
    child = worker.call("leave_behind")
    assert runs(child)
    worker.stop()
    assert ended([child])
    assert capfd.readouterr().out == ""


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("seen", ["one", "other", None])
def test_times_of_a_problem_are_of_one_card(monkeypatch, seen):
    """CUDA counts the cards anew in a process that starts after one has fallen off."""
    monkeypatch.setenv("FAKE_CARD", "one")
    with Worker(timeout_s=1.0, bench=FakeBench) as worker:
        worker.environment = TEST_GPU.model_copy(update={"uuid": "one"})
        worker.open("problem")
        with pytest.raises(WorkerError):
            worker.call("crash")
        if seen is None:  # NVML does not tell
            monkeypatch.delenv("FAKE_CARD")
        else:
            monkeypatch.setenv("FAKE_CARD", seen)
        if seen != "other":
            assert worker.call("state")[1] == "problem"
            return
        for _ in range(2):  # nor does it come in by a second call
            with pytest.raises(CardLostError, match="a new GPU process sees card other, not one"):
                worker.call("state")


def test_the_process_outlives_the_thread_that_started_it():
    with Worker(timeout_s=1.0, bench=FakeBench) as worker, ThreadPoolExecutor(1) as aside:
        aside.submit(worker.open, "problem").result()
        started, _, _ = worker.call("state")
        aside.shutdown()
        time.sleep(0.2)
        assert worker.call("state")[0] == started


def test_a_process_that_died_between_calls_is_replaced(worker):
    os.kill(worker.call("state")[0], signal.SIGKILL)
    time.sleep(0.2)
    worker.open("another")
    assert worker.call("state")[1] == "another"


def test_an_ordinary_refusal_keeps_the_process(worker):
    before, _, _ = worker.call("state")
    with pytest.raises(WorkerError, match="too many resources") as failure:
        worker.call("refuse")
    assert failure.value.status is Status.LAUNCH_ERROR
    assert worker.call("state")[0] == before


def test_a_forgotten_finalist_stays_away(worker):
    worker.call("admit", "a", keep=True)
    worker.call("admit", "b", keep=True)
    worker.forget("a")
    with pytest.raises(WorkerError):
        worker.call("crash")
    assert worker.call("state")[2] == ["b"]


def test_no_gpu_reaches_the_parent_as_itself(worker):
    with pytest.raises(NoGpuError, match="no CUDA GPU found") as failure:
        worker.call("no_gpu")
    assert failure.value.hint == "get one"


def test_stop_ends_a_hung_process(worker):
    pid = worker.call("state")[0]
    with pytest.raises(WorkerError):
        worker.call("hang")
    worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="relies on PR_SET_PDEATHSIG")
def test_a_killed_parent_leaves_no_hung_child(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {os.path.dirname(fake_bench.__file__)!r})\n"
        "from fake_bench import FakeBench\n"
        "from attnsweep.bench.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(1000.0, bench=FakeBench)\n"
        "    worker.open('problem')\n"
        "    print(worker.call('state')[0], flush=True)\n"
        "    worker.call('hang')\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ended([child])


def test_a_lock_that_a_library_made_is_no_leak():
    """What watches over them begins with the first process and ends with the program."""
    script = """
from attnsweep.bench.worker import Worker
from fake_bench import FakeBench
with Worker(timeout_s=10.0, bench=FakeBench) as worker:
    worker.open("problem")
    worker.call("lock")
"""
    path = os.pathsep.join([*sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""SIGTERM stops a command as Ctrl-C does, and what is ignored on entry stays ignored."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_bench
import pytest
from fake_bench import FakeBench
from fleets import TWO

from attnsweep.bench.worker import Worker
from attnsweep.store.run import find_runs, open_run

ROOT = Path(__file__).parent.parent.parent


def program(body, *ignored):
    """Runs `body`, which has an app, to its end, in a process that ignores signals from the start.

    It begins with the handlers that Python has there.
    """
    code = f"import os, signal, sys, time\nfrom attnsweep.reports import terminal\n{body}\n"
    code += "if __name__ == '__main__': terminal.to_the_end(app)\n"

    def ignore():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
        preexec_fn=ignore,
    )  # fmt: skip


@pytest.mark.parametrize("ends", ["raise", "sys.exit(130)"])
def test_sigterm_is_an_orderly_stop_although_it_comes_twice(ends):
    """`timeout` sends it to the command, and then to the group of the command."""
    done = program(f"""
def app():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        print("rows are kept")
        {ends}
""")
    assert (done.returncode, done.stdout) == (143, "rows are kept\n")
    assert done.stderr == ("interrupted\n" if ends == "raise" else "")


def test_a_later_sigterm_ends_a_stop_that_hangs():
    done = program("""
terminal._ONE_STOP_S = 0.1
def app():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
""")
    assert (done.returncode, done.stderr) == (143, "interrupted\n")


def test_a_command_that_ignores_ctrl_c_on_entry_ends_on_sigterm():
    """As behind `nohup … &` in a script."""
    done = program(
        """
def app():
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
""",
        signal.SIGINT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "goes on\n", "interrupted\n")


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGTERM])
def test_what_is_ignored_on_entry_is_ignored_to_the_end(ignored):
    """After an interruption too, while threads end."""
    done = program(
        f"""
import threading
def app():
    def compiles():
        threading.main_thread().join()
        os.kill(os.getpid(), {int(ignored)})
        print("goes on", flush=True)
    os.kill(os.getpid(), {int(ignored)})
    threading.Thread(target=compiles).start()
    raise KeyboardInterrupt
""",
        ignored,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "goes on\n", "interrupted\n")


def test_a_process_is_stopped_amid_its_work(tmp_path):
    for name in ("wrong.py", "wrong.cu"):
        (tmp_path / name).write_bytes((ROOT / "tests" / "families" / name).read_bytes())
    with (tmp_path / "wrong.py").open("a") as declaration:
        declaration.write("import time\nprint('up', flush=True)\ntime.sleep(50)\n")
    command = [sys.executable, "-m", "attnsweep", "list", "--kernels", str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    child.terminate()
    _, said = child.communicate(timeout=50)
    assert (child.returncode, said) == (143, "interrupted\n")


# -- children -------------------------------------------------------------------------------------


def test_a_gpu_process_ends_with_a_command_that_is_stopped(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "from fake_bench import FakeBench\n"
        "from attnsweep.bench.worker import Worker\n"
        "from attnsweep.reports import terminal\n"
        "def app():\n"
        "    with Worker(1000.0, bench=FakeBench) as worker:\n"
        "        worker.open('problem')\n"
        "        print(worker.call('state')[0], flush=True)\n"
        "        worker.call('hang')\n"
        "if __name__ == '__main__':\n"
        "    terminal.to_the_end(app)\n"
    )
    paths = os.pathsep.join([os.path.dirname(fake_bench.__file__), str(ROOT)])
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    child = int(parent.stdout.readline())
    parent.terminate()
    _, said = parent.communicate(timeout=50)
    assert (parent.returncode, said) == (143, "interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_gpu_process_that_is_stopped_is_no_candidates_fault():
    """Batch systems send SIGTERM to every process of a job: the row would have been wrong."""
    with Worker(timeout_s=30.0, bench=FakeBench) as worker:
        worker.open("problem")
        pid = worker.call("state")[0]
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGTERM))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            worker.call("hang")
        timer.join()


def test_a_run_on_several_cards_keeps_its_rows(attnsweep, tmp_path, monkeypatch, cards):
    monkeypatch.chdir(tmp_path)
    cards.facts["all"] |= {"trial_s": 0.3, "together": 2}
    cards.install(monkeypatch)
    (tmp_path / "small.yaml").write_text(TWO)

    def stop():
        for _ in range(3000):
            if len(cards.calls("trial")) >= 3:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=stop)
    thread.start()
    done = attnsweep("run", "small.yaml", "--gpus", "all")
    thread.join()
    assert done.returncode == 143, done.stderr
    assert "interrupted: all rows are kept; the same command continues from here" in done.stderr
    assert all(child.process.poll() is not None for child in cards.children)
    [directory] = find_runs(tmp_path / "results")
    kept = len(open_run(directory).trials)
    assert 1 <= kept < 6
    cards.facts["all"]["trial_s"] = 0.02
    assert attnsweep("run", "small.yaml", "--gpus", "all").returncode == 0

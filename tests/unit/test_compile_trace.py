"""Whatever ends what traces, and whenever: each that asked is answered, and none waits for ever."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from attnsweep.compile import trace
from attnsweep.compile.trace import Tracer, begin
from attnsweep.core.errors import CompilerLost, KernelError, ToolchainError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem

PROBLEM = Problem(1, 2, 2, 64, 64, 16, "bf16")
# What the process of each test does: `say` answers, `ask` reads a request.
BEGIN = """
import json, os, subprocess, sys, time
say = lambda number, **reply: os.write(1, json.dumps({"number": number, **reply}).encode() + b"\\n")
ask = lambda: json.loads(sys.stdin.buffer.readline())
"""
READY = "say(0, value={})\n"


@pytest.fixture
def tracer_of(tmp_path, monkeypatch):
    made = []

    def make(text):
        def popen(_, **how):
            return subprocess.Popen([sys.executable, "-c", BEGIN + text], **how)

        monkeypatch.setattr(Tracer, "_popen", staticmethod(popen))
        made.append(Tracer("mine.py:f", ARCHS["sm_90a"], tmp_path))
        return made[-1]

    yield make
    for tracer in made:
        tracer.close()


@pytest.mark.parametrize(
    "ends",
    [
        "ask()",
        "ask(); os.write(1, b'{\"numb')",
        "ask(); say(1, value=3); ask(); os.abort()",
        "ask(); say(99, value=3); time.sleep(0.2)",
        # What it has started keeps the pipe open.
        "subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL, close_fds=False)",
    ],
)
def test_what_is_asked_before_and_after_its_end_is_lost(tracer_of, ends):
    tracer = tracer_of(READY + ends)
    for number in range(50):
        asked = tracer.submit(PROBLEM, {"BLOCK": number})
        why = asked.exception(timeout=10)
        assert isinstance(why, CompilerLost) or (number == 0 and "say(1" in ends), number


def test_what_several_threads_ask_while_it_ends_is_lost(tracer_of):
    tracer, lost = tracer_of(READY + "for _ in range(60): ask()\n"), []
    assert tracer.files == {}

    def ask(thread):
        asked = [tracer.submit(PROBLEM, {"thread": thread, "BLOCK": number}) for number in range(50)]
        lost.extend(type(each.exception(timeout=20)) for each in asked)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == [CompilerLost] * 200


def test_a_full_disk_is_said_as_that_and_not_as_a_fault_of_the_call(tracer_of):
    """Its folder is gone by the time that its answer is there."""
    gone = "import shutil; shutil.rmtree(ask()['folder']); say(1, value={'launches': []}); ask()"
    why = tracer_of(READY + gone).submit(PROBLEM, {"BLOCK": 64}).exception(10)
    assert isinstance(why, ToolchainError)
    assert "the cubin cache cannot be written (No such file or directory)" in str(why)


def test_a_file_that_cannot_be_imported_again_says_so_each_time(tracer_of, tmp_path):
    """Its files are known from an earlier process, so that the first to start one is who compiles."""
    file = tmp_path / "mine.py"
    file.write_text("")
    known = {str(file): hashlib.sha256(b"").hexdigest()}
    assert tracer_of(f"say(0, value={known}); ask()").files == known
    again = tracer_of("say(0, failed='ValueError: no such place (mine.py:1)')")
    for _ in range(2):
        with pytest.raises(KernelError, match=r"mine\.py:f: ValueError: no such place"):
            again.submit(PROBLEM, {"BLOCK": 64})


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Begins what runs a text, in a directory with a callable; returns what was started, each with its arguments."""
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNSWEEP_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text("")

    def make(text):
        def popen(command, **how):
            started.append((command[3:], subprocess.Popen([sys.executable, "-c", BEGIN + text], **how)))
            return started[-1][1]

        monkeypatch.setattr(Tracer, "_popen", staticmethod(popen))
        ends.append(begin(["mine.py:f"]))
        return started

    ends = []
    yield make
    for end in ends:
        end()
    assert all(process.poll() is not None for _, process in started)


def test_what_is_begun_early_is_told_what_it_traces_and_begun_no_second_time(begun, tmp_path):
    started = begun("facts = ask(); say(0, value={facts[0]: 'digest'}); ask()")
    tracer = Tracer("mine.py:f", ARCHS["sm_90a"])
    assert tracer.files == {"mine.py:f": "digest"}
    assert [arguments for arguments, _ in started] == [[]]
    tracer.close()
    begin(["mine.py:f"])
    assert len(started) == 1  # it was traced as it is
    (tmp_path / "mine.py").write_text("f = None")
    begin(["mine.py:f"])
    assert len(started) == 2


def test_it_is_begun_where_the_cache_may_not_be_looked_into(begun, monkeypatch):
    monkeypatch.setattr(trace, "default_cache_dir", lambda: Path("x" * 300))  # an error other than that it is not there
    assert len(begun("ask()")) == 1


def test_what_is_begun_early_and_cannot_import_says_why(begun):
    begun("say(0, failed='tracing needs triton, which is not installed'); sys.exit(1)")[0][1].wait(10)
    with pytest.raises(KernelError, match="tracing needs triton"):
        _ = Tracer("mine.py:f", ARCHS["sm_90a"]).files


@pytest.mark.parametrize("other", ["directory", "variable", "interpreter", "killed"])
def test_what_is_begun_early_elsewhere_is_for_none(begun, tmp_path, monkeypatch, other):
    started = begun("say(0, value={}); ask()")
    (tmp_path / "other").mkdir()
    if other == "directory":
        monkeypatch.chdir(tmp_path / "other")
    if other == "variable":
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    if other == "killed":
        started[0][1].kill()
        started[0][1].wait(10)
    tracer = Tracer("mine.py:f", ARCHS["sm_90a"], interpreted=other == "interpreter")
    assert tracer.files == {}
    assert [len(arguments) for arguments, _ in started] == [0, 4]
    tracer.close()

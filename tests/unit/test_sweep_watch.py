"""`run --watch`: what an edit has compiled and timed again, with a stand-in for the GPU."""

import re
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu
from sweeping import FAMILIES, use
from typer.testing import CliRunner

from attnsweep.cli import app
from attnsweep.core.errors import CompileError
from attnsweep.sweep import watch

SPEC = """
problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 64}]
kernels: {mine: {THREADS: [32, 64]}}
measure: {rounds: 4}
"""


@pytest.fixture
def gpu(monkeypatch):
    return use(monkeypatch, FakeGpu({"THREADS=32": 30.0, "THREADS=64": 20.0}))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch) -> Path:
    """A directory with a family of the user's own, which is `simple` by another name."""
    monkeypatch.setenv("ATTNSWEEP_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "kernels"
    folder.mkdir()
    for end in (".py", ".cu"):
        text = (FAMILIES / f"simple{end}").read_text()
        (folder / f"mine{end}").write_text(re.sub(r"\bsimple\b", "mine", text))
    (tmp_path / "spec.yaml").write_text(SPEC)
    return folder


def arguments(mine: Path, *more: str) -> list[str]:
    place = mine.parent
    return [*("run", str(place / "spec.yaml"), "--kernels", str(mine)), *("--results", str(place / "results"), *more)]


@pytest.fixture
def edits(monkeypatch):
    """Steps, each an edit, that the watcher does before a wake; then comes Ctrl-C."""
    steps = []

    def watched(*folders, raise_interrupt):
        while steps:
            steps.pop(0)()
            yield set()
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "watchfiles", SimpleNamespace(watch=watched))
    return steps


@pytest.fixture
def go(gpu, mine, edits):
    def run(*steps, options=()):
        edits.extend(steps)
        return CliRunner().invoke(app, arguments(mine, "--watch", *options))

    return run


def test_an_edited_family_is_compiled_and_timed_again(go, gpu, mine) -> None:
    template = mine / "mine.cu"

    def slower() -> None:
        gpu.times = {"THREADS=32": 35.0, "THREADS=64": 25.0}
        template.write_text(template.read_text() + "// another machine code\n")

    done = go(slower)
    assert isinstance(done.exception.__cause__, KeyboardInterrupt)  # exit code 130
    assert "mine.cu changed" in done.stderr
    assert re.findall(r"^mine takes (\S+) µs", done.stdout, re.M) == ["20.0", "25.0"]
    assert len(gpu.names("trial")) == 4


def test_what_is_saved_unchanged_is_not_run_again(go, gpu, mine) -> None:
    template = mine / "mine.cu"
    done = go(lambda: template.write_text(template.read_text()), lambda: None)
    assert done.stdout.count("mine takes") == 1
    assert "changed" not in done.stderr


def test_a_file_that_vanishes_is_waited_for(go, mine) -> None:
    template, aside = mine / "mine.cu", mine.parent / "aside.cu"

    def back() -> None:
        shutil.move(aside, template)
        template.write_text(template.read_text() + "// edited\n")

    done = go(lambda: shutil.move(template, aside), lambda: None, back)
    assert "mine.cu vanished" in done.stderr
    assert done.stderr.count("waiting until mine.cu can be read again") == 1
    assert "mine.cu is back" in done.stderr
    assert done.stdout.count("mine takes") == 2


def test_a_declaration_that_is_broken_for_a_while_ends_nothing(go, mine) -> None:
    declaration = mine / "mine.py"
    good = declaration.read_text()
    done = go(
        lambda: declaration.write_text("kernel = Kernel(\n"), lambda: declaration.write_text(good + "\n# mended\n")
    )
    assert "error: " in done.stderr
    assert "SyntaxError" in done.stderr
    assert done.stdout.count("mine takes") == 2


def test_a_template_that_does_not_compile_says_why_and_goes_on(go, mine) -> None:
    template = mine / "mine.cu"
    log = 'mine.cu(3): error: identifier "y" is undefined\n  y\n  ^\n'

    def breaks() -> None:
        FakeCompiler.errors["mine.cu"] = CompileError(log.splitlines()[0], log=log)
        template.write_text(template.read_text() + "y\n")

    def mends() -> None:
        FakeCompiler.errors.clear()
        template.write_text(template.read_text().removesuffix("y\n"))

    done = go(breaks, mends)
    assert "2 compile error: mine: mine.cu(3)" in done.stdout
    assert done.stdout.count("mine takes") == 2


def test_an_edit_during_the_sweep_is_not_lost(tmp_path, edits) -> None:
    edits.append(lambda: None)
    path, calls = tmp_path / "a", []
    path.write_text("1")

    def once() -> None:
        calls.append(path.read_text())
        if len(calls) < 3:
            path.write_text(f"{len(calls) + 1}")

    with pytest.raises(KeyboardInterrupt):
        watch.keep_running(once, lambda: [path], lambda _: None)
    assert calls == ["1", "2", "3"]


def test_the_real_watcher_wakes_on_an_edit(tmp_path) -> None:
    pytest.importorskip("watchfiles")
    path = tmp_path / "a"
    path.write_text("1")

    def edit() -> None:
        for number in range(50):
            time.sleep(0.1)
            path.write_text(str(number))
            if woken.is_set():
                return

    woken = threading.Event()
    thread = threading.Thread(target=edit)
    thread.start()
    next(iter(watch.wakes([tmp_path])))
    woken.set()
    thread.join()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--watch", "--json"], "not one JSON document"),
        (["--watch", "--fresh"], "--fresh would drop them each time"),
        (["--watch", "--dry-run"], "--watch do nothing with --dry-run"),
        (["--html", "x.html", "--dry-run"], "--html do nothing with --dry-run"),
    ],
)
def test_options_that_contradict_each_other_are_refused(gpu, mine, options, said) -> None:
    done = CliRunner().invoke(app, arguments(mine, *options))
    assert said in str(done.exception)
    assert gpu.calls == []

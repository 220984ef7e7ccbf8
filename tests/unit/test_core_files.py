"""write_file: the new content or the old one, on the disk if asked, and hints to install extras."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.torch_sdpa import import_torch
from attnsweep.compile.nvrtc import nvrtc_version
from attnsweep.core import files
from attnsweep.core.errors import ToolchainError
from attnsweep.core.files import install_command, why_pip_misses, write_file
from attnsweep.tools import doctor


def nvrtc_that_cannot_be_loaded():
    def fail():
        raise RuntimeError("no libnvrtc.so")

    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = ModuleType("nvrtc")
    bindings.nvrtc.nvrtcVersion = fail
    return bindings


@pytest.mark.parametrize("bindings", [None, nvrtc_that_cannot_be_loaded()])
@pytest.mark.parametrize("folder", [Path(files.__file__).parents[2], Path(files.__file__).parents[1]])
def test_the_hint_for_a_missing_compiler_suits_a_clone(monkeypatch, bindings, folder):
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.chdir(folder)
    nvrtc_version.cache_clear()
    with pytest.raises(ToolchainError) as caught:
        nvrtc_version()
    more = " (or [cuda12], [cuda13] on a GPU machine)"
    assert caught.value.hint == install_command("compile") + more


def test_the_reason_of_a_baseline_without_pytorch_suits_a_clone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unavailable) as caught:
        import_torch()
    assert "pip install -e '" in str(caught.value)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "report.html"
    path.write_bytes(b"old")
    return path


@pytest.mark.parametrize("durable", [False, True])
def test_the_new_content_takes_the_place_of_the_old_and_leaves_nothing_else(path, durable):
    write_file(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(path, disk, error):
    def fail():
        raise error

    disk.at[1] = fail
    with pytest.raises(error):
        write_file(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_new_file_whose_name_cannot_be_taken_is_removed(path):
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(path, b"new", durable=True)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_durable_means_the_content_before_the_rename_and_then_the_folder(path, disk):
    seen = []
    disk.at = dict.fromkeys((1, 2, 3), lambda: seen.append((disk.folder, path.read_bytes())))
    write_file(path, b"new", durable=True)
    assert seen == [(False, b"old"), (True, b"new")]
    write_file(path, b"newer")
    assert len(seen) == 2


def test_access_is_that_of_any_new_file_and_the_umask_is_never_touched(path, monkeypatch):
    """Threads compile and write meanwhile: all of them would see another umask."""
    with (path.parent / "usual").open("wb") as usual:
        mode = os.fstat(usual.fileno()).st_mode
    monkeypatch.setattr(files.os, "umask", lambda _: pytest.fail("sets the umask"))
    write_file(path, b"new")
    assert path.stat().st_mode == mode


# -- where pip installs ---------------------------------------------------------------------------


@pytest.fixture
def system(monkeypatch, constants, tmp_path):
    """A Python of the system, as Debian's: pip refuses to install into it."""
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    constants(sys, prefix=sys.base_prefix)
    monkeypatch.setattr(files.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


@pytest.fixture
def in_environment(constants, tmp_path):
    constants(sys, prefix=str(tmp_path / ".venv"))
    return tmp_path / ".venv" / "bin"


def pip_in(folder):
    folder.mkdir(parents=True)
    (folder / "pip").touch(0o755)
    return str(folder)


def test_a_hint_makes_an_environment_where_the_system_manages_python(system):
    made = "python3 -m venv .venv && . .venv/bin/activate"
    assert install_command("torch").startswith(f"{made} && pip install -e '")
    why, fix = why_pip_misses()
    assert "the system manages this Python" in why
    assert fix == made
    found = {finding.name: finding for finding in doctor.examine()}["pip"]
    assert (found.ok, found.needed, found.detail, found.fix) == (False, False, why, fix)


def test_an_environment_that_is_not_active_is_named(in_environment, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", pip_in(in_environment))
    assert why_pip_misses() is None
    assert install_command("torch").startswith("pip install -e '")
    monkeypatch.setenv("PATH", pip_in(tmp_path / "other"))
    why, fix = why_pip_misses()
    assert f"pip on the PATH is {tmp_path}/other/pip, and attnsweep runs in {sys.prefix}" in why
    assert fix == f". {sys.prefix}/bin/activate"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path):
    """As root a report to /dev/null left a file in its place, and one to /dev/stdout, which is a link, too."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        write_file(pipe, b"new")
        assert read.result(10) == b"new"
    assert pipe.is_fifo()
    with (tmp_path / "output").open("wb") as output:
        link = tmp_path / "stdout"
        link.symlink_to(f"/proc/self/fd/{output.fileno()}")
        write_file(link, b"more")
    assert link.is_symlink()
    assert (tmp_path / "output").read_bytes() == b"more"

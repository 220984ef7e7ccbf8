"""What tests of compiling share: a compiler, a place of launchers, processes that trace without imports."""

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from nursery import Nursery

from attnsweep.compile.nvrtc import Compiler
from attnsweep.compile.trace import Tracer
from attnsweep.core.hardware import ARCHS


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(ARCHS["sm_90a"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def place(request, tmp_path_factory):
    """A directory with the file's LAUNCHERS and its SPEC as calls.yaml, in which everything happens."""
    place, before = tmp_path_factory.mktemp("calls"), Path.cwd()
    shutil.copy(request.module.LAUNCHERS, place)
    (place / "calls.yaml").write_text(request.module.SPEC)
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture(scope="session")
def _popen():
    """As subprocess.Popen of what traces, forked by a process for each value of TRITON_INTERPRET."""
    made: dict[str, Nursery] = {}
    with ExitStack() as stack:

        def popen(command, *, env, **how):
            variables = {"TRITON_INTERPRET": env["TRITON_INTERPRET"], "CUDA_VISIBLE_DEVICES": ""}
            if (nursery := made.get(variables["TRITON_INTERPRET"])) is None:
                nursery = stack.enter_context(Nursery("traced_child", **variables))
                made[variables["TRITON_INTERPRET"]] = nursery
            return nursery.popen(command, env, **how)

        yield popen


@pytest.fixture(scope="module")
def forked_tracers(_popen):
    """Processes that trace are forked, which spares each seconds of imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracer, "_popen", staticmethod(_popen))
        yield


@pytest.fixture
def programs(monkeypatch):
    """Processes that trace are programs of their own, as a user's are."""
    monkeypatch.setattr(Tracer, "_popen", subprocess.Popen)

"""One compiler for the tests of a file, and one place for its launchers."""

import os
import shutil
from pathlib import Path

import pytest

from attnsweep.compile.nvrtc import Compiler
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

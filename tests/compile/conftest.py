"""One compiler for the tests of a file."""

import pytest

from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import ARCHS


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(ARCHS["sm_90a"])
    yield made
    made.close()

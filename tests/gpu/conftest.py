"""One GPU process and one compiler for the tests of a file."""

import pytest

from attnsweep.bench.worker import Worker
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import arch_named


@pytest.fixture(scope="module")
def worker():
    with Worker(timeout_s=60.0) as worker:
        yield worker


@pytest.fixture(scope="module")
def compiler(worker):
    made = Compiler(arch_named(worker.describe().arch))
    yield made
    made.close()

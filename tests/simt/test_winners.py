"""Every config that won a recorded sweep is right on the CPU, on shapes that reach all of it.

A push runs one of a run that its commit draws; `pytest tests/simt -m nightly` runs all.
"""

import pytest

from attnsweep.core.hardware import arch_named
from attnsweep.family.discover import discover
from attnsweep.store.run import find_runs

from .harness import COMPILER
from .recorded import RESULTS, winners_of
from .shapes import cases

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

KERNELS = discover()
RUNS = {
    str(directory.relative_to(RESULTS)): directory
    for directory in find_runs(RESULTS)
    if "call: " not in (directory / "spec.yaml").read_text()
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("run", RUNS)
def test_winners_are_right(simulator, few, run):
    there = list(winners_of(RUNS[run], KERNELS))
    assert there
    for winner in few(there, 1):
        kernel, arch = KERNELS[winner.kernel], arch_named(winner.arch)
        for case in cases(winner.problem, winner.config):
            result = simulator.check(kernel, winner.config, case, arch=arch, timeout_s=600)
            assert result.ok, (str(winner), case.label, str(result))

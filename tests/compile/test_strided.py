"""Winners compiled for models, with STRIDED=1: nothing spills, and launches fit their templates."""

from __future__ import annotations

import pytest

from attnsweep.build.cubin import compiler_warnings
from attnsweep.build.nvrtc import Compiler
from attnsweep.family.declare import discover
from attnsweep.hardware import ARCHS
from attnsweep.use.compiled import FAMILY, compile_for_models
from tests.simt.recorded import RESULTS, winners_of

FAMILIES = discover()
RUNS = ("h100-80gb-hbm3/h100", "h100-80gb-hbm3/flash_long", "h200/flash_training")


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(ARCHS["sm_90a"])
    yield made
    made.close()


@pytest.mark.parametrize("run", RUNS)
def test_recorded_winners_compile_with_strides(compiler, run, request):
    if run != RUNS[0] and not request.config.option.thorough:
        pytest.skip("takes six seconds: --thorough")
    found = [w for w in winners_of(RESULTS / run, FAMILIES) if w.kernel == FAMILY]
    assert found
    asked = [
        compile_for_models(FAMILIES[FAMILY], winner.config, winner.problem, compiler)
        for winner in found
    ]
    for each in asked:
        compiled, files, spills = each.done()  # which compares arguments with the parameters
        assert spills == 0, compiled.config
        assert files
        for futures in each.futures:
            for future in futures.values():
                assert not compiler_warnings(future.result().log), compiled.config

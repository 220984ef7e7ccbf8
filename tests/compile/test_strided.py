"""Winners compiled for models, with STRIDED=1: consumers spill nothing, and launches fit."""

import pytest

from attnsweep.compile.cubin import compiler_warnings
from attnsweep.family.discover import discover
from attnsweep.serve.export_code import FAMILY, compile_for_models
from tests.simt.recorded import RESULTS, winners_of

FAMILIES = discover()
RUNS = ("h100-80gb-hbm3/h100", "h100-80gb-hbm3/flash_long", "h200/flash_training")


@pytest.mark.parametrize("run", RUNS)
def test_recorded_winners_compile_with_strides(compiler, run, request, some):
    """All winners with --thorough; otherwise a ninth of one run's, which the commit draws."""
    if run != RUNS[0] and not request.config.option.thorough:
        pytest.skip("takes six seconds: --thorough")
    found = [w for w in winners_of(RESULTS / run, FAMILIES) if w.kernel == FAMILY]
    assert found
    asked = [
        compile_for_models(FAMILIES[FAMILY], winner.config, winner.problem, compiler)
        for winner in some(found, -(-len(found) // 9))
    ]
    for each in asked:
        compiled, files, spills = each.done()  # which compares arguments with the parameters
        # Producers of four warpgroups have 24 registers, and keep two words of their strides in
        # memory: nvdisasm shows STL and LDL after the last HGMMA alone, in code of the producers.
        most = 16 if each.config["WARPGROUPS"] == 4 else 0
        assert spills <= most, compiled.config
        assert files
        for future in each.futures.values():
            assert not compiler_warnings(future.result().log), compiled.config

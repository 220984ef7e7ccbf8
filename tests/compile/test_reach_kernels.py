"""The TMA kernel of benchmarks/calls_reach.py, compiled: descriptors are of the config's tiles."""

import importlib.util
import re
from pathlib import Path

import pytest

from attnsweep.compile.trace import Tracer
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem

missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"tracing needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]
LAUNCHERS, SPEC = Path(__file__).parents[2] / "benchmarks/calls_tma.py", ""
TMA = "calls_tma.py:attention"


def traced(call, problem, place, **values):
    tracer = Tracer(call, arch_named("sm_90a"), place / "cache")
    try:
        (tuning,) = tracer.space(Problem.parse(problem))
        return tuning, tracer.submit(Problem.parse(problem), {**tuning.kept[-1], **values}).result()
    finally:
        tracer.close()


def test_loads_and_stores_of_descriptors_are_copies_of_tma(place):
    tuning, made = traced(TMA, "2,4/2,300,64 bf16 causal", place, num_stages=2)
    assert (len(tuning.configs), made.why) == (10, "")
    (text,) = (path.read_text() for path in made.cache.rglob("*.ptx"))
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.shared::(cta|cluster)\.global", text)
    assert "cp.async.bulk.tensor.3d.global.shared::cta" in text


def test_a_config_that_the_file_does_not_list_has_descriptors_of_its_own_tiles(place):
    _, made = traced(TMA, "1,2,256,64 bf16", place, BLOCK_M=32, BLOCK_N=16)
    (text,) = (path.read_text() for path in made.cache.rglob("*.ttir"))
    assert set(re.findall(r"tensordesc<(\S+?)xbf16", text)) == {"1x32x64", "1x16x64"}

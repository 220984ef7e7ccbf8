"""The code that serves mixed calls of an engine, compiled: what recorded runs have not is not theirs."""

import itertools

import pytest

from attnsweep.compile.cubin import functions
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem

pytest.importorskip("torch")
from attnsweep.serve import paged_plans as plans

ARCH = ARCHS["sm_90a"]
KINDS = [*itertools.product((64, 96, 128, 256), ("16", "1", "64,e4m3"), ("causal", "window(900,0) softcap(30) sinks"))]


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize(("head_dim", "pages", "scores"), KINDS)
def test_it_spills_nothing_and_shares_keys(compiler, head_dim, pages, scores):
    mask, *rest = scores.split(" ")
    label = f"(32,32/8,512x8192,{head_dim}) bf16 {mask} paged({pages},1x8192+31x2000) {' '.join(rest)}"
    problem = Problem.parse(label.strip())
    family, config, _ = plans.chosen(problem, ARCH, "H200", packed=True, lse=True)
    assert family.name == plans.APPEND
    assert config.SPLITS == (1 if head_dim == 256 else 4)
    launch = family.launches(config, problem, ARCH)["fwd"]
    defines = {**family.stages["fwd"].defines(config, problem, launch), "QUERIES": "1"}
    (found,) = functions(compiler.submit(family.source, defines).result().log).values()
    assert found["spill_bytes"] == 0, config.label

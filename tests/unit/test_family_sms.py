"""`sms`, the number of SMs of the card: in specs, declarations, rules, plans, rows and history."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use

from attnsweep.choose.strategies.history import history_on, shipped_history
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.device.cards import installed_arch
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.family import SMS, Config
from attnsweep.family.space import Selection, Space
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session
from attnsweep.tools import compile as compile_tool

FAMILIES = discover()
FLASH = FAMILIES["flash_fwd_wgmma"]
HOPPER = ARCHS["sm_90a"]
LONG = Problem(4, 32, 32, 4096, 4096, 64)
CARDS = {"H20": 78, "H100 PCIe": 114, "H100": 132}
SMALL = {"BLOCK_N": (64,), "WARPGROUPS": (2,), "KEY_GROUPS": (1,), "SPLITS": (1,)}


def persistent(space: Space) -> set[object]:
    return {config["PERSISTENT"] for config in space.configs}


@pytest.mark.parametrize("sms", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("values", [{}, {"PERSISTENT": (0, SMS)}], ids=["own", "spec"])
def test_configs_have_the_number_of_the_card(sms, values):
    space = Space.build(FLASH, LONG, replace(HOPPER, sm_count=sms), Selection(SMALL | values))
    assert persistent(space) == {0, sms}
    (config, *_) = (c for c in space.configs if c.PERSISTENT)
    grid = FLASH.launches(config, LONG, replace(HOPPER, sm_count=sms))["fwd"].grid
    assert grid == (sms * config.BLOCKS_PER_SM, 1, 1), "all blocks fit the card at once"


def test_on_132_sms_the_space_is_that_of_the_number():
    """Recorded rows keep their labels, so that they are found again."""
    named, numbered = (
        Space.build(FLASH, LONG, HOPPER, Selection(SMALL | {"PERSISTENT": (0, value)})) for value in (SMS, 132)
    )
    assert named == numbered
    assert any("PERSISTENT=132" in config.label for config in named.configs)


def test_a_split_fills_the_sms_of_the_card():
    """128 blocks leave SMs of an H100 idle, and none of an H20."""
    values = {param.name: param.values[0] for param in FLASH.params}
    config = Config(values | {"WARPGROUPS": 2, "SPLITS": 2, "SPLIT_CLUSTER": 1})
    problem = Problem(1, 8, 8, 1024, 1024, 64)  # 64 tiles of queries
    answers = [FLASH.refused_by(config, problem, replace(HOPPER, sm_count=n)) for n in (132, 78)]
    assert answers == [None, "split_grid"]


def test_what_was_recorded_on_another_card_begins_the_search_of_this_one():
    there, here = shipped_history(FLASH.name), history_on(FLASH, 114)
    assert history_on(FLASH, 132) is there
    assert [h.times_us for h in here] == [h.times_us for h in there]
    counts = {c["PERSISTENT"] for h in here for c in h.configs}
    assert 114 in counts
    assert 132 not in counts
    assert 132 in {c["PERSISTENT"] for h in there for c in h.configs}


class Turns(FakeGpu):
    """Every config takes as long."""

    def time_us(self, name):
        return 10.0


SPEC = """
arch: sm_90a
problems: [{batch: 1, heads: 2, seqlen: 64, head_dim: 64, causal: true}]
kernels: {turns: {BLOCKS: [0, sms]}}
baselines: []
measure: {rounds: 4}
"""
# A family of the user's own.
DECLARATION = """
from attnsweep.family.family import SMS, Family, Launch, Param

kernel = Family(
    "turns",
    summary="blocks take turns",
    params=(Param("BLOCKS", (0, SMS), "blocks that take turns; 0: one each"),),
    head_dims=(64,),
)


@kernel.stage("fwd")
def fwd(config, problem, arch):
    blocks = config.BLOCKS or problem.seqlen_q
    return Launch("turns", grid=(blocks, 1, 1), threads=64, args=("q", "k", "v", "o"))
"""
TEMPLATE = 'extern "C" __global__ void turns(void* q, void* k, void* v, void* o) { BLOCKS; }'


@pytest.fixture
def go(tmp_path, monkeypatch):
    def run(sms, early=None, value=SMS):
        gpu = Turns(environment=TEST_GPU.model_copy(update={"sm_count": sms}))
        use(monkeypatch, gpu).installed = early
        path = tmp_path / "turns.yaml"
        path.write_text(SPEC.replace("sms", str(value)))
        (tmp_path / "ab_test.py").write_text(DECLARATION)
        (tmp_path / "turns.cu").write_text(TEMPLATE)
        kernels = {"turns": load_kernel(tmp_path / "ab_test.py")}
        found = session.run(load_spec(path, kernels), results=tmp_path / "out", cache_dir=tmp_path / "c")
        return found.run, gpu

    return run


@pytest.mark.parametrize("early", [None, HOPPER], ids=["alone", "after a wrong guess"])
def test_a_sweep_measures_the_number_of_its_card_and_resumes(go, early):
    run, gpu = go(114, early)
    assert {t.config["BLOCKS"] for t in run.trials} == {0, 114}
    assert gpu.names("trial") == ["BLOCKS=0", "BLOCKS=114"]
    again, gpu = go(114, early)
    assert gpu.names("trial") == []
    assert [t.fingerprint for t in again.trials] == [t.fingerprint for t in run.trials]
    spec = load_spec(run.directory / "spec.yaml")
    assert spec.kernels["turns"].values["BLOCKS"] == (0, SMS), "as it was asked"


def test_rows_of_the_number_are_those_of_sms(go):
    before, gpu = go(132, value=132)
    assert len(gpu.names("trial")) == 2
    after, gpu = go(132)
    assert gpu.names("trial") == []
    assert after.trials == before.trials


def nvml(monkeypatch, *cards):
    """Cards as (compute capability, cores)."""
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda n: cards[n],
        nvmlDeviceGetCudaComputeCapability=lambda card: card[0],
        nvmlDeviceGetNumGpuCores=lambda card: card[1],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_nvml_tells_the_sms_of_the_card(monkeypatch):
    nvml(monkeypatch, ((9, 0), 114 * 128))
    assert installed_arch() == replace(HOPPER, sm_count=114)
    nvml(monkeypatch, ((8, 0), 6912))
    assert installed_arch().sm_count == 108
    nvml(monkeypatch, ((9, 0), 114 * 128), ((9, 0), 132 * 128))
    assert installed_arch() is None, "two kinds of card"


@pytest.mark.parametrize(("here", "sms"), [(replace(HOPPER, sm_count=114), 114), (ARCHS["sm_80"], 132), (None, 132)])
def test_a_dry_run_plans_for_the_card_that_a_run_would_have(gpu, here, sms):
    spec, gpu.installed = load_spec(Path("h100")), here
    assert compile_tool.target_arch(spec, None) == replace(HOPPER, sm_count=sms)
    assert compile_tool.target_arch(spec, "sm_90a") == HOPPER

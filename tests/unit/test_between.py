"""configs/between.yaml and its kin: shapes, and each config that dispatch may choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnsweep import families, judge_dispatch, load_spec, open_run, plan
from attnsweep.family.declare import Config
from attnsweep.hardware import ARCHS
from attnsweep.use import package
from attnsweep.use.compiled import FAMILY, config_of, shape_of

ROOT = Path(__file__).parent.parent.parent
RUNS = ("h100", "flash_training", "flash_short", "batched", "flash_dims", "flash_long", "between")
KERNEL = families()[FAMILY]
H100 = ROOT / "results/h100-80gb-hbm3"
# Configs that won after between_short and held_out had been recorded, and are no candidates there,
# with the run in which they won. To be candidates they need both runs recorded anew.
WON_SINCE = {
    "BLOCK_N=64 WARPGROUPS=2 KEY_GROUPS=1 NUM_STAGES=2 PRODUCER_WARPS=4 BLOCKS_PER_SM=1 OVERLAP=1 "
    "PINGPONG=0 MAXIMA=2 P_SHARED=0 EXP2_POLY=0 ORDER=0 PERSISTENT=0 SPLITS=1 SPLIT_CLUSTER=0 "
    "CLUSTER=1 PDL=0 PACK_GQA=0 LSE=0": "flash_dims",
    "BLOCK_N=64 WARPGROUPS=4 KEY_GROUPS=1 NUM_STAGES=2 PRODUCER_WARPS=4 BLOCKS_PER_SM=1 OVERLAP=0 "
    "PINGPONG=0 MAXIMA=2 P_SHARED=0 EXP2_POLY=0 ORDER=1 PERSISTENT=132 SPLITS=1 SPLIT_CLUSTER=0 "
    "CLUSTER=1 PDL=0 PACK_GQA=0 LSE=0": "flash_training",
}


@pytest.fixture(scope="module", params=["between", "between_short", "held_out"])
def planned(request):
    return plan(load_spec(ROOT / f"configs/{request.param}.yaml"))


@pytest.fixture(scope="module")
def tuned():
    chosen = []
    for name in RUNS:
        run = open_run(H100 / name)
        key, environment = package._gpu_of(run)
        chosen += package._chosen(run, environment, key, KERNEL, [])
    return [each.trial for each in chosen]


@pytest.mark.parametrize("planned", ["between_short", "held_out"], indirect=True)
def test_no_shape_of_the_spec_was_tuned(planned, tuned):
    assert len({item.problem for item in planned}) == len(planned)
    assert not {item.problem for item in planned} & {trial.problem for trial in tuned}


@pytest.mark.parametrize("planned", ["between_short", "held_out"], indirect=True)
def test_every_winner_that_may_run_on_a_shape_is_a_candidate_there(planned, tuned):
    configs = {config_of(trial, KERNEL).label: trial for trial in tuned}
    assert len(configs) > 20
    missing, able = set(), set()
    for item in planned:
        candidates = {
            Config({**config, "LSE": 0}).label for space in item.spaces for config in space.configs
        }
        for label, trial in configs.items():
            config = config_of(trial, KERNEL)
            if KERNEL.refused_by(config, item.problem, ARCHS["sm_90a"]) is None:
                assert label in candidates or label in WON_SINCE, (str(item.problem), label)
                missing |= {label} - candidates
                able.add(label)
    assert missing == set(WON_SINCE) & able


def test_what_won_since_the_held_out_shapes_were_recorded_is_chosen_on_few_of_them():
    """There their own sweeps cannot say what the choice costs, and the page says of how many."""
    recorded = [open_run(H100 / name).environment.date for name in ("between_short", "held_out")]
    for name in WON_SINCE.values():
        assert open_run(H100 / name).environment.date > max(recorded)
    tuned = [H100 / name for name in (*RUNS, "between_short")]
    rows = judge_dispatch(tuned, [H100 / "held_out"])
    known = [row for row in rows if row.config not in WON_SINCE]
    assert all(row.regret is not None for row in known)
    assert len(known) >= 40
    assert len(rows) - len(known) == 2
    page = " ".join((ROOT / "docs/tutorials/your-model.md").read_text().split())
    assert "On 2 of the shapes the choice is a config that won after they were recorded" in page


def test_the_specs_vary_what_decides_a_time(planned):
    if len(planned) < 40:
        pytest.skip("a supplement")
    shapes = [shape_of(item.problem) for item in planned]
    assert {s.head_dim for s in shapes} == {64, 96, 128, 256}
    assert {(s.dtype, s.causal) for s in shapes} == {
        (dtype, causal) for dtype in ("fp16", "bf16") for causal in (False, True)
    }
    assert any(s.heads != s.heads_kv for s in shapes)
    assert any(s.seqlen_q != s.seqlen_k for s in shapes)
    tiles = [s.batch * s.heads * -(-s.seqlen_q // 128) for s in shapes]
    assert max(tiles) > 1000
    assert sum(t <= 200 for t in tiles) >= 10
    assert sum(s.seqlen_q % 64 > 0 for s in shapes) >= 15


def test_the_held_out_shapes_are_in_no_other_spec_and_have_its_candidates():
    names = ("between", "between_short", "held_out")
    specs = [load_spec(ROOT / f"configs/{name}.yaml") for name in names]
    assert specs[1].kernels == specs[2].kernels
    first, short, held_out = ({item.problem for item in plan(spec)} for spec in specs)
    assert not (first | short) & held_out
    assert not first & short
    assert len(first) >= 48
    assert len(held_out) >= 40


def test_machine_code_is_shared_by_shapes(planned):
    codes = set()
    candidates = 0
    for item in planned:
        problem = item.problem
        for space in item.spaces:
            for config in space.configs:
                candidates += 1
                launches = KERNEL.launches(config, problem, ARCHS["sm_90a"])
                for name, launch in launches.items():
                    defines = KERNEL.stages[name].defines(config, problem, launch)
                    codes.add((name, *sorted(defines.items())))
    assert candidates <= 2400
    assert len(codes) <= 520

"""Gradients on a card: right in every element and every call, as are those of baselines."""

import pytest

from attnsweep.bench.gpu import WorkerError
from attnsweep.compile.candidate import Build
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import BACKWARD, Padded, Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config

pytestmark = pytest.mark.gpu
FAMILY = discover()["flash_bwd_wgmma"]
PROBLEMS = (
    Problem(2, 16, 16, 1024, 1024, 128, "bf16", CAUSAL, op=BACKWARD),
    Problem(2, 16, 4, 1500, 1500, 64, "fp16", CAUSAL, op=BACKWARD),
    Problem(1, 8, 8, 777, 2000, 128, "fp16", FULL, op=BACKWARD),
    Problem(1, 8, 2, 2000, 777, 64, "bf16", CAUSAL, op=BACKWARD),
    Problem(1, 8, 2, 1500, 1500, 96, "fp16", CAUSAL, op=BACKWARD),
    Problem(2, 4, 4, 777, 2000, 40, "bf16", FULL, op=BACKWARD),
    Problem(1, 8, 2, 1500, 1437, 256, "bf16", CAUSAL, op=BACKWARD),
    Problem(1, 8, 8, 777, 2000, 192, "fp16", FULL, op=BACKWARD),
    Problem(2, 16, 4, 1500, 1500, 128, "bf16", Interval(255, 0), op=BACKWARD),
    Problem(1, 8, 2, 2000, 1777, 64, "fp16", Interval(100, 70), op=BACKWARD),
    Problem(1, 8, 2, 1500, 1437, 256, "bf16", Interval(300, 20), op=BACKWARD),
    Problem(4, 16, 4, 1000, 1000, 128, "bf16", CAUSAL, Padded("right", 40), op=BACKWARD),
    Problem(3, 8, 8, 500, 777, 64, "fp16", FULL, Padded("left", 0), op=BACKWARD),
    Problem(3, 8, 2, 1000, 937, 256, "bf16", Interval(300, 20), Padded("right", 0), op=BACKWARD),
    # Of several waves of heads.
    Problem(8, 16, 16, 1000, 1100, 128, "bf16", CAUSAL, op=BACKWARD),
    Problem(3, 16, 8, 2100, 2000, 64, "fp16", FULL, op=BACKWARD),
)
APART = {"KV_WARPGROUPS": 1, "DKV_WARPGROUPS": 2}
CONFIGS = (
    {"RECOMPUTE": 0},
    {"RECOMPUTE": 0, "DQ_RING": 2, "PDL": 1},
    {"RECOMPUTE": 0, "DQ_RING": 3},
    {"RECOMPUTE": 0, "DQ_RING": 4},
    APART | {"RECOMPUTE": 0, "DQ_ADD": 1, "DQ_RING": 3},
    {"RECOMPUTE": 1, "KV_WARPGROUPS": 1, "BLOCKS_PER_SM": 2, "AHEAD": 2},
    {"RECOMPUTE": 1, "AHEAD": 0, "Q_BLOCK_N": 96},
    APART | {"RECOMPUTE": 0, "DQ_ADD": 1},
    APART | {"RECOMPUTE": 0, "DQ_ADD": 1, "AHEAD": 1, "CLUSTER": 2, "PDL": 1},
    APART | {"RECOMPUTE": 0},  # 192 columns fit staging
    APART | {"RECOMPUTE": 1, "AHEAD": 1, "CLUSTER": 2, "Q_BLOCK_N": 64, "Q_STAGES": 1},
    APART | {"RECOMPUTE": 1, "NUM_STAGES": 3, "Q_BLOCK_N": 80},
)


@pytest.mark.parametrize("values", CONFIGS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_gradients_are_right_in_many_calls(problem, values, worker, compiler):
    if reason := FAMILY.refusal(problem, compiler.arch):
        pytest.skip(reason)
    config = Config({param.name: param.values[0] for param in FAMILY.params} | values)
    if rule := FAMILY.refused_by(config, problem, compiler.arch):
        pytest.skip(f"the rule {rule} refuses it")
    build = Build(FAMILY, config, problem, compiler)
    build.submit()
    candidate = build.candidate()
    assert candidate.deterministic == bool(config.RECOMPUTE)
    worker.open(problem, replay_us=300, seed=1)
    accuracy, first = worker.trial(candidate)
    assert accuracy.output in problem.outputs
    assert accuracy.rel_err <= accuracy.limit
    assert {*first.stages_us} == {*build.launches}
    worker.add("ours", candidate, cold=True)
    assert min(worker.replay("ours", kind) for kind in ("warm", "cold")) > 0
    assert worker.confirm("ours", 100_000.0) > 100


OF_OTHERS = (
    *("torch_cudnn", "torch_flash", "torch_efficient", "cudnn", "cudnn_deterministic"),
    *("flash_attn_3", "flash_attn_4"),
)


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("problem", [*PROBLEMS[:2], PROBLEMS[8], PROBLEMS[11]], ids=lambda p: p.label)
def test_gradients_of_baselines_are_right_and_timed(problem, name, worker):
    pytest.importorskip("torch")
    worker.open(problem, replay_us=300, seed=1)
    try:
        accuracy, _ = worker.add_baseline(name)
    except WorkerError as error:
        pytest.skip(error.detail)
    assert accuracy.rel_err <= accuracy.limit
    assert worker.replay(name, "warm") > 0

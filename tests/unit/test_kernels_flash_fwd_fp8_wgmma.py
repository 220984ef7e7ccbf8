"""What flash_fwd_fp8_wgmma works out on the host: its maps, registers, rules and sums of weights."""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.verify.encoding import round_to

FAMILY = discover()["flash_fwd_fp8_wgmma"]
ARCH = ARCHS["sm_90a"]
LONG = Problem(4, 16, 8, 4096, 4096, 128, "e4m3")


def config(**values: int) -> Config:
    """The first values, but for these."""
    return Config({param.name: param.values[0] for param in FAMILY.params} | values)


@pytest.mark.parametrize("dtype", ["e4m3", "e4m3_tensor", "e4m3_block"])
def test_a_tile_has_one_scale(dtype):
    problem = replace(LONG, dtype=dtype)
    refused = {n: FAMILY.refused_by(config(BLOCK_N=n), problem, ARCH) for n in (64, 96, 128)}
    per_block = dtype == "e4m3_block"
    assert refused == {64: None, 96: "one_scale" if per_block else None, 128: None}
    launch = FAMILY.launches(config(), problem, ARCH)["fwd"]
    assert launch.defines["SCALE_BLOCK"] == (128 if per_block else 0)
    assert {"q_scale", "k_scale", "v_scale"} < {arg for arg in launch.args if isinstance(arg, str)}


def test_a_producer_has_what_consumers_can_spare():
    def given(**values: int) -> tuple[int, int]:
        defines = FAMILY.launches(config(**values), LONG, ARCH)["fwd"].defines
        return defines["PRODUCER_REGISTERS"], defines["CONSUMER_REGISTERS"]

    assert given(BLOCK_N=128) == (56, 224)
    assert given(BLOCK_N=128, INTERVAL=128) == (40, 232)
    assert given(BLOCK_N=96, WARPGROUPS=3) == (56, 152)
    for values in ({"BLOCK_N": 128, "INTERVAL": 128}, {"BLOCK_N": 224}):
        producer, consumer = given(**values)
        assert producer + 2 * consumer <= 3 * 168  # of each thread at the launch


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"BLOCK_N": 128, "INTERVAL": 96}, "intervals"),
        ({"BLOCK_N": 128, "INTERVAL": 48}, "intervals"),
        ({"BLOCK_N": 128, "INTERVAL": 64}, "registers"),
        ({"BLOCK_N": 224, "V_STAGES": 1}, "producer_registers"),
        ({"BLOCK_N": 80}, "tiles"),
        ({"SUMS": 1, "LSE": 1}, "sums"),
        ({"HEADROOM": 6}, "small_weights"),
        ({"SUMS": 2, "HEADROOM": 2}, "sums_by_headroom"),
        ({"SUMS": 1, "INTERVAL": 64, "HEADROOM": 5}, "sums_by_headroom"),
        ({"MAXIMA": 2, "OVERLAP": 0}, "tried_tiles"),
        ({"NUM_STAGES": 2, "V_STAGES": 3}, "no_idle_tile"),
    ],
)
def test_a_config_is_refused_by_its_rule(values, rule):
    assert FAMILY.refused_by(config(**values), LONG, ARCH) == rule


@pytest.mark.parametrize(
    ("headroom", "least", "most"), [(0, 0, 0.003), (1, 0.001, 0.01), (2, 0.01, 0.04), (5, 0.12, 0.3)]
)
def test_sums_of_rounded_weights_need_little_headroom(headroom, least, most):
    """A row as those that an H200 showed: one key 11.2 nats above 16,384 that spread by 1.6."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        scores = rng.normal(0, 1.57, 16384)
        scores[-1] = 11.2
        weights = np.exp(scores - scores.max()) * 2.0 ** (8 - headroom)
        lost = 1 - round_to(weights.astype(np.float32), "e4m3").sum(dtype=float) / weights.sum()
        assert least <= abs(lost) <= most
    values = config(SUMS=2, HEADROOM=headroom)
    allowed = FAMILY.refused_by(values, LONG, ARCH) is None
    assert allowed == (most <= 0.01)

"""docs/performance.md says what its figures say: ratios, wins and gains turn with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import H200

from attnsweep.problem import Problem
from attnsweep.spec.load import load_spec
from attnsweep.store.run import Store
from attnsweep.trial import Accuracy, Measurement, Status, Trial

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
import performance

SHAPE = Problem(1, 16, 16, 1024, 1024, 64)
CELL = Problem(8, 8, 8, 128, 128, 64)


def trial(provider, time_us, problem=SHAPE, **config):
    rounds = [time_us * (1 + 0.001 * (n % 3)) for n in range(9)]
    return Trial(
        kernel="flash_fwd_wgmma" if config else provider,
        provider="attnsweep" if config else provider,
        config=config,
        problem=problem,
        status=Status.OK,
        time_us=Measurement(median=time_us, low=time_us, high=time_us, samples=9, rounds=rounds),
        accuracy=Accuracy(rel_err=1e-4, limit=1e-3),
        eager_us=5.0,
    )


def recorded(results, name, *trials):
    with Store.open(results / name) as store:
        for row in trials:
            store.append(row)
        store.describe(load_spec(Path("flash_short_h200")).resolved(), H200)


@pytest.fixture
def results(tmp_path):
    recorded(
        tmp_path,
        "flash_short_h200",
        trial("", 10.0, PDL=2, BLOCK_N=128),
        trial("", 11.0, PDL=0, BLOCK_N=128),
        trial("", 12.5, PDL=2, BLOCK_N=64),
        trial("torch_flash", 20.0),
        trial("torch_cudnn", 14.0),
    )
    return tmp_path


def test_a_shape_stands_beside_its_fastest_peer(results):
    page = performance.page(results)
    assert "| (1,16,1024,64) fp16 full | **10** | 20 | 14 | – | **1.40** | 429 |" in page
    assert "BLOCK_N=128 PDL=2 |" in page or "PDL=2 BLOCK_N=128 |" in page
    assert "geometric mean 1.40×; slower than it on 0." in page


def test_a_slower_kernel_is_told_as_slower(results):
    recorded(results, "flash_h200", trial("", 20.0, PDL=0), trial("torch_cudnn", 10.0))
    page = performance.page(results)
    assert "0.50× to 1.40×" in page
    assert "slower than it on 1." in page


def test_a_value_gains_over_the_best_without_it(results):
    recording = performance.Recording(performance.open_run(results / "flash_short_h200"))
    found = {value: ratio for value, ratio, _ in performance.gains([recording], "PDL")}
    assert found["2"] == pytest.approx(1.1)
    assert found["0"] == pytest.approx(10 / 11)
    assert list(performance.gains([recording], "EXP2_POLY")) == []


def test_cells_are_told_a_sequence(results):
    recorded(
        results,
        "batched_h100",
        trial("", 4.0, CELL, PDL=2),
        trial("triton_flash", 6.0, CELL),
    )
    page = performance.page(results)
    assert "| 128 | 8 | **0.500** | 4.00 | 5.0 | 0.750 (triton_flash) | 1.50 |" in page


def test_a_problem_without_a_peer_is_left_out(tmp_path):
    recorded(tmp_path, "flash_h200", trial("", 20.0, PDL=0))
    assert performance.page(tmp_path) is None

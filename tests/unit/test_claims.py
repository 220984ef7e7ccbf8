"""docs/claims.md says what its figures say: verdicts turn with them, gaps are `not tested`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
from samples import H200

from attnsweep.arch import ARCHS
from attnsweep.kernel import Kernel, Launch, Param
from attnsweep.space import Space
from attnsweep.spec import load_spec
from attnsweep.store import Store
from attnsweep.trial import Accuracy, Measurement, Status, Trial

PATH = Path(__file__).parent.parent.parent / "scripts" / "claims.py"
_spec = importlib.util.spec_from_file_location("claims", PATH)
claims = importlib.util.module_from_spec(_spec)
sys.modules["claims"] = claims
_spec.loader.exec_module(claims)

TILED = {"STATS": 0, "QK_BLOCK_M": 64, "QK_BLOCK_N": 128, "QK_TILES": 4, "QK_CLUSTER": 1}
TILED |= {"PV_BLOCK_M": 64, "PV_CLUSTER": 1}
TILES = ["64x64x32", "64x128x32", "64x128x64", "128x256x64"]
SOFTMAX = {
    "32 threads, 3 passes": 0.0,
    "16 threads": 1.0,
    "256 threads, vectorised": 2.0,
}


def trial(provider, time_us, problem=claims.SHAPE, **facts):
    rounds = [time_us * (1 + 0.001 * (n % 3)) for n in range(9)]
    return Trial(
        kernel=facts.pop("kernel", provider),
        provider=provider,
        config=facts.pop("config", {}),
        problem=problem,
        status=Status.OK,
        time_us=Measurement(median=time_us, low=time_us, high=time_us, samples=9, rounds=rounds),
        accuracy=Accuracy(rel_err=1e-4, limit=1e-3),
        **facts,
    )


def recorded(results, *, large=50.0, eager=1.0, streams=1.0, launch=(1.0, 12.0), flash=20.0):
    """A run in which the tile of 64x128x64 takes 24 us and the rest follows from the arguments."""
    with Store.open(results / "three_kernel") as store:
        for (number, tile), (softmax, more), mode in itertools.product(
            enumerate(TILES), SOFTMAX.items(), ("graph", "eager", "streams")
        ):
            base = large if tile.startswith("128") else 24.0 + (2 - number) * 0.5
            factor = {"graph": 1.0, "eager": eager, "streams": streams}[mode]
            store.append(
                trial(
                    "attnsweep",
                    (base + more) * factor,
                    kernel="three_kernel_wgmma",
                    config={"T": number, "S": list(SOFTMAX).index(softmax), "M": mode} | TILED,
                    variant={"tile": tile, "softmax": softmax, "mode": mode},
                    stages_us={"qk": base / 3, "softmax": base / 3 + more, "pv": base / 3},
                    launch_us=launch[tile.startswith("128")],
                )
            )
        store.append(trial("torch_flash", flash))
        store.describe(load_spec(Path("three_kernel_h100")).resolved(), H200)
    return results


def verdict_of(results, words):
    table = claims.Recording(claims.open_run(results / "three_kernel"), claims.SHAPE)
    (found,) = [v for v in claims.verdicts(table) if words in v.claim]
    return found


@pytest.mark.parametrize(
    ("words", "facts", "expected"),
    [
        ("fastest configuration", {}, claims.HOLDS),
        ("fastest configuration", {"large": 12.0}, claims.FAILS),
        ("small tiles beat", {}, claims.HOLDS),
        ("small tiles beat", {"large": 20.0}, claims.FAILS),
        ("launch overhead", {}, claims.HOLDS),
        ("launch overhead", {"launch": (1.6, 1.4)}, claims.FAILS),
        ("graphs change", {"eager": 1.03}, claims.HOLDS),
        ("graphs change", {"eager": 1.8}, claims.FAILS),
        ("several streams", {}, claims.HOLDS),
        ("several streams", {"streams": 0.7}, claims.FAILS),
        ("256 threads", {}, claims.HOLDS),
        ("16 threads", {}, claims.HOLDS),
        ("cannot beat SDPA", {}, claims.HOLDS),
        ("cannot beat SDPA", {"flash": 30.0}, claims.FAILS),
        ("QKᵀ alone", {"large": 90.0}, claims.FAILS),
    ],
)
def test_a_verdict_follows_from_the_figures(tmp_path, words, facts, expected):
    assert verdict_of(recorded(tmp_path, **facts), words).verdict == expected


def test_the_page_has_their_table_with_our_figures(tmp_path):
    page = claims.page(recorded(tmp_path))
    assert "| 64×128×64, 32 threads, 3 passes | 1.65 | 1.50 | 8.0 | 1.0 |" in page
    assert "| PyTorch SDPA | 1.62 | 1.25 | | |" in page
    assert "| unfused PyTorch | 50.00 | – | | |" in page
    assert H200.gpu in page
    assert "not tested" not in page


def test_a_claim_that_the_run_does_not_reach_is_not_tested(tmp_path):
    with Store.open(tmp_path / "three_kernel") as store:
        store.append(trial("torch_flash", 20.0))
        store.describe(load_spec(Path("three_kernel_h100")).resolved(), H200)
    page = claims.page(tmp_path)
    assert claims.HOLDS not in page.replace(claims.FAILS, "")
    assert page.count("not tested") >= 5


def test_bounds_come_from_measured_rates(tmp_path):
    results = recorded(tmp_path)
    rates = {"l2_read": 11e12, "l2_write": 4.65e12, "l2_copy": 8e12}
    (results / "limits.json").write_text(json.dumps({"where": "here", "rates": rates}))
    page = claims.page(results)
    # 33.5 MB of scores: 7.2 us to write, 3.1 to read; 16 x 2 x 1024 x 1024 x 64 FLOP. PV reads V
    # for each of its 16 tiles of a head beside: 67 MB.
    assert "l2 write 4.65 TB/s" in page
    with_ = "three_kernel | BLOCK_M 64, BLOCK_N 128, TILES 4"
    assert f"| qk | 8.0 | {with_} | 2.0 | 7.2 | 1.11 (L2) | 7.2 | 1.11 |" in page
    assert "| pv | 8.0 | three_kernel | BLOCK_M 64 | 2.0 | 3.2 | 2.47 (L2) | 6.1 | 1.31 |" in page


def test_staged_search_is_replayed_on_the_recorded_rows():
    kernel = Kernel(
        "toy",
        summary="",
        params=(Param("A", tuple(range(20)), ""), Param("B", tuple(range(20)), "")),
    )
    for stage in "AB":
        kernel.stage(stage, params=(stage,))(lambda *_: Launch("f", (1, 1, 1), 32, ()))
    space = Space.build(kernel, claims.SHAPE, ARCHS["sm_90a"])
    rows = {
        config: trial(
            "attnsweep",
            float(10 + config["A"] + config["B"]),
            config=dict(config),
            stages_us={"A": 5.0 + config["A"], "B": 5.0 + config["B"]},
        )
        for config in space.configs
    }
    tried, found = claims.staged_on(space, rows)
    assert tried <= 40 + 64
    assert found.config == {"A": 0, "B": 0}
    del rows[space.configs[0]]  # what is not recorded is not found
    assert claims.staged_on(space, rows)[1].time_us.median == 11.0


def test_without_a_recording_there_is_no_page(tmp_path):
    assert claims.page(tmp_path) is None

"""docs/claims.md says what its figures say: verdicts turn with them, gaps are `not tested`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from samples import H200

from attnsweep.family.declare import Kernel, Launch, Param
from attnsweep.family.space import Space
from attnsweep.hardware import ARCHS
from attnsweep.problem import Problem
from attnsweep.spec.load import load_spec
from attnsweep.store.run import Store
from attnsweep.trial import Accuracy, Measurement, Status, Trial

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
import claims
import claims_cd

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


def test_counters_of_system_e_are_shown_once_recorded(tmp_path):
    results = recorded(tmp_path)
    config = claims.claims_e.OWN | {"STAGES": 2}
    with Store.open(results / claims.claims_e.NAME) as store:
        row = trial("attnsweep", 32.0, claims.claims_e.SHAPE, config=config)
        store.append(row.with_(resources=None))
        store.describe(load_spec(Path("wmma_pipeline")).resolved(), H200)
    assert "Hardware counters of system E" not in claims.page(results)
    stage = {"stage": "fwd", "figures": {"tensor_percent": 7.0}, "stalls": {"mio": 3.0}}
    facts = [{"config": config, "problem": claims.claims_e.SHAPE.label, "stages": [stage]}]
    (results / claims.claims_e.NAME / claims.counters.FILE).write_text(json.dumps(facts))
    assert "  - fwd: tensor cores 7 %; warps waited for mio 3.0" in claims.page(results)


def test_without_a_recording_there_is_no_page(tmp_path):
    assert claims.page(tmp_path) is None


def wide_said(results, ffma, tf32x3, *, head_dim=2048, wrong=(), **config):
    """What the page says of a run of two candidates with 64 rows, and of the peers."""
    problem = Problem(1, 4, 4, 64, 64, head_dim, "fp32")
    config = {"BLOCK_M": 32, "SLICES": 16, "SCORES": "workspace"} | config
    with Store.open(results / "wide") as store:
        for math, time_us in (("ffma", ffma), ("tf32x3", tf32x3)):
            row = trial(
                "attnsweep",
                time_us,
                problem,
                kernel="flash_fwd_fp32_wide",
                config=config | {"MATH": math},
                launch_us=2.0,
            )
            status = Status.WRONG if math in wrong else Status.OK
            store.append(row.with_(status=status))
        for peer in claims_cd.WIDE_PEERS:
            row = trial(peer, 48.0, problem)
            store.append(row.with_(status=Status.WRONG) if peer in wrong else row)
        store.describe(load_spec(Path("wide_head")).resolved(), H200)
    limits = {"l2_read": 8e12, "l2_write": 4e12}
    return "\n".join(claims_cd.wide(claims.open_run(results / "wide"), limits))


def test_wide_claims_turn_with_the_figures(tmp_path):
    faster = wide_said(tmp_path / "a", 12.0, 10.0)
    assert "1.20 to 1.20× as fast | **does not hold** |" in faster
    assert "0.30 to 0.30× as fast | **holds** |" in wide_said(tmp_path / "b", 12.0, 40.0)
    # 8.4 MB in 10 us; FFMA: 0.13 GFLOP at 66.9 TFLOP/s.
    assert "| 64 × 2048 | **10.00** | tf32x3 | 48.0 (torch_efficient) | 4.8 | 839 |" in faster
    assert "in up to 0 KB; 0 of them wrong | **does not hold** |" in faster
    assert "1 of them wrong | **holds** |" in wide_said(tmp_path / "c", 12.0, 10.0, wrong=["ffma"])
    assert "839 to 839 GB/s" in faster
    slow = wide_said(tmp_path / "d", 99.0, 80.0)
    assert "1 % of the larger bound of L2 and the products | **holds** |" in slow


@pytest.mark.parametrize(("time_us", "said"), [(10.0, "holds"), (20.0, "does not hold")])
def test_the_aim_at_the_widest_head_is_a_share_of_the_larger_bound(tmp_path, time_us, said):
    page = wide_said(tmp_path, 30.0, time_us, head_dim=8192)
    share = 100 * 4.194304 / time_us  # 33.6 MB at 8 TB/s
    launches = f"launches {200 / time_us:.0f} %"
    textbook = 100 * 4 * 4 * 64 * 64 * 8192 / (256 * 132 * 1980) / time_us  # FFMA at peak
    told = f"({textbook:.0f} % of that of device memory and FFMA)"
    assert f"8192 | {share:.0f} % for 64 rows {told}, of whose time {launches}, the bound" in page
    assert f"| {share:.0f} % | {textbook:.0f} % |" in page
    assert f"on 128 of 132 SMs | **{said}** |" in page


def test_what_a_wide_row_reads_again_and_what_is_left(tmp_path):
    page = wide_said(tmp_path, 30.0, 20.0, head_dim=8192)
    # Q once, K and V for two tiles of rows; 1 MB of partial scores, which 16 slices each read.
    read = 4 * 8192 * 4 * 64 * (1 + 2 * 2) + 16 * 4 * 4 * 16 * 64 * 64
    tiled = read / 8e6
    left = 20 - 2 - tiled
    told = f"2.00 (10 %) | {tiled:.2f} ({5 * tiled:.0f} %) | {left:.2f} ({5 * left:.0f} %) | – |"
    assert f"| 64 × 8192 | 20.00 | workspace | 128 | 128 of 132 | – | {told} – | 20.00 |" in page
    cluster = {"SCORES": "cluster", "SLICES": 4, "BLOCK_M": 16}
    page = wide_said(tmp_path / "cluster", 30.0, 20.0, head_dim=8192, **cluster)
    assert "| 20.00 | cluster | 64 | 64 of 132 |" in page
    assert "| 20.00 | – |" in page


def test_a_peer_over_the_error_limit_is_named_and_not_compared(tmp_path):
    page = wide_said(tmp_path, 12.0, 10.0, wrong=["torch_math", "unfused"])
    assert "| 48.0 (torch_efficient; torch_math, unfused over the error limit) | 4.8 |" in page


def test_the_ladder_has_each_rung_over_the_one_before(tmp_path):
    problem = Problem(1, 8, 8, 512, 512, 64)
    with Store.open(tmp_path / "ladder") as store:
        for kernel, config, time_us in (
            ("naive", {"THREADS": 32}, 100.0),
            ("ladder_1_blocks", {"WARPS": 4}, 20.0),
            ("ladder_5_swizzled", {"BRANCHES": 1}, 4.0),
            ("ladder_5_swizzled", {"BRANCHES": 0}, 6.0),
        ):
            store.append(trial("attnsweep", time_us, problem, kernel=kernel, config=config))
        store.append(trial("torch_flash", 10.0, problem))
        store.describe(load_spec(Path("ladder")).resolved(), H200)
    lines = list(claims_cd.ladder(claims.open_run(tmp_path / "ladder")))
    assert "| 20 | 5.00 | 0.50 | +15.00 |" in lines[3]
    assert "| 4 | 5.00 | 2.50 | -1.00 |" in lines[4]
    assert "without branches" in lines[5]
    assert "| 6 | – | 1.67 | +1.00 |" in lines[5]

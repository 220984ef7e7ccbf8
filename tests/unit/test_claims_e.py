"""System E's page says what its figures say: each verdict turns with the rows that it rests on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import H200

from attnsweep.problem import Problem
from attnsweep.spec.load import load_spec
from attnsweep.store.run import Store, open_run
from attnsweep.trial import Accuracy, Measurement, Resources, Status, Trial

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
import claims_e
from verdict import FAILS, HOLDS, OPEN, PART

LONG = Problem(1, 8, 8, 4096, 4096, 64)
RESOURCES = Resources(
    registers=127,
    spill_bytes=0,
    smem_bytes=76032,
    occupancy=0.23,
    stages={"fwd": {"blocks_per_sm": 3.0}},
)
# Times by the setting that is changed, as the recorded run has them, roughly.
TIMES = {
    "": 32.0,
    "STAGES=1": 33.0,
    "PRODUCER_WARPS=2": 31.8,
    "EARLY=1": 31.8,
    "LAYOUT=1": 16.0,
    "LAYOUT=3": 17.0,
    "O_IN_REGISTERS=1": 29.0,
    "BLOCK_M=32": 31.0,
    "CTAS=132": 33.0,
    "LAYOUT=3 O_IN_REGISTERS=1": 12.0,
    "LAYOUT=3 O_IN_REGISTERS=1 PRODUCER_WARPS=2": 10.5,
}
RUNGS = {"ladder_2_tiles": 34.0, "ladder_3_tensor_cores": 24.0, "ladder_5_swizzled": 4.6}


def trial(provider, time_us, problem, **facts):
    measured = Measurement(median=time_us, low=time_us, high=time_us, samples=1)
    return Trial(
        kernel=claims_e.NAME if provider == "attnsweep" else provider,
        provider=provider,
        config=facts.pop("config", {}),
        problem=problem,
        status=Status.OK,
        time_us=measured,
        accuracy=Accuracy(rel_err=1e-4, limit=1e-3),
        **facts,
    )


def settings(text):
    values = dict(pair.split("=") for pair in text.split())
    return claims_e.OWN | {"STAGES": 2} | {name: int(value) for name, value in values.items()}


def recorded(results, changes=None, *, flash=10.0, long_own=900.0, long_flash=120.0):
    """A run whose rows are TIMES with some changed, or left out where None."""
    times = TIMES | (changes or {})
    with Store.open(results / claims_e.NAME) as store:
        for text, time_us in times.items():
            if time_us is not None:
                config = settings(text)
                row = trial(
                    "attnsweep", time_us, claims_e.SHAPE, config=config, resources=RESOURCES
                )
                store.append(row)
        store.append(trial("torch_flash", flash, claims_e.SHAPE))
        far = trial("attnsweep", long_own, LONG, config=settings(""), resources=RESOURCES)
        store.append(far)
        store.append(trial("torch_flash", long_flash, LONG))
        store.describe(load_spec(Path(claims_e.NAME)).resolved(), H200)
    return results


def sweeps(results):
    return claims_e.sweeps_of(open_run(results / claims_e.NAME))


@pytest.mark.parametrize(
    ("words", "changes", "facts", "expected"),
    [
        ("for both products", {}, {}, HOLDS),
        ("overlap", {}, {}, HOLDS),
        ("overlap", {"STAGES=1": 48.0}, {}, FAILS),
        ("overlap", {"STAGES=1": None}, {}, OPEN),
        ("QKᵀ alone", {}, {}, OPEN),
        ("38×", {}, {}, FAILS),
        ("38×", {}, {"flash": 0.9}, HOLDS),
        ("saturated", {}, {}, FAILS),
        ("saturated", {"": 1.2, "LAYOUT=1": 1.2, "LAYOUT=3": 1.2}, {}, HOLDS),
        ("producer", {}, {}, FAILS),
        ("producer", {"PRODUCER_WARPS=2": 26.0}, {}, PART),
        ("producer", {"PRODUCER_WARPS=2": 16.0}, {}, HOLDS),
        ("producer", {"PRODUCER_WARPS=2": None}, {}, OPEN),
        ("too early", {}, {}, FAILS),
        ("too early", {"EARLY=1": 16.0}, {}, HOLDS),
        ("too short", {}, {}, FAILS),
        ("too short", {"BLOCK_M=32": 20.0}, {}, PART),
        ("too short", {}, {"long_own": 300.0}, PART),
        ("too short", {}, {"long_own": 130.0}, HOLDS),
        ("same bank", {}, {}, HOLDS),
        ("same bank", {"LAYOUT=1": 31.9, "LAYOUT=3": 31.9}, {}, FAILS),
        ("XOR", {}, {}, HOLDS),
        ("XOR", {"LAYOUT=3": 32.0}, {}, FAILS),
        ("epilogue", {}, {}, HOLDS),
        ("epilogue", {"O_IN_REGISTERS=1": 33.0}, {}, FAILS),
        ("persistent", {}, {}, FAILS),
        ("persistent", {"CTAS=132": 20.0}, {}, HOLDS),
        ("10×", {}, {}, FAILS),
    ],
)
def test_a_verdict_follows_from_the_figures(tmp_path, words, changes, facts, expected):
    found = claims_e.verdicts(sweeps(recorded(tmp_path, changes, **facts)), RUNGS)
    (verdict,) = [v for v in found if words in v.claim]
    assert verdict.verdict == expected


def test_ten_times_is_reached_if_every_problem_reaches_it(tmp_path):
    run = recorded(tmp_path, {"LAYOUT=3 O_IN_REGISTERS=1 PRODUCER_WARPS=2": 3.0})
    (near, _) = sweeps(run)
    assert claims_e._tenfold([near], RUNGS).verdict == HOLDS
    assert claims_e._tenfold(sweeps(run), RUNGS).verdict == FAILS  # the long one has no other row


def test_two_blocks_of_their_size_would_fit_if_it_were_smaller(tmp_path, monkeypatch):
    (near, _) = sweeps(recorded(tmp_path))
    assert claims_e._resources(near.own).verdict == FAILS
    monkeypatch.setattr(claims_e, "THEIR_SMEM", 48 * 1024)
    assert claims_e._resources(near.own).verdict == HOLDS


def test_without_their_settings_no_hypothesis_is_answered(tmp_path):
    found = list(claims_e.verdicts(sweeps(recorded(tmp_path, {"": None})), {}))
    assert {v.verdict for v in found} == {OPEN}


@pytest.mark.parametrize(
    ("layout", "head_dim", "ways"),
    [(0, 64, 8), (0, 128, 8), (1, 64, 1), (1, 128, 1), (2, 64, 2), (3, 64, 1), (3, 128, 1)],
)
def test_conflicts_are_counted_from_where_rows_begin(layout, head_dim, ways):
    assert claims_e.conflict_ways({"LAYOUT": layout}, head_dim) == ways


def test_wavefronts_are_those_of_the_kernel():
    own = settings("")
    # A warp: 4 + 16 + 16 fragments of 4 matrices, each 8 ways; 32 + 32 + 16 of scores and 16 of
    # their fragments; 4 passes over 32 of the output. 4 warps, and 16 KB that cp.async writes.
    assert claims_e.tile_wavefronts(own, 64) == 4 * (36 * 4 * 8 + 80 + 16 + 128) + 128
    free = own | {"LAYOUT": 3, "O_IN_REGISTERS": 1}
    assert claims_e.tile_wavefronts(free, 64) == 4 * (36 * 4 + 80 + 16) + 128


@pytest.mark.parametrize(
    ("text", "problem", "tiles", "used"),
    [
        ("", claims_e.SHAPE, 8, 64),  # a block an SM at most
        ("", LONG, 4 * 64, 132),  # 512 blocks: four on some SM
        ("", Problem(1, 8, 8, 512, 512, 64, "fp16", True), 8, 64),  # the last block sees all keys
        ("CTAS=58", LONG, 9 * 64, 58),
    ],
)
def test_the_busiest_sm(text, problem, tiles, used):
    assert claims_e.busiest_tiles(settings(text), problem, 132) == tiles
    assert claims_e.sms_used(settings(text), problem, 132) == used


def test_the_path_takes_the_most_helpful_setting_first(tmp_path):
    (near, far) = sweeps(recorded(tmp_path))
    (line,) = claims_e.path_lines([near, far])
    assert "32.00 µs → LAYOUT=3: 17.00 (1.88×, 57 %) → O_IN_REGISTERS=1: 12.00" in line
    assert line.endswith("PRODUCER_WARPS=2: 10.50 (1.14×, 12 %)")
    missing = {"LAYOUT=3 O_IN_REGISTERS=1": None, "LAYOUT=3": None}
    (near, _) = sweeps(recorded(tmp_path / "other", missing))
    (line,) = claims_e.path_lines([near])
    assert line.endswith("the rows between are missing")


def test_a_setting_is_compared_among_rows_that_have_both(tmp_path):
    (near, far) = sweeps(recorded(tmp_path))
    told = {name: near.with_and_without(name) for name in claims_e.SUSPECTS}
    times = {name: tuple(map(claims_e.us, pair)) for name, pair in told.items() if pair}
    assert times["PRODUCER_WARPS"] == (10.5, 12.0)
    assert times["LAYOUT"] == (12.0, 29.0)  # 10.5 has no row with their layout beside it
    assert times["EARLY"] == (31.8, 32.0)
    assert far.with_and_without("EARLY") is None


def test_the_best_is_the_ranked_winner_which_need_not_be_the_fastest(tmp_path):
    recorded(tmp_path)
    thrifty, fast = "LAYOUT=3 O_IN_REGISTERS=1 BLOCK_N=32", "LAYOUT=3 O_IN_REGISTERS=1 BLOCK_N=128"
    with Store.open(tmp_path / claims_e.NAME) as store:
        for text, time_us, smem_bytes in ((thrifty, 8.01, 1024), (fast, 8.0, 2048)):
            rounds = Measurement(
                median=time_us, low=time_us, high=time_us, samples=8, rounds=[time_us] * 8
            )
            used = RESOURCES.model_copy(update={"smem_bytes": smem_bytes})
            row = trial("attnsweep", 1.0, claims_e.SHAPE, config=settings(text), resources=used)
            store.append(row.with_(time_us=rounds))
    (near, _) = sweeps(tmp_path)
    assert claims_e.us(near.best) == 8.01
    assert claims_e.us(near.with_and_without("BLOCK_N")[0]) == 8.0
    page = "\n".join(claims_e.sections(tmp_path))
    assert "Best is the ranked winner" in page
    assert "| (1,8,512,64) fp16 full | 32.00 | 8.01 |" in page
    assert "| keys a tile, not 64 | 8.00 / 12.00 |" in page


def test_the_page_says_that_counters_are_missing_until_they_are_there(tmp_path):
    results = recorded(tmp_path)
    page = "\n".join(claims_e.sections(results))
    assert "Hardware counters of these rows are not recorded" in page
    assert "| (1,8,512,64) fp16 full | 32.00 | 10.50 | 3.05 | 10.00 | 3.20 | 1.05 |" in page
    assert "| output in registers, scaled and stored once | 1.10×, O_IN_REGISTERS=1 |" in page
    (results / claims_e.NAME / claims_e.counters.FILE).write_text('[{"kernel": "wmma_pipeline"}]')
    assert "not recorded" not in "\n".join(claims_e.sections(results))


def test_the_readme_counts_hypotheses(tmp_path):
    found = claims_e.figures(recorded(tmp_path, {"EARLY=1": 16.0}))
    assert found["wmma_hypotheses"] == "1 of its 4 hypotheses hold, 0 in part"
    assert (found["wmma_own"], found["wmma_ratio"]) == ("32.0", "3.05")
    assert claims_e.sections(tmp_path / "nothing") == []

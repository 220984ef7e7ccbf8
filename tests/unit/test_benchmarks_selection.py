"""The sweep's race, finals and ranking on recorded rounds: the best is kept, regret is small."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
from samples import candidate, rounds_of

from attnsweep.core.trial import Measurement

ROOT = Path(__file__).parent.parent.parent
RUNS = 24


@pytest.fixture(scope="module")
def selection():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("selection")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ("flash_training", "(1,16,16384,128) fp16 causal"),  # held 72 % of the time before
        ("flash_training", "(4,16,4096,128) fp16 full"),  # 52 %
        ("flash_long", "(1,16,32768,64) fp16 full"),  # calls of 7.5 ms, 2.5 % apart
    ],
)
def test_the_best_is_in_the_tie_set_and_the_winner_costs_little(selection, run, problem):
    """First times are 5 % off; of 24 sweeps 95 % may lose the best once."""
    recorded = importlib.import_module("setting").recorded
    (of,) = selection.gather([recorded(run)], problem)
    told = selection.judge(of, RUNS, 0.05)
    assert told["held"] >= RUNS - 1
    assert told["regret_95_percent"] <= 0.5
    assert told["race_s"] + told["finals_s"] < 60


def test_residuals_are_what_is_left_of_the_entry_and_of_the_round(selection):
    pace = [1.0, 1.3, 1.0, 1.1, 1.2, 1.0]

    def timed(us, off):
        rounds = [us * slow * math.exp(each) for slow, each in zip(pace, off, strict=True)]
        return rounds_of(us).model_copy(update={"rounds": rounds})

    quiet = [0.0] * 6
    rows = [candidate("k", 1.0, A=n).with_(time_us=timed(10.0 + n, quiet)) for n in range(3)]
    assert selection.deviation(selection.residuals_of(rows)) == pytest.approx(0, abs=1e-12)
    noisy = candidate("k", 1.0, A=3).with_(time_us=timed(13.0, [0.02, -0.02] * 3))
    assert selection.deviation(selection.residuals_of([*rows, noisy])) > 0.005


def test_true_times_are_those_of_the_finals_then_of_the_race(selection):
    first = Measurement(median=9.0, low=9.0, high=9.0, samples=1)
    rows = [
        candidate("k", 10.0, A=0).with_(first_us=9.0),
        candidate("k", 11.0, A=1).with_(first_us=9.9),
        candidate("k", 1.0, A=2).with_(
            time_us=first, first_us=9.0, race={"against": "k A=0", "ratio": [1.1, 1.21]}
        ),
        candidate("k", 1.0, A=3).with_(time_us=first, first_us=18.0),
    ]
    levels = selection.levels_of(rows)
    assert levels == pytest.approx(
        {"k A=0": 10.0, "k A=1": 11.0, "k A=2": 10 * math.sqrt(1.331), "k A=3": 20.0}
    )


RECORDED = json.loads((ROOT / "results/h200/selection.json").read_text())
# Its rounds are 4 % apart, so that a sweep may keep the second best, 1.1 % slower.
MISSED = ["h100-80gb-hbm3/between_short (4,24,350,128) fp16 causal"]


def test_every_problem_of_every_recorded_run_was_simulated(selection):
    """Those of two candidates apart, of which the sweep has nothing to choose by a race."""
    names = {"/".join(path.parent.parts[-2:]) for path in ROOT.glob("results/*/*/trials.jsonl.gz")}
    assert {each["run"] for each in RECORDED["of"]} == names
    assert len(RECORDED["of"]) == RECORDED["problems"]
    missed = [f"{each['run']} {each['problem']}" for each in RECORDED["of"] if not each["reached"]]
    assert missed == MISSED
    assert RECORDED["reached"] == RECORDED["problems"] - len(missed)
    for name in ("h100-80gb-hbm3/flash_dims", "h200/flash_dims_h200"):  # one, and one of two
        there = selection.gather([ROOT / "results" / name])
        best = {each.problem.label: round(each.best_us, 3) for each in there}
        assert best == {e["problem"]: e["best_us"] for e in RECORDED["of"] if e["run"] == name}


def test_the_docs_say_what_was_simulated():
    text = " ".join((ROOT / "docs/measuring.md").read_text().split())
    of = RECORDED["of"]
    usual, worst = (
        max(each[name] for each in of) for name in ("regret_95_percent", "largest_regret_percent")
    )
    held = min(each["held"] for each in of)
    assert RECORDED["first_noise"] == 0.05
    assert f"By simulation on {len(of)} recorded problems" in text
    assert f"first times 5 % off, {RECORDED['runs']} sweeps each" in text
    assert f"at most {usual:.2f} % slower than the true best in 95 of 100 sweeps" in text
    assert (
        f"{worst:.1f} % in the worst of all, and the tie set holds the best in at least {held}"
        in text
    )

"""What docs/explanation/fp8.md says of the recorded runs is in them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from attnsweep import open_run, rank
from attnsweep.core.trial import OURS

ROOT = Path(__file__).parent.parent.parent
PAGE = " ".join((ROOT / "docs/explanation/fp8.md").read_text().split())


def ratios_at_fa3s_error(card):
    """Time of FlashAttention-3 over that of our fastest config that errs 2 % more at most."""
    run = open_run(ROOT / "results" / card / "fp8_h100")
    ratios = []
    for _, rows in rank(run.trials, run.environment).groupby("problem"):
        theirs = rows[rows["provider"] == "flash_attn_3_fp8"].iloc[0]
        ours = rows[(rows["provider"] == OURS) & rows["rank"].notna()]
        alike = ours[ours["rel_err"] <= 1.02 * theirs["rel_err"]]
        ratios.append(theirs["time_us"] / alike["time_us"].min())
    assert len(ratios) == 12
    return ratios


@pytest.mark.parametrize(
    ("card", "name"), [("h100-80gb-hbm3", "an H100"), ("h200", "an H200")], ids=["H100", "H200"]
)
def test_how_fast_we_are_at_flash_attention_3s_error(card, name):
    ratios = ratios_at_fa3s_error(card)
    faster, slower = sum(ratio > 1 for ratio in ratios), 1 / min(ratios) - 1
    said = f"on {name} {min(ratios):.2f} to {max(ratios):.2f} times as fast, faster on {faster}"
    assert f"{said} and up to {100 * slower:.0f} % slower on the other {12 - faster}" in PAGE


def less_headroom(card):
    """By how much `HEADROOM=2` is slower than 5, and how much more exact, on each shape."""
    ours = defaultdict(list)
    for trial in open_run(ROOT / "results" / card / "fp8_h100").trials:
        if trial.provider == OURS and trial.time_us is not None and trial.accuracy is not None:
            found = trial.time_us.median, trial.accuracy.timed_err, trial.config
            ours[trial.problem].append(found)
    slower, errors = [], {2: [], 5: []}
    for rows in ours.values():
        best = {
            room: min((us, error) for us, error, c in rows if c["HEADROOM"] == room)
            for room in (2, 5)
        }
        slower.append(best[2][0] / best[5][0] - 1)
        for room, (_, error) in best.items():
            errors[room].append(error)
    less = [1 - a / b for a, b in zip(errors[2], errors[5], strict=True)]
    return sorted(slower), sorted(less)


def test_what_less_headroom_costs_and_what_it_gains_in_the_worst_row():
    slower, less = less_headroom("h200")
    assert (
        f"was recorded on an H200: it is {100 * min(slower):.0f} to {100 * max(slower):.0f} %"
        in PAGE
    )
    assert abs(median(less)) < 0.01
    assert (
        f"the same at the median of the twelve shapes, and {100 * less[-1]:.0f} % smaller" in PAGE
    )
    slower, less = less_headroom("h100-80gb-hbm3")
    costs = f"{max(0, 100 * slower[0]):.0f} to {100 * slower[-1]:.0f} %"
    assert f"on an H100 it is {costs} slower, and as exact at the median" in PAGE
    assert abs(median(less)) < 0.01

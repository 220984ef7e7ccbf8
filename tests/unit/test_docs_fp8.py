"""What docs/explanation/fp8.md says of the recorded runs is in them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from attnsweep import open_run

ROOT = Path(__file__).parent.parent.parent
PAGE = " ".join((ROOT / "docs/explanation/fp8.md").read_text().split())


def rows_of(card):
    """By problem: the time and the error of each row of ours, and those of FlashAttention-3."""
    ours, fa3 = defaultdict(list), {}
    for trial in open_run(ROOT / "results" / card / "fp8_h100").trials:
        if trial.time_us is None or trial.accuracy is None:
            continue
        found = trial.time_us.median, trial.accuracy.timed_err
        if trial.provider == "attnsweep":
            ours[trial.problem].append((*found, trial.config))
        elif trial.provider == "flash_attn_3_fp8":
            fa3[trial.problem] = found
    assert len(ours) == len(fa3) == 12
    return ours, fa3


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("h100-80gb-hbm3", "our fastest config is {} times as fast on the twelve shapes of the"),
        ("h200", "on an H200 it is {} times as fast, and faster on {}."),
    ],
)
def test_how_fast_we_are_at_flash_attention_3s_error(card, said):
    ours, fa3 = rows_of(card)
    ratios = [
        us / min(time_us for time_us, own, _ in ours[problem] if own <= 1.02 * error)
        for problem, (us, error) in fa3.items()
    ]
    faster = sum(ratio > 1 for ratio in ratios)
    assert said.format(f"{min(ratios):.2f} to {max(ratios):.2f}", faster) in PAGE
    if card != "h200":
        assert f"of an H100, and faster on {faster} of them;" in PAGE


def test_what_less_headroom_costs_and_what_it_gains_in_the_worst_row():
    ours, _ = rows_of("h200")
    slower, errors = [], {2: [], 5: []}
    for rows in ours.values():
        best = {
            room: min((us, error) for us, error, c in rows if c["HEADROOM"] == room)
            for room in (2, 5)
        }
        slower.append(best[2][0] / best[5][0] - 1)
        for room, (_, error) in best.items():
            errors[room].append(error)
    assert f"was recorded on an H200: {100 * min(slower):.0f} to {100 * max(slower):.0f} %" in PAGE
    less = sorted(1 - a / b for a, b in zip(errors[2], errors[5], strict=True))
    assert abs(median(less)) < 0.01
    assert f"as exact at the median of the twelve shapes, {100 * less[-1]:.0f} % more" in PAGE

"""docs/benchmarks.md says what its files say: a missed target, and one that too few runs tested."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
import measured

RECORDED = Path(__file__).parent.parent.parent / "results" / "h200"


def page_of(tmp_path, name, edit):
    """The page of one recorded file, changed by `edit`."""
    found = json.loads((RECORDED / f"{name}.json").read_text())
    edit(found)
    (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return [line for line in measured.page(tmp_path).splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(
    ("processes", "same", "ties", "said"),
    [
        (20, 20, 20, ["reached", "reached"]),
        (20, 19, 20, ["reached", "reached"]),
        (20, 18, 19, ["**missed**", "**missed**"]),
        (16, 16, 16, ["**not enough runs**", "**not enough runs**"]),
        (16, 15, 15, ["**missed**", "**missed**"]),
    ],
)
def test_winners_of_fresh_processes(tmp_path, processes, same, ties, said):
    def edit(found):
        counts = {"processes": processes, "same_winner": same, "ties_hold_oracle_best": ties}
        found.update(counts, largest_regret_percent=0.6, race_launch_share=0.1)

    lines = page_of(tmp_path, "stability", edit)
    assert [line.split(" | ")[-1].removesuffix(" |") for line in lines[:2]] == said
    assert lines[2].endswith("| 0.6 % at most | **missed** |")
    assert lines[3].endswith("| 10.0 % | reached |")


@pytest.mark.parametrize(("share", "said"), [(0.95, "reached"), (0.94, "**missed**")])
def test_noise(tmp_path, share, said):
    def edit(found):
        found["cases"] = found["cases"][:1]
        found["cases"][0]["pairs"]["share_within"] = share

    (line,) = page_of(tmp_path, "noise", edit)
    assert line.endswith(f"| {said} |")


def test_a_tool_that_failed_has_no_ratio_and_is_no_win(tmp_path):
    def edit(found):
        found["times_attnsweep"] = {"hundred_ms": 1.9}

    tuner, each = page_of(tmp_path, "kernel_tuner", edit)
    assert tuner.endswith("| – | **missed** |")
    assert each.endswith("1.9× | **missed** |")


@pytest.mark.parametrize(
    ("comparisons", "alarms", "said"),
    [(1000, 0, "reached"), (999, 0, "**not enough runs**"), (1000, 1, "**missed**")],
)
def test_alarms_of_the_gate(tmp_path, comparisons, alarms, said):
    def edit(found):
        found["itself"].update(comparisons=comparisons, false_alarms=alarms)
        found["slowed"]["totals"]["2 %"].update(comparisons=20, detected=19)
        found["slowed"]["totals"]["5 %"].update(comparisons=20, detected=19)

    lines = page_of(tmp_path, "gate", edit)
    assert lines[0].endswith(f"| {said} |")
    assert lines[1].endswith("| reached |")
    assert lines[2].endswith("| **missed** |")


def test_sections_of_files_that_are_not_there_are_left_out(tmp_path):
    assert "##" not in measured.page(tmp_path)
    assert measured.page(RECORDED).count("\n## ") == len(measured.PAGES)

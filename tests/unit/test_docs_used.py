"""The tutorial's figures come from what was recorded."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PREFILL = {
    "eager": {"before_ms": 20.04, "after_ms": 15.96, "gain": 1.25, "rounds": 20},
    "graph": {"failed": "RuntimeError: no"},
    "error": {"sdpa": 0.0123, "flash": 0.0123, "package": 0.0121},
}
TRAINING = {
    "tokens": 1024,
    "sdpa": {"error": 0.01},
    "package": {"error": 0.0101},
    "time": {"before_ms": 51.04, "after_ms": 50.04, "gain": 1.02, "flash_ms": 49.46},
}
RECORDED = {
    "environment": {
        "gpu": "NVIDIA H100 80GB HBM3",
        "driver": "580.1",
        "packages": {"torch": "2.11.0"},
        "date": "2026-11-22T07:55:16Z",
    },
    "models": {
        "llama": {
            "prefill": {"1024": PREFILL, "4096": {}},
            "training": TRAINING,
            "greedy": {"tokens": 32, "same_as_sdpa": {"package": 31, "float64": 9}},
        },
        "diffusion": {"prefill": {}},
    },
}


@pytest.fixture
def used():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("used")
    sys.path.remove(str(ROOT / "scripts"))


def test_times_errors_and_steps_of_models(used, tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps(RECORDED))
    text = used.models(path)
    assert "| Llama | 1024 | 20.0 → 16.0 ms, 1.25× | – | – | 1.23% | 1.21% |" in text
    assert "| Llama | 4096 | – | – | – | – | – |" in text
    assert "gradients of a step on 1024 tokens 1.01% off" in text
    assert "51.0 → 50.0 ms, 1.02× (49.5 ms by PyTorch's flash); 31 of" in text
    assert "31 of the first 32 greedy tokens as before (attention in float64: 9)" in text
    assert "diffusion" not in text
    assert text.endswith("NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11.0, 2026-11-22.\n")


def test_the_rule_is_judged_on_the_recorded_run_of_each_card(used, tmp_path):
    """With one recorded run in the place of the held-out one."""
    for name in ("flash_training", "batched"):
        shutil.copytree(ROOT / used.CARD / name, tmp_path / "one" / name)
    shutil.copytree(ROOT / used.CARD / "h100", tmp_path / "one/held_out")
    cards = {"one": ["one/flash_training", "one/batched"], "another": ["another/batched"]}
    *_, row = used.judged(tmp_path, cards).splitlines()
    assert row.startswith("| one | ")
    assert row.count("%") == 7
    assert "another" not in row


def test_training_steps(used, tmp_path):
    times = {"step": 2069.1, "forward": 476.3, "backward": 1543.0}
    both = {"pytorch": times, "package": {**times, "step": 1998.4, "forward": 373.4}}
    made = RECORDED["environment"]
    modes = {"eager": {**both, "ratio": [1.034, 0.972, 1.067]}}
    modes["compiled"] = {**both, "ratio": [0.966, 0.9, 1.2]}
    row = {"shape": "(2,16,4096,128) causal", "code": "near", **modes}
    path = tmp_path / "training.json"
    path.write_text(
        json.dumps({"environment": made, "torch": "2.11.0", "rounds": 31, "rows": [row]})
    )
    _, _, line, _, origin = used.training(path).splitlines()
    assert line == (
        "| (2,16,4096,128) causal | `near` | 2069 → 1998 | 1.03 (0.97 to 1.07) | "
        "2069 → 1998 | 0.97 (0.90 to 1.20) | 476 → 373 | 1543 → 1543 |"
    )
    assert origin == "NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11.0, 2026-11-22; 31 rounds."


def test_the_page_sums_up_the_training_steps(used):
    rows = json.loads((ROOT / used.CARD / "training.json").read_text())["rows"]
    found = [(row["code"] == "short_training", row[m]) for row in rows for m in used.STEPS]
    served, short = ([each for over, each in found if over == kind] for kind in (False, True))

    def span(values):
        return f"{min(values):.2f} to {max(values):.2f}"

    faster = [each["pytorch"]["forward"] / each["package"]["forward"] for each in served]
    even = sum(each["ratio"][1] <= 1 <= each["ratio"][2] for each in served)
    assert max(each["ratio"][0] for each in short) < 1
    page = " ".join((ROOT / "docs/how-to/use.md").read_text().split())
    for told in (
        f"steps are {span([each['ratio'][0] for each in served])} times as fast at the median",
        f"the forward is {span(faster)} times as fast",
        f"the interval holds 1 in {even} of {len(served)} rows",
        f"The medians of the ratio are {span([each['ratio'][0] for each in short])}, all below 1",
    ):
        assert told in page

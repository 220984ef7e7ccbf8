"""The README's pictures show the recorded runs, and the pages it links to are there."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("vl_convert", reason="needs the html extra: vl-convert-python")

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import pictures

    return pictures


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_speeds_are_those_of_the_run(pictures, theme):
    values = pictures.speed(theme)["data"]["values"]
    won = pictures.best_of(pictures.SPEEDS, "flash_training", "attnsweep")
    ours = {v["problem"]: v["tflops"] for v in values if "ours" in v["of"]}
    assert list(ours) == [row.problem.label for row in won]
    for row in won:
        assert ours[row.problem.label] == pytest.approx(row.problem.flops / row.us / 1e6, rel=0.01)
    quiet = pictures.SPEEDS.find("flash_training", provider=list(pictures.BASELINES), take="all")
    assert len(values) == len(won) + len(quiet)  # a noisy baseline is not drawn
    assert {value["of"] for value in values} == {"flash_fwd_wgmma (ours)", *pictures.BASELINES.values()}


def test_what_the_readme_shows_and_links_is_there(pictures):
    shown = re.findall(r'(?:srcset|src)="(.*?)"', README)
    assert len(shown) == 2
    for name in shown:
        ElementTree.parse(ROOT / name)

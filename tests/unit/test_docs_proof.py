"""What docs/explanation/numerics.md says of the share of proof is what runs printed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PARTS = ("inputs", "candidates", "repeated calls", "short turns", "replays")
PRINTED = re.compile(
    r"\$ attnsweep run configs/(\w+\.yaml) --exhaustive\n"
    r"took (\d+) s; ([\d.]+) s of them proved outputs right \((.*)\)\n"
)


SHOWN = 6  # the latest runs


def test_each_row_of_the_parts_is_what_a_run_printed():
    page = (ROOT / "docs/explanation/numerics.md").read_text()
    runs = PRINTED.findall((ROOT / "results/h100-80gb-hbm3/proof.txt").read_text())[-SHOWN:]
    assert len(runs) == SHOWN
    for spec, took, proof, parts in runs:
        of = dict(part.rsplit(" ", 1) for part in parts.split(", "))
        share = f"{100 * float(proof) / float(took):.0f} %"
        waits = of.get("waits for NumPy", "–")
        cells = [f"`{spec}`", took, proof, share, waits, *(of[part] for part in PARTS)]
        assert f"| {' | '.join(cells)} |" in page

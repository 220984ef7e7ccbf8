"""Figures on the generated pages, recomputed from the recorded rows without any of our code."""

import json
import lzma
import sys
from pathlib import Path
from statistics import median

import pandas
import pytest

from attnsweep.choose.stats import ratio_interval

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
from records import Book

import docs

RESULTS = docs.ROOT / docs.RESULTS
BOOK = Book(RESULTS)


def table(text, header):
    """The cells of the table whose header begins so."""
    lines = text[text.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split(" | ")] for line in lines]


def recorded(run):
    """Raw rows; the last of each candidate counts."""
    rows = {}
    for line in lzma.decompress((RESULTS / BOOK.place(run) / "trials.jsonl.xz").read_bytes()).splitlines():
        row = json.loads(line)
        rows[json.dumps([row["problem"], row["kernel"], row["provider"], row["config"]])] = row
    return [row for row in rows.values() if row.get("time_us")]


def shown(row):
    p = row["problem"]
    keys = str(p["seqlen_q"]) + (f"x{p['seqlen_k']}" if p["seqlen_k"] != p["seqlen_q"] else "")
    mask = "causal" if p["causal"] else "full"
    return f"({p['batch']},{p['heads']},{keys},{p['head_dim']}) {p['dtype']} {mask}"


NAMES = {
    f"{name}_us"
    for name in (
        *("torch_cudnn", "cudnn", "flash_attn_3", "triton_flash"),
        *("torch_flash", "torch_efficient", "torch_math", "unfused"),
    )
}


def known_us(row):
    """What is known of a baseline: its median, or the fastest round of a noisy one."""
    time = row["time_us"]
    if row["status"] == "noisy":
        return min([*time["rounds"], *time.get("discarded", []), time["low"]])
    return time["median"]


def paired(baseline, row):
    """The times of both in the rounds that both ran: a baseline timed again began later."""
    rounds = {}
    for each in (baseline, row):
        first = each["time_us"].get("first_round", 0)
        for number, us in enumerate(each["time_us"]["rounds"], start=first):
            rounds.setdefault(number, []).append(us)
    return [both for both in rounds.values() if len(both) == 2]


@pytest.mark.parametrize("run", ["flash_short", "flash_training", "flash_dims", "flash_long"])
def test_each_shape_is_next_to_its_baselines(run):
    table = pandas.read_csv(docs.ROOT / docs.PAGES["performance csv"], dtype=str)
    table = table[(table["card"] == "NVIDIA H200") & (table["spec"] == run)]
    lines = [line.dropna() for _, line in table.iterrows()]
    rows = recorded(run)
    assert {line["problem"] for line in lines} == {shown(row) for row in rows}
    for line in lines:
        ours = line["ours_us"]
        here = [row for row in rows if shown(row) == line["problem"]]
        times = {row["provider"]: row for row in here if row["provider"] != "attnsweep"}
        assert {f"{name}_us" for name in times} == NAMES & {*line.index}
        for name, row in times.items():
            assert line[f"{name}_us"] == f"{row['time_us']['median']:.4g}"
            assert (f"{name} noisy" in line.get("notes", "")) == (row["status"] == "noisy")
        mine = [row["time_us"]["median"] for row in here if row["kernel"] == "flash_fwd_wgmma"]
        best = min(us for us in mine if f"{us:.4g}" == ours)
        assert best < 1.1 * min(mine)  # a time without rounds leads only if it is much faster
        known = {name: known_us(row) for name, row in times.items()}
        fastest = min(known, key=known.get)
        assert line["base"] == fastest
        told = set()
        for row in here:
            us = row["time_us"]["median"]
            if row["kernel"] != "flash_fwd_wgmma" or f"{us:.4g}" != ours:
                continue
            if times[fastest]["status"] == "noisy":
                told.add(("bound", f"{known[fastest] / us:.4g}"))
                continue
            ratios = [a / b for a, b in paired(times[fastest], row)]
            low, high = ratio_interval(ratios, [1.0] * len(ratios)) if ratios else (0, 0)
            told.add(("rounds", *(f"{x:.4g}" for x in (median(ratios or [0]), low, high))))
        names = ("x_base", "x_base_low", "x_base_high")
        numbers = (line[name] for name in names if name in line)
        assert (line["x_base_of"], *numbers) in told


def test_stale_pages_are_named_and_written(tmp_path):
    pages = [("a.md", "new\n"), ("b.md", "b\n")]
    (tmp_path / "a.md").write_text("old\n")
    (tmp_path / "b.md").write_text("b\n")
    assert [docs.renew(pages, tmp_path, check=check) for check in (True, False, True)] == [["a.md"], ["a.md"], []]
    assert (tmp_path / "a.md").read_text() == "new\n"

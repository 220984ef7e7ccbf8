"""The site's table of every recorded problem: what the hook writes, and what its script does in a browser."""

import csv
import importlib.util
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from browsers import browser, drawn

DOCS = Path(__file__).parents[2] / "docs"
CSV = DOCS / "performance.csv"


def hook():
    spec = importlib.util.spec_from_file_location("csv_tables", DOCS / "csv_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    return [*csv.DictReader(CSV.read_text(encoding="utf-8").splitlines())]


def test_each_recorded_problem_has_a_row_of_one_line(rows):
    """A column of 21 parameters made each row 321 px high."""
    text = hook().table(rows)
    found = re.findall(r"<tr data-.*?</tr>", text)
    assert len(found) == len(rows)
    assert "NVIDIA" not in text
    assert not any("BLOCK_N=" in row for row in found)


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("(1,16,1024,64) fp16 causal", ("forward", "causal", "fp16", "64", "causal")),
        ("(1,32/8,1x4096,128) bf16 full", ("forward", "full", "bf16", "128", "few queries")),
        ("(2,8,512,192/128) bf16 full backward", ("backward", "full", "bf16", "192/128", "backward")),
        (
            "(8,32,512,64) bf16 boolean(window(127,0),item) padded(right,40) sinks",
            ("forward", "boolean padded sinks", "bf16", "64", "with padded"),
        ),
        ("(1,16,4096,128) e4m3_tensor causal", ("forward", "causal", "e4m3_tensor", "128", "FP8")),
    ],
)
def test_a_row_says_what_filters_and_the_plot_ask(problem, told):
    facts = hook().facts_of({"problem": problem, "card": "NVIDIA H100 80GB HBM3", "x_base": "1.2"})
    assert tuple(facts[name] for name in ("op", "mask", "dtype", "head_dim", "group")) == told
    assert (facts["card"], facts["ratio"]) == ("H100", "1.2")


DRIVER = """<script>
addEventListener("DOMContentLoaded", () => setTimeout(() => {
  const said = () => document.querySelector(".said").textContent;
  const shown = () => [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
  const choose = (name, value) => {
    const select = document.querySelector(`select[name=${name}]`);
    select.value = value;
    select.dispatchEvent(new Event("change"));
  };
  const told = { all: said(), dots: document.querySelectorAll("circle").length };
  choose("op", "backward"); choose("card", "H100");
  told.backward = [said(), shown().length, document.querySelectorAll("circle").length];
  const heading = document.querySelectorAll("th")[5];
  for (const way of ["up", "down"]) {
    heading.click();
    told[way] = shown().map((row) => Number(row.cells[5].textContent));
  }
  const pre = document.body.appendChild(document.createElement("pre"));
  pre.id = "told";
  pre.hidden = true;
  pre.textContent = JSON.stringify(told);
  document.documentElement.dataset.drawn = "yes";
}, 50));
</script>"""


@browser
def test_a_browser_filters_sorts_and_draws_it_without_a_network(rows, tmp_path):
    for name in ("javascripts/tables.js", "stylesheets/site.css", "../attnsweep/reports/assets/sort.js"):
        shutil.copy(DOCS / name, tmp_path)
    scripts = '<script src="sort.js"></script><script src="tables.js"></script>'
    page = f"""<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="site.css">
<body><article class="md-typeset">{hook().table(rows)}</article>{scripts}{DRIVER}"""
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    pages, said, asked = drawn(tmp_path, {"page.html": "width:1280px"})
    assert (said, asked) == ([], [])
    found = pages["page.html"]
    assert found.width <= 1280
    assert found.cut == []
    told = json.loads(re.search(r'<pre id="told"[^>]*>(.*?)</pre>', found.html)[1])
    ratios = [float(row["x_base"]) for row in rows if row["x_base"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert told["all"].startswith(f"{len(rows)} of {len(rows)} problems · {mean:.2f}×")
    assert told["dots"] == len(ratios)
    own = [float(r["x_base"]) for r in rows if "backward" in r["problem"] and "H100" in r["card"]]
    assert told["backward"][1:] == [len(own), len(own)]
    assert told["up"] == sorted(own)
    assert told["down"] == sorted(own, reverse=True)

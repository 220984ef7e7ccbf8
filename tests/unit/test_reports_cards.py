"""The report of a run of several cards."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from samples import H200, PROBLEM, baseline, candidate, full_run

from attnsweep.reports import tables
from attnsweep.reports.cards import UNKNOWN, by_card
from attnsweep.reports.sections import sections_of

OTHER = replace(PROBLEM, batch=2)


def on(uuid, *rows):
    return [row.with_(machine={"uuid": uuid, "gpu": "NVIDIA H200"}) for row in rows]


def a(time_us, **changes):
    return candidate("flash", time_us, BLOCK_M=64).with_(**changes)


def b(time_us, **changes):
    return candidate("flash", time_us, BLOCK_M=128).with_(**changes)


def run_of(*rows):
    return full_run(trials=list(rows), environment=H200)


def report(run, width=100):
    out = io.StringIO()
    tables.print_run(run, Console(file=out, width=width))
    return out.getvalue()


TWO = [
    *on("aaaa", a(10.0), b(12.0), baseline("torch_cudnn", 20.0)),
    *on("bbbb", a(30.0, problem=OTHER), b(25.0, problem=OTHER)),
]


def test_each_card_has_a_line_with_its_problems_and_winners():
    text = report(run_of(*TWO))
    [first] = [line for line in text.splitlines() if line.startswith("aaaa")]
    assert first.split() == ["aaaa", "1", "NVIDIA", "H200", "2.00", "1", "flash"]
    [second] = [line for line in text.splitlines() if line.startswith("bbbb")]
    assert second.split() == ["bbbb", "1", "NVIDIA", "H200", "–", "1", "flash"]
    assert "no problem was measured on two cards" in " ".join(text.split())


def test_the_same_is_data_and_markdown():
    run = run_of(*TWO)
    found = tables.to_json(run)["by_card"]
    assert [card["uuid"] for card in found["cards"]] == ["aaaa", "bbbb"]
    assert found["cards"][1]["winners"] == {
        OTHER.label: {"kernel": "flash", "config": {"BLOCK_M": 128}, "time_us": 25.0}
    }
    markdown = tables.files(run)["ranking.md"]
    assert "## Cards" in markdown
    assert "| aaaa | 1 | NVIDIA H200 | 2.00 | 1 flash |" in markdown
    assert UNKNOWN in markdown


@pytest.mark.parametrize("uuids", [("aaaa", "aaaa"), (None, "aaaa"), (None, None)])
def test_a_run_of_one_card_says_nothing_of_cards(uuids):
    rows = [*on(uuids[0], a(10.0)), *on(uuids[1], b(12.0, problem=OTHER))]
    run = run_of(*rows)
    assert by_card(sections_of(run)) == []
    assert "by_card" not in tables.to_json(run)
    assert "cards" not in report(run).lower()

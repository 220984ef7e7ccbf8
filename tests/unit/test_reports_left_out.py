"""What a table leaves out is said beside it: candidates never tried, and rows not judged."""

from __future__ import annotations

import io

import pytest
from pages import visible
from rich.console import Console
from samples import baseline, candidate, failed, full_run

from attnsweep.choose.ranking import rank
from attnsweep.core.length import slower_on
from attnsweep.core.trial import Accuracy, Status
from attnsweep.family.discover import discover
from attnsweep.reports import html, tables
from attnsweep.reports.explain import explain
from attnsweep.reports.explain_text import lines
from attnsweep.reports.notes import judged_line
from attnsweep.reports.text import by_problem

SHORT = "(1,32,16384,128) bf16 causal"
RIGHT = Accuracy(rel_err=1e-4, limit=1e-3)


def judged(row, share):
    return row.with_(accuracy=RIGHT.model_copy(update={"judged": share}))


def long_run(*shares):
    """A run whose candidates were judged in these shares, with others that were not tried."""
    rows = [
        judged(candidate("naive", 30.0 + n, THREADS=32 * (n + 1)), share)
        for n, share in enumerate(shares)
    ]
    rows += [
        failed("naive", Status.PRUNED, slower_on(SHORT, 3000.0 + n, 2800.0), THREADS=n).with_(
            accuracy=RIGHT
        )
        for n in (33, 34, 35)
    ]
    rows += [failed("naive", Status.PRUNED, "spills 8 bytes, the spec allows 0", THREADS=999)]
    return full_run(trials=[*rows, judged(baseline("torch_flash", 40.0), 0.01)])


def said(*shares):
    (section,) = by_problem(rank(long_run(*shares).trials, None), None)
    return judged_line(section.rows)


@pytest.mark.parametrize(
    ("shares", "span"),
    [((0.1301,), "13"), ((0.13, 0.13), "13"), ((0.14, 0.125), "12–14"), ((0.0021,), "0.21")],
)
def test_the_share_of_rows_that_float64_judged_is_said(shares, span):
    assert said(*shares) == (
        f"float64 judged {span}\u00a0% of the rows of every head; of the others it is only known "
        "that they are numbers, the same in all calls"
    )


def flat(text):
    return " ".join(text.replace("\u00a0", " ").split())


TEXT = "float64 judged 13 % of the rows of every head; of the others it is only known that they"


def test_the_terminal_says_it():
    out = io.StringIO()
    tables.print_run(long_run(0.13), Console(file=out, width=100))
    assert TEXT in flat(out.getvalue())
    out = io.StringIO()
    tables.print_run(long_run(None), Console(file=out, width=100))
    assert "float64 judged" not in out.getvalue()


def test_ranking_md_says_it():
    assert f"- {TEXT}" in flat(tables.files(long_run(0.13))["ranking.md"])
    assert "float64 judged" not in tables.files(long_run(None))["ranking.md"]


def test_the_page_says_it():
    pytest.importorskip("vl_convert", reason="needs the html extra: vl-convert-python")
    pytest.importorskip("jinja2", reason="needs the html extra: Jinja2")
    assert TEXT in flat(visible(html.render(long_run(0.13))))
    assert "float64 judged" not in html.render(long_run(None))


def test_json_has_the_share_of_each_row():
    (problem,) = tables.to_json(long_run(0.13, None))["problems"]
    of = {(r["kernel"], r["config"].get("THREADS")): r["judged"] for r in problem["ranking"]}
    assert of["naive", 32] == 0.13
    assert of["naive", 64] is None
    assert of["torch_flash", None] == 0.01


def test_explain_says_it_of_the_candidate():
    run = long_run(0.13, None)
    (sampled,) = explain(run, ["THREADS=32"], None, discover())
    assert f"F{TEXT[1:]}" in flat(" ".join(line.plain for line in lines(sampled, 120)))
    assert sampled.to_json()["candidate"]["judged"] == 0.13
    (whole,) = explain(run, ["THREADS=64"], None, discover())
    assert "loat64 judged" not in "".join(line.plain for line in lines(whole, 120))
    assert whole.to_json()["candidate"]["judged"] is None


def test_candidates_that_were_slower_on_a_shorter_problem_are_counted_apart():
    out = io.StringIO()
    tables.print_run(long_run(0.13), Console(file=out, width=160), top=1)
    text = flat(out.getvalue())
    assert f"4 more: 3 not tried: slower on {SHORT}, 1 pruned (spills 1); " in text
    (not_tried,) = explain(long_run(0.13), ["THREADS=33"], None, discover())
    text = flat(" ".join(line.plain for line in lines(not_tried, 160)))
    assert f"slower on {SHORT}: 3033 µs, where the best takes 2800" in text

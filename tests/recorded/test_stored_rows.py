"""Rows read by msgspec are those that pydantic reads, and rows read twice give the same reports."""

import gc
import io
import json
import lzma
from dataclasses import replace

import pytest
from rich.console import Console

from attnsweep.core.files import shipped
from attnsweep.core.trial import Trial
from attnsweep.family.discover import discover
from attnsweep.regress import recorded
from attnsweep.reports import compare, explain, tables
from attnsweep.reports import html as page
from attnsweep.reports.sections import sections_of
from attnsweep.store import rows
from attnsweep.store.rows import RowReader, StoredRows, row_bytes
from attnsweep.store.run import PACKED, _opened, find_runs, open_run

RESULTS = shipped("results")
RUNS = [RESULTS / name for name in ("h100-80gb-hbm3/between_short", "h200/fp8_h100", "h200/value_dims")]


def lines_of(run):
    with lzma.open(run / PACKED) as file:
        return file.readlines()


@pytest.mark.parametrize(
    "run",
    [run for run in find_runs(RESULTS) if run.parent.name != "replay"],
    ids=lambda run: f"{run.parent.name}-{run.name}",
)
def test_rows_are_those_that_pydantic_reads(run):
    reader = RowReader()
    for line in lines_of(run)[::7]:
        row, expected = reader.row(line), Trial.model_validate_json(line)
        assert row == expected
        assert row_bytes(row) == row_bytes(expected)


@pytest.mark.parametrize("name", ["", "a b", "made", "with_", "key", "class", "__slots__"])
def test_a_fact_of_any_name_is_kept(name):
    reader = RowReader()
    for number, line in enumerate(lines_of(RUNS[1])[:3]):
        row = reader.row(json.dumps({**json.loads(line), name: number}).encode())
        assert row.model_extra[name] == number


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_most_lines_need_no_pydantic(run, monkeypatch):
    """Only those that first have a fact of another version."""
    read, slow = RowReader._as_pydantic_does, []
    monkeypatch.setattr(RowReader, "_as_pydantic_does", lambda *given: slow.append(1) or read(*given))
    reader, lines = RowReader(), lines_of(run)
    for line in lines:
        reader.row(line)
    assert len(slow) <= 3 < len(lines)


@pytest.fixture(params=RUNS, ids=lambda run: run.name)
def both(request, monkeypatch):
    """A run whose rows are a list, and the same whose rows are read when they are asked for."""
    whole = open_run(request.param)
    monkeypatch.setattr(rows, "KEPT", 20)
    path = request.param / PACKED
    stored = replace(whole, trials=rows.read_rows(_opened(path), path)[0])
    assert (type(whole.trials), type(stored.trials)) == (list, StoredRows)
    return whole, stored


def told(run):
    """What each report says of a run."""
    console = Console(file=io.StringIO(), width=100)
    tables.print_brief(run, console)
    tables.print_run(run, console)
    return {
        "terminal": console.file.getvalue(),
        "json": json.dumps(tables.to_json(run)),
        **tables.files(run),
        "html": page.data_of(sections_of(run), run.spec_text),
        "explain": [each.to_json() for each in explain.explain(run, (), None, discover())],
    }


def test_reports_of_stored_rows_are_those_of_a_list(both):
    whole, stored = both
    assert told(stored) == told(whole)
    assert [*stored.trials] == whole.trials
    assert (len(stored.trials), stored.trials[3]) == (len(whole.trials), whole.trials[3])
    assert stored.trials[2:9:3] == whole.trials[2:9:3]


def test_comparisons_of_stored_rows_are_those_of_lists(both):
    of_lists, of_stored = (compare.compare(run, run, discover()) for run in both)
    assert of_stored == of_lists
    judged = [recorded.compare(run, run, slower=0.03) for run in both]
    verdicts = [[replace(each, took_s=0.0).verdict for each in one.findings] for one in judged]
    assert verdicts[0] == verdicts[1]


def test_rows_of_one_problem_are_those_of_a_list(both):
    whole, stored = both
    for problem in stored.trials.problems:
        assert rows.rows_of(stored.trials, problem) == rows.rows_of(whole.trials, problem)


def test_facts_of_a_row_have_what_its_trial_has(both):
    """A ranking reads them in place of the trial, which takes longer to make."""
    whole, stored = both
    for problem in stored.trials.problems:
        for facts, row in zip(stored.trials.of(problem), rows.rows_of(whole.trials, problem), strict=True):
            assert (facts.key, facts.screened_us) == (row.key, row.screened_us)
            assert getattr(facts.accuracy, "error", None) == getattr(row.accuracy, "error", None)
            assert rows.trial_of(facts.with_(detail="other")) == row.with_(detail="other")


def test_a_problem_that_is_not_asked_for_is_not_kept(both):
    _, stored = both
    sections = sections_of(stored)
    for section in sections:
        assert section.rows[-1]["trial"].problem == section.problem
        assert sum(map(len, stored.trials._kept.values())) <= max(20, len(section.rows))


def test_a_ranking_leaves_no_rows_where_collection_pauses(both):
    """A closure that called itself kept those of each problem: 300 MB of 100,000 rows."""
    whole, _ = both
    gc.collect()
    gc.disable()
    try:
        list(sections_of(whole))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [each for each in gc.garbage if isinstance(each, Trial)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kept == []

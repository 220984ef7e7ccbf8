"""benchmarks/sanitize.py reads what compute-sanitizer says, without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
CLEAN = "checked 1\nchecked 2\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("sanitize")


def test_a_tool_is_clean_only_if_every_case_is(sanitize):
    done = [sanitize.Done(CLEAN, 0, 2.0), sanitize.Done(CLEAN, 0, 3.0)]
    found = sanitize.row("memcheck", done)
    assert (found["clean"], found["finished"], found["errors"]) == (True, True, 0)
    assert (found["cases"], found["seconds"], found["output"]) == (4, 5.0, None)
    assert found["summary"] == ["ERROR SUMMARY: 0 errors"]


@pytest.mark.parametrize(
    ("output", "code", "errors", "finished"),
    [
        (CLEAN.replace("0 errors", "3 errors"), 9, 3, True),
        (CLEAN, 9, 0, True),  # it says nothing is wrong, and fails
        ("checked 1\n", None, 0, False),  # out of time
        ("", None, 0, False),  # never started
        ("checked 1\nkilled", -9, 0, True),
        ("========= ERROR SUMMARY: 0 errors\n", 0, 0, True),  # nothing was launched
        (
            "checked 1\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
            9,
            2,
            True,
        ),
    ],
)
def test_one_case_that_is_not_clean_is_enough(sanitize, output, code, errors, finished):
    done = [sanitize.Done(CLEAN, 0, 1.0), sanitize.Done(output, code, 1.0)]
    found = sanitize.row("racecheck", done)
    assert (found["clean"], found["finished"], found["errors"]) == (False, finished, errors)
    assert found["output"] == output

"""Few files of the package know of a special case; the program that counts them sees through names."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import special_cases
from special_cases import SPECIAL_CASES, Source, asked, count

CASES = {case.name: case for case in SPECIAL_CASES}


@pytest.mark.parametrize("name", CASES)
def test_no_more_of_the_package_asks_than_may(name):
    case = CASES[name]
    assert 0 < count(case) <= case.most, asked(case)


@pytest.fixture
def asking(monkeypatch):
    """The files of these that ask for a special case."""

    def ask(name, **files):
        monkeypatch.setattr(special_cases, "sources", lambda: [Source(p, ast.parse(t)) for p, t in files.items()])
        return [*asked(CASES[name])]

    return ask


def test_an_import_and_a_name_that_is_assigned_ask_nothing(asking):
    assert asking("backward", a="from ops import BACKWARD", b="BACKWARD = 1", c="x = BACKWARD") == ["c"]


@pytest.mark.parametrize(
    "answers",
    [
        "def of_gradients(p):\n    'Whether.'\n    return p.op is ops.BACKWARD",
        "def of_gradients(p):\n    return not p.op == BACKWARD",
        "def of_gradients(p):\n    return p.op.name == 'backward'",
        "of_gradients = lambda p: p.op != BACKWARD",
        "def _own(p):\n    return p.op is BACKWARD\ndef of_gradients(p):\n    return not _own(p)",
    ],
)
def test_who_calls_what_only_answers_the_question_asks_it(asking, answers):
    assert asking("backward", a=answers, b="from a import of_gradients\nif of_gradients(p): pass") == ["a", "b"]


def test_a_decision_of_which_the_question_is_a_part_is_its_owners(asking):
    owner = "def is_cut(p):\n    return p.op is not BACKWARD and p.layout == DENSE"
    assert asking("backward", a=owner, b="if is_cut(p): pass") == ["a"]


def test_each_way_to_ask_for_fp8_is_seen(asking):
    ways = {"a": "p.dtype in ('e4m3',)", "b": "p.dtype.startswith('e4m3')", "c": "p.dtype"}
    assert asking("fp8", **ways) == ["a", "b"]


def test_what_stands_in_the_file_of_chunks_is_about_them(asking):
    ways = {
        "a": "from family.chunks import MODES",
        "b": "row.schedule['chunks']",
        "c": "'attention_chunk_size'",
        "d": "def f(CHUNK_ROWS): pass",
    }
    assert asking("chunks", **ways) == ["a", "b", "d"]


def test_lines_that_name_an_output_are_counted_once(asking, monkeypatch):
    assert asking('"o"', a="f('o', 'o')\ng('o')\n'of'") == ["a"]
    assert count(CASES['"o"']) == 2

"""Annotations and summaries on GitHub Actions, of texts that would break them."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from attnsweep.regress.verdicts import Comparison, Finding, Verdict, commands, markdown, summarise

EVIL = "k.cu(3): error: 100%\r\n::error::owned | <img src=x> `a` **b** [c](d) a_b_c"


def compared(*findings: Finding, **facts) -> Comparison:
    return Comparison(Path("old|run"), Path("new"), 0.02, findings, (), **facts)


@pytest.fixture
def actions(monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")


ALL = [
    Finding("(1,2,64,64) fp16 full", Verdict.INCONCLUSIVE, "too noisy"),
    Finding("p pass", Verdict.PASS, ""),
    Finding("p fast", Verdict.IMPROVEMENT, "faster"),
    Finding("p slow", Verdict.REGRESSION, "slower by at least 3.0 %", ratio=1.0402),
    Finding("p: a, b", Verdict.WRONG, EVIL),
]


def test_errors_come_first_and_only_what_fails_is_annotated(actions) -> None:
    lines = commands(compared(*ALL))
    assert [line.split(" ")[0] for line in lines] == ["::error", "::error", "::warning"]
    assert lines[1] == (
        "::error title=attnsweep%3A p slow::regression, 1.040 times the old time: slower by at least 3.0 %25"
    )
    assert "title=attnsweep%3A (1%2C2%2C64%2C64) fp16 full::inconclusive: too noisy" in lines[2]


def test_no_text_can_forge_a_command_or_a_title(actions) -> None:
    (line,) = commands(compared(ALL[-1]))
    assert "\n" not in line
    assert "\r" not in line
    assert "100%25%0D%0A::error::owned" in line
    title = re.fullmatch(r"::error title=([^:,]*)::.*", line)
    assert title is not None
    assert title[1] == "attnsweep%3A p%3A a%2C b"


def test_a_damaged_or_empty_comparison_is_a_warning(actions) -> None:
    (line,) = commands(compared(ALL[1], damage=("a torn line", "and more")))
    assert line == "::warning title=attnsweep%3A a run is damaged::a torn line%0Aand more"
    assert commands(compared()) == ["::warning title=attnsweep::no problem to compare"]


def test_elsewhere_nothing_is_annotated(monkeypatch) -> None:
    for value in (None, "", "false"):
        monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
        if value is not None:
            monkeypatch.setenv("GITHUB_ACTIONS", value)
        assert commands(compared(*ALL)) == []


def test_the_summary_shows_texts_literally(tmp_path, monkeypatch) -> None:
    text = compared(ALL[-1]).to_markdown()
    assert "&lt;img src=x>" in text
    assert "\\| &lt;img" in text
    assert "\\`a\\` \\*\\*b\\*\\* \\[c\\](d) a\\_b\\_c" in text
    assert text.startswith("# old\\|run → new\n")
    (row,) = [line for line in text.splitlines() if line.endswith("| wrong |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 8  # seven cells
    path = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    summarise("one\n")
    summarise("two\n")
    assert path.read_text() == "one\ntwo\n"
    assert markdown("a\nb") == "a b"


def test_the_command_annotates_on_stderr_and_leaves_json_whole(attnsweep, actions, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    results = Path(__file__).parents[2] / "results"
    old, new = results / "h200" / "ladder", results / "h100-80gb-hbm3" / "ladder"
    done = attnsweep("check", "--recorded", old, new, "--json")
    assert done.returncode == 4
    problems = json.loads(done.stdout)["problems"]
    assert done.stderr.count("::warning title=attnsweep%3A (") == len(problems) > 0


def test_a_case_of_junit_has_its_time_and_its_spec():
    pytest.importorskip("junitparser", reason="needs the ci extra: junitparser")
    finding = replace(ALL[1], took_s=1.25)
    assert Finding.from_json(finding.to_json()) == finding
    (case,) = ElementTree.fromstring(compared(finding).to_junit()).iter("testcase")
    assert (case.get("time"), case.get("classname")) == ("1.25", "attnsweep.check.new")


def test_quiet_leaves_verdicts_and_the_reasons_of_those_that_did_not_pass():
    said = [replace(ALL[1], why="same machine code"), ALL[3]]
    whole = compared(*said, proves="It proves.", does_not_prove="Not that.")
    lines = [line.split("  ")[0] for line, _ in whole.lines(120, quiet=True)]
    assert lines == ["problem", "p pass", "p slow", "p slow: slower by at least 3.0 %"]
    torn = [line for line, _ in compared(ALL[1], damage=("a torn line",)).lines(120, quiet=True)]
    assert torn[-1] == "a torn line"

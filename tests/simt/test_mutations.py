"""Bugs put into the real templates are found: what mutations.toml lists, and says of each."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from attnsweep.build.numerics import Case
from attnsweep.family.declare import discover
from attnsweep.problem import Problem

from .harness import COMPILER, BuildError, SimtError, Simulator, config_of, template

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

MUTATIONS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("mutations.toml").read_text()
)
CASES = {
    "grouped": Case(Problem(2, 4, 2, 97, 161, 64)),
    "causal": Case(Problem(1, 2, 1, 97, 161, 64, causal=True)),
    "wide": Case(Problem(1, 2, 1, 97, 161, 128)),
    "five tiles": Case(Problem(1, 1, 1, 65, 600, 64)),
    "one short of a tile": Case(Problem(1, 1, 1, 64, 126, 64, causal=True)),
    "fp32": Case(Problem(1, 2, 1, 17, 70, 516, "fp32", causal=True)),
    "large scores": Case(Problem(1, 1, 1, 129, 129, 64), "large_scores"),
}


def run(simulator: Simulator, bug: dict[str, Any]) -> str | None:
    """What showed the bug, or None."""
    family, stage = bug["stage"].split(".")
    kernel = discover()[family]
    text = template(kernel)
    assert text.count(bug["old"]) == 1, f"{kernel.source.name}: {bug['old']!r} must be there once"
    config, case = config_of(kernel, bug.get("config", "")), CASES[bug["case"]]
    changed = {stage: text.replace(bug["old"], bug["new"])}
    try:
        found = simulator.check(kernel, config, case, source=changed, asan=bug.get("asan", False))
    except BuildError:
        raise
    except SimtError as report:
        return str(report)
    return None if found.ok else f"error {found.error}, limit {found.limit}"


@pytest.fixture(scope="module")
def shown(simulator, request):
    """The bugs of all selected tests, two at a time."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.originalname == test_bug_is_found.__name__
    ]
    results = simulator.map(lambda name: run(simulator, MUTATIONS[name]), names)
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("name", MUTATIONS)
def test_bug_is_found(shown, name):
    report, missed = shown[name].result(), MUTATIONS[name].get("missed")
    if missed is None:
        assert report is not None
        assert MUTATIONS[name].get("report", "") in report
    else:
        assert report is None, f"no longer missed ({missed}): {report}"

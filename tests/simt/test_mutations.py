"""Bugs put into the real templates are found: what mutations.toml lists, and says of each.

A push runs those that conftest.py draws by its commit; `pytest tests/simt -m mutation` runs all.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attnsweep.build.numerics import Case
from attnsweep.family.declare import discover
from attnsweep.problem import Problem

from .harness import COMPILER, BuildError, SimtError, Simulator, config_of, sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

MUTATIONS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("mutations.toml").read_text()
)
KERNELS = discover()
CASES = {
    "grouped": Case(Problem(2, 4, 2, 97, 161, 64)),
    "causal": Case(Problem(1, 2, 1, 97, 161, 64, causal=True)),
    "wide": Case(Problem(1, 2, 1, 97, 161, 128)),
    "five tiles": Case(Problem(1, 1, 1, 65, 600, 64)),
    "one short of a tile": Case(Problem(1, 1, 1, 64, 126, 64, causal=True)),
    "fp32": Case(Problem(1, 2, 1, 17, 70, 516, "fp32", causal=True)),
    "large scores": Case(Problem(1, 1, 1, 129, 129, 64), "large_scores"),
    "keys grow": Case(Problem(1, 2, 1, 97, 400, 64), "large_scores"),
    "five tiles in full": Case(Problem(1, 1, 1, 290, 600, 64)),
    "rows end in a tile": Case(Problem(1, 2, 1, 200, 333, 64, causal=True)),
    "causal, 300 rows": Case(Problem(1, 1, 1, 300, 500, 64, causal=True)),
    "heads in groups": Case(Problem(1, 5, 5, 150, 200, 64, causal=True)),
    "over 16 units": Case(Problem(1, 1, 1, 17, 4000, 64), "large_scores"),
}


WORD, OPEN = re.compile(r"…|\w+|[^\w\s]"), r"(?:\s|//[^\n]*\n|#pragma unroll[^\n]*\n)*"


def pattern(tokens: str) -> re.Pattern[str]:
    """Matches these tokens, with blanks, comments and pragmas of unrolling between them."""
    parts = ["(.*?)" if word == "…" else re.escape(word) for word in WORD.findall(tokens)]
    return re.compile(OPEN.join(parts), re.DOTALL)


def mutated(texts: dict[str, str], bug: dict[str, Any]) -> dict[str, str]:
    """The sources with the bug, which fits in one place."""
    places = []
    for name, text in texts.items():
        begin = 0
        if "after" in bug:
            start = pattern(bug["after"]).search(text)
            if start is None:
                continue
            begin = start.end()
        places += [(name, match) for match in pattern(bug["find"]).finditer(text, begin)]
    assert len(places) == 1, f"{bug['find']!r} is found {len(places)} times"
    ((name, match),) = places
    kept = iter(match.groups())
    put = re.sub("…", lambda _: next(kept), bug["put"])
    text = texts[name]
    return texts | {name: text[: match.start()] + put + text[match.end() :]}


def run(simulator: Simulator, bug: dict[str, Any]) -> str | None:
    """What showed the bug, or None."""
    family, stage = bug["stage"].split(".")
    kernel = KERNELS[family]
    config, case = config_of(kernel, bug.get("config", "")), CASES[bug["case"]]
    changed = {stage: mutated(sources(kernel), bug)}
    try:
        found = simulator.check(kernel, config, case, changed=changed, asan=bug.get("asan", False))
    except BuildError:
        raise
    except SimtError as report:
        return str(report)
    return None if found.ok else str(found)


@pytest.mark.parametrize("name", MUTATIONS)
def test_bug_has_its_place(name):
    mutated(sources(KERNELS[MUTATIONS[name]["stage"].split(".")[0]]), MUTATIONS[name])


@pytest.mark.mutation
@pytest.mark.nightly(push=8)
@pytest.mark.parametrize("name", MUTATIONS)
def test_bug_is_found(simulator, name):
    report, missed = run(simulator, MUTATIONS[name]), MUTATIONS[name].get("missed")
    if missed is None:
        assert report is not None
        assert MUTATIONS[name].get("report", "") in report
    else:
        assert report is None, f"no longer missed ({missed}): {report}"

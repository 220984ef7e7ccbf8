"""Bugs put into the real templates are found: what mutations.toml lists, and says of each.

A push runs those that tests/conftest.py draws by its commit; `pytest tests/simt -m mutation` runs
all.
"""

from typing import Any

import pytest

from .harness import COMPILER, BuildError, SimtError, Simulator, config_of, sources
from .mutations import CASES, MUTATIONS, mutated
from .runs import KERNELS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


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


def test_every_bug_has_its_place():
    texts = {name: sources(kernel) for name, kernel in KERNELS.items()}
    for name, bug in MUTATIONS.items():
        try:
            mutated(texts[bug["stage"].split(".")[0]], bug)
        except AssertionError as error:
            pytest.fail(f"{name}: {error}")


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

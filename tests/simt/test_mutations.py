"""Bugs put into the real templates are found: what mutations.toml lists, and says of each.

A push runs those that tests/conftest.py draws by its commit; `pytest tests/simt -m mutation` runs
all.
"""

from dataclasses import replace
from typing import Any

import pytest

from .harness import ARCH, COMPILER, BuildError, SimtError, Simulator, config_of, sources
from .mutations import CASES, MUTATIONS, mutated
from .runs import KERNELS
from .test_item_keys import by_lengths, by_mask, check

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Cases beside CASES, whose items see what one drawn for a problem may not.
OF_ITEMS: dict[str, Any] = {
    "lengths of items": ("key_range", by_lengths(421)),
    "masks of items": ("mask", by_mask(421)),
    "long masks of items": ("mask", by_mask(1101)),
}


def run(simulator: Simulator, bug: dict[str, Any], **how: Any) -> str | None:
    """What showed the bug, or None. how: as Simulator.check takes it."""
    family, stage = bug["stage"].split(".")
    kernel, words = KERNELS[family], bug.get("config", "")
    if "sms" in bug:
        how["arch"] = replace(ARCH, sm_count=bug["sms"])
    built: Any = {"changed": {stage: mutated(sources(kernel), bug)}, "asan": bug.get("asan", False)}
    try:
        if bug["case"] in OF_ITEMS:
            name, (problem, given, seen) = OF_ITEMS[bug["case"]]
            check(simulator, words, problem, seen, built=built, **{name: given})
            return None
        found = simulator.check(kernel, config_of(kernel, words), CASES[bug["case"]], **built, **how)
    except BuildError:
        raise
    except (SimtError, AssertionError) as report:
        return str(report)
    return None if found.ok else str(found)


def test_every_bug_has_its_place():
    texts = {name: sources(kernel) for name, kernel in KERNELS.items()}
    for name, bug in MUTATIONS.items():
        try:
            mutated(texts[bug["stage"].split(".")[0]], bug)
        except AssertionError as error:
            pytest.fail(f"{name}: {error}")


def test_a_fault_of_parity_is_found_by_the_newest_copies_first_alone(simulator):
    bug = MUTATIONS["key_groups_share_stages"]
    others = (0, 1, *range(3, 43))
    assert run(simulator, bug, schedules=others) is None
    assert run(simulator, bug, schedules=(2,)) is not None


@pytest.mark.mutation
@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("name", MUTATIONS)
def test_bug_is_found(simulator, name):
    report, missed = run(simulator, MUTATIONS[name]), MUTATIONS[name].get("missed")
    if missed is None:
        assert report is not None
        assert MUTATIONS[name].get("report", "") in report
    else:
        assert report is None, f"no longer missed ({missed}): {report}"

"""One simulator for all tests here; and of what is too much for a push, those that it runs."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import pytest

from .device import Device
from .harness import Simulator

SEED_VARIABLE = "SIMT_SEED"
T = TypeVar("T")


@pytest.fixture(scope="session")
def simulator():
    with Simulator() as simulator:
        yield simulator


@pytest.fixture
def device(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A session of the judge and the proof, whose kernels run here."""
    made = Device(simulator)
    made.take_place(monkeypatch)
    return made


@pytest.fixture(scope="session")
def drawn_by() -> str:
    """What random tests are seeded by."""
    return seed()


def seed() -> str:
    """What a sample is drawn by: $SIMT_SEED, or the commit that is checked out, or nothing."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return os.environ.get(SEED_VARIABLE) or done.stdout.strip()[:12]


def everything(config: pytest.Config) -> bool:
    """Whether all is asked for, by -m, -k or an id."""
    named = any("::" in argument for argument in config.args)
    marked = {"nightly", "mutation"} & set(config.getoption("-m").split())
    return bool(marked or config.getoption("-k") or named)


def drawn(items: Iterable[T], name: Callable[[T], str], count: int) -> list[T]:
    """So many of them, others for each seed."""
    drawn_by = seed()
    return sorted(items, key=lambda item: sha256((drawn_by + name(item)).encode()).digest())[:count]


@pytest.fixture
def few(pytestconfig: pytest.Config) -> Callable[[list[object], int], list[object]]:
    """Leaves a number of items of a list, or all of it at night."""
    if everything(pytestconfig):
        return lambda items, _: items
    return lambda items, count: drawn(items, str, count)


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Callable[[list[object], int], list[object]]:
    """Leaves some items of a list, others for each test; all of it with --thorough, as at night."""
    if request.config.option.thorough or everything(request.config):
        return lambda items, _: items
    return lambda items, count: drawn(items, lambda item: request.node.name + str(item), count)


def pytest_collection_modifyitems(config, items):
    """Of each test that is marked nightly(push=N), leaves N, unless all is asked for."""
    if everything(config):
        return
    groups = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("nightly"):
            groups[item.originalname, marker.kwargs["push"]].append(item)
    left = set()
    for (_, push), each in groups.items():
        left |= {*each} - {*drawn(each, lambda item: item.name, push)}
    if left:
        config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left]


def pytest_report_header():
    drawn_by = seed() or "nothing"
    return f"simulator: a sample drawn by {drawn_by} (or {SEED_VARIABLE}); all: -m nightly"

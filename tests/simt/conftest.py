"""One simulator for all tests here; and of what is too much for a push, those that it runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from .harness import Simulator

SEED_VARIABLE = "SIMT_SEED"


@pytest.fixture(scope="session")
def simulator():
    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="session")
def drawn_by() -> str:
    """What random tests are seeded by."""
    return seed()


def seed() -> str:
    """What a sample is drawn by: $SIMT_SEED, or the commit that is checked out, or nothing."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return os.environ.get(SEED_VARIABLE) or done.stdout.strip()[:12]


def pytest_collection_modifyitems(config, items):
    """Of each test that is marked nightly(push=N), leaves N, unless -m, -k or an id asks."""
    named = any("::" in argument for argument in config.args)
    asked = {"nightly", "mutation"} & set(config.getoption("-m").split())
    if asked or config.getoption("-k") or named:
        return
    drawn_by = seed()
    groups = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("nightly"):
            groups[item.originalname, marker.kwargs["push"]].append(item)
    left = set()
    for (_, push), each in groups.items():
        each.sort(key=lambda item: hashlib.sha256((drawn_by + item.name).encode()).digest())
        left |= set(each[push:])
    if left:
        config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left]


def pytest_report_header():
    drawn_by = seed() or "nothing"
    return f"simulator: a sample drawn by {drawn_by} (or {SEED_VARIABLE}); all: -m nightly"

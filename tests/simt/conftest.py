"""One simulator for all tests here; and of the seeded bugs, those that a push runs."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from .harness import Simulator

SAMPLE = 8


@pytest.fixture(scope="session")
def simulator():
    with Simulator() as simulator:
        yield simulator


def commit() -> str:
    """What the sample is drawn by: the commit that is checked out, or nothing."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()


def pytest_configure(config):
    config.addinivalue_line("markers", "mutation: a seeded bug; a push runs a sample of them")


def pytest_collection_modifyitems(config, items):
    """Leaves SAMPLE of the mutations, others for each commit, unless -m, -k or an id asks."""
    named = any("::" in argument for argument in config.args)
    if "mutation" in config.getoption("-m") or config.getoption("-k") or named:
        return
    drawn_by = commit()
    mutations = [item for item in items if item.get_closest_marker("mutation")]
    mutations.sort(key=lambda item: hashlib.sha256((drawn_by + item.name).encode()).digest())
    left = mutations[SAMPLE:]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_report_header():
    return f"mutations: {SAMPLE} drawn by commit {commit()[:12] or 'none'}; all: -m mutation"

"""One simulator for all tests here, so that a stage is built once."""

from __future__ import annotations

import pytest

from .harness import Simulator


@pytest.fixture(scope="session")
def simulator():
    with Simulator() as simulator:
        yield simulator

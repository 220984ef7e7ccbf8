"""Tests that start processes: commands, workers, clusters, simulators, a browser."""

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""

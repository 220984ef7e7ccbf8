"""Tests of numbers: references, limits, and how often a decision errs."""

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""

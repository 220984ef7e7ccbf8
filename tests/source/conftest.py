"""Tests of the source itself: which room imports which, names in comments, special cases."""

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""

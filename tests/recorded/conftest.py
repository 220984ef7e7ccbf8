"""Tests of recorded runs, of pages that quote them, and of the specs that ship."""

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""

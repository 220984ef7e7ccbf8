"""Quick tests: one process, no PyTorch."""

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""

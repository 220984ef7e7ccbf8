"""Tests of one process each, without PyTorch and recorded runs."""

import pytest


@pytest.fixture(autouse=True)
def without_gpu(made_once, fake_compilers, disk):
    """What every test here has."""

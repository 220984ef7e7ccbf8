"""Tests with PyTorch on the CPU; a driver whose kernels are NumPy's stands in for CUDA's."""

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""

"""Tests with PyTorch on the CPU; a driver whose kernels are NumPy's stands in for CUDA's."""

import gc

import pytest


@pytest.fixture(autouse=True)
def stand_ins(made_once, fake_compilers, disk):
    """What every test here has."""


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """PyTorch's objects are no garbage: tests that count what is alive do not look through them."""
    gc.collect()
    gc.freeze()

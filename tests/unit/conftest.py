"""What several files of unit tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def driver():
    """A driver whose kernels are NumPy's; needs PyTorch."""
    from attending import Kernel
    from fake_driver import FakeDriver

    return FakeDriver(Kernel())


@pytest.fixture
def operator(tmp_path, driver):
    """The operator of a package with three winners: full, causal and of grouped heads."""
    from operators import make
    from packages import shape, winner

    winners = (winner(shape()), winner(shape(causal=True)), winner(shape(heads=4, heads_kv=2)))
    return make(tmp_path, driver, *winners)

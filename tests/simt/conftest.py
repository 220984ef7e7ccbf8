"""One simulator for all tests here, and a judge whose kernels run on it."""

import pytest

from attnsweep.core import cases

from .device import Device
from .harness import Simulator


@pytest.fixture(scope="session")
def simulator():
    with Simulator() as simulator:
        yield simulator


@pytest.fixture
def device(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A session of the judge and the proof, whose kernels run here."""
    made = Device(simulator)
    made.take_place(monkeypatch)
    return made


@pytest.fixture
def no_small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are proved on their problem alone."""
    monkeypatch.setattr(cases, "small_cases", lambda problem: ())

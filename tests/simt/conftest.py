"""One simulator for all tests here, and a judge whose kernels run on it."""

from dataclasses import replace

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


@pytest.fixture
def relaunched(monkeypatch):
    """Changes what a stage of a family launches: relaunched(family, "fwd", change).

    problem: changes the problem that it is asked for.
    """

    def set_(family, stage, change=lambda made: made, problem=lambda asked: asked):
        declared = family.stages[stage]

        def launch(config, asked, arch):
            made = declared.launch(config, problem(asked), arch)
            return made and change(made)

        monkeypatch.setitem(family.stages, stage, replace(declared, launch=launch))

    return set_

"""What is imported here needs no PyTorch: without it, tests are skipped with that reason."""

from functools import partial

import pytest
from nursery import Nursery
from simt.harness import COMPILER, Simulator

from attnsweep.bench.process_state import ProcessState


@pytest.fixture(scope="session")
def simulator():
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="session")
def state():
    """The process beside, which computes what is right."""
    return ProcessState()


@pytest.fixture
def opened(simulator, state, monkeypatch):
    """Open a bench: see card."""
    from attacks.card import opened

    return partial(opened, simulator, state, monkeypatch)


@pytest.fixture
def bench(opened):
    """An open bench."""
    return opened()


@pytest.fixture(scope="session")
def called():
    """Forks called processes: importing PyTorch takes longer than all else."""
    with Nursery("attacks.forked") as made:
        yield made


@pytest.fixture(scope="session")
def sides(called):
    """Called processes, which serve one bench after another."""
    yield (every := {})
    for side in every.values():
        side.leave()


@pytest.fixture
def make_strict(simulator, state, monkeypatch, sides, called):
    """Open a strict bench: see strict_bench."""
    from attacks import strict_bench

    alone = []

    def make(kind="HostBench", small=(), **how):
        own = simulator, state, monkeypatch, sides, called, alone
        return strict_bench.strict_bench(*own, getattr(strict_bench, kind), small, **how)

    yield make
    for side in alone:
        side.end()

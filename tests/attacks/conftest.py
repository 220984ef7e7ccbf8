"""What is imported here needs no PyTorch: without it, tests are skipped with that reason."""

import pytest
from simt.harness import COMPILER, Simulator

from attnsweep.bench.owned import Owned


@pytest.fixture(scope="session")
def simulator():
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="session")
def owned():
    """The process beside, which computes what is right."""
    return Owned()


@pytest.fixture
def bench(simulator, owned, monkeypatch):
    """An open bench: see card."""
    from attacks.card import opened

    return opened(simulator, owned, monkeypatch)


@pytest.fixture(scope="session")
def sides():
    """Called processes, which serve one bench after another."""
    return {}


@pytest.fixture
def make_strict(simulator, owned, monkeypatch, sides):
    """Open a strict bench: see strict_bench."""
    from attacks import strict_bench

    def make(kind="HostBench", small=(), **how):
        kind = getattr(strict_bench, kind)
        return strict_bench.strict_bench(simulator, owned, monkeypatch, sides, kind, small, **how)

    return make

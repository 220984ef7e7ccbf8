"""The arithmetic of benchmarks/host_cost.py, without a GPU."""

import contextlib
import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def host_cost(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("host_cost")


def test_calls_take_turns_and_the_first_is_not_counted(host_cost, timed_by):
    now = [0]
    seen: dict[str, list[int]] = {"quick": [], "slow": []}
    inside = []

    @contextlib.contextmanager
    def within():
        now[0] += 10**9  # not a call's
        inside.append("slow")
        yield
        inside.remove("slow")

    def call(name, ns):
        def own(number):
            assert inside == (["slow"] if name == "slow" else [])
            seen[name].append(number)
            now[0] += ns if number >= 5 else 10**6

        return own

    timed_by(lambda: now[0], host_cost)
    waits = []
    callers = {"quick": host_cost.Caller(call("quick", 2_000)), "slow": host_cost.Caller(call("slow", 9_000), within)}
    got = host_cost.host_us(callers, turns=4, calls=5, wait=lambda: waits.append(1))
    assert {name: own["median_us"] for name, own in got.items()} == {"quick": 2.0, "slow": 9.0}
    assert seen["quick"] == seen["slow"] == list(range(25))
    assert len(waits) == 10


def test_importing_is_timed_in_a_process_of_its_own(host_cost, constants, monkeypatch):
    constants(host_cost, PROCESSES=1)
    monkeypatch.chdir(ROOT)
    assert 0 < host_cost.seconds_of(host_cost.IMPORT) < 5

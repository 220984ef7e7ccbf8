"""How benchmarks time what a call costs the host, without a GPU."""

import contextlib
import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent.parent


def test_calls_take_turns_and_the_first_of_each_turn_are_not_counted(monkeypatch, timed_by):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timing = importlib.import_module("timing")
    now = [0]
    seen: dict[str, int] = {"quick": 0, "slow": 0}
    inside = []

    @contextlib.contextmanager
    def within():
        now[0] += 10**9  # not a call's
        inside.append("slow")
        yield
        inside.remove("slow")

    def call(name, ns):
        def own():
            assert inside == (["slow"] if name == "slow" else [])
            now[0] += ns if seen[name] % 10 >= 2 else 10**6
            seen[name] += 1

        return own

    timed_by(lambda: now[0], timing)
    ways = {"quick": timing.Way(call("quick", 2_000)), "slow": timing.Way(call("slow", 9_000), within)}
    got = timing.host_us(ways, blocks=4, calls=8)
    assert got == {"quick": [2.0] * 32, "slow": [9.0] * 32}
    assert seen == {"quick": 40, "slow": 40}

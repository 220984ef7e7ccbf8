"""The strict judge on the CPU. Its called processes are real ones; see host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from simt.harness import Simulator

from attacks import host
from attacks.card import Buffer, opened
from attnsweep.baselines.backend import Unavailable
from attnsweep.bench import strict
from attnsweep.bench.process_state import ProcessState
from attnsweep.core.cases import Case
from attnsweep.verify import calls
from attnsweep.verify.device_case import WrongResult


def said_of(bench: Any, name: str, rounds: int) -> str:
    """What the strict judge says of a callable: `confirmed` and its time, or why not."""
    try:
        bench.add_baseline(name)
        times = [bench.replay(name, "warm") for _ in range(rounds)]
        bench.confirm(name, 800.0)
    except (WrongResult, Unavailable) as error:
        return error.detail if isinstance(error, WrongResult) else str(error)
    return f"confirmed {times[-1]:.3g}"


class Kept(strict.Caller):
    """A process for many attacks."""

    def end(self) -> None:
        """It goes on."""

    leave = strict.Caller.end


class HostChains(strict.Chains):
    """Its memory is the host's."""

    place: str
    buffer = Buffer

    def transport(self) -> host.HostShared:
        if not hasattr(self, "host"):
            self.host = host.HostShared(self.place)
        return self.host

    def clock(self) -> float:
        return self.host.clock[0] / 1e6


class HostBench(strict.StrictBench):
    """`sides` are those of bench before."""

    sides: dict[Any, Kept]
    alone: list[strict.Caller] | None = None
    _chains_of = HostChains

    def _started(self, scratch: Path | None) -> strict.Caller:
        if self.alone is not None and scratch is not None:
            self.alone.append(strict.Caller(scratch))
            return self.alone[-1]
        key = scratch is None, os.environ.get(host.NO_CHAIN)
        found = self.sides.get(key)
        if found is None or found.process.poll() is not None:
            found = self.sides[key] = Kept(scratch)
        return found


class AloneBench(HostBench):
    """Each callable has a process of its own, as it has on a card."""


def strict_bench(
    simulator: Simulator,
    state: ProcessState,
    patch: pytest.MonkeyPatch,
    sides: dict[Any, Kept],
    nursery: Nursery,
    alone: list[strict.Caller],
    kind: type[HostBench] = HostBench,
    small: tuple[Case, ...] = (),
    **how: Any,
) -> HostBench:
    """alone: gets processes of one callable. small: the cases beside the problem."""
    patch.setattr(strict.Caller, "_popen", nursery.popen)
    patch.setattr(strict, "_MOST", 4)  # calls of a chain: each is simulated
    patch.setattr(kind, "sides", sides, raising=False)
    patch.setattr(AloneBench, "alone", alone, raising=False)
    patch.setattr(HostChains, "place", place := tempfile.mkdtemp(), raising=False)
    if host.NO_CHAIN in os.environ:
        patch.setattr(calls, "contents_of", lambda first, digests: [0] * len(digests))
    bench = opened(simulator, state, patch, kind, strict=place, small=small, **how)
    assert isinstance(bench, HostBench)
    return bench

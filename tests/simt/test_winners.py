"""Every config that won a recorded sweep is right on the CPU, on shapes that reach all of it.

A push runs a few that its commit draws; `pytest tests/simt -m nightly` runs all.
"""

from __future__ import annotations

import pytest

from attnsweep.family.declare import discover
from attnsweep.hardware import arch_named

from .harness import COMPILER
from .recorded import Winner, winners
from .shapes import cases

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

KERNELS = discover()


def distinct() -> dict[str, Winner]:
    """Each family's configs with what is compiled in, once: name to winner."""
    found: dict[object, Winner] = {}
    for winner in winners(KERNELS):
        p = winner.problem
        key = (winner.kernel, winner.config, p.head_dim, p.dtype, p.causal, winner.arch)
        found.setdefault(key, winner)
    named = {}
    for winner in found.values():
        label = winner.problem.label.replace(" ", "-")
        named[f"{winner.kernel}-{label}-{winner.run}"] = winner
    assert len(named) == len(found)
    return named


WINNERS = distinct()


def test_there_are_winners_of_every_hopper_family():
    hopper = {kernel.name for kernel in KERNELS.values() if kernel.min_arch == "sm_90a"}
    assert hopper <= {winner.kernel for winner in WINNERS.values()}
    assert len(WINNERS) > 90


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize("name", WINNERS)
def test_right_as_recorded(simulator, name):
    winner = WINNERS[name]
    kernel, arch = KERNELS[winner.kernel], arch_named(winner.arch)
    for case in cases(winner.problem, winner.config):
        result = simulator.check(kernel, winner.config, case, arch=arch, timeout_s=600)
        assert result.ok, (winner.config.label, case.label, str(result))

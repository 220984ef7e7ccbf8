"""The energy of a call on a GPU: it repeats, it is power by time, and more work takes more."""

from dataclasses import replace

import pytest

from attnsweep.compile.candidate import Build
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.space import Space

pytestmark = pytest.mark.gpu

PROBLEM = Problem(4, 16, 16, 2048, 2048, 64)


@pytest.fixture(scope="module")
def measured(worker, compiler):
    """Two stretches and a warm time of the same config on a problem."""
    if not worker.describe().energy_counter:
        pytest.skip("NVML counts no energy of this card")
    kernel = discover()["flash_fwd_mma"]

    def of(problem):
        build = Build(kernel, Space.build(kernel, PROBLEM, compiler.arch).configs[0], problem, compiler)
        build.submit()
        worker.open(problem, replay_us=1000, seed=3)
        made = build.candidate()
        worker.trial(made)
        worker.add("one", made, cold=False)
        worker.replay("one", "warm")
        stretches = [worker.energy("one") for _ in range(3)]
        return stretches, worker.replay("one", "warm")

    return of


def test_stretches_agree_and_are_power_by_time(measured, worker):
    stretches, time_us = measured(PROBLEM)
    limit_w = worker.describe().power_limit_w
    energies = [each.energy_uj for each in stretches]
    # 225, 217 and 212 mJ on an H100, one after the other; why they fall is not known.
    assert max(energies) < 1.1 * min(energies), energies
    for each in stretches:
        assert 30 < each.power_w < 1.1 * (limit_w or 2000)
        assert each.energy_uj == pytest.approx(each.power_w * time_us, rel=0.1)


def test_twice_the_work_takes_about_twice_the_energy(measured):
    one, _ = measured(PROBLEM)
    two, _ = measured(replace(PROBLEM, batch=2 * PROBLEM.batch))
    ratio = two[-1].energy_uj / one[-1].energy_uj
    assert 1.7 < ratio < 2.3

"""Energy of a call of each finalist and baseline: stretches in turns, after the rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.core.errors import NoGpuError
from attnsweep.core.trial import Energy, Environment
from attnsweep.device.energy import Stretch

# Stretches of each entry: to show it, or to rank by it. A sign interval of 95 % needs six pairs,
# and of nine it leaves out the least and the most.
SHOWN = 3
RANKED = 9
# An entry that takes this much more than the least is known well enough after SHOWN stretches.
_FAR = 1.5
# A stretch without a step of the counter is taken again once.
_TRIES = 2


def refuse_without_counter(environment: Environment, rank_by: str) -> None:
    """Raise NoGpuError if a spec ranks by energy on a card that has no counter."""
    if rank_by == "energy" and environment.energy_counter is False:
        raise no_counter(f"NVML counts no energy of {environment.gpu}")


def no_counter(what: str) -> NoGpuError:
    """The error of a spec that ranks by what cannot be measured."""
    return NoGpuError(
        f"{what}, so that nothing can be ranked by it",
        hint="rank by a time: drop `rank_by: energy`, or write --set measure.rank_by=warm",
    )


def stretches(
    gpu: Gpu,
    names: Sequence[str],
    *,
    ranks: bool,
    seed: int,
    fail: Callable[[str, WorkerError], None],
) -> dict[str, list[Stretch]]:
    """Stretches of each entry, one a turn, in random order; none where the counter stands still.

    fail: called with an entry that failed, which is then missing. Raises NoGpuError if it ranks
    and the counter stands still.
    """
    source = random.Random(seed)
    found: dict[str, list[Stretch]] = {name: [] for name in names}
    left = sorted(names)
    for turn in range(RANKED if ranks else SHOWN):
        if turn == SHOWN:
            middles = {name: statistics.median(_energies(found[name])) for name in left}
            left = [name for name in left if middles[name] <= _FAR * min(middles.values())]
        for name in source.sample(left, len(left)):
            try:
                each = next(filter(None, (gpu.energy(name) for _ in range(_TRIES))), None)
            except WorkerError as error:
                fail(name, error)
                del found[name]
                left.remove(name)
                continue
            if each is None:
                if ranks:
                    raise no_counter("NVML's counter of energy stands still on this card")
                return {}
            found[name].append(each)
    return found


def fields(found: Mapping[str, Sequence[Stretch]], name: str, *, ranks: bool) -> dict[str, Any]:
    """The fields of an entry's row; empty without stretches."""
    if not found.get(name):
        return {"energy_uj": None, "power_w": None}
    own = _energies(found[name])
    low, middle, high = statistics.quantiles(own, n=4, method="inclusive")
    return {
        "energy_uj": Energy(
            median=middle,
            low=low,
            high=high,
            samples=len(own),
            rounds=[float(f"{uj:.6g}") for uj in own],
            ranks=ranks,
        ),
        "power_w": statistics.median(each.power_w for each in found[name]),
    }


def _energies(found: Sequence[Stretch]) -> list[float]:
    return [each.energy_uj for each in found]

"""Strategy staged: each stage of a pipeline alone, then the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnsweep.choose.strategies.simple import exhaustive
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space

if TYPE_CHECKING:
    from attnsweep.choose.strategies.simple import Proposals


def staged(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Time stages alone, then only the combinations whose stages add up to least.

    The first configs contain every variant of every stage at least once: they are as many as the
    variants add up to, not as they multiply to. Then come the COMBINED configs with the least sum
    of stage times, for each of the spec's variants. `seed` is unused; `candidates` caps the total.
    A family of one stage is searched exhaustively.
    """
    stages = space.kernel.stages
    if len(stages) == 1:
        yield from exhaustive(space, candidates, seed)
        return

    def parts(config: Mapping[str, object]) -> dict[str, tuple[object, ...]]:
        return {
            name: tuple(config[param] for param in stage.params) for name, stage in stages.items()
        }

    trials: list[Trial] = []
    asked: set[Config] = set()
    met: set[tuple[str, tuple[object, ...]]] = set()
    for config in space.configs:
        new = set(parts(config).items()) - met
        if new and (candidates is None or len(asked) < candidates):
            met |= new
            asked.add(config)
            trials += yield config
    while len(trials) < len(asked):  # the sweep asks ahead, so wait for its answers
        trials += yield None
    times: dict[tuple[str, tuple[object, ...]], float] = {}
    for trial in trials:
        if trial.status is Status.OK:
            for part in parts(trial.config).items():  # a stage that a config leaves out takes 0
                times[part] = min(times.get(part, math.inf), trial.stages_us.get(part[0], 0.0))

    def together(config: Config) -> float:
        return sum(times.get(part, math.inf) for part in parts(config).items())

    room = math.inf if candidates is None else candidates - len(asked)
    by_variant: dict[tuple[str, ...], list[Config]] = {}
    for config in space.configs:
        if config not in asked and together(config) < math.inf:
            variant = tuple(space.variants.get(config, {}).values())
            by_variant.setdefault(variant, []).append(config)
    for configs in by_variant.values():
        for config in heapq.nsmallest(COMBINED, configs, key=together):
            if room > 0:
                room -= 1
                yield config


# Combinations of each variant that are timed as a whole. Stages in sequence take up to a tenth more
# or less than alone (one leaves in L2 what the next reads), so the least sum may not win.
COMBINED = 64

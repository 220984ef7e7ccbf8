"""Search strategies: which candidate of a Space comes next.

A strategy is a generator: it yields a config, and is sent the trials that ended since it last did;
it yields None to be told of more first. It never measures, stops or stores; the sweep alone does.
See `Search` for ask and tell.
"""

from __future__ import annotations

import heapq
import math
import random as _random
from collections.abc import Callable, Generator, Mapping

from attnsweep.errors import SpecError
from attnsweep.kernel import Config
from attnsweep.space import Space
from attnsweep.trial import Status, Trial

Proposals = Generator[Config | None, list[Trial], None]
Strategy = Callable[[Space, int | None, int], Proposals]


def exhaustive(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Every config in the space's order, or the first `candidates` of them; `seed` is unused."""
    # Not `yield from`: a tuple's iterator takes no tell.
    for config in space.configs[:candidates]:  # noqa: UP028
        yield config


def random(space: Space, candidates: int | None, seed: int) -> Proposals:
    """`candidates` configs without repeats; the same for the same seed, family and problem."""
    source = _random.Random(f"{seed} {space.kernel.name} {space.problem.label}")
    count = len(space.configs) if candidates is None else min(candidates, len(space.configs))
    for config in source.sample(space.configs, count):  # noqa: UP028
        yield config


def staged(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Time stages on their own, then only the combinations whose stages add up to least.

    First, configs in which every variant of every stage occurs at least once: as many as the
    variants add up to, not as they multiply to. Then the COMBINED configs with the least sum of
    stage times, of each variant that the spec names. `seed` is unused; `candidates` caps the
    whole. A family of one stage is searched exhaustively.
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
    while len(trials) < len(asked):  # the sweep asks ahead: wait for what was asked
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
# or less than alone (one leaves in L2 what the next reads), so the least sum is not yet the winner.
COMBINED = 64

STRATEGIES: dict[str, Strategy] = {"exhaustive": exhaustive, "random": random, "staged": staged}


def strategy(name: str) -> Strategy:
    """The strategy called `name`. Raises SpecError naming those there are."""
    if name not in STRATEGIES:
        raise SpecError(f"unknown strategy {name!r}", hint=f"there are: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


class Search:
    """One strategy at work on one space. Asks may run ahead of tells: compiling overlaps timing."""

    def __init__(
        self, name: str, space: Space, *, candidates: int | None = None, seed: int = 0
    ) -> None:
        self._proposals = strategy(name)(space, candidates, seed)
        self._told: list[Trial] = []
        self._begun = False

    def ask(self) -> Config | None:
        """The next config to try, or None when there is no more, or none before a tell."""
        told, self._told = self._told, []
        try:
            if self._begun:
                return self._proposals.send(told)
            self._begun = True
            return next(self._proposals)
        except StopIteration:
            return None

    def tell(self, trial: Trial) -> None:
        """What became of a config asked for earlier; the strategy sees it at the next ask."""
        self._told.append(trial)

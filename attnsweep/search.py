"""Search strategies: which candidate of a Space comes next.

A strategy is a generator: it yields a config, and is sent the trials that ended since it last did;
it yields None to be told of more first. It never measures, stops or stores; the sweep alone does.
See `Search` for ask and tell.
"""

from __future__ import annotations

import math
import random as _random
from collections.abc import Callable, Generator, Mapping

from attnsweep.errors import SpecError
from attnsweep.kernel import Config, Space
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
    """Time stages on their own, then only combinations of each stage's best as a whole.

    First, configs in which every variant of every stage occurs at least once: as many as the
    variants add up to, not as they multiply to. Then, of the variants whose stage time was among
    the BEST_OF_STAGE least, every combination that is in the space, the least sum first. `seed`
    is unused; `candidates` caps the whole. A family of one stage is searched exhaustively.
    """
    stages = space.kernel.stages
    if len(stages) == 1:
        yield from exhaustive(space, candidates, seed)
        return

    def variants(config: Mapping[str, object]) -> dict[str, tuple[object, ...]]:
        return {
            name: tuple(config[param] for param in stage.params) for name, stage in stages.items()
        }

    trials: list[Trial] = []
    asked: list[Config] = []
    met: set[tuple[str, tuple[object, ...]]] = set()
    for config in space.configs:
        new = set(variants(config).items()) - met
        if new and (candidates is None or len(asked) < candidates):
            met |= new
            asked.append(config)
            trials += yield config
    while len(trials) < len(asked):  # the sweep asks ahead: wait for what was asked
        trials += yield None
    times: dict[str, dict[tuple[object, ...], float]] = {name: {} for name in stages}
    for trial in trials:
        for name, variant in variants(trial.config).items():
            if trial.status is Status.OK and name in trial.stages_us:
                best = times[name].get(variant, math.inf)
                times[name][variant] = min(best, trial.stages_us[name])
    least = {name: sorted(of, key=lambda v: of[v])[:BEST_OF_STAGE] for name, of in times.items()}
    combined = [
        config
        for config in space.configs
        if config not in asked and all(v in least[name] for name, v in variants(config).items())
    ]
    combined.sort(key=lambda config: sum(times[n][v] for n, v in variants(config).items()))
    room = None if candidates is None else max(0, candidates - len(asked))
    for config in combined[:room]:
        yield config


# Of a pipeline's stages, how many variants of each are combined: 3 stages give at most 64.
BEST_OF_STAGE = 4

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

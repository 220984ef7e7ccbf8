"""Search strategies: which candidate of a Space comes next.

A strategy is a generator: it yields a config, and is sent the trials that ended since it last did.
It never measures, stops or stores; the sweep alone does. See `Search` for ask and tell.
"""

from __future__ import annotations

import random as _random
from collections.abc import Callable, Generator

from attnsweep.errors import SpecError
from attnsweep.kernel import Config, Space
from attnsweep.trial import Trial

Proposals = Generator[Config, list[Trial], None]
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


STRATEGIES: dict[str, Strategy] = {"exhaustive": exhaustive, "random": random}


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
        """The next config to try, or None when the strategy has no more."""
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

"""Strategies that learn nothing: exhaustive and random."""

from __future__ import annotations

import random as _random
from collections.abc import Callable, Generator

from attnsweep.core.trial import Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space

Proposals = Generator[Config | None, list[Trial], None]
Explained = Generator[Config | None, list[Trial], str]
"""Proposals that return why they ended."""
Strategy = Callable[[Space, int | None, int], Proposals | Explained]


def exhaustive(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Every config in the space's order, or the first `candidates` of them; `seed` is unused."""
    # Not `yield from`: a tuple's iterator cannot receive the trials.
    for config in space.configs[:candidates]:  # noqa: UP028
        yield config


def random(space: Space, candidates: int | None, seed: int) -> Proposals:
    """`candidates` configs without repeats; equal for equal seed, family and problem."""
    source = _random.Random(f"{seed} {space.kernel.name} {space.problem.label}")
    count = len(space.configs) if candidates is None else min(candidates, len(space.configs))
    for config in source.sample(space.configs, count):  # noqa: UP028
        yield config

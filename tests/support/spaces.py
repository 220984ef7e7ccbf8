"""Candidates one by one, where a test needs some of a space and not the whole of it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, Value
from attnsweep.family.family import Config, Family
from attnsweep.family.space import Selection, selected


def candidates(
    kernel: Family, problem: Problem, arch: Arch, selection: Selection | None = None, *, seed: int | None = None
) -> Iterator[Config]:
    """The configs of `Space.build`, as soon as each is found; one may come twice.

    seed: in random order, those of the first 100,000 combinations drawn.
    """
    selection = selection or Selection()
    for _, lists in selected(kernel, selection, arch):
        combinations = itertools.product(*lists.values())
        for combination in combinations if seed is None else _drawn(list(lists.values()), seed):
            config = Config(dict(zip(lists, combination, strict=True)))
            if all(kernel.passes(rule, config, problem, arch) for rule in kernel.rules_for(lists)):
                yield config


def _drawn(lists: Sequence[Sequence[Value]], seed: int) -> Iterator[tuple[Value, ...]]:
    """Combinations in random order, without one twice."""
    count = math.prod(map(len, lists))
    for number in random.Random(seed).sample(range(count), min(count, 100_000)):
        chosen = []
        for values in lists:
            number, place = divmod(number, len(values))
            chosen.append(values[place])
        yield tuple(chosen)

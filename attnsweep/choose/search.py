"""Search strategies: which candidate of a Space comes next.

A strategy is a generator: it yields a config, and receives the trials that have ended since its
last yield; it yields None to wait for more trials, or, to have them compiled meanwhile, the configs
that it would ask for next as things stand. It may return why it ended. It never measures or
stores; only the sweep does. See `Search` for ask and tell.
"""

from __future__ import annotations

import heapq
import math
import random as _random
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from attnsweep.choose.strategies.gp import gp
from attnsweep.core.errors import SpecError
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space

if TYPE_CHECKING:
    from attnsweep.specs.load import SweepSpec


Proposed = Config | tuple[Config, ...] | None
Proposals = Generator[Proposed, list[Trial], None]
Explained = Generator[Proposed, list[Trial], str]
"""Proposals that return why they ended."""
Strategy = Callable[[Space, int | None, int], Proposals | Explained]


def exhaustive(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Every config in the space's order, or the first `candidates` of them; `seed` is unused."""
    # Not `yield from`: a tuple's iterator cannot receive the trials.
    for config in space.configs[:candidates]:  # noqa: UP028
        yield config


def random(space: Space, candidates: int | None, seed: int) -> Proposals:
    """Draw `candidates` configs without repeats; the same for equal seed, family and problem."""
    source = _random.Random(f"{seed} {space.kernel.name} {space.problem.label}")
    count = len(space.configs) if candidates is None else min(candidates, len(space.configs))
    for config in source.sample(space.configs, count):  # noqa: UP028
        yield config


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


DEFAULT_STRATEGY = "gp"
"""The strategy of commands that take no spec, and of shipped specs that record no tables."""
STRATEGIES: dict[str, Strategy] = {
    "exhaustive": exhaustive,
    "gp": gp,
    "random": random,
    "staged": staged,
}


def strategy(name: str) -> Strategy:
    """The strategy called `name`. Raises SpecError with the known names."""
    if name not in STRATEGIES:
        raise SpecError(f"unknown strategy {name!r}", hint=f"there are: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


class Search:
    """One strategy at work on one space. Asks may precede tells: compiling overlaps timing."""

    def __init__(
        self, name: str | Strategy, space: Space, *, candidates: int | None = None, seed: int = 0
    ) -> None:
        """name: a strategy's name, or a strategy of your own."""
        chosen = strategy(name) if isinstance(name, str) else name
        self._proposals = chosen(space, candidates, seed)
        self._told: list[Trial] = []
        self._begun = False
        self.why_ended: str | None = None
        """Why it asks for nothing more; None before that, and of strategies that do not say."""
        self.likely: tuple[Config, ...] = ()
        """What it would ask for next if what it waits for were as it expects."""

    def ask(self) -> Config | None:
        """The next config to try; None if there are no more, or none before a tell."""
        told, self._told = self._told, []
        try:
            proposed = self._proposals.send(told) if self._begun else next(self._proposals)
        except StopIteration as end:
            proposed, self.why_ended = None, end.value or self.why_ended
        self._begun = True
        self.likely = proposed if isinstance(proposed, tuple) else ()
        return None if isinstance(proposed, tuple) else proposed

    def tell(self, trial: Trial) -> None:
        """Tell the row of a config asked for earlier; the strategy sees it at the next ask."""
        self._told.append(trial)


def search_of(spec: SweepSpec, space: Space) -> Search:
    """The search of a space that a spec asks for."""
    settings = spec.search
    return Search(settings.strategy, space, candidates=settings.candidates, seed=settings.seed)


def exhaustively(spec: SweepSpec) -> SweepSpec:
    """The spec with every candidate tried: no cap, no budget."""
    update = {"strategy": "exhaustive", "candidates": None, "budget_s": None}
    return replace(spec, search=spec.search.model_copy(update=update))

"""Search strategies: which candidate of a Space comes next.

A strategy is a generator: it yields a config, and receives the trials that have ended since its
last yield; it yields None to wait for more trials. It may return why it ended. It never measures or
stores; only the sweep does. See `Search` for ask and tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnsweep.choose.strategies.gp import gp
from attnsweep.choose.strategies.simple import Strategy, exhaustive, random
from attnsweep.choose.strategies.staged import staged
from attnsweep.core.errors import SpecError
from attnsweep.core.trial import Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space

if TYPE_CHECKING:
    from attnsweep.specs.load import SweepSpec


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

    def ask(self) -> Config | None:
        """The next config to try; None if there are no more, or none before a tell."""
        told, self._told = self._told, []
        try:
            if self._begun:
                return self._proposals.send(told)
            self._begun = True
            return next(self._proposals)
        except StopIteration as end:
            self.why_ended = end.value or self.why_ended
            return None

    def tell(self, trial: Trial) -> None:
        """Tell the row of a config asked for earlier; the strategy sees it at the next ask."""
        self._told.append(trial)


def search_of(spec: SweepSpec, space: Space) -> Search:
    """The search of a space that a spec asks for."""
    settings = spec.search
    return Search(settings.strategy, space, candidates=settings.candidates, seed=settings.seed)


def exhaustively(spec: SweepSpec) -> SweepSpec:
    """The same spec with every candidate tried, without a cap and without a budget."""
    update = {"strategy": "exhaustive", "candidates": None, "budget_s": None}
    return replace(spec, search=spec.search.model_copy(update=update))

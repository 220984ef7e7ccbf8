"""One problem's candidates, in the order in which their code is ready.

Candidates are asked for far ahead of their turn and compile in threads meanwhile. If the spec
limits a problem's time, candidates that are not ready by then are left for a later run.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from attnsweep.build.candidate import Build, builds_of
from attnsweep.build.nvrtc import Compiler, Cubin
from attnsweep.choose.search import Proposals, Search, search_of
from attnsweep.family.declare import Config
from attnsweep.family.space import Space
from attnsweep.problem import Problem
from attnsweep.spec.load import SweepSpec
from attnsweep.spec.plan import PlannedProblem
from attnsweep.trial import Trial

# Candidates asked for ahead of their turn. Between two batches all cores wait for the slowest
# candidate.
_LOOKAHEAD = 2048
# The same if the spec limits the time: a candidate asked for is compiled even if it is never tried.
_LOOKAHEAD_IN_TIME = 64
_PROGRESS_S = 0.1


class Queue:
    """The candidates that the searches of one problem ask for."""

    def __init__(
        self, item: PlannedProblem, spec: SweepSpec, compiler: Compiler, limit: int | None
    ) -> None:
        """limit: bytes of workspace above which a call is cut into chunks."""
        self.problem: Problem = item.problem
        self.builds: list[Build] = []
        """The current batch."""
        self._searches = [(space, search_of(spec, space)) for space in item.spaces]
        self.compiler, self.limit = compiler, limit
        self._budget_s = spec.search.budget_s
        self._deadline = math.inf
        self._begun = False
        self._before = 0
        """Candidates of earlier batches."""

    @property
    def rounds_scores(self) -> set[int]:
        """How often the families round scores: what their limits come from takes a while."""
        return {space.kernel.rounds_scores for space, _ in self._searches}

    def start(self) -> None:
        """Start the problem's time."""
        self._deadline = time.monotonic() + (self._budget_s or math.inf)

    def ask(self) -> list[Build]:
        """Replace the batch by the next candidates; empty if there are none, or time is up."""
        self.builds = []
        if time.monotonic() <= self._deadline:
            ahead = _LOOKAHEAD if self._budget_s is None else _LOOKAHEAD_IN_TIME
            for space, search in self._searches:
                configs = itertools.islice(iter(search.ask, None), ahead)
                self.builds += builds_of(space, configs, self.compiler, self.limit)
        return self.builds

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The spaces that are searched."""
        return tuple(space for space, _ in self._searches)

    def only(self, chosen: Sequence[tuple[str, Config]]) -> None:
        """Ask for these configs of the families alone, and begin with them; time is up for none."""

        def listed(space: Space, candidates: int | None, seed: int) -> Proposals:
            for family, config in chosen:
                if family == space.kernel.name:
                    yield config

        self._searches = [(space, Search(listed, space)) for space in self.spaces]
        self._deadline = math.inf
        self.ask()

    def tell(self, build: Build, trial: Trial) -> None:
        """Tell a candidate's row to the search that asked for it."""
        for space, search in self._searches:
            if space.kernel is build.kernel:
                search.tell(trial)

    @property
    def endings(self) -> dict[str, str]:
        """Family to why its search ended, of searches that say so."""
        return {
            space.kernel.name: search.why_ended
            for space, search in self._searches
            if search.why_ended
        }

    def submit(self) -> None:
        """Start to compile the batch."""
        for build in self.builds:
            build.submit()

    def compiled(
        self, kept: Collection[int], progress: Callable[[int, int], None]
    ) -> Iterator[Build]:
        """The batch, each build when its code is ready; after the deadline, only those in `kept`.

        kept: ids of builds that are already measured. The others then get no row, as if they had
        not been asked for, and a later run tries them. The problem's first build always comes.
        progress: called with the number of ready builds and of all, of this batch and of those
        before it: a search that learns asks for a few at a time.
        """
        builds, given, look_at = self.builds, set[int](), 0.0
        before = self._before
        self._before += len(builds)
        for build in as_ready(builds):
            if self._begun and time.monotonic() > self._deadline:
                break
            if time.monotonic() >= look_at:  # counting 582 builds takes 0.5 ms
                progress(before + sum(b.ready for b in builds), self._before)
                look_at = time.monotonic() + _PROGRESS_S
            self._begun = True
            given.add(id(build))
            yield build
        yield from as_ready([b for b in builds if id(b) in kept and id(b) not in given])
        progress(self._before, self._before)


def as_ready(builds: Sequence[Build]) -> Iterator[Build]:
    """The builds in order of completion."""
    # Checking all builds again for each one took 1.4 ms at 582 builds.
    news: SimpleQueue[Build] = SimpleQueue()
    for build in builds:
        for future in build.futures.values():
            future.add_done_callback(partial(_tell, news, build))
        if not build.futures:
            news.put(build)
    left = {id(build) for build in builds}
    while left:
        build = news.get()
        if id(build) in left and build.ready:
            left.remove(id(build))
            yield build


def _tell(news: SimpleQueue[Build], build: Build, _: Future[Cubin]) -> None:
    news.put(build)

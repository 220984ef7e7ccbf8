"""One problem's candidates, in the order in which their code is ready.

Candidates are asked for far ahead of their turn and compile in threads meanwhile. If the spec
limits a problem's time, a later run takes the candidates that are not ready by then. Candidates
with the same machine code are measured once.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from attnsweep.choose.search import Proposals, Search, search_of
from attnsweep.compile.calls import builds_of
from attnsweep.compile.candidate import Build, as_ready
from attnsweep.compile.nvrtc import NOW, PERHAPS, SOON, Compiler
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status, Trial
from attnsweep.family.family import Config
from attnsweep.family.space import Space
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem

LOOKAHEAD = 2048
"""Candidates asked for ahead of their turn. Between two batches all cores wait for the slowest
candidate."""
LOOKAHEAD_IN_TIME = 64
"""The same if the spec limits the time: one that is asked for is compiled even if never tried."""
_PROGRESS_S = 0.1


class Candidates:
    """The candidates that the searches of one problem ask for."""

    def __init__(
        self, item: PlannedProblem, spec: SweepSpec, compiler: Compiler, limit: int | None
    ) -> None:
        """limit: bytes of workspace above which a call is cut into chunks."""
        self.problem: Problem = item.problem
        self.builds: list[Build] = []
        """The current batch."""
        self._likely: list[Build] = []
        """The start of the next batch, as the searches expect it, to keep idle threads busy."""
        self._searches = [(space, search_of(spec, space)) for space in item.spaces]
        self.compiler, self.limit = compiler, limit
        self._budget_s = spec.search.budget_s
        self._deadline = math.inf
        self._begun = False
        self._told: set[int] = set()
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
            ahead = LOOKAHEAD if self._budget_s is None else LOOKAHEAD_IN_TIME
            for space, search in self._searches:
                configs = itertools.islice(iter(search.ask, None), ahead)
                self.builds += builds_of(space, configs, self.compiler, self.limit)
        room = max(0, self.compiler.threads - len(self.builds)) if self.builds else 0
        likely = [(space, config) for space, search in self._searches for config in search.likely]
        self._likely = [
            build
            for space, config in likely[:room]
            for build in builds_of(space, (config,), self.compiler, self.limit)
        ]
        return self.builds

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The spaces that are searched."""
        return tuple(space for space, _ in self._searches)

    def only(self, chosen: Sequence[tuple[str, Config]]) -> None:
        """Replace the search by these configs, without a time limit, and ask for the first."""

        def listed(space: Space, candidates: int | None, seed: int) -> Proposals:
            for family, config in chosen:
                if family == space.kernel.name:
                    yield config

        self._searches = [(space, Search(listed, space)) for space in self.spaces]
        self._deadline = math.inf
        self.ask()

    def tell(self, build: Build, trial: Trial) -> None:
        """Tell a candidate's row to the search that asked for it; again does nothing."""
        if id(build) in self._told:
            return
        self._told.add(id(build))
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

    def submit(self, turn: int = NOW) -> None:
        """Start to compile the batch, and behind it what is likely to come next."""
        for build in self.builds:
            build.submit(turn)
        for build in self._likely:
            build.submit(SOON if turn == NOW else PERHAPS)

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


_MEASURED = ("status", "detail", "accuracy", "time_us", "first_us", "stages_us", "launch_us")
_KEPT = ("resources", "schedule", "call", "fingerprint", "first_us", "tried_s")


class SameCode:
    """The candidates of one problem that ran, by their machine code."""

    def __init__(self) -> None:
        self._measured: dict[tuple[object, ...], tuple[Build, Trial]] = {}
        self._order: dict[int, int] = {}

    def asked(self, builds: Sequence[Build]) -> None:
        """Note the order in which candidates were asked for."""
        for build in builds:
            self._order.setdefault(id(build), len(self._order))

    def add(self, build: Build, trial: Trial) -> None:
        """Remember a candidate that ran, if it is the first of its code."""
        if trial.status in (Status.OK, Status.NOISY):
            self._measured.setdefault(build.machine_code(), (build, trial))

    def of(self, build: Build) -> tuple[Build, Trial] | None:
        """The measured candidate with the same machine code, and its row; None if none has run."""
        return self._measured.get(build.machine_code()) if build.compiled else None

    def replace(self, build: Build, row: Trial) -> list[tuple[Build, Trial]]:
        """The rows of a candidate whose code ran. row: its own, compiled and not pruned.

        The candidate that was asked for first gets the measured row. Chance decides which of two
        is compiled first, and chance must not name the winner, so the other one may hand over its
        measurement.
        """
        other, measured = self._measured[build.machine_code()]
        if self._order[id(build)] > self._order[id(other)]:
            return [(build, same_code(row, other))]
        heir = row.with_(**{name: getattr(measured, name) for name in _MEASURED})
        self._measured[build.machine_code()] = (build, heir)
        # Keep its first_us: the search was told that time, and is told it again after a resume.
        left = other.row(
            status=measured.status, **{name: getattr(measured, name) for name in _KEPT}
        )
        return [(other, same_code(left, build)), (build, heir)]


def same_code(row: Trial, as_: Build) -> Trial:
    """The row of a candidate that another one stands for."""
    same = f"same machine code as {as_.kernel.name} {as_.config.label}"
    return row.with_(status=Status.PRUNED, detail=same)

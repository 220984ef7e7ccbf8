"""Which worker gets which problem, and what happens to the problem of a worker that is lost.

No I/O, no clock, no threads: the owner tells what happened, and asks. A task is a problem's number;
a worker is the name of a card. A task is with one worker at a time and is done once, so that no
result of one problem is mixed from two cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MOST_LOSSES = 2
"""A task that was lost as often as this is given up: it would take down every worker in turn.

A worker that is gone may have been taken away for another reason, so one loss more is allowed then:
of 64 workers, 6 of which left at random, two had the same task in 1 of 10 simulated runs.
"""
MOST_FAULTS = 3
"""A worker that lost as many tasks in a row is left out."""


@dataclass(frozen=True, slots=True)
class Task:
    """A problem handed to a worker. last: if it is lost once more, it is given up."""

    number: int
    last: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """The outcome of a worker's fault. task: what the worker had. left_out: it gets no more."""

    task: int | None
    given_up: bool
    left_out: bool


class Assignment:
    """The tasks of a run, the costliest first.

    costs: of each task, in any unit. bound: task to the worker that has begun it in an earlier run;
    no other gets it while that worker is there. guesses: worker to the task that it has begun to
    prepare and gets first, unless that costs less than half of the costliest.
    """

    def __init__(
        self,
        costs: Sequence[float],
        bound: Mapping[int, str] | None = None,
        guesses: Mapping[str, int] | None = None,
    ) -> None:
        self._pending = sorted(range(len(costs)), key=lambda task: (-costs[task], task))
        self._rank = {task: place for place, task in enumerate(self._pending)}
        self._bound = dict(bound or {})
        self._open: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        most = max(costs, default=0.0)
        self._guesses = {w: t for w, t in (guesses or {}).items() if 2 * costs[t] >= most}
        self._losers: dict[int, list[str]] = {}
        self._left: Counter[int] = Counter()
        self._faults: Counter[str] = Counter()
        self._workers: dict[str, None] = {}
        self._done: list[int] = []
        self._given_up: list[int] = []

    # -- what is known ----------------------------------------------------------------------

    @property
    def workers(self) -> Collection[str]:
        """The workers that are there and not left out."""
        return self._workers.keys()

    @property
    def done(self) -> Sequence[int]:
        """Finished tasks, first finished first."""
        return self._done

    @property
    def given_up(self) -> Sequence[int]:
        """Tasks that are not tried again."""
        return self._given_up

    @property
    def pending(self) -> Sequence[int]:
        """Tasks that no worker has, the costliest first."""
        return self._pending

    @property
    def expected(self) -> Collection[int]:
        """Tasks that workers have begun to prepare, also workers that have not joined yet."""
        return {*self._guesses.values(), *self._ahead.values()}

    @property
    def over(self) -> bool:
        """Whether every task is done or given up."""
        return not self._pending and not self._open

    # -- what happens -----------------------------------------------------------------------

    def join(self, worker: str, begun: Collection[int] = (), heir_of: str | None = None) -> None:
        """A worker is there, perhaps again, and perhaps late.

        begun: tasks that its card has begun in an earlier run; those that nobody has yet are bound
        to it. heir_of: a worker that is gone and had the same card, whose losses count on.
        """
        if heir_of is not None:
            self._faults[worker] += self._faults.pop(heir_of, 0)
            for losers in self._losers.values():
                losers[:] = [worker if loser == heir_of else loser for loser in losers]
        self._workers[worker] = None
        if worker in self._guesses:
            self._ahead[worker] = self._guesses.pop(worker)
        for task in begun:
            if task in self._pending and task not in self._losers:
                self._bound[task] = worker

    def failing(self, worker: str) -> bool:
        """Whether a worker has lost too many tasks in a row to get another."""
        return self._faults[worker] >= MOST_FAULTS

    def assign(self, worker: str) -> Task | None:
        """Hand a free worker its next task; None if there is none for it now.

        It may get one later: ask again after any loss, and after any worker has left.
        """
        assert worker in self._workers, worker
        assert worker not in self._open, worker
        task = self._choose(worker)
        if task is None:
            return None
        self._pending.remove(task)
        self._ahead = {who: what for who, what in self._ahead.items() if what != task}
        self._ahead.pop(worker, None)
        self._open[worker] = task
        return Task(task, self._too_often(task, 1))

    def ahead(self, worker: str) -> int | None:
        """The task that a worker will probably get next, to prepare it; no promise."""
        others = {task for who, task in self._ahead.items() if who != worker}
        free = [task for task in self._for(worker) if task not in others]
        # These take the costliest first.
        idle = len(self._workers.keys() - self._open.keys() - self._ahead.keys() - {worker})
        if len(free) <= idle:
            return None
        self._ahead[worker] = free[idle]
        return free[idle]

    def finish(self, worker: str) -> int:
        """A worker has done its task; returns which."""
        task = self._open.pop(worker)
        self._done.append(task)
        self._faults[worker] = 0
        return task

    def lose(self, worker: str, *, gone: bool = False, blame: bool = True) -> Loss:
        """A worker failed, with its task if it has one. gone: it is not there now.

        blame: whether worker or task may be the reason.
        """
        task = self._open.pop(worker, None)
        if blame and (task is not None or not gone):  # an idle worker may come and go
            self._faults[worker] += 1
        left_out = gone or self.failing(worker)
        if left_out:
            self._workers.pop(worker, None)
        self._ahead.pop(worker, None)
        if task is None:
            return Loss(None, given_up=False, left_out=left_out)
        self._bound.pop(task, None)  # it begins anew, so any worker may have it
        if blame:
            self._losers.setdefault(task, []).append(worker)
            self._left[task] += gone
        given_up = blame and self._too_often(task)
        if given_up:
            self._given_up.append(task)
        else:
            self._pending.append(task)
            self._pending.sort(key=self._rank.__getitem__)
        return Loss(task, given_up, left_out)

    def _too_often(self, task: int, more: int = 0) -> bool:
        """Whether a task is given up, once it is lost `more` times more."""
        losses = len(self._losers.get(task, ())) + more
        return losses >= MOST_LOSSES + (self._left[task] > 0)

    # -- the choice -------------------------------------------------------------------------

    def _choose(self, worker: str) -> int | None:
        mine = self._for(worker)
        own = [task for task in mine if self._bound.get(task) == worker]
        if own:
            return own[0]
        if self._ahead.get(worker) in mine:
            return self._ahead[worker]
        others = set(self._ahead.values())
        return next((task for task in mine if task not in others), mine[0] if mine else None)

    def _for(self, worker: str) -> list[int]:
        """The pending tasks that a worker may have."""
        return [task for task in self._pending if self._may(worker, task)]

    def _may(self, worker: str, task: int) -> bool:
        owner = self._bound.get(task, worker)
        if owner != worker and owner in self._workers:
            return False
        losers = self._losers.get(task, ())
        return worker not in losers or all(other in losers for other in self._workers)

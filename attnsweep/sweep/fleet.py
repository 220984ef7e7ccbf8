"""Several cards, each swept by a child process; this process alone writes the run directory.

Not threads: a sweep is busy with Python for 0.9 of a problem's 6 s, and eight would wait in turns.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from attnsweep.core.errors import AttnsweepError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Trial, cards_of
from attnsweep.device.cards import InstalledCard
from attnsweep.specs.plan import cost
from attnsweep.store.run import SPEC
from attnsweep.sweep import messages
from attnsweep.sweep.assign import Assignment, Task
from attnsweep.sweep.cards import Engine, Job, all_held, hello_of, longest_silence_s, opening_of
from attnsweep.sweep.messages import Message, StartChild
from attnsweep.sweep.session import SweepSession, in_turns

Arrivals = Callable[
    [Callable[[Sequence[InstalledCard], float], None]], AbstractContextManager[None]
]
"""Calls `Engine.there` now and then while the context lasts."""
# How long cards of a cluster are waited for before the first problem.
_READY_S = 60.0


class Fleet:
    """Cards of one kind, of this machine or of a cluster; each problem is on one of them."""

    several = True

    def __init__(
        self,
        cards: Sequence[InstalledCard],
        *,
        start_child: StartChild | None = None,
        silence_s: float | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """start_child: starts the process of a card. silence_s: seconds without a word after which
        a child hangs (default: longer than any of its calls may take). arrivals: tells of cards
        that come later.
        """
        self._cards, self._silence_s = cards, silence_s
        self._start_child = start_child or messages.start_child
        self._arrivals = arrivals
        self.firsts: Sequence[Problem] = ()

    @contextmanager
    def opened(self, session: SweepSession) -> Iterator[None]:
        """See `Cards`."""
        s, names = session, [card.uuid for card in self._cards]
        with ExitStack() as stack:
            stack.enter_context(all_held(self._cards, s.wait, s.observer))
            # Before the plan says which are the longest, so that the cards begin on them at once.
            # With a shard only the plan says which problems there are.
            problems = [entry.problem for entry in s.spec.problems] if s.shard is None else []
            problems.sort(key=lambda problem: -problem.flops)
            self._guesses = dict(zip(names, problems, strict=False))
            self.firsts = [*self._guesses.values()]
            self._engine = Engine(
                self._cards,
                self._start_child,
                hello_of(s.spec, s.cache_dir, self._remote),
                silence_s=self._silence_s or longest_silence_s(s.spec),
                note=s.observer.note,
                first={
                    name: {"first": {"problem": problem.facts, "seed": s.seed}}
                    for name, problem in self._guesses.items()
                },
            )
            stack.enter_context(self._engine)
            if self._arrivals is not None:
                stack.enter_context(self._arrivals(self._engine.there))
            yield

    @property
    def _remote(self) -> bool:
        return any(card.hashed is None for card in self._cards)

    def describe(self) -> Environment:
        """See `Cards`."""
        return self._engine.first()

    def hold(self, environment: Environment) -> None:
        """The cards are held since the fleet was opened."""

    def sweep(self, session: SweepSession) -> bool:
        """See `Cards`."""
        s, engine, began = session, self._engine, time.monotonic()
        job = _SweepJob(s)
        with ExitStack() as at_end:
            try:
                known = {card: card.hashed for card in self._cards}
                if self._remote:  # a begun problem goes to its card, so all must say who they are
                    known |= {card: each.uuid for card, each in engine.ready(_READY_S).items()}
                s.describe(known.values())
                for card in self._cards:
                    job.meet(card, known[card])
                numbers = {item.problem: number for number, item in enumerate(s.planned)}
                guesses = {name: numbers[problem] for name, problem in self._guesses.items()}
                costs = [cost(item) for item in s.planned]
                assignment = Assignment(costs, job.begun(known), guesses)
                at_end.enter_context(_compiling_ahead(s, assignment, len(self._cards)))
                return engine.run(assignment, job, s.compiler)
            finally:
                engine.stop()  # stores what the children told meanwhile
                s.observer.note(f"took {time.monotonic() - began:.0f} s on {len(job.on)} cards")


class _SweepJob(Job):
    """The problems of a sweep, whose rows go to its store."""

    def __init__(self, session: SweepSession) -> None:
        problems = [item.problem for item in session.planned]
        super().__init__(problems, session.environment, session.observer)
        self._session, self._store = session, session.store
        of_spec = [entry.problem for entry in session.spec.problems]
        self._places = [of_spec.index(problem) for problem in problems]
        self._measures_on: dict[int, str | None] = {}
        self._last: dict[int, Trial] = {}

    def begun(self, known: Mapping[InstalledCard, str | None]) -> dict[int, str]:
        """The number of each problem that one of the cards has begun, to that card.

        known: the cards' UUIDs as in rows.
        """
        names = {uuid: card.uuid for card, uuid in known.items() if uuid is not None}
        found = {}
        for number, problem in enumerate(self.problems):
            uuids = cards_of(self._store.rows_of(problem))
            if len(uuids) == 1 and uuids[0] in names:
                found[number] = names[uuids[0]]
        return found

    def joined(self, card: InstalledCard, here: Environment) -> Collection[int]:
        super().joined(card, here)
        self._measures_on[card.number] = here.uuid
        self._session.describe([here.uuid])
        return self.begun({card: here.uuid})

    def opening(self) -> Message:
        spec = self._session.spec
        return opening_of(self._store.directory / SPEC, spec.families, spec.used)

    def task(self, task: Task, then: int | None) -> Message:
        rows = self._store.rows_of(self.problems[task.number])
        return {
            "do": "sweep",
            "problem": self._places[task.number],
            "last": task.last,
            "then": None if then is None else self._places[then],
            "input_seed": self._session.seed,
            "rows": [row.model_dump(mode="json") for row in rows],
        }

    def heard(self, card: InstalledCard, number: int, message: Message) -> None:
        problem = self.problems[number]
        match message["say"]:
            case "row":
                row = Trial.model_validate(message["row"])
                if row.problem != problem:
                    raise ValueError(f"a row of {row.problem.label}")
                measured_on = row.machine.get("uuid")
                if measured_on not in (None, self._measures_on[card.number]):
                    raise ValueError(f"a row of card {measured_on}")
                self._store.append(row)
                self._last[card.number] = row
            case "tried":
                told = message.get("row")
                row = self._last[card.number] if told is None else Trial.model_validate(told)
                self.on[card.number].tried(row, kept=message["kept"])
            case "aside":
                self._store.set_aside(problem)
            case "ended":
                self._store.end_searches(message["problem"], dict(message["endings"]))
            case "keep":
                if Path(message["name"]).name != message["name"]:
                    raise ValueError(f"{message['name']!r} is no file name")
                data = base64.b64decode(message["data"], validate=True)
                self._store.keep(message["name"], data)
            case _:
                super().heard(card, number, message)

    def finished(self, card: InstalledCard, number: int, message: Message) -> None:
        super().finished(card, number, message)
        self._session.finished(self.problems[number])


@contextmanager
def _compiling_ahead(s: SweepSession, assignment: Assignment, at_once: int) -> Iterator[None]:
    """Compile the first candidates of problems that nobody has begun, while the children start.

    In the order in which they will be asked for: those of the first problems in turns.
    """
    order = [n for n in assignment.pending if not s.store.rows_of(s.planned[n].problem)]
    order.sort(key=lambda number: number not in assignment.expected)
    ended = threading.Event()

    def submit() -> None:
        try:
            for group in [order[:at_once], *([number] for number in order[at_once:])]:
                for build in in_turns(s.share.candidates(s.planned[n]).ask() for n in group):
                    if ended.is_set():
                        return
                    build.submit()
        except (AttnsweepError, RuntimeError):
            return  # the child whose problem it is meets the same error, or the pool is closed

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

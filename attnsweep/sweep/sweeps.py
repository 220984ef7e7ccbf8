"""A sweep on several cards of one machine: one run directory, which this process alone writes."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from attnsweep.compile.advice import spilling, unused_parameters
from attnsweep.compile.candidate import workspace_limit
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import AttnsweepError, SpecError
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Trial, cards_of
from attnsweep.device.cards import InstalledCard
from attnsweep.family.family import Kernel
from attnsweep.reports import tables
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import (
    PlannedProblem,
    Shard,
    candidate_counts,
    cost,
    input_seed,
    plan_facts,
    run_name,
)
from attnsweep.store.run import SPEC
from attnsweep.store.store import Store
from attnsweep.sweep.assign import Schedule, Task
from attnsweep.sweep.candidates import Queue
from attnsweep.sweep.cards import (
    Engine,
    all_held,
    hello_of,
    longest_silence_s,
    opening_of,
    refusal_of,
)
from attnsweep.sweep.kept import measured_elsewhere, of_these_cards, retire
from attnsweep.sweep.messages import Message, StartChild, start_child
from attnsweep.sweep.session import Outcome
from attnsweep.sweep.start import in_turns, start

Helpers = Callable[[Compiler, Callable[[str], None]], AbstractContextManager[None]]
"""Lets others compile too while the context lasts, and says in notes what becomes of it."""
Arrivals = Callable[
    [Callable[[Sequence[InstalledCard], float], None]], AbstractContextManager[None]
]
"""Calls `Engine.there` now and then while the context lasts."""
# How long cards of a cluster are waited for before the first problem.
_READY_S = 60.0


def run(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    cards: Sequence[InstalledCard],
    *,
    results: Path,
    fresh: bool = False,
    limit: int | None = None,
    shard: Shard | None = None,
    cache_dir: Path | None = None,
    wait: bool = False,
    observer: Observer | None = None,
    start_child: StartChild = start_child,
    silence_s: float | None = None,
    helpers: Helpers | None = None,
    arrivals: Arrivals | None = None,
) -> Outcome:
    """Sweep with one child process for each card, each problem on one of them.

    cards: of one kind. start_child: starts the process of a card. silence_s: seconds without a word
    after which a child hangs (default: longer than any of its calls may take). helpers: compile
    besides this process's threads. arrivals: tells of cards that come later. The
    other arguments and errors are those of `sweep.run`. A problem that no card could measure, or
    all cards lost, is said in the Outcome; the same command resumes.
    """
    if spec.device == "replay":
        what = "--gpus needs GPUs, and this spec replays a recording"
        raise SpecError(what, where=str(spec.document.path))
    observer = observer or Observer()
    if limit is not None:
        cap = min(limit, spec.search.candidates or limit)
        spec = replace(spec, search=spec.search.model_copy(update={"candidates": cap}))
    with ExitStack() as locks, ExitStack() as at_end:
        locks.enter_context(all_held(cards, wait, observer))
        remote = any(card.hashed is None for card in cards)
        hello = hello_of(spec, cache_dir, remote)
        silence_s = silence_s or longest_silence_s(spec)
        seed = input_seed(spec)  # one for all problems: a card computes ahead for its next one
        # Before the plan says which are the longest, so that the cards begin on them as they start.
        guessed = dict(zip((card.uuid for card in cards), longest(spec, shard), strict=False))
        first = {name: first_of(problem, seed) for name, problem in guessed.items()}
        engine = Engine(
            cards, start_child, hello, silence_s=silence_s, note=observer.note, first=first
        )
        at_end.enter_context(engine)
        if arrivals is not None:
            at_end.enter_context(arrivals(engine.there))
        environment, planned, compiler = start(
            spec, kernels, Described(engine), cache_dir, at_end,
            shard=shard, firsts=[*guessed.values()],
        )  # fmt: skip
        if helpers is not None:
            at_end.enter_context(helpers(compiler, observer.note))
        observer.planned(candidate_counts(planned, spec.search.candidates))
        for warning in unused_parameters(
            (space for item in planned for space in item.spaces), compiler.arch
        ):
            observer.note(warning)
        directory = results / environment.slug / run_name(spec, shard)
        anywhere = environment.model_copy(update={"uuid": None})
        elsewhere = not fresh and measured_elsewhere(directory, anywhere)
        if elsewhere:
            observer.note(f"set aside earlier rows, measured with {elsewhere}")
        store = at_end.enter_context(Store.open(directory, fresh=fresh or bool(elsewhere)))
        at_end.callback(engine.stop)  # which stores what is told meanwhile, so before that closes
        known = {card: card.hashed for card in cards}
        if remote:  # a problem that a card has begun goes to it, so all must say which they are
            known |= {card: each.uuid for card, each in engine.ready(_READY_S).items()}
        first_cards = {card: known[card] for card in cards}
        job = _Sweeps(spec, kernels, environment, planned, store, observer, first_cards, seed)
        job.describe([*known.values(), *cards_of(store.trials)], plan_facts(planned))
        retire(store, kernels, observer)
        numbers = {item.problem: number for number, item in enumerate(planned)}
        guesses = {name: numbers[problem] for name, problem in guessed.items()}
        schedule = Schedule([cost(item) for item in planned], job.begun(known), guesses)
        at_end.enter_context(_compiling_ahead(job, schedule, compiler, environment))
        began, interrupted, left = time.monotonic(), False, True
        try:
            left = engine.run(schedule, job, compiler)
        except KeyboardInterrupt:
            interrupted = True
        engine.stop()
        compiler.close()
        observer.note(f"took {time.monotonic() - began:.0f} s on {job.cards} cards")
        spills = spilling(store.trials, spec)
        if spills is not None:
            observer.note(spills)
        missing = sorted({*range(len(planned))} - {*schedule.done})
        unmeasured = tuple(planned[number].problem.label for number in missing)
        return Outcome(store.finish(tables.files), interrupted, unmeasured, not left)


# -- for every job of several cards -----------------------------------------------------------


class Described:
    """The first card that is ready, in the place of a Gpu that is only asked what it is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self, **_: object) -> Environment:
        """See `Gpu`. Raises NoGpuError."""
        return self._engine.first()


def longest(spec: SweepSpec, shard: Shard | None) -> list[Problem]:
    """The problems of a spec that take longest, as far as that can be said without a plan; of a
    part of a spec none, because the plan says which it has.
    """
    problems = [entry.problem for entry in spec.problems] if shard is None else []
    return sorted(problems, key=lambda problem: -problem.flops)


def first_of(problem: Problem, seed: int) -> Message:
    """What the first message says besides if a card will probably open this problem first."""
    return {"first": {"problem": problem.facts, "seed": seed}}


# -- the sweep --------------------------------------------------------------------------------


class _Sweeps:
    """What the children are told to do, and what becomes of what they tell."""

    def __init__(
        self,
        spec: SweepSpec,
        kernels: Mapping[str, Kernel],
        environment: Environment,
        planned: Sequence[PlannedProblem],
        store: Store,
        observer: Observer,
        cards: Mapping[InstalledCard, str | None],
        seed: int,
    ) -> None:
        """cards: those at the start, with their UUIDs as in rows if they have told them.

        seed: of the inputs of all problems.
        """
        self.spec, self.kernels, self.planned, self.store = spec, kernels, planned, store
        self._environment, self._observer = environment, observer
        self._on = {
            card.number: observer.on(card.number, uuid or card.uuid) for card, uuid in cards.items()
        }
        self._measures_on: dict[int, str | None] = {}
        self._last: dict[int, Trial] = {}
        self._uuids: set[str | None] = set()
        self._input_seed = seed
        self._left = len(planned)
        problems = [entry.problem for entry in spec.problems]
        self._places = [problems.index(item.problem) for item in planned]

    @property
    def cards(self) -> int:
        """How many cards there are or were."""
        return len(self._on)

    def describe(
        self, uuids: Iterable[str | None], facts: Sequence[Mapping[str, object]] | None = None
    ) -> None:
        """Write what the run is of. uuids: more of its cards. facts: of its plan, at first."""
        self._uuids.update(uuids)
        where = of_these_cards(self._environment, self._uuids)
        self.store.describe(self.spec.resolved(self.store.directory), where, facts)

    def begun(self, known: Mapping[InstalledCard, str | None]) -> dict[int, str]:
        """The number of each problem that one of the cards has begun, to that card.

        known: the cards' UUIDs as in rows.
        """
        names = {uuid: card.uuid for card, uuid in known.items() if uuid is not None}
        found = {}
        for number in range(len(self.planned)):
            uuids = cards_of(self._rows(number))
            if len(uuids) == 1 and uuids[0] in names:
                found[number] = names[uuids[0]]
        return found

    def has_rows(self, number: int) -> bool:
        """Whether an earlier run has begun a problem."""
        return bool(self._rows(number))

    def _rows(self, number: int) -> list[Trial]:
        return self.store.rows_of(self.planned[number].problem)

    def label(self, number: int) -> str:
        """See Job."""
        return self.planned[number].problem.label

    def refusal(self, here: Environment) -> str | None:
        """See Job."""
        return refusal_of(here, self._environment)

    def joined(self, card: InstalledCard, here: Environment) -> Collection[int]:
        """See Job."""
        if card.number not in self._on:
            self._on[card.number] = self._observer.on(card.number, here.uuid or card.uuid)
        self._measures_on[card.number] = here.uuid
        if here.uuid not in self._uuids:
            self.describe([here.uuid])
        return self.begun({card: here.uuid})

    def opening(self) -> Message:
        """See Job."""
        opening = opening_of(self.store.directory / SPEC, self.kernels, [*self.spec.families])
        return opening | {"input_seed": self._input_seed}

    def task(self, task: Task, then: int | None) -> Message:
        """See Job."""
        rows = self._rows(task.number)
        return {
            "do": "sweep",
            "problem": self._places[task.number],
            "last": task.last,
            "then": None if then is None else self._places[then],
            "rows": [row.model_dump(mode="json") for row in rows],
        }

    def heard(self, card: InstalledCard, number: int, message: Message) -> None:
        """See Job."""
        problem, on = self.planned[number].problem, self._on[card.number]
        match message["say"]:
            case "row":
                row = Trial.model_validate(message["row"])
                if row.problem != problem:
                    raise ValueError(f"a row of {row.problem.label}")
                measured_on = row.machine.get("uuid")
                if measured_on not in (None, self._measures_on[card.number]):
                    raise ValueError(f"a row of card {measured_on}")
                self.store.append(row)
                self._last[card.number] = row
            case "tried":
                told = message.get("row")
                row = self._last[card.number] if told is None else Trial.model_validate(told)
                on.tried(row, kept=message["kept"])
            case "opening":
                on.opening(problem, message["candidates"], message["kept"])
            case "trying_on":
                on.trying_on(message["label"], message["candidates"])
            case "compiled":
                on.compiled(message["done"], message["total"])
            case "racing":
                on.racing(message["alive"], message["entrants"])
            case "preparing":
                on.preparing(message["baseline"], message["done"], message["total"])
            case "prepared":
                on.prepared(message["what"], message["took_s"], message["steps_s"])
            case "timing":
                on.timing(message["done"], message["total"])
            case "note":
                on.note(message["text"])
            case "aside":
                self.store.set_aside(problem)
            case "ended":
                self.store.end_searches(message["problem"], message["endings"])
                for kernel, why in message["endings"].items():
                    on.note(f"{problem.label}: {kernel}: the search ended: {why}")
            case "keep":
                if Path(message["name"]).name != message["name"]:
                    raise ValueError(f"{message['name']!r} is no file name")
                data = base64.b64decode(message["data"], validate=True)
                self.store.keep(message["name"], data)
            case other:
                raise ValueError(f"unknown message {other!r}")

    def lost(self, card: InstalledCard) -> None:
        """See Job."""
        if card.number in self._on:
            self._on[card.number].resting(done=False)

    def finished(self, card: InstalledCard, number: int, message: Message) -> None:  # noqa: ARG002
        """See Job."""
        self._left -= 1
        self._on[card.number].resting(done=True)
        rows = self._rows(number)
        if self._left and rows:
            self._observer.ranked(rows, self._environment)


@contextmanager
def _compiling_ahead(
    job: _Sweeps, schedule: Schedule, compiler: Compiler, environment: Environment
) -> Iterator[None]:
    """Compile the first candidates of problems that nobody has begun, while the children start.

    In the order in which they will be asked for: those of the first problems in turns.
    """
    order = [number for number in schedule.pending if not job.has_rows(number)]
    order.sort(key=lambda number: number not in schedule.expected)
    limit = workspace_limit(job.spec, environment.memory_bytes)
    ended = threading.Event()
    at_once = max(1, len(schedule.workers) or len(job._on))

    def submit() -> None:
        try:
            groups = [order[:at_once], *([number] for number in order[at_once:])]
            for group in groups:
                asked = (Queue(job.planned[n], job.spec, compiler, limit).ask() for n in group)
                for build in in_turns(asked):
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

"""One child process for each card: starts them, hands out problems, and survives their faults.

Everything happens in the caller's thread, in the order in which it is told: a lost child's later
words do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from pydantic import ValidationError

from attnsweep.bench.gpu import START_TIMEOUT_S
from attnsweep.compile.nvrtc import Compiler, Cubin
from attnsweep.core.errors import CompileError, NoGpuError
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment
from attnsweep.device.cards import InstalledCard
from attnsweep.device.lock import BusyError, held
from attnsweep.family.family import Family
from attnsweep.specs.load import SweepSpec
from attnsweep.sweep.assign import Assignment, Task
from attnsweep.sweep.messages import PROGRESS, Child, Message, StartChild

_LOOK_S = 0.5
# How long a child may take to start: to import, and to wait for its GPU process.
_START_S = 2 * START_TIMEOUT_S
# How long a child may take to end when it is asked to.
_END_S = 5.0
# How long a run that has no card left waits for one that went away to come back, or for another.
AWAY_S = 60.0


# Errors that mean a malformed message.
_MALFORMED = (LookupError, TypeError, AttributeError, ArithmeticError, ValidationError, ValueError)


class Job:
    """The problems that the children work on, and what becomes of what they tell."""

    def __init__(self, problems: Sequence[Problem], here: Environment, observer: Observer) -> None:
        """here: what each card must be like. observer: of all cards."""
        self.problems, self.here, self._observer = problems, here, observer
        self.on: dict[int, Observer] = {}
        """The observer of each card that is there or was, by number."""

    def meet(self, card: InstalledCard, uuid: str | None) -> None:
        """Tell the observer of a card. uuid: as in rows, if the card has told it."""
        if card.number not in self.on:
            self.on[card.number] = self._observer.on(card.number, uuid or card.uuid)

    def joined(self, card: InstalledCard, here: Environment) -> Collection[int]:
        """A card belongs to the others, perhaps again; returns which problems it has begun."""
        self.meet(card, here.uuid)
        return ()

    def opening(self) -> Message:
        """What a child must know before its first problem."""
        raise NotImplementedError

    def task(self, task: Task, then: int | None) -> Message:
        """What a child is told to do."""
        raise NotImplementedError

    def heard(self, card: InstalledCard, number: int, message: Message) -> None:
        """A child told something of its problem. Raises KeyError or ValueError if it is invalid."""
        facts, on = dict(message), self.on[card.number]
        if (say := facts.pop("say")) == "opening":
            on.opening(self.problems[number], facts["candidates"], facts["kept"])
        elif say in PROGRESS:
            getattr(on, say)(**facts)
        else:
            raise ValueError(f"unknown message {say!r}")

    def finished(self, card: InstalledCard, number: int, message: Message) -> None:  # noqa: ARG002
        """A problem is done."""
        self.on[card.number].resting(done=True)

    def lost(self, card: InstalledCard) -> None:
        """A card has lost its problem."""
        if card.number in self.on:
            self.on[card.number].resting(done=False)


@dataclass
class _Seat:
    """A card and its child."""

    card: InstalledCard
    child: Child | None = None
    number: int = 0
    """How many children it has had; what another than the last one told does not count."""
    environment: Environment | None = None
    uuid: str | None = None
    """The UUID of the card that its children had, as rows have it."""
    task: Task | None = None
    heard_at: float = 0.0
    compiling: set[str] = field(default_factory=set)
    left_out: bool = False
    away_at: float | None = None
    """When it went away, if it may come back."""
    late: bool = False
    """Whether it came after the start, and that has not been said."""

    @property
    def name(self) -> str:
        return self.card.uuid


class Engine:
    """The children of some cards, a context manager that ends them.

    hello: the first message to each child. silence_s: a child that works and is not heard of for so
    long, and waits for no compilation, hangs. note: told of each fault. first: by the name of a
    card, what its first child is told besides hello.
    """

    def __init__(
        self,
        cards: Sequence[InstalledCard],
        start_child: StartChild,
        hello: Message,
        *,
        silence_s: float,
        note: Callable[[str], None],
        first: Mapping[str, Message] | None = None,
    ) -> None:
        self._seats = [_Seat(card) for card in cards]
        self._start_child, self._hello = start_child, hello
        self._silence_s, self._note, self._first = silence_s, note, first or {}
        self._events: SimpleQueue[tuple[_Seat, int, Message | None]] = SimpleQueue()
        self._assignment: Assignment | None = None
        self._job: Job | None = None
        self._compiler: Compiler | None = None
        self._there: tuple[float, Sequence[InstalledCard]] = (0.0, ())
        self._said: set[str] = set()

    def __enter__(self) -> Engine:
        for seat in self._seats:
            self._start(seat)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def first(self) -> Environment:
        """The environment that the first ready child reports. Raises NoGpuError."""
        while True:
            for seat in self._seats:
                if seat.environment is not None:
                    return seat.environment
            self._step()
            if not self._alive and not self._awaits:
                raise NoGpuError("no child process could use its card", hint=self._last_fault)

    def ready(self, wait_s: float) -> dict[InstalledCard, Environment]:
        """Environments of the cards that become ready within wait_s seconds."""
        ends = time.monotonic() + wait_s
        while any(s.environment is None for s in self._alive) and time.monotonic() < ends:
            self._step()
        return {s.card: s.environment for s in self._seats if s.environment is not None}

    def there(self, cards: Sequence[InstalledCard], seen_at: float) -> None:
        """All cards that are there now, in any thread: those that came or came back get a child.

        Their children must outlive the thread that starts them. seen_at: by time.monotonic(),
        before they were looked for.
        """
        self._there = (seen_at, cards)

    def run(self, assignment: Assignment, job: Job, compiler: Compiler) -> bool:
        """Work until every problem is done or given up, or every card is lost.

        Returns whether a card is left. Ctrl-C is raised.
        """
        self._assignment, self._job, self._compiler = assignment, job, compiler
        for seat in self._seats:
            if seat.child is None and not seat.left_out:
                self._start(seat)
        for seat in self._alive:
            assignment.join(seat.name)
        for seat in self._alive:
            if seat.environment is not None and seat.child is not None:
                self._ready(seat)
        while not assignment.over:
            self._hand_out()
            if not self._alive and not self._awaits:
                return False
            self._step()
        return True

    def stop(self) -> None:
        """End the children, and hear what they told until then."""
        ending = [seat for seat in self._seats if seat.child is not None]
        for child in [seat.child for seat in ending if seat.child is not None]:
            child.end()
        for seat in ending:
            assert seat.child is not None
            seat.child.stop(_END_S)
            seat.child = None
        with contextlib.suppress(Empty):
            while True:
                seat, number, message = self._events.get_nowait()
                if message is None or seat not in ending or number != seat.number:
                    continue
                with contextlib.suppress(*_MALFORMED):
                    if message["say"] not in ("fault", "gone", "away", "cubin", "compile", "ready"):
                        self._take(seat, message)

    # -- events -----------------------------------------------------------------------------

    @property
    def _alive(self) -> list[_Seat]:
        return [seat for seat in self._seats if seat.child is not None]

    @property
    def _awaits(self) -> bool:
        """Whether any card was lost so recently that the run still waits for it."""
        since = time.monotonic() - AWAY_S
        return any(seat.away_at is not None and seat.away_at > since for seat in self._seats)

    def _meet(self) -> None:
        """Start a child for each card that came, or came back after it was left out."""
        (seen_at, cards), self._there = self._there, (0.0, ())
        if not cards or (self._assignment is not None and not self._assignment.pending):
            return  # they are told again while there is something for them
        seats = {seat.name: seat for seat in self._seats}
        for card in cards:
            seat = seats.get(card.uuid)
            if seat is None:
                seat = _Seat(replace(card, number=len(self._seats)))
                self._seats.append(seat)
            elif seat.left_out and not (self._assignment and self._assignment.failing(seat.name)):
                card = replace(card, number=seat.card.number)
                back = seat.away_at is not None and seat.away_at < seen_at
                if not back and card == seat.card:
                    continue  # it was refused
                seat.card, seat.left_out, seat.away_at = card, False, None
            else:
                continue
            seat.late = True
            self._start(seat)

    def _start(self, seat: _Seat) -> None:
        seat.number += 1
        seat.environment, seat.task = None, None
        seat.compiling.clear()
        seat.heard_at = time.monotonic()
        number = seat.number
        seat.child = self._start_child(
            seat.card, lambda message: self._events.put((seat, number, message))
        )
        first = self._first.get(seat.name, {}) if number == 1 else {}
        seat.child.send({"do": "begin", **self._hello, **first})

    def _step(self) -> None:
        """Take one event, or look for children that hang; and meet the cards that came."""
        self._meet()
        try:
            seat, number, message = self._events.get(timeout=_LOOK_S)
        except Empty:
            now = time.monotonic()
            for seat in self._alive:
                starting = seat.environment is None
                limit_s = _START_S if starting else self._silence_s
                if seat.compiling or not (starting or seat.task):
                    seat.heard_at = now
                elif now - seat.heard_at > limit_s:
                    self._fault(seat, f"no word for {limit_s:g} s; it was killed")
            return
        if seat.child is None or number != seat.number:
            return
        seat.heard_at = time.monotonic()
        if message is None:
            self._fault(seat, seat.child.why)
            return
        try:
            self._take(seat, message)
        except _MALFORMED as error:
            self._fault(seat, f"it sent an invalid message: {type(error).__name__}: {error}")

    def _take(self, seat: _Seat, message: Message) -> None:
        say = message["say"]
        if say == "ready":
            seat.environment = Environment.model_validate(message["environment"])
            seat.uuid = seat.environment.uuid
            if self._job is not None:
                self._ready(seat)
        elif say in ("gone", "away", "fault"):
            away, blame = say == "away", message.get("blame", True)
            self._fault(seat, message["why"], gone=say != "fault", away=away, blame=blame)
        elif say == "waiting":
            self._note(f"{seat.card}: {message['why']}")
        elif say == "compile":
            self._compile(seat, message)
        elif say == "cubin":
            seat.compiling.discard(message["key"])
            if seat.child is not None:
                seat.child.send({"do": "cubin", **message})
        elif seat.task is None or self._job is None or self._assignment is None:
            raise ValueError(f"{say} without a problem")
        elif say == "done":
            self._job.finished(seat.card, seat.task.number, message)
            self._assignment.finish(seat.name)
            seat.task = None
        else:
            self._job.heard(seat.card, seat.task.number, message)

    def _ready(self, seat: _Seat) -> None:
        assert seat.environment is not None
        assert seat.child is not None
        assert self._job is not None
        assert self._assignment is not None
        here, before = seat.environment, None
        refused = refusal_of(here, self._job.here)
        if here.uuid is not None and seat.card.hashed not in (None, here.uuid):
            refused = "its process sees another card"
        if refused is None:
            before = self._before(seat, here)
            begun = self._job.joined(seat.card, here)
            self._assignment.join(seat.name, begun, None if before is None else before.name)
            if self._assignment.failing(seat.name):
                refused = "its card has lost too many problems in a row"
        if refused is not None:
            self._fault(seat, refused, gone=True)
            return
        if seat.late:
            seat.late = False
            heir = "" if before is None else f" with the card that was {before.card}'s"
            self._note(f"{seat.card}: it joins the run{heir}")
        seat.child.send({"do": "open", **self._job.opening()})

    def _before(self, seat: _Seat, here: Environment) -> _Seat | None:
        """The worker that had a card before another one came with it; it has none now."""
        for other in self._seats:
            if other is seat or here.uuid is None or other.uuid != here.uuid:
                continue
            if other.child is not None:
                self._fault(other, f"its card is {seat.card}'s now", gone=True)
            other.uuid, other.away_at = None, None
            its, mine = other.card.number, seat.card.number
            seat.card, other.card = replace(seat.card, number=its), replace(other.card, number=mine)
            return other
        return None

    def _hand_out(self) -> None:
        assert self._assignment is not None
        assert self._job is not None
        for seat in self._alive:
            if seat.environment is None or seat.task is not None:
                continue
            seat.task = self._assignment.assign(seat.name)
            if seat.task is not None:
                assert seat.child is not None
                then = self._assignment.ahead(seat.name)
                seat.heard_at = time.monotonic()
                seat.child.send(self._job.task(seat.task, then))

    def _fault(
        self, seat: _Seat, why: str, *, gone: bool = False, away: bool = False, blame: bool = True
    ) -> None:
        """A child failed: its problem goes to another card, and it is started again or left out.

        gone: it is left out. away: it may come back. blame: see Assignment.lose.
        """
        assert seat.child is not None
        seat.child.stop()
        seat.child = None
        lost = ""
        if self._assignment is None or self._job is None:
            left_out = gone
        else:
            loss = self._assignment.lose(seat.name, gone=gone, blame=blame)
            left_out = loss.left_out
            away = away and not self._assignment.failing(seat.name)
            self._job.lost(seat.card)
            if loss.task is not None:
                where = "to another card" if blame else "on when it is back, or on another card"
                then = "was lost twice and is left for a later run" if loss.given_up else None
                lost = f"; {self._job.problems[loss.task].label} {then or f'goes {where}'}"
        self._last_fault = f"{seat.card}: {why}"
        out = "; the card is left out" if left_out else ""
        text = f"{seat.card}: {why}{lost}{out}{' until it comes back' if away else ''}"
        if text not in self._said:
            self._note(text)
        if gone and not away:  # it may be there again, and is refused again
            self._said.add(text)
        seat.left_out, seat.away_at = left_out, time.monotonic() if away else None
        # Before there is a assignment this may not be the main thread, and a child ends with the
        # thread that started it: `run` starts it again.
        if not left_out and self._assignment is not None:
            self._start(seat)
        if not self._alive and self._awaits:
            self._note(f"no card is left: waiting up to {AWAY_S:.0f} s for one to come")

    _last_fault = ""

    # -- compiling --------------------------------------------------------------------------

    def _compile(self, seat: _Seat, message: Message) -> None:
        """Compile for a child; every stage once for all of them, with all cores."""
        assert self._compiler is not None
        key, number = message["key"], seat.number
        seat.compiling.add(key)
        future = self._compiler.submit(Path(message["source"]), message["defines"])

        def tell(done: Future[Cubin]) -> None:
            self._events.put((seat, number, {"say": "cubin", "key": key, **_answer(done)}))

        future.add_done_callback(tell)


def _answer(done: Future[Cubin]) -> Message:
    if done.cancelled():
        return {"why": "the sweep ended", "log": None}
    error = done.exception()
    if error is not None:
        log = error.log if isinstance(error, CompileError) else None
        return {"why": getattr(error, "what", str(error)), "log": log}
    cubin = done.result()
    return {
        "path": str(cubin.path),
        "digest": cubin.digest,
        "log": cubin.log,
        "seconds": cubin.seconds,
        "cached": cubin.cached,
    }


# What the cards of a run must have in common.
_ALIKE = ("gpu", "arch", "driver", "cuda", "power_limit_w", "attnsweep")


def hello_of(spec: SweepSpec, cache_dir: Path | None, remote: bool = False) -> Message:
    """The first message to each child. remote: its card is locked there, and it has its cache."""
    return {
        "timeout_s": spec.measure.timeout_s,
        "cache_dir": None if cache_dir is None or remote else str(cache_dir.absolute()),
        "remote": remote,
        "preload": list(spec.imported),
    }


def longest_silence_s(spec: SweepSpec) -> float:
    """Seconds that a child may say nothing: a new process, its problem, and a call."""
    return 3 * START_TIMEOUT_S + spec.measure.timeout_s


def opening_of(spec: Path, kernels: Mapping[str, Family], names: Sequence[str]) -> Message:
    """What a child must know of a spec; families are declared again from where they lie."""
    places = {
        name: str(kernels[name].source.parent.absolute())
        for name in names
        if not kernels[name].call  # which the spec itself says
    }
    return {"spec": str(spec.absolute()), "families": places}


@contextmanager
def all_held(cards: Sequence[InstalledCard], wait: bool, observer: Observer) -> Iterator[None]:
    """Hold the locks of all cards. Raises BusyError, which names every card that is in use."""
    with ExitStack() as locks:
        busy = []
        for card in sorted(cards, key=lambda card: card.uuid):  # two that wait never wait in a ring
            try:
                lock = held(card.hashed, str(card), wait=wait, say=observer.note)
                locks.enter_context(lock)
            except BusyError as error:
                busy.append(error)
        if busy:
            raise BusyError("\n".join(error.what for error in busy), hint=busy[0].hint)
        yield


def refusal_of(here: Environment, first: Environment) -> str | None:
    """Why a card cannot serve in a run of another one, or None."""
    for name in _ALIKE:
        this, that = getattr(here, name), getattr(first, name)
        if this != that:
            return f"another {name} than the others: {this}, not {that}"
    return None

"""Helper processes compute the expected outputs of a problem while another problem is timed.

In threads of the GPU process, NumPy's many small steps would take Python from the thread that gives
the GPU its work. Answers come as pickles through a pipe, up to some hundred megabytes of inputs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from attnsweep.core import cases as verify_cases
from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.core.threads import one_blas_thread
from attnsweep.core.timings import proving
from attnsweep.device.process import HelperProcess
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.expected import ExpectedCase
from attnsweep.verify.measures import Same
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.sample import ALL, Sample

P = ParamSpec("P")
T = TypeVar("T")
Maths = dict[tuple[Case, int], Same]
"""Errors of the rounded maths, which give the limits: see limits.limits."""

# A smaller problem is computed here before the process could answer.
_LEAST_BYTES = 2**22
# Longer than it takes, and short enough to compute it here before a problem must be open.
_LONGEST_S = 90.0
# Short turns that are kept: this problem's and the next one's, which may be the same.
_TURNS_KEPT = 3
# Imported, not run: what is pickled must be this module's, not __main__'s.
_COMMAND = [sys.executable, "-c", f"from {__name__} import main; main()"]


@dataclass(frozen=True, slots=True)
class Answer:
    """NumPy's results for all cases of a problem with one seed."""

    timed: ExpectedCase
    small: list[ExpectedCase]
    maths: Maths
    """For scores that are not rounded."""
    hard: ExpectedCase | None
    """The answer to the problem's hard case, if our own candidates are judged on it."""

    @classmethod
    def of(cls, problem: Problem, seed: int) -> Answer:
        """Compute the whole answer in this process."""
        timed, small = Case(problem), verify_cases.small_cases(problem)
        oracle = oracle_of(problem)

        def known(case: Case) -> ExpectedCase:
            sample = Sample.of(problem, seed) if case is timed else ALL
            return oracle.expected(case, seed, two_sided=case is timed, sample=sample)

        # So that a trial's time limit covers the candidate's work only.
        def maths(case: Case) -> Same:
            return oracle.same_maths(case, 0)

        def harder(case: Case, of: Mapping[str, Any]) -> ExpectedCase:
            given = {**of, "q": verify_inputs.harder(of["q"], case)}
            return oracle.expected(case, seed, sample=Sample.of(problem, seed), given=given)

        with ThreadPoolExecutor(1) as aside:  # each of the two has steps that take one core
            errors = aside.submit(maths, timed)
            first = known(timed)
            every = verify_cases.whole_cases(problem)[1:]
            hard = [aside.submit(harder, case, first.inputs) for case in every]
            found = {(case, 0): maths(case) for case in small} | {(timed, 0): errors.result()}
            rest = [known(case) for case in small]
        return cls(first, rest, found, hard[0].result() if hard else None)


def rounding(problem: Problem, rounds_scores: int, *, hard: bool = False) -> Maths:
    """The rounded maths of the cases of a problem, with scores rounded so often.

    hard: of its hard case alone, for which nothing waits until there are finalists.
    """
    every = [Case(problem), *verify_cases.small_cases(problem)]
    cases = verify_cases.whole_cases(problem)[1:] if hard else every
    oracle = oracle_of(problem)
    return {(case, rounds_scores): oracle.same_maths(case, rounds_scores) for case in cases}


def turns(case: Case, seed: int) -> tuple[ExpectedCase, Maths]:
    """NumPy's results for short turns, and their maths with scores not rounded."""
    oracle = oracle_of(case.problem)
    known = oracle.expected(case, seed, two_sided=True, few=True)
    return known, {(case, 0): oracle.same_maths(case, 0)}


class _Process:
    """A helper process with its queue of requests; it starts with the first large problem."""

    def __init__(self, command: Sequence[str], least_bytes: int, longest_s: float) -> None:
        self.helper = HelperProcess(lambda: command)
        self._least_bytes, self._longest_s = least_bytes, longest_s
        self._pool = ThreadPoolExecutor(1, "known")

    def ask(
        self,
        problem: Problem,
        wanted: Callable[[], bool],
        function: Callable[P, T],
        *args: P.args,
        **options: P.kwargs,
    ) -> Future[T]:
        """The future result of a function of this module; cancelled if it is not `wanted`."""
        return self._pool.submit(self._answer, problem, wanted, partial(function, *args, **options))

    def _answer(self, problem: Problem, wanted: Callable[[], bool], function: partial[T]) -> T:
        if problem.min_bytes >= self._least_bytes:
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                requests, answers = self.helper.pipes()
                pickle.dump(function, requests)
                requests.flush()
                answer: T = pickle.load(answers)
                return answer
            self.helper.close()  # it died, as for want of memory: what fails here too is reported
            if not wanted():
                raise CancelledError
        return function()

    def close(self) -> None:
        """End the process; what it has not begun is not computed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.helper.close()

    def waited(self, asked: Future[T]) -> T:
        """The result, computed in this process if the other one takes too long."""
        with proving("waits for NumPy"):
            try:
                return asked.result(self._longest_s)
            except TimeoutError:
                self.helper.kill()
                return asked.result()


def _always() -> bool:
    return True


class ReferencePool:
    """Three processes, which end with this one: for inputs, for limits, and for short turns.

    A run of 18 problems with few candidates waited 9.4 of 42 s with one process, and 6.9 of 44 s
    with two, of which the second had the turns as well (between_short.yaml on an H200, 16 cores).

    command: what a process runs. least_bytes: of a problem that is worth one. longest_s: how long
    an answer is waited for before it is computed here.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = _COMMAND,
        least_bytes: int = _LEAST_BYTES,
        longest_s: float = _LONGEST_S,
    ) -> None:
        self._least_bytes = least_bytes
        self._next, self._limits, self._short = (
            _Process(command, least_bytes, longest_s) for _ in range(3)
        )
        self._answers: dict[tuple[Problem, int], Future[Answer]] = {}
        self._dropped: set[tuple[Problem, int]] = set()
        """Asked for, and no longer wanted."""
        self._maths: dict[tuple[Problem, int, bool], Future[Maths]] = {}
        self._turns: dict[tuple[Case, int], Future[tuple[ExpectedCase, Maths]]] = {}

    def begin(self, problem: Problem, seed: int) -> None:
        """Start to compute the answer in a helper process, unless that has begun."""
        key = problem, seed
        if key not in self._answers:
            self._dropped.discard(key)
            wanted = partial(self._is_wanted, key)
            self._answers[key] = self._next.ask(problem, wanted, Answer.of, problem, seed)

    def _is_wanted(self, key: tuple[Problem, int]) -> bool:
        return key not in self._dropped

    def take(self, problem: Problem, seed: int) -> Answer:
        """The answer, which is not kept, nor are others that nobody took; it waits for none."""
        self.begin(problem, seed)
        asked = self._answers.pop((problem, seed))
        for other, answer in self._answers.items():  # another problem came than was expected
            if not (answer.cancel() or answer.done()) and other[0].min_bytes >= self._least_bytes:
                self._dropped.add(other)
                self._next.helper.kill()
        self._answers.clear()
        return self._next.waited(asked)

    def begin_rounding(self, problem: Problem, rounds_scores: int, *, hard: bool = False) -> None:
        """Start `rounding` in a helper process, unless that has begun."""
        if (key := (problem, rounds_scores, hard)) not in self._maths:
            asked = self._limits.ask(problem, _always, rounding, problem, rounds_scores, hard=hard)
            self._maths[key] = asked

    def rounding(self, problem: Problem, rounds_scores: int, *, hard: bool = False) -> Maths:
        """See the function `rounding`. It is kept until that of a later problem is asked for."""
        self.begin_rounding(problem, rounds_scores, hard=hard)
        for key in list(itertools.takewhile(lambda key: key[0] != problem, self._maths)):
            del self._maths[key]
        return self._limits.waited(self._maths[problem, rounds_scores, hard])

    def begin_turns(self, case: Case, seed: int) -> None:
        """Start `turns` in a helper process, unless that has begun; drop the oldest results."""
        key = case, seed
        asked = self._turns.pop(key, None)
        self._turns[key] = asked or self._short.ask(case.problem, _always, turns, case, seed)
        while len(self._turns) > _TURNS_KEPT:
            self._turns.pop(next(iter(self._turns))).cancel()

    def turns(self, case: Case, seed: int) -> tuple[ExpectedCase, Maths]:
        """See the function `turns`."""
        self.begin_turns(case, seed)
        return self._short.waited(self._turns[case, seed])

    def wait(self) -> None:
        """Wait until nothing is being computed."""
        for answer in self._answers.values():
            answer.result()
        for maths in self._maths.values():
            maths.result()
        for one in self._turns.values():
            one.result()

    def close(self) -> None:
        """End the processes, if there are any."""
        for process in (self._next, self._limits, self._short):
            process.close()


def main() -> None:
    """Answer what standard input asks, until it ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between
    # Between two uses of BLAS its threads would wake, and spin beside those of `parallel`.
    with contextlib.suppress(EOFError, OSError), one_blas_thread():
        while True:
            pickle.dump(pickle.load(requests)(), answers, protocol=5)
            answers.flush()

"""Who gets which problem: longest first, a lost one to another; and a fleet of 64, simulated."""

import heapq
import random
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.store.run import open_run
from attnsweep.sweep.assign import MOST_FAULTS, Assignment, Task

RESULTS = Path(__file__).parent.parent.parent / "results"
# Sweeps as users run them; specs that judge dispatch leave out most rounds and baselines.
SPECS = (
    *("h100", "flash_training", "flash_short", "batched", "flash_dims", "flash_long", "ladder"),
    *("three_kernel", "wide_head"),
)


def fleet(costs, *workers, **options):
    assignment = Assignment(costs, **options)
    for worker in workers or ("a", "b"):
        assignment.join(worker)
    return assignment


def test_the_costliest_problem_comes_first_and_equal_ones_in_order():
    assignment = fleet([1, 5, 3, 5], "a")
    order = []
    while not assignment.over:
        order.append(assignment.assign("a").number)
        assert assignment.finish("a") == order[-1]
    assert order == [1, 3, 2, 0]
    assert assignment.assign("a") is None


def test_a_late_worker_gets_what_its_card_had_begun_and_others_get_the_rest():
    assignment = fleet([9, 8, 7, 6], "a")
    assert assignment.assign("a").number == 0
    assignment.join("late", begun=[0, 2])  # 0 is with another one now
    assignment.finish("a")
    assert assignment.assign("a").number == 1
    assignment.finish("a")
    assert assignment.assign("a").number == 3  # though 2 is longer
    assert assignment.assign("late").number == 2


def test_a_lost_task_is_bound_to_nobody_again():
    assignment = fleet([9, 8])
    assert assignment.assign("a").number == 0
    assignment.lose("a", gone=True)
    assignment.join("a", begun=[0])
    assert assignment.assign("a").number == 1
    assert assignment.assign("b").number == 0


@pytest.mark.parametrize("back", ["a", "heir"])
def test_what_a_worker_has_lost_counts_when_it_comes_back_under_any_name(back):
    assignment = fleet([9, 8, 7, 6, 5, 4], "a", "b")
    worker, lost = "a", []
    for _ in range(MOST_FAULTS):
        assert not assignment.failing(worker)
        lost.append(assignment.assign(worker).number)
        assert assignment.lose(worker, gone=True).left_out
        before, worker = worker, "a" if back == "a" else worker + "'"
        assignment.join(worker, heir_of=None if worker == before else before)
    assert lost == [0, 1, 2]  # none of them twice
    assert assignment.failing(worker)
    assert not assignment.given_up


def test_a_loss_that_nobody_is_to_blame_for_counts_for_nothing():
    assignment = fleet([9, 8, 7], "a")
    for _ in range(MOST_FAULTS + 1):
        assert assignment.assign("a") == Task(0, last=False)
        assert not assignment.lose("a", gone=True, blame=False).given_up
        assignment.join("b")
        assignment.join("a", begun=[0])
    assert not assignment.failing("a")
    assert assignment.assign("b").number == 1  # a has begun 0


def test_an_idle_worker_may_come_and_go():
    assignment = fleet([9], "a")
    for _ in range(MOST_FAULTS + 1):
        assignment.lose("a", gone=True)
        assignment.join("a")
    assert not assignment.failing("a")
    assert assignment.assign("a").number == 0


def test_what_was_prepared_is_what_comes_next_unless_another_has_taken_it():
    assignment = fleet([9, 8, 7, 6, 5])
    assert (assignment.assign("a").number, assignment.assign("b").number) == (0, 1)
    assert (assignment.ahead("a"), assignment.ahead("b")) == (2, 3)
    assignment.finish("b")
    assert assignment.assign("b").number == 3  # prepared, though 2 is longer
    assert assignment.ahead("b") == 4
    assignment.join("c")
    assert assignment.assign("c").number == 2  # nothing else is left: better than to wait
    assignment.finish("a")
    assert assignment.assign("a").number == 4


def test_what_a_worker_that_is_still_free_will_take_is_not_prepared_elsewhere():
    assignment = fleet([9, 8, 7, 6])
    assignment.assign("a")
    assert assignment.ahead("a") == 2
    assert assignment.assign("b").number == 1
    assert assignment.ahead("b") == 3
    assignment.finish("a")
    assert assignment.assign("a").number == 2
    assert assignment.ahead("a") is None


def test_a_worker_first_gets_what_it_was_expected_to_get_unless_that_is_short():
    assignment = Assignment([9, 8, 7, 4], guesses={"a": 2, "b": 3, "c": 1})
    assert set(assignment.expected) == {2, 1}
    for worker in "bac":
        assignment.join(worker)
    assert assignment.assign("b").number == 0  # it was expected to get 3, which is short
    assert assignment.ahead("b") == 3  # 2 is prepared by `a`, and 1 by `c`
    assert assignment.assign("a").number == 2
    assignment.finish("b")
    assert assignment.assign("b").number == 3
    assignment.finish("b")
    assert assignment.assign("b").number == 1  # nothing waits for `c`, which is not ready


def test_what_a_worker_was_expected_to_get_is_free_when_it_is_lost():
    assignment = fleet([9, 8, 7], guesses={"a": 1, "b": 0})
    assignment.lose("b", gone=True)
    assert (assignment.assign("a").number, assignment.ahead("a")) == (1, 0)


def test_a_lost_task_goes_to_another_worker_from_the_start():
    assignment = fleet([9, 1])
    assert assignment.assign("a") == Task(0, last=False)
    loss = assignment.lose("a")
    assert (loss.task, loss.given_up, loss.left_out) == (0, False, False)
    assert assignment.assign("a").number == 1  # not what it has just lost
    assert assignment.assign("b") == Task(0, last=True)
    assignment.finish("a")
    assignment.finish("b")
    assert assignment.over
    assert sorted(assignment.done) == [0, 1]


def test_a_worker_that_lost_the_only_task_waits_for_another_and_has_it_if_there_is_none():
    assignment = fleet([9])
    assignment.assign("a")
    assignment.lose("a")
    assert assignment.assign("a") is None
    assignment.lose("b", gone=True)
    assert assignment.assign("a") == Task(0, last=True)


def test_a_task_that_two_workers_lost_is_given_up():
    assignment = fleet([9, 1], "a", "b", "c")
    for worker in ("a", "b"):
        assert assignment.assign(worker).number == 0
        loss = assignment.lose(worker)
    assert loss.given_up
    assert list(assignment.given_up) == [0]
    assert assignment.assign("c").number == 1
    assignment.finish("c")
    assert assignment.over


def test_a_worker_that_is_gone_may_have_left_for_another_reason():
    assignment = fleet([9], "a", "b", "c", "d")
    assert assignment.assign("a").number == 0
    assert not assignment.lose("a", gone=True).given_up
    assert assignment.assign("b") == Task(0, last=False)
    assert not assignment.lose("b").given_up
    assert assignment.assign("c") == Task(0, last=True)
    assert assignment.lose("c", gone=True).given_up


def test_a_worker_is_left_out_after_faults_in_a_row():
    assignment = fleet([5, 4, 3, 2, 1, 1, 1])
    for fault in range(MOST_FAULTS):
        assignment.assign("a")
        assert assignment.lose("a").left_out is (fault == MOST_FAULTS - 1)
    assert list(assignment.workers) == ["b"]
    while (task := assignment.assign("b")) is not None:
        assert assignment.finish("b") == task.number
    assert assignment.over
    assert not assignment.given_up


def test_a_finished_task_forgives_faults():
    assignment = fleet([1] * 3 * MOST_FAULTS)
    for _ in range(MOST_FAULTS + 1):
        assignment.assign("a")
        assert not assignment.lose("a").left_out
        assignment.assign("a")
        assignment.finish("a")
    assert "a" in assignment.workers


def test_what_a_card_has_begun_in_an_earlier_run_goes_to_it_alone():
    assignment = fleet([1, 9, 5], bound={0: "a", 1: "elsewhere"})
    assert assignment.assign("b").number == 1  # its card is not there
    assignment.finish("b")
    assert assignment.assign("b").number == 2
    assignment.finish("b")
    assert assignment.assign("b") is None
    assert assignment.assign("a").number == 0


def test_a_begun_problem_of_a_card_that_is_lost_is_free():
    assignment = fleet([1], bound={0: "a"})
    assert assignment.assign("b") is None
    assignment.lose("a", gone=True)
    assert assignment.assign("b") == Task(0, last=False)


@given(st.data())
def test_whatever_happens_every_task_is_with_one_worker_done_or_given_up(data):
    """And a worker that is there always has one, as long as one is left."""
    workers = ("a", "b", "c", "d")[: data.draw(st.integers(1, 4))]
    costs = data.draw(st.lists(st.integers(0, 3), max_size=6))
    owners = st.sampled_from((*workers, "elsewhere", None))
    bound = {task: owner for task in range(len(costs)) if (owner := data.draw(owners))}
    assignment = fleet(costs, *workers, bound=bound)
    held = {}
    while not assignment.over and assignment.workers:
        for worker in list(assignment.workers):
            if worker not in held:
                pending = list(assignment.pending)
                if task := assignment.assign(worker):
                    assert task.number in pending
                    held[worker] = task.number
                if data.draw(st.booleans()):
                    assignment.ahead(worker)
        busy = [worker for worker in assignment.workers if worker in held]
        assert busy, "nobody has a task, and some are left"
        match data.draw(st.sampled_from(("finish", "finish", "lose", "gone"))):
            case "finish":
                at = data.draw(st.sampled_from(busy))
                assignment.finish(at)
            case how:
                at = data.draw(st.sampled_from(list(assignment.workers)))
                assignment.lose(at, gone=how == "gone")
        held.pop(at, None)
        everywhere = [*assignment.done, *assignment.given_up, *assignment.pending, *held.values()]
        assert sorted(everywhere) == list(range(len(costs)))


# -- a fleet -----------------------------------------------------------------------------------


@cache
def recorded_problems():
    """(seconds, rows) of each problem of the recorded runs.

    Rows say no wall time, so a row's seconds are those of its work: 20 ms to check, 30 calls for
    the first time, and 2 ms for each round.
    """
    found = []
    for directory in (RESULTS / "h100-80gb-hbm3" / name for name in SPECS):
        work = Counter()
        rows = Counter()
        for trial in open_run(directory).trials:
            rows[trial.problem] += 1
            if trial.time_us is None:
                continue
            seconds = 0.02 + 30e-6 * (trial.first_us or trial.time_us.median)
            work[trial.problem] += seconds + 2e-3 * len(trial.time_us.rounds)
        found += [(work[problem], rows[problem]) for problem in work if work[problem]]
    return found


class Fleet:
    """Workers that take the recorded seconds for a problem, and some that die."""

    def __init__(self, workers, problems, deaths, seed):
        rng = random.Random(seed)
        self.problems = [rng.choice(recorded_problems()) for _ in range(problems)]
        names = [f"card {number}" for number in range(workers)]
        ideal_s = sum(seconds for seconds, _ in self.problems) / workers
        dying = rng.sample(names, deaths)
        self.dies_s = {name: rng.uniform(0, ideal_s) for name in dying}
        # Estimated as `--gpus` does, by a rule that does not know what a problem really takes.
        costs = [seconds * rng.uniform(0.5, 2) for seconds, _ in self.problems]
        self.assignment = Assignment(costs)
        self.names = names
        self.store = {}
        self.lost_s = self.own_s = 0.0

    def timed(self, call, *arguments, **options):
        began = time.thread_time()  # which a busy machine does not change
        try:
            return call(*arguments, **options)
        finally:
            self.own_s += time.thread_time() - began

    def run(self):
        """Returns the makespan in seconds."""
        events, begun, number_of, idle = [], {}, {}, []
        order = 0

        def ask(name, now):
            nonlocal order
            task = self.timed(self.assignment.assign, name)
            if task is None:
                idle.append(name)
                return
            self.timed(self.assignment.ahead, name)
            begun[name], number_of[name] = now, task.number
            ends = now + self.problems[task.number][0]
            dies = self.dies_s.get(name, float("inf"))
            order += 1
            heapq.heappush(events, (min(ends, dies), order, name, dies < ends))

        for name in self.names:
            self.timed(self.assignment.join, name)
            ask(name, 0.0)
        now = 0.0
        while events:
            now, _, name, died = heapq.heappop(events)
            number = number_of[name]
            if died:
                self.lost_s += now - begun[name]
                self.timed(self.assignment.lose, name, gone=True)
                waiting, idle[:] = list(idle), []
                for other in waiting:
                    ask(other, now)
            else:
                assert number not in self.store, "done twice"
                self.store[number] = (name, self.problems[number][1])
                self.timed(self.assignment.finish, name)
                ask(name, now)
        return now


@pytest.mark.parametrize("seed", range(3))
def test_64_workers_do_1000_recorded_problems_though_a_tenth_of_them_die(seed):
    fleet = Fleet(64, 1000, 7, seed)
    makespan_s = fleet.run()
    work_s = sum(seconds for seconds, _ in fleet.problems)
    there_s = sum(min(fleet.dies_s.get(name, makespan_s), makespan_s) for name in fleet.names)
    rows = sum(rows for _, rows in fleet.problems)
    assert fleet.assignment.over
    assert not fleet.assignment.given_up
    assert sum(rows for _, rows in fleet.store.values()) == rows  # none is lost
    assert sorted(fleet.assignment.done) == list(range(1000))
    assert work_s / there_s >= 0.90
    assert fleet.lost_s / work_s <= 0.02
    assert fleet.own_s / rows < 1e-3

"""Which card gets which problem: the longest first, and a lost one goes to another card."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.sweep.assign import MOST_FAULTS, Assignment, Loss, Task


def fleet(costs, *workers, **options):
    assignment = Assignment(costs, **options)
    for worker in workers or ("a", "b"):
        assignment.join(worker)
    return assignment


# Costs of tasks, `9/a` of one that worker `a` had begun in an earlier run; then what happens: see `play`.
SCENES = """
the costliest comes first, and equal ones in order: 1 5 3 5
  a 1, a ends, a 3, a ends, a 2, a ends, a 0, a ends, a none
a late worker gets what its card had begun but not what another has, and others get the rest: 9 8 7 6
  a 0, late joins 0 2, a ends, a 1, a ends, a 3, late 2
a lost task is bound to nobody again: 9 8
  b joins, a 0, a gone, a joins 0, a 1, b 0
a loss that nobody is to blame for counts for nothing: 9 8 7
  b joins, a 0, a gone unblamed, a joins 0, a 0, a gone unblamed, a joins 0, a 0, a gone unblamed, a joins 0,
  a 0, a gone unblamed, a joins 0, fit a, b 1
an idle worker may come and go: 9
  a gone, a joins, a gone, a joins, a gone, a joins, a gone, a joins, fit a, a 0
what was prepared comes next though another is longer, unless nothing else is left: 9 8 7 6 5
  b joins, a 0, b 1, a ahead 2, b ahead 3, b ends, b 3, b ahead 4, c joins, c 2, a ends, a 4
what a worker that is still free will take is not prepared elsewhere: 9 8 7 6
  b joins, a 0, a ahead 2, b 1, b ahead 3, a ends, a 2, a ahead none
a lost task goes to another worker from the start, and not to who has just lost it: 9 1
  b joins, a 0, a lost, a 1, b last 0, a ends, b ends
a worker that lost the only task waits for another, and has it if there is none: 9
  b joins, a 0, a lost, a none, b gone, a last 0
a task that two workers lost is given up: 9 1
  b joins, c joins, a 0, a lost, b last 0, b lost given_up, c 1, c ends
a worker that is gone may have left for another reason: 9
  b joins, c joins, d joins, a 0, a gone, b 0, b lost, c last 0, c gone given_up
a worker is left out after faults in a row: 5 4 3 2 1
  b joins, a 0, a lost, a 1, a lost, a 2, a lost left_out, b last 0, b ends, b last 1, b ends, b last 2, b ends,
  b 3, b ends, b 4, b ends
a finished task forgives faults: 9 8 7 6 5 4 3
  b joins, a 0, a lost, a 1, a ends, a 2, a lost, a 3, a ends, a 4, a lost, a 5, a ends, a 6, a lost
what a card has begun in an earlier run goes to it alone, and to others if it is not there: 1/a 9/elsewhere 5
  b joins, b 1, b ends, b 2, b ends, b none, a 0
a begun problem of a card that is lost is free: 1/a
  b joins, b none, a gone, b 0
one that its card has lost as well: 1/a
  b joins, a 0, a lost, b last 0
"""


def play(assignment, steps):
    """Workers take, end and lose tasks; each step says who, what happens, and what is to come of it.

    Worker `a` is there. `a 0`, `a none`: it asks, and gets task 0 or nothing. `a last 0`: so, and for the last time.
    `a ahead 1`: what it is told to prepare. `a ends`, `a lost`, `a gone`: done, failed, not there any
    more; then what is given up or left out. `a joins 0 2`: with tasks that its card has begun.
    `fit a`: it has not lost too many.
    """
    held, total = {}, len(assignment.pending)
    for step in re.split(r",\s+", steps):
        worker, *words = step.split()
        match words:
            case [name] if worker == "fit":
                assert not assignment.failing(name), step
            case ["ends"]:
                assert assignment.finish(worker) == held.pop(worker), step
            case ["joins", *begun]:
                assignment.join(worker, begun=[*map(int, begun)])
            case ["lost" | "gone" as how, *said]:
                loss = assignment.lose(worker, gone=how == "gone", blame="unblamed" not in said)
                left_out = how == "gone" or "left_out" in said
                assert loss == Loss(held.pop(worker, None), "given_up" in said, left_out), step
                assert (worker in assignment.workers) == (not left_out), step
            case ["ahead", task]:
                assert str(assignment.ahead(worker)).lower() == task, step
            case [*last, task]:
                got = assignment.assign(worker)
                assert got == (None if task == "none" else Task(int(task), last=last == ["last"])), step
                held[worker] = None if got is None else got.number
        assert assignment.over == (len(assignment.done) + len(assignment.given_up) == total), step


@pytest.mark.parametrize("scene", re.split(r"\n(?=\w)", SCENES.strip()), ids=lambda scene: scene.partition(":")[0])
def test_who_gets_which_task_when(scene):
    title, steps = scene.split("\n", 1)
    costs, owners = zip(*(each.partition("/")[::2] for each in title.partition(": ")[2].split()), strict=True)
    bound = {task: owner for task, owner in enumerate(owners) if owner}
    play(fleet([*map(int, costs)], "a", bound=bound), steps)


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

"""What wins was called for longest, whoever it is once the wrong ones have left."""

from __future__ import annotations

import pytest

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose.finals import confirm
from attnsweep.choose.ranking import rank
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Measurement, Resources, Status, Trial

PROBLEM = Problem(1, 2, 2, 128, 128, 64)
US = {"a": 30.0, "b": 30.03, "c": 30.06, "d": 33.0, "baseline": 31.0}
SMEM = {"a": 300, "b": 200, "c": 100, "d": 1, "baseline": 0}


def row(name):
    us = US[name]
    return Trial(
        kernel="k",
        provider="cudnn" if name == "baseline" else "attnsweep",
        config={"A": SMEM[name]},
        problem=PROBLEM,
        status=Status.OK,
        accuracy=Accuracy(rel_err=0.0, limit=1.0, calls=8),
        time_us=Measurement(median=us, low=us, high=us, samples=9, l2="warm", rounds=[us] * 9),
        resources=Resources(registers=64, spill_bytes=0, smem_bytes=SMEM[name], occupancy=1.0),
    )


class Card:
    """Counts calls by their time, and says that the `wrong` ones are."""

    def __init__(self, wrong=()):
        self.wrong, self.asked = wrong, []

    def confirm(self, name, longest_us):
        self.asked.append((name, longest_us))
        if name in self.wrong:
            raise WorkerError(Status.WRONG, "a race")
        return int(longest_us / 40)


def confirmed(wrong=(), names="abcd"):
    entries = {name: row(name) for name in (*names, "baseline")}
    card, failed = Card(wrong), []
    confirm(entries, lambda: dict(entries), card, lambda name, trial, error: failed.append(name))
    assert failed == [name for name, _ in card.asked if name in wrong]
    return card.asked, entries


def test_the_thriftiest_of_the_equally_good_is_called_for_longest():
    asked, entries = confirmed()
    assert sorted(asked) == [("a", 2e3), ("b", 2e3), ("c", 2e5), ("d", 2e3)]
    assert {n: t.accuracy.calls for n, t in entries.items()} == {
        "a": 58,
        "b": 58,
        "d": 58,
        "c": 5008,
        "baseline": 8,
    }


@pytest.mark.parametrize(
    ("wrong", "at_length"),
    [("c", "cb"), ("cb", "ca"), ("cba", "cd"), ("d", "c"), ("abcd", "c")],
)
def test_whoever_wins_in_the_end_was_called_for_longest(wrong, at_length):
    asked, entries = confirmed(wrong)
    assert {name for name, us in asked if us == 2e5} == set(at_length)
    ranking = rank([*entries.values()], None)
    won = [t.config["A"] for t in ranking.loc[ranking["winner"], "trial"]]
    assert won == [SMEM[name] for name in at_length[-1:] if name not in wrong]
    assert len(asked) == len(set(asked))


def test_baselines_alone_are_not_confirmed():
    assert confirmed(names="") == ([], {"baseline": row("baseline")})

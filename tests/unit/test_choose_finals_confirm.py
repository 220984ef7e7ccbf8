"""What wins was called for longest, whoever it is once the wrong ones have left."""

from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu
from samples import built, candidate
from selecting import select

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose.ranking import rank
from attnsweep.core.trial import Accuracy, Resources, Status
from attnsweep.specs.model import MeasureSpec, SearchSpec

US = {"a": 30.0, "b": 30.03, "c": 30.06, "d": 33.0}
SMEM = {"a": 300, "b": 200, "c": 100, "d": 1}
SPEC = SimpleNamespace(measure=MeasureSpec(finalists=4, rounds=9), search=SearchSpec())


class Card(FakeGpu):
    """Calls 40 µs each when it confirms, and says that the `wrong` ones are."""

    def __init__(self, wrong):
        super().__init__({f"k {name}": us for name, us in US.items()})
        self.asked = []
        self.faults = {("confirm", f"k {n}"): WorkerError(Status.WRONG, "a race") for n in wrong}

    def confirm(self, name, longest_us):
        self.asked.append((name.removeprefix("k "), longest_us))
        super().confirm(name, longest_us)
        return int(longest_us / 40)


def pair(name):
    row = candidate("k", US[name], A=name).with_(
        accuracy=Accuracy(rel_err=0.0, limit=1.0, calls=8),
        resources=Resources(registers=64, spill_bytes=0, smem_bytes=SMEM[name], occupancy=1.0),
    )
    return built(name), row


def confirmed(wrong=""):
    card = Card(wrong)
    rows = select([pair(name) for name in US], SPEC, card)
    methods = [method for method, _ in card.calls]
    assert "replay" not in methods[methods.index("confirm") :], "after the rounds"
    assert {t.config["A"] for t in rows if t.status is Status.WRONG} <= set(wrong)
    return card.asked, {t.config["A"]: t for t in rows}


def test_the_thriftiest_of_the_equally_good_is_called_for_longest():
    asked, rows = confirmed()
    assert sorted(asked) == [("a", 2e3), ("b", 2e3), ("c", 2e5), ("d", 2e3)]
    assert {name: row.accuracy.calls for name, row in rows.items()} == {**dict.fromkeys("abd", 58), "c": 5008}


@pytest.mark.parametrize(("wrong", "at_length"), [("c", "cb"), ("cb", "ca"), ("cba", "cd"), ("d", "c"), ("abcd", "c")])
def test_whoever_wins_in_the_end_was_called_for_longest(wrong, at_length):
    asked, rows = confirmed(wrong)
    assert {name for name, us in asked if us == 2e5} == set(at_length)
    ranking = rank([*rows.values()], None)
    won = [t.config["A"] for t in ranking.loc[ranking["winner"], "trial"]]
    assert won == [name for name in at_length[-1:] if name not in wrong]
    assert len(asked) == len(set(asked))

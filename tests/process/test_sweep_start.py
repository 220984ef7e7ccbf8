"""What the cards of a fleet begin as they start."""

from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
from fleets import SPEC, is_whole, swept

from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import Shard
from attnsweep.sweep import cards as sweep_cards
from attnsweep.sweep.messages import start_child

pytestmark = pytest.mark.usefixtures("cards")


@pytest.fixture
def go(tmp_path, cards):
    return partial(swept, tmp_path, cards)


def seeds(cards):
    return {opened.split()[-1] for _, opened in cards.calls("opened")}


def test_what_is_computed_ahead_for_the_next_problem_is_of_its_seed(go, cards):
    go()
    assert len(cards.calls("opened")) == 4
    assert len(seeds(cards)) == 1
    go(fresh=True)
    assert len(seeds(cards)) == 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_card_knows_as_it_starts_what_it_opens_first(go, cards, late):
    cards.on(late, start_s=0.3)
    cards.on(1 - late, trial_s=0.2)  # so that it does not take all while the other one starts
    go()
    expected = dict(cards.calls("first"))
    assert len(set(expected.values())) == 2
    assert dict(reversed(cards.calls("opened"))) == expected  # also if the other is ready earlier


def test_a_card_that_is_started_again_is_told_nothing_that_it_may_not_open(go, cards):
    cards.on(0, fault="kill", after=2, once=True)
    assert is_whole(go()[0])
    assert cards.started[0] == 2
    assert len(cards.calls("first")) == 2


def test_cards_are_expected_to_open_nothing_that_another_part_may_have(go, cards):
    go(shard=Shard(2, 2))
    assert len(cards.calls("open")) == 2
    assert not cards.calls("first")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_the_child_of_a_real_card_says_that_there_is_none(cards, tmp_path):
    """Through its own GPU process, which has no driver here."""
    told = SimpleQueue()
    child = start_child(cards.cards[0], told.put)
    (tmp_path / "test.yaml").write_text(SPEC)
    hello = sweep_cards.hello_of(load_spec(tmp_path / "test.yaml", discover), None)
    child.send({"do": "begin", **hello})
    message = told.get(timeout=60)
    assert message["say"] == "gone"
    assert "GPU" in message["why"] or "driver" in message["why"]
    assert told.get(timeout=30) is None
    child.stop()
    assert "exit code 0" in child.why

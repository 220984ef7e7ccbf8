"""Cards that come to a sweep late, go away and come back, as workers of a cluster do."""

import threading
import time
from contextlib import contextmanager

import pytest
from fleets import LABELS, SPEC, is_whole, measured, swept

from attnsweep.core.trial import cards_of
from attnsweep.device.cards import InstalledCard
from attnsweep.sweep import cards as sweep_cards
from attnsweep.sweep.assign import MOST_FAULTS

pytestmark = pytest.mark.usefixtures("cards")
LOOKS = 5
"""Once the list of cards has been the same this often, the run has acted on it."""


class Worker(InstalledCard):
    """A worker whose name does not tell its card, which is what comes before a plus sign."""

    @property
    def hashed(self):
        return None

    def __str__(self):
        return f"worker {self.uuid}"


def again(card, times=1):
    """The worker that comes with a card after an earlier one left."""
    return Worker(card.number, card.uuid + "+" * times, card.name) if times else card


@pytest.fixture
def go(tmp_path, cards, constants):
    """Runs a sweep that begins on card 0. present: takes the number of trials so far, and tells the
    cards that are there, or None. until: when cards go on that hold a candidate. A child that dies
    has left with its worker.
    """
    constants(sweep_cards, _LOOK_S=0.02)
    start = cards.start_child

    def start_child(card, deliver):
        def told(message):
            deliver(go.left if message is None else message)

        known = {card.uuid: card for card in cards.cards}
        return start(known[card.uuid.partition("+")[0]], told)

    cards.start_child = start_child

    def go(present, text=SPEC, seen_at=None, until=None, **options):
        @contextmanager
        def arrivals(there):
            ended = threading.Event()

            def look():
                looks = 0
                while not ended.wait(0.02):
                    now = time.monotonic()
                    found = present(len(cards.calls("trial")))
                    if found is not None:
                        there(found, now if seen_at is None else seen_at)
                    looks = looks + 1 if until is not None and until() else 0
                    if looks == LOOKS:
                        cards.go_on()

            thread = threading.Thread(target=look)
            thread.start()
            yield
            ended.set()
            thread.join()

        return swept(tmp_path, cards, text, on=[0], arrivals=arrivals, **options)

    go.left = {"say": "away", "why": "its worker left"}
    return go


@pytest.fixture
def impatient(constants):
    """A run that soon believes that a card is gone for good."""
    constants(sweep_cards, AWAY_S=0.5)


def about(heard, words):
    return [note for note in heard.notes if words in note]


def count(cards, what, number):
    """How often a card was told to `open` a problem, or tried a candidate."""
    return [card for card, _ in cards.calls(what)].count(number)


def has_ended(child):
    return child.process.poll() is not None


def test_a_card_that_comes_late_gets_problems(go, cards):
    cards.on(0, holds=2)
    outcome, heard = go(
        lambda trials: cards.cards if trials >= 2 else cards.cards[:1], until=lambda: count(cards, "open", 1)
    )
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    assert {card for card, _ in cards.calls("open")} == {0, 1}
    assert set(cards_of(outcome.run.trials)) == {card.hashed for card in cards.cards}
    assert about(heard, "joins") == [f"{cards.cards[1]}: it joins the run"]
    assert {card for card, *_ in heard.opened_on} == {0, 1}
    assert about(heard, "on 2 cards")


SEARCHED = SPEC + "search: {strategy: gp}\n"


def test_the_run_names_no_card_once_another_one_came(go, cards):
    outcome, _ = go(lambda trials: None, SEARCHED)
    assert outcome.run.environment.uuid == cards.cards[0].hashed
    before = len(cards.calls("trial"))
    spaces = (outcome.run.directory / "spaces.json").read_text()
    assert "ended" in spaces
    cards.on(0, holds=6)
    outcome, _ = go(
        lambda trials: cards.cards if trials >= 6 + before else None,
        SEARCHED,
        until=lambda: count(cards, "open", 1),
        fresh=True,
    )
    assert len(cards_of(outcome.run.trials)) == 2
    assert outcome.run.environment.uuid is None
    assert (outcome.run.directory / "spaces.json").read_text() == spaces  # with its endings


@pytest.mark.parametrize(
    ("unlike", "why"),
    [
        ({"gpu": "NVIDIA Other"}, "another gpu than the others: NVIDIA Other, not NVIDIA Test 1"),
        ({"driver": "1.0"}, "another driver"),
        ({"attnsweep": "0.0"}, "another attnsweep"),
    ],
)
def test_a_late_card_that_does_not_belong_is_left_out_once(go, cards, unlike, why):
    cards.on(0, holds=1)
    cards.on(1, environment=unlike)
    outcome, heard = go(
        lambda trials: cards.cards if trials else cards.cards[:1],
        until=lambda: len(cards.children) > 1 and has_ended(cards.children[1]),
    )
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    assert {card for card, _ in cards.calls("open")} == {0}
    (note,) = about(heard, why)
    assert note.endswith("the card is left out")
    assert cards.started == {0: 1, 1: 1}
    assert not about(heard, "joins")
    assert about(heard, "on 1 cards")


def test_what_a_late_card_began_in_an_earlier_run_goes_to_it(go, cards, tmp_path):
    cards.on(1, fault="off", after=2, once=True)
    swept(tmp_path, cards, SPEC.replace(", 512, 1024, 2048", ""), on=[1])
    assert measured(cards) == {LABELS[0]: 2}
    cards.on(0, holds=1)
    outcome, heard = go(lambda trials: cards.cards, until=lambda: count(cards, "open", 1) >= 2)
    assert is_whole(outcome)
    on_late = [opened[1:] for opened in heard.opened_on if opened[0] == 1]
    assert on_late[0] == (LABELS[0], 3, 1)  # though it is the shortest
    assert measured(cards)[LABELS[0]] == 2 + 2


@pytest.mark.parametrize("name", ["the same", "another"])
def test_the_only_card_comes_back_and_goes_on_where_it_was(go, cards, name):
    cards.on(0, fault="kill", after=2, once=True)
    back = cards.cards[0] if name == "the same" else again(cards.cards[0])
    # Not when its second candidate begins: it may still be there then.
    outcome, heard = go(lambda trials: [back] if trials and has_ended(cards.children[0]) else None)
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == 12 + 1  # the one that it died with
    assert about(heard, "no card is left: waiting up to 60 s")
    (joined,) = about(heard, "joins")
    assert ("with the card that was" in joined) is (name == "another")
    assert {card for card, *_ in heard.opened_on} == {0}  # on the same line
    assert about(heard, "on 1 cards")


@pytest.mark.usefixtures("impatient")
def test_a_card_that_does_not_come_back_ends_the_run_which_resumes(go, cards):
    cards.on(0, fault="kill", after=2, once=True)
    outcome, heard = go(lambda trials: [])
    assert outcome.no_card
    assert outcome.exit_code == 3
    assert len(outcome.run.trials) == 1
    assert about(heard, "left out until it comes back")
    outcome, _ = go(lambda trials: [])
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == 12 + 1


@pytest.mark.usefixtures("impatient")
def test_what_was_seen_before_a_card_left_does_not_bring_it_back(go, cards):
    cards.on(0, fault="kill", after=2, once=True)
    outcome, _ = go(lambda trials: cards.cards[:1], seen_at=time.monotonic())
    assert outcome.no_card
    assert cards.started[0] == 1


@pytest.mark.parametrize("blame", [True, False])
def test_a_card_that_lost_its_scheduler_goes_on_with_its_problem(go, cards, blame):
    """One that left with its worker may have left because of the problem."""
    go.left |= {"blame": blame}
    cards.on(0, fault="kill", after=2, once=True)
    cards.on(1, holds=1)  # busy until the other one is back

    def present(trials):
        lost = has_ended(cards.children[0]) and count(cards, "open", 1)
        return [again(cards.cards[0]), cards.cards[1]] if lost else cards.cards[1:]

    outcome, heard = go(present, until=lambda: count(cards, "open", 0) >= 2)
    assert is_whole(outcome)
    taken = [opened[1:] for opened in heard.opened_on if opened[0] == 0]
    assert taken[0] == (LABELS[3], 3, 0)
    assert ((LABELS[3], 3, 1) in taken) is not blame
    assert sum(measured(cards).values()) == 12 + (2 if blame else 1)


@pytest.mark.parametrize("named", [again, lambda card, times: card])
def test_a_card_that_comes_back_takes_down_no_more_problems_than_one_that_stays(go, cards, named):
    """Each restart of a worker has another name unless its user gives it one."""
    cards.on(0, fault="kill")
    cards.on(1, holds=1)
    started = 1 + MOST_FAULTS + (named is again)  # another name is met before it is refused

    def present(trials):
        return [named(cards.cards[0], count(cards, "trial", 0)), cards.cards[1]]

    def is_left_out():
        alive = [child for child in cards.children if not has_ended(child)]
        return len(cards.children) >= started and len(alive) == 1

    outcome, heard = go(present, until=is_left_out)
    assert is_whole(outcome)
    assert count(cards, "trial", 0) == MOST_FAULTS
    assert not about(heard, "lost twice")
    if named is again:
        assert about(heard, "its card has lost too many problems in a row; the card is left out")


def test_a_card_serves_under_one_name_at_a_time(go, cards):
    """The later one has it: the host of the other one was cut off, and the cluster does not know
    yet.
    """
    cards.on(0, holds=1)
    outcome, heard = go(
        lambda trials: [cards.cards[0], again(cards.cards[0])], until=lambda: has_ended(cards.children[0])
    )
    assert is_whole(outcome)
    (left_out,) = about(heard, f"its card is {again(cards.cards[0])}'s now")
    assert left_out.startswith(str(cards.cards[0]))
    assert cards.started[0] == 2

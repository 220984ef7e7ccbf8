"""A sweep on several fake cards, each a process of its own, with every fault of a card."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest
from fleets import LABELS, SPEC, TIMES, is_whole, measured, swept
from samples import TEST_GPU, candidate

import attnsweep
from attnsweep.core.errors import StoreError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status, cards_of
from attnsweep.device.lock import BusyError, held
from attnsweep.specs.plan import Shard
from attnsweep.store.run import TRIALS, read_trials

pytestmark = pytest.mark.usefixtures("cards")


@pytest.fixture
def go(tmp_path, cards):
    return partial(swept, tmp_path, cards)


def test_whole_problems_are_spread_over_the_cards(go, cards, tmp_path):
    outcome, heard = go()
    assert is_whole(outcome)
    assert measured(cards) == dict.fromkeys(LABELS, 3)
    first = dict(reversed(cards.calls("open")))
    assert set(first.values()) == {LABELS[3], LABELS[2]}  # the longest first
    assert set(first) == {0, 1}
    assert {t.machine["uuid"] for t in outcome.run.trials} == {c.hashed for c in cards.cards}
    assert outcome.run.environment.uuid is None
    assert outcome.run.environment.gpu == TEST_GPU.gpu
    directory = tmp_path / "results" / "test-1" / "test"
    for name in ("spec.yaml", "environment.json", "trials.jsonl", "ranking.csv", "ranking.md"):
        assert (directory / name).is_file()
    assert len(list((directory / "cubins").glob("*.json"))) == 4
    assert heard.counts == [3, 3, 3, 3]
    assert len(heard.tried) > 12
    assert {label for _, label, *_ in heard.opened_on} == set(LABELS)
    assert len(heard.ranking) == 3


def test_what_a_card_that_is_not_there_has_finished_stays(go, cards):
    go()
    before = cards.calls("trial")
    assert is_whole(go(on=[0])[0])
    assert cards.calls("trial") == before


@pytest.mark.parametrize("options", [{"shard": Shard(1, 2)}, {"limit": 1}, {"fresh": True}])
def test_options_of_a_run_hold(go, cards, options):
    if "fresh" in options:
        go()
    outcome, _ = go(**options)
    if "shard" in options:
        assert is_whole(outcome, [LABELS[0], LABELS[3]])
        assert outcome.run.directory.name == "test-1of2"
    elif "limit" in options:
        assert measured(cards) == dict.fromkeys(LABELS, 1)
    else:
        assert measured(cards) == dict.fromkeys(LABELS, 6)


# -- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill", "its process died (signal SIGKILL)"),
        ("memory", "its process died (exit code 1): MemoryError: no memory on the host"),
        ("off", "no CUDA GPU found (cudaErrorNoDevice)"),
        ("stop", "no word for 1.5 s; it was killed"),
    ],
)
def test_the_problem_of_a_lost_card_goes_to_another_from_the_start(go, cards, fault, said):
    cards.on(0, fault=fault, after=2, once=True)
    outcome, heard = go(silence_s=1.5 if "no word" in said else None)
    assert is_whole(outcome)
    [note] = [note for note in heard.notes if said in note]
    assert note.startswith("card 0, NVIDIA Test 1 (GPU-00000000): ")
    lost = next(label for label in LABELS if label in note)
    assert "goes to another card" in note
    assert ("the card is left out" in note) is (fault == "off")
    assert [card for card, label in cards.calls("open") if label == lost] == [0, 1]
    others = {label: 3 for label in LABELS if label != lost}
    assert measured(cards) == others | {lost: 2 + 3}  # nothing else is measured twice
    [aside] = outcome.run.directory.glob("trials.2*.jsonl")
    rows, _ = read_trials(aside)
    assert {t.problem.label for t in rows} == {lost}
    assert cards_of(rows) == [cards.cards[0].hashed]


def test_a_card_that_fails_again_and_again_is_left_out(go, cards):
    cards.on(0, at_start="kill")
    cards.on(1, trial_s=0.1)
    outcome, heard = go()
    assert is_whole(outcome)
    assert cards.started[0] in (3, 4)  # a fault before the plan is made does not count
    died = [note for note in heard.notes if "its process died" in note]
    assert len(died) == cards.started[0]
    left_out = [note.endswith("; the card is left out") for note in died]
    assert left_out == [False] * (len(died) - 1) + [True]


LEFT_OUT = {
    "off": ({1: {"at_start": "off"}}, "no CUDA GPU found"),
    "without memory": ({0: {"too_large": LABELS}}, "cannot open the problem: OutOfMemoryError"),
    # It is free again at once, and would take one small problem after the other.
    "failing": (
        {0: {"fault": "fails"}, 1: {"trial_s": 0.1}},
        "its candidates all failed, the last one with: uncorrectable ECC error",
    ),
    "another": ({1: {"environment": {"uuid": "0123"}}}, "its process sees another card"),
}


@pytest.mark.parametrize("how", LEFT_OUT)
def test_a_card_that_can_do_nothing_leaves_all_to_the_other(go, cards, how):
    facts, said = LEFT_OUT[how]
    for number, each in facts.items():
        cards.on(number, **each)
    outcome, heard = go()
    assert is_whole(outcome)
    assert cards_of(outcome.run.trials) == [cards.cards[1 - min(facts)].hashed]
    assert [note for note in heard.notes if note.startswith(str(cards.cards[min(facts)])) and said in note]
    assert cards.started == {0: 1, 1: 1} or how != "off"


def test_all_cards_lost_ends_with_what_is_there_and_the_same_command_resumes(go, cards):
    for number in (0, 1):
        cards.on(number, fault="off", after=4)
    outcome, _ = go()
    assert (outcome.exit_code, outcome.no_card) == (3, True)
    assert set(outcome.unmeasured) == set(LABELS[:2])
    assert {t.problem.label for t in outcome.run.trials} >= set(LABELS[2:])
    cards.facts |= {card.uuid: {} for card in cards.cards}
    before = measured(cards)
    outcome, _ = go()
    assert is_whole(outcome)
    assert measured(cards)[LABELS[3]] == before[LABELS[3]] == 3


def test_no_card_at_all_is_an_error(go, cards):
    for number in (0, 1):
        cards.on(number, at_start="off")
    with pytest.raises(attnsweep.NoGpuError, match="no child process could use its card"):
        go()


def test_a_problem_that_takes_every_card_down_does_not_take_the_run_down(go, cards):
    for number in (0, 1):
        cards.on(number, deadly=[LABELS[3]])
    outcome, heard = go()
    assert outcome.unmeasured == (LABELS[3],)
    assert outcome.exit_code == 1
    assert not outcome.no_card
    assert {t.problem.label for t in outcome.run.trials} == set(LABELS[:3])
    assert [n for n in heard.notes if "was lost twice and is left for a later run" in n]


def test_a_problem_that_no_card_has_memory_for_is_rows_as_on_one_card(go, cards):
    cards.facts["all"]["too_large"] = [LABELS[3]]
    outcome, _ = go()
    rows = [t for t in outcome.run.trials if t.problem.label == LABELS[3]]
    assert {t.status for t in rows} == {Status.LAUNCH_ERROR}
    assert {t.detail for t in rows} == {"cannot open the problem: OutOfMemoryError: out of memory"}
    assert (len(rows), outcome.unmeasured, outcome.exit_code) == (3, (), 1)


def test_a_card_on_which_everything_fails_is_suspected(go, cards):
    values = [32 * number for number in range(1, 17)]
    cards.facts["all"]["times"] = {f"THREADS={value}": 10.0 + value for value in values}
    cards.on(0, fault="fails")
    outcome, heard = go(SPEC.replace("[32, 64, 128]", str(values)))
    assert outcome.exit_code == 0
    assert cards_of(outcome.run.trials) == [cards.cards[1].hashed]
    assert [n for n in heard.notes if "the first 12 candidates all failed" in n]


def test_a_problem_whose_candidates_all_fail_on_every_card_is_rows(go, cards):
    for number in (0, 1):
        cards.on(number, fault="fails")
    outcome, _ = go()
    assert outcome.exit_code == 1
    assert Counter(t.status for t in outcome.run.trials) == {Status.LAUNCH_ERROR: 12}
    assert not outcome.unmeasured


NONSENSE = [
    5,
    {"say": []},
    {"say": "row", "row": None},
    {"say": "ended", "problem": LABELS[0], "endings": ["a"]},
    {"say": "keep", "name": "../spec.yaml", "data": ""},
    {"say": "compile"},
]
GARBAGE = ["a library prints", '{"say": "row", "row": {"kernel": "na']


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("tells", [*map(json.dumps, NONSENSE), *GARBAGE])
def test_nonsense_costs_its_problem_alone(go, cards, tells):
    """A row may have been in it, so it is not passed over."""
    cards.on(0, fault="nonsense", tells=tells, after=2, once=True)
    outcome, heard = go(silence_s=10)
    assert is_whole(outcome)
    assert [n for n in heard.notes if "it sent an invalid message" in n and "goes to another card" in n]


def test_a_row_of_another_card_costs_its_problem_alone(go, cards):
    row = candidate("naive", 1.0, THREADS=32).with_(problem=Problem.parse(LABELS[3]), machine={"uuid": "0123"})
    tells = json.dumps({"say": "row", "row": row.model_dump(mode="json")})
    cards.on(0, fault="nonsense", tells=tells, after=2, once=True)
    outcome, heard = go(silence_s=10)
    assert is_whole(outcome)
    assert set(cards_of(outcome.run.trials)) == {card.hashed for card in cards.cards}
    assert [n for n in heard.notes if "a row of card 0123" in n and "goes to another card" in n]


def test_nonsense_at_the_very_end_costs_nothing(go, cards):
    for number in (0, 1):
        cards.on(number, last_words="[5]")
    assert is_whole(go()[0])


# -- the end ----------------------------------------------------------------------------------


def all_ended(cards):
    return all(child.process.poll() is not None for child in cards.children)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_full_disk_ends_the_run_with_its_reason_and_resumes(go, cards, monkeypatch, rows):
    write, left = os.write, [None] * rows

    def fill(fd, data):
        if left is not None and os.readlink(f"/proc/self/fd/{fd}").endswith(TRIALS):
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left.pop()
        return write(fd, data)

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        go()
    assert f"{rows} rows are safe" in caught.value.hint
    assert all_ended(cards)
    left = None
    outcome, _ = go()
    assert is_whole(outcome)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("moment", [1, 8, 14, 30, 50])
def test_ctrl_c_anywhere_leaves_a_run_that_resumes(go, cards, disk, moment):
    """Before the plan is written, between a row and the next, and amid the tables at the end."""
    disk.at[moment] = partial(signal.raise_signal, signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt):
        assert go()[0].interrupted
    assert disk.synced >= moment
    assert all_ended(cards)
    outcome, _ = go()
    assert is_whole(outcome)
    assert sum(measured(cards).values()) <= 12 + 2  # what each card had in its hands
    assert not list(outcome.run.directory.glob("trials.2*.jsonl"))


PARENT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from fake_cards import FakeCards
from fake_compiler import FakeCompiler
from attnsweep.family.discover import discover
from attnsweep.sweep import session
from attnsweep.sweep.fleet import Fleet
from attnsweep.specs.load import load_spec
session.compiler_for = lambda spec, arch, cache_dir: FakeCompiler(arch, cache_dir)
place = Path({place!r})
cards = FakeCards(place, times={times!r}, trial_s=0.15, together=2)
cards.on(0, fault="sleep", after=2)  # a child that works on would notice that nobody reads
session.run(load_spec(place / "test.yaml", discover),
            Fleet(cards.cards, start_child=cards.start_child),
            results=place / "results", cache_dir=place / "cache")
"""


def test_a_killed_parent_leaves_no_process_and_resumes(go, cards, tmp_path):
    (tmp_path / "test.yaml").write_text(SPEC)
    support = Path(__file__).parent.parent / "support"
    paths = [str(support), str(Path(attnsweep.__file__).parent.parent)]
    code = PARENT.format(paths=paths, place=str(tmp_path), times=TIMES)
    with subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ)) as parent:
        log = Path(cards.facts["log"])
        while not log.exists() or log.read_text().count("trial") < 5:
            assert parent.poll() is None
            time.sleep(0.01)
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        with pytest.raises(BusyError, match=f"in use by process {parent.pid}"):
            go()
        parent.kill()
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]
    rows, _ = read_trials(tmp_path / "results" / "test-1" / "test" / "trials.jsonl")
    tried = sum(measured(cards).values())
    assert tried - len(rows) <= 4
    outcome, _ = go()
    assert is_whole(outcome)
    assert sum(measured(cards).values()) == tried + 12 - len(rows)


def test_a_card_in_use_is_named_and_nothing_is_started(go, cards):
    code = (
        "import sys\nfrom attnsweep.device.lock import held\n"
        f"with held({cards.cards[1].hashed!r}, 'x'):\n    print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(BusyError, match=r"card 1, NVIDIA Test 1 \(GPU-00000001\) is in use"):
            go()
        assert not cards.children
        assert is_whole(go(on=[0])[0])
        threading.Timer(0.3, other.stdin.close).start()
        outcome, heard = go(wait=True)
    assert is_whole(outcome)
    assert heard.notes[0].startswith("waiting for card 1")
    with held(cards.cards[0].hashed, "free again"):
        pass


# ----
LONG, SHORT, OTHER = (f"(1,2,{seqlen},64) fp16 full" for seqlen in (262144, 65536, 256))


def test_what_is_tried_on_a_shorter_problem_is_told_before_a_row_is_stored(tmp_path, cards):
    text = SPEC.replace("[256, 512, 1024, 2048]", "[256, 262144]")
    outcome, heard = swept(tmp_path, cards, text)
    assert is_whole(outcome, [LONG, OTHER])
    told = heard.tried
    first = told.index((SHORT, 3))
    second = told.index((LONG, 3))
    assert told[first:second].count(LONG) == 3
    assert told[second:].count(LONG) >= 3
    assert sorted(label for _, label, *_ in heard.opened_on) == sorted([LONG, OTHER])

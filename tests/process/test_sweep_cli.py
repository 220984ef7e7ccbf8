"""`run --gpus` on the command line, with fake cards: tables, progress, exit codes, refusals."""

import io
import json

import pytest
from filelock import FileLock
from fleets import TWO
from rich.console import Console
from samples import PROBLEM, candidate

from attnsweep.reports import progress
from attnsweep.reports.terminal import ProgressForm


@pytest.fixture
def cards(tmp_path, monkeypatch, cards):
    monkeypatch.chdir(tmp_path)
    cards.facts["all"]["together"] = 2
    cards.install(monkeypatch)
    (tmp_path / "small.yaml").write_text(TWO)
    return cards


def test_a_run_on_all_cards_prints_the_tables(attnsweep, cards):
    done = attnsweep("run", "small.yaml", "--gpus", "all")
    assert done.returncode == 0, done.stderr
    assert "(1,2,256,64) fp16 full" in done.stdout
    assert "card 0: (1,2," in done.stderr
    assert "card 1: (1,2," in done.stderr
    assert "on 2 cards" in done.stderr


def test_json_events_say_the_card(attnsweep, cards):
    done = attnsweep("run", "small.yaml", "--gpus", "GPU-00000000,1", "--progress", "json")
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    opened = {e["problem"]: (e["gpu"], e["uuid"]) for e in events if e["event"] == "problem"}
    assert set(opened.values()) == {(card.number, card.hashed) for card in cards.cards}
    assert all("gpu" in event for event in events if event["event"] == "progress")
    [planned] = [event for event in events if event["event"] == "planned"]
    assert (planned["problems"], planned["candidates"]) == (2, 6)
    assert events[-1]["event"] == "end"
    assert "ranked" in {event["event"] for event in events}


def test_lost_cards_are_exit_code_3_with_the_tables_so_far(attnsweep, cards):
    cards.facts["all"]["together"] = 1
    cards.on(0, fault="off", after=4)
    done = attnsweep("run", "small.yaml", "--gpus", "0")
    assert done.returncode == 3
    assert "not measured (no card is left): (1,2,256,64) fp16 full" in done.stderr
    assert "(1,2,512,64) fp16 full" in done.stdout


def test_busy_cards_are_exit_code_3_with_all_of_them(attnsweep, cards, tmp_path):
    (tmp_path / "locks").mkdir()
    first, second = (FileLock(tmp_path / "locks" / f"{card.hashed}.lock") for card in cards.cards)
    with first, second:  # not the process's own, as those of another process
        done = attnsweep("run", "small.yaml", "--gpus", "all")
    assert done.returncode == 3
    assert "card 0, NVIDIA Test 1 (GPU-00000000) is in use" in done.stderr
    assert "card 1, NVIDIA Test 1" in done.stderr
    assert "What works here" not in done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--gpus", "2"], "'2' is no card"),
        (["--gpus", "0,0"], "names a card again"),
        (["--gpus", "all", "--dry-run"], "--gpus does nothing with --dry-run"),
        (["--gpus", "all", "--shard", "3/3"], "part 3 of 3 is empty"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(attnsweep, cards, words, why):
    done = attnsweep("run", "small.yaml", *words)
    assert done.returncode == 2
    assert why in done.stderr


@pytest.mark.parametrize("form", [ProgressForm.AUTO, ProgressForm.PLAIN])
def test_each_card_has_a_line(form):
    out = io.StringIO()
    console = Console(file=out, force_terminal=form is ProgressForm.AUTO, color_system=None, width=120)
    with progress.watch(console, form, 2) as observer:
        observer.planned([3, 3])
        on = [observer.on(card, f"uuid{card}") for card in (0, 1)]
        for each in on:
            each.opening(PROBLEM, 3, 0)
            each.compiled(1, 3)
            each.tried(candidate("flash", 7.5, BLOCK_M=64))
            each.racing(1, 2)
            each.preparing("torch_flash", 0, 2)
            each.prepared("torch_flash", 1.0, {"first calls": 1.0})
            each.timing(1, 4)
        if form is ProgressForm.AUTO:
            observer.progress.refresh()
        on[0].resting(done=True)
        on[1].resting(done=False)
        observer.note("card 1 [is] lost")
        late = observer.on(2, "uuid2")
        late.opening(PROBLEM, 3, 0)
        late.tried(candidate("flash", 6.5, BLOCK_M=64))
        if form is ProgressForm.AUTO:
            observer.progress.refresh()
    shown = out.getvalue()
    assert "card 0" in shown
    assert "card 1" in shown
    assert "card 1 [is] lost" in shown
    assert "card 2" in shown
    if form is ProgressForm.AUTO:
        assert "best 7.50 µs flash" in shown
        assert "sweep of 2 problems" in shown

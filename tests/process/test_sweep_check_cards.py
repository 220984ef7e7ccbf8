"""`check --gpus` with fake cards: each checks its share, and a lost card's problem is not lost."""

import json
from pathlib import Path

import pytest
from fake_cards import FakeCards
from fake_gpu import FakeGpu
from sweeping import use

from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session

FAMILIES = Path(__file__).parent.parent / "families"
SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: [64, 128, 256], head_dim: 64}
kernels: {burns: {}}
baselines: []
check: {slower: 0.02, budget_s: 60}
"""
LABELS = [f"(1,2,{seqlen},64) fp16 full" for seqlen in (64, 128, 256)]


@pytest.fixture
def cards(tmp_path, monkeypatch, nursery):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    use(monkeypatch, FakeGpu({"CYCLES=400000": 20.0}))
    times = {"CYCLES=400000": 20.0, "old": 20.0, "new": 21.0}
    cards = FakeCards(tmp_path, nursery=nursery, times=times, together=2, trial_s=0.1)
    cards.install(monkeypatch)
    return cards


@pytest.fixture
def check(tmp_path, cards, attnsweep):
    """Record a baseline, edit the kernel if asked to, and check on both cards."""
    (tmp_path / "ci.yaml").write_text(SPEC)
    families = tmp_path / "families"
    families.mkdir()
    for file in ("burns.py", "burns.cu"):
        (families / file).write_bytes((FAMILIES / file).read_bytes())
    kernels = discover(families)
    spec = load_spec(tmp_path / "ci.yaml", kernels)
    baseline = session.run(spec, results=tmp_path, cache_dir=tmp_path / "c").run.directory

    def run(*words, edit=False):
        if edit:
            path = families / "burns.cu"
            path.write_text(path.read_text().replace("EXTRA_CYCLES 0", "EXTRA_CYCLES 8000"))
        asked = ("--against", baseline, "--json", "--kernels", families, "--gpus", "all")
        done = attnsweep("check", tmp_path / "ci.yaml", *asked, *words)
        data = json.loads(done.stdout) if done.stdout else None
        return done.returncode, data, " ".join(done.stderr.split())

    return run


def test_each_card_checks_its_share_and_the_order_is_the_specs(check, cards):
    code, data, _ = check()
    assert code == 0
    assert [each["problem"] for each in data["problems"]] == LABELS
    assert {each["verdict"] for each in data["problems"]} == {"pass"}
    opened = cards.calls("open")
    assert sorted(label for _, label in opened) == sorted(LABELS)
    assert {card for card, _ in opened} == {0, 1}


def test_slower_code_is_a_regression_on_whichever_card(check, cards):
    code, data, _ = check(edit=True)
    assert code == 1
    for each in data["problems"]:
        assert each["verdict"] == "regression"
        assert each["ratio"] == pytest.approx(1.05)
        low, high = each["interval"]
        assert low < 1.05 < high
        assert each["old"]["time_us"] == 20.0


def test_the_problem_of_a_lost_card_is_checked_by_another(check, cards):
    cards.on(0, fault="kill", once=True)
    code, data, said = check()
    assert code == 0
    assert len(data["problems"]) == 3
    assert "goes to another card" in said


def test_a_problem_that_no_card_can_check_is_inconclusive(check, cards):
    for number in (0, 1):
        cards.on(number, deadly=[LABELS[2]])
    code, data, _ = check()
    assert code == 4
    assert [each["verdict"] for each in data["problems"]] == ["pass", "pass", "inconclusive"]
    assert "no card could check it" in data["problems"][2]["why"]


def test_time_that_is_up_leaves_all_inconclusive_and_opens_nothing(check, cards):
    code, data, _ = check("--budget-s", "0.001", edit=True)
    assert (code, data["budget_s"]) == (4, 0.001)
    for each in data["problems"]:
        assert (each["verdict"], each["budget_ended"]) == ("inconclusive", True)
        assert each["why"] == "not begun when the budget of 0.001 s ended: raise --budget-s"
    assert cards.calls("open") == []


def test_without_a_card_nothing_is_compared(check, cards):
    for number in (0, 1):
        cards.on(number, at_start="off")
    code, data, said = check()
    assert (code, data) == (3, None)
    assert "Nothing was compared" in said

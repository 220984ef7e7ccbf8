"""`check --against` ends when its budget does, however many problems there are, and says so."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from fake_comparison import FAMILIES, Card, recorded_run, use_card
from fake_compiler import FakeCompiler

from attnsweep.regress import live as gate
from attnsweep.regress.budget import Budget
from attnsweep.regress.sequential_test import Decision, RatioInterval

LENGTHS = [64 * count for count in range(1, 10)]
LABELS = [f"(1,2,{length},64) fp16 full" for length in LENGTHS]
SPEC = f"""
problems:
  - {{batch: 1, heads: 2, seqlen: {LENGTHS}, head_dim: 64}}
kernels: {{burns: {{}}}}
baselines: []
"""
CLOSE = 1.015  # between half of the threshold and all of it, so that no process decides it
SHOWN = {
    Decision.SLOWER: "regression",
    Decision.SAME: "pass",
    Decision.FASTER: "improvement",
    Decision.OPEN: "inconclusive",
}


class Watched(Card):
    """Keeps what was printed when each process ended, and in which process a problem was open."""

    def __init__(self):
        super().__init__()
        self.printed, self.problems = [], [[]]

    def open(self, problem, **options):
        super().open(problem, **options)
        self.problems[-1].append(problem.label)

    def stop(self):
        self.printed.append(sys.stdout.getvalue())
        self.problems.append([])
        super().stop()


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """An H100's host: three seconds to start a process, one to open a problem."""
    card = Watched()
    card.start_s, card.open_s = 3.0, 1.0
    return use_card(monkeypatch, card)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of the nine problems."""
    return recorded_run(tmp_path_factory.mktemp("recorded"), SPEC)


@pytest.fixture
def command(tmp_path, recorded, attnsweep):
    """Check nine changed problems, and return what the command did."""
    families = Path(shutil.copytree(FAMILIES, tmp_path / "families"))
    source = families / "burns.cu"
    source.write_text(source.read_text().replace("EXTRA_CYCLES 0", "EXTRA_CYCLES 8000"))
    (tmp_path / "nine.yaml").write_text(SPEC)

    def run(*options):
        asked = ("--against", recorded, "--kernels", families, *options)
        return attnsweep("check", tmp_path / "nine.yaml", *asked)

    return run


@pytest.fixture
def check(command):
    """The same with --json: exit code and data."""

    def run(*options):
        done = command("--json", *options)
        return done.returncode, json.loads(done.stdout)

    return run


def verdicts(data):
    return [each["verdict"] for each in data["problems"]]


def test_nine_problems_that_are_close_end_within_two_minutes(check, card):
    card.ratios = (CLOSE,) * 80
    code, data = check()
    assert (code, data["budget_s"]) == (4, 120)
    assert card.now_s <= 120 + card.start_s + card.open_s
    assert data["took_s"] == pytest.approx(card.now_s, abs=0.01)
    assert verdicts(data) == ["inconclusive"] * 9


def test_problems_share_processes_and_none_has_two_turns_in_one(check, card):
    card.ratios = (CLOSE,) * 80
    check()
    assert card.problems[0] == LABELS
    for opened in card.problems:
        assert opened == [label for label in LABELS if label in opened]


@pytest.mark.parametrize("budget_s", [5, 15, 25, 40, 120])
def test_a_verdict_is_what_the_interval_shows_whenever_time_is_up(check, card, budget_s):
    ratios = (1.0, CLOSE, 1.05, 0.95, 1.02, 1.012, 1.0, 1.3, 1.016)
    card.own = dict(zip(LABELS, ratios, strict=True))
    _, data = check("--budget-s", budget_s)
    undecided = [each for each in data["problems"] if each["budget_ended"]]
    assert bool(undecided) == (budget_s < 120)
    for each in data["problems"]:
        if each["interval"] is None:
            assert (each["verdict"], each["rounds"]) == ("inconclusive", None)
            continue
        low, high = each["interval"]
        shown = SHOWN[RatioInterval(each["ratio"], low, high, each["rounds"]).shows(0.02)]
        alone = "rounds of 1 process when" in each["why"]
        assert each["verdict"] == ("inconclusive" if alone else shown)
        assert each["verdict"] == "inconclusive" or not each["budget_ended"]


def test_clear_problems_leave_their_time_to_the_others(check, card):
    """Seven of nine are clear; each of the two noisy ones gets more than a ninth of the time."""
    card.own, card.ratios = dict.fromkeys(LABELS[2:], 1.05), (1.05,) * 80
    card.noisy, card.replay_s = dict.fromkeys(LABELS[:2], 0.5), 0.002
    code, data = check("--budget-s", "100")
    assert code == 1
    assert card.now_s <= 100 + card.start_s + card.open_s
    assert verdicts(data) == ["inconclusive"] * 2 + ["regression"] * 7
    for noisy in data["problems"][:2]:
        assert noisy["rounds"] * 2 * card.replay_s > 100 / 9


def test_a_budget_that_ends_hides_no_regression_and_calls_nothing_a_pass(check, card):
    card.own, card.ratios = {LABELS[0]: 1.05, LABELS[3]: 1.3}, (CLOSE,) * 80
    code, data = check("--budget-s", "40")
    assert code == 1
    assert card.now_s <= 40 + card.start_s + card.open_s
    for label, verdict in zip(LABELS, verdicts(data), strict=True):
        assert verdict == ("regression" if label in card.own else "inconclusive")


@pytest.mark.parametrize(("budget_s", "begun"), [(2, 0), (3.5, 1)])
def test_a_budget_too_small_for_one_comparison_decides_nothing(check, card, budget_s, begun):
    card.ratios = (1.3,) * 80
    code, data = check("--budget-s", budget_s)
    assert (code, verdicts(data)) == (4, ["inconclusive"] * 9)
    why = [each["why"] for each in data["problems"]]
    up = f"when the budget of {budget_s} s ended: raise --budget-s"
    assert why == [f"right, but not timed {up}"] * begun + [f"not begun {up}"] * (9 - begun)
    assert card.names("pair") == []


def test_where_time_is_short_some_are_decided_rather_than_none(check, card, constants):
    """Twenty seconds are two processes of a few problems, not one process of all."""
    constants(gate, _TOGETHER=3)
    card.ratios = (1.05,) * 80
    code, data = check("--budget-s", "20")
    assert (code, verdicts(data)[:3]) == (1, ["regression"] * 3)
    assert verdicts(data)[-1] == "inconclusive"


def test_the_time_of_compiling_counts(check, card):
    FakeCompiler.hangs = True
    code, data = check("--budget-s", "0")
    assert (code, verdicts(data)) == (4, ["inconclusive"] * 9)

    card.start_s = 0.0  # on its clock; the wait is on another one
    code, data = check("--budget-s", "0.01")
    assert (code, verdicts(data)) == (4, ["inconclusive"] * 9)
    for each in data["problems"]:
        assert each["why"] == "still compiling when the budget of 0.01 s ended"
        assert each["budget_ended"]


def test_waiting_for_somebody_else_s_run_does_not_count(card):
    budget = Budget(10)
    card.now_s += 4
    with budget.paused():
        card.now_s += 100
    assert (budget.spent_s, budget.left_s) == (4, 6)


def test_verdicts_are_printed_as_they_fall(command, card):
    card.own, card.ratios = {LABELS[4]: 1.05}, (CLOSE,) * 80
    done = command("--budget-s", "60")
    assert done.returncode == 1
    line = f"{LABELS[4]}: regression, 1.050 times the old time: slower by at least"
    assert line not in card.printed[0]  # after one process
    assert line in card.printed[1]
    assert "new/old" not in card.printed[-1]  # the table
    assert done.stdout.index(line) < done.stdout.index("new/old")
    assert "the budget ended before 8 of 9 problems were decided, raise --budget-s" in (" ".join(done.stdout.split()))
    assert re.search("took (5[5-9]|6[0-3]) s, budget 60 s", done.stdout)

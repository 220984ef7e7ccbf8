"""Old and new code in several processes: how often the verdict errs, and on what it rests."""

import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from proportions import proportion_interval

from attnsweep.regress.ab_test import compare
from attnsweep.regress.sequential_test import (
    ERROR,
    MOST,
    PROCESS_SD,
    Decision,
    PairedRounds,
    RatioInterval,
    enough,
    together,
)

SAME, SLOWER, FASTER, OPEN = (Decision.SAME, Decision.SLOWER, Decision.FASTER, Decision.OPEN)


# -- one process ------------------------------------------------------------------------------


def rounds_until_enough(ratio, noise, rng, slower=0.02, limit=3000):
    rounds = PairedRounds()
    for _ in range(limit):
        looked = rounds.add(10.0, 10.0 * ratio * rng.gauss(1, noise))
        if looked and rounds.interval and enough([], rounds.interval, slower):
            break
    return rounds.interval


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("ratio", [1.0, 1.01, 1.02, 1.05])
@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_the_interval_of_a_process_hardly_ever_misses_its_ratio(ratio, noise):
    rng = random.Random(2)
    missed = 0
    for _ in range(100):
        interval = rounds_until_enough(ratio, noise, rng, limit=800)
        assert interval.low <= interval.median <= interval.high
        assert interval.rounds >= 20
        missed += not interval.low <= ratio <= interval.high
    assert missed <= 2  # 100 * ERROR are expected
    assert 100 * ERROR <= 0.1


def test_too_few_rounds_give_no_interval():
    rounds = PairedRounds()
    assert not any(rounds.add(1.0, 2.0) for _ in range(8))
    rounds.look()
    assert rounds.interval is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_left_out_with_its_round(bad):
    rounds = PairedRounds()
    for _ in range(100):
        assert not rounds.add(bad, 1.0)
        assert not rounds.add(1.0, bad)
    assert [rounds.add(1.0, 1.0) for _ in range(20)] == [False] * 19 + [True]
    assert rounds.interval.rounds == 20


# -- several ----------------------------------------------------------------------------------


def process(ratio, within=0.0):
    return RatioInterval(ratio, ratio * (1 - within), ratio * (1 + within), 20)


@pytest.mark.parametrize(
    ("ratios", "decision"),
    [
        ([1.0, 1.0], SAME),
        ([1.02, 1.02], OPEN),  # it may be 0.9 %: three processes are needed
        ([1.02, 1.02, 1.02], SLOWER),
        ([1.03, 1.03], SLOWER),
        ([0.97, 0.97], FASTER),
        ([1.0, 1.05], OPEN),
        ([1.0, 1.05] + [1.0] * 6, OPEN),
        ([1.0, 1.02] + [1.0] * 6, SAME),
    ],
    ids=str,
)
def test_what_processes_show_together(ratios, decision):
    found = together([process(ratio, 0.0005) for ratio in ratios])
    assert found.shows(0.02) is decision
    assert found.rounds == 20 * len(ratios)


def test_more_processes_narrow_what_processes_hide_and_not_what_rounds_do():
    def width(count, within):
        found = together([process(1.0, within)] * count)
        return math.log(found.high / found.low) / 2

    assert width(2, 0.0) == pytest.approx(3 * PROCESS_SD / math.sqrt(2))
    assert width(8, 0.0) == pytest.approx(width(2, 0.0) / 2)
    assert width(8, 0.01) > 0.01


def test_processes_that_differ_more_than_is_assumed_widen_the_interval():
    alike = together([process(1.0)] * 4)
    apart = together([process(r) for r in (0.98, 1.0, 1.0, 1.02)])
    assert apart.high > 1.02 > alike.high


# -- all of it, with a GPU whose processes differ ---------------------------------------------


class Card(FakeGpu):
    """A card on which new code takes `ratio` times as long, and each process adds an offset."""

    def __init__(self, ratio, offset, noise, seed):
        super().__init__()
        self.ratio, self.offset, self.noise = ratio, offset, noise
        self.random = random.Random(seed)
        self.processes = 0
        self.another()

    def another(self):
        """A new process with the problem open."""
        self.processes += 1
        self.own = self.ratio * math.exp(self.random.gauss(0, self.offset))
        return self

    def pair(self, first, second):
        drift = self.random.gauss(1, 0.05)  # common to both
        times = {"old": 20.0 * drift, "new": 20.0 * drift * self.own}
        return tuple(times[side] * self.random.gauss(1, self.noise) for side in (first, second))

    def replay(self, name, kind):
        return 20.0

    def add(self, name, candidate, *, cold):
        pass

    def forget(self, name):
        pass


def outcomes(ratio, offset, trials, noise=0.002):
    """Verdicts of `trials` comparisons, as `attnsweep check` makes them, and processes of each."""
    verdicts, processes = Counter(), []
    for number in range(trials):
        card = Card(ratio, offset, noise, f"{ratio} {offset} {number}")
        how = {"slower": 0.02, "budget_s": 60, "seed": str(number)}
        found = compare(card, card.another, None, None, **how)
        assert found.processes == card.processes == len(found.each)
        assert 2 <= found.processes <= MOST
        verdicts[found.verdict.value] += 1
        processes.append(found.processes)
    return verdicts, processes


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("offset", [0.0, 0.0025, 0.005])
def test_a_slowdown_of_the_threshold_seldom_passes_whatever_processes_add(offset):
    verdicts, _ = outcomes(1.02, offset, 300)
    assert verdicts["pass"] <= 1  # 0 or 1 of 300: at most 1.9 % with 95 % confidence
    assert verdicts["improvement"] == 0
    assert verdicts["regression"] >= 270


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("offset", [0.0, 0.0025, 0.005])
def test_identical_code_passes_almost_always(offset):
    verdicts, processes = outcomes(1.0, offset, 300)
    assert verdicts["pass"] >= 297
    assert verdicts["regression"] == 0
    assert sum(processes) / 300 < 2.5


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("offset", [0.0, 0.005])
def test_half_the_threshold_is_seldom_called_a_regression(offset):
    verdicts, _ = outcomes(1.01, offset, 150)
    assert verdicts["regression"] <= 1


# -- what docs/measuring.md says of old and new code ------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()


class Simulated:
    """A card whose rounds scatter by 0.2 %, and whose processes add an offset to the ratio."""

    def __init__(self, slower, offset, number):
        self._ratio, self._offset = 1 + slower, offset
        self._random = random.Random(f"{slower} {offset} {number}")
        self.another()

    def another(self):
        self._own = self._ratio * math.exp(self._random.gauss(0, self._offset))
        return self

    def pair(self, *order):
        times = {"old": 20.0, "new": 20.0 * self._own}
        return tuple(times[name] * self._random.gauss(1, 0.002) for name in order)

    def nothing(self, *_, **__):
        return 0

    replay = confirm = add = forget = nothing


def simulated(slower, offset):
    """Percent of each verdict of 2,000 comparisons, and the processes of one."""
    found = []
    for number in range(2000):
        card = Simulated(slower, offset, number)
        how = {"slower": 0.02, "budget_s": 600, "seed": str(number)}
        found.append(compare(card, card.another, None, None, **how))
    counts = Counter(each.verdict.value for each in found)
    shares = [100 * counts[name] / 2000 for name in ("pass", "regression", "inconclusive")]
    return shares, sum(each.processes for each in found) / 2000


@pytest.mark.nightly(push=0)
@pytest.mark.parametrize("row", re.findall(r"^\| (\d) % \| ([\d.]+) % \|", PAGE, re.MULTILINE), ids=" ".join)
def test_a_row_of_the_page_is_what_comparisons_said(row):
    shares, processes = simulated(*(int(1000 * float(each)) / 1e5 for each in row))
    cells = [f"{each} %" for each in row] + [f"{share:.2f}" for share in shares]
    assert f"| {' | '.join(cells)} | {processes:.1f} |" in PAGE


@pytest.mark.nightly(push=0)
def test_the_page_says_what_passes_at_an_offset_of_one_percent():
    (passed, *_), _ = simulated(0.02, 0.01)
    assert f"At an offset of 1 %, {passed:.0f} % of the slowdowns of 2 % pass." in PAGE


def test_the_page_says_how_sure_the_shares_are():
    low, high = (100 * limit for limit in proportion_interval(86, 2000))
    none = 100 * proportion_interval(0, 2000)[1]
    page = " ".join(PAGE.split())
    assert f"0.00 is at most {none:.2f}, and 4.30 is {low:.2f} to {high:.2f}, with 95 % confidence" in page

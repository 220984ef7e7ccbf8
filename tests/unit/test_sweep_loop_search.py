"""Sweeps with budgets and model-based searches, with a stand-in for the GPU process."""

import itertools
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
from fake_compiler import FakeCompiler
from sweeping import FAMILIES, SPEC, Notes, by_config

from attnsweep.choose import search
from attnsweep.choose.strategies import gp
from attnsweep.compile.candidate import Build
from attnsweep.compile.launches import FirstTimes
from attnsweep.compile.nvrtc import NOW, SOON
from attnsweep.core.trial import Status
from attnsweep.family.family import Config
from attnsweep.sweep import candidates, loop, session

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("ahead", [1, 64])
def test_a_budget_in_time_is_kept_to_one_candidate_and_the_finals_still_come(go, gpu, clock, lookahead, ahead):
    clock.trial_s = 0.7
    lookahead(ahead)
    spec = SPEC + "search: {strategy: random, budget_s: 1}\n"
    rows = by_config(go(spec))
    tried = [row for key, row in rows.items() if isinstance(key, tuple)]
    assert len(tried) == 2
    assert all(row.time_us.rounds for row in tried)
    # Run again: what was left out is tried, and what is known is not, and takes no time.
    gpu.calls.clear()
    rows = by_config(go(spec))
    assert len(gpu.names("trial")) == 1
    assert [row.status for key, row in rows.items() if isinstance(key, tuple)] == [Status.OK] * 3


def test_a_budget_that_compiling_used_up_is_enough_for_one_candidate(go, timed_by):
    timed_by(itertools.count(0.0, 1.5).__next__, candidates)
    rows = by_config(go(SPEC + "search: {budget_s: 1}\n"))
    assert len([1 for key in rows if isinstance(key, tuple)]) == 1


MANY = f"""
kernel_dir: {FAMILIES}
problems:
  - {{batch: 1, heads: 2, seqlen: 256, head_dim: 64}}
kernels: {{simple: {{THREADS: [32, 64, 96, 128, 160, 192, 224, 256]}}}}
baselines: []
measure: {{rounds: 4, finalists: 3}}
search: {{strategy: gp, candidates: 6, seed: 4}}
"""


@pytest.fixture
def submitted(monkeypatch):
    """(turn, THREADS) of each candidate whose stages are asked for."""
    asked, submit = [], Build.submit

    def noted(self, turn=NOW):
        asked.append((turn, self.config["THREADS"]))
        submit(self, turn)

    monkeypatch.setattr(Build, "submit", noted)
    return asked


@pytest.mark.usefixtures("model")
def test_nothing_is_likely_to_come_when_time_is_up(go, submitted, clock, monkeypatch, stops):
    stops(LEAST=2, BATCH=5, FEW=2, PATIENCE=1)
    clock.trial_s = 0.7
    monkeypatch.setattr(FakeCompiler, "threads", 4)
    go(MANY.replace("seed: 4", "seed: 4, budget_s: 1"))
    assert len({threads for turn, threads in submitted if turn == SOON}) == 2  # of the first batch of two


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("threads", "ahead"), [(2, 0), (9, 2), (64, 3)])
def test_threads_with_nothing_to_do_compile_what_is_likely_to_come(go, submitted, monkeypatch, stops, threads, ahead):
    stops(LEAST=2, BATCH=5, FEW=2, PATIENCE=1)
    monkeypatch.setattr(FakeCompiler, "threads", threads)
    go(MANY)
    assert {turn for turn, _ in submitted} <= {NOW, SOON}, "of one problem"
    first = [threads for turn, threads in submitted if turn == NOW][:2]
    soon = [threads for turn, threads in submitted if turn == SOON]
    assert len(soon) >= ahead
    assert not {*soon[:ahead]} & {*first}
    assert bool(soon) == bool(ahead)


@pytest.fixture
def stops(constants):
    """Sets after how few candidates a search may stop: stops(LEAST=2, PATIENCE=1)."""
    return partial(constants, gp)


@pytest.fixture
def model(gpu):
    """A small model-based search on a card whose clock is another one in races and finals.

    tried: THREADS of each trial. stop: the number of trials after which Ctrl-C comes.
    """
    drift = itertools.cycle([1.0, 1.02, 0.97])
    found = SimpleNamespace(tried=[], stop=None)

    def first_times(candidate):
        if len(found.tried) == found.stop:
            raise KeyboardInterrupt
        threads = candidate.config["THREADS"]
        found.tried.append(threads)
        return FirstTimes(20.0 + abs(threads - 160) / 10, {}, 1.0)

    def sample(name, kind):
        return 9.0 if kind == "eager" else 50.0 * next(drift) - int(name.split("=")[1]) / 10

    gpu.first_times, gpu.sample = first_times, sample
    return found


def nearest(space, candidates, seed):
    """A model at its simplest: two at a time, those nearest to the fastest one that it was told."""
    left, times = sorted(space.configs, key=lambda config: config["THREADS"]), {}
    while len(times) < candidates:
        best = min(times, key=times.get)["THREADS"] if times else 128
        left.sort(key=lambda config: abs(config["THREADS"] - best))
        batch, left, told = left[:2], left[2:], []
        for config in batch:
            told += yield config
        while len(told) < len(batch):
            told += yield None
        times |= {Config(row.config): row.screened_us for row in told}


@pytest.fixture
def learns(monkeypatch):
    """Strategy gp is one that any two times teach; gp knows nothing of a single parameter."""
    monkeypatch.setitem(search.STRATEGIES, "gp", nearest)


@pytest.mark.usefixtures("learns")
def test_a_model_based_search_that_is_done_asks_for_nothing_when_run_again(go, model):
    go(MANY)
    assert len(model.tried) == len(set(model.tried)) == 6
    model.tried.clear()
    go(MANY)
    assert model.tried == []


@pytest.mark.usefixtures("learns")
@pytest.mark.parametrize("before", ["stop at 1", "stop at 3", "stop at 5", "candidates: 4"])
def test_a_model_based_search_goes_on_as_if_it_had_not_stopped(go, model, tmp_path, before):
    """Its rows say what the model was told, though finals of another clock changed their times."""
    go(MANY)
    whole = set(model.tried)
    model.tried.clear()
    (path,) = tmp_path.rglob("trials.jsonl")
    path.unlink()
    if before == "candidates: 4":
        go(MANY.replace("candidates: 6", before))
    else:
        model.stop = int(before.split()[-1])
        assert go(MANY).interrupted
    model.stop = None
    go(MANY)
    assert sorted(model.tried) == sorted(whole)


SEARCHED = MANY.replace("candidates: 6, ", "")


def test_a_search_that_stops_by_itself_says_why_and_all_can_be_tried_later(go, model, gpu, stops, tmp_path):
    stops(FEW=2, LEAST=2, PATIENCE=1, EXPECTED=0.1)
    gpu.sample, notes = lambda name, kind: 20.0, Notes()
    outcome = go(SEARCHED, observer=notes)
    tried = len(model.tried)
    assert 2 <= tried < 8
    (facts,) = json.loads((outcome.run.directory / "spaces.json").read_text())
    assert re.fullmatch(
        r"the last \d were no better, and another one is expected to gain \d\.\d\d % at most", facts["ended"]
    )
    assert notes.texts == [f"(1,2,256,64) fp16 full: simple: the search ended: {facts['ended']}"]
    left = f"{tried} of 8 candidates tried, {8 - tried} left out: {facts['ended']}"
    assert left in (outcome.run.directory / "ranking.md").read_text()

    # A replay takes what is recorded, wherever a search would stop today.
    stops(LEAST=1)
    recording = f"name: again\ndevice: replay\nrecording: {outcome.run.directory}\n"
    again = go(recording + SEARCHED).run.trials
    assert {t.key for t in again} == {t.key for t in outcome.run.trials}
    assert all(row.recorded for row in again)

    stops(LEAST=2)
    model.tried.clear()
    go(SEARCHED)
    assert model.tried == []
    go(SEARCHED.replace("gp", "exhaustive"))
    assert len(model.tried) == 8 - tried
    (facts,) = json.loads((outcome.run.directory / "spaces.json").read_text())
    assert "ended" not in facts


def test_a_row_has_the_seconds_of_its_search_and_a_run_that_goes_on_counts_on(go, timed_by):
    timed_by(itertools.count(100).__next__, session, loop)
    first = {t.key: t.tried_s for t in go(limit=2).run.trials}
    again = {t.key: t.tried_s for t in go().run.trials}
    assert sorted(s for s in first.values() if s is not None) == [1, 2]  # baselines have none
    assert {key: again[key] for key in first} == first
    assert [s for key, s in again.items() if key not in first] == [3]

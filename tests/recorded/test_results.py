"""The runs recorded in results/ are whole, right, and those of the shipped specs."""

import json
import statistics
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from attnsweep.choose.ranking import rank
from attnsweep.choose.search import DEFAULT_STRATEGY, exhaustively
from attnsweep.core.hardware import arch_named, arch_on
from attnsweep.core.trial import OURS, Status
from attnsweep.family.discover import discover, rows_of_today
from attnsweep.reports import tables as report
from attnsweep.reports.sections import baselines_of
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan
from attnsweep.specs.shipped import shipped_specs
from attnsweep.store.run import DERIVED, find_runs
from attnsweep.store.run import open_run as read_run

ROOT = Path(__file__).parent.parent.parent
RUNS = [run for run in find_runs(ROOT / "results") if run.parent.name != "replay"]
# The name that a recorded spec has now, by the name that it had.
RENAMED = json.loads((ROOT / "results" / "renamed.json").read_text())
NAME_OF = {before: now for now, before in RENAMED.items()}
EARLIER = json.loads((ROOT / "results" / "earlier.json").read_text())
# Changed with protocol 4 in space, problems or baselines; since then a run says its protocol.
CHANGED = {*RENAMED, "three_kernel", "wide_head", "ladder"}

open_run = lru_cache(read_run)


@lru_cache
def shipped():
    """The specs that come with attnsweep, against the families."""
    kernels = discover()
    return kernels, [load_spec(path, kernels) for path in shipped_specs().values()]


def on_card(spec, kernels, card):
    """The spec with the number of the card's SMs where it says `sms`."""
    selections = {name: own.on(kernels[name], card) for name, own in spec.kernels.items()}
    return replace(spec, kernels=selections)


@pytest.fixture(params=RUNS, ids=lambda run: f"{run.parent.name}/{run.name}")
def directory(request):
    return request.param


@pytest.fixture
def run(directory):
    return open_run(directory)


def test_there_is_a_recorded_run():
    assert ROOT / "results" / "h200" / "mma_h200" in RUNS


def test_it_is_whole(run, directory):
    assert run.warnings == []
    assert run.environment is not None
    assert run.environment.slug == directory.parent.name
    assert not any(trial.recorded for trial in run.trials)
    asked, rows = baselines_of(run.spec_text), {(t.problem, t.provider) for t in run.trials}
    # README and the pages quote the fastest of them.
    assert {(t.problem, name) for t in run.trials for name in asked} <= rows


def test_every_ok_row_is_right_and_timed(run):
    for trial in run.trials:
        if trial.status is Status.OK:
            assert trial.accuracy.rel_err <= trial.accuracy.limit or trial.provider != OURS, trial
            assert trial.time_us.median > 0
        else:
            assert trial.detail, trial
        if trial.time_us and trial.time_us.rounds:
            assert trial.time_us.samples == len(trial.time_us.rounds)
            middle = statistics.median(trial.time_us.rounds)
            assert trial.time_us.median == pytest.approx(middle, rel=1e-4)


@pytest.mark.nightly(push=3)
def test_no_row_is_faster_than_its_bound(run):
    ranking = rank(run.trials, run.environment)
    shares = (ranking["bound_us"] / ranking["time_us"]).dropna()
    assert len(shares) > 0
    assert shares.max() < 1


@pytest.mark.nightly(push=15)
def test_it_is_the_shipped_spec(run, directory):
    kernels, specs = shipped()
    recorded = load_spec(directory / "spec.yaml", kernels)
    assert recorded.name == directory.name
    if any(selection.call for selection in recorded.kernels.values()):
        assert recorded.name not in {spec.name for spec in specs}  # of files that no shipped spec knows
        return
    # A later version may know more baselines, and a run may be recorded with --exhaustive; nothing
    # else may differ.
    name = NAME_OF.get(recorded.name, recorded.name)
    (spec,) = (spec for spec in specs if spec.name == name)
    if spec.search.strategy == DEFAULT_STRATEGY != recorded.search.strategy:
        spec = exhaustively(spec)
    if name in CHANGED and run.environment.protocol is None:
        assert set(recorded.problems) & set(spec.problems)
        return
    assert set(recorded.baselines) <= set(spec.baselines)
    card = arch_on(run.environment)
    # How long a check may take is no part of a run.
    checked = spec.check.model_copy(update={"budget_s": recorded.check.budget_s})
    same = replace(spec, name=recorded.name, baselines=recorded.baselines, check=checked)
    if f"{directory.parent.name}/{directory.name}" in EARLIER["candidates"]:
        assert on_card(same, kernels, card) != on_card(recorded, kernels, card), "drop its entry"
        same = replace(same, kernels=recorded.kernels)
    if f"{directory.parent.name}/{directory.name}" in EARLIER["problems"]:
        assert set(recorded.problems) < set(spec.problems), "drop its entry"
        same = replace(same, problems=recorded.problems)
    assert on_card(same, kernels, card) == on_card(recorded, kernels, card)


@pytest.mark.nightly(push=3)
def test_it_is_packed_and_its_tables_can_be_written(run, directory):
    kept = {path.name for path in directory.iterdir()}
    assert "trials.jsonl.xz" in kept
    assert not kept & {"trials.jsonl", *DERIVED}
    assert set(report.files(run)) == {"ranking.csv", "ranking.md"}


@pytest.mark.parametrize(("name", "before"), RENAMED.items())
def test_a_renamed_run_is_there_until_it_is_recorded_anew(name, before):
    assert any(run.name == before for run in RUNS)


def test_what_earlier_json_names_is_recorded():
    named = {*EARLIER["candidates"], *EARLIER["problems"], *EARLIER["contradicted"]}
    assert named <= {f"{run.parent.name}/{run.name}" for run in RUNS}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("name", EARLIER["candidates"])
def test_what_won_among_earlier_candidates_is_still_swept(name):
    kernels, specs = shipped()
    (spec,) = (spec for spec in specs if spec.name == Path(name).name)
    if spec.search.strategy == DEFAULT_STRATEGY:
        spec = exhaustively(spec)
    before = open_run(ROOT / "results" / name)
    ranked = rank(before.trials, before.environment)
    rows = (rows_of_today(kernels)(row.trial) for row in ranked[ranked["winner"]].itertuples())
    won = {(row.problem, row.kernel): row.config for row in rows}
    for item in plan(spec, arch_named("sm_90a")):
        for space in item.spaces:
            config = won.get((item.problem, space.kernel.name))
            if item.problem.label in EARLIER["replaced"].get(name, ()):  # by faster candidates
                assert config is not None, "drop its entry"
                continue
            # A config with EXP2_POLY 2 won at (1,8,512,64), tied with one without.
            some = [{**each, "EXP2_POLY": 0} for each in space.configs]
            assert config is None or {**config, "EXP2_POLY": 0} in some

"""Energies in a sweep: of whom, how often, what they rank, and what is said without a counter."""

import random
from dataclasses import replace

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import FAMILIES, use

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose.energy import RANKED, SHOWN
from attnsweep.choose.ranking import rank, winners
from attnsweep.core.errors import NoGpuError
from attnsweep.core.observer import Observer
from attnsweep.core.trial import OURS, Status
from attnsweep.family.discover import discover
from attnsweep.regress.recorded import compare
from attnsweep.reports import tables
from attnsweep.reports.explain import explain, verdict
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session

TIMES = {"THREADS=32": 30.0, "THREADS=64": 20.0, "THREADS=128": 21.0, "torch_flash": 25.0}
WATTS = {"simple THREADS=64": 600.0, "simple THREADS=128": 400.0, "torch_flash": 550.0}
SPEC = f"""
kernel_dir: {FAMILIES}
problems: [{{batch: 1, heads: 2, seqlen: 256, head_dim: 64}}]
kernels: {{simple: {{THREADS: [32, 64, 128]}}}}
baselines: [torch_flash, flash_attn_3]
measure: {{rounds: 4%s}}
"""


class Card(FakeGpu):
    """Power that scatters by a share from stretch to stretch."""

    scatter = 0.0
    source = random.Random(3)

    def stretch(self, name):
        found = super().stretch(name)
        return found and replace(found, energy_uj=found.energy_uj * (1 + self.source.gauss(0, self.scatter)))


class Notes(Observer):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Card(TIMES)
    gpu.watts = dict(WATTS)
    return use(monkeypatch, gpu)


@pytest.fixture
def go(gpu, tmp_path):
    notes = Notes()

    def run(measure="", place="results"):
        kernels = discover(FAMILIES)
        path = tmp_path / "test.yaml"
        path.write_text(SPEC % measure)
        return session.run(
            load_spec(path, kernels), results=tmp_path / place, cache_dir=tmp_path / "cache", observer=notes
        ).run

    run.notes = notes.notes
    return run


def by_name(run):
    return {t.config.get("THREADS", t.provider): t for t in run.trials if t.status is Status.OK}


def won(run):
    (winner,) = winners(rank(run.trials, run.environment))
    return winner.config["THREADS"]


def test_it_is_off_by_default(go, gpu):
    run = go()
    assert gpu.names("energy") == []
    assert all(t.energy_uj is None and t.power_w is None for t in run.trials)
    assert rank(run.trials, run.environment)["energy_uj"].isna().all()
    assert " mJ" not in tables.files(run)["ranking.md"]


def test_every_finalist_and_baseline_has_one_and_times_still_rank(go, gpu):
    run = go(", energy: true")
    rows = by_name(run)
    assert set(rows) == {32, 64, 128, "torch_flash"}
    assert rows[64].energy_uj.median == pytest.approx(20.0 * 600)
    assert rows[64].power_w == 600
    assert rows["torch_flash"].energy_uj.median == pytest.approx(25.0 * 550)
    assert all(row.energy_uj.samples == SHOWN for row in rows.values())
    assert not any(row.energy_uj.ranks for row in rows.values())
    assert won(run) == 64
    ranking = rank(run.trials, run.environment)
    assert set(ranking["ranked_as"]) == {"warm"}


def test_the_least_energy_wins_if_it_ranks(go, gpu):
    run = go(", rank_by: energy")
    assert won(run) == 128, "5 % slower, and a third less power"
    ranking = rank(run.trials, run.environment)
    first = ranking[ranking["winner"]].iloc[0]
    assert first["ranked_as"] == "energy"
    assert first["timed_as"] == "warm"
    assert first["time_us"] == pytest.approx(21.0), "a time stays a time"
    assert first["ratio_to_best_baseline"] == pytest.approx(25 / 21), "so does × base"
    order = ranking.dropna(subset="rank")["energy_uj"].tolist()
    assert order == sorted(order)
    assert "which ranks" in tables.files(run)["ranking.md"]
    assert by_name(run)[128].energy_uj.samples == RANKED


def test_a_baseline_that_takes_less_energy_is_named_and_not_the_one_that_is_faster(go, gpu):
    gpu.times |= {"flash_attn_3": 20.5, "torch_flash": 22.0}
    gpu.watts |= {"flash_attn_3": 600.0, "torch_flash": 350.0}
    run = go(", rank_by: energy")
    ranking = rank(run.trials, run.environment)
    assert ranking.iloc[0]["provider"] == "torch_flash"
    assert ranking.iloc[0]["best_baseline"] == "flash_attn_3", "× base is of times"
    text = tables.files(run)["ranking.md"].replace("\u00a0", " ")
    assert "torch_flash takes less energy (1.09×)" in text


def test_explain_says_what_ranked(go):
    run = go(", rank_by: energy")
    ((best, *_), (other, *_)) = (explain(run, [f"THREADS={n}"], None, discover(FAMILIES)) for n in (128, 64))
    assert other.ratio == pytest.approx(12 / 8.4)
    said = [verdict(found)[0].replace("\u00a0", " ") for found in (best, other)]
    assert said[0].startswith("It won: 8.4")
    assert said[1].startswith("It lost: 12")
    assert "1.43 times the winner's 8.4" in said[1]
    assert all("mJ" in text for text in said)


def test_what_noise_hides_is_a_tie(go, gpu):
    gpu.watts |= {"simple THREADS=64": 420.0, "simple THREADS=128": 400.5}
    assert by_name(go(", rank_by: energy", "quiet"))
    gpu.scatter = 0.05
    run = go(", rank_by: energy", "noisy")
    ranking = rank(run.trials, run.environment)
    ours = ranking[(ranking["provider"] == OURS) & (ranking["rank"] == 1)]
    assert len(ours) >= 2
    assert ours["tied"].all()
    assert (ours["energy_spread_uj"] > 0).all()


def test_a_counter_that_stands_still_leaves_the_column_empty_and_says_so(go, gpu):
    gpu.watts = None
    run = go(", energy: true")
    assert all(t.energy_uj is None for t in run.trials)
    assert won(run) == 64
    assert "no energies: NVML's counter is missing, or stands still" in go.notes


def test_nothing_is_ranked_by_a_counter_that_stands_still(go, gpu):
    gpu.watts = None
    with pytest.raises(NoGpuError, match="stands still") as caught:
        go(", rank_by: energy")
    assert "measure.rank_by=warm" in caught.value.render()


def test_a_card_without_a_counter_is_refused_before_anything_is_measured(go, gpu):
    gpu.environment = TEST_GPU.model_copy(update={"energy_counter": False})
    with pytest.raises(NoGpuError, match="counts no energy of NVIDIA Test 1"):
        go(", rank_by: energy")
    assert gpu.names("trial") == []
    assert won(go(", energy: false")) == 64


def test_an_entry_that_fails_then_is_a_row_and_the_others_go_on(go, gpu):
    gpu.faults["energy", "simple THREADS=128"] = WorkerError(Status.TIMEOUT, "hung")
    run = go(", rank_by: energy")
    (row,) = (t for t in run.trials if t.config.get("THREADS") == 128)
    assert (row.status, row.detail) == (Status.TIMEOUT, "while timing: hung")
    assert won(run) == 64


def test_a_resumed_run_measures_none_again_and_another_setting_all(go, gpu):
    go(", energy: true")
    gpu.calls.clear()
    go(", energy: true")
    assert gpu.calls == []
    go()
    assert len(gpu.names("trial")) == 3
    assert gpu.names("energy") == []


def test_a_damaged_energy_damages_its_row(go):
    run = go(", rank_by: energy")
    (row,) = (t for t in run.trials if t.config.get("THREADS") == 128)
    broken = row.with_(energy_uj=row.energy_uj.model_copy(update={"median": float("nan")}))
    ranking = rank([*run.trials, broken], run.environment)
    (found,) = ranking[ranking["config"] == "THREADS=128"]["status"]
    assert found == "damaged"


@pytest.mark.parametrize("measure", [", rank_by: energy", ", energy: true"])
def test_recorded_runs_ranked_by_energy_are_not_compared_as_times(go, gpu, measure):
    old, new = go(", rank_by: energy", "old"), go(measure, "new")
    new = replace(new, trials=[t.with_(fingerprint="other") for t in new.trials])
    (finding,) = compare(old, new, slower=0.02).findings
    assert finding.verdict.value == "inconclusive"
    assert "ranked by energy, then by" in finding.why

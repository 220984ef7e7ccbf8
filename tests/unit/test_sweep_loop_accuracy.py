"""What a sweep makes of errors: which rows take part in rounds under `max_error`, and limits."""

from __future__ import annotations

import copy

import pytest
from fake_gpu import label_of
from sweeping import SPEC, by_config

from attnsweep.core.trial import Status
from attnsweep.family.discover import discover

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def accuracies(gpu):
    """Errors by config: the fastest of SPEC errs most."""
    errors = {"THREADS=32": 0.01, "THREADS=64": 0.05, "THREADS=128": 0.02}
    right = gpu.trial

    def trial(candidate):
        accuracy, first = right(candidate)
        name = label_of(candidate)
        changes = {"limit": 0.1, "rel_err": errors[name], "timed_err": errors[name]}
        return accuracy.model_copy(update=changes), first

    gpu.trial = trial
    return errors


BOUNDED = SPEC.replace("{rounds: 4}", "{rounds: 4, max_error: 0.02}")


def test_max_error_keeps_the_inaccurate_out_of_the_rounds(go, gpu, accuracies):
    rows = by_config(go(BOUNDED))
    assert rows[64,].status is Status.INACCURATE
    assert rows[64,].detail == "error 5.00e-02 exceeds measure: max_error 2.00e-02"
    assert rows[64,].time_us.rounds == []
    assert "naive THREADS=64" not in gpu.names("add")
    assert [len(rows[key].time_us.rounds) for key in ((32,), (128,), "torch_flash")] == [4] * 3
    ranking = (go(BOUNDED).run.directory / "ranking.md").read_text()
    assert "best of ours; torch_flash is faster (1.20×): naive THREADS=32" in ranking
    assert "max_error 2.0e-02: candidates with a larger error are not ranked (1 are not)" in ranking


def test_another_max_error_measures_again(go, gpu, accuracies):
    go(BOUNDED)
    tried = len(gpu.names("trial"))
    go(BOUNDED)
    assert len(gpu.names("trial")) == tried  # nothing is left to measure
    rows = by_config(go(BOUNDED.replace("0.02}", "0.05}")))
    assert {rows[key].status for key in ((32,), (64,), (128,))} == {Status.OK}
    assert len(rows[64,].time_us.rounds) == 4


def test_nothing_accurate_enough_is_no_result_and_says_so(go, accuracies):
    outcome = go(BOUNDED.replace("0.02}", "0.001}"))
    assert outcome.exit_code == 1
    ranking = (outcome.run.directory / "ranking.md").read_text()
    assert "no candidate is as accurate as max_error asks" in ranking


def test_a_replay_can_ask_for_another_accuracy(go, tmp_path, accuracies):
    recorded = go(SPEC).run.directory
    text = f"{BOUNDED}device: replay\nrecording: {recorded}\n"
    rows = by_config(go(text))
    assert rows[64,].status is Status.INACCURATE
    assert rows[32,].status is Status.OK


def test_the_gpu_process_is_told_how_often_families_round_scores(go, gpu):
    """What limits of rounded scores come from took 6 s of a run, beside imports."""
    kernels = discover()
    kernels["naive"] = copy.copy(kernels["naive"])
    object.__setattr__(kernels["naive"], "rounds_scores", 2)
    go(kernels=kernels)
    assert [opened["rounds_scores"] for opened in gpu.opened] == [{2}]

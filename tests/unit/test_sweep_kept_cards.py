"""A run that several cards measured: what one has finished stays, what it has begun begins anew."""

import json

import pytest
from fake_gpu import FakeGpu
from fleets import TWO
from samples import TEST_GPU
from sweeping import TIMES, Notes, use

from attnsweep.core.errors import CardLostError, NoGpuError
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.store.run import TRIALS, read_trials
from attnsweep.sweep import session


@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    path = tmp_path / "test.yaml"
    kernels = discover()

    def run(uuid, faults=(), times=TIMES, text=TWO, **options):
        path.write_text(text)
        gpu = FakeGpu(times, environment=TEST_GPU.model_copy(update={"uuid": uuid}))
        gpu.faults |= dict(faults)
        use(monkeypatch, gpu)
        notes = Notes()
        outcome = session.run(load_spec(path, kernels), results=tmp_path, observer=notes, **options)
        return outcome, gpu, notes.texts

    return run


def of_two_cards(directory, unfinished=()):
    """Give the second problem's rows to card `b`, without some of its lines."""
    path = directory / TRIALS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    second = rows[-1]["problem"]
    for row in rows:
        if row["problem"] == second:
            row["machine"]["uuid"] = "b"
    kept = [row for row in rows if row["problem"] != second or row["config"] not in unfinished]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    environment = json.loads((directory / "environment.json").read_text())
    (directory / "environment.json").write_text(json.dumps(environment | {"uuid": None}))


def test_what_another_card_has_finished_is_not_measured_again(go):
    directory = go("a")[0].run.directory
    of_two_cards(directory)
    outcome, gpu, notes = go("a")
    assert gpu.names("trial") == []
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a", "b"}
    assert outcome.run.environment.uuid is None
    assert not [note for note in notes if "set aside" in note]


def test_what_another_card_has_begun_begins_anew_here(go):
    directory = go("a")[0].run.directory
    of_two_cards(directory, unfinished=[{"THREADS": 128}])
    outcome, gpu, notes = go("a")
    assert len(gpu.names("trial")) == 3
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a"}
    [note] = [note for note in notes if "set aside" in note]
    assert "(1,2,512,64) fp16 full" in note
    [aside] = directory.glob("trials.2*.jsonl")
    assert {t.machine["uuid"] for t in read_trials(aside)[0]} == {"b"}


def test_a_problem_whose_rows_are_of_two_cards_begins_anew(go):
    directory = go("a")[0].run.directory
    path = directory / TRIALS
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        row = json.loads(line)
        if row["config"] == {"THREADS": 32} and row["problem"]["seqlen_q"] == 256:
            lines[number] = line.replace('"uuid":"a"', '"uuid":"b"')
    path.write_text("".join(lines))
    assert len({t.machine["uuid"] for t in read_trials(path)[0]}) == 2
    outcome, gpu, _ = go("a")
    assert len(gpu.names("trial")) == 3
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a"}


LONG = {"text": TWO.replace("[256, 512]", "[256, 262144]")}
LONG["times"] = {name: 1e5 * time for name, time in TIMES.items()}


def test_a_long_problem_that_another_card_has_finished_is_not_measured_again(go):
    """One of its candidates was tried on a shorter problem alone."""
    outcome, gpu, _ = go("a", **LONG)
    assert len(gpu.names("trial")) == 3 + 3 + 2
    of_two_cards(outcome.run.directory)
    outcome, gpu, notes = go("a", **LONG)
    assert gpu.names("trial") == []
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a", "b"}
    assert not [note for note in notes if "set aside" in note]


def test_a_long_problem_that_another_card_has_begun_begins_anew_here(go):
    directory = go("a", **LONG)[0].run.directory
    of_two_cards(directory, unfinished=[{"THREADS": 64}])
    outcome, gpu, notes = go("a", **LONG)
    assert len(gpu.names("trial")) == 3 + 2
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a"}
    assert [note for note in notes if "set aside" in note]


LOST = CardLostError("no CUDA GPU found (cudaErrorNoDevice)")


def test_a_card_that_is_lost_keeps_its_rows_and_its_tables(go):
    """The run said "Nothing was measured", and no table was written."""
    outcome, _, notes = go("a", {("open", "(1,2,512,64) fp16 full"): LOST})
    assert (outcome.exit_code, outcome.no_card) == (3, True)
    assert outcome.unmeasured == ("(1,2,512,64) fp16 full",)
    assert len(outcome.run.trials) == 3
    assert (outcome.run.directory / "ranking.md").is_file()
    assert notes[-1] == LOST.what
    outcome, gpu, _ = go("a")
    assert outcome.exit_code == 0
    assert len(gpu.names("trial")) == 3


def test_a_card_that_is_lost_at_once_is_an_error(go):
    with pytest.raises(NoGpuError, match="cudaErrorNoDevice"):
        go("a", {("open", "(1,2,256,64) fp16 full"): LOST})

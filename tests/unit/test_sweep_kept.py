"""Resume: which rows of an earlier run hold, and what makes each of them void."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu
from fleets import TWO
from samples import TEST_GPU, numbered, once
from sweeping import FAMILIES, TIMES, Notes, use

from attnsweep.choose.rounds import together
from attnsweep.compile.candidate import Build, compiled_row
from attnsweep.core import trial
from attnsweep.core.errors import CardLostError, CompileError, CompilerLost, NoGpuError
from attnsweep.core.hardware import arch_named
from attnsweep.core.trial import Status
from attnsweep.device.lock import LOCK_VARIABLE
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.specs.load import load_spec
from attnsweep.specs.model import MeasureSpec, SearchSpec
from attnsweep.store.run import TRIALS, read_trials
from attnsweep.store.store import Store
from attnsweep.sweep import kept as sweep_kept
from attnsweep.sweep import session
from attnsweep.sweep.kept import Kept

PROBLEM = numbered(0).problem
SPEC = SimpleNamespace(
    measure=MeasureSpec(rounds=4), search=SearchSpec(), require={}, baselines=["torch_flash"], candidates=[]
)
ONCE = once(7.0)
ROUNDS = ONCE.model_copy(update={"rounds": [7.0, 7.0]})


@pytest.fixture
def build(tmp_path):
    kernel, arch = discover(FAMILIES)["simple"], arch_named("sm_90a")
    return Build(kernel, Config({"THREADS": 64}), PROBLEM, FakeCompiler(arch, tmp_path))


def kept_of(spec=SPEC, environment=TEST_GPU, rows=()):
    return Kept(spec, environment, SimpleNamespace(rows_of=lambda problem: list(rows)))


def measure(**changes):
    return SimpleNamespace(**{**vars(SPEC), "measure": MeasureSpec(**{"rounds": 4, **changes})})


OTHER_RUNS = {
    "rank_by": {"spec": measure(rank_by="cold")},
    "rounds": {"spec": measure(rounds=5)},
    "replay_us": {"spec": measure(replay_us=3000)},
    "cold": {"spec": measure(cold=False)},
    "eager": {"spec": measure(eager=False)},
    "require": {"spec": SimpleNamespace(**{**vars(SPEC), "require": {"fwd": ["registers < 9"]}})},
    "gpu": {"environment": TEST_GPU.model_copy(update={"gpu": "NVIDIA Test 2"})},
    "driver": {"environment": TEST_GPU.model_copy(update={"driver": "2.0"})},
    "cuda": {"environment": TEST_GPU.model_copy(update={"cuda": "14.0"})},
}


@pytest.mark.parametrize("changed", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_row_holds_only_under_the_same_settings_and_card(build, changed):
    row = build.row(status=Status.OK, fingerprint=kept_of().fingerprint(build))
    assert kept_of(rows=[row]).rows([build]) == {id(build): row}
    assert kept_of(rows=[row], **changed).rows([build]) == {}


@pytest.mark.parametrize("error", [CompilerLost("it was killed"), CompileError("no such tile", log="")])
def test_what_was_not_compiled_holds_unless_its_compiler_was_killed(build, error):
    def cubins():
        raise error

    build.cubins = cubins
    row = compiled_row(build, SPEC).with_(fingerprint=kept_of().fingerprint(build))
    assert row.status == Status.COMPILE_ERROR
    held = {} if isinstance(error, CompilerLost) else {id(build): row}
    assert kept_of(rows=[row]).rows([build]) == held


def changed(build, **facts):
    other = copy.copy(build)
    vars(other).update(facts)
    return other


def in_rows_first(kernel):
    """The family as if its tensors had seqlen before heads."""
    other = copy.copy(kernel)
    other.order = "bshd"
    return other


def test_a_row_holds_only_for_the_same_code_launches_problem_and_protocol(build, constants):
    kept = kept_of()
    name, launch = next(iter(build.launches.items()))
    grid = replace(launch, grid=(1, 2, 3))
    others = [
        changed(build, keys=("other source",)),
        changed(build, launches={**build.launches, name: grid}),
        changed(build, problem=replace(PROBLEM, batch=PROBLEM.batch + 1)),
        changed(build, schedule=replace(build.schedule, eager=True)),
        changed(build, kernel=in_rows_first(build.kernel)),
    ]
    first = kept.fingerprint(build)
    found = {kept.fingerprint(other) for other in others}
    constants(sweep_kept, PROTOCOL=trial.PROTOCOL + 1)
    found |= {first, kept.fingerprint(build)}
    assert len(found) == len(others) + 2


def test_what_does_not_change_a_time_changes_no_fingerprint(build):
    now = TEST_GPU.model_copy(update={"date": "2027-01-01T00:00:00Z", "python": "3.14"})
    more = SimpleNamespace(**{**vars(measure(finalists=9)), "baselines": []})
    prints = {
        kept_of().fingerprint(build),
        kept_of(environment=now).fingerprint(build),
        kept_of(spec=more).fingerprint(build),
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("status", "time_us", "baseline", "whole"),
    [
        (Status.OK, ROUNDS, "same", True),
        (Status.OK, ONCE, "same", False),
        (Status.WRONG, None, "same", True),
        (Status.OK, ROUNDS, "none", False),
        (Status.OK, ROUNDS, "another", False),
        (None, None, "same", False),
    ],
    ids=["rounds", "no rounds", "all failed", "no baseline", "another baseline", "no row"],
)
def test_a_problem_is_whole_with_all_rows_the_baselines_and_rounds(build, status, time_us, baseline, whole):
    kept = kept_of()
    rows = [] if baseline == "none" else kept.baselines(PROBLEM)
    if baseline == "another":
        packages = TEST_GPU.model_copy(update={"packages": {"torch": "1.0"}})
        rows = kept_of(environment=packages).baselines(PROBLEM)
    if status is not None:
        fingerprint = kept.fingerprint(build)
        rows.append(build.row(status=status, time_us=time_us, fingerprint=fingerprint))
    assert kept_of(rows=rows).whole(PROBLEM, [build]) is whole


def test_rounds_whose_rows_were_not_all_stored_are_taken_again(build, tmp_path):
    """A run that is killed between two rows of its finals has some with rounds and some without."""
    compiler = FakeCompiler(arch_named("sm_90a"), tmp_path / "b")
    other = Build(discover(FAMILIES)["simple"], Config({"THREADS": 128}), PROBLEM, compiler)
    kept, builds = kept_of(), [build, other]
    bare = [b.row(status=Status.OK, time_us=ONCE, fingerprint=kept.fingerprint(b)) for b in builds]
    baselines = [row.with_(status=Status.OK) for row in kept.baselines(PROBLEM)]
    timed = together([row.with_(time_us=ROUNDS) for row in (*bare, *baselines)])
    later = ROUNDS.model_copy(update={"rounds": [7.0, 7.1]})
    again = together([row.with_(time_us=later) for row in (*bare, *baselines)])

    def whole(*rows):
        return kept_of(rows=rows).whole(PROBLEM, builds)

    assert whole(*timed)
    assert not whole(timed[0], bare[1], baselines[0])
    assert not whole(timed[0], timed[1], baselines[0])  # the baseline's is still that of before
    assert not whole(again[0], *timed[1:])  # killed while a later run's rows replaced these
    assert not whole(*again[:2], timed[2])
    assert whole(*again)
    assert kept_of(rows=[timed[0], bare[1], *timed[2:]]).whole(PROBLEM, [build]) is False
    assert whole(*(row.with_(conditions={}) for row in timed))  # recorded before rows said so


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"uuid": "a"}, {"uuid": "a"}, None),
        ({"uuid": "a"}, {"uuid": "b"}, f"another {TEST_GPU.gpu}"),
        ({"power_limit_w": 700.0}, {"power_limit_w": 350.0}, "700 W of power limit, then 350"),
        ({"sm_count": 132}, {"sm_count": 66}, "132 SMs, then 66"),
        ({"power_limit_w": None}, {"power_limit_w": 350.0}, None),
        ({"uuid": None}, {"uuid": "b"}, None),  # recorded before rows named their card
        ({"driver": "1.2"}, {}, f"{TEST_GPU.gpu}, driver 1.2, CUDA {TEST_GPU.cuda}"),
    ],
)
def test_rows_of_another_card_are_set_aside(before, now, found, tmp_path):
    with Store.open(tmp_path / "run") as store:
        store.describe("name: x\n", TEST_GPU.model_copy(update=before))
        store.append(numbered(0))
    today = TEST_GPU.model_copy(update=now)
    assert sweep_kept.measured_elsewhere(tmp_path / "run", today) == found


# ---- a run that several cards measured: what one has finished stays, what it has begun begins ----
@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "locks"))
    path = tmp_path / "test.yaml"

    def run(uuid, faults=(), times=TIMES, text=TWO, **options):
        path.write_text(text)
        gpu = FakeGpu(times, environment=TEST_GPU.model_copy(update={"uuid": uuid}))
        gpu.faults |= dict(faults)
        use(monkeypatch, gpu)
        notes = Notes()
        outcome = session.run(load_spec(path, discover), results=tmp_path, observer=notes, **options)
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


LONG = {"text": TWO.replace("[256, 512]", "[256, 262144]")}
LONG["times"] = {name: 1e5 * time for name, time in TIMES.items()}


@pytest.mark.parametrize(("how", "trials"), [({}, 3 + 3), (LONG, 3 + 3 + 2)], ids=["short", "long"])
def test_what_another_card_has_finished_is_not_measured_again(go, how, trials):
    """One candidate of a long problem was tried on a shorter problem alone."""
    outcome, gpu, _ = go("a", **how)
    assert len(gpu.names("trial")) == trials
    of_two_cards(outcome.run.directory)
    outcome, gpu, notes = go("a", **how)
    assert gpu.names("trial") == []
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a", "b"}
    assert outcome.run.environment.uuid is None
    assert not [note for note in notes if "set aside" in note]


@pytest.mark.parametrize(
    ("how", "threads", "trials", "label"),
    [({}, 128, 3, "(1,2,512,64) fp16 full"), (LONG, 64, 3 + 2, "(1,2,262144,64) fp16 full")],
    ids=["short", "long"],
)
def test_what_another_card_has_begun_begins_anew_here(go, how, threads, trials, label):
    directory = go("a", **how)[0].run.directory
    of_two_cards(directory, unfinished=[{"THREADS": threads}])
    outcome, gpu, notes = go("a", **how)
    assert len(gpu.names("trial")) == trials
    assert {t.machine["uuid"] for t in outcome.run.trials} == {"a"}
    [note] = [note for note in notes if "set aside" in note]
    assert label in note
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


LOST = CardLostError("no CUDA GPU found (cudaErrorNoDevice)")


def test_a_card_that_is_lost_keeps_its_rows_and_its_tables(go):
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

"""Sweeps of problems whose calls take long, with a stand-in for the GPU process."""

import io
import json

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import RIGHT, FakeGpu, label_of
from rich.console import Console
from sweeping import FAMILIES, Notes, by_config, use

from attnsweep.bench.gpu import WorkerError
from attnsweep.core.trial import Status
from attnsweep.reports import progress
from attnsweep.reports.terminal import ProgressForm

SPEC = f"""
kernel_dir: {FAMILIES}
problems:
  - {{batch: 1, heads: 32, seqlen: 131072, head_dim: 128, causal: true, dtype: bf16}}
kernels: {{simple: {{THREADS: [32, 64, 96, 128, 160, 192, 224, 256, 288, 320]}}}}
baselines: [torch_flash]
measure: {{rounds: 12}}
"""
LONG = "(1,32,131072,128) bf16 causal"
SHORT = "(1,32,16384,128) bf16 causal"
THREADS = [32 * n for n in range(1, 11)]
LONGER = 64

pytestmark = pytest.mark.usefixtures("gpu")


class TwoLengths(FakeGpu):
    """A card on which calls of the long problem take LONGER times as long, but for `longer`.

    longer: by THREADS. wrong: (problem, THREADS) of candidates that are wrong.
    """

    def __init__(self):
        super().__init__({f"THREADS={n}": 2800.0 + n for n in THREADS} | {"torch_flash": 2500.0})
        self.longer, self.wrong = {}, set()
        self.open_now = ""

    def time_us(self, name):
        times = 1 if self.open_now == SHORT else self.longer.get(name.rpartition("=")[2], LONGER)
        return times * super().time_us(name)

    def open(self, problem, **options):
        self.open_now = problem.label
        super().open(problem, **options)

    def trial(self, candidate):
        if (self.open_now, candidate.config.get("THREADS")) in self.wrong:
            self.calls.append(("trial", label_of(candidate)))
            raise WorkerError(Status.WRONG, "too far off", RIGHT)
        return super().trial(candidate)

    def tried_on(self, label):
        """THREADS of the candidates tried while a problem was open, in order."""
        open_now, found = "", []
        for method, name in self.calls:
            open_now = name if method == "open" else open_now
            if method == "trial" and open_now == label:
                found.append(int(name.partition("=")[2]))
        return found

    def measured(self):
        """Whether anything was opened, tried or timed."""
        return bool({method for method, _ in self.calls} - {"describe"})


@pytest.fixture
def gpu(monkeypatch):
    return use(monkeypatch, TwoLengths())


def ours(outcome):
    return {key[0]: row for key, row in by_config(outcome).items() if isinstance(key, tuple)}


def statuses(outcome):
    return {threads: row.status for threads, row in ours(outcome).items()}


def timed(outcome):
    return sorted(n for n, row in ours(outcome).items() if row.time_us and row.time_us.rounds)


def winner(outcome):
    """THREADS of the candidate whose code the run keeps."""
    (path,) = (outcome.run.directory / "cubins").glob("*.json")
    return json.loads(path.read_text())["config"]["THREADS"]


def chosen_among_all(outcome, gpu, entrants):
    """What every whole sweep of SPEC leaves, however often it was interrupted."""
    rows = ours(outcome)
    assert sorted(rows) == THREADS
    assert timed(outcome) == sorted(entrants)
    assert {n for n, row in rows.items() if row.status is Status.PRUNED} == {*THREADS} - {*entrants}
    gpu.calls.clear()
    return True


def test_the_candidates_are_tried_on_a_shorter_problem_and_the_best_on_the_long_one(go, gpu):
    outcome = go(SPEC)
    assert gpu.names("open") == [SHORT, LONG]
    assert sorted(gpu.tried_on(SHORT)) == THREADS
    assert sorted(gpu.tried_on(LONG)) == timed(outcome) == THREADS[:5]
    assert outcome.exit_code == 0
    assert winner(outcome) == 32
    assert {t.problem.label for t in outcome.run.trials} == {LONG}
    lines = (outcome.run.directory / "trials.jsonl").read_text()
    assert lines.count('"seqlen_q":16384') == 0 < lines.count('"seqlen_q":131072')


def test_each_other_candidate_is_a_row_that_says_how_it_did_on_the_shorter_one(go):
    outcome = go(SPEC)
    assert sorted(ours(outcome)) == THREADS
    row = ours(outcome)[320]
    assert row.status is Status.PRUNED
    assert row.detail == f"slower on {SHORT}: 3120 µs, where the best takes 2832"
    assert row.time_us is row.first_us is None
    assert row.resources.registers > 0


def test_fewer_candidates_are_tried_where_calls_take_longer(go, gpu):
    slow = SPEC.replace("seqlen: 131072", "seqlen: 262144")
    outcome = go(slow)
    assert timed(outcome) == [32, 64]
    gpu.times = {name: time / 1.6 for name, time in gpu.times.items()}
    assert timed(go(f"name: faster\n{slow}")) == [32, 64, 96, 128]


@pytest.mark.parametrize("finalists", [1, 3])
def test_no_more_are_tried_than_are_finalists_so_that_no_long_calls_race(go, gpu, finalists):
    outcome = go(SPEC.replace("rounds: 12", f"rounds: 12, finalists: {finalists}"))
    assert len(gpu.tried_on(LONG)) == finalists
    assert winner(outcome) == 32
    raced = [method for method, _ in gpu.calls[gpu.calls.index(("open", LONG)) :]]
    assert "race" not in raced
    assert "race" in [method for method, _ in gpu.calls]


@pytest.mark.parametrize(
    ("where", "detail", "others"), [(SHORT, f"on {SHORT}: too far off", 5), (LONG, "too far off", 4)]
)
def test_a_candidate_that_is_wrong_on_either_problem_is_wrong(go, gpu, where, detail, others):
    gpu.wrong = {(where, 32)}
    outcome = go(SPEC)
    row = ours(outcome)[32]
    assert (row.status, row.detail, row.time_us) == (Status.WRONG, detail, None)
    assert timed(outcome) == THREADS[1 : 1 + others]
    assert winner(outcome) == 64
    gpu.calls.clear()
    assert ours(go(SPEC))[32].status is Status.WRONG
    assert not gpu.measured()


def test_the_long_problem_decides_which_entrant_wins(go, gpu):
    """The best on the shorter problem is the slowest there."""
    gpu.longer = {"32": 2 * LONGER, "128": LONGER / 2}
    outcome = go(SPEC)
    assert winner(outcome) == 128
    slowest = ours(outcome)[32].time_us
    assert slowest.rounds == [2832.0 * 2 * LONGER]  # more than 1.5 times as slow: one round


def test_the_same_command_again_measures_nothing_unless_it_is_fresh(go, gpu):
    first = go(SPEC)
    before = (first.run.directory / "trials.jsonl").read_bytes()
    gpu.calls.clear()
    again = go(SPEC)
    assert not gpu.measured()
    assert (again.run.directory / "trials.jsonl").read_bytes() == before
    assert statuses(again) == statuses(first)
    go(SPEC, fresh=True)
    assert gpu.names("open") == [SHORT, LONG]
    assert len(gpu.tried_on(SHORT)) == 10


@pytest.mark.parametrize(
    "changed",
    [
        SPEC.replace("rounds: 12", "rounds: 11"),
        SPEC.replace("[torch_flash]", "[torch_flash, unfused]"),
        SPEC.replace("{simple:", "{ladder_2_tiles: {BLOCK_M: [64]}, simple:"),
        SPEC.replace("THREADS: [32, ", "THREADS: ["),
    ],
    ids=["rounds", "a baseline", "a family", "without the winner"],
)
def test_what_changes_a_row_or_adds_to_them_is_measured(go, gpu, changed):
    gpu.times["BLOCK_M=64"] = 2800.0
    go(SPEC)
    gpu.calls.clear()
    go(changed)
    assert gpu.names("open") == [SHORT, LONG]


def test_another_code_of_a_candidate_that_was_left_out_is_tried(go, gpu):
    go(SPEC)
    FakeCompiler.edited = {"THREADS": "320"}
    gpu.calls.clear()
    gpu.times["THREADS=320"] = 2700.0
    assert 320 in timed(go(SPEC))


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_a_run_interrupted_while_it_chooses_goes_on(go, gpu, after):
    gpu.faults["trial", f"THREADS={THREADS[after]}"] = KeyboardInterrupt()
    assert go(SPEC).interrupted
    assert gpu.names("open") == [SHORT]
    gpu.faults.clear()
    assert chosen_among_all(go(SPEC), gpu, THREADS[:5])
    go(SPEC)
    assert not gpu.measured()


@pytest.mark.parametrize("where", ["open", "trial", "add", "replay", "confirm"])
def test_a_run_interrupted_on_the_long_problem_goes_on(go, gpu, where):
    """Also if the shorter problem's times are others by then, so that others are chosen."""
    heard = gpu.heard

    def interrupted(method, name=""):
        heard(method, name)
        if method == where and LONG in gpu.names("open"):
            raise KeyboardInterrupt

    gpu.heard = interrupted
    assert go(SPEC).interrupted
    gpu.heard = heard
    gpu.calls.clear()
    gpu.times |= {f"THREADS={n}": 4000.0 - n for n in THREADS}
    assert chosen_among_all(go(SPEC), gpu, THREADS[5:])
    go(SPEC)
    assert not gpu.measured()


def test_what_an_interrupted_run_tried_on_the_long_problem_is_not_tried_again(go, gpu):
    gpu.wrong = {(LONG, 32)}
    gpu.faults["add_baseline", "torch_flash"] = KeyboardInterrupt()
    assert go(SPEC).interrupted
    gpu.faults.clear()
    gpu.calls.clear()
    outcome = go(SPEC)
    assert gpu.tried_on(LONG) == []
    assert statuses(outcome)[32] is Status.WRONG
    assert timed(outcome) == THREADS[1:5]


def test_without_the_shorter_problem_all_are_tried_on_the_long_one(go, gpu):
    gpu.faults["open", SHORT] = WorkerError(Status.LAUNCH_ERROR, "out of memory")
    notes = Notes()
    outcome = go(SPEC, observer=notes)
    assert gpu.names("open") == [SHORT, LONG]
    assert sorted(gpu.tried_on(LONG)) == THREADS
    assert set(statuses(outcome).values()) == {Status.OK}
    assert winner(outcome) == 32
    assert f"{SHORT} cannot be opened: out of memory" in notes.texts
    gpu.calls.clear()
    go(SPEC)
    assert not gpu.measured()


def test_time_that_is_up_after_the_shorter_problem_leaves_the_entrants(go, gpu, clock):
    """A budget is for the search, which is on the shorter problem."""
    clock.trial_s = 0.7
    outcome = go(SPEC + "search: {strategy: random, budget_s: 4}\n")
    assert len(gpu.tried_on(SHORT)) == 6
    assert len(timed(outcome)) == len(gpu.tried_on(LONG)) == 5
    assert len(ours(outcome)) == 6


def test_the_search_of_a_long_problem_has_seven_seconds_at_most(go, gpu, clock):
    clock.trial_s = 1.6
    go(SPEC)
    assert len(gpu.tried_on(SHORT)) == 5


def test_a_long_problem_that_fails_to_open_leaves_a_row_of_each_entrant(go, gpu):
    gpu.faults["open", LONG] = WorkerError(Status.LAUNCH_ERROR, "out of memory")
    outcome = go(SPEC)
    assert outcome.exit_code == 1
    failed = {n for n, status in statuses(outcome).items() if status is Status.LAUNCH_ERROR}
    assert failed == {*THREADS[:5]}
    assert sorted(ours(outcome)) == THREADS


def test_the_finals_of_long_calls_take_one_kind_in_as_many_rounds_as_are_affordable(go, gpu):
    gpu.chaining = {f"simple THREADS={n}" for n in THREADS}
    gpu.longer = {"160": 2 * LONGER}
    rows = ours(go(SPEC))
    assert {len(rows[n].time_us.rounds) for n in THREADS[:4]} == {6}
    assert len(rows[160].time_us.rounds) == 1
    assert gpu.names("replay").count("simple THREADS=32") == 6  # no warm-up, no other kind
    assert gpu.names("eager_us") == []
    assert (rows[32].cold_us, rows[32].eager_us, rows[32].chained_us) == (None, None, None)
    assert rows[32].warm_us == rows[32].time_us.median


@pytest.mark.usefixtures("every_step")
def test_progress_counts_no_candidate_twice(go):
    out = io.StringIO()
    with progress.watch(Console(file=out), ProgressForm.JSON) as observer:
        go(SPEC, observer=observer)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [e["event"] for e in events].count("problem") == 1
    began = [(e["problem"], e["candidates"]) for e in events if e["event"] == "trying_on"]
    assert began == [(SHORT, 10), (LONG, 5)]
    told = [(e.get("on"), e["done"], e["total"]) for e in events if e.get("phase") == "search"]
    assert max(done for on, done, _ in told if on == SHORT) == 10
    assert max(done for on, done, _ in told if on is None) == 5
    assert [each for each in told if each[1] > each[2]] == []
    assert {on for on, _, _ in told} == {SHORT, None}

"""The arithmetic of benchmarks/, on made-up figures: no GPU is needed to be wrong about it."""

import importlib
import json
import math
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu
from proportions import proportion_interval
from samples import H200, candidate, rounds_of
from sweeping import use

from attnsweep.bench.gpu import WorkerError
from attnsweep.compile.launches import Candidate
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Measurement, Status
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family, Launch, Param
from attnsweep.family.space import Space

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def module():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "benchmarks"))


def recorded(file):
    return json.loads((ROOT / "results" / file).read_text())


def page_of(name):
    return " ".join((ROOT / "docs" / name).read_text().split())


def process(winner, ties, **times_us):
    return {
        "winner": winner,
        "ties": ties,
        "times_us": times_us,
        "candidates": 120,
        "launches": 10,
        "launches_of_100_ms": 100,
    }


def test_stability_counts_winners_ties_and_regret(module):
    stability = module("stability")
    runs = [process("a", ["a", "b"], a=10.0, b=10.01, c=20.0)] * 19
    runs += [process("c", ["c"], a=10.0, b=10.01, c=10.02)]
    rounds = {"a": [10.01, 20.02] * 9, "b": [10.0, 20.0] * 9, "c": [10.1, 20.2] * 9}
    found = stability.verdict(runs, [rounds] * 3)
    assert (found["same_winner"], found["processes"]) == (19, 20)
    assert found["oracle_best"] == "b"
    assert found["ties_hold_oracle_best"] == 19
    assert found["regret_percent"] == [0.1] * 19 + [1.0]
    assert found["largest_regret_percent"] == 1.0
    assert found["race_launch_share"] == 0.1
    assert stability.near(runs[:1]) == {"a", "b"}
    assert stability.near(runs) == {"a", "b", "c"}


def recorded_toy(search, spec=""):
    """A space of 50 with one candidate within 1 % of the best, and one whose first time lies."""
    kernel = Family("toy", summary="", params=(Param("A", tuple(range(50)), ""),))
    kernel.stage("fwd")(lambda *_: Launch("toy", (1, 1, 1), 32, ()))
    space = Space.build(kernel, Problem(1, 2, 2, 64, 64, 64), ARCHS["sm_90a"])
    rows = {}
    for config in space.configs:
        us = 10.0 + config.A
        time = Measurement(median=us, low=us, high=us, samples=4, rounds=[us] * 4)
        row = candidate("toy", us, A=config.A).with_(first_us=2 * us, time_us=time)
        rows[config] = row
    liar = space.configs[40]  # its first time is the least, and it was in no round
    rows[liar] = rows[liar].with_(first_us=1.0, time_us=rows[liar].time_us.model_copy(update={"rounds": []}))
    return search.Recorded("card/run", space, rows)


def test_a_replay_counts_trials_until_the_rounds_were_within_1_percent(module):
    search = module("search")
    toy = recorded_toy(search)
    configs = toy.space.configs
    finals = toy.finals
    assert configs[40] not in finals
    assert search.first_good([configs[40], configs[3], configs[0], configs[1]], finals) == 3
    assert search.first_good(configs[1:], finals) == math.inf
    found = search.figures([configs[::-1], configs, configs[1:]], finals)
    assert found["median_trials_to_1_percent"] == 50
    assert found["worst_trials_to_1_percent"] is None
    assert found["worst_regret_percent"] == 10.0
    assert toy.times()[configs[40]] == 0.5  # first times are twice as long as the rounds'
    assert search.curve([configs[5:9]], finals)[:5] == [1.5, 1.5, 1.5, 1.5, 1.5]


def test_every_space_of_the_picture_was_replayed(module):
    search = module("search")
    rows = recorded("search_replay.json")["spaces"]
    assert {(row["run"], row["problem"]) for row in rows if "curve" in row} == set(search.CURVES)


@pytest.mark.parametrize("name", ["gp", "gp, other shapes", "gp, no history"])
def test_a_replay_never_uses_the_problem_that_it_searches(module, name):
    search = module("search")
    kernel = discover()["flash_fwd_wgmma"]
    problem = Problem(1, 8, 8, 512, 512, 64)
    space = Space(kernel, problem, (), 0, {})
    labels = {history.problem.label for history in search.history_of(space, name)}
    assert problem.label not in labels
    assert ("(1,8,512,64) fp16 causal" in labels) == (name == "gp")
    assert bool(labels) == (name != "gp, no history")


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    [  # as tables have them
        (0, 10, 0.0, 0.3085),
        (10, 10, 0.6915, 1.0),
        (5, 10, 0.1871, 0.8129),
        (1, 100, 0.00025, 0.0545),
        (26, 27, 0.8103, 0.9991),
        (0, 0, 0.0, 1.0),
    ],
)
def test_bounds_of_a_proportion(count, trials, low, high):
    found = proportion_interval(count, trials)
    assert found == pytest.approx((low, high), abs=1e-4)


def test_the_docs_say_of_recorded_sessions_what_was_counted():
    found = recorded("check_sessions.json")
    text = page_of("measuring.md")
    same, verdicts = found["verdicts"]["0 %"], found["verdicts"]
    assert f"Among {found['pairs']} pairs of recordings" in text
    assert f"half moved by less than {found['moved_median_percent']:g} %" in text
    assert f"{found['below_1.5_percent']} by less than 1.5 %" in text
    assert f"(standard deviation {found['rms_of_those_percent']:g} %)" in text
    assert sum(same.values()) == found["pairs"]
    counts = f"{same['pass']} of those {found['pairs']} pairs pass"
    assert f"{counts}, {same['inconclusive']} are inconclusive, {same['regression']} a regression" in text
    assert f"3 % slower {verdicts['3 %'].get('pass', 0)} pass" in text
    assert f"5 % {verdicts['5 %']['regression']} are regressions, with 8 %" in text
    assert f"with 8 % {verdicts['8 %']['regression']}." in text


# -- refusals.py ------------------------------------------------------------------------------


def test_a_refused_right_candidate_is_counted_with_its_inputs(module):
    refusals = module("refusals")
    gpu = FakeGpu({"A=1": 5.0, "A=2": 6.0})
    gpu.faults["trial", "A=2"] = WorkerError(Status.WRONG, "relative error 1 over the limit 0.5")

    def build(number):
        candidate = Candidate("k", {"A": number}, None, (), 0)
        return SimpleNamespace(
            kernel=SimpleNamespace(name="k"), config=Config({"A": number}), candidate=lambda: candidate
        )

    two = [build(1), build(2)]
    found = refusals.count(24, seed=3, card=gpu, made=lambda spec, **how: two)
    assert found["trials"] == 24
    assert [each["candidate"] for each in found["refused"]] == ["k A=2"] * 12
    assert len({each["seed"] for each in found["refused"]}) == 12
    assert found["refused_bounds"] == pytest.approx((0.291, 0.709), abs=1e-3)


# ---- the benchmark of the gate with a stand-in for the GPU: it counts what happened ----
TIME_US = 40.0


class Card(FakeGpu):
    """A card on which every call takes TIME_US, and what it is told to wait for.

    fixed_us: what a launch that waits takes more, however short it waits. noise: of a time, one
    sigma. offset: of the ratio of new to old, one sigma of what a process adds.
    """

    noise, offset, fixed_us = 0.002, 0.0, 0.0
    started = 0

    def __init__(self, timeout_s):
        super().__init__(environment=H200)
        self._random, self._sides = random.Random(self.started), {}
        self._own = {}
        type(self).started += 1

    def open(self, problem, *, replay_us, seed):
        self._sides = {}
        self._own = {"new": 1 + self._random.gauss(0, self.offset)}

    def forget(self, name):
        self._sides.pop(name, None)

    def add(self, name, candidate, *, cold):
        self._sides[name] = candidate.timed

    def sample(self, name, kind):
        waits = [s.launch.args[0] for s in self._sides[name].stages if s.name == "burn"]
        time_us = TIME_US + sum(waits) / H200.clock_hz * 1e6 + self.fixed_us * any(waits)
        return time_us * self._random.gauss(1, self.noise) * self._own.get(name, 1.0)


@pytest.fixture
def benchmark(module):
    def run(comparisons):
        ladder = [ROOT / "results" / "h200" / "ladder"]
        return module("gate").count(H200, ladder, comparisons, math.inf, run.card, FakeCompiler)

    run.card = type("Own", (Card,), {})  # of this test
    return run


def test_it_counts_comparisons_and_detections(benchmark):
    benchmark.card.fixed_us = 0.3  # what calibration must take off
    benchmark.card.noise = 0.0005  # calibration by the median of 60 is then 0.01 % off
    found = benchmark(6)
    assert found["processes"] >= 12
    itself = found["itself"]
    assert (itself["comparisons"], itself["false_alarms"]) == (12, 0)
    assert [row["verdicts"] for row in itself["cases"]] == [{"pass": 6}] * 2
    assert itself["false_alarms_bounds"] == pytest.approx([0, 0.2646], abs=1e-4)
    for row in found["slowed"]["cases"]:
        assert row["ratio"] - 1 == pytest.approx(row["share"], abs=0.0015)
        assert row["verdicts"] == {"regression": row["comparisons"]} == {"regression": 6}
    assert set(found["slowed"]["totals"]) == {"2 %", "5 %"}
    for of in found["slowed"]["totals"].values():
        assert of["detected"] == of["comparisons"] == 12
        assert of["passed"]["count"] == 0
        assert of["passed"]["bounds"][1] < 0.5


def test_every_process_serves_one_comparison_of_a_series(benchmark):
    """So that comparisons are independent: each has processes of its own."""
    benchmark.card.offset = 0.02  # comparisons need more than two processes
    found = benchmark(10)
    rows = [*found["itself"]["cases"], *found["slowed"]["cases"]]
    assert not [row for row in rows if row["failed"]]
    turns = list(zip(*(row["processes"] for row in rows), strict=True))
    assert len(turns) == 10
    assert found["processes"] == sum(map(max, turns)) > 20


def test_a_kernel_that_fails_is_named_and_the_others_go_on(benchmark, module):
    def fails(self, first, second):
        if len(self._sides["new"].stages) > 1 and self.started > module("gate").CORRECTIONS:
            raise WorkerError(Status.LAUNCH_ERROR, "illegal address")
        return FakeGpu.pair(self, first, second)

    benchmark.card.pair = fails
    found = benchmark(4)
    assert found["itself"]["comparisons"] == 8
    assert all(row["failed"] == ["illegal address"] * 4 for row in found["slowed"]["cases"])
    assert found["slowed"]["totals"]["2 %"]["comparisons"] == 0


# ---- benchmarks/sanitize.py reads what compute-sanitizer says, without a GPU ----
CLEAN = "checked 1\nchecked 2\n========= ERROR SUMMARY: 0 errors\n"


def test_a_tool_is_clean_only_if_every_case_is(module):
    done = [module("sanitize").Done(CLEAN, 0)] * 2
    found = module("sanitize").row("memcheck", done)
    assert (found["clean"], found["finished"], found["errors"]) == (True, True, 0)
    assert (found["cases"], found["output"]) == (4, None)
    assert found["summary"] == ["ERROR SUMMARY: 0 errors"]


@pytest.mark.parametrize(
    ("output", "code", "errors", "finished"),
    [
        (CLEAN.replace("0 errors", "3 errors"), 9, 3, True),
        (CLEAN, 9, 0, True),  # it says nothing is wrong, and fails
        ("checked 1\n", None, 0, False),  # out of time
        ("", None, 0, False),  # never started
        ("checked 1\nkilled", -9, 0, True),
        ("========= ERROR SUMMARY: 0 errors\n", 0, 0, True),  # nothing was launched
        ("checked 1\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 9, 2, True),
    ],
)
def test_one_case_that_is_not_clean_is_enough(module, output, code, errors, finished):
    sanitize = module("sanitize")
    found = sanitize.row("racecheck", [sanitize.Done(CLEAN, 0), sanitize.Done(output, code)])
    assert (found["clean"], found["finished"], found["errors"]) == (False, finished, errors)
    assert found["output"] == output


# ---- the sweep's race, finals and ranking on recorded rounds: the best is kept, regret is small
# ----
RUNS = 24


@pytest.fixture(scope="module")
def selection(module):
    return module("selection")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ("flash_training", "(1,16,16384,128) fp16 causal"),  # held 72 % of the time before
        ("flash_training", "(4,16,4096,128) fp16 full"),  # 52 %
        ("flash_long", "(1,16,32768,64) fp16 full"),  # calls of 7.5 ms, 2.5 % apart
    ],
)
def test_the_best_is_in_the_tie_set_and_the_winner_costs_little(selection, run, problem):
    """First times are 5 % off; of 24 sweeps 95 % may lose the best once."""
    (of,) = selection.gather([selection.setting.recorded(run)], problem)
    told = selection.judge(of, RUNS)
    assert told["held"] >= RUNS - 1
    assert told["regret_95_percent"] <= 0.5
    assert told["race_s"] + told["finals_s"] < 60


def test_residuals_are_what_is_left_of_the_entry_and_of_the_round(selection):
    pace = [1.0, 1.3, 1.0, 1.1, 1.2, 1.0]

    def timed(us, off):
        rounds = [us * slow * math.exp(each) for slow, each in zip(pace, off, strict=True)]
        return candidate("k", 1.0, A=us).with_(time_us=rounds_of(us).model_copy(update={"rounds": rounds}))

    rows = [timed(10.0 + n, [0.0] * 6) for n in range(3)]
    assert selection.residuals_of(rows) == pytest.approx([0] * 18, abs=1e-12)
    noisy = timed(13.0, [0.02, -0.02] * 3)
    assert max(selection.residuals_of([*rows, noisy])) > 0.01


def test_true_times_are_those_of_the_finals_then_of_the_race(selection):
    first = Measurement(median=9.0, low=9.0, high=9.0, samples=1)
    rows = [
        candidate("k", 10.0, A=0).with_(first_us=9.0),
        candidate("k", 11.0, A=1).with_(first_us=9.9),
        candidate("k", 1.0, A=2).with_(time_us=first, first_us=9.0, race={"against": "k A=0", "ratio": [1.1, 1.21]}),
        candidate("k", 1.0, A=3).with_(time_us=first, first_us=18.0),
    ]
    levels = selection.levels_of(rows)
    assert levels == pytest.approx({"k A=0": 10.0, "k A=1": 11.0, "k A=2": 10 * math.sqrt(1.331), "k A=3": 20.0})


RECORDED = recorded("h200/selection.json")
# Rounds of the first are 4 % apart, so that a sweep may keep the second best, 1.1 % slower; in 2 of
# 100 sweeps of the second one is kept that is 0.5 % slower.
MISSED = [
    "h100-80gb-hbm3/between_short (4,24,350,128) fp16 causal",
    "h100-80gb-hbm3/head_dims (2,16,4096,160) bf16 full",
]


def test_every_problem_of_every_recorded_run_was_simulated(selection):
    """Those of two candidates apart, of which the sweep has nothing to choose by a race."""
    runs = [path.parent for path in ROOT.glob("results/*/*/trials.jsonl.xz")]
    of_calls = [run for run in runs if "call: " in (run / "spec.yaml").read_text()]
    assert {run.name for run in of_calls} == {"triton_kernels", "factories", "factories_rows"}
    names = {"/".join(run.parts[-2:]) for run in runs if run not in of_calls}
    assert {each["run"] for each in RECORDED["of"]} == names
    assert len(RECORDED["of"]) == RECORDED["problems"]
    missed = [f"{each['run']} {each['problem']}" for each in RECORDED["of"] if not each["reached"]]
    assert missed == MISSED
    assert RECORDED["reached"] == RECORDED["problems"] - len(missed)
    for name in ("h100-80gb-hbm3/flash_dims", "h200/flash_dims_h200"):  # one, and one of two
        there = selection.gather([ROOT / "results" / name])
        best = {each.problem.label: round(each.best_us, 3) for each in there}
        assert best == {e["problem"]: e["best_us"] for e in RECORDED["of"] if e["run"] == name}


def test_the_docs_say_what_was_simulated():
    text = page_of("measuring.md")
    of = RECORDED["of"]
    usual, worst = (max(each[name] for each in of) for name in ("regret_95_percent", "largest_regret_percent"))
    held = min(each["held"] for each in of)
    assert RECORDED["first_noise"] == 0.05
    assert f"By simulation on {len(of)} recorded problems" in text
    assert f"first times 5 % off, {RECORDED['runs']} sweeps each" in text
    assert f"at most {usual:.2f} % slower than the true best in 95 of 100 sweeps" in text
    assert f"{worst:.1f} % in the worst of all, and the tie set holds the best in at least {held}" in text


# ---- benchmarks/judged.py: what is right, attacks, and both ways, on a card that is none ----
CONFIG = "BLOCK_M=64 BLOCK_N=64 NUM_WARPS=4 KEY_GROUPS=1 NUM_STAGES=2 SWIZZLE=1 Q_IN_REGISTERS=1 BLOCK_ORDER=0"


@pytest.fixture
def judging(monkeypatch):
    """Has a card judge on which some callables are wrong."""
    monkeypatch.setenv("PYTHONPATH", "")

    def on(calls, faults=()):
        card = FakeGpu(dict.fromkeys([CONFIG, *calls], 200.0) | {"torch_flash": 300.0}, environment=H200)
        card.faults |= dict(faults)
        use(monkeypatch, card)

    return on


def test_right_callables_are_counted_with_the_reasons_of_those_that_are_refused(judging, module, tmp_path):
    asked = module("right_callables").names(tmp_path)
    missing = WorkerError(Status.SKIPPED, f"{asked['flash_3']} raised ModuleNotFoundError: x")
    wrong = WorkerError(Status.WRONG, "a row is off")
    judging(asked.values(), {("replay", asked["naive"]): wrong, ("add_baseline", asked["flash_3"]): missing})
    module("judged").right(file := tmp_path / "right.json", tmp_path, 2)
    found = json.loads(file.read_text())
    assert len(asked) == 10
    assert (found["runs"], found["all"]) == (2, {"ok": 8 * 6 * 2, "wrong": 6 * 2, "skipped": 6 * 2})
    cases = {(case["callable"], case["problem"]): case["not_right"] for case in found["cases"]}
    assert len(cases) == 10 * 6
    assert {(name, *each) for (name, _), each in cases.items() if each} == {
        ("naive", *["while timing: a row is off"] * 2),
        ("flash_3", *["flash_3 raised ModuleNotFoundError: x"] * 2),
    }


def test_the_strict_judge_is_compared_with_the_other(judging, module, tmp_path):
    call = module("right_callables").names(tmp_path)["flash"]
    judging([call])
    case, *others = module("judged").strict(call)
    assert (case["problem"], len(others)) == ("(2,16,1024,64) bf16 full", 9)
    assert case["friendly"]["x_base"] == case["strict"]["x_base"] == pytest.approx(1.5)
    assert case["friendly"]["trusted_us"] is None
    assert case["strict"]["trusted_us"] == pytest.approx(1.01 * case["strict"]["time_us"])


@pytest.mark.parametrize("passes", [(), ("zeros",)])
def test_an_attack_that_passes_is_named(passes, judging, module, constants, tmp_path):
    program, file = module("judged"), tmp_path / "attacks.json"
    calls = {name: f"attacks.kernels:{name}" for name in (*program.RIGHT, *program.ATTACKS)}
    wrong = WorkerError(Status.WRONG, "a row is off")
    judging(calls.values(), {("replay", calls[n]): wrong for n in program.ATTACKS if n not in passes})
    constants(sys, path=[*sys.path])
    with pytest.raises(SystemExit, match="zeros") if passes else nullcontext():
        program.attacks(file, tmp_path)
    found = json.loads(file.read_text())
    assert found["judged wrongly"] == [*passes]
    assert {row["callable"] for row in found["rows"] if row["confirmed"]} == {*program.RIGHT, *passes}
    assert len(found["rows"]) == len(calls)


# ---- benchmarks/calls_reach.py: figures of made-up times, and what a call does in its seconds ----


@pytest.fixture
def reach(module):
    return module("calls_reach")


def test_two_sweeps_agree_if_either_could_have_had_the_others_winner(reach):
    a, b, c = (reach.whole({"BLOCK_M": block}) for block in (32, 64, 128))

    def swept(winner, **ties):
        return {"winner": winner, "ties": {{"a": a, "b": b, "c": c}[name]: us for name, us in ties.items()}}

    found = reach.pairs([swept(a, a=10.0, b=10.05), swept(b, a=10.0, b=10.0), swept(b, b=10.0), swept(c, c=9.0, b=9.1)])
    assert (found["pairs"], found["same"], found["same_or_tied"]) == (3, 1, 2)
    assert found["span_percent"] == 1.111
    row = reach.summary_of("twice", [found])
    assert (row["pairs"], row["disagreed"]) == (3, 1)
    assert row["reached"] == {"disagreed": False, "worst_span_percent": False}


def test_a_regret_is_over_the_oracles_best_whatever_rounds_have_in_common(reach):
    slow = [1.0, 2.0] * 9
    level = reach.levels({"a": [10.1 * s for s in slow], "b": [10.0 * s for s in slow], "c": [12.0 * s for s in slow]})
    assert level["b"] == 1
    assert level["a"] == pytest.approx(1.01)
    assert reach.near({"a": 10.0, "b": 10.5, "c": 10.51}) == {"a", "b"}
    rows = [
        {"regret_percent": 0.0, "autotune_regret_percent": 3.0},
        {"regret_percent": 0.1, "autotune_regret_percent": 1.0},
        {"regret_percent": 1.1, "autotune_regret_percent": 0.0},
    ]
    found = reach.summary_of("regret", rows)
    assert (found["median_regret_percent"], found["worst_autotune_regret_percent"]) == (0.1, 3.0)
    assert found["reached"] == {"median_regret_percent": True, "worst_regret_percent": False}


@pytest.mark.parametrize(
    ("part", "rows", "reached"),
    [
        ("cold", [(9.0, 10.0), (10.1, 10.0)], {"worst_ratio": False}),
        ("warm", [(9.0, 3.0), (1.0, 10.0)], {"worst_ratio": True}),
        ("widened", [1.0, 1.05], {"mean_ratio": True, "worst_ratio": True}),
        ("widened", [0.999, 1.3], {"mean_ratio": True, "worst_ratio": False}),
        ("template", [1.004, 0.996], {"most_off_percent": True}),
        ("template", [1.0, 0.994], {"most_off_percent": False}),
    ],
)
def test_what_was_measured_is_held_against_what_was_asked(part, rows, reached, reach):
    made = [{"ours_s": r[0], "autotune_s": r[1]} if isinstance(r, tuple) else {"ratio": r} for r in rows]
    found = reach.summary_of(part, made)
    assert found["reached"] == reached
    assert (found["cases"], found["of"]) == (2, len(reach.PARTS[part].cases))
    assert reach.summary_of(part, []) == {}


def test_20_shapes_of_three_kernels_are_asked_for(reach):
    assert len({case.label for case in reach.CASES}) == 20
    assert len(reach.CALLS) == 3
    assert 3 * len(reach.CASES) == (reach.SWEEPS - 1) * 20 == 60


def test_a_call_goes_on_where_the_last_one_stopped(reach, constants, tmp_path):
    part, begun = reach.PARTS["regret"], []

    def row(asked):
        begun.append(asked.case.label)
        if asked.case is reach.CASES[0] and len(begun) == 1:
            raise RuntimeError("a card that was lost")
        return {"regret_percent": 0.0, "autotune_regret_percent": 0.0}

    constants(reach, PARTS={"regret": reach.Part(row, part.summary, part.must, reach.CASES[:3])})
    environment, file = H200, tmp_path / "regret.json"

    def rows(end=math.inf, only="", name="regret.json"):
        kept = reach.Kept("regret", tmp_path / name, environment)
        reach.measure([kept], None, end, only)
        return [row["case"] for row in json.loads((tmp_path / name).read_text())["rows"]]

    first, second, last = (case.label for case in reach.CASES[:3])
    file.write_text(json.dumps({"rows": [{"case": second, "regret_percent": 0.0, "autotune_regret_percent": 0.0}]}))
    assert rows() == [second, last]
    assert rows() == [second, last, first]
    assert begun == [first, last, first]
    assert rows(end=0.0) == [second, last, first]
    assert rows(only="64x8192", name="new.json") == [last]


def test_the_parts_of_a_case_share_its_processes(reach, monkeypatch):
    said, caches = [], {"CACHE": "empty"}

    class Place:
        sweeps = 3

        def caches(self):
            return caches

        def sweep(self, text, **variables):
            said.append(("sweep", variables))
            return SimpleNamespace(trials=[1] * 4), 10.0 - len(said)

        def autotune(self, case, **variables):
            said.append(("autotune", variables))
            return {"times_ms": [1] * 5}, 10.0 - len(said)

    asked = reach.Asked(Place(), reach.CASES[0])
    cold, warm = reach.answers(asked, 0), reach.answers(asked, 1)
    assert (cold["ours_s"], cold["autotune_s"], warm["ours_s"], warm["autotune_s"]) == (9.0, 8.0, 7.0, 6.0)
    monkeypatch.setattr(reach, "facts", lambda run: run)
    monkeypatch.setattr(reach, "pairs", len)
    assert reach.twice(asked) == 3
    assert said == [(name, caches) for name in ("sweep", "autotune", "sweep", "autotune", "sweep")]
    later = reach.Asked(Place(), reach.CASES[0])
    said.clear()
    assert reach.answers(later, 1)["ours_s"] == 7.0  # also where nobody asked for the first
    assert [name for name, _ in said] == ["sweep", "autotune"] * 2


def test_options_say_which_parts_there_are(reach, monkeypatch, capsys):
    for words, said in (
        (["hot"], "no part hot: one of cold, warm"),
        (["cold"], "--out is missing"),
        (["cold", "--plan", "--only", "mine"], "no case of cold holds 'mine': there are attend.py:attention"),
    ):
        monkeypatch.setattr(sys, "argv", ["calls_reach.py", *words])
        with pytest.raises(SystemExit):
            reach.main()
        assert said in capsys.readouterr().err


def test_a_call_launches_a_templates_machine_code_as_the_template_does(reach, monkeypatch):
    launched = []

    class Kernel:
        max_dynamic_shared_size_bytes = 48 << 10

        def __call__(self, *args, **how):
            launched.append((self.max_dynamic_shared_size_bytes, *args, how))

    def raw(path):
        return SimpleNamespace(get_function=lambda name: launched.append((path, name)) or Kernel())

    numbers = {name: lambda value, name=name: (name, value) for name in ("uint64", "int32", "float32")}
    on = SimpleNamespace(ExternalStream=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=raw, cuda=on, **numbers))
    stream = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=stream))
    how = {"grid": (2, 3, 1), "threads": 128, "smem_bytes": 65536, "args": ("q", "o", 5, 0.5)}
    exec(reach.LAUNCHED.format(cubin="a.cubin", function="fwd", **how), found := {})
    q, k, v, out = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (1, 2, 3, 4))
    found["attention"](q, k, v, problem=None, out=out)
    args = (("uint64", 1), ("uint64", 4), ("int32", 5), ("float32", 0.5))
    assert launched == [("a.cubin", "fwd"), (65536, (2, 3, 1), (128, 1, 1), args, {"shared_mem": 65536})]

"""The loop with a stand-in for the GPU process: rows, resume, faults, Ctrl-C, exit codes."""

import copy
import json
import math
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from fake_compiler import FakeCompiler
from samples import TEST_GPU
from sweeping import FAMILIES, SPEC, Notes, by_config

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose.ranking import rank
from attnsweep.compile.candidate import Build
from attnsweep.core.errors import KernelError, NoGpuError, SpaceError
from attnsweep.core.files import read_code
from attnsweep.core.hardware import arch_on
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status
from attnsweep.family import time_limit
from attnsweep.family.discover import discover
from attnsweep.store import code as kept_code
from attnsweep.store.run import pack, read_trials
from attnsweep.sweep import session

pytestmark = pytest.mark.usefixtures("gpu")


def test_every_candidate_and_baseline_is_a_row(go, tmp_path):
    outcome = go()
    rows = by_config(outcome)
    assert outcome.exit_code == 0
    assert {key: row.status for key, row in rows.items()} == {
        (32,): Status.OK,
        (64,): Status.OK,
        (128,): Status.OK,
        "torch_flash": Status.OK,
        "flash_attn_3": Status.SKIPPED,
    }
    best = rows[(64,)]
    assert best.time_us.median == 20.0
    assert best.time_us.samples == len(best.time_us.rounds) == 4
    assert (best.cold_us, best.eager_us) == (20.0, 9.0)
    assert best.conditions["sm_mhz"] == 1980
    assert best.conditions["rounds"] == {"sm_mhz": [1980] * 4}
    assert best.conditions["strays"] == {}
    assert best.time_us.cycles == 20.0 * 1980
    assert best.resources.registers > 0
    assert best.launch_us == 1.5
    assert best.schedule["chunks"] == 1
    assert outcome.run.spaces[0]["candidates"] == 3
    assert rows["flash_attn_3"].detail == "flash_attn_3 is not installed"
    directory = tmp_path / "results" / "test-1" / "test"
    for name in ("spec.yaml", "environment.json", "trials.jsonl", "ranking.csv", "ranking.md"):
        assert (directory / name).is_file()
    launches, cubin = sorted((directory / "cubins").iterdir(), key=lambda path: path.suffix == ".xz")
    assert read_code(cubin)[:4] == b"\x7fELF"
    assert json.loads(launches.read_text())["config"] == {"THREADS": 64}


def test_the_first_candidates_compile_while_the_gpu_process_starts(go, gpu):
    before = FakeCompiler.submitted

    def describe(**_):
        ends = time.monotonic() + 10
        while FakeCompiler.submitted == before:
            assert time.monotonic() < ends, "nothing compiles before the GPU process answers"
        return TEST_GPU

    gpu.installed, gpu.describe = arch_on(TEST_GPU), describe
    assert by_config(go())[(64,)].status is Status.OK


def test_what_reports_need_and_cannot_be_imported_ahead_prints_nothing(go, monkeypatch, capfd):
    def fails(name):
        raise ImportError(f"{name}: numpy.dtype size changed")

    monkeypatch.setattr(session, "import_module", fails)
    assert go().exit_code == 0
    assert "Traceback" not in capfd.readouterr().err


def test_inputs_are_drawn_anew_in_each_run_unless_the_spec_has_their_seed(go, gpu):
    seeded = SPEC.replace("{rounds: 4}", "{rounds: 4, input_seed: 7}")
    for number, text in enumerate((SPEC, SPEC, seeded, seeded)):
        go(f"name: run{number}\n{text}")
    first, second, *rest = [opened["seed"] for opened in gpu.opened]
    assert first != second
    assert rest == [7, 7]


def test_a_row_keeps_the_clock_of_its_first_time(go, gpu):
    """Cycles decide which candidates race: at the power cap a time alone says little."""
    times = gpu.first_times
    gpu.first_times = lambda each: replace(times(each), sm_mhz=1395.0)
    rows = by_config(go())
    assert {rows[threads,].first_mhz for threads in (32, 64, 128)} == {1395.0}


def test_the_output_says_what_proofs_took_of_the_sweep(attnsweep, gpu, tmp_path):
    gpu.proof_s = {"inputs": 1.04, "replays": 0.01, "candidates": 2.25}
    (tmp_path / "test.yaml").write_text(SPEC)
    done = attnsweep("run", tmp_path / "test.yaml", "--results", tmp_path / "results")
    assert "3.3 s of them proved outputs right (candidates 2.2" in " ".join(done.stderr.split())


def test_of_the_same_code_the_first_asked_for_is_measured(go, gpu, monkeypatch):
    monkeypatch.setattr(Build, "machine_code", lambda self: self.config["THREADS"] < 128)
    rows = by_config(go())
    assert rows[(32,)].status is Status.OK
    assert rows[(64,)].status is Status.PRUNED
    assert rows[(64,)].detail == "same machine code as simple THREADS=32"
    assert rows[(64,)].time_us is None
    assert len(gpu.names("trial")) == 2
    gpu.calls.clear()
    go()
    assert gpu.calls == []


def test_rows_of_configs_that_the_kernel_has_no_longer_are_not_ranked(go, tmp_path):
    path = go().run.directory / "trials.jsonl"
    (row, *_) = [json.loads(line) for line in path.read_text().splitlines() if "THREADS" in line]
    gone = row | {"config": {"THREADS": 32, "UNROLL": 2}}
    gone["time_us"] = row["time_us"] | {"median": 1.0, "low": 1.0, "high": 1.0, "rounds": []}
    path.write_text(path.read_text() + json.dumps(gone) + "\n")
    for _ in range(2):
        rows = by_config(go())
        assert rows[(32, 2)].status is Status.PRUNED
        assert rows[(32, 2)].detail == "simple changed since: UNROLL"
        assert rows[(32,)].status is Status.OK


def test_fresh_measures_again_and_keeps_the_old_rows(go, gpu, tmp_path):
    go()
    gpu.calls.clear()
    go(fresh=True)
    assert ("trial", "THREADS=32") in gpu.calls
    assert len(list(tmp_path.rglob("trials.*.jsonl"))) == 1


@pytest.mark.parametrize("more", ["[32, 64]", "[64, 32]"])
def test_candidates_before_and_behind_measured_ones_are_tried(go, gpu, lookahead, more):
    lookahead(1)
    one = SPEC.replace("[32, 64, 128]", "[64]")
    assert by_config(go(one))[64,].status is Status.OK
    gpu.calls.clear()
    rows = by_config(go(one.replace("[64]", more)))
    assert {rows[32,].status, rows[64,].status} == {Status.OK}
    assert gpu.names("trial") == ["THREADS=32"]


@pytest.mark.parametrize("status", [Status.WRONG, Status.TIMEOUT, Status.LAUNCH_ERROR], ids=lambda s: s.value)
def test_a_failed_candidate_costs_its_own_row(go, gpu, status):
    gpu.faults["trial", "THREADS=64"] = WorkerError(status, "what happened")
    rows = by_config(go())
    assert (rows[(64,)].status, rows[(64,)].detail) == (status, "what happened")
    assert rows[(32,)].status is rows[(128,)].status is Status.OK


def test_a_finalist_that_fails_while_timed_leaves_the_rounds(go, gpu):
    gpu.faults["replay", "simple THREADS=64"] = WorkerError(Status.TIMEOUT, "no answer")
    rows = by_config(go())
    assert rows[(64,)].status is Status.TIMEOUT
    assert rows[(64,)].detail == "while timing: no answer"
    assert rows[(32,)].time_us.samples == 4
    assert ("forget", "simple THREADS=64") in gpu.calls


def test_ctrl_c_keeps_what_is_measured(go, gpu, tmp_path):
    gpu.faults["trial", "THREADS=128"] = KeyboardInterrupt()
    outcome = go()
    assert outcome.interrupted
    assert outcome.exit_code == 130
    (path,) = tmp_path.rglob("trials.jsonl")
    kept, warnings = read_trials(path)
    assert warnings == []
    assert 0 < len(kept) < 3
    assert (path.parent / "ranking.md").is_file()
    gpu.faults.clear()
    gpu.calls.clear()
    assert go().exit_code == 0
    assert len(gpu.names("trial")) == 3 - len(kept)


def test_code_of_problems_with_long_names_is_kept_apart(go, monkeypatch, tmp_path):
    """A cache of 60 lengths has a label of 500 characters; a file's name has up to 255 bytes."""
    lengths = "+".join(f"1x{length}" for length in range(3941, 4001))
    long = Problem.parse(f"(60,8/2,1x4000,64) bf16 causal paged(16,{lengths})")
    assert len(kept_code._name(long, "decode_paged_mma")) < 200
    monkeypatch.setattr(kept_code, "_LONGEST", 4)
    run = go(SPEC.replace("seqlen: 256", "seqlen: [256, 512]")).run
    winners = [trial for trial in run.trials if trial.provider == OURS and trial.status is Status.OK]
    assert {trial.problem.seqlen_q for trial in winners} == {256, 512}
    (cubins,) = tmp_path.rglob("cubins")
    assert len([*cubins.glob("*.json")]) == len([*cubins.glob("*.cubin.xz")]) == 2


class Killed(BaseException):
    """What ends a process at once, as far as this loop can see it."""


def test_a_run_killed_in_its_second_problem_has_the_first_ones_code(go, gpu, tmp_path):
    text = SPEC.replace("seqlen: 256", "seqlen: [256, 512]")
    gpu.faults["open", "(1,2,512,64) fp16 full"] = Killed()
    with pytest.raises(Killed):
        go(text)
    (cubins,) = tmp_path.rglob("cubins")
    kept = [path for path in cubins.parent.rglob("*256*.json") if path.parent.name == "cubins"]
    assert [json.loads(path.read_text())["config"] for path in kept] == [{"THREADS": 64}]
    # As an older version left it: the next process makes up for it.
    for path in kept:
        path.unlink()
    gpu.faults.clear()
    assert go(text).exit_code == 0
    for path in kept:
        assert json.loads(path.read_text())["config"] == {"THREADS": 64}


def test_ctrl_c_in_the_rounds_goes_on_with_the_rounds(go, gpu):
    gpu.faults["replay", "torch_flash"] = KeyboardInterrupt()
    assert go().interrupted
    gpu.faults.clear()
    gpu.calls.clear()
    rows = by_config(go())
    assert not gpu.names("trial")
    assert rows[(64,)].time_us.samples == 4


def test_every_candidate_wrong_is_exit_code_1(go, gpu):
    for threads in (32, 64, 128):
        gpu.faults["trial", f"THREADS={threads}"] = WorkerError(Status.WRONG, "wrong")
    assert go().exit_code == 1


def test_a_spec_for_another_architecture_is_refused(go):
    with pytest.raises(NoGpuError, match="for sm_80, this machine's NVIDIA Test 1 is sm_90a"):
        go("arch: sm_80\n" + SPEC)


def test_more_memory_than_the_card_is_refused(go):
    big = SPEC.replace("batch: 1", "batch: 25000").replace("seqlen: 256", "seqlen: 8192")
    with pytest.raises(NoGpuError, match="GiB"):
        go(big)


def test_no_candidate_left_names_the_rules_and_what_they_say(go):
    short = SPEC.replace("seqlen: 256", "seqlen: 16")
    with pytest.raises(SpaceError) as caught:
        go(short.replace("[32, 64, 128]", "256"))
    assert caught.value.hint == (
        "with the family's own values of THREADS, 1 candidate\n"
        "  simple: its only config is ruled out: no_idle_block removed 1\n"
        "    no_idle_block: a block has at most the rows of a head, rounded up to a warp"
    )
    with pytest.raises(SpaceError, match="simple: all 2 configs are ruled out: "):
        go(short.replace("[32, 64, 128]", "[128, 256]"))


def test_workspace_over_the_limit_is_pruned(go):
    kernels = "{three_kernel_mma: {}}"
    text = SPEC.replace("{simple: {THREADS: [32, 64, 128]}}", kernels)
    outcome = go(text + "limits: {workspace_bytes: 1024}\n", limit=2)
    reasons = {t.detail for t in outcome.run.trials if t.provider == "attnsweep"}
    assert reasons == {"needs 0.0 GiB of workspace, 0.0 allowed"}
    assert outcome.exit_code == 1


def test_replay_marks_every_row_and_invents_none(go, tmp_path):
    go()
    recording = tmp_path / "results" / "test-1" / "test"
    text = SPEC.replace("[32, 64, 128]", "[64, 256]")
    outcome = go(f"name: again\ndevice: replay\nrecording: {recording}\n" + text)
    rows = by_config(outcome)
    assert rows[(64,)].recorded
    assert rows[(64,)].time_us.median == 20.0
    assert rows[(64,)].recorded_on == "NVIDIA Test 1, 2026-01-01"
    assert rows[(256,)].status is Status.NO_RECORD
    assert rows[(256,)].time_us is None
    assert not rows[(256,)].recorded
    assert outcome.run.directory == tmp_path / "results" / "replay" / "again"
    assert Path(recording / "trials.jsonl").read_text().count("recorded_on") > 0


def test_a_launch_that_fails_on_a_checked_shape_costs_its_own_row(go):
    kernels = deepcopy(discover(FAMILIES))
    stage = kernels["simple"].stages["fwd"]

    def picky(config, problem, arch):
        if problem.seqlen_k == 17 and config.THREADS == 64:
            raise ValueError("seventeen")
        return stage.launch(config, problem, arch)

    kernels["simple"].stages["fwd"] = replace(stage, launch=picky)
    rows = by_config(go(kernels=kernels))
    assert rows[(64,)].status is Status.LAUNCH_ERROR
    assert "raised ValueError: seventeen" in rows[(64,)].detail
    assert rows[(32,)].status is Status.OK


def test_a_problem_that_cannot_be_opened_costs_its_own_rows(go, gpu):
    label = "(1,2,256,64) fp16 full"
    gpu.faults["open", f"{label}"] = WorkerError(Status.LAUNCH_ERROR, "out of memory")
    outcome = go(SPEC.replace("seqlen: 256", "seqlen: [256, 128]"))
    found = {}
    for trial in outcome.run.trials:
        found.setdefault(trial.problem.label, set()).add((trial.status, trial.detail))
    assert found[label] == {(Status.LAUNCH_ERROR, "cannot open the problem: out of memory")}
    assert (Status.OK, None) in found["(1,2,128,64) fp16 full"]
    assert outcome.exit_code == 1
    gpu.faults.clear()
    assert go(SPEC.replace("seqlen: 256", "seqlen: [256, 128]")).exit_code == 0


def test_a_failure_to_read_the_clocks_loses_nothing(go, gpu):
    gpu.faults["conditions", ""] = WorkerError(Status.TIMEOUT, "no answer")
    row = by_config(go())[(64,)]
    assert row.time_us.samples == 4
    assert not {"sm_mhz", "rounds", "strays"} & set(row.conditions)
    assert row.time_us.cycles is None


def test_a_sweep_next_to_a_packed_run_says_which_rows_are_read(go, tmp_path):
    directory = go().run.directory
    pack(directory)
    notes = Notes()
    outcome = go(observer=notes)
    assert any("trials.jsonl.xz stays there" in note for note in notes.texts)
    assert outcome.exit_code == 0
    assert (directory / "trials.jsonl.xz").is_file()
    again = Notes()
    go(observer=again)
    assert again.texts == []


def test_an_endless_rule_ends_the_sweep_also_while_the_gpu_process_starts(go, gpu, constants):
    constants(time_limit, LIMIT_S=0.2)
    gpu.installed = arch_on(TEST_GPU)
    kernels = deepcopy(discover(FAMILIES))
    simple = kernels["simple"]

    def endless(config, problem, arch):
        while True:
            pass

    simple.rule("never ends")(endless)
    with pytest.raises(KernelError, match=r"rule endless of simple did not return within 0.2 s"):
        go(kernels=kernels)


def test_the_gpu_process_is_told_how_often_families_round_scores(go, gpu):
    kernels = discover(FAMILIES)
    kernels["simple"] = copy.copy(kernels["simple"])
    object.__setattr__(kernels["simple"], "rounds_scores", 2)
    go(kernels=kernels)
    assert [opened["rounds_scores"] for opened in gpu.opened] == [{2}]


def test_a_callable_that_is_judged_is_timed_and_checked_again_and_is_no_baseline(go, gpu):
    gpu.times |= {"mine:f": 22.0, "theirs:g": 21.0}
    gpu.issued["theirs:g"] = "no CUDA graph holds its calls: it waits"
    spec = SPEC.replace("flash_attn_3]", "'theirs:g']\ncandidates: ['mine:f']")
    rows = by_config(go(spec))
    assert (rows["mine:f"].candidate, rows["theirs:g"].candidate) == (True, False)
    assert rows["theirs:g"].issued == "no CUDA graph holds its calls: it waits"
    assert rows["mine:f"].time_us.median == 22.0
    assert {"mine:f", "theirs:g"} <= set(gpu.names("confirm"))
    assert "torch_flash" not in gpu.names("confirm")
    assert rows["mine:f"].accuracy.calls == 100


STRICT = SPEC + "candidates: {mine: {call: 'm:f', strict: true}, lax: {call: 'm:g'}}\n"
NAME = "mine=m:f?strict=true"


def test_a_strict_candidate_is_judged_by_itself_beside_the_baselines(go, gpu):
    gpu.times |= {NAME: 22.0, "lax=m:g": 20.0, "flash_attn_3": 26.4}
    outcome = go(STRICT)
    rows = by_config(outcome)
    row = rows[NAME]
    assert (row.time_us.median, row.time_us.l2, row.candidate) == (22.0, "chain", True)
    assert row.strict == {"trusted_us": 1.01 * 22, "ratio": 25 / 22, "base": "torch_flash"}
    assert (rows["lax=m:g"].strict, rows["flash_attn_3"].time_us.l2) == ({}, "warm")
    assert [opened.get("strict", "") != "" for opened in gpu.opened] == [False, True]
    assert gpu.opened[0]["seed"] != gpu.opened[1]["seed"]  # a spec may say the former
    asked = gpu.names("add_baseline")
    assert asked[asked.index(NAME) :].count("lax=m:g") == 0
    ranking = rank(outcome.run.trials, TEST_GPU)
    (shown,) = ranking[ranking["provider"] == NAME].to_dict("records")
    assert shown["detail"] == "judged strictly: 1.14× torch_flash, 22.22 µs by the judge's clock"
    assert shown["rank"] is None
    assert math.isnan(shown["ratio_to_best_baseline"])  # kernels are not timed in chains
    gpu.calls.clear()
    go(STRICT)
    assert "add_baseline" not in [method for method, _ in gpu.calls]  # all is kept


@pytest.mark.parametrize("method", ["open", "add_baseline", "replay", "trusted_us"])
def test_a_strict_candidate_that_fails_leaves_the_other_rows(method, go, gpu):
    gpu.times |= {NAME: 22.0, "lax=m:g": 20.0, "flash_attn_3": 33.0}
    wrong = WorkerError(Status.SKIPPED, "so it is")
    real = gpu.open

    def opened(problem, **how):
        if how.get("strict") and method == "open":
            raise wrong
        real(problem, **how)

    gpu.open = opened
    gpu.faults[method, NAME] = wrong
    rows = by_config(go(STRICT))
    assert rows[NAME].status is Status.SKIPPED
    assert rows[NAME].detail.endswith("so it is")
    assert rows["flash_attn_3"].status is Status.OK

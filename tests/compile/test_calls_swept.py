"""Sweeps of callables of the user's: real traces, and a GPU whose times are made up."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use_gpu

import attnsweep
from attnsweep.bench.gpu import WorkerError
from attnsweep.compile.calls import CalledBuild
from attnsweep.core.errors import KernelError, SpecError
from attnsweep.core.trial import OURS, Status
from attnsweep.store.run import find_runs, open_run
from attnsweep.sweep import loop

missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"tracing needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/tuned.py"
SPEC = """
name: calls
problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 16, dtype: bf16}]
kernels: {tuned: {call: 'tuned.py:attention'}}
baselines: []
measure: {rounds: 4}
"""


class Gpu(FakeGpu):
    """One on which many warps are slow."""

    def __init__(self, faults=(), **how):
        super().__init__(**how)
        self.in_turn = {key: [*each] for key, each in dict(faults).items()}

    def heard(self, method, name=""):
        super().heard(method, name)
        fault = self.in_turn.get((method, name), [None])
        if fault and (error := fault.pop(0)):
            raise error

    def time_us(self, name):
        return 40.0 if "num_warps=4" in name else 20.0 + ("BLOCK=128" in name)


@pytest.fixture
def swept(place, monkeypatch, tmp_path):
    def swept(results=tmp_path, *, faults=(), **how):
        gpu = Gpu(faults, environment=TEST_GPU)
        use_gpu(monkeypatch, gpu)
        return attnsweep.run("calls.yaml", results=results, cache_dir=place / "cache", **how), gpu

    return swept


def test_the_files_own_configs_are_swept_and_ranked(swept):
    outcome, _ = swept()
    fast = [row for row in outcome.run.trials if row.config["num_warps"] == 1]
    rows = {row.config["BLOCK"]: row for row in fast if row.status is Status.OK}
    assert len(outcome.run.trials) == 4
    assert outcome.exit_code == 0
    said = rows[32].call
    assert (said["function"], said["covers"]) == ("tuned.py:attention", "any length")
    assert said["triton"]
    assert {row.call["covers"] for row in rows.values()} == {"any length", "this binary"}
    assert "tuned takes 20.0 µs" in str(outcome)


def test_its_packages_are_imported_while_it_compiles(swept):
    _, gpu = swept()
    assert gpu.imported == ("tuned.py:attention",)


@pytest.mark.parametrize("enough", [True, False])
def test_small_cases_of_any_length_compile_during_the_rounds(swept, monkeypatch, enough):
    """They took 2 s after the last round, on an H200 host with empty caches. The host's times need free cores."""
    order = []
    monkeypatch.setattr(loop, "_ENOUGH_CORES", 1 if enough else 1000)
    asked = CalledBuild.on_any_length
    monkeypatch.setattr(CalledBuild, "on_any_length", lambda build: order.append(build.config["BLOCK"]) or asked(build))
    monkeypatch.setattr(Gpu, "replay", lambda gpu, *args: order.append("round") or FakeGpu.replay(gpu, *args))
    swept()
    assert order.index(32) == 0 if enough else order[-1] == 32
    assert order.count(32) == 1
    assert "round" in order


def test_a_sweep_that_ends_behind_its_rounds_proves_its_winner_when_it_resumes(swept, monkeypatch, tmp_path):
    def fails(build):
        raise KernelError("ValueError: no such place (tuned.py:7)", where="tuned.py:attention")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_ENOUGH_CORES", 1)
        patch.setattr(CalledBuild, "on_any_length", fails)
        with pytest.raises(KernelError, match="no such place"):
            swept(tmp_path)
    (run,) = find_runs(tmp_path)
    before = [row for row in open_run(run).trials if row.time_us and row.time_us.rounds]
    assert {row.call["covers"] for row in before} == {"this binary"}
    resumed, gpu = swept(tmp_path)
    assert [row.config["BLOCK"] for row in resumed.run.trials if row.call["covers"] == "any length"] == [32]
    assert len([call for call in gpu.calls if call[0] == "trial"]) == 1  # on any length
    assert not swept(tmp_path)[1].calls


def test_a_call_that_is_right_on_its_own_lengths_alone_is_said_so(swept, tmp_path):
    faults = {("trial", "BLOCK=32 num_warps=1"): [None, WorkerError(Status.WRONG, "wrong on 17 keys")]}
    outcome, _ = swept(tmp_path, faults=faults)
    said = next(row for row in outcome.run.trials if row.call.get("other_lengths"))
    assert (said.status, said.call["covers"]) == (Status.OK, "this binary")
    assert said.call["other_lengths"] == "wrong on 17 keys"


def test_the_same_sweep_again_measures_nothing(swept, tmp_path):
    swept(tmp_path)
    again, gpu = swept(tmp_path)
    assert len(again.run.trials) == 4
    assert not [call for call in gpu.calls if call[0] == "trial"]


def test_a_changed_file_is_measured_again(swept, place, tmp_path):
    swept(tmp_path)
    file, spec = place / "tuned.py", place / "calls.yaml"
    before, wrong = file.read_text(), WorkerError(Status.WRONG, "not today")
    faults = {("trial", f"BLOCK={block} num_warps={n}"): [wrong] for block in (32, 64, 128) for n in (1, 4)}
    try:
        file.write_text(before + "\n# changed\n")
        changed, _ = swept(tmp_path, faults=faults)
        spec.write_text(SPEC.replace("'tuned.py:attention'", "'tuned.py:plain', BLOCK: [64], num_warps: [1]"))
        other, _ = swept(tmp_path, faults=faults)
    finally:
        file.write_text(before)
        spec.write_text(SPEC)
    assert {row.status for row in changed.run.trials} == {Status.WRONG}
    assert [row.config["BLOCK"] for row in other.run.trials if row.status is Status.WRONG] == [64]
    left = [row.detail for row in other.run.trials if row.status is Status.PRUNED]
    assert left == 4 * ["tuned calls tuned.py:plain now"]


def test_a_file_that_is_imported_at_the_call_is_no_stale_row(place, monkeypatch, tmp_path):
    (place / "late.py").write_text("SIZE = 64\n")
    lazy = "\n\ndef lazy(q, k, v, *, problem, out, BLOCK=64):\n    import late\n"
    (place / "lazy.py").write_text(
        LAUNCHERS.read_text() + lazy + "    plain(q, k, v, problem=problem, out=out, BLOCK=late.SIZE)\n"
    )
    spec = SPEC.replace("'tuned.py:attention'", "'lazy.py:lazy', BLOCK: [64]").replace("name: calls", "name: lazy")
    (place / "lazy.yaml").write_text(spec)
    calls = []
    for size in (64, 64, 32):
        (place / "late.py").write_text(f"SIZE = {size}\n")
        wrong = {("trial", "BLOCK=64"): [WorkerError(Status.WRONG, "not today")]}
        use_gpu(monkeypatch, gpu := Gpu(wrong, environment=TEST_GPU))
        attnsweep.run("lazy.yaml", results=tmp_path, cache_dir=place / "cache")
        calls.append(len([call for call in gpu.calls if call[0] == "trial"]))
    assert calls == [1, 0, 1]


def test_tune_knows_a_call_by_its_name_and_by_the_function(place, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(place)
    use_gpu(monkeypatch, gpu := Gpu(times={"torch_flash": 50.0}, environment=TEST_GPU))
    how = {"results": tmp_path, "cache_dir": place / "cache", "dtype": "bf16"}
    small = {"a block of 32": lambda config, problem, arch: config["BLOCK"] == 32}
    one = attnsweep.tune("tuned.py:attention", "1,2,256,16", rules=small, **how)
    assert {row.config["BLOCK"] for row in one.run.trials if row.provider == OURS} == {32}
    monkeypatch.delitem(sys.modules, "tuned", raising=False)
    module = importlib.import_module("tuned")
    params = {"BLOCK": [64], "num_warps": [None]}
    gpu.in_turn = {("trial", "BLOCK=64 num_warps=None"): [WorkerError(Status.WRONG, "not today")]}
    other = attnsweep.tune(module.plain, "1,2,256,16", params=params, **how)
    assert {row.config["BLOCK"] for row in other.run.trials if row.provider == OURS} == {64}
    assert other.run.directory.name.endswith("tuned_plain")
    assert gpu.calls


def test_only_a_call_is_widened():
    with pytest.raises(SpecError, match="widen goes with a function"):
        attnsweep.tune("1,2,256,64", widen=True)


def test_the_command_counts_the_configs_of_a_call(place, attnsweep):
    shape = ["1,2,64,16", "--dtype", "bf16", "--dry-run", "--arch", "sm_90a"]
    done = attnsweep("tune", "--kernel", "tuned.py:attention", *shape)
    assert done.returncode == 0
    assert "tuned_attention 4 2 prune_configs_by 2" in " ".join(done.stdout.split())
    wide = attnsweep("tune", "--kernel", "tuned.py:attention", "--widen", *shape)
    assert "tuned_attention 20 12 prune_configs_by 8" in " ".join(wide.stdout.split())
    assert "BLOCK" not in wide.stdout
    told = attnsweep("-v", "tune", "--kernel", "tuned.py:attention", "--widen", *shape).stdout
    assert "\ntuned_attention: BLOCK 16, 32, 64 · num_warps 1, 2, 4, 8\n" in told
    (facts,) = json.loads(attnsweep("tune", "--kernel", "tuned.py:attention", "--widen", *shape, "--json").stdout)
    assert facts["removed"] == {"prune_configs_by": 8}  # not the rules that removed none
    none = attnsweep("tune", "--widen", *shape)
    assert (none.returncode, "--kernel FILE.py:FUNCTION" in none.stderr) == (2, True)

"""Hardware counters without hardware: a stand-in for ncu that prints what ncu prints."""

import errno
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import H200, full_run

from attnsweep.compile.launches import Candidate, CompiledStage, LaunchPlan
from attnsweep.core import cases
from attnsweep.core.errors import KernelError, NoGpuError, SpecError, StoreError, ToolchainError
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Launch
from attnsweep.reports import views as view
from attnsweep.store import outputs
from attnsweep.store.run import open_run
from attnsweep.tools import profile as counters
from attnsweep.verify import inputs

STAND_IN = """#!{python}
import csv, sys
metrics = {{
    "gpu__time_duration.sum": ["10,500", "9000"],
    "dram__bytes_write.sum": ["17,000,000", "n/a"],
    "lts__t_sectors_op_write.sum": ["1048576", "0"],
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ["4.5", "1"],
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ["0.5", "2"],
}}
if "--query-metrics" in sys.argv:
    print("Device NVIDIA H200 (GH100)")
    for name in metrics:
        print(name.split(".")[0] + "  Counter  what it is")
    sys.exit(0)
{behaviour}
if "--export" in sys.argv:
    report = sys.argv[sys.argv.index("--export") + 1]
    open(report, "x").write(" ".join(sys.argv))
    print("==PROF== Report: " + report)
    sys.exit(0)
if "--import" in sys.argv:
    sys.argv = open(sys.argv[sys.argv.index("--import") + 1]).read().split()
asked = sys.argv[sys.argv.index("--metrics") + 1].split(",")
assert set(asked) == set(metrics), asked
print("==PROF== Connected to process 1")
out = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL)
out.writerow(["ID", "Kernel Name", *asked])
out.writerow(["", "", *(["unit"] * len(asked))])
for launch in range(2):
    out.writerow([launch, "k", *(metrics[name][launch] for name in asked)])
"""


@pytest.fixture
def ncu(tmp_path: Path):
    def made(behaviour: str = "") -> Path:
        path = tmp_path / "ncu"
        path.write_text(STAND_IN.format(python=sys.executable, behaviour=behaviour))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return made


def candidate(*stages: str) -> Candidate:
    launch = Launch("f", (1, 1, 1), 32, ())
    compiled = tuple(CompiledStage(name, "x.cubin", launch) for name in stages)
    return Candidate("k", {}, LaunchPlan(Problem(1, 1, 1, 1, 1, 64), compiled, {}), (), 0)


def test_every_launch_has_its_counters_in_our_units(ncu) -> None:
    ((qk, pv),) = counters.count([candidate("qk", "pv")], ncu())
    assert (qk["stage"], pv["stage"]) == ("qk", "pv")
    assert qk["figures"] == {"duration_us": 10.5, "dram_write_bytes": 17e6, "l2_write_bytes": 2**25}
    assert pv["figures"] == {"duration_us": 9.0, "l2_write_bytes": 0.0}  # n/a is left out
    assert list(qk["stalls"].items()) == [("long_scoreboard", 4.5), ("barrier", 0.5)]
    assert next(iter(pv["stalls"])) == "barrier"


@pytest.mark.parametrize(
    ("behaviour", "error", "words"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit(1)", NoGpuError, "only root"),
        ("print('==ERROR== no kernels'); sys.exit(9)", ToolchainError, "ncu failed"),
    ],
)
def test_what_ncu_refuses_is_said(ncu, behaviour, error, words) -> None:
    with pytest.raises(error, match=words):
        counters.count([candidate("a", "b")], ncu(behaviour))


@pytest.mark.skipif(counters.find_ncu() is not None, reason="Nsight Compute is installed")
def test_without_ncu_it_says_where_it_comes_from() -> None:
    with pytest.raises(NoGpuError, match="Nsight Compute") as caught:
        counters.count([candidate("a")])
    assert caught.value.exit_code == 3


def test_kept_counters_replace_those_of_the_same_candidate(tmp_path: Path) -> None:
    one, two = full_run().trials[:2]
    stages = [{"stage": "fwd", "figures": {"duration_us": 1.23456789}, "stalls": {"wait": 2.0}}]
    counters.write(tmp_path, [(one, stages), (two, stages)], "here")
    kept = counters.write(tmp_path, [(one, stages)], "there")
    assert kept == outputs.read(tmp_path)
    assert sorted(facts["where"] for facts in kept) == ["here", "there"]
    assert kept[0]["stages"][0]["figures"] == {"duration_us": 1.2346}
    text = "\n".join(line.plain for line in view.counters(kept, 100))
    assert "1.2" in text
    assert "wait\u00a02.0" in text.replace(" 2.0", "\u00a02.0")


def test_counters_that_cannot_be_written_leave_the_old_ones(tmp_path: Path, disk) -> None:
    one, two = full_run().trials[:2]
    stages = [{"stage": "fwd", "figures": {"duration_us": 1.0}, "stalls": {}}]
    counters.write(tmp_path, [(one, stages)], "here")
    before = (tmp_path / outputs.FILE).read_bytes()
    disk.fails = errno.ENOSPC
    with pytest.raises(StoreError, match=r"counters\.json: cannot be written: No space left"):
        counters.write(tmp_path, [(two, stages)], "here")
    assert (tmp_path / outputs.FILE).read_bytes() == before


def test_candidates_are_chosen_by_parameter_and_by_rank() -> None:
    run = full_run(environment=H200)
    assert [t.time_us.median for t in counters.chosen(run)] == [28.1]
    (slow,) = counters.chosen(run, ["kernel=three_kernel_wgmma QK_BLOCK_M=64"])
    assert slow.config["QK_BLOCK_M"] == 64
    assert len(counters.chosen(run, ["BLOCK_M=64", "BLOCK_M=128"], top=2)) == 4


def test_candidates_are_chosen_on_the_problems_asked_for() -> None:
    run = open_run(Path(__file__).parents[2] / "results/h100-80gb-hbm3/h100")
    (one,) = counters.chosen(run, problems=[Problem.parse("(1,8,512,64) fp16 full")])
    assert one.problem.label == "(1,8,512,64) fp16 full"
    assert len(counters.chosen(run)) == 9
    both = [Problem.parse(text) for text in ("1,8,512,64 fp16 full", "1,16,1024,64 fp16 causal")]
    assert [t.problem for t in counters.chosen(run, top=1, problems=both)] == both
    with pytest.raises(SpecError, match=r"(?s)has the problem \(1,8,513,64\) fp16 full.*1,8,512,64"):
        counters.chosen(run, problems=[replace(both[0], seqlen_q=513, seqlen_k=513)])
    with pytest.raises(SpecError, match="no such candidate is ranked on these problems"):
        counters.chosen(run, ["kernel=three_kernel_wgmma"], problems=both[:1])


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("FOO=1", SpecError, r"a parameter 'FOO'\n  there are: kernel, .*QK_BLOCK_M, .*, BLOCK_N"),
        ("BLOCK_M=7", SpecError, r"run has BLOCK_M=7\n  there are: \d+, "),
        # Of no candidate both, though each is of some.
        ("kernel=three_kernel_wgmma BLOCK_M=64", SpecError, "no ranked candidate of the run is 'k"),
        ("BLOCK_M", KernelError, "not a parameter's value: 'BLOCK_M'\n  write NAME=VALUE"),
    ],
)
def test_what_no_candidate_has_is_said_with_what_there_is(text, error, words) -> None:
    with pytest.raises(error, match=words):
        counters.chosen(full_run(environment=H200), [text])


def test_a_config_of_a_family_that_changed_since_is_refused() -> None:
    trial = next(t for t in full_run().trials if t.kernel == "three_kernel_wgmma")
    old = trial.model_copy(update={"config": {"BLOCK_M": 64}})
    with pytest.raises(KernelError, match=r"lost parameter 'BLOCK_M'.* gained parameters"):
        counters.compiled([old], discover(), arch_named("sm_90a"), None)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_damaged_counters_are_no_traceback(tmp_path: Path, content) -> None:
    (tmp_path / outputs.FILE).write_bytes(content)
    with pytest.raises(StoreError, match=r"counters\.json: cannot be read"):
        outputs.read(tmp_path)


def test_a_kept_report_is_written_by_ncu_and_read_back(ncu, tmp_path: Path) -> None:
    report = counters.report_path(tmp_path)
    assert report.name == "profile.ncu-rep"
    kept = counters.count([candidate("qk", "pv")], ncu(), keep=report)
    assert kept == counters.count([candidate("qk", "pv")], ncu())
    assert report.is_file()
    again = counters.report_path(tmp_path)
    assert again.name == "profile-2.ncu-rep"
    again.touch()
    assert counters.report_path(tmp_path).name == "profile-3.ncu-rep"


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "e4m3", "e4m3_tensor", "e4m3_block"])
def test_inputs_to_count_with_are_those_of_one_group_of_heads(dtype) -> None:
    problem = Problem(3, 8, 2, 40, 300, 16, dtype)
    made, drawn = counters.inputs_of(problem), inputs.make_inputs(cases.Case(problem), 0)
    assert {name: bits.shape for name, bits in made.items()} == {n: b.shape for n, b in drawn.items()}
    assert all(bits.flags.c_contiguous for bits in made.values())
    for name, heads in (("q", 4), ("k", 1), ("v", 1)):
        assert (made[name] == made[name][:1].repeat(3, 0)).all()
        assert (made[name][:, :heads] == made[name][:, -heads:]).all()
    assert len(np.unique(made["q"][0, :4])) > 40

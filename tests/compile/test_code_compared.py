"""`check --mode compile`: machine code of old and new, compiled by NVRTC and Triton, without a GPU."""

import importlib.util
import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use_gpu

from attnsweep.compile import nvrtc, sass
from attnsweep.core.errors import NoGpuError, ToolchainError
from attnsweep.family.discover import discover
from attnsweep.regress import live
from attnsweep.specs.load import load_spec
from attnsweep.sweep import session

FAMILIES = Path(__file__).parents[1] / "families"
LAUNCHERS = Path(__file__).parents[1] / "support/launchers/tuned.py"
SPEC = """
problems: [{batch: 1, heads: 2, seqlen: 64, head_dim: 64}]
kernels: {burns: {}}
baselines: []
"""
needs_triton = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "triton"))), reason="needs torch and triton"
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A machine on which nothing can be timed."""

    def absent(*_, **__):
        raise NoGpuError("no GPU here")

    monkeypatch.setattr(live, "Worker", absent)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of SPEC with machine code, as a sweep on a card leaves it."""
    place = tmp_path_factory.mktemp("recorded")
    (place / "spec.yaml").write_text(SPEC)
    with pytest.MonkeyPatch.context() as patch:
        use_gpu(patch, FakeGpu({"CYCLES=400000": 20.0}, environment=TEST_GPU))
        spec = load_spec(place / "spec.yaml", discover(FAMILIES))
        return session.run(spec, results=place).run.directory


@pytest.fixture
def check(tmp_path, recorded, attnsweep):
    """The end of the command for families that are edited so: its exit code, its only problem, its words."""
    families = Path(shutil.copytree(FAMILIES, tmp_path / "families"))
    baseline = Path(shutil.copytree(recorded, tmp_path / "baseline"))
    (tmp_path / "ci.yaml").write_text(SPEC)

    def run(*options, edits=(), baseline=baseline):
        for old, new in edits:
            text = (families / "burns.cu").read_text()
            assert old in text
            (families / "burns.cu").write_text(text.replace(old, new))
        asked = ("--against", baseline, "--kernels", families, "--mode", "compile", *options)
        done = attnsweep("check", tmp_path / "ci.yaml", "--json", *asked)
        problems = json.loads(done.stdout)["problems"] if done.stdout else [None]
        return done.returncode, problems[0], done.stderr

    run.baseline = baseline
    return run


ENTRY = "    long long begin = clock64();"
# Places that are known at run time alone, so that no register can hold them.
ARRAY = f"    float kept[64]; kept[heads] = scale; kept[seqlen_q % 64] += scale;\n{ENTRY}"
SHARED = f"    __shared__ float kept[12000]; kept[heads] = scale;\n{ENTRY}"


def test_code_that_did_not_change_passes(check):
    code, found, _ = check()
    assert (code, found["verdict"], found["why"]) == (0, "pass", "same machine code and launches")
    (stage,) = found["stages"]
    assert stage["old"] == stage["new"]
    assert (stage["name"], stage["old"]["spill_bytes"], stage["old"]["stack_bytes"]) == ("fwd", 0, 0)


def test_other_code_that_is_not_worse_is_changed_and_no_failure(check):
    code, found, _ = check(edits=[("EXTRA_CYCLES 0", "EXTRA_CYCLES 8000")])
    assert (code, found["verdict"]) == (0, "changed")
    assert found["ratio"] is None


def test_an_array_in_local_memory_is_a_regression(check):
    code, found, _ = check(edits=[(ENTRY, ARRAY), ("out / sum)", "out / sum + kept[seqlen_k % 64])")])
    assert (code, found["verdict"]) == (1, "regression")
    (stage,) = found["stages"]
    assert stage["new"]["stack_bytes"] >= 256
    assert "stack 0 → " in found["why"]


def test_shared_memory_that_lets_fewer_blocks_on_an_sm_is_a_regression(check):
    code, found, _ = check(edits=[(ENTRY, SHARED), ("out / sum)", "out / sum + kept[seqlen_k])")])
    assert (code, found["verdict"]) == (1, "regression")
    assert "warps on an SM, limited by shared memory" in found["why"]
    (stage,) = found["stages"]
    assert stage["new"]["blocks_per_sm"] < stage["old"]["blocks_per_sm"]
    assert found["old"]["smem_bytes"] == 0
    assert found["new"]["smem_bytes"] == 48000


def test_code_that_does_not_compile_is_wrong(check):
    code, found, _ = check(edits=[(ENTRY, "    nonsense;")])
    assert (code, found["verdict"]) == (1, "wrong")
    assert "nonsense" in found["why"]


def test_a_baseline_without_code_is_inconclusive(check):
    shutil.rmtree(check.baseline / "cubins")
    code, found, _ = check()
    assert (code, found["verdict"]) == (4, "inconclusive")
    assert "machine code" in found["why"]


def test_a_baseline_whose_rows_say_nothing_of_resources_is_inconclusive(check):
    (rows,) = check.baseline.glob("trials.jsonl")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps(line | {"resources": None}) + "\n" for line in lines))
    code, found, _ = check(edits=[("EXTRA_CYCLES 0", "EXTRA_CYCLES 8001")])
    assert (code, found["verdict"]) == (4, "inconclusive")
    assert "resources" in found["why"]


def test_without_nvdisasm_instructions_are_unknown_and_the_verdict_stands(check, monkeypatch):
    def absent(*_):
        raise ToolchainError("no nvdisasm")

    for name in ("counts", "disassemble"):
        monkeypatch.setattr(sass, name, absent)
    code, found, _ = check(edits=[("EXTRA_CYCLES 0", "EXTRA_CYCLES 9000")])
    assert (code, found["verdict"]) == (0, "changed")
    assert "instructions" not in found["stages"][0]["new"]


def test_a_budget_that_ends_is_no_verdict(check):
    code, found, _ = check("--budget-s", 0, edits=[("EXTRA_CYCLES 0", "EXTRA_CYCLES 7777")])
    assert (code, found["verdict"], found["budget_ended"]) == (4, "inconclusive", True)


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--slower", "1%"), "--slower"), (("--gpus", "all"), "--gpus"), (("--arch", "sm_80"), "--arch")],
)
def test_what_would_do_nothing_is_refused(check, options, says):
    code, found, words = check(*options)
    assert (code, found, says in words) == (2, None, True)


def test_a_spec_for_another_architecture_is_refused(check, tmp_path):
    (tmp_path / "ci.yaml").write_text(f"arch: sm_80\n{SPEC}")
    code, _, words = check()
    assert (code, "the spec is for sm_80" in words) == (2, True)


# -- callables --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory, forked_tracers):
    """A repository with one commit of the launchers, in which everything happens."""
    place, before = tmp_path_factory.mktemp("repository"), Path.cwd()
    shutil.copy(LAUNCHERS, place)
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture
def compared(place, attnsweep):
    """The command's end for launchers that are changed so."""

    def compared(*options, changed=("", ""), function="plain", config="BLOCK=64", old="tuned.py@HEAD"):
        assert changed[0] in LAUNCHERS.read_text()
        (place / "tuned.py").write_text(LAUNCHERS.read_text().replace(*changed))
        sides = ["--old", f"{old}:{function}", "--new", f"tuned.py:{function}"]
        how = ["--dtype", "bf16", "--config", config, "--mode", "compile"]
        return attnsweep("check", *sides, "1,2,64,16", *how, *options)

    return compared


def of(done):
    (problem,) = json.loads(done.stdout)["problems"]
    return done.returncode, problem["verdict"], problem["why"]


OTHER = ("range(D)", "range(D // 2)")
# One warp holds four thousand elements, in registers.
HUGE = ("BLOCK=BLOCK, **launch", "BLOCK=4096, num_warps=1, **launch")


@needs_triton
def test_calls_show_old_and_new(compared, tmp_path):
    done = compared("--junit", tmp_path / "check.xml", "--markdown", tmp_path / "check.md", changed=OTHER)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.endswith("  changed")]
    assert "copied" in row
    assert " → " in row
    (case,) = ElementTree.parse(tmp_path / "check.xml").getroot().iter("testcase")
    assert not [*case.iter("failure"), *case.iter("error")]
    assert "| copied |" in (tmp_path / "check.md").read_text()
    assert "slower" not in done.stdout.replace("may be slower", "")


@needs_triton
def test_a_call_without_a_config_says_which_one_of_its_autotuner_is_compared(compared):
    def said(done):
        assert done.returncode in (0, 1, 4), done.stderr
        return json.loads(done.stdout)["does_not_prove"]

    own = {"function": "attention", "config": ""}
    assert said(compared("--json", **own)).endswith("autotuner, BLOCK=32 num_warps=1 (--config names another).")
    other = said(compared("--json", changed=("block in (32, 128)", "block in (64, 128)"), **own))
    assert "BLOCK=32 num_warps=1 → BLOCK=64 num_warps=1 (" in other
    assert said(compared("--json", config="BLOCK=64")).endswith("these shapes and this config.")
    assert said(compared("--json", config="")).endswith("these shapes and the functions' defaults.")


@needs_triton
def test_calls_whose_lines_moved_are_equal(compared):
    code, verdict, why = of(compared("--json", changed=("CONFIGS = [", "\n\n# a comment\nCONFIGS = [")))
    assert (code, verdict, why) == (0, "pass", "same machine code and launches")


@needs_triton
def test_calls_need_no_nvrtc(compared, monkeypatch):
    def absent():
        raise ToolchainError("no NVRTC")

    for name in ("_nvrtc", "nvrtc_version"):
        monkeypatch.setattr(nvrtc, name, absent)
    assert of(compared("--json", changed=OTHER))[:2] == (0, "changed")


@needs_triton
def test_calls_that_fill_an_sm_less_are_a_regression(compared):
    code, verdict, why = of(compared("--json", changed=HUGE))
    assert (code, verdict) == (1, "regression")
    assert "warps on an SM, limited by registers" in why


@needs_triton
def test_calls_that_fill_an_sm_more_are_an_improvement_whatever_the_kernel_is_called(compared, place):
    (place / "huge.py").write_text(LAUNCHERS.read_text().replace(*HUGE).replace("copied", "moved"))
    done = compared("--json", old="huge.py")
    assert of(done)[:2] == (0, "improvement")
    (stage,) = json.loads(done.stdout)["problems"][0]["stages"]
    assert stage["name"] == "moved → copied"
    assert stage["old"]["registers"] > stage["new"]["registers"]


@needs_triton
def test_calls_are_compiled_for_the_architecture_that_is_named(compared):
    done = compared("--arch", "sm_80", changed=OTHER)
    assert (done.returncode, "compiled for sm_80" in " ".join(done.stdout.split())) == (0, True)
    done = compared("--arch", "sm_1", changed=OTHER)
    assert (done.returncode, "sm_1" in done.stderr) == (2, True)


@needs_triton
def test_a_new_call_that_does_not_compile_is_wrong_and_one_that_never_did_inconclusive(compared):
    new = compared("--json", changed=("BLOCK=BLOCK, **launch", "BLOCK=33, **launch"))
    assert of(new)[:2] == (1, "wrong")
    both = compared("--json", config="BLOCK=33", changed=OTHER)
    assert of(both)[:2] == (4, "inconclusive")
    assert "old code does not compile" in of(both)[2]


@needs_triton
@pytest.mark.parametrize(
    ("which", "says"), [("getpid", "its process died (SIGKILL)"), ("getppid", "the process that traces has ended")]
)
def test_a_new_call_whose_compiler_is_killed_is_inconclusive(compared, which, says):
    killed = ("    grid = (triton.cdiv(p", f"    os.kill(os.{which}(), 9)\n    grid = (triton.cdiv(p")
    assert of(compared("--json", changed=killed)) == (4, "inconclusive", f"the new code: {says}")


@needs_triton
def test_a_call_that_cannot_be_traced_is_inconclusive(compared):
    reads = ("return q.sum().item()", "return (q + q).sum().item()")
    code, verdict, why = of(compared("--json", function="faulty", config="how=reads", changed=reads))
    assert (code, verdict) == (4, "inconclusive")
    assert "only a call on a GPU" in why


@needs_triton
def test_calls_with_more_kernels_than_before_are_inconclusive(compared):
    again = "    copied.fn[grid](q, out, problem.seqlen_q, D=problem.head_dim, BLOCK=BLOCK, **launch)\n"
    done = compared("--json", changed=(again, again + again))
    assert of(done)[:2] == (4, "inconclusive"), of(done)
    assert "copied_1, copied_2" in of(done)[2]
    assert [stage["name"] for stage in json.loads(done.stdout)["problems"][0]["stages"]] == [
        *("copied", "copied_1", "copied_2")
    ]

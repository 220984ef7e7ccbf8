"""attnsweep.tune and attnsweep.run from Python, in one file."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from sweeping import use

import attnsweep

SOURCE = """
// extern "C" __global__ void of_a_comment(int x)
extern "C" __global__ void __launch_bounds__(THREADS)
mine(const half* __restrict__ q, const half* k, const half* v, half* o, int heads, int seqlen_k,
     float scale) {}
"""
SHAPE = "1,2,256,64"
HOW = {
    "params": {"THREADS": (64, 128), "ROWS": (1, 2)},
    "grid": lambda config, problem: (problem.seqlen_q // config.ROWS, "heads"),
    "threads": "THREADS",
}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNSWEEP_CACHE_DIR", str(tmp_path / "cache"))
    made = FakeGpu()
    made.times = defaultdict(lambda: 10.0)
    return use(monkeypatch, made)


def test_a_kernel_in_a_text_is_swept_like_the_rest(gpu):
    outcome = attnsweep.tune(SOURCE, SHAPE, causal=True, **HOW)
    ours = [t for t in outcome.run.trials if t.provider == "attnsweep"]
    assert {(t.config["THREADS"], t.config["ROWS"]) for t in ours} == {
        (threads, rows) for threads in (64, 128) for rows in (1, 2)
    }
    assert outcome.exit_code == 0
    assert all(t.problem.causal and t.kernel == "mine" for t in ours)
    (said,) = outcome.sentences
    assert said.startswith("mine ")
    assert "(1,2,256,64) fp16 causal" in said
    assert [t.problem for t in attnsweep.winners(outcome.run)] == [ours[0].problem]


def launches(**how):
    """The launch of the first config, by way of the family."""
    from attnsweep.core.hardware import ARCHS
    from attnsweep.core.problem import Problem
    from attnsweep.family.family import Config
    from attnsweep.tools.inline import family_of

    given = {"args": None, "smem_bytes": 0, "rules": {}} | HOW | how
    kernel = family_of(given.pop("source", SOURCE), [Problem.parse(SHAPE)], **given)
    config = Config({param.name: param.values[0] for param in kernel.params})
    return kernel.launches(config, Problem.parse(SHAPE), ARCHS["sm_90a"])["tuned"]


def test_arguments_are_the_names_of_the_parameters(gpu):
    launch = launches()
    assert launch.args == ("q", "k", "v", "o", 2, 256, 0.125)
    assert (launch.function, launch.grid, launch.threads) == ("mine", (256, 2, 1), 64)


def test_arguments_may_be_names_numbers_and_functions(gpu):
    given = ("o", "batch", 7, 0.5, "ROWS", "seqlen", lambda config, problem: problem.heads * 3)
    how = {"grid": ("seqlen", 3), "smem_bytes": lambda config, problem: config.THREADS * 2}
    launch = launches(args=given, **how)
    assert launch.args == ("o", 1, 7, 0.5, 1, 256, 6)
    assert (launch.grid, launch.smem_bytes) == ((256, 3, 1), 128)


def test_rules_leave_out_configs_and_options_reach_the_compiler(gpu):
    rules = {"few threads": lambda config, problem, arch: config.THREADS < 128}
    how = {**HOW, "rules": rules, "compile_options": ("-use_fast_math",)}
    outcome = attnsweep.tune(SOURCE, SHAPE, **how)
    ours = [t for t in outcome.run.trials if t.provider == "attnsweep"]
    assert {t.config["THREADS"] for t in ours} == {64}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"source": "__global__ void f() {}"}, 'extern "C"'),
        ({"source": SOURCE + SOURCE.replace("mine", "other")}, "2 kernels"),
        ({"source": "absent.cu"}, "No such file"),
        ({"args": ("q", "length")}, "names the buffer 'length'"),
        ({"grid": lambda config, problem: problem.length}, "raised AttributeError"),
        ({"params": {"THREADS": (0.5,)}}, "whole numbers"),
        ({"supports": (("nothing", lambda problem: False),)}, "serves only nothing"),
    ],
)
def test_a_wrong_call_says_what_and_where(gpu, how, said):
    how = {"problem": SHAPE, "source": SOURCE, **HOW, **how}
    with pytest.raises(attnsweep.AttnsweepError) as caught:
        attnsweep.tune(how.pop("source"), how.pop("problem"), **how)
    assert said in caught.value.render()
    if "raised" in said or "buffer" in said or "whole" in said:
        assert Path(__file__).name in caught.value.render()


def test_a_shape_alone_has_the_shipped_families(gpu):
    outcome = attnsweep.tune(SHAPE, causal=True, kernels=["naive"], limit=2)
    assert {t.kernel for t in outcome.run.trials if t.provider == "attnsweep"} == {"naive"}
    assert all(t.problem.causal for t in outcome.run.trials)


def test_without_a_gpu_a_recording_answers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    outcome = attnsweep.tune("4,32,4096,64", dtype="bf16", replay="quickstart", results=tmp_path)
    assert outcome.exit_code == 0
    assert "(4,32,4096,64) bf16 full" in outcome.sentences[0]
    again = attnsweep.run("quickstart", results=tmp_path)
    assert len(again.sentences) == 2

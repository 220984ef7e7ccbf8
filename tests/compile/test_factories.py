"""Factories: functions that build a kernel for a problem and a config, swept and traced without a GPU."""

import importlib.util
import os
import runpy
import shutil
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use_gpu

import attnsweep
from attnsweep.baselines.backend import OtherCode
from attnsweep.baselines.called import Callables, _Configured, _watch_of
from attnsweep.compile.calls import build_of, tracers_of, with_calls
from attnsweep.compile.cubin import functions, resources
from attnsweep.compile.launches import CallPlan
from attnsweep.compile.nvrtc import Compiler
from attnsweep.compile.trace import Tracer
from attnsweep.compile.traced import others
from attnsweep.core.errors import CompileError, SpaceError, SpecError, Unavailable
from attnsweep.core.hardware import ARCHS, arch_named
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import BoundFunction, built
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan

missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"tracing needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]

TUNED = Path(__file__).parents[1] / "support/launchers/tuned.py"
LAUNCHERS = TUNED.with_name("factory.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
ARCH = arch_named("sm_90a")
PROBLEM = Problem(1, 2, 2, 256, 256, 16, "bf16")
SPEC = """
name: factories
arch: sm_90a
problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 16, dtype: bf16}]
kernels: {built: {call: 'factory.py:build?factory=true', BLOCK: [32, 128]}}
baselines: []
"""
CODE = """
extern "C" __global__ void __launch_bounds__(96) scaled(float* x, float by) {
    __shared__ float tile[96];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[95 - threadIdx.x] * by;
}
extern "C" __global__ void __launch_bounds__(1024) on_stack(float* x) {
    float all[200];
    for (int i = 0; i < 200; ++i) all[i] = x[i * 1024 + threadIdx.x];
    for (int i = 0; i < 200; ++i) x[(i * 7 + int(all[(i * 13) % 200])) % 200] = all[i] * all[199 - i];
}
"""


@pytest.fixture(scope="module", autouse=True)
def beside(place):
    shutil.copy(TUNED, place)


@pytest.fixture(scope="module")
def compiler(place):
    made = Compiler(ARCH, place / "cache")
    yield made
    made.close()


@pytest.fixture(scope="module")
def tracers(compiler):
    return tracers_of(compiler)


@pytest.fixture(scope="module")
def code(compiler, place):
    (place / "code.cu").write_text(CODE)
    return compiler.submit(place / "code.cu", {}).result()


def test_a_factory_is_built_with_a_config_and_what_it_returns_is_traced(tracers):
    tracer = tracers.of("factory.py:build?factory=true")
    small, large = (tracer.submit(PROBLEM, {"BLOCK": block}).result() for block in (32, 128))
    assert [launch.grid for made in (small, large) for _, _, launch in made.stages] == [(8, 2, 1), (2, 2, 1)]
    assert not small.why
    assert small.cases


def test_a_spec_of_factories_is_planned_as_it_says_what_it_supports(place, compiler, tracers):
    spec = with_calls(load_spec(place / "calls.yaml", discover), tracers)
    (planned,) = plan(spec, ARCH)
    (space,) = planned.spaces
    assert [dict(config) for config in space.configs] == [{"BLOCK": 32}, {"BLOCK": 128}]
    build = build_of(spec.families["built"], space.configs[0], PROBLEM, compiler)
    build.submit()
    assert build.facts["call"]["covers"] == "this binary"
    assert len(build.candidate().checks) == len(build.traced.cases) > 0
    of_one_shape = Future()
    of_one_shape.set_result(replace(build.traced, cases=()))
    build.futures["call"] = of_one_shape
    assert build.facts["call"]["covers"] == "this shape alone"
    assert build.candidate().checks == ()
    place.joinpath("causal.yaml").write_text(SPEC.replace("bf16}", "bf16, causal: true}"))
    with pytest.raises(SpaceError, match="built: only full"):
        plan(with_calls(load_spec(place / "causal.yaml", discover), tracers), ARCH)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("build", {"TILE": 1}, "is a factory and has no parameter TILE"),
        ("by_position", {}, "is a factory and has no parameter problem"),
        ("nothing", {}, "is a factory and returned no callable but NoneType"),
        ("of_no_problem", {}, "is a factory and has no parameter problem"),
        ("raises", {}, r"raised ValueError: no tile for 16 \(factory.py:\d+\)"),
    ],
)
def test_a_factory_that_builds_nothing_is_a_sentence(tracers, name, values, why):
    traced = tracers.of(f"factory.py:{name}?factory=true").submit(PROBLEM, values)
    with pytest.raises(CompileError, match=why):
        traced.result()


def test_a_factory_is_tried_with_values_that_a_spec_names(place, tracers):
    place.joinpath("none.yaml").write_text(SPEC.replace("build?", "of_tuned?").replace(", BLOCK: [32, 128]", ""))
    with pytest.raises(SpecError, match=r"no values for the factory: a spec names them, or attnsweep.tune\(params"):
        with_calls(load_spec(place / "none.yaml", discover), tracers)


def test_what_needs_a_card_compiles_at_its_first_call(tracers):
    traced = tracers.of("factory.py:of_a_card?factory=true").submit(PROBLEM, {}).result()
    assert traced.why
    assert not traced.stages


@pytest.mark.parametrize("name", ARCHS)
def test_a_cubin_says_what_ptxas_says_of_its_functions(name, place):
    compiler = Compiler(ARCHS[name], place / "cache")
    (place / "code.cu").write_text(CODE)
    made = compiler.submit(place / "code.cu", {}).result()
    compiler.close()
    told, read = functions(made.log), others.entries(made.path.read_bytes(), ARCHS[name])
    assert {(each, threads) for each, threads, _ in read} == {("scaled", 96), ("on_stack", 1024)}
    for each, _, log in read:
        facts = functions(log)[each]
        stack = facts.pop("spill_bytes")
        assert facts == {key: told[each][key] for key in facts}
        assert (stack >= 800) == (each == "on_stack")


def test_code_of_another_compiler_is_counted_and_launches_nothing(code, place, monkeypatch):
    monkeypatch.setenv("CODE", str(code.path))
    tracer = Tracer("factory.py:cached?factory=true", ARCH, place / "others", 1)
    try:
        one, same, other = (tracer.submit(PROBLEM, {"KEY": key}).result() for key in (1, None, 2))
        lost = Tracer("factory.py:forgotten?factory=true", ARCH, place / "others", 1)
        unknown = lost.submit(PROBLEM, {}).result()
        lost.close()
    finally:
        tracer.close()
    assert {name for name, _, _ in one.stages} == {"scaled", "on_stack"}
    assert resources(one.stages, ARCH).stages["scaled"]["threads"] == 96
    assert one.hashes == same.hashes == {"tilelang key 1"}
    assert other.hashes == {"tilelang key 2"}
    assert not one.cases  # each is of one shape
    assert unknown.why == "no machine code is kept of JITKernel"


def test_a_factory_builds_once_for_a_config_and_a_problem(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text("made = []\ndef build(*, problem, N=1):\n    made.append(N)\n    return lambda q: q\n")
    every, call = Callables(), f"{file}:build?factory=true"

    def built(n, problem=PROBLEM):
        return every.built(CallPlan(problem, call, {"N": n}, "", frozenset()))

    assert built(1) is built(1)
    assert built(1) is not built(2)
    built(1, Problem(1, 2, 2, 64, 64, 16, "bf16"))
    with pytest.raises(Unavailable, match="has no parameter M"):
        every.built(CallPlan(PROBLEM, call, {"M": 1}, "", frozenset()))
    module, _ = every.loaded(f"{file}:build")
    assert module.made == [1, 2, 1]


def test_cute_dsl_compiles_for_the_architecture_that_is_traced(monkeypatch, tmp_path):
    for name in ("ARCH", "KEEP_CUBIN", "DUMP_DIR"):
        monkeypatch.setenv(f"CUTE_DSL_{name}", "sm_100a")
    monkeypatch.setattr(others, "_descriptor", -1)
    key = Tracer("rows.py:build?factory=true", ARCH, tmp_path).versions
    others.ready("sm_90a", str(tmp_path))
    os.close(others._descriptor)
    assert os.environ["CUTE_DSL_ARCH"] == "sm_90a"
    assert "CUTE_DSL_ARCH" not in key


def test_code_of_another_config_is_told_and_variables_are_given_back(monkeypatch):
    import torch

    class JITKernel:
        def __init__(self, key):
            self._tilelang_cache_key = key

        def __call__(self, q):
            return q, os.environ["TILELANG_CACHE_DIR"]

    module = ModuleType("tilelang.jit.kernel")
    module.JITKernel = JITKernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("TILELANG_CACHE_DIR", "of the user")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    kernels = {}

    def build(*, problem, TILE):
        kernel = kernels.setdefault(problem, JITKernel(TILE))  # whatever TILE is the next time
        return lambda q, k, v: kernel(q)

    def called(tile):
        plan = CallPlan(PROBLEM, "f?factory=true", {"TILE": tile}, "of it", frozenset({f"tilelang {tile}"}))
        call = BoundFunction(torch, PROBLEM, plan.call, built(plan.call, build, PROBLEM, plan.config))
        launched = set()
        try:
            return _Configured(call, _watch_of({}, plan.cache, launched), launched, plan)(*"qkv")
        finally:
            assert (os.environ["TILELANG_CACHE_DIR"], os.environ.get("TRITON_CACHE_DIR")) == ("of the user", None)

    assert called(1) == ("q", "of it")
    with pytest.raises(OtherCode, match="launched other code than its config compiled to"):
        called(2)


@pytest.mark.parametrize("package", ["tilelang", "cutlass"])
def test_the_examples_compile(package, place, monkeypatch, programs):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    file, values = {"tilelang": ("tiles.py", {"TILE_M": 64}), "cutlass": ("rows.py", {"ROWS": 64})}[package]
    monkeypatch.chdir(EXAMPLES)
    tracer = Tracer(f"{file}:build?factory=true", ARCH, place / "examples", 1)
    try:
        made = tracer.submit(Problem.parse("(1,4/2,256,64) bf16 causal"), values).result()
    finally:
        tracer.close()
    assert not made.why
    used = resources(made.stages, ARCH)
    assert used.registers > 32
    assert used.spill_bytes == 0


def test_a_sweep_traces_each_config_once_however_slow_that_is(place, monkeypatch, tmp_path):
    asked, submit = [], Tracer.submit

    def noted(self, problem, values, **options):
        asked.append((problem.label, values["BLOCK"]))
        return submit(self, problem, values, **options)

    monkeypatch.setattr(Tracer, "submit", noted)
    use_gpu(monkeypatch, FakeGpu({"BLOCK=32": 20.0, "BLOCK=128": 30.0}, environment=TEST_GPU))
    attnsweep.run("calls.yaml", results=tmp_path, cache_dir=place / "cache")
    assert len(asked) == len({*asked}) > 2


def test_a_sweep_of_factories_is_resumed_and_its_winner_exported(place, monkeypatch, tmp_path):
    gpu = FakeGpu({"BLOCK=32": 20.0, "BLOCK=128": 30.0}, environment=TEST_GPU)
    use_gpu(monkeypatch, gpu)
    how = {"results": tmp_path, "cache_dir": place / "cache"}
    run = attnsweep.run("calls.yaml", **how).run
    rows = [trial for trial in run.trials if trial.kernel == "built"]
    assert {trial.call["function"] for trial in rows} == {"factory.py:build?factory=true"}
    tried = gpu.names("trial")
    assert attnsweep.run("calls.yaml", **how).run.directory == run.directory
    assert gpu.names("trial") == tried
    attnsweep.export([run.directory], tmp_path / "tiles.py")
    table = runpy.run_path(str(tmp_path / "tiles.py"))["TABLE"]
    assert table["function"] == "factory.py:build?factory=true"
    assert [entry["config"] for entry in table["entries"]] == [{"BLOCK": 32}]

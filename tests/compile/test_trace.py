"""Callables of the user's as families: their configs, and their kernels compiled without a GPU."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from attnsweep.compile import trace
from attnsweep.compile.calls import build_of, tracers_of, with_calls
from attnsweep.compile.cubin import resources
from attnsweep.compile.nvrtc import Compiler
from attnsweep.compile.trace import Tracer
from attnsweep.core.errors import CompileError, CompilerLost, KernelError, SpecError
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import plan
from attnsweep.tools.compile import compile_all
from attnsweep.tools.inspect import inspect_call, lines_of_call

# Nothing here imports them: the processes that trace do.
missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"tracing needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/tuned.py"
ARCH = arch_named("sm_90a")
SHORT, LONG = Problem(1, 2, 2, 64, 64, 16, "bf16"), Problem(1, 2, 2, 256, 256, 16, "bf16")
SPEC = """
name: calls
arch: sm_90a
problems:
  - {batch: 1, heads: 2, seqlen: 64, head_dim: 16, dtype: bf16}
  - {batch: 1, heads: 2, seqlen: 256, head_dim: 16, dtype: bf16}
kernels:
  tuned: {call: 'tuned.py:attention'}
  plain: {call: 'tuned.py:plain', BLOCK: [64, 96], num_warps: [null, 2]}
baselines: []
"""


@pytest.fixture(scope="module")
def compiler(place):
    made = Compiler(ARCH, place / "cache")
    yield made
    made.close()


@pytest.fixture(scope="module")
def tracers(compiler):
    """What traces the launchers in this file's tests: a process for each takes seconds to start."""
    return tracers_of(compiler)


def test_an_autotuner_says_its_configs_and_those_it_keeps(tracers):
    tracer = tracers.of("tuned.py:attention")
    (short,), (long,) = tracer.space(SHORT), tracer.space(LONG)
    assert short.name == "copied"
    assert [(c["BLOCK"], c["num_warps"]) for c in short.configs] == [(32, 1), (32, 4), (128, 1), (128, 4)]
    assert (len(short.kept), len(long.kept)) == (2, 4)


def test_a_config_is_compiled_once_with_what_it_launches(tracers, place):
    tracer, values = tracers.of("tuned.py:attention"), {"BLOCK": 128, "num_warps": 1}
    made = tracer.submit(LONG, values).result()
    ((name, cubin, launch),) = made.stages
    assert (name, launch.function, launch.grid, launch.threads) == ("copied", "copied", (2, 2, 1), 32)
    assert launch.args == ("torch.bfloat16 at 0", "torch.bfloat16 at 0", "256")
    assert resources(made.stages, ARCH).registers > 0
    assert made.hashes
    (group,) = made.cache.rglob("__grp__*")
    files = json.loads(group.read_text())["child_paths"]
    assert "copied.cubin" in files
    assert all(Path(file).is_file() and Path(file).is_relative_to(made.cache) for file in files.values())
    once = {path: path.stat().st_mtime_ns for path in place.rglob("*.cubin")}
    again = tracer.submit(LONG, values).result()
    assert again.stages[0][1].digest == cubin.digest
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.cubin")} == once
    for path in place.glob("cache/**/0.cubin"):
        (path.parent / "trace.json").write_text("{")  # a damaged entry is made again
    assert tracer.key(LONG, values) == tracer.key(LONG, values) != tracer.key(SHORT, values)


def test_small_cases_are_found_when_they_are_needed_without_compiling_again(tracers, place):
    tracer, problem, values = tracers.of("tuned.py:attention"), Problem(1, 2, 2, 512, 512, 16, "bf16"), {"BLOCK": 32}
    alone = tracer.submit(problem, values, cases=False).result()
    once = {path: path.stat().st_mtime_ns for path in alone.cache.rglob("*")}
    assert alone.cases is None
    whole = tracer.submit(problem, values).result()
    at_once = Tracer("tuned.py:attention", ARCH, place / "at_once")
    assert whole.cases == at_once.submit(problem, values).result().cases != ()
    at_once.close()
    assert (whole.stages[0][1].digest, whole.hashes) == (alone.stages[0][1].digest, alone.hashes)
    assert {path: path.stat().st_mtime_ns for path in whole.cache.rglob("*")} == once
    assert tracer.submit(problem, values, cases=False).result().cases == whole.cases, "kept"


def test_small_cases_that_are_asked_for_meanwhile_are_there(tracers):
    tracer, problem, values = tracers.of("tuned.py:attention"), Problem(1, 2, 2, 768, 768, 16, "bf16"), {"BLOCK": 32}
    _, whole = (tracer.submit(problem, values, cases=cases) for cases in (False, True))
    assert whole.result().cases


def test_a_config_that_is_asked_for_meanwhile_is_compiled_once(tracers, monkeypatch):
    """A sweep asks while the card starts, and again when the problem's turn has come."""
    tracer, problem, asked = tracers.of("tuned.py:attention"), Problem(1, 2, 2, 896, 896, 16, "bf16"), []
    ask = tracer._ask
    monkeypatch.setattr(tracer, "_ask", lambda do, **facts: asked.append(do) or ask(do, **facts))
    first, second = (tracer.submit(problem, {"BLOCK": 32}) for _ in range(2))
    assert first.result().hashes == second.result().hashes
    assert asked == ["trace"]
    with pytest.raises(CompileError):
        tracer.submit(problem, {"BLOCK": 7}).result()
    with pytest.raises(CompileError):  # what failed is tried again
        tracer.submit(problem, {"BLOCK": 7}).result()
    assert len(asked) == 3


def test_a_kernel_that_a_call_launches_twice_has_its_registers_twice(place, tracers):
    own = "    copied.fn[grid](q, out, problem.seqlen_q, D=problem.head_dim, BLOCK=BLOCK, **launch)\n"
    text = LAUNCHERS.read_text()
    assert own in text
    (place / "again.py").write_text(text.replace(own, own + own))
    made = tracers.of("again.py:plain").submit(SHORT, {"BLOCK": 64}).result()
    assert [name for name, _, _ in made.stages] == ["copied_1", "copied_2"]
    one, two = resources(made.stages, ARCH).stages.values()
    assert one == two


def test_what_a_file_depends_on_changes_the_address(place, tracers):
    (place / "mine.py").write_text(LAUNCHERS.read_text() + "# a comment\n")
    tracer, as_shipped = Tracer("mine.py:attention", ARCH, place / "cache"), tracers.of("tuned.py:attention")
    assert [Path(file).name for file in tracer.files] == ["mine.py"]
    assert tracer.key(SHORT, {}) != as_shipped.key(SHORT, {})
    tracer.close()
    tracer.files = dict(as_shipped.files)
    assert tracer.key(SHORT, {}) == as_shipped.key(SHORT, {}), "wherever the files lie"


def test_the_functions_own_file_counts_wherever_it_is_installed(place):
    tracer = Tracer("attnsweep.baselines.triton_kernel:attention", ARCH, place / "cache")
    assert [Path(file).name for file in tracer.files] == ["triton_kernel.py"]
    tracer.close()


def test_the_functions_own_file_is_the_first_of_its_closure(place):
    (place / "a_helper.py").write_text("")
    (place / "uses.py").write_text("import a_helper\n\ndef f(q, k, v):\n    return q\n")
    tracer = Tracer("uses.py:f", ARCH, place / "cache")
    assert [Path(file).name for file in tracer.files] == ["uses.py", "a_helper.py"]
    tracer.close()


FAULTS = {
    "aborts": "its process died (SIGABRT)",
    "hangs": "no answer within 3 s",
    "forks": "no answer within 3 s",
    "raises": "raised RuntimeError: no such tile",
    "mistypes": "has no attribute 'shap'",
    "does not compile": "power of 2",
    "prints": "no trace: a call launches no kernel",
    "reads": "no trace: tuned.py:faulty raised DataDependentOutput",
    "differentiates": "no trace: tuned.py:faulty raised RuntimeError",
    "makes a stream": "no trace: tuned.py:faulty raised ",  # what depends on PyTorch's build
    "waits": "no trace: tuned.py:faulty raised NoCard: synchronize",
    "asks for the cache": "no trace: tuned.py:faulty raised NoCard: L2_cache_size",
    "slices": "traced: copied",
    "leaves a process": "no trace: a call launches no kernel",
}


def test_a_launcher_that_fails_costs_its_config_alone(tracers, monkeypatch):
    tracer = tracers.of("tuned.py:faulty")
    asked, said = {}, {}
    for how in FAULTS:
        monkeypatch.setattr(trace, "_LIMIT_S", 3.0 if how in ("hangs", "forks") else 100.0)
        asked[how] = tracer.submit(SHORT, {"how": how})
    for how, future in asked.items():
        try:
            made = future.result()
            said[how] = f"no trace: {made.why}" if made.why else f"traced: {' '.join(name for name, *_ in made.stages)}"
        except CompileError as error:
            said[how] = f"{error.what}\n{error.log}"
    for how, why in FAULTS.items():
        assert why in said[how], how


def test_ctrl_c_is_the_parents_and_what_traces_leaves_nothing_running(programs, place):
    """A terminal sends it to both: what ended here left a launcher that hangs to itself."""
    tracer = Tracer("tuned.py:faulty", ARCH, place / "cache")
    lost = tracer.submit(SHORT, {"how": "hangs"})
    own = tracer._process.pid
    children = Path(f"/proc/{own}/task/{own}/children")
    while not (hanging := children.read_text().split()):
        time.sleep(0.01)
    os.kill(own, signal.SIGINT)
    with pytest.raises(CompileError, match="no such tile"):
        tracer.submit(SHORT, {"how": "raises"}).result(30)
    tracer.close()
    assert isinstance(lost.exception(0), CompilerLost)
    end = time.monotonic() + 10
    while any(map(_running, hanging)) and time.monotonic() < end:
        time.sleep(0.01)  # what is killed ends a moment later
    assert not any(map(_running, hanging))


def _running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_inspect_says_why_a_call_has_no_code_before_it_is_called(place):
    found = inspect_call("tuned.py:faulty", "how=reads", SHORT, ARCH, place / "cache")
    (config,) = found["configs"]
    assert (config["config"], config["stages"]) == ({"how": "reads"}, {})
    assert any(
        "it compiles when it is first called: tuned.py:faulty raised" in line for line in lines_of_call(found, 200)
    )


ASKS = """
import torch, triton
import tuned

DEVICE = triton.runtime.driver.active.get_active_torch_device()
HOPPER = torch.cuda.get_device_capability()[0] == 9

@torch.compile
def compiled(x):
    return x * 2

@torch.library.custom_op("asks::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    return tuned.attention(x, x, x, False)

hidden.register_fake(torch.empty_like)

def f(q, k, v, HOW="shown"):
    assert (DEVICE.type, HOPPER) == ("cuda", True)
    tuned.copied.fn[(1, 1)](q, torch.empty_like(q), 8, D=16, BLOCK=32)
    return {"shown": torch.empty_like, "compiled": compiled, "hidden": hidden}[HOW](q)
"""


def test_a_file_may_ask_for_the_card_while_it_is_imported_and_hide_kernels(place):
    (place / "asks.py").write_text(ASKS)
    tracer = Tracer("asks.py:f", ARCH, place / "cache")
    asked = [tracer.submit(SHORT, {"HOW": how}) for how in ("shown", "compiled", "hidden")]
    shown, *others = [future.result().why for future in asked]
    tracer.close()
    assert shown == ""
    assert "what torch.compile makes" in others[0]
    assert "asks::hidden may launch" in others[1]


def test_a_parameter_that_nobody_takes(tracers):
    with pytest.raises(CompileError, match="neither the function nor its autotuner has TILE; the autotuner has "):
        tracers.of("tuned.py:attention").submit(SHORT, {"TILE": 3}).result()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("tuned.py:missing", "missing is not in it; its functions are "),
        ("absent.py:f", r"absent.py is not there in /.*, where calls are looked for"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(place, call, says):
    with pytest.raises(KernelError, match=says):
        assert Tracer(call, ARCH, place / "cache").files


def test_files_of_the_working_directory_stand_for_no_modules_of_ours(programs, place, monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('it is not mine')")
    (tmp_path / "at_the_call.py").write_text("BLOCK = 32")
    called = "    from at_the_call import BLOCK\n    grid = (triton.cdiv(p"
    (tmp_path / "mine.py").write_text(LAUNCHERS.read_text().replace("    grid = (triton.cdiv(p", called))
    monkeypatch.chdir(tmp_path)
    tracer = Tracer("mine:plain", ARCH, tmp_path / "cache", 1)
    try:
        assert [name for name, *_ in tracer.submit(SHORT, {}).result().stages] == ["copied"]
    finally:
        tracer.close()


@pytest.mark.parametrize(("package", "project"), [("tilelang", "tilelang"), ("cutlass", "nvidia-cutlass-dsl")])
def test_without_another_compiler_the_sentence_names_its_project(place, package, project):
    (place / "absent_one.py").write_text(f"raise ModuleNotFoundError('none', name='{package}.language')")
    with pytest.raises(KernelError, match=f"none: pip install {project}$"):
        assert Tracer("absent_one.py:f?factory=true", ARCH, place / "cache").files
    raised = f"    raise ModuleNotFoundError('none', name='{package}.language')\n"
    (place / "absent_inside.py").write_text(f"def f(*, problem):\n{raised}")
    tracer = Tracer("absent_inside.py:f?factory=true", ARCH, place / "cache")
    with pytest.raises(CompileError, match=rf"none: pip install {project} \(absent_inside.py:2\)$"):
        tracer.submit(SHORT, {}).result()
    tracer.close()


def test_without_triton_the_sentence_names_the_remedy(programs, place, monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError('none', name='triton')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(KernelError, match="pip install torch triton"):
        assert Tracer("tuned.py:attention", ARCH, tmp_path / "cache").files


def test_a_spec_of_calls_is_planned(place, tracers):
    spec = load_spec(place / "calls.yaml", discover)
    (place / "again.yaml").write_text(spec.resolved(place))
    assert load_spec(place / "again.yaml", discover) == spec
    tuned, plain = plan(with_calls(spec, tracers), ARCH)[0].spaces
    assert (tuned.total, tuned.removed["prune_configs_by"]) == (4, 2)
    assert {*tuned.variants[tuned.configs[0]]} == {"config"}
    assert (plain.total, plain.removed["keep"]) == (4, 2)


def test_problems_that_a_call_does_not_take_are_refused(place, tracers):
    problem = "  - {batch: 1, heads: 2, seqlen: 64, head_dim: 16, dtype: bf16, op: backward}\n"
    more = f"{problem}kernels:\n  gradients: {{call: 'tuned.py:gradients', BLOCK: [32]}}"
    (place / "refused.yaml").write_text(SPEC.replace("kernels:", more))
    forward, _, gradient = plan(with_calls(load_spec(place / "refused.yaml", discover), tracers), ARCH)
    assert {space.kernel.name for space in forward.spaces} == {"tuned", "plain"}
    assert forward.refused == {"gradients": "it takes the tensors of a backward"}
    assert [space.kernel.name for space in gradient.spaces] == ["gradients"]
    assert {why.partition(":")[0] for why in gradient.refused.values()} == {"it takes no tensors of a backward"}


def test_a_spec_of_calls_is_compiled(programs, place):
    (place / "plain.yaml").write_text(SPEC.replace("  tuned: {call: 'tuned.py:attention'}\n", ""))
    rows = compile_all(load_spec(place / "plain.yaml", discover), ARCH, cache_dir=place / "cache")
    assert {row.status for row in rows} == {Status.OK}
    assert [dict(row.config) for row in rows] == 2 * [{"BLOCK": 64, "num_warps": None}, {"BLOCK": 64, "num_warps": 2}]
    assert all(row.resources.stages["copied"]["registers"] > 0 for row in rows)


def test_configs_of_equal_machine_code_are_known(place, compiler, tracers):
    """num_warps as Triton has it, said or not: the cubins differ in nothing that is loaded."""
    plain = with_calls(load_spec(place / "calls.yaml", discover), tracers).families["plain"]
    codes = []
    for values in ({"BLOCK": 64}, {"BLOCK": 64, "num_warps": 4}, {"BLOCK": 64, "num_warps": 2}):
        build = build_of(plain, values, SHORT, compiler)
        build.submit()
        codes.append(build.machine_code())
    assert codes[0] == codes[1] != codes[2]


def test_a_call_without_an_autotuner_needs_parameters(place, tracers):
    (place / "none.yaml").write_text(SPEC.replace("tuned.py:attention", "tuned.py:plain"))
    with pytest.raises(SpecError, match="launches no autotuner"):
        with_calls(load_spec(place / "none.yaml", discover), tracers)

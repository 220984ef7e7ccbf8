"""The public API: what it names, what it costs to import, and that scripts use nothing else."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import FakeGpu
from sweeping import use

import attnsweep
from attnsweep.bench.gpu import WorkerError
from attnsweep.core.hardware import ARCHS
from attnsweep.regress.ab_test import Ended, compare

PACKAGE = Path(attnsweep.__file__).parent
ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
# Scripts about what is inside: machine code of two trees, and the package that attnsweep holds.
INSIDE = {"same_sass.py", "winners.py"}
RUN = ROOT / "results" / "h100-80gb-hbm3" / "flash_long"
PROGRAMS = sorted(
    path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.py") if path.name not in INSIDE
)


@pytest.mark.parametrize("name", attnsweep.__all__)
def test_a_public_name_imports_and_says_what_it_is(name):
    value = getattr(attnsweep, name)
    assert not inspect.ismodule(value)  # a room of that name would hide the function
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__


@pytest.mark.parametrize("name", ["explain", "counters", "register"])
def test_the_name_that_an_exported_package_has_leads_to_ours(name):
    assert f'"{name}",' in (PACKAGE / "serve/runtime/package.py").read_text()
    with pytest.raises(AttributeError, match=f"no {name}, .* its name here is (.*)") as raised:
        getattr(attnsweep, name)
    assert str(raised.value).split()[-1] in attnsweep.__all__
    with pytest.raises(AttributeError, match="attnsweep attribute absent"):
        _ = attnsweep.absent


def test_the_stub_lists_what_it_imports():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imported = [a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    (listed,) = (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign))
    assert sorted(listed) == sorted(imported) == sorted(attnsweep.__all__)


# -- what importing costs ---------------------------------------------------------------------

COMMAND = """
import contextlib, io, json, sys
import attnsweep
if sys.argv[1:]:
    from attnsweep.cli import main
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
sys.__stdout__.write(json.dumps(sorted(sys.modules)))
"""
SLOW = {"pandas", "numpy", "pydantic", "yaml", "cupy", "torch", "jinja2"}


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        ([], {*SLOW, "typer", "rich"}),
        (["--version"], SLOW),
        (["--help"], SLOW),
        (["list"], {"pandas", "cupy", "torch", "jinja2"}),
    ],
    ids=["import", "--version", "--help", "list"],
)
def test_starting_imports_only_what_is_needed(arguments, unwanted):
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not unwanted & set(json.loads(done.stdout))


# -- what scripts and benchmarks use ----------------------------------------------------------


def names_used(path: Path) -> set[str]:
    """Every name that a file takes from the package itself, not from the modules it stands in."""
    tree = ast.parse(path.read_text())
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "attnsweep"
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "attnsweep":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in aliases else set()
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_program_takes_from_the_package_is_public(path):
    assert names_used(path) <= {*attnsweep.__all__, "__version__"}


def test_constants_that_a_benchmark_repeats_are_those_of_the_package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from attnsweep.choose import race

    assert importlib.import_module("stability").REPLAY_US == race.RACE_US


def test_builds_are_limited_by_family_and_problem(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: attnsweep[compile]")
    monkeypatch.setenv("ATTNSWEEP_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "spec.yaml"
    shapes = "{batch: 1, heads: 1, seqlen: [32, 64], head_dim: 64}"
    file.write_text(f"problems: [{shapes}]\nkernels: {{naive: {{}}}}\nbaselines: []\n")
    spec = attnsweep.load_spec(file)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    setting = importlib.import_module("setting")
    found = setting.builds(spec, "sm_90a", limit=1)
    assert [build.problem.seqlen_q for build in found] == [32, 64]
    for build in found:
        assert build.candidate().timed.problem == build.problem
    rows = [build.row(status="ok") for build in found]
    again = setting.rebuild(rows, spec.families, ARCHS["sm_90a"])
    assert [b.machine_code() for b in again] == [b.machine_code() for b in found]
    gone = rows[0].with_(kernel="nosuch")
    other = rows[0].with_(config={**rows[0].config, "NOSUCH": 1})
    assert setting.rebuild([gone, other], spec.families, ARCHS["sm_90a"]) == []


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_candidate_that_cannot_run_ends_the_comparison(side):
    class Broken:
        def forget(self, name):
            pass

        def add(self, name, candidate, *, cold):
            if name == side:
                raise WorkerError(attnsweep.Status.LAUNCH_ERROR, "no such cubin")

    gpu = Broken()
    with pytest.raises(Ended, match="no such cubin") as caught:
        compare(gpu, lambda: gpu, None, None, slower=0.03, budget_s=60, seed="")
    assert ("baseline" in str(caught.value)) == (side == "old")


# -- how it is shipped and described ----------------------------------------------------------


def test_the_page_names_every_public_name():
    cells = "".join(line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)", cells)) == set(attnsweep.__all__)


@pytest.mark.parametrize("shown", re.findall(r"^\| `(\w+\(.*?\))` \|", PAGE, re.MULTILINE))
def test_a_signature_on_the_page_is_that_of_the_code(shown):
    name = shown.split("(")[0]
    signature = inspect.signature(getattr(attnsweep, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    signature = signature.replace(parameters=bare, return_annotation=signature.empty)
    assert shown == f"{name}{signature}".replace("'", '"')


def test_what_the_page_shows_of_a_recorded_run_works(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = re.search(r"```python\n(from attnsweep import open_run.*?)```", PAGE, re.DOTALL)[1]
    exec(code, {})
    assert "ratio_to_best_baseline" in capsys.readouterr().out


# ---- attnsweep.tune and attnsweep.run from Python, in one file ----
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
        ({"args": ("q", "length")}, "names the buffer 'length'"),
        ({"params": {"THREADS": (0.5,)}}, "whole numbers"),
        ({"supports": (("nothing", lambda problem: False),)}, "serves only nothing"),
    ],
)
def test_a_wrong_call_says_what_and_where(gpu, how, said):
    how = {"problem": SHAPE, "source": SOURCE, **HOW, **how}
    with pytest.raises(attnsweep.AttnsweepError) as caught:
        attnsweep.tune(how.pop("source"), how.pop("problem"), **how)
    assert said in caught.value.render()
    if "buffer" in said or "whole" in said:
        assert Path(__file__).name in caught.value.render()


def test_a_script_without_a_guard_of_main_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('import attnsweep\nprint("once")\nattnsweep.tune("1,2,64,64")\n')
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "once\n"
    assert "NoGpuError" in done.stderr


def test_a_file_with_a_callable_that_sweeps_where_it_is_imported_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import attnsweep, multiprocessing\n"
        "def child():\n    attnsweep.tune('1,2,64,64')\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('fork').Process(target=child, daemon=True)\n"
        "    process.start(), process.join()\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "put the call below `if __name__" in done.stderr.strip().splitlines()[-1]


def test_a_shape_alone_has_the_shipped_families(gpu):
    outcome = attnsweep.tune(SHAPE, causal=True, kernels="naive", limit=np.int64(2))
    assert {t.kernel for t in outcome.run.trials if t.provider == "attnsweep"} == {"naive"}
    assert all(t.problem.causal for t in outcome.run.trials)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit, tmp_path):
    """0 was no limit, and -1 left out the last candidate."""
    with pytest.raises(attnsweep.SpecError, match="at least 1"):
        attnsweep.run("quickstart", limit=limit, results=tmp_path)


@pytest.mark.parametrize("slower", [float("nan"), -0.03])
def test_a_share_that_no_winner_could_exceed_is_refused(slower):
    run = attnsweep.open_run(RUN)
    with pytest.raises(attnsweep.SpecError, match=r"between 0\.1% and 50%"):
        attnsweep.compare_runs(run, run, slower=slower)


def test_one_run_need_not_stand_in_a_list_nor_be_a_path():
    """The characters of a string were taken for runs, of which the first is the whole disk."""
    for runs in (str(RUN), [RUN]):
        with pytest.raises(attnsweep.StoreError) as caught:
            attnsweep.export(runs, "configs.py")
        assert caught.value.where == str(RUN)
    assert attnsweep.find_runs(str(RUN)) == [RUN]
    assert attnsweep.latest_run(str(RUN)).directory == RUN


def test_without_a_gpu_a_recording_answers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    outcome = attnsweep.tune("4,32,4096,64", dtype="bf16", replay="quickstart", results=tmp_path)
    assert outcome.exit_code == 0
    assert "(4,32,4096,64) bf16 full" in outcome.sentences[0]
    again = attnsweep.run("quickstart", results=tmp_path)
    assert len(again.sentences) == 2
    assert str(again) == "\n".join(again.sentences)
    assert len(repr(again)) < 300  # an interactive Python prints it

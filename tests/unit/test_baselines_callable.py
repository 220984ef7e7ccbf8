"""`module:function` as a baseline: how it is found, called and told apart when its file changes."""

import os
import sys
from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import attnsweep
from attnsweep.baselines import prepare
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.registry import backend_of
from attnsweep.core.callables import Asked
from attnsweep.core.errors import SpecError
from attnsweep.core.problem import Problem, Scores
from attnsweep.core.user_code import imported, source_digest, user_modules
from attnsweep.specs.load import load_spec

PROBLEM = Problem(1, 2, 2, 8, 8, 64, "bf16")
SOURCE = """
def plain(q, k, v):
    return ("plain", q, k, v)

def knows(q, k, v, *, problem):
    return (problem.label, q, k, v)

def facts(q, k, v, causal, sm_scale=None):
    return (causal, sm_scale)

number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_attn.py").write_text(SOURCE)
    yield tmp_path / "mine_attn.py"
    sys.modules.pop("mine_attn", None)


def forward(name):
    (way,) = backend_of(name).ways(None, PROBLEM, None)
    return way.forward


def test_a_function_of_the_working_directory_is_called_with_the_problem_if_it_takes_one(mine):
    assert forward("mine_attn:plain")("q", "k", "v") == ("plain", "q", "k", "v")
    assert forward("mine_attn:knows")("q", "k", "v") == (PROBLEM.label, "q", "k", "v")


def test_a_function_without_problem_gets_the_facts_that_it_has_parameters_for(mine):
    assert forward("mine_attn:facts")("q", "k", "v") == (PROBLEM.causal, PROBLEM.scale)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine_attn:missing", "missing is not in it; its functions are plain, "),
        ("mine_attn:number", "number is no callable but int; its functions are plain, "),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_called_is_unavailable_with_the_reason(mine, name, says):
    with pytest.raises(Unavailable, match=says):
        forward(name)


def test_a_module_that_fails_while_it_is_imported_is_unavailable(mine):
    mine.write_text("1 / 0")
    with pytest.raises(Unavailable, match="ZeroDivisionError"):
        forward("mine_attn:plain")


def test_a_changed_file_has_another_digest_and_a_missing_one_none(mine):
    before = source_digest("mine_attn:plain")
    mine.write_text(SOURCE + "# changed")
    assert before != source_digest("mine_attn:plain") is not None
    assert source_digest("no_such_module:f") is None


def test_annotations_of_a_file_are_what_they_say_and_no_text(tmp_path):
    """Compilers of kernels ask for them: which parameters are constants."""
    (tmp_path / "mine_annotated.py").write_text("def f(q: int):\n    pass\n")
    _, function = imported(str(tmp_path / "mine_annotated.py:f"))
    assert function.__annotations__ == {"q": int}


@pytest.mark.parametrize("record", [b"caf\xe9.py,,\n", b'"' + b"a" * 200_000 + b'.py",,\n'], ids=["bytes", "long"])
def test_a_list_of_installed_files_that_cannot_be_read_ends_nothing(tmp_path, monkeypatch, record):
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info/RECORD").write_bytes(record)
    module = ModuleType("beside_odd")
    module.__file__ = str(tmp_path / "beside_odd.py")
    monkeypatch.setitem(sys.modules, "beside_odd", module)
    assert user_modules()["beside_odd"] == module.__file__


def test_all_that_is_imported_and_not_installed_is_the_users(tmp_path, monkeypatch):
    for folder in ("beside", "installed/filled", "installed/filled-1.0.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    listed = ("filled/__init__.py", "filled/inner.py", '"filled/vendored/python/deep/__init__.py"')
    record = "".join(f"{file},sha256=0,1\n" for file in listed)
    (tmp_path / "installed/filled-1.0.dist-info/RECORD").write_text(record)
    files = {
        "in_checkout": Path(attnsweep.__file__).parents[1] / "ours.py",
        "beside.inner": tmp_path / "beside/inner.py",
        "filled": tmp_path / "installed/filled/__init__.py",
        "filled.inner": tmp_path / "installed/filled/inner.py",
        "deep": tmp_path / "installed/filled/vendored/python/deep/__init__.py",
        "mine_among_them": tmp_path / "installed/mine_among_them.py",
        "attnsweep.own": Path(attnsweep.__file__).parent / "own.py",
    }
    for name, file in files.items():
        module = ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    assert {*files} & {*user_modules()} == {"in_checkout", "beside.inner", "mine_among_them"}


def test_a_digest_runs_no_code_not_even_of_a_package(mine, tmp_path):
    for name in ("runs_code", "runs_code/inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('ran', 'w'); raise SystemExit")
        (tmp_path / name / "attn.py").write_text(SOURCE)
    digests = {source_digest(f"{name}:f") for name in ("runs_code.attn", "runs_code.inner.attn", "mine_attn")}
    assert len(digests - {None}) == 1
    assert source_digest("runs_code.nowhere:f") is source_digest("mine_attn.runs_code:f") is None
    assert not (tmp_path / "ran").exists()


def test_a_digest_asks_finders_for_a_modules_whole_name_if_they_can_be_asked(mine, monkeypatch):
    """As those of an editable install of a part of a namespace; and of Python 2 there are some."""

    class OfWholeNames:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_file_location(name, mine) if name == "elsewhere.attn" else None

    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path, OfWholeNames])
    assert source_digest("elsewhere.attn:f") == source_digest("mine_attn:f") is not None


def test_a_problem_that_it_cannot_do_is_refused_before_anything_is_imported():
    assert backend_of("no_such_module:f").supports(PROBLEM) is None
    capped = replace(PROBLEM, scores=Scores(softcap=50.0))
    assert "has no softcap" in str(backend_of("no_such_module:f").supports(capped))
    assert prepare.Unavailable is Unavailable


def spec(tmp_path, baselines):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "problems: [{batch: 1, heads: 1, seqlen: 64, head_dim: 64}]\n"
        f"kernels: {{naive: {{}}}}\nbaselines: {baselines}\n"
    )
    return load_spec(path)


@pytest.mark.parametrize("name", ["my_pkg.attn:", "my pkg:f", "a:b:c", "torch-flash"])
def test_what_is_neither_known_nor_a_callable_is_an_error(tmp_path, name):
    with pytest.raises(SpecError, match="MODULE:FUNCTION"):
        spec(tmp_path, f"['{name}']")


def test_a_function_of_a_file_is_found_with_what_lies_beside_it(mine, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "beside_it.py").write_text("ANSWER = 'beside'\n")
    own = "import beside_it\n\ndef f(q, k, v):\n    return beside_it.ANSWER\n"
    (tmp_path / "kernels" / "my_file.py").write_text(own)
    assert forward("kernels/my_file.py:f")("q", "k", "v") == "beside"
    assert source_digest("kernels/my_file.py:f") is not None
    for missing in ("kernels/none.py:f", "kernels/my_file.py:g"):
        with pytest.raises(Unavailable, match=f"cannot import {missing}"):
            forward(missing)


def test_a_file_is_run_as_it_is_however_soon_it_was_edited(tmp_path):
    file = tmp_path / "soon.py"
    for value in (32, 64):  # as long, and of one second: what Python keeps of the first looks right
        file.write_text(f"def attend():\n    return {value}\n")
        os.utime(file, (1e9, 1e9))
        module, attend = imported(f"{file}:attend")
        assert (attend(), module.__file__) == (value, str(file))


def test_a_module_says_what_it_supports_and_prepares_before_any_call(mine):
    mine.write_text(
        SOURCE + "seen = []\nprepare = seen.append\n"
        "def supports(problem):\n    return problem.causal or 'only causal'\n"
    )
    with pytest.raises(Unavailable, match=r"does not support it: only causal"):
        forward("mine_attn:plain")
    (way,) = backend_of("mine_attn:plain").ways(None, Problem(1, 2, 2, 8, 8, 64, causal=True), None)
    assert way.forward("q", "k", "v") == ("plain", "q", "k", "v")
    assert len(sys.modules["mine_attn"].seen) == 1


def test_scales_of_fp8_are_keywords(mine):
    mine.write_text("def f(q, k, v, **options):\n    return (q, k, v, options)\n")
    fp8 = Problem(1, 2, 2, 8, 8, 64, "e4m3")
    (way,) = backend_of("mine_attn:f").ways(None, fp8, None)
    *values, options = way.forward("q", "k", "v", "of q", "of k", "of v")
    assert values == ["q", "k", "v"]
    assert options == {"problem": fp8, "q_scale": "of q", "k_scale": "of k", "v_scale": "of v"}


@pytest.mark.parametrize(
    "name",
    [
        *("a.b:c", "mine=a.b:c", "x/y.py:f?layout=bshd", "m:f?strict=true"),
        "a=b:c?graph=false&layout=bshd&workspace=7&strict=true",
    ],
)
def test_how_a_callable_is_asked_for_is_its_name(name):
    assert str(Asked.of(name)) == name


def test_a_spec_says_how_a_callable_is_called(tmp_path):
    path = tmp_path / "sweep.yaml"
    text = (
        "problems: [{batch: 1, heads: 1, seqlen: 64, head_dim: 64}]\nkernels: {naive: {}}\n"
        "baselines: {theirs: {call: 'a:b'}}\n"
        "candidates: {mine: {call: 'm:f', graph: true, layout: bshd, workspace: 2 GiB, "
        "strict: true}}\n"
    )
    path.write_text(text)
    asked = load_spec(path)
    assert (asked.baselines, [*map(Asked.of, asked.candidates)]) == (
        ("theirs=a:b",),
        [Asked("m:f", "mine", True, "bshd", 2**31, True)],
    )
    path.write_text(asked.resolved(tmp_path))
    assert load_spec(path).candidates == asked.candidates
    for right, wrong, says in (
        ("graph: true", "grph: true", "4:34: unknown key 'grph'\n  did you mean 'graph'?"),
        ("call: 'm:f', ", "", "4:20: 'call' is missing"),
        ("'m:f'", "'mf'", "4:27: call cannot be 'mf'\n  write a callable as MODULE:FUNCTION"),
        ("bshd", "shbd", r"4:\d+: layout cannot be shbd\n  did you mean 'bshd'"),
        ("2 GiB", "2 GB B", r"4:\d+: workspace must be a number of bytes or a size"),
        ("strict: true", "strict: maybe", r"4:\d+: strict must be true or false, not maybe"),
        ("strict: true", "strict:\n    7", r"5:5: strict must be true or false, not 7"),
        ("call: 'a:b'}", "call: 'a:b', strict: true}", "3:35: unknown key 'strict'"),
        ("{theirs: {call: 'a:b'}}", "['a:b?strict=true']", r"3:13: .*\n  strict is for candidates"),
        ("mine:", "Mine!:", "4:21: Mine! cannot name a callable\n  take a-z"),
    ):
        path.write_text(text.replace(right, wrong))
        with pytest.raises(SpecError, match=says):
            load_spec(path)


def test_a_spec_names_callables_that_are_judged_and_none_is_a_baseline_too(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "problems: [{batch: 1, heads: 1, seqlen: 64, head_dim: 64}]\nkernels: {naive: {}}\n"
        "baselines: [torch_flash, 'a.b:c']\ncandidates: ['a.b:c', 'dir/x.py:f']\n"
    )
    asked = load_spec(path)
    assert (asked.baselines, asked.candidates) == (("torch_flash",), ("a.b:c", "dir/x.py:f"))
    again = tmp_path / "again.yaml"
    again.write_text(asked.resolved(tmp_path))
    assert load_spec(again).candidates == asked.candidates
    path.write_text(path.read_text().replace("'a.b:c', 'dir", "torch_flash, 'dir"))
    with pytest.raises(SpecError, match=r"MODULE:FUNCTION or FILE\.py:FUNCTION"):
        load_spec(path)

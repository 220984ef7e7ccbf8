"""Recorded calls as problems of a spec: merging, sorting, reasons, text; needs no PyTorch."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnsweep.cli import app
from attnsweep.cli.program import install
from attnsweep.core.errors import NoGpuError, SpecError, StoreError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import Problem, Scores
from attnsweep.family.discover import discover
from attnsweep.serve.recorded_calls import Recorded, layout_of, lines_of, read, refuse, run_name_of, sort, spec_text
from attnsweep.serve.recorder import log as recorder_log
from attnsweep.serve.recorder.log import Log
from attnsweep.specs.load import load_spec, spec_of
from attnsweep.specs.starter import Target
from attnsweep.specs.yaml_file import Document

FAMILIES = discover()
HOPPER = Target(ARCHS["sm_90a"])
FLASH = "_scaled_dot_product_flash_attention"


def kind(q=(1, 32, 4096, 128), k=(1, 8, 4096, 128), v=None, **changes):
    """A call that FlashAttention serves on a GPU."""
    facts = {"op": FLASH, "q": [*q], "k": [*k], "v": [*(v or k)], "dtype": "bfloat16"}
    facts |= {"device": "cuda", "causal": False, "dropout": False, "grad": False}
    bshd = [(n[1] * n[2] * n[3], n[3], n[1] * n[3], 1) for n in (q, k)] if len(q) == 4 else None
    return facts | {"strides": bshd} | changes


def sorted_(*calls, top=50):
    return sort(Recorded(calls, 1, True), HOPPER, FAMILIES, top)


def only(*args, **changes):
    """The problem of one kind of call, or the reason why it has none."""
    got = sorted_((kind(*args, **changes), 3))
    if got.problems:
        return next(iter(got.problems))
    (call,) = got.unserved
    return call.reason


def test_a_call_is_a_problem():
    assert only() == Problem(1, 32, 8, 4096, 4096, 128, "bf16")
    assert only(dtype="float16", causal=True) == Problem(1, 32, 8, 4096, 4096, 128, "fp16", causal=True)
    assert only(v=(1, 8, 4096, 64)) == Problem(1, 32, 8, 4096, 4096, 128, "bf16", head_dim_v=64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": True}, "dropout"),
        ({"mask": "mask"}, "a float mask of another dtype than q's; a boolean one can be served"),
        ({"mask": "mask", "boolean": [], "causal": True}, "a mask beside is_causal"),
        ({"mask": "unknown"}, "an arbitrary mask"),
        ({"mask": "causal"}, "is_causal=True can be served"),
        ({"mask": "full"}, "attn_mask=None can be served"),
        ({"mask": "bias"}, "a float mask of another dtype"),
        ({"dtype": "float64"}, "dtype float64 is not one of fp16, bf16, fp32"),
        ({"device": "xpu"}, "on device xpu"),
        ({"q": [32, 64, 128], "k": [32, 64, 128], "v": [32, 64, 128]}, "3 dimensions"),
        ({"v": [1, 8, 4096, 300]}, "head_dim_v 300"),
        ({"v": [1, 8, 4096, 0]}, "a size is 0"),
        ({"k": [2, 8, 4096, 128]}, "broadcast"),
        ({"k": [1, 7, 4096, 128], "v": [1, 7, 4096, 128]}, "32 heads are no multiple of 7"),
        ({"q": [99999, 32, 4096, 128], "k": [99999, 8, 4096, 128]}, "its tensors need 7,812 GiB"),
        ({"k": [1, 8, 0, 128], "v": [1, 8, 0, 128]}, "a size is 0"),
        ({"q": [1, 2, 64, 1000], "k": [1, 2, 64, 1000], "v": [1, 2, 64, 1000]}, "head_dim 1000 is not one of"),
        ({"traced": True}, "how often they ran is unknown"),
        ({"beyond": True}, "more kinds of calls"),
    ],
)
def test_a_call_that_nothing_serves_has_a_reason(changes, reason):
    assert reason in only(**changes)


@pytest.mark.parametrize(
    ("facts", "label", "note"),
    [
        ({"mask": "unknown", "boolean": ["item"]}, "boolean(full,item)", "not looked at"),
        ({"mask": "full", "boolean": [], "window": [None, None]}, "boolean(full)", "hid nothing"),
        ({"mask": "causal", "boolean": [], "window": [None, 0]}, "boolean(causal)", "was causal"),
        (
            {"mask": "mask", "boolean": ["item", "head"], "window": [511, 0]},
            "boolean(window(511,0),item,head)",
            "may hide more",
        ),
        ({"mask": "bias", "bias": []}, "full bias()", ""),
        ({"mask": "mask", "bias": ["item", "head"]}, "full bias(item,head)", ""),
        ({"mask": "causal", "bias": ["item"]}, "full bias(item)", "is_causal=True can be served"),
        ({"v": [1, 8, 4096, 64], "grad": True}, "full", "with gradients"),
    ],
)
def test_a_mask_is_a_problem_that_hides_no_more(facts, label, note):
    got = sorted_((kind(**facts), 3))
    (problem,) = got.problems
    assert problem.mask.label + problem.scores.label == label
    assert note in " ".join(got.problems[problem].notes)
    text = spec_text(got, "model", HOPPER, FAMILIES)
    (entry,) = spec_of(Document.parse(Path("model.yaml"), text), FAMILIES).problems
    assert (entry.problem, entry.calls) == (problem, 3)
    assert "torch_efficient, flex" in text


def test_causal_with_two_lengths_is_a_problem_only_if_aligned_bottom_right():
    q, k = (1, 8, 16, 64), (1, 8, 64, 64)
    assert only(q, k, causal=True) == Problem(1, 8, 8, 16, 64, 64, "bf16", causal=True)
    efficient = "_scaled_dot_product_efficient_attention"
    assert "aligned top-left" in only(q, k, causal=True, op=efficient)
    assert "seqlen_q 64 > seqlen_k 16" in only(k, q, causal=True)


def test_a_head_dim_that_was_padded_is_the_models_own():
    padded = kind((1, 8, 64, 128), (1, 8, 64, 128), scale=122**-0.5)
    (call,) = sorted_((padded, 1)).unserved
    assert call.call == "(1,8,64,122) bf16 full"


def test_calls_on_the_cpu_count_only_where_there_are_none_on_a_gpu():
    on_cpu = kind(device="cpu")
    assert sorted_((on_cpu, 5)).calls == 5
    both = sorted_((on_cpu, 5), (kind((1, 8, 64, 64), (1, 8, 64, 64)), 2))
    assert (both.calls, [each.reason for each in both.unserved]) == (2, ["on device cpu"])


def test_kinds_of_one_problem_are_one_problem_and_the_costliest_is_first():
    few = kind((1, 8, 64, 64), (1, 8, 64, 64))
    packed = [(4096 * 6144, 128, 6144, 1)] * 2
    got = sorted_((few, 10), (kind(), 3), (kind(strides=packed, grad=True), 4))
    big = Problem(1, 32, 8, 4096, 4096, 128, "bf16")
    small = Problem(1, 8, 8, 64, 64, 64, "bf16")
    assert [*got.problems] == [big, replace(big, op=BACKWARD), small]
    assert got.problems[big].calls == 7
    assert [*got.problems[big].notes] == ["bshd", "packed", "with gradients"]


def test_a_call_with_gradients_is_a_forward_and_a_backward_and_counts_once():
    bias = kind(mask="bias", bias=["head"], grad=True)
    got = sorted_((kind(grad=True), 4), (kind(), 2), (bias, 1), (kind(grad=True, dropout=True), 5))
    forward = Problem(1, 32, 8, 4096, 4096, 128, "bf16")
    backward = replace(forward, op=BACKWARD)
    biased = replace(forward, scores=Scores(bias=("head",)))
    calls = {of: served.calls for of, served in got.problems.items()}
    assert calls == {forward: 6, backward: 4, biased: 1}
    assert got.calls == 7
    text = spec_text(got, "model", HOPPER, FAMILIES)
    spec = spec_of(Document.parse(Path("model.yaml"), text), FAMILIES)
    assert {entry.problem for entry in spec.problems} == {*got.problems}
    cut = sorted_((kind(grad=True), 4), (kind((1, 8, 64, 64), (1, 8, 64, 64)), 9), top=1)
    assert ([*cut.problems], cut.calls) == ([forward, backward], 4)


def test_beyond_top_the_cheapest_are_left_out_and_counted():
    grown = [(kind((1, 8, 1, 64), (1, 8, n, 64)), 2) for n in range(1, 101)]
    got = sorted_(*grown, top=10)
    assert len(got.problems) == 10
    assert got.calls + sum(each.calls for each in got.unserved) == 200
    assert got.unserved[-1].call == "40 more shapes"
    assert got.unserved[-1].calls == 80
    assert "10 costliest" in got.unserved[-1].reason


def test_the_text_is_a_spec_that_keeps_calls_notes_and_what_is_not_served():
    got = sorted_((kind(scale=0.5, repeats=4), 64), (kind(dropout=True), 2))
    text = spec_text(got, "model", HOPPER, FAMILIES)
    spec = spec_of(Document.parse(Path("model.yaml"), text), FAMILIES)
    (entry,) = spec.problems
    assert (entry.problem, entry.calls) == (Problem(1, 32, 8, 4096, 4096, 128, "bf16"), 64)
    assert "calls: 64} # bshd, k holds each of 2 heads 4 times: enable_gqa" in text
    (call,) = spec.unserved
    assert (call.call, call.calls, call.reason) == ("(1,32/8,4096,128) bf16 full", 2, "dropout")
    again = spec_of(Document.parse(Path("model.yaml"), spec.resolved()), FAMILIES)
    assert again == spec
    assert (again.problems[0].calls, again.unserved) == (64, spec.unserved)


def test_calls_of_several_entries_add_up_and_change_no_sweep(tmp_path):
    path = tmp_path / "s.yaml"
    entry = "{batch: 1, heads: 2, seqlen: 64, head_dim: 64"
    for calls in ("", ", calls: 3"):
        entries = f"  - {entry}, calls: 4}}\n  - {entry}{calls}}}\n"
        path.write_text(f"problems:\n{entries}kernels: {{naive: }}\n")
        spec = load_spec(path)
        assert spec.problems[0].calls == 4 + (3 if calls else 0)
    path.write_text(f"problems:\n  - {entry}}}\nkernels: {{naive: }}\n")
    assert load_spec(path) == spec
    path.write_text(f"problems:\n  - {entry}, calls: 0}}\nkernels: {{naive: }}\n")
    with pytest.raises(SpecError, match="calls"):
        load_spec(path)


# -- the files of the recorder --------------------------------------------------------------


def test_processes_merge(tmp_path):
    for count in (2, 5):
        log = Log(tmp_path)
        slot = log.slot(kind())
        assert log.slot(kind()) == slot
        log.add(slot, count)
    log.add(log.slot(kind(causal=True)))
    log.slot(kind(dropout=True))  # seen, never counted
    got = read(tmp_path)
    assert got.processes == 2
    assert sorted(count for _, count in got.calls) == [1, 7]


def test_a_killed_process_leaves_its_counts_and_half_a_line_is_dropped(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from attnsweep.serve.recorder.log import Log\n"
        "log = Log(Path(sys.argv[1])); slot = log.slot({'op': 'x'})\n"
        "for _ in range(1000): log.add(slot)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    (lines,) = tmp_path.glob("*.jsonl")
    lines.write_text(lines.read_text() + '{"op": "ha')
    assert read(tmp_path).calls == [({"op": "x"}, 1000)]


def test_kinds_beyond_the_slots_are_counted_together(tmp_path, constants):
    constants(recorder_log, SLOTS=4)
    log = Log(tmp_path)
    for n in range(6):
        log.add(log.slot({"op": str(n)}))
    assert ({"beyond": True}, 3) in read(tmp_path).calls


def test_what_is_said_of_a_recording():
    nothing = Recorded([], 0, False)
    assert lines_of(sort(nothing, HOPPER, FAMILIES), nothing) == [
        "no attention call was recorded: no process imported PyTorch, or only under python -I, -E "
        "or -S, which hide it from us"
    ]
    some = Recorded([(kind(), 1200), (kind(dropout=True), 3)], 2, True, ("RuntimeError: x",))
    assert lines_of(sort(some, HOPPER, FAMILIES), some) == [
        "1,203 attention calls of 2 processes: 1,200 in 1 problem; 3 have none:",
        "  3 × (1,32/8,4096,128) bf16 full: dropout",
        some.way,
        "recording failed in a process: RuntimeError: x",
    ]


@pytest.mark.parametrize(
    ("stride", "layout"),
    [
        ((8 * 64 * 32, 64 * 32, 32, 1), "bhsd"),
        ((8 * 64 * 32, 32, 8 * 32, 1), "bshd"),
        ((3 * 8 * 64 * 32, 32, 3 * 8 * 32, 1), "packed"),
        ((8 * 64 * 32, 64 * 32, 1, 64), "strided"),
        ((0, 64 * 32, 32, 1), "strided"),
    ],
)
def test_layouts(stride, layout):
    assert layout_of((2, 8, 64, 32), stride) == layout


# -- the command ----------------------------------------------------------------------------


def test_a_file_that_is_there_is_refused(tmp_path):
    out = tmp_path / "Model v2.yaml"
    out.write_text("mine")
    with pytest.raises(SpecError, match="is there already"):
        refuse(out, False)
    refuse(out, True)
    with pytest.raises(SpecError, match=r"no \.yaml file") as refused:
        refuse(Path(sys.executable), True)
    assert "OUT.yaml -- COMMAND" in refused.value.hint
    with pytest.raises(StoreError, match="is a directory"):
        refuse(tmp_path, False)
    assert run_name_of(out) == "model-v2"


@pytest.mark.parametrize(
    ("name", "why"), [("no/m6.yaml", "no: No such file"), ("file/m6.yaml", "file: Not a directory")]
)
def test_a_folder_that_is_missing_is_named_with_the_reason(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    done = shapes(name, "--arch", "sm_90a", *python("open('ran', 'w')"))
    assert f"{name}: cannot be written: {why}" in str(done.exception)
    assert "make that folder first" in done.exception.hint
    assert not (tmp_path / "ran").exists()


def shapes(*arguments):
    return CliRunner().invoke(app, ["shapes", *map(str, arguments)])


def python(*lines):
    return ["--", sys.executable, "-c", "\n".join(lines)]


# A program that leaves what a recorder does, without PyTorch: sitecustomize is on its path.
CALLS = (
    "import os, json, struct, pathlib",
    "folder = pathlib.Path(os.environ['PYTHONPATH'].split(os.pathsep)[0])",
    f"(folder / '1.jsonl').write_text(json.dumps({kind()!r}) + chr(10))",
    "(folder / '1.counts').write_bytes(struct.pack('QQ', 42, 0))",
)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_command_with_an_architecture_is_said(tmp_path):
    out = tmp_path / "model.yaml"
    done = shapes(out, *python("raise SystemExit('it ran')"))
    assert isinstance(done.exception, NoGpuError)
    again = f"say for which: attnsweep shapes {out} --arch sm_90a -- {sys.executable} -c"
    assert again in done.exception.hint
    assert not out.exists()


@pytest.mark.parametrize(
    ("code", "end"), [(0, "raise SystemExit(0)"), (3, "raise SystemExit(3)"), (128 + 9, "os.kill(os.getpid(), 9)")]
)
def test_the_exit_code_is_the_programs_and_the_spec_is_written(tmp_path, capfd, code, end):
    out = tmp_path / "model.yaml"
    done = shapes(out, "--arch", "sm_90a", *python(*CALLS, end))
    assert done.exit_code == code
    assert load_spec(out).problems[0].calls == 42


def test_ctrl_c_ends_the_program_and_keeps_what_was_recorded(tmp_path):
    out = tmp_path / "model.yaml"
    code = python(*CALLS, "import time; print('up', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "attnsweep", "shapes", str(out), "--arch", "sm_90a", *code]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=50)
    assert child.returncode == 128 + signal.SIGINT, said
    assert "42 attention calls" in said
    assert load_spec(out).problems[0].calls == 42


def test_without_a_call_nothing_is_written(tmp_path):
    out = tmp_path / "model.yaml"
    assert shapes(out, "--arch", "sm_90a", *python("pass")).exit_code == 1
    assert not out.exists()


def test_a_command_that_is_none(tmp_path):
    done = shapes(tmp_path / "m.yaml", "--arch", "sm_90a", "--", "no-such-program")
    assert isinstance(done.exception, SpecError)
    assert "cannot be started" in str(done.exception)


def test_the_programs_own_sitecustomize_runs_and_its_path_is_kept(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.own = 1\n")
    (tmp_path / "helper.py").write_text("")
    folder = tmp_path / "hook"
    folder.mkdir()
    code = (
        "import helper, sys, sitecustomize; assert own == 1; assert sys.argv[2] not in sys.path\n"
        "assert sitecustomize.__file__ == sys.argv[1] + '/sitecustomize.py'"
    )
    install(folder)
    path = os.pathsep.join([str(folder), str(tmp_path)])
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(folder)], env=os.environ | {"PYTHONPATH": path}, check=True
    )


def test_the_recorder_needs_nothing_but_python_and_pytorch():
    import ast

    names = set()
    for path in Path(recorder_log.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"torch"}


def test_nested_tensors_are_no_problem():
    shape = [None] * 4
    nested = {"op": FLASH, "q": shape, "k": shape, "v": shape, "dtype": "bfloat16"}
    (call,) = sorted_((nested | {"device": "cuda", "nested": True}, 3)).unserved
    assert (call.call, call.calls, call.reason) == ("(?,?,?,?) bf16", 3, "nested tensors")


def test_tensors_of_a_class_and_calls_in_a_graph_are_said():
    own = {"op": FLASH, "q": [None] * 4, "k": [None] * 4, "v": [None] * 4, "dtype": "bfloat16"}
    (call,) = sorted_((own | {"device": "cuda", "class": "DTensor"}, 3)).unserved
    assert "tensors of class DTensor; --every-call" in call.reason
    (served,) = sorted_((kind(captured=True), 1)).problems.values()
    assert "captured in a CUDA graph once: its replays are not counted" in served.notes

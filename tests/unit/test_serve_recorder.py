"""The recorder on PyTorch itself, on the CPU: eager and compiled, counts and kinds of calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnsweep
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.serve.recorded_calls import read
from attnsweep.serve.recorder import dispatcher, eager
from attnsweep.serve.recorder.recorder import Recording
from attnsweep.specs.load import load_spec

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("needs torch.library.get_kernel", allow_module_level=True)
from attention_calls import counts  # noqa: E402  (it needs PyTorch)

F = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own


def tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


@pytest.fixture
def recorded(tmp_path):
    recording = Recording(tmp_path)

    def stop():
        recording.stop()
        got = read(tmp_path)
        assert not got.errors
        return got.calls

    yield stop
    recording.stop()


def test_eager_calls_are_counted_by_kind_and_keep_their_result(recorded):
    q, k = tensor(2, 8, 64, 32), tensor(2, 2, 64, 32)
    got = [F.scaled_dot_product_attention(q, k, k, enable_gqa=True) for _ in range(5)]
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
    calls = recorded()
    assert torch.equal(got[0], F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    assert [(c["q"], c["k"], c["causal"], n) for c, n in calls] == [
        ([2, 8, 64, 32], [2, 2, 64, 32], False, 5),
        ([2, 8, 64, 32], [2, 8, 64, 32], True, 1),
    ]


def test_compiled_calls_count_when_they_run_also_with_gradients_and_growing_shapes(recorded):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def block(x):
        return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1

    for _ in range(7):
        block(tensor(1, 4, 64, 32))
    for _ in range(3):
        x = tensor(1, 4, 64, 32).requires_grad_()
        block(x).sum().backward()
        assert x.grad is not None
    for seqlen in (65, 66, 67, 68):
        block(tensor(1, 4, seqlen, 32))
    seen = {}
    for call, n in recorded():
        assert call["causal"]
        seen[call["q"][2]] = seen.get(call["q"][2], 0) + n
    assert seen == {64: 10, 65: 1, 66: 1, 67: 1, 68: 1}


def test_what_was_compiled_inside_is_no_longer_recorded_outside(recorded):
    torch._dynamo.reset()
    block = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x))
    x = tensor(1, 2, 64, 32)
    block(x)
    calls = recorded()
    block(x)
    assert [n for _, n in calls] == [1]


def test_a_call_compiled_into_plain_operations_is_traced_and_not_counted_as_run(recorded):
    torch._dynamo.reset()
    block = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    block(tensor(1, 2, 64, 32))
    calls = recorded()
    assert calls
    assert all(call["traced"] for call, _ in calls)


def test_dropout_masks_scales_layouts_and_gradients(recorded):
    q = tensor(1, 4, 64, 32)
    lower = torch.ones(64, 64, dtype=torch.bool).tril()
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    # The values of the first mask of each kind of call are looked at, so each has its own batch.
    masks = (lower, torch.zeros(64, 64), torch.randn(64, 64), lower.flip(0))
    for batch, mask in enumerate(masks, 2):
        x = tensor(batch, 4, 64, 32)
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    F.scaled_dot_product_attention(q, q, q, scale=0.5)
    F.scaled_dot_product_attention(q, q, q.clone().requires_grad_())
    F.scaled_dot_product_attention(q.clone().requires_grad_(), q, q)
    packed = tensor(1, 64, 3, 4, 32).unbind(2)
    F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in packed))
    calls = [call for call, _ in recorded()]
    assert [call.get("mask") for call in calls if "mask" in call] == [
        *("causal", "full", "bias", "mask"),
    ]
    assert [call["dropout"] for call in calls] == [True, *(len(calls) - 1) * [False]]
    assert sum(call.get("scale", False) for call in calls) == 1
    assert sum(call["grad"] for call in calls) == 1
    assert calls[-1]["layout"] == ["packed", "packed"]


def test_repeated_keys_are_seen(recorded):
    q, k = tensor(1, 8, 64, 32), tensor(1, 2, 64, 32).repeat_interleave(4, 1)
    F.scaled_dot_product_attention(q, k, k)
    other = tensor(2, 8, 64, 32)
    F.scaled_dot_product_attention(other, other, other)
    zeros = torch.zeros(1, 8, 64, 32)
    F.scaled_dot_product_attention(zeros.clone(), zeros, zeros, is_causal=True)
    assert [call.get("repeats") for call, _ in recorded()] == [4, None, None]


def test_an_operator_that_is_no_attention_runs_no_line_of_ours(recorded):
    q, k, v = tensor(3, 1, 2, 64, 32)
    F.scaled_dot_product_attention(q, k, v)
    ran = []

    def profile(frame, event, _):
        if Path(frame.f_code.co_filename).parent == Path(dispatcher.__file__).parent:
            ran.append(event)

    sys.setprofile(profile)
    try:
        F.layer_norm(q @ k.mT + v.sum(), [64]).unsqueeze(0).add_(1)
        others = len(ran)
        F.scaled_dot_product_attention(q, k, v)
    finally:
        sys.setprofile(None)
    assert others == 0
    assert ran


@pytest.mark.parametrize("theirs", [False, True])
def test_only_a_kernel_of_python_that_was_there_is_given_a_set_of_keys(
    tmp_path, monkeypatch, theirs
):
    """To make the set costs more than all that we do, and no kernel of PyTorch's own reads it."""
    there = {f"aten/{name}/{key}" for name, op in dispatcher.OPS.items() for key in op.keys}
    monkeypatch.setattr(torch.library, "_impls", there if theirs else set())
    with_keys, own = set(), torch.library.Library.impl

    def impl(self, *args, with_keyset=False, **options):
        with_keys.add(with_keyset)
        return own(self, *args, with_keyset=with_keyset, **options)

    monkeypatch.setattr(torch.library.Library, "impl", impl)
    assert [n for _, n in counts(tmp_path, [({}, tuple(tensor(3, 1, 2, 8, 32)))] * 3)] == [3]
    assert with_keys == {theirs}


def test_recordings_in_recordings_count_for_themselves(tmp_path):
    folders, recordings = (tmp_path / "outer", tmp_path / "inner"), []
    q, k, v = tensor(3, 1, 2, 8, 32)
    for folder in folders:
        folder.mkdir()
        recordings.append(Recording(folder))
        F.scaled_dot_product_attention(q, k, v)
    for recording in reversed(recordings):
        recording.stop()
        F.scaled_dot_product_attention(q, k, v)
    assert [[n for _, n in read(folder).calls] for folder in folders] == [[3], [1]]


@pytest.mark.parametrize("missing", ["guards", "keys"])
def test_without_pytorchs_private_classes_calls_count_too(tmp_path, monkeypatch, missing):
    if missing == "guards":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(dispatcher, "_set_of", lambda *_: None)
    q, k, v = tensor(3, 1, 2, 8, 32)
    assert [n for _, n in counts(tmp_path, [({}, (q, k, v))] * 50)] == [50]


def test_more_kinds_than_are_known_by_a_question_count_too(tmp_path, monkeypatch):
    monkeypatch.setattr(eager, "_MOST_KNOWN", 2)
    kinds = [({}, tuple(tensor(3, 1, 2, seqlen, 32))) for seqlen in range(8, 13)]
    calls = [kind for kind in kinds for _ in range(50)] * 2
    assert [n for _, n in counts(tmp_path, calls)] == [100] * 5


def test_causal_bias_and_function_modes_still_work(recorded):
    from torch.nn.attention.bias import causal_lower_right

    q, k = tensor(1, 2, 8, 32), tensor(1, 2, 16, 32)
    lower = torch.ones(8, 16, dtype=torch.bool).tril(8)
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=lower)
    got = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(8, 16))
    torch.testing.assert_close(got, want)
    assert {call["mask"] for call, _ in recorded()} == {"causal"}


def test_an_error_of_the_recorder_is_kept_and_the_program_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatcher, "kind_of", lambda *_: 1 / 0)
    recording = Recording(tmp_path)
    q = tensor(1, 2, 8, 32)
    try:
        assert F.scaled_dot_product_attention(q, q, q).shape == q.shape
        assert F.scaled_dot_product_attention(q, q, q).shape == q.shape
    finally:
        recording.stop()
    (error,) = read(tmp_path).errors
    assert "ZeroDivisionError" in error


def test_the_context_manager_writes_a_spec_also_after_an_error(tmp_path, capsys):
    path, q = tmp_path / "model.yaml", tensor(1, 2, 64, 64, dtype=torch.bfloat16)

    def program():
        with attnsweep.shapes(path, arch="sm_90a"):
            F.scaled_dot_product_attention(q, q, q)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        program()
    assert load_spec(path).problems[0].calls == 1
    assert "1 attention call: 1 in 1 problem" in capsys.readouterr().err
    with pytest.raises(SpecError, match="is there already"), attnsweep.shapes(path, arch="sm_90a"):
        raise AssertionError("not reached")
    with attnsweep.shapes(path, arch="sm_90a", force=True):
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    assert load_spec(path).problems[0].calls == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_the_architecture_must_be_given(tmp_path):
    with pytest.raises(NoGpuError, match="no GPU"), attnsweep.shapes(tmp_path / "m.yaml"):
        raise AssertionError("not reached")


def test_the_command_records_every_process_of_an_unchanged_program(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "model.yaml"
    program.write_text(
        "import multiprocessing, os, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "def work(n):\n"
        "    q = torch.randn(1, 4, 64, 64, dtype=torch.bfloat16)\n"
        "    for _ in range(n): torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "if __name__ == '__main__':\n"
        "    work(1)\n"
        "    for how, n in (('fork', 10), ('spawn', 100)):\n"
        "        p = multiprocessing.get_context(how).Process(target=work, args=(n,))\n"
        "        p.start(); p.join()\n"
        "    work(1000)\n"
        "    os._exit(7)\n"
    )
    command = ["shapes", str(out), "--arch", "sm_90a", "--", sys.executable, str(program)]
    done = subprocess.run(
        [sys.executable, "-m", "attnsweep", *command],
        timeout=120,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 7
    assert "overrid" not in done.stderr  # PyTorch warns of that
    assert load_spec(out).problems[0].calls == 1111


def test_importing_attnsweep_imports_no_torch():
    code = "import sys, attnsweep; attnsweep.shapes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)

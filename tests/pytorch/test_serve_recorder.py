"""The recorder on PyTorch itself, on the CPU: counts and kinds of calls, by both ways."""

import copy
import functools
import io
import pickle
import random
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import attnsweep
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.serve.recorded_calls import read
from attnsweep.serve.recorder.log import Log
from attnsweep.specs.load import load_spec

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("needs torch.library.get_kernel", allow_module_level=True)
from attention_calls import OWN, counts, every_change, qkv, recorded  # noqa: E402  (PyTorch's)
from operators import Watch  # noqa: E402

from attnsweep.serve.recorder.recorder import Recording  # noqa: E402

F = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own
both_ways = pytest.mark.parametrize("every_call", [False, True])


@both_ways
def test_calls_are_counted_by_kind_and_keep_their_result(tmp_path, every_call):
    q, k = qkv(2, 8, 64, 32)[0], qkv(2, 2, 64, 32)[0]
    results = []

    def program(_):
        for _ in range(5):
            results.append(F.scaled_dot_product_attention(q, key=k, value=k, enable_gqa=True))
        F.scaled_dot_product_attention(q, q, q, None, 0.0, True)

    calls = recorded(tmp_path, program, every_call).calls
    assert torch.equal(results[0], F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    assert [(c["q"], c["k"], c["causal"], n) for c, n in calls] == [
        ([2, 8, 64, 32], [2, 2, 64, 32], False, 5),
        ([2, 8, 64, 32], [2, 8, 64, 32], True, 1),
    ]


@both_ways
@pytest.mark.parametrize("context", ["no_grad", "enable_grad", "inference_mode", "device", "bf16"])
def test_kinds_that_differ_in_one_thing_are_counted_apart(tmp_path, context, every_call):
    kinds = list(every_change(*qkv()))
    drawn = random.Random(0).choices(kinds, k=300) + kinds
    enter = {"device": lambda: torch.device("cpu"), "bf16": lambda: torch.autocast("cpu", torch.bfloat16)}.get(
        context
    ) or getattr(torch, context)

    def program(_):
        with enter():
            for options, tensors in drawn:
                F.scaled_dot_product_attention(*tensors, **options)

    got = counts(tmp_path, program, every_call=every_call)
    assert sum(got) == len(drawn)
    # Autocast makes one dtype of two, and without gradients those kinds are one.
    same = (context == "bf16") + (context in ("no_grad", "inference_mode"))
    assert len(got) == len(kinds) - same


def test_compiled_calls_are_said_to_be_missed_and_compile_as_pytorchs_own(tmp_path):
    torch._dynamo.reset()
    x = qkv()[0]
    block = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) + 1, fullgraph=True)

    def program(_):
        torch.testing.assert_close(block(x), torch._C._nn.scaled_dot_product_attention(x, x, x) + 1)
        block(x)
        F.scaled_dot_product_attention(x, x, x)

    got = recorded(tmp_path, program)
    assert [n for _, n in got.calls] == [1]
    assert got.compiled
    assert "torch.compile compiled attention" in got.way
    assert not recorded(tmp_path, lambda _: torch._C._nn.scaled_dot_product_attention(x, x, x)).compiled


def test_with_every_call_compiled_calls_count_when_they_run(tmp_path):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def block(x):
        return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1

    def program(_):
        for _ in range(7):
            block(qkv(1, 4, 64, 32)[0])
        for _ in range(3):
            x = qkv(1, 4, 64, 32)[0].requires_grad_()
            block(x).sum().backward()
            assert x.grad is not None
        for seqlen in (65, 66, 67, 68):
            block(qkv(1, 4, seqlen, 32)[0])

    seen = {}
    got = recorded(tmp_path, program, every_call=True)
    for call, n in got.calls:
        assert call["causal"]
        seen[call["q"][2]] = seen.get(call["q"][2], 0) + n
    assert seen == {64: 10, 65: 1, 66: 1, 67: 1, 68: 1}
    assert "every call" in got.way


def test_a_call_compiled_into_plain_operations_is_traced_and_not_counted_as_run(tmp_path):
    torch._dynamo.reset()
    block = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    calls = recorded(tmp_path, lambda _: block(qkv()[0]), every_call=True).calls
    assert calls
    assert all(call["traced"] for call, _ in calls)


@both_ways
def test_dropout_masks_scales_layouts_and_gradients(tmp_path, every_call):
    q = qkv(1, 4, 64, 32)[0]
    lower = torch.ones(64, 64, dtype=torch.bool).tril()
    packed = torch.randn(1, 64, 3, 4, 32).unbind(2)

    def program(_):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        # The values of the first mask of each kind are looked at, so each has its own batch.
        masks = (lower, torch.zeros(64, 64), torch.randn(64, 64), lower.flip(0))
        for batch, mask in enumerate(masks, 2):
            x = qkv(batch, 4, 64, 32)[0]
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        F.scaled_dot_product_attention(q, q, q, scale=0.5)
        F.scaled_dot_product_attention(q, q, q.clone().requires_grad_())
        F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in packed))

    calls = [call for call, _ in recorded(tmp_path, program, every_call).calls]
    assert [call.get("mask") for call in calls if "mask" in call] == [*("causal", "full", "bias", "mask")]
    assert [call["bias"] for call in calls if call.get("mask") == "bias"] == [[]]
    assert [call["dropout"] for call in calls] == [True, *(len(calls) - 1) * [False]]
    assert sum(call["scale"] == 0.5 for call in calls) == 1
    assert sum(call["grad"] for call in calls) == 1
    assert calls[-1]["strides"] == [[64 * 384, 32, 384, 1]] * 2


ROW, KEY = torch.arange(64)[:, None], torch.arange(80)
BOOLEAN = {
    "all": (torch.ones(64, 80) > 0, {"boolean": [], "window": [None, None], "top_left": False}),
    "causal": (ROW + 16 >= KEY, {"boolean": [], "window": [None, 0], "top_left": False}),
    "top-left": (ROW >= KEY, {"boolean": [], "window": [None, 0], "top_left": True}),
    "window": (((ROW + 16 - KEY).abs() <= 5)[None, None], {"boolean": [], "window": [5, 5], "top_left": False}),
    "padded": (
        (ROW + 16 >= KEY) & (KEY < torch.tensor([30, 80])[:, None, None, None]),
        {"boolean": ["item"], "window": [None, 0], "top_left": False},
    ),
    "of keys": (
        (KEY > 60).expand(1, 4, 1, 80).contiguous(),
        {"boolean": ["head"], "window": [None, None], "top_left": False},
    ),
    "holes": ((ROW >= KEY) & (KEY % 7 != 0), {"boolean": [], "window": [None, 0], "top_left": True}),
    "none": (torch.zeros(64, 80) > 0, {"boolean": []}),
}


@both_ways
@pytest.mark.parametrize("what", BOOLEAN)
def test_boolean_masks_are_facts_of_a_problem(tmp_path, what, every_call):
    """The operators get them as numbers, 0 and minus infinity."""
    mask, facts = BOOLEAN[what]
    q, k = qkv(2, 4, 64, 32)[0], qkv(2, 4, 80, 32)[0]
    ((call, count),) = recorded(tmp_path, lambda _: F.scaled_dot_product_attention(q, k, k, mask), every_call).calls
    names = ("boolean", "window", "top_left")
    assert {name: call[name] for name in names if name in call} == facts
    assert count == 1


def test_masks_of_numbers_are_none_of_a_kernel(tmp_path):
    """Only of PyTorch's operators nobody knows what the program gave."""
    x = qkv(2, 4, 64, 32)[0]
    for value, boolean in ((-torch.inf, True), (torch.finfo(torch.float32).min, False)):
        mask = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).tril() == 0, value)
        for every_call in (False, True):
            ((call, _),) = recorded(
                tmp_path, lambda _, m=mask: F.scaled_dot_product_attention(x, x, x, m), every_call
            ).calls
            assert call["mask"] == "causal"
            assert ("boolean" in call) == (boolean and every_call)


def test_masks_that_differ_in_form_are_kinds_of_their_own(tmp_path):
    x = qkv(2, 4, 64, 32)[0]
    one = torch.ones(64, 64).tril() > 0

    def program(_):
        for mask in (one, one.expand(2, 1, 64, 64), one.repeat(2, 1, 1, 1), one.float()) * 2:
            F.scaled_dot_product_attention(x, x, x, mask)

    assert counts(tmp_path, program) == [4, 2, 2]


@both_ways
def test_repeated_keys_are_seen(tmp_path, every_call):
    q, k = qkv(1, 8, 64, 32)[0], qkv(1, 2, 64, 32)[0].repeat_interleave(4, 1)
    other, zeros = qkv(2, 8, 64, 32)[0], torch.zeros(1, 8, 64, 32)

    def program(_):
        F.scaled_dot_product_attention(q, k, k)
        F.scaled_dot_product_attention(other, other, other)
        F.scaled_dot_product_attention(zeros.clone(), zeros, zeros, is_causal=True)

    calls = recorded(tmp_path, program, every_call).calls
    assert [call.get("repeats") for call, _ in calls] == [4, 1, 1]


def test_tensors_without_values_are_counted(tmp_path):
    tensors = qkv(1, 2, 8, 32, device="meta")
    mask = torch.zeros(8, 8, device="meta")
    calls = recorded(tmp_path, lambda _: F.scaled_dot_product_attention(*tensors, attn_mask=mask)).calls
    assert [(call["mask"], n) for call, n in calls] == [("unknown", 1)]


def test_causal_bias_works_and_is_counted_as_what_it_calls(tmp_path):
    from torch.nn.attention.bias import causal_lower_right

    q, k = qkv(1, 2, 8, 32)[0], qkv(1, 2, 16, 32)[0]
    lower = torch.ones(8, 16, dtype=torch.bool).tril(8)
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=lower)
    compiled = torch.compile(lambda q, k, mask: F.scaled_dot_product_attention(q, k, k, mask), fullgraph=True)

    def program(_):
        mask = causal_lower_right(8, 16)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, attn_mask=mask), want)
        torch.testing.assert_close(compiled(q, k, mask), want)

    torch._dynamo.reset()
    calls = recorded(tmp_path, program).calls
    assert [(call["mask"], n) for call, n in calls] == [("causal", 1)]


def test_what_stands_in_the_place_is_pytorchs_function_to_a_program(tmp_path):
    """No class makes it a method, tables find it by either, and it can be sent and copied."""

    class Attention:
        call = F.scaled_dot_product_attention

    class Its(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return table.get(func)

    table, name, text = {OWN: "its own"}, OWN.__name__, OWN.__doc__

    def program(_):
        ours = Attention.call = F.scaled_dot_product_attention
        assert ours is not torch._C._nn.scaled_dot_product_attention
        Attention().call(*qkv())
        assert copy.copy(ours) is ours
        assert copy.deepcopy(ours) is ours
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert (ours.__name__, ours.__doc__) == (name, text)
        theirs = [each.as_subclass(Its) for each in qkv()]
        assert F.scaled_dot_product_attention(*theirs) == "its own"

    assert counts(tmp_path, program) == [1]
    assert Attention().call(*qkv()).shape == (1, 2, 64, 32)


@pytest.mark.parametrize("form", ["closure", "default", "partial", "attribute", "of a class"])
def test_code_that_holds_what_stood_in_the_place_compiles(tmp_path, form):
    def program(_):
        ours = F.scaled_dot_product_attention
        bound = functools.partial(ours, is_causal=False)

        class Holds(torch.nn.Module):
            of_class = ours

            def __init__(self):
                super().__init__()
                self.own = ours

            def forward(self, x):
                return (self.own if form == "attribute" else self.of_class)(x, x, x) + 1

        blocks = {
            "closure": lambda x: ours(x, x, x) + 1,
            "default": lambda x, own=ours: own(x, x, x) + 1,
            "partial": lambda x: bound(x, x, x) + 1,
        }
        block = torch.compile(blocks.get(form) or Holds(), backend="eager", fullgraph=True)
        x = qkv()[0]
        torch.testing.assert_close(block(x), torch._C._nn.scaled_dot_product_attention(x, x, x) + 1)

    torch._dynamo.reset()
    assert recorded(tmp_path, program).compiled


@pytest.mark.parametrize("every_call", [False, True])
def test_recordings_in_recordings_count_for_themselves(tmp_path, every_call):
    folders, recordings = (tmp_path / "outer", tmp_path / "inner"), []
    for folder in folders:
        folder.mkdir()
        recordings.append(Recording(Log(folder), every_call))
        F.scaled_dot_product_attention(*qkv())
    for one in reversed(recordings):
        one.stop()
        F.scaled_dot_product_attention(*qkv())
    assert [[n for _, n in read(folder).calls] for folder in folders] == [[3], [1]]
    assert F.scaled_dot_product_attention is OWN


def test_a_package_that_is_enabled_takes_the_place_and_every_call_counts(tmp_path):
    from attnsweep.serve.runtime.sdpa_patch import Routing

    def routed(*args, **kwargs):
        return torch._C._nn.scaled_dot_product_attention(*args, **kwargs)

    def program(_):
        F.scaled_dot_product_attention(*qkv())
        with Routing(routed).enable():
            assert F.scaled_dot_product_attention is routed
            F.scaled_dot_product_attention(*qkv())
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        F.scaled_dot_product_attention(*qkv())

    got = recorded(tmp_path, program)
    assert sum(n for _, n in got.calls) == 3
    assert got.every_call


def test_a_function_that_others_replaced_is_theirs_and_ours_still_works(tmp_path):
    recording = Recording(Log(tmp_path))
    ours = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = theirs = lambda *args: ours(*args)
    try:
        F.scaled_dot_product_attention(*qkv())
        recording.stop()
        assert F.scaled_dot_product_attention is theirs
        F.scaled_dot_product_attention(*qkv())
    finally:
        F.scaled_dot_product_attention = OWN
    assert [n for _, n in read(tmp_path).calls] == [1]


def test_modules_that_imported_the_function_count_and_get_their_own_back(tmp_path, monkeypatch):
    module = types.ModuleType("theirs")
    module.scaled_dot_product_attention = OWN
    monkeypatch.setitem(sys.modules, "theirs", module)
    assert counts(tmp_path, lambda _: module.scaled_dot_product_attention(*qkv())) == [1]
    assert module.scaled_dot_product_attention is OWN


def test_a_call_that_pytorch_refuses_raises_and_is_not_counted(tmp_path):
    q, k, v = qkv()
    wrong = [(q, k[:, :, :, :8], v), (q, "k", v), (q, k), (q, k.double(), v), ()]

    def program(_):
        for each in wrong:
            with pytest.raises((RuntimeError, TypeError)):
                F.scaled_dot_product_attention(*each)

    assert counts(tmp_path, program) == []


@both_ways
def test_threads_lose_no_call(tmp_path, every_call):
    shapes = [qkv(1, 1, seqlen, 8) for seqlen in (8, 8, 16, 24)]

    def work(seed):
        for tensors in random.Random(seed).choices(shapes, k=1000):
            F.scaled_dot_product_attention(*tensors)

    def program(_):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sum(counts(tmp_path, program, every_call=every_call)) == 4000


def test_an_error_of_the_recorder_is_kept_and_the_program_goes_on(tmp_path):
    class Scale(float):
        def __float__(self):
            raise ZeroDivisionError

    recording = Recording(Log(tmp_path))
    try:
        for _ in range(2):
            out = F.scaled_dot_product_attention(*qkv(), scale=Scale(0.5))
            assert out.shape == (1, 2, 64, 32)
    finally:
        recording.stop()
    (error,) = read(tmp_path).errors
    assert "ZeroDivisionError" in error


def test_the_context_manager_writes_a_spec_also_after_an_error(tmp_path, capsys):
    path, q = tmp_path / "model.yaml", qkv(1, 2, 64, 64, dtype=torch.bfloat16)[0]

    def program():
        with attnsweep.shapes(path, arch="sm_90a"):
            F.scaled_dot_product_attention(q, q, q)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        program()
    assert load_spec(path).problems[0].calls == 1
    assert "from Python were counted" in path.read_text().splitlines()[1]
    said = capsys.readouterr().err
    assert "1 attention call: 1 in 1 problem" in said
    assert "--every-call" in said
    with pytest.raises(SpecError, match="is there already"), attnsweep.shapes(path, arch="sm_90a"):
        raise AssertionError("not reached")
    with attnsweep.shapes(path, arch="sm_90a", force=True, every_call=True):
        F.scaled_dot_product_attention(q, q, q)
        torch._C._nn.scaled_dot_product_attention(q, q, q)
    assert load_spec(path).problems[0].calls == 2
    assert "every call" in path.read_text().splitlines()[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_the_architecture_must_be_given(tmp_path):
    with pytest.raises(NoGpuError, match="no GPU"), attnsweep.shapes(tmp_path / "m.yaml"):
        raise AssertionError("not reached")


@pytest.mark.nightly(push=2, of="programs with PyTorch")
@pytest.mark.parametrize("options", [[], ["--every-call"]], ids=["", "every-call"])
def test_the_command_records_every_process_of_an_unchanged_program(tmp_path, options):
    program, out = tmp_path / "program.py", tmp_path / "model.yaml"
    program.write_text(
        "import multiprocessing, os, sys, torch\n"
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "torch.set_num_threads(1)\n"
        "def work(n):\n"
        "    q = torch.randn(1, 4, 64, 64, dtype=torch.bfloat16)\n"
        "    for _ in range(n): scaled_dot_product_attention(q, q, q)\n"
        "if __name__ == '__main__':\n"
        "    work(1)\n"
        "    for how, n in (('fork', 10), ('spawn', 100)):\n"
        "        p = multiprocessing.get_context(how).Process(target=work, args=(n,))\n"
        "        p.start(); p.join()\n"
        "    work(1000)\n"
        "    os._exit(7)\n"
    )
    given = [str(out), "--arch", "sm_90a", *options, "--", sys.executable, str(program)]
    done = subprocess.run(
        [sys.executable, "-m", "attnsweep", "shapes", *given], timeout=120, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 7
    assert "overrid" not in done.stderr  # PyTorch warns of that
    assert load_spec(out).problems[0].calls == 1111
    assert ("every call" in Path(out).read_text()) == bool(options)


# ---- calls that come to attention by other ways keep their result, and can be counted ----
def compiled_by_name():
    return lambda: torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) * 2, fullgraph=True)(qkv()[0])


class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def exported():
    return lambda: torch.export.export(Block(), (qkv()[0],)).module()(qkv()[0])


def loaded():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Block()), file)
    return lambda: torch.jit.load(io.BytesIO(file.getvalue()))(qkv()[0])


def traced():
    return lambda: torch.jit.trace(
        lambda x: F.scaled_dot_product_attention(x, x, x) + 1, (qkv()[0],), check_trace=False
    )(qkv()[0])


def multihead_attention():
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True).eval()
    return torch.no_grad()(lambda: layer(*[torch.randn(2, 8, 64)] * 3, need_weights=False)[0])


def overload():
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return lambda: op(*qkv(1, 2, 8, 16))[0]


def nested_jagged():
    one = torch.nested.nested_tensor([torch.ones(8, 2, 16)], layout=torch.jagged)
    tensors = [one.transpose(1, 2)] * 3
    return lambda: F.scaled_dot_product_attention(*tensors).to_padded_tensor(0.0)


def nested_strided():
    tensors = [torch.nested.nested_tensor([torch.ones(2, 8, 16)])] * 3
    return lambda: F.scaled_dot_product_attention(*tensors).to_padded_tensor(0.0)


def mapped():
    batch = torch.randn(3, 4, 1, 2, 64, 32)
    return lambda: torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(*batch)


def within(mode):
    def run():
        with mode():
            return F.scaled_dot_product_attention(*qkv())

    return run


def function_mode():
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if func is F.scaled_dot_product_attention:  # not known once something else is there
                func(*args, **kwargs or {})
            return out

    return within(Twice)


def dispatch_mode():
    return within(Watch)


def fake():
    from torch._subclasses import FakeTensorMode

    def run():
        with FakeTensorMode():
            F.scaled_dot_product_attention(*qkv())

    return run


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    def run():
        q, k, v = (each.requires_grad_() for each in qkv())
        out = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        out.sum().backward()
        return out

    return run


WAYS = (
    *(compiled_by_name, exported, loaded, traced, multihead_attention, overload, nested_jagged, nested_strided),
    *(mapped, function_mode, dispatch_mode, fake, checkpointed),
)
# On the CPU a layer has a kernel of its own, and nothing runs on tensors without values.
NO_OPERATOR = (multihead_attention, fake)


@pytest.mark.nightly(push=10)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("every_call", [False, True])
def test_a_call_that_comes_by_another_way_is_as_without_a_recording(tmp_path, way, every_call):
    torch._dynamo.reset()

    def made():
        torch.manual_seed(0)
        return way()

    def result(run):
        torch.manual_seed(1)
        return run()

    run, outputs = made(), []
    want = result(run)

    def program(_):
        torch._dynamo.reset()
        outputs.extend((result(run), result(made())))
        F.scaled_dot_product_attention(*qkv(1, 2, 24, 32))

    got = recorded(tmp_path, program, every_call)
    assert sum(call["q"][2] == 24 for call, _ in got.calls) == 1
    for out in outputs:
        torch.testing.assert_close(out, want)
    if every_call and way not in NO_OPERATOR:
        assert sum(n for _, n in got.calls) > 2

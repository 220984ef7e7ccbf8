"""The recorder's quick way, on the CPU: it counts what the dispatcher's kernels would."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import types
from collections import Counter

import pytest

from attnsweep.serve.recorded_calls import read
from attnsweep.serve.recorder import place
from attnsweep.serve.recorder.recorder import Recording

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("needs torch.library.get_kernel", allow_module_level=True)
from attention_calls import (  # noqa: E402  (it needs PyTorch)
    WARM,
    counted,
    counts,
    every_change,
    given_back,
    qkv,
    warm,
)

F = torch.nn.functional
OWN = F.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own


@pytest.fixture(autouse=True)
def all_is_given_back():
    with given_back():
        yield


def test_the_kernels_are_out_once_calls_are_known_and_in_again_for_another_kind(tmp_path):
    seen = []

    def program(recording):
        one, other = qkv(), qkv(1, 2, 16, 32)
        for tensors, n in ((one, WARM - 1), (one, 1), (other, 1), (one, 99), (other, 300)):
            for _ in range(n):
                F.scaled_dot_product_attention(*tensors)
            seen.append(recording.eager.watches)

    assert sorted(n for _, n in counted(tmp_path, program)) == [WARM + 99, 301]
    assert seen == [True, False, True, False, False]


@pytest.mark.parametrize("context", ["no_grad", "enable_grad", "inference_mode", "device", "bf16"])
def test_it_counts_what_the_kernels_count(tmp_path, context):
    """Kinds in turn, in runs and at random; some can never be known by a question."""
    kinds = list(every_change(*qkv()))
    drawn = random.Random(0)
    calls = [kind for kind in kinds for _ in range(80)]
    for one, other in itertools.permutations(kinds, 2):
        calls += [one, other]
    calls += drawn.choices(kinds, k=300)
    calls += [kinds[0], kinds[1], kinds[0], kinds[4]] * 60
    enter = {
        "device": lambda: torch.device("cpu"),
        "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    }.get(context) or getattr(torch, context)
    with enter():
        want = counts(tmp_path, calls, quick=False)
        assert sum(n for _, n in want) == len(calls)
        assert counts(tmp_path, calls) == want


def test_a_kind_is_known_by_the_state_of_the_thread_too(tmp_path):
    """Autocast and its dtype, gradients, and which operators PyTorch may choose."""
    tensors = qkv()
    states = [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
    ]

    def program(_):
        for each in (*states, *states, *states[::-1]):
            with each():
                for _ in range(2 * WARM):
                    F.scaled_dot_product_attention(*tensors)

    def by_sizes(calls):
        """Which operator PyTorch chooses is no part of a kind that is known."""
        sums = Counter()
        for call, n in calls:
            facts = json.loads(call)
            del facts["op"]
            sums[json.dumps(facts)] += n
        return sums

    want = counted(tmp_path, program, quick=False)
    assert by_sizes(counted(tmp_path, program)) == by_sizes(want)


def test_whether_converted_tensors_have_gradients_is_known(tmp_path):
    tensors = [each.requires_grad_() for each in qkv()]

    def program(_):
        with torch.autocast("cpu", torch.bfloat16):
            for enter in (torch.enable_grad, torch.no_grad, torch.enable_grad):
                with enter():
                    for _ in range(2 * WARM):
                        F.scaled_dot_product_attention(*tensors)

    want = counted(tmp_path, program, quick=False)
    assert [n for _, n in want] == [2 * WARM, 4 * WARM]
    assert counted(tmp_path, program) == want


@pytest.mark.parametrize("option", ["scale", "dropout_p"])
def test_options_that_are_tensors_are_known_by_their_values(tmp_path, option):
    values = [torch.tensor(32**-0.5), torch.tensor(0.5), torch.tensor(0.0)]
    calls = [({option: value}, qkv()) for value in values for _ in range(2 * WARM)]
    want = counts(tmp_path, calls, quick=False)
    assert len(want) == 2
    assert counts(tmp_path, calls) == want


def test_tensors_without_values_are_counted(tmp_path):
    """No autocast has their device."""
    calls = [({}, torch.randn(3, 1, 2, 8, 32, device="meta")) for _ in range(2 * WARM)]
    assert [n for _, n in counts(tmp_path, calls)] == [2 * WARM]


def test_what_stands_in_the_place_is_pytorchs_function_to_a_program(tmp_path):
    """No class makes it a method, tables find it by either, and it can be sent and copied."""

    class Attention:
        call = F.scaled_dot_product_attention

    class Its(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return table.get(func)

    table = {}

    def program(recording):
        warm(recording)
        ours = Attention.call = F.scaled_dot_product_attention
        assert ours is not torch._C._nn.scaled_dot_product_attention  # what OWN is: ours, now
        Attention().call(*qkv())
        assert copy.copy(ours) is ours
        assert copy.deepcopy(ours) is ours
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert (repr(ours), ours.__name__) == (repr(OWN), OWN.__name__)
        table[ours] = "its own"
        assert F.scaled_dot_product_attention(*(each.as_subclass(Its) for each in qkv())) == (
            "its own"
        )
        assert table[F.scaled_dot_product_attention] == "its own"  # which is PyTorch's again
        assert pickle.loads(pickle.dumps(ours)) is F.scaled_dot_product_attention
        Attention().call(*qkv())

    assert [n for _, n in counted(tmp_path, program)] == [WARM + 2]


@pytest.mark.parametrize("form", ["closure", "default", "partial", "attribute", "of a class"])
def test_code_that_holds_what_stood_in_the_place_compiles_once(tmp_path, form):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def program(recording):
        warm(recording)
        ours = F.scaled_dot_product_attention
        bound = functools.partial(ours, is_causal=False)

        class Holds(torch.nn.Module):
            of_class = ours

            def __init__(self):
                super().__init__()
                self.own = ours

            def forward(self, x):
                return (self.own if form == "attribute" else self.of_class)(x, x, x) + 1

        block = torch.compile(
            {
                "closure": lambda x: ours(x, x, x) + 1,
                "default": lambda x, own=ours: own(x, x, x) + 1,
                "partial": lambda x: bound(x, x, x) + 1,
            }.get(form)
            or Holds(),
            backend=counter,
            fullgraph=True,
        )
        x = qkv()[0]
        block(x)
        block(x)
        recording.stop()
        block(x)

    assert [n for _, n in counted(tmp_path, program)] == [WARM + 2]
    assert counter.frame_count == 1


def test_nothing_of_a_recording_is_left(tmp_path):
    """Not even an id of it, which another function would get."""
    table = dict(torch.jit._builtins._get_builtin_table())
    counted(tmp_path, warm)
    assert torch.jit._builtins._builtin_table == table
    assert not any(ours() for ours, _ in place.stood)


def test_what_was_compiled_before_is_not_compiled_again(tmp_path):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    block = torch.compile(
        lambda x: F.scaled_dot_product_attention(x, x, x), backend=counter, fullgraph=True
    )
    x = qkv()[0]
    block(x)
    counted(tmp_path, lambda _: (block(x), block(x)))
    block(x)
    assert counter.frame_count == 1


def test_a_package_that_is_enabled_takes_the_place(tmp_path):
    from attnsweep.serve.runtime.sdpa_patch import Routing

    def routed(*args, **kwargs):
        return OWN(*args, **kwargs)

    def program(recording):
        warm(recording)
        with Routing(routed).enable():
            assert F.scaled_dot_product_attention is routed
            F.scaled_dot_product_attention(*qkv())
        assert F.scaled_dot_product_attention is OWN
        F.scaled_dot_product_attention(*qkv())

    assert [n for _, n in counted(tmp_path, program)] == [WARM + 2]


def test_a_function_that_others_replaced_is_theirs_and_ours_still_works(tmp_path):
    kept = []

    def program(recording):
        warm(recording)
        kept.append(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = theirs = lambda *args: kept[0](*args)
        F.scaled_dot_product_attention(*qkv())
        recording.stop()
        assert F.scaled_dot_product_attention is theirs
        F.scaled_dot_product_attention(*qkv())
        F.scaled_dot_product_attention = OWN

    assert [n for _, n in counted(tmp_path, program)] == [WARM + 1]


def test_what_others_put_in_the_place_of_a_watched_function_stays(tmp_path):
    own = torch._native_multi_head_attention

    def theirs(*args):
        return own(*args)

    def program(recording):
        torch._native_multi_head_attention = theirs

    try:
        counted(tmp_path, program)
        assert torch._native_multi_head_attention is theirs
    finally:
        torch._native_multi_head_attention = own


def test_modules_that_imported_the_function_count_and_get_their_own_back(tmp_path, monkeypatch):
    module = types.ModuleType("theirs")
    module.scaled_dot_product_attention = OWN
    monkeypatch.setitem(sys.modules, "theirs", module)

    def program(recording):
        for _ in range(2 * WARM):
            module.scaled_dot_product_attention(*qkv())
        assert not recording.eager.watches

    assert [n for _, n in counted(tmp_path, program)] == [2 * WARM]
    assert module.scaled_dot_product_attention is OWN


def test_a_call_that_pytorch_refuses_raises_and_counts_like_before(tmp_path):
    q, k, v = qkv()
    wrong = [(q, k[:, :, :, :8], v), (q, "k", v), (q, k), (q, k.double(), v), (q.int(),) * 3]

    def program(recording):
        for _ in range(2):
            warm(recording, q, k, v, n=4 * WARM)
            for each in wrong:
                with pytest.raises((RuntimeError, TypeError)):
                    F.scaled_dot_product_attention(*each)
        assert not recording.eager._watched_now
        assert not recording.eager._counted

    assert counted(tmp_path, program) == counted(tmp_path, program, quick=False)


def test_threads_lose_no_call(tmp_path):
    """Kernels are taken out and put in while other threads are in calls."""
    shapes = [qkv(1, 1, seqlen, 8) for seqlen in (8, 8, 16, 24)]

    def work(seed):
        drawn = random.Random(seed)
        with torch.no_grad():
            for tensors in drawn.choices(shapes, k=20):
                for _ in range(50):
                    F.scaled_dot_product_attention(*tensors)
            for seqlen in range(seed * 10, seed * 10 + 10):  # kinds that are new
                F.scaled_dot_product_attention(*qkv(1, 1, 100 + seqlen, 8))

    def program(recording):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not recording.eager._watched_now
        assert not recording.eager._counted
        warm(recording, *shapes[0], n=2000)
        assert not recording.eager.gone

    assert sum(n for _, n in counted(tmp_path, program)) == 4 * (20 * 50 + 10) + 2000


def test_a_recording_around_another_counts_its_calls(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()

    def program(recording):
        warm(recording)
        within = Recording(inner)
        warm(within)
        within.stop()
        F.scaled_dot_product_attention(*qkv())

    assert [n for _, n in counted(tmp_path, program)] == [2 * WARM + 1]
    assert [n for _, n in read(inner).calls] == [WARM]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_counts_kinds_of_its_parent_for_itself(tmp_path):
    code = (
        "import os, sys, torch; from pathlib import Path\n"
        "from attnsweep.serve.recorder.recorder import Recording\n"
        "torch.set_num_threads(1); recording = Recording(Path(sys.argv[1]))\n"
        "q, k, v = torch.randn(3, 1, 2, 8, 32)\n"
        "def calls(n):\n"
        "    for _ in range(n): torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
        "calls(100); assert not recording.eager.watches\n"
        "if os.fork() == 0: calls(50); os._exit(0)\n"
        "os.wait(); calls(10)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    got = read(tmp_path)
    assert (got.processes, [n for _, n in got.calls]) == (2, [160])


def test_an_error_while_it_learns_is_kept_and_the_program_goes_on(tmp_path, monkeypatch):
    recording = Recording(tmp_path)
    monkeypatch.setattr(recording.eager, "_know", lambda *_: 1 / 0)
    try:
        for _ in range(5):
            assert F.scaled_dot_product_attention(*qkv()).shape == (1, 2, 64, 32)
    finally:
        recording.stop()
    (error,) = read(tmp_path).errors
    assert "ZeroDivisionError" in error

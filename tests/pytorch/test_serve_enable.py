"""`enable`, `disable` and `register` of a package, with a fake driver in place of CUDA's."""

import copy
import functools
import importlib
import itertools
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

import operators  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from operators import close  # noqa: E402
from packages import imported, on_cpu, shape, winner, written  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

from attnsweep.serve.runtime.table import Guard  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = itertools.count()
SDPA = torch._C._nn.scaled_dot_product_attention


def tensors():
    return operators.tensors(layout="bshd")


@pytest.fixture
def make(tmp_path, driver):
    """Imports a package of a new name; afterwards PyTorch is as it was."""
    made = []

    def new(*winners):
        name = f"package_{next(NUMBERS)}"
        made.append(imported(tmp_path, name, driver, *(winners or (winner(shape()),))))
        return made[-1]

    yield new
    for package in made:
        package.disable()
    for name in [n for n in sys.modules if n.startswith("package_")]:
        del sys.modules[name]
    assert F.scaled_dot_product_attention is SDPA


@pytest.fixture
def package(make):
    return make()


def test_enabled_calls_are_the_packages(package, driver):
    q, k, v = tensors()
    assert not package.is_enabled()
    package.enable()
    assert package.is_enabled()
    assert close(F.scaled_dot_product_attention(q, k, v), SDPA(q, k, v))
    assert close(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2, dropout_p=0.0), SDPA(q, k, v, scale=0.2)
    )
    assert package.counters() == {"kernel": 2}
    package.disable()
    assert F.scaled_dot_product_attention is SDPA
    F.scaled_dot_product_attention(q, k, v)
    assert (package.counters(), package.is_enabled()) == ({"kernel": 2}, False)


def test_a_class_a_table_a_copy_and_a_pickle_take_it_for_pytorchs(package, driver):
    """As a function of Python's it would be a class's method, and a key of its own."""
    q, k, v = tensors()
    with package.enable():
        routed = F.scaled_dot_product_attention

        class Block:
            attention = routed

        assert close(Block().attention(q, k, v), SDPA(q, k, v))
        assert {routed: 1}[SDPA] == 1
        assert {SDPA: 1}[routed] == 1
        assert copy.deepcopy({"attention": routed})["attention"] is routed
        assert functools.wraps(routed)(lambda: None).__name__ == SDPA.__name__
        assert pickle.loads(kept := pickle.dumps(routed)) is routed
    assert pickle.loads(kept) is SDPA
    assert torch.equal(routed(q, k, v), SDPA(q, k, v)), "kept beyond the end"
    assert package.counters() == {"kernel": 1}


def test_a_short_step_is_known_by_its_sizes_and_whether_it_is_causal(make, driver):
    """A full call of the same sizes is served, as is one without gradients, or of other keys."""
    times = {"full": (shape(), 4.0), "causal": (shape(causal=True), 2.0)}  # PyTorch's: 40, 20 us
    package = make(*(winner(of, gain=gain) for of, gain in times.values()))
    operator = on_cpu(package, driver)
    operator.planner.gpus[0] = replace(operator.planner.gpus[0], guard=Guard(short_us=30.0))
    q, k, v = (t.requires_grad_() for t in tensors())
    with package.enable():
        kept = F.scaled_dot_product_attention
        for scale in (None, None, 0.2):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            assert torch.equal(out, SDPA(q, k, v, is_causal=True, scale=scale))
        assert operator.shorts == {(q.shape, k.shape, True)}
        assert package.counters() == {"short_training": 3}
        assert close(F.scaled_dot_product_attention(q, k, v), SDPA(q, k, v))
        with torch.no_grad():
            kept(q, k, v, is_causal=True)
        F.scaled_dot_product_attention(q, k[:, :, :100], v[:, :, :100], is_causal=True)
        assert package.counters()["kernel"] == 2
        assert package.counters()["short_training"] == 3
    kept(q, k, v, is_causal=True)
    assert package.counters()["short_training"] == 3


def test_what_no_kernel_serves_is_pytorchs_without_recursion(package, driver):
    q, k, v = tensors()
    mask = torch.zeros(256, 256)  # float32, which no kernel adds to bf16
    with package.enable():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        odd = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert torch.equal(got, SDPA(q, k, v, attn_mask=mask))
    assert torch.equal(odd, SDPA(q.float(), k.float(), v.float()))
    assert package.counters() == {"mask": 1, "dtype": 1}
    assert driver.launches == []


WRONG = {
    "is_causal": {"is_causal": 1},
    "is_causal of nothing": {"is_causal": None},
    "enable_gqa": {"enable_gqa": 1},
    "dropout_p": {"dropout_p": "0.1"},
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("how", WRONG.values(), ids=WRONG)
def test_arguments_of_another_type_are_pytorchs_error(package, how):
    """Also where 1 is found as True is, of a call that was met before."""
    q, k, v = tensors()

    def call(*qkv):
        return torch.nn.functional.scaled_dot_product_attention(*qkv, **how)

    with package.enable():
        for flag in (False, True) * 3:
            F.scaled_dot_product_attention(q, k, v, is_causal=flag, enable_gqa=flag)
        with pytest.raises(TypeError, match="must be"):
            call(q, k, v)
        torch._dynamo.reset()
        with pytest.raises(TypeError, match="must be"):
            torch.compile(call, backend="aot_eager")(q, k, v)


def test_scale_has_a_name_as_at_pytorchs_own(package):
    with package.enable(), pytest.raises(TypeError, match="positional"):
        F.scaled_dot_product_attention(*tensors(), None, 0.0, False, 0.2)


class Replaced(torch.overrides.TorchFunctionMode):
    """Answers calls of attention itself, as what splits a sequence over several GPUs does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == F.scaled_dot_product_attention:
            return args[0] * 0 + 7
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_mode_is_told_of_calls(package, driver, compiled):
    torch._dynamo.reset()
    q, k, v = tensors()

    def call(*qkv):
        return torch.nn.functional.scaled_dot_product_attention(*qkv)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with package.enable():
        with Replaced():
            assert (call(q, k, v) == 7).all()
        with torch.device("cpu"):  # another such mode, which hands calls on
            assert close(call(q, k, v), SDPA(q, k, v))
    assert package.counters() == {"kernel": 1}


def test_statements_nest_and_undo_themselves_alone(package):
    with package.enable():
        with package.enable():
            assert package.is_enabled()
        assert package.is_enabled()
        with package.disable():
            assert F.scaled_dot_product_attention is SDPA
            with package.enable():
                assert package.is_enabled()
            assert not package.is_enabled()
        assert package.is_enabled()
    assert not package.is_enabled()
    with pytest.raises(ZeroDivisionError), package.enable():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is SDPA
    with package.disable():
        pass
    assert not package.is_enabled()


def test_a_plain_call_outlives_a_statement_and_disable_ends_all(package):
    package.enable()
    with package.enable():
        pass
    assert package.is_enabled()
    outer = package.enable()
    package.disable()
    assert not package.is_enabled()
    package.enable()
    outer.__exit__(None, None, None)  # of a call that `disable` has undone
    assert package.is_enabled()


def test_a_statement_that_is_entered_again_undoes_no_other_call(package):
    switched = package.enable()
    package.enable()
    for _ in range(3):
        with switched:
            assert package.is_enabled()
    assert package.is_enabled()


def test_statements_of_threads_overlap(package):
    entered, may_end = threading.Event(), threading.Event()

    def other():
        with package.enable():
            entered.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with package.enable():
        thread.start()
        assert entered.wait(10)
    assert package.is_enabled()
    may_end.set()
    thread.join()
    assert not package.is_enabled()


def test_modules_that_imported_the_function_by_name(package):
    q, k, v = tensors()
    module = ModuleType("package_user")
    code = "from torch.nn.functional import scaled_dot_product_attention"
    exec(code, vars(module))
    sys.modules["package_user"] = module
    with package.enable():
        module.scaled_dot_product_attention(q, k, v)
        assert package.counters() == {"kernel": 1}
        exec(code, vars(module))
    assert module.scaled_dot_product_attention is SDPA
    assert torch._C._nn.scaled_dot_product_attention is SDPA


def test_two_packages_at_once_are_refused(make):
    one, other = make(), make(winner(shape(), gain=0.9))
    with one.enable():
        with pytest.raises(other.PackageError, match=rf"already replaced, by {one.__name__}\."):
            other.enable()
        assert (one.is_enabled(), other.is_enabled()) == (True, False)
        other.disable()
        assert one.is_enabled(), "the other cannot take this one out"
    with other.enable():
        assert other.is_enabled()


def test_a_package_imported_while_another_is_enabled_falls_back_to_pytorchs(make):
    one = make()
    q, k, v = (t.float() for t in tensors())
    with one.enable():
        other = make()
        other.attention(q, k, v)
    assert (one.counters(), other.counters()) == ({}, {"dtype": 1})


def test_a_package_that_is_imported_anew(package, driver, monkeypatch):
    """As after another export in a notebook: the new one takes over, also while enabled."""
    q, k, v = tensors()
    package.enable()
    kept = F.scaled_dot_product_attention
    monkeypatch.syspath_prepend(str(Path(package.__file__).parent.parent))
    anew = importlib.reload(package)
    made = on_cpu(anew, driver)
    assert made.namespace == f"attnsweep_{anew.__name__}_cpu_{made.table.digest[:8]}_again2"
    anew.enable()
    assert F.scaled_dot_product_attention is not kept
    assert close(F.scaled_dot_product_attention(q, k, v), SDPA(q, k, v))
    assert anew.counters() == {"kernel": 1}
    anew.disable()
    assert F.scaled_dot_product_attention is SDPA


def test_someone_elses_replacement_is_left_alone(package, monkeypatch):
    def theirs(*args, **kwargs):
        return SDPA(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with pytest.raises(package.PackageError, match="theirs"):
        package.enable()
    monkeypatch.undo()
    with package.enable():
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    assert F.scaled_dot_product_attention is theirs
    monkeypatch.undo()
    # What monkeypatch has put back was ours, and asks whether the package is enabled.
    q, k, v = tensors()
    F.scaled_dot_product_attention(q, k, v)
    assert package.counters() == {}
    package.enable()
    package.disable()


def test_a_backend_that_was_asked_for_is_kept(package):
    q, k, v = tensors()
    with package.enable():
        with sdpa_kernel(SDPBackend.MATH):
            got = F.scaled_dot_product_attention(q, k, v)
            expected = SDPA(q, k, v)
        assert torch.equal(got, expected)
        assert package.counters() == {}
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            F.scaled_dot_product_attention(q, k, v)
    assert package.counters() == {"kernel": 1}


class Block(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q * 1.0, k, v) + 1


def test_a_compiled_model_is_one_graph(package, driver):
    torch._dynamo.reset()
    q, k, v = tensors()
    expected = SDPA(q, k, v) + 1
    compiled = torch.compile(Block(), fullgraph=True, backend="aot_eager")
    assert close(compiled(q, k, v), expected)
    with package.enable():
        assert close(compiled(q, k, v), expected), "compiled before"
        assert package.counters() == {"kernel": 1}
        mask = torch.compile(lambda m: F.scaled_dot_product_attention(q, k, v, m), fullgraph=True, backend="aot_eager")
        mask(torch.zeros(256, 256, dtype=torch.bfloat16))
    assert close(compiled(q, k, v), expected)
    assert package.counters() == {"kernel": 1}, "compiled code follows disable"


def asked_of(function, *given):
    """What a compiler asks again before each call of what it compiled."""
    torch._dynamo.reset()
    return len(torch._dynamo.explain(function)(*given).out_guards)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("case", ["plain", "mask", "gradients"])
def test_little_is_asked_before_compiled_calls(package, case):
    """With 50 such guards a compiled step of a short call took 6 % longer than PyTorch's own."""
    q, k, v = (t.requires_grad_(case == "gradients") for t in tensors())
    mask = torch.ones(256, 256, dtype=torch.bool) if case == "mask" else None

    def call(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    own = asked_of(call, q, k, v)
    with package.enable():
        assert asked_of(call, q, k, v) <= own + 20


KNOWN_LATE = {
    "batch": (lambda n, q, k, v: ((q[:n], k[:n], v[:n]), {}), 1),
    "queries and keys": (lambda n, q, k, v: ((q[:, :, :n], k[:, :, :n], v[:, :, :n]), {}), 40),
    "keys beside is_causal": (lambda n, q, k, v: ((q, k[:, :, :n], v[:, :, :n]), {"is_causal": True}), 40),
    "scale": (lambda n, *qkv: (qkv, {"scale": n}), 0.2),
    "dropout_p": (lambda n, *qkv: (qkv, {"dropout_p": n}), 0.0),
    "is_causal": (lambda n, *qkv: (qkv, {"is_causal": n}), True),
    "is_causal by a number": (lambda n, *qkv: (qkv, {"is_causal": n > 3}), 5),
    "is_causal by a small number": (lambda n, *qkv: (qkv, {"is_causal": n > 3}), 1),
    "enable_gqa by a number": (lambda n, *qkv: (qkv, {"enable_gqa": n > 3}), 5),
}


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize("what", KNOWN_LATE)
@pytest.mark.parametrize("way", ["enable", "attention"])
def test_what_the_device_alone_knows(package, way, what):
    """A size goes to PyTorch's own attention; a number ends the graph, as it does there."""
    torch._dynamo.reset()
    given, (change, number) = tensors(), KNOWN_LATE[what]

    def compiled(attention):
        def call(n, *qkv):
            qkv, how = change(n.item(), *qkv)
            return attention()(*qkv, **how)

        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            return torch.compile(call, backend="aot_eager")(torch.tensor(number), *given)

    qkv, how = change(number, *given)
    try:
        compiled(lambda: SDPA)
    except torch._dynamo.exc.BackendCompilerFailed:
        pytest.skip("this PyTorch does not compile its own attention of such sizes")
    with package.enable():
        got = compiled(lambda: package.attention if way == "attention" else F.scaled_dot_product_attention)
    assert close(got, SDPA(*qkv, **how))


@pytest.mark.nightly(push=2, of="programs with PyTorch")
def test_what_is_compiled_after_an_end_still_asks_classes(tmp_path):
    """In a process of its own: PyTorch lists what a class may override once."""
    written(tmp_path, "package_alone", winner(shape()))
    code = """
import torch, torch.nn.functional as F
import package_alone
from torch.nn.attention.bias import causal_upper_left
q = torch.randn(1, 4, 64, 64)
def plain(q): return F.scaled_dot_product_attention(q, q, q)
def masked(q, bias): return F.scaled_dot_product_attention(q, q, q, bias)
with package_alone.enable():
    torch.compile(plain, backend="eager")(q)
from torch.overrides import get_overridable_functions
assert F.scaled_dot_product_attention in get_overridable_functions()[F]
graphs = []
def backend(graph, inputs):
    graphs.append(graph.code)
    return graph.forward
got = torch.compile(masked, backend=backend)(q, causal_upper_left(64, 64))
assert torch.allclose(got, F.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-5)
assert "is_causal = True" in graphs[0], graphs
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("strict", [False, True])
def test_scripts_and_exported_programs_hold_pytorchs_operator(package, strict):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = tensors()
    with package.enable():
        scripted = torch.jit.script(attend)
        exported = torch.export.export(Block(), (q, k, v), strict=strict)
    assert torch.equal(scripted(q, k, v), attend(q, k, v))
    assert "aten::scaled_dot_product_attention" in str(scripted.graph)
    assert torch.equal(exported.module()(q, k, v), Block()(q, k, v))
    assert "attnsweep" not in str(exported.graph)
    assert package.counters().get("kernel", 0) == 0


def test_modules_of_pytorch_are_served(package):
    """nn.MultiheadAttention calls the function in its own module."""
    attention = torch.nn.MultiheadAttention(256, 4, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(1, 256, 256).bfloat16()
    with torch.no_grad():
        attention.train()  # in eval mode it is one fused operator
        expected, _ = attention(x, x, x, need_weights=False)
        with package.enable():
            got, _ = attention(x, x, x, need_weights=False)
    assert close(got, expected)
    assert package.counters() == {"kernel": 1}


@pytest.mark.parametrize("rows", [256, 128])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_that_knows_the_function_by_its_place(package, rows, compiled):
    """CausalBias is an empty tensor, whose class computes what it stands for."""
    q, k, v = tensors()
    q = q[:, :, :rows]
    bias = causal_lower_right(rows, 256)
    sees = torch.ones(rows, 256, dtype=torch.bool).tril(256 - rows)
    expected = SDPA(q, k, v, attn_mask=sees)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, bias)

    torch._dynamo.reset()
    if compiled and rows == 256:  # PyTorch cannot compile what it does for others
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with package.enable():
        assert close(attend(q, k, v), expected)
        assert close(package.attention(q, k, v, bias), expected)
        with sdpa_kernel(SDPBackend.MATH):
            assert close(attend(q, k, v), expected)
    assert close(package.attention(q, k, v, bias), expected)

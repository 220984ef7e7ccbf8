"""The operator of a package within torch.compile and its like, with a fake driver."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import Watch, aten, close, make, shifted, tensors, traced  # noqa: E402
from packages import H100, shape, winner  # noqa: E402

from attnsweep.serve.runtime import gradients  # noqa: E402
from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.sdpa_patch import sdpa  # noqa: E402
from attnsweep.serve.runtime.table import Guard  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("layout", ["bhsd", "packed"])
@pytest.mark.parametrize("name", ["forward", "forward_lse"])
def test_opcheck(operator, layout, name):
    op = getattr(getattr(torch.ops, operator.namespace), name).default
    arguments = (*tensors(layout=layout), False, 0.125)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, arguments, test_utils=utilities)


def test_compiled_calls_fall_back_at_run_time(operator, driver):
    """A graph is kept for shapes that no kernel serves, and for addresses that none can take."""
    compiled = torch.compile(
        lambda q, k, v: operator.attention(q, k, v), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for q, k, v in (tensors(), tensors(seqlen=5), tensors(seqlen=300)):
        assert close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    q, k, v = tensors()
    assert close(compiled(shifted(q), k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"kernel": 2, "not_tuned": 1, "alignment": 1}


def test_compiled_code_on_another_gpu_is_pytorchs(operator):
    operator.planner.gpus[0] = None
    graphs, _ = traced(operator.attention, tensors())
    assert "scaled_dot_product" in graphs[0]
    assert operator.namespace not in "".join(graphs)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("kind", [int, np.float64, torch.tensor])
@pytest.mark.parametrize("name", ["scale", "dropout_p"])
def test_any_kind_of_number(operator, name, kind):
    """What the operator does not take is PyTorch's, which takes it."""
    torch._dynamo.reset()
    given, number = tensors(), kind({"scale": 1.0, "dropout_p": 0.0}[name])
    compiled = torch.compile(lambda q, k, v: operator.attention(q, k, v, **{name: number}), backend="aot_eager")
    assert close(compiled(*given), F.scaled_dot_product_attention(*given, **{name: float(number)}))


def test_a_transform_of_a_compiled_call_is_pytorchs(operator):
    torch._dynamo.reset()
    q, k, v = tensors()

    def slope(q, k, v):
        return torch.func.grad(lambda q: operator.attention(q, k, v).float().sum())(q)

    q.requires_grad_()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).float().sum(), q)[0]
    got = torch.compile(slope, fullgraph=True, backend="aot_eager")(q.detach(), k, v)
    assert close(got, expected)
    assert operator.counters() == {}


@pytest.mark.parametrize("randomness", ["same", "error"])
def test_vmap_of_a_compiled_call_draws_as_it_is_asked_to(operator, randomness):
    """Called for one item after the other, each would draw its own."""
    torch._dynamo.reset()
    given = [torch.stack([t, t]) for t in tensors()]

    def call(q, k, v):
        return operator.attention(q, k, v, dropout_p=0.5)

    mapped = torch.compile(lambda *qkv: torch.vmap(call, randomness=randomness)(*qkv), backend="aot_eager")
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            mapped(*given)
    else:
        assert torch.equal(*mapped(*given))


def test_code_that_is_kept_on_disk_is_of_one_table(operator, driver):
    """PyTorch finds it by the names of operators: another table may choose otherwise."""
    tables = [replace(operator.table, digest=digit * 64) for digit in "12"]
    one, other = (Operator(each, "kept_on_disk", driver, ("cpu",)).namespace for each in tables)
    assert one != other
    assert "_again" not in one + other


@pytest.fixture
def backwards():
    """PyTorch's backward of each backend, which say that they were called."""
    calls = []

    def backward(name):
        def run(grad, q, k, v, out, lse, *_, scale=None):
            calls.append((name, tuple(lse.shape), scale))
            return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

        return run

    both = {f"_scaled_dot_product_{name}_attention_backward": backward(name) for name in ("flash", "cudnn")}
    with aten(**both):
        yield calls


@pytest.fixture
def pytorchs_own(monkeypatch):
    """What a compiler's calls ask of PyTorch's attention: `asked`, q's sizes and options; `seen`, what it calls.

    backend: which one it calls, if not the host's.
    """
    own = SimpleNamespace(backend=None, asked=[], seen=set())
    how = {"cudnn": lambda causal: (None, True, 0.0, causal), "flash": lambda causal: (0.0, causal)}

    def attention(q, k, v, is_causal, scale, enable_gqa):
        own.asked.append((tuple(q.shape), is_causal, scale, enable_gqa))
        with Watch() as watch:
            if own.backend is None:
                out = sdpa(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
            else:
                op = getattr(torch.ops.aten, f"_scaled_dot_product_{own.backend}_attention")
                out, *_ = op(q, k, v, *how[own.backend](is_causal), scale=scale)
        own.seen |= {name for name in watch.seen if "_scaled_dot" in name}
        return out

    monkeypatch.setattr(gradients, "sdpa", attention)
    return own


@pytest.mark.parametrize(("name", "rows"), [("cudnn", (256, 1)), ("flash", (256,))])
def test_a_compiled_backward_is_what_pytorch_would_call(operator, backwards, pytorchs_own, name, rows):
    pytorchs_own.backend = name
    graphs, grads = traced(lambda q, k, v: operator.attention(q, k, v), tensors())
    assert len(grads) == 3
    assert backwards == [(name, (1, 4, *rows), 0.125)]
    # Before cuDNN's the operator looks at how the output's gradient lies.
    its = f"{operator.namespace}.backward" if name == "cudnn" else "_scaled_dot_product_flash_attention_backward"
    assert its in graphs[-1]
    assert {*pytorchs_own.asked} == {((1, 4, 256, 64), False, 0.125, False)}


@pytest.mark.usefixtures("backwards")
def test_what_pytorchs_attention_becomes_in_compiled_code(operator, pytorchs_own):
    """Its own graph says it, also where autograd asks; and the question is in no graph."""
    pytorchs, _ = traced(F.scaled_dot_product_attention, tensors())
    graphs, _ = traced(lambda q, k, v: operator.attention(q, k, v), tensors())
    (name,) = pytorchs_own.seen
    assert name in pytorchs[0]
    assert operator.counters() == {"kernel": 1}
    assert not any(name in graph or "_fused_sdp_choice" in graph for graph in graphs)


@pytest.mark.usefixtures("pytorchs")
def test_a_forward_that_no_kernel_serves_is_what_pytorch_would_call(operator):
    """In a graph for all sizes, of which only some have kernels."""
    called = []

    def cudnn(q, k, v, bias, lse, dropout=0.0, causal=False, *_, scale=None):
        called.append((causal, scale))
        none = torch.zeros((), dtype=torch.int64)
        rows = torch.zeros(*q.shape[:3], 1)
        return q.clone(), rows, None, None, q.shape[2], k.shape[2], none, none, None

    q, k, v = tensors(seqlen=5)
    with aten(_scaled_dot_product_cudnn_attention=cudnn):
        out, lse = operator.traced.ops.forward_lse(q, k, v, False, 0.125)
    assert torch.equal(out, q)
    assert (lse.shape, called) == ((1, 4, 5), [(False, 0.125)])


def test_short_calls_with_gradients_are_pytorchs(tmp_path, driver, backwards):
    """Whatever was tuned: the host takes longer for them than the device."""
    given = tensors()
    for least, served in ((19.0, True), (21.0, False)):  # PyTorch's forward takes 20 µs
        operator = make(tmp_path, driver, winner(shape(), gain=2.0))
        operator.planner.gpus[0] = replace(operator.table.gpus[H100], guard=Guard(short_us=least))
        leaves = [t.detach().requires_grad_() for t in given]
        assert operator.explain(*given).code == "tuned"
        assert (operator.explain(*leaves).code == "tuned") == served
        graphs, _ = traced(lambda q, k, v, own=operator: own.attention(q, k, v), given)
        assert any(operator.namespace in graph for graph in graphs) == served
        out = operator.attention(*leaves)
        assert close(out, F.scaled_dot_product_attention(*given))
        assert operator.counters().get("short_training", 0) == (not served)
    reason = operator.explain(*leaves).reason
    assert "with gradients" in reason, reason


def test_a_compiler_that_knows_all_sizes_hands_over_what_no_kernel_serves(operator):
    graphs, _ = traced(lambda q, k, v: operator.attention(q, k, v), tensors(seqlen=5))
    assert not any(operator.namespace in graph for graph in graphs)

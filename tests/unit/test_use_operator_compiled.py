"""The operator of a package within torch.compile and its like, with a fake driver."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from operators import close, compiled, shifted, tensors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("layout", ["bhsd", "packed"])
@pytest.mark.parametrize("name", ["forward", "forward_lse"])
def test_opcheck(operator, layout, name):
    op = getattr(getattr(torch.ops, operator.namespace), name).default
    arguments = (*tensors(layout=layout), False, 0.125)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, arguments, test_utils=utilities)


def test_compiles_as_one_graph(operator, driver):
    def block(q, k, v):
        return operator.attention(q * 1.0, k, v) + 1

    q, k, v = tensors(layout="packed")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v) + 1)
    assert operator.counters() == {"kernel": 1}
    masked = torch.compile(
        lambda q, k, v, m: operator.attention(q, k, v, m), fullgraph=True, backend="aot_eager"
    )
    mask = torch.zeros(256, 256, dtype=torch.bfloat16)
    assert close(masked(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    assert operator.counters() == {"kernel": 1}


def test_compiled_calls_fall_back_at_run_time(operator, driver):
    """A graph is kept for shapes that no kernel serves, and for addresses that none can take."""
    compiled = torch.compile(
        lambda q, k, v: operator.attention(q, k, v),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for q, k, v in (tensors(), tensors(seqlen=5), tensors(seqlen=300)):
        assert close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    q, k, v = tensors()
    assert close(compiled(shifted(q), k, v), F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"kernel": 2, "far": 1, "alignment": 1}


def test_compiled_code_on_another_gpu_is_pytorchs(operator):
    operator._gpus[0] = None
    attention, graphs = compiled(operator)
    q, k, v = tensors()
    assert torch.equal(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert "scaled_dot_product_attention" in graphs[0].code
    assert operator.namespace not in graphs[0].code


def test_transforms_are_pytorchs(operator, driver):
    q, k, v = tensors(batch=2)
    batched = [t[:, None] for t in (q, k, v)]
    out = torch.vmap(operator.attention)(*batched)
    assert close(out[:, 0], F.scaled_dot_product_attention(q, k, v))
    assert (driver.launches, operator.counters()) == ([], {"transform": 1})


def test_dispatch_modes_see_an_operator(operator, driver):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        operator.attention(*tensors())
    assert f"{operator.namespace}.forward.default" in seen
    assert operator.counters() == {"kernel": 1}

"""Calls that come to attention by other ways keep their result, and can be counted, on the CPU."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("needs torch.library.get_kernel", allow_module_level=True)
from attention_calls import OWN, qkv, recorded  # noqa: E402  (it needs PyTorch)

F = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own


def compiled():
    block = torch.compile(lambda x: OWN(x, x, x) + 1, fullgraph=True)
    return lambda: block(qkv()[0])


def compiled_by_name():
    return lambda: torch.compile(
        lambda x: F.scaled_dot_product_attention(x, x, x) * 2, fullgraph=True
    )(qkv()[0])


def exported():
    class Block(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    return lambda: torch.export.export(Block(), (qkv()[0],)).module()(qkv()[0])


def scripted():
    def run():
        def block(x: torch.Tensor) -> torch.Tensor:  # a new one, which is compiled anew
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

        return torch.jit.script(block)(qkv()[0])

    return run


def loaded():
    class Block(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Block()), file)
    return lambda: torch.jit.load(io.BytesIO(file.getvalue()))(qkv()[0])


def traced():
    return lambda: torch.jit.trace(
        lambda x: F.scaled_dot_product_attention(x, x, x) + 1, (qkv()[0],), check_trace=False
    )(qkv()[0])


def fast_path_of_a_layer():
    layer = torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).eval()

    @torch.no_grad()
    def run():
        return layer(torch.randn(2, 8, 64))

    return run


def multihead_attention():
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True).eval()

    @torch.no_grad()
    def run():
        x = torch.randn(2, 8, 64)
        return layer(x, x, x, need_weights=False)[0]

    return run


def packet():
    return lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv(1, 2, 8, 16))[0]


def overload():
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return lambda: op(*qkv(1, 2, 8, 16))[0]


def causal_bias():
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(64, 64)
    return lambda: F.scaled_dot_product_attention(*qkv(), attn_mask=mask)


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


def function_mode():
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if func is F.scaled_dot_product_attention:  # not known once something else is there
                func(*args, **kwargs or {})
            return out

    def run():
        with Twice():
            return F.scaled_dot_product_attention(*qkv())

    return run


def dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    def run():
        with Mode():
            return F.scaled_dot_product_attention(*qkv())

    return run


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
    *(compiled, compiled_by_name, exported, scripted, loaded, traced, fast_path_of_a_layer),
    *(
        multihead_attention,
        packet,
        overload,
        causal_bias,
        nested_jagged,
        nested_strided,
        mapped,
        function_mode,
    ),
    *(dispatch_mode, fake, checkpointed),
)


# On the CPU the layers have a kernel of their own, and nothing runs on tensors without values.
NO_OPERATOR = (fast_path_of_a_layer, multihead_attention, fake)


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

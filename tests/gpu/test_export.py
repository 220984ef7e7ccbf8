"""An exported package on a GPU: its outputs and gradients are scaled_dot_product_attention's."""

import ctypes
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import recorded

torch = pytest.importorskip("torch")

import on_card  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from operators import traced  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attnsweep.core.problem import CAUSAL  # noqa: E402
from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.table import read_table  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NAME = "exported_for_tests"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    with on_card.exported_package(recorded.RUNS, tmp_path_factory.mktemp("package"), NAME) as made:
        yield made


@pytest.fixture(scope="module")
def always(package):
    return on_card.always(package, "exported_always")


@contextmanager
def by_kernels(operator, calls):
    """So many calls, and no other answer than a kernel's."""
    before = operator.counters()
    yield
    assert operator.counters() == before | {"kernel": before.get("kernel", 0) + calls}


def tensors(shape, layout):
    torch.manual_seed(1)
    batch, heads, heads_kv = shape.batch, shape.heads, shape.heads_kv
    seqlen, seqlen_k, head_dim = shape.seqlen_q, shape.seqlen_k, shape.head_dim
    dtype = DTYPES[shape.dtype]
    if layout == "packed":
        both = torch.randn(batch, seqlen, heads + 2 * heads_kv, head_dim, device="cuda").to(dtype)
        return [t.transpose(1, 2) for t in both.split([heads, heads_kv, heads_kv], 2)]
    sizes = ((heads, seqlen), (heads_kv, seqlen_k), (heads_kv, seqlen_k))
    made = [torch.randn(batch, s, h, head_dim, device="cuda").to(dtype) for h, s in sizes]
    made = [t.transpose(1, 2) for t in made]
    return [t.contiguous() for t in made] if layout == "heads_first" else made


def check(operator, given, *, causal=False, scale=None):
    q, k, v = given
    grouped = q.shape[1] != k.shape[1]
    explained = operator.explain(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    assert explained.kernel, str(explained)
    options = {"is_causal": causal, "scale": scale, "enable_gqa": grouped}
    with by_kernels(operator, 1):
        got = operator.attention(q, k, v, **options)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    theirs = F.scaled_dot_product_attention(q, k, v, **options)
    assert got.stride() == torch.empty_like(q).stride()
    assert on_card.error(got, exact) <= 1.5 * on_card.error(theirs, exact) + 1e-5, str(explained)


@pytest.mark.parametrize("layout", ["heads_first", "rows_first", "packed"])
@pytest.mark.parametrize("shape", recorded.OUTPUTS, ids=lambda shape: shape.label)
def test_outputs(always, layout, shape):
    given = tensors(shape, layout)
    check(always, given, causal=shape.causal, scale=0.2 if shape.causal else None)


def test_every_kernel_of_the_table(always):
    """On the shape that it won: splits, clusters and turns among them."""
    shapes = {
        (winner.kernel.config, of.head_dim, of.dtype, of.mask): of
        for gpu in always.table.gpus.values()
        for winner in gpu.winners
        for of in (winner.problem,)
        if of.batch * of.heads * of.seqlen_q <= 1 << 17 and of.seqlen_q * of.seqlen_k <= 1 << 25
    }
    assert shapes
    for shape in shapes.values():
        if shape.causal and shape.seqlen_q != shape.seqlen_k:
            continue  # PyTorch's mask is aligned top-left
        check(always, tensors(shape, "rows_first"), causal=shape.causal)


@pytest.mark.parametrize("shape", recorded.GRADIENTS, ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", ["heads_first", "packed"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_gradients(always, shape, layout, backend):
    """By the backward of the backend that PyTorch would have called."""
    given = tensors(shape, layout)
    leaves = [t.detach().requires_grad_() for t in given]
    options = {"is_causal": shape.causal, "enable_gqa": shape.heads_kv != shape.heads}
    explained = always.explain(*leaves, **options)
    assert explained.kernel, str(explained)
    with sdpa_kernel(getattr(SDPBackend, backend)), by_kernels(always, 1):
        out = always.attention(*leaves, **options)
    direction = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, direction)
    assert out.grad_fn.by[1].__name__ == f"_{backend.split('_')[0].lower()}_gradients"
    doubles = [t.detach().double().requires_grad_() for t in given]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*doubles, **options), doubles, direction.double())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = F.scaled_dot_product_attention(*leaves, **options)
    theirs = torch.autograd.grad(flash, leaves, direction)
    for mine, other, right in zip(got, theirs, exact, strict=True):
        assert on_card.error(mine, right) <= 1.5 * on_card.error(other, right) + 1e-4


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_compiled_gradients(always, backend):
    """By PyTorch's flash backward, or by the operator, which calls cuDNN's with strides that it knows.

    PyTorch's own compiled calls make plans for another layout: neither meets those of the other.
    """
    shape = recorded.GRADIENTS[0]
    given = tensors(shape, "rows_first")
    options = {"is_causal": shape.causal, "enable_gqa": shape.heads_kv != shape.heads}
    with sdpa_kernel(getattr(SDPBackend, backend)):
        direction = torch.randn_like(F.scaled_dot_product_attention(*given, **options))
        theirs, before = traced(lambda *of: F.scaled_dot_product_attention(*of, **options), given, direction)
        with by_kernels(always, 1):
            ours, got = traced(lambda *of: always.attention(*of, **options), given, direction)
        _, after = traced(lambda *of: F.scaled_dot_product_attention(*of, **options), given, direction)
    backward = re.compile(r"_scaled_dot_product_\w+_backward")
    assert backward.findall(theirs[-1]) != []
    if backend == "FLASH_ATTENTION":
        assert backward.findall(ours[-1]) == backward.findall(theirs[-1])
    else:
        assert f"{always.namespace}.backward" in ours[-1]
    doubles = [t.detach().double().requires_grad_() for t in given]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*doubles, **options), doubles, direction.double())
    for mine, right in zip((*before, *got, *after), exact * 3, strict=True):
        assert on_card.error(mine, right) <= 1e-2


def test_cuda_graphs_and_streams(always):
    q, k, v = tensors(recorded.PLAIN, "packed")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), by_kernels(always, 1):
        eager = always.attention(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), by_kernels(always, 1):
        out = always.attention(q, k, v)
    q.copy_(q.flip(2))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, always.attention(q, k, v))
    assert on_card.error(out, eager.flip(2).double()) < 2e-3


def test_a_new_thread(always):
    q, k, v = tensors(recorded.PLAIN, "packed")
    with by_kernels(always, 2), ThreadPoolExecutor(1) as threads:
        expected = always.attention(q, k, v)
        got = threads.submit(always.attention, q, k, v).result()
    assert torch.equal(got, expected)


def test_a_first_call_in_a_capture(package):
    """The module is loaded while the stream captures."""
    table = read_table(Path(package.__file__).parent)
    fresh = Operator(table, "exported_in_capture")
    q, k, v = tensors(recorded.PLAIN, "heads_first")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fresh.attention(q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    assert fresh.counters() == {"kernel": 1}
    assert torch.equal(out, fresh.attention(q, k, v))


def test_compiled_as_one_graph(always):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(1024, 3072), torch.nn.Linear(1024, 1024)

        def forward(self, x):
            parts = self.qkv(x).view(*x.shape[:2], 3, 16, 64).unbind(2)
            q, k, v = (t.transpose(1, 2) for t in parts)
            y = always.attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    block = Block().cuda().half()
    compiled = torch.compile(block, fullgraph=True)
    asked = recorded.COMPILED
    assert asked == replace(asked, heads=16, head_dim=64, dtype="fp16", mask=CAUSAL)
    x = torch.randn(asked.batch, asked.seqlen_q, 1024, device="cuda", dtype=torch.float16)
    gradients = []
    with by_kernels(always, 4):
        assert torch.allclose(compiled(x), block(x), atol=4e-3)
        for each in (compiled, block):
            block.zero_grad()
            each(x).float().square().sum().backward()
            gradients.append(block.qkv.weight.grad.clone())
    assert on_card.error(gradients[0], gradients[1].double()) < 1e-2


def memory_of(number, shape):
    """Views of memory at other addresses, as q, k and v of a shape."""
    sizes = (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)
    size = math.prod(sizes)
    memory = torch.randn(size + 8 * number, device="cuda").to(DTYPES[shape.dtype])
    for n in range(number):
        yield memory[8 * n : 8 * n + size].view(sizes)


def test_addresses_that_keep_changing(always):
    other = torch.cuda.Stream()
    views = list(memory_of(300, recorded.PLAIN))
    for n, view in enumerate(views):
        given = (view, views[-n - 1], views[n // 2])
        expected = F.scaled_dot_product_attention(*given)
        other.wait_stream(torch.cuda.current_stream())
        stream = other if n % 3 == 0 else torch.cuda.current_stream()
        with torch.cuda.stream(stream), by_kernels(always, 1):
            got = always.attention(*given)
        torch.cuda.current_stream().wait_stream(other)
        assert torch.allclose(got, expected, atol=4e-3, rtol=1e-2), n
    assert always.launcher._devices[0]._replaces, "cuTensorMapReplaceAddress does what encoding does"


@pytest.mark.parametrize("layout", ["heads_first", "rows_first", "packed"])
@pytest.mark.parametrize("shape", recorded.MAPPED, ids=lambda shape: shape.label)
def test_a_replaced_address_is_an_encoded_one(always, layout, shape):
    """Byte by byte, in each map of a call."""
    given = tensors(shape, layout)
    with by_kernels(always, 1):
        always.attention(*given, enable_gqa=True)
    kind = (given[0].shape, given[0].stride(), given[0].dtype)
    plan = next(p for what, p in always.planner._plans.items() if what[:3] == kind and p.launches)
    driver, ready = always.launcher._devices[0]._cuda, next(iter(plan.launches._ready.values()))
    far = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    near = [t.data_ptr() for t in given]
    places = [at + more for at in (*near, far.data_ptr()) for more in (0, 16, 4096, 1 << 29)]
    assert len(ready.maps) == 4
    for _, (_, _, _, before, after) in ready.maps:
        for first in places:
            for second in places:
                _, moved = driver.cuTensorMapEncodeTiled(*before, first, *after)
                assert not int(driver.cuTensorMapReplaceAddress(moved, second)[0])
                _, made = driver.cuTensorMapEncodeTiled(*before, second, *after)
                both = [ctypes.string_at(each.getPtr(), 128) for each in (moved, made)]
                assert both[0] == both[1], (hex(first), hex(second))


def test_memory_stays_with_changing_shapes(always):
    def sweep(seqlens):
        with by_kernels(always, len(seqlens)):
            for seqlen in seqlens:
                given = tensors(recorded.changing(seqlen), "packed")
                always.attention(*given)
        del given  # whose size depends on the last shape
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first, last = recorded.CHANGING[:300], recorded.CHANGING[-300:]
    assert sweep(first) == sweep(first) == sweep(last)

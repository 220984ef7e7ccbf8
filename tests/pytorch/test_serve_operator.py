"""The operator of a package in PyTorch, with a fake driver whose kernels are NumPy's."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fake_driver  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from operators import aten, close, flash_backward, make, shifted, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

from attnsweep.serve.runtime import driver as driver_module  # noqa: E402
from attnsweep.serve.runtime.table import CUBINS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_layouts_without_copies(operator, driver, layout, heads_kv):
    q, k, v = tensors(heads_kv=heads_kv, layout=layout)
    out = operator.attention(q, k, v, enable_gqa=heads_kv != 4)
    assert close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=heads_kv != 4))
    assert out.stride() == torch.empty_like(q).stride()
    assert [m["pointer"] for m in driver.maps] == [t.data_ptr() for t in (q, k, v, out)]
    assert operator.counters() == {"kernel": 1}


@pytest.mark.parametrize("head_dim", [72, 40])
@pytest.mark.parametrize("layout", ["bhsd", "packed"])
def test_maps_have_the_columns_of_a_row(tmp_path, driver, head_dim, layout):
    made = make(tmp_path, driver, winner(shape(head_dim=head_dim)))
    q, k, v = tensors(layout=layout, head_dim=head_dim)
    assert close(made.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert [m["dims"][0] for m in driver.maps] == [head_dim] * 4
    assert made.counters() == {"kernel": 1}
    assert made.explain(q[..., :24], k[..., :24], v[..., :24]).code == "head_dim"


REFUSED = {
    "mask": lambda q, k, v: ((q, k, v, torch.zeros(256, 256)), {}),
    "dropout": lambda q, k, v: ((q, k, v, None, 0.5), {}),
    "dtype": lambda q, k, v: ((q.float(), k.float(), v.float()), {}),
    "rank": lambda q, k, v: ((q[0], k[0], v[0]), {}),
    "head_dim": lambda q, k, v: ((q[..., :32], k[..., :32], v[..., :32]), {}),
    "shapes": lambda q, k, v: ((q, k[:, :1], v[:, :1]), {}),
    "causal_alignment": lambda q, k, v: ((q, k[:, :, :128], v[:, :, :128]), {"is_causal": True}),
    "layout": lambda q, k, v: ((q, k, v.mT.contiguous().mT), {}),
    "alignment": lambda q, k, v: ((shifted(q), k, v), {}),
    "scale": lambda q, k, v: ((q, k, v), {"scale": -1.0}),
    "not_tuned": lambda q, k, v: ((q[:, :, :3], k, v), {}),
    "subclass": lambda q, k, v: ((q.as_subclass(Own), k, v), {}),
}


class Own(torch.Tensor):
    """A subclass, as DTensor is one."""


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("code", REFUSED)
def test_what_is_not_served_is_pytorchs(operator, driver, caplog, code, known):
    """Also if an ordinary call of such tensors is found again by one question."""
    for _ in range(3 * known):
        operator.attention(*tensors())
    arguments, options = REFUSED[code](*tensors())
    explained = operator.explain(*arguments, **options)
    assert (explained.kernel, explained.code) == (None, code)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            torch.manual_seed(1)
            got = operator.attention(*arguments, **options)
    torch.manual_seed(1)
    assert torch.equal(got, F.scaled_dot_product_attention(*arguments, **options))
    assert len(driver.launches) == 3 * known
    assert operator.counters() == {code: 3} | ({"kernel": 3} if known else {})
    assert len(caplog.records) == 1, "said once"


@pytest.mark.parametrize("how", ["plain", "causal", "grouped", "mask", "bias", "softcap", "window", "training"])
def test_v_of_a_head_dim_that_was_not_tuned_is_pytorchs(operator, driver, how):
    q, k, v = tensors(heads_kv=2 if how == "grouped" else None)
    mask = torch.randn(256, 256)
    options = {
        "causal": {"is_causal": True},
        "grouped": {"enable_gqa": True},
        "mask": {"attn_mask": mask > 0},
        "bias": {"attn_mask": mask.to(q.dtype)},
        "softcap": {"softcap": 5.0},
        "window": {"window": (20, 0)},
    }.get(how, {})
    for of_v in (32, 40):
        given = [x.detach().requires_grad_(how == "training") for x in (q, k, v[..., :of_v])]
        explained = operator.explain(*given, **options)
        assert (explained.kernel, explained.code) == (None, "head_dim")
        assert explained.reason == f"head_dim 64, {of_v} of value, was not tuned"
        got = operator.attention(*given, **options)
        assert got.shape == (*q.shape[:3], of_v)
        assert driver.launches == []
        assert close(got, operator.attention(q, k, v, **options)[..., :of_v])
        driver.launches.clear()
        if how == "training":
            got.sum().backward()
            assert given[2].grad.shape == given[2].shape


@pytest.mark.parametrize("known", [False, True])
def test_pytorchs_errors_stay(operator, known):
    q, k, v = tensors()
    for _ in range(3 * known):
        operator.attention(q, k, v)
    for wrong in (q.float().numpy(), None, [1.0]):
        assert operator.explain(wrong, k, v).code == "subclass"
        with pytest.raises(TypeError):
            operator.attention(wrong, k, v)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError):
            operator.attention(wrong, k, v)
    for scale in ("0.3", torch.ones(2)):
        with pytest.raises((TypeError, RuntimeError)):
            operator.attention(q, k, v, scale=scale)
    for keys, values in ((k[:, :2], v[:, :2]), (k, v.float())):  # the former without enable_gqa
        with pytest.raises(RuntimeError):
            operator.attention(q, keys, values)


EMPTY = {
    "batch": lambda q, k, v: (q[:0], k[:0], v[:0]),
    "heads": lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]),
    "queries": lambda q, k, v: (q[:, :, :0], k, v),
    "keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
}


@pytest.mark.parametrize("dimension", EMPTY)
def test_empty_tensors(operator, driver, dimension):
    given = EMPTY[dimension](*tensors())
    got, expected = operator.attention(*given), F.scaled_dot_product_attention(*given)
    assert got.shape == expected.shape
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert (driver.launches, operator.counters()) == ([], {"empty": 1})


def test_several_devices_are_pytorchs_error(operator, driver):
    q, k, v = tensors()
    assert operator.explain(q, k.to("meta"), v).reason == "tensors are on several devices"
    with pytest.raises(RuntimeError):
        operator.attention(q, k.to("cpu"), v.float())
    assert driver.launches == []


def test_traces_hold_pytorchs_operator(operator, driver):
    q, k, v = tensors()
    traced = torch.jit.trace(operator.attention, (q, k, v), check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph)
    other = torch.randn_like(q)
    assert torch.equal(traced(other, k, v), F.scaled_dot_product_attention(other, k, v))
    graph = torch.fx.symbolic_trace(lambda q, k, v: operator.attention(q, k, v))
    assert torch.equal(graph(other, k, v), F.scaled_dot_product_attention(other, k, v))
    assert driver.launches == []


def test_more_than_2_31_elements():
    sizes, strides = (2, 4, 256, 64), (2**31, 64, 256, 1)
    assert driver_module.unmapped(driver_module.StridedTensor(sizes, strides))[0] == "too_large"
    assert driver_module.unmapped(driver_module.StridedTensor(sizes, (2**30, 64, 256, 1))) is None
    overlapping = driver_module.StridedTensor(sizes, (0, 64, 256, 1))
    assert driver_module.unmapped(overlapping)[0] == "layout"


def test_another_gpu(operator, driver, caplog):
    operator.planner.gpus[0] = None
    q, k, v = tensors()
    assert operator.explain(q, k, v).code == "gpu"
    expected = F.scaled_dot_product_attention(q, k, v)
    for _ in range(2):
        assert torch.equal(operator.attention(q, k, v), expected)
    (said,) = caplog.records
    assert "knows sm_90, 132 SMs, 50 MiB of L2. To tune it: attnsweep run" in said.getMessage()


@pytest.mark.parametrize("said", [r"SHA-256.*export again", "cannot be read"])
def test_a_damaged_cubin(operator, driver, caplog, said):
    for path in (operator.table.directory / CUBINS).iterdir():
        path.write_bytes(path.read_bytes() + b"!") if "SHA" in said else path.unlink()
    q, k, v = tensors()
    for _ in range(2):
        got = operator.attention(q, k, v)
        assert torch.equal(got, F.scaled_dot_product_attention(q, k, v))
    assert driver.modules == []
    assert re.search(said, caplog.text)
    assert operator.explain(q, k, v).code == "damaged"


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuTensorMapEncodeTiled", "cuLaunchKernelEx"])
def test_a_driver_that_refuses(operator, driver, name, caplog):
    driver.refuses = {name}
    q, k, v = tensors()
    for _ in range(2):
        got = operator.attention(q, k, v)
        assert torch.equal(got, F.scaled_dot_product_attention(q, k, v))
    assert driver.capture_modes[-1] == 0
    assert operator.counters()["driver"] == 2
    assert "CUDA_ERROR_INVALID_VALUE" in caplog.text
    driver.refuses = set()  # it would do now, and is not asked again for such tensors
    operator.attention(q, k, v)
    assert (driver.launches, operator.counters()) == ([], {"driver": 3})
    operator.attention(*tensors(seqlen=250))
    assert len(driver.launches) == 1


def test_a_fork_falls_back(tmp_path):
    """The child has no CUDA context; in a process of its own, since a test's has threads."""
    code = f"""
import os, sys
sys.path[:0] = {[str(Path(fake_driver.__file__).parent)]!r}
import torch
from pathlib import Path
from attending import Kernel
from fake_driver import FakeDriver
from operators import close, make, shifted, tensors  # noqa: E402
from packages import H100, shape, table, winner
from attnsweep.serve.runtime.operator import Operator

torch.set_num_threads(1)
driver = FakeDriver(Kernel())
made = Operator(table(Path({str(tmp_path)!r}), winner(shape())), "forked", driver, ("cpu",))
made.planner.gpus[0] = made.table.gpus[H100]
q = torch.randn(1, 4, 256, 64).bfloat16()
early = os.fork()
if not early:  # before a kernel was used, a child is as good as any process
    made.attention(q, q, q)
    os._exit(made.counters() != {{"kernel": 1}})
k, v = q.clone(), q.clone()
for _ in range(4):  # the last ones are known from before
    made.attention(q, k, v)
late = os.fork()
if not late:
    made.counts.update(dict.fromkeys(made.counts, 0))
    made.attention(q, k, v)
    got = made.attention(q, q, q)
    right = torch.equal(got, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    os._exit(not right or made.counters() != {{"fork": 2}})
assert os.waitpid(early, 0)[1] == os.waitpid(late, 0)[1] == 0
made.attention(q, k, v)
assert made.counters() == {{"kernel": 5}}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_gradients_by_pytorchs_backward(operator, driver, name, known, pytorchs):
    """By the backend that PyTorch would have called, also of a call that is known from before."""
    pytorchs.backend = 3 if name == "cudnn" else 1
    seen = {}

    def flash(grad, q, k, v, out, lse, *rest, scale=None):
        seen.update(lse=lse, causal=rest[5], scale=scale, lengths=rest[2:4], dropout=rest[4])
        return flash_backward(grad, q, k, v, out, lse, *rest, scale=scale)

    def cudnn(grad, q, k, v, out, lse, *rest, scale=None):
        assert lse.shape == (*q.shape[:3], 1)
        return flash(grad, q, k, v, out, lse[..., 0], None, None, *rest[5:], scale=scale)

    called = {"flash": flash, "cudnn": cudnn}[name]
    q, k, v = (t.requires_grad_() for t in tensors())
    for _ in range(1 + 3 * known):
        out = operator.attention(q, k, v, is_causal=True)
    direction = torch.randn_like(out)
    with aten(**{f"_scaled_dot_product_{name}_attention_backward": called}):
        got = torch.autograd.grad(out, (q, k, v), direction)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(
        F.scaled_dot_product_attention(*doubles, is_causal=True), doubles, direction.double()
    )
    for mine, right in zip(got, expected, strict=True):
        assert torch.allclose(mine.double(), right, atol=3e-2, rtol=3e-2)
    assert (seen["causal"], seen["lengths"], seen["dropout"]) == (True, (256, 256), 0.0)
    assert seen["scale"] == pytest.approx(0.125)
    assert seen["lse"].shape == (1, 4, 256)
    assert operator.counters() == {"kernel": 1 + 3 * known}


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), torch.tensor(0.3), 1])
def test_a_scale_of_any_type_that_pytorch_takes(operator, driver, scale):
    q, k, v = tensors()
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale)
    assert close(operator.attention(q, k, v, scale=scale), expected)
    assert operator.explain(q, k, v, scale=scale).code == "tuned"
    assert operator.counters() == {"kernel": 1}


def test_a_scale_that_changes_in_place(operator):
    """A tensor is found in a cache by what it is, not by what it holds."""
    q, k, v = tensors()
    scale = torch.tensor(0.05)
    operator.attention(q, k, v, scale=scale)
    scale.fill_(0.9)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.9)
    assert close(operator.attention(q, k, v, scale=scale), expected)


@pytest.mark.parametrize("scale", [1e39, 3.3e38, 1e300, 1e-39])
def test_a_scale_beyond_32_bits(operator, scale):
    q, k, v = tensors()
    operator.attention(q, k, v, scale=scale)
    assert operator.counters() == {"scale": 1}


@pytest.mark.parametrize("stride", [2**31, 2**40])
def test_the_stride_of_a_lone_sample_is_never_used(operator, stride):
    """That of the first of a few samples of gigabytes, say."""
    q, k, v = tensors()
    far = q.as_strided(q.shape, (stride, *q.stride()[1:]))
    assert torch.empty_like(far).stride()[0] == stride
    out = operator.attention(far, k, v)
    assert close(out, F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"kernel": 1}


def test_a_kernel_that_another_thread_found_damaged_meanwhile(operator, driver):
    """Between a thread's question whether a plan has launches and its own launch."""
    q, k, v = tensors()
    assert operator.explain(q, k, v).kernel, "planned before either calls"
    driver.refuses.add("cuModuleLoadData")
    other = threading.Thread(target=operator.attention, args=(q, k, v))

    def slowly(tensor, **_):
        if threading.current_thread() is not other and not other.ident:
            other.start()
            other.join(10)
        return tensor.new_empty_strided(tensor.shape, tensor.stride())

    with aten(empty_like=slowly):
        out = operator.attention(q, k, v)
    assert close(out, F.scaled_dot_product_attention(q, k, v))
    assert operator.counters() == {"driver": 2}
    assert not driver.launches

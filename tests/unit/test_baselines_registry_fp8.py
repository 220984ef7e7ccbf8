"""Baselines of problems in FP8: which bytes and scales they get, and which cannot run them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_baselines import Attention, Cudnn, Session, installed
from fake_torch import Tensor, torch_of

import attnsweep
from attnsweep.baselines import cudnn
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.prepare import prepare
from attnsweep.baselines.registry import BACKENDS
from attnsweep.core.problem import Problem
from attnsweep.specs.model import OWN_BF16, in_other_format

PROBLEM = Problem(2, 8, 2, 64, 128, 64, "fp16", causal=True)


@pytest.fixture
def torch(monkeypatch):
    made = torch_of()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def fp8(dtype="e4m3", causal=True, keys=128, **sizes):
    return Problem(2, 8, 2, 64, keys, 64, dtype, causal=causal)


def fp8_inputs(problem, seed=0):
    """Bytes as numbers of any size: a fake tensor does not know that e4m3 has eight bits."""
    random = np.random.default_rng(seed)
    made = {t: Tensor(random.standard_normal(problem.shape_of(t)), "uint8") for t in "qkv"}
    for name in problem.inputs[3:]:
        scale = random.uniform(0.5, 2, problem.shape_of(name)).astype(np.float32)
        if problem.dtype == "e4m3_tensor":
            scale[:] = scale[0, 0]
        made[name] = Tensor(scale, "float32")
    return [made]


@pytest.mark.parametrize("dtype", ["e4m3", "e4m3_tensor"])
def test_flash_attention_3_takes_the_same_bytes_and_scales(torch, monkeypatch, dtype):
    package = Attention("fa3_fwd_interface")
    installed(monkeypatch, package)
    given = fp8_inputs(fp8(dtype))
    prepare("flash_attn_3_fp8", fp8(dtype), given, Session([0.0]))
    tensors, options = package.calls[0]
    for tensor, name in zip(tensors, "qkv", strict=True):
        assert (np.swapaxes(tensor.array, 1, 2) == given[0][name].array).all()
        assert (options[f"{name}_descale"].array == given[0][f"{name}_scale"].array).all()
        assert options[f"{name}_descale"].shape == (2, 2)
    assert options["causal"] is True


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("flash_attn_3_fp8", "e4m3_block", "FlashAttention-3 has one scale of each head of keys"),
        ("cudnn", "e4m3", "cuDNN has one scale of each tensor: dtype e4m3_tensor"),
        ("cudnn", "e4m3_block", "cuDNN has one scale of each tensor"),
        ("torch_flash", "e4m3", "torch_flash does not do e4m3"),
        ("flash_attn_3", "e4m3_tensor", "flash_attn_3 does not do e4m3_tensor"),
        ("triton_flash", "e4m3", "does not do e4m3"),
        ("unfused", "e4m3", "does not do e4m3"),
    ],
)
def test_a_baseline_without_this_fp8_says_so(torch, monkeypatch, name, dtype, reason):
    installed(monkeypatch, Attention("fa3_fwd_interface"))
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn())
    with pytest.raises(Unavailable, match=reason):
        prepare(name, fp8(dtype), fp8_inputs(fp8(dtype)), Session([0.0]))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("causal", "keys"), [(True, 128), (True, 64), (False, 64)])
def test_cudnn_in_fp8_gets_the_scales_of_the_tensors(torch, layout, causal, keys):
    module, problem = Cudnn(), fp8("e4m3_tensor", causal, keys)
    way = cudnn.build_fp8(torch, module, problem, 77, layout, "BFLOAT16")
    (graph,) = module.graphs
    assert graph.types == ("e4m3", "float", "float")
    assert module.streams == {graph.handle: 77}
    assert graph.options["right_bound"] == (0 if causal else None)
    assert graph.options["diagonal_alignment"] == ("top" if keys == 64 else "bottom")
    assert (graph.options["attn_scale"], graph.options["generate_stats"]) == (1 / 8, False)
    assert graph.out.told["data_type"] == "bf16"
    (given,) = fp8_inputs(problem)
    out = way.forward(*way.convert(*given.values()))
    assert (out.dtype, way.finish) == ("bfloat16", None)
    ((buffers, _, _),) = graph.executed
    uids = {name: tensor["uid"] for name, tensor in graph.tensors.items()}
    for name in "qkv":
        assert (buffers[uids[name]].array == given[name].array).all()
        descale = buffers[uids[f"descale_{name}"]]
        assert descale.shape == (1, 1, 1, 1)
        assert descale.array.item() == given[f"{name}_scale"].array[1, 1]
    of_p = buffers[uids["scale_s"]].array.item()
    assert buffers[uids["descale_s"]].array.item() * of_p == 1
    assert of_p <= 448
    assert buffers[uids["scale_o"]].array.item() == 1
    largest = {tensor.told["uid"] for tensor in graph.largest}
    assert {*uids.values(), graph.out.told["uid"], *largest} == {*buffers}
    assert len(buffers) == 3 + 6 + 1 + 2


def test_where_cudnn_writes_no_bf16_its_output_has_the_scale_of_v(torch, monkeypatch):
    module, problem = Cudnn(unsupported={"bf16"}), fp8("e4m3_tensor")
    monkeypatch.setitem(sys.modules, "cudnn", module)
    ways = BACKENDS["cudnn"].ways(torch, problem, Session([0.0]))
    assert [graph.out.told["data_type"] for graph in module.graphs] == [
        *["bf16"] * 2,
        *["e4m3"] * 2,
    ]
    (given,) = fp8_inputs(problem)
    of_v = given["v_scale"].array[0, 0]
    for way in ways:
        inputs = way.convert(*given.values())
        assert way.forward(*inputs).dtype == "float8_e4m3fn"
        assert inputs[-1].array.item() == pytest.approx(1 / of_v)
        stored = Tensor(np.full(problem.shape_of("o"), 3.0))
        np.testing.assert_allclose(way.finish(stored, *inputs).array, 3.0 * of_v, rtol=1e-6)


def test_where_cudnn_writes_bf16_its_other_output_is_spare(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn())
    ways = BACKENDS["cudnn"].ways(torch, fp8("e4m3_tensor"), Session([0.0]))
    assert [(way.spare, way.finish is None) for way in ways] == [(False, True)] * 2 + [
        (True, False)
    ] * 2


def test_cudnn_that_does_neither_is_a_reason(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(unsupported={"bf16", "e4m3"}))
    problem = fp8("e4m3_tensor")
    with pytest.raises(Unavailable, match=r"^No bf16 output$"):
        prepare("cudnn", problem, fp8_inputs(problem), Session([0.0]))


@pytest.fixture
def ours(monkeypatch):
    """The attention that comes with attnsweep; its explanation can be set."""
    made = SimpleNamespace(calls=[], kernel="BLOCK_N=128", reason="a recorded winner")

    def attention(*tensors, **options):
        made.calls.append((tensors, options))
        return tensors[0]

    monkeypatch.setitem(attnsweep.__dict__, "attention", attention)
    monkeypatch.setitem(attnsweep.__dict__, "explain_attention", lambda *_, **__: made)
    return made


@pytest.mark.parametrize("dtype", ["e4m3", "e4m3_tensor", "e4m3_block"])
def test_our_bf16_gets_the_values_that_the_bytes_stand_for(torch, ours, dtype):
    problem = fp8(dtype, causal=False, keys=300)
    (given,) = fp8_inputs(problem)
    prepare(OWN_BF16, problem, [given], Session([0.0]))
    (tensors, options), *_ = ours.calls
    assert options == {"is_causal": False, "enable_gqa": True}
    for tensor, name in zip(tensors, "qkv", strict=True):
        assert tensor.dtype == "bfloat16"
        for row in (0, 63, 127, 128, problem.shape_of(name)[2] - 1):
            if row >= problem.shape_of(name)[2]:
                continue
            scale = given[f"{name}_scale"].array[1, 1]
            factor = scale[row // 128] if scale.ndim else scale
            expected = given[name].array[1, -1, row] * factor
            np.testing.assert_allclose(tensor.array[1, -1, row], expected, rtol=1e-6)


def test_our_bf16_is_a_row_that_says_why_where_pytorch_would_answer(torch, ours):
    ours.kernel, ours.reason = None, "this GPU was not tuned"
    problem = fp8(causal=False)
    with pytest.raises(Unavailable, match="no kernel of ours in bf16 serves it: this GPU was not"):
        prepare(OWN_BF16, problem, fp8_inputs(problem), Session([0.0]))
    with pytest.raises(Unavailable, match="aligned top-left alone"):
        prepare(OWN_BF16, fp8(), fp8_inputs(fp8()), Session([0.0]))
    with pytest.raises(Unavailable, match="attnsweep_bf16 does not do fp16"):
        prepare(OWN_BF16, PROBLEM, fp8_inputs(PROBLEM), Session([0.0]))


def test_a_baseline_in_the_problems_own_format_is_a_base():
    assert in_other_format("flash_attn_3_fp8", PROBLEM)
    assert not in_other_format("flash_attn_3_fp8", fp8())
    assert not in_other_format("cudnn", fp8("e4m3_tensor"))
    assert in_other_format(OWN_BF16, fp8())

"""How peers are called, on a PyTorch of numbers: which way is chosen, and why one cannot run."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import attnsweep
from attnsweep.gpu import cudnn_graph, peers
from attnsweep.gpu.peers import PACKAGES, WAYS, Baseline, Unavailable, Way, prepare
from attnsweep.problem import Problem
from attnsweep.spec.model import BASELINES, KNOWN_BASELINES, OWN_BF16, in_other_format

PROBLEM = Problem(2, 8, 2, 64, 128, 64, "fp16", True)


class Tensor:
    """The part of a torch tensor that peers use, on NumPy."""

    def __init__(self, array, dtype="float16"):
        self.array, self.dtype, self.device = np.asarray(array), dtype, "cuda"

    shape = property(lambda self: self.array.shape)

    def element_size(self):
        return 2

    def view(self, *shape):
        return self if isinstance(shape[0], str) else Tensor(self.array.reshape(shape), self.dtype)

    def transpose(self, one, other):
        return Tensor(np.swapaxes(self.array, one, other), self.dtype)

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array), self.dtype)

    def to(self, dtype):
        return Tensor(self.array, dtype)

    def float(self):
        return Tensor(self.array.astype(np.float32), "float32")

    def abs(self):
        return Tensor(np.abs(self.array), self.dtype)

    def amax(self, dim):
        return Tensor(self.array.max(axis=dim), self.dtype)

    def clamp(self, min):
        return Tensor(np.maximum(self.array, min), self.dtype)

    def repeat_interleave(self, count, dim):
        return Tensor(np.repeat(self.array, count, axis=dim), self.dtype)

    def copy_(self, other):
        self.array[...] = other.array

    def cpu(self):
        return self

    def numpy(self):
        return self.array.astype(np.float16).view(np.int16)

    def reshape(self, *shape):
        return Tensor(self.array.reshape(shape), self.dtype)

    def __rtruediv__(self, value):
        return Tensor(value / self.array, self.dtype)

    def __mul__(self, other):
        return Tensor(self.array * other.array, self.dtype)

    def __truediv__(self, other):
        value = other.array if isinstance(other, Tensor) else other
        return Tensor(self.array / value, self.dtype)

    def __getitem__(self, index):
        return Tensor(self.array[index], self.dtype)


def torch_of():
    """A PyTorch whose graphs replay what they hold."""
    names = ("float16", "bfloat16", "float32", "float8_e4m3fn", "int16", "int32", "uint8")
    torch = SimpleNamespace(**{name: name for name in names})
    torch.from_dlpack = lambda array: array
    torch.set_float32_matmul_precision = lambda precision: None
    torch.empty = lambda size, dtype, device: SimpleNamespace(size=size, dtype=dtype)
    torch.full = lambda shape, value, dtype, device: Tensor(np.full(shape, value), dtype)
    torch.empty_like = lambda tensor: tensor
    torch.empty_strided = lambda shape, strides, dtype, device: SimpleNamespace(
        strides=strides, dtype=dtype
    )
    torch.backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
    torch.cuda = SimpleNamespace(
        ExternalStream=lambda pointer: SimpleNamespace(pointer=pointer, synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        graph=lambda graph, stream: nullcontext(),
    )
    return torch


class Stream(nullcontext):
    ptr = 77


class Session:
    """Its clock is moved by the calls that it times."""

    free_bytes = 1 << 40

    def __init__(self, clock):
        self.stream, self.clock = Stream(), clock

    def synchronize(self):
        pass

    def time_us(self, work):
        before = self.clock[0]
        work()
        return self.clock[0] - before


@pytest.fixture
def torch(monkeypatch):
    made = torch_of()
    monkeypatch.setattr(peers, "_import_torch", lambda: made)
    return made


def inputs(problem=PROBLEM, copies=2, seed=0):
    random = np.random.default_rng(seed)
    return [
        {t: Tensor(random.standard_normal(problem.shape_of(t))) for t in "qkv"}
        for _ in range(copies)
    ]


def timed(ways, monkeypatch, torch, name="torch_flash"):
    """prepare() with these ways to call a peer: name of a way to microseconds, or its error."""
    clock, called = [0.0], []

    def way(label, us, spare):
        def forward(*_):
            called.append(label)
            if isinstance(us, Exception):
                raise us
            clock[0] += us
            return label

        return Way(forward, spare=spare)

    replays = []

    def graph_of():
        # A replay takes what the captured calls took.
        graph = SimpleNamespace(us=0.0)

        def replay():
            clock[0] += graph.us
            replays.append(graph.us)

        graph.replay = replay
        return graph

    class Capture:
        def __init__(self, graph, stream):
            self.graph = graph

        def __enter__(self):
            self.before = clock[0]

        def __exit__(self, *_):
            self.graph.us = clock[0] - self.before

    torch.cuda.CUDAGraph, torch.cuda.graph = graph_of, Capture
    made = [way(label, us, spare=label.startswith("spare")) for label, us in ways.items()]
    monkeypatch.setitem(WAYS, name, lambda *_: made)
    baseline = prepare(name, PROBLEM, inputs(), Session(clock))
    return baseline._way.forward(), called


def test_the_fastest_of_several_ways_is_taken_and_those_that_fail_are_none(torch, monkeypatch):
    ways = {"a": 40.0, "b": RuntimeError("out of resources"), "c": 10.0, "d": 12.0, "e": 11.0}
    assert timed(ways, monkeypatch, torch)[0] == "c"


def test_a_spare_way_is_tried_only_if_none_before_it_works(torch, monkeypatch):
    assert timed({"a": 40.0, "spare": 10.0}, monkeypatch, torch) == ("a", ["a", "a"])
    ways = {"a": RuntimeError("no fp16"), "spare": 10.0}
    assert timed(ways, monkeypatch, torch)[0] == "spare"


def test_if_every_way_fails_the_first_reason_is_told(torch, monkeypatch):
    ways = {"a": RuntimeError("too many\nlines"), "b": Unavailable("another")}
    with pytest.raises(Unavailable, match=r"^too many$"):
        timed(ways, monkeypatch, torch)


def test_converted_inputs_are_converted_again_where_they_are(torch):
    calls = []
    way = Way(lambda *given: calls.append(given), lambda q, k, v: (q / 2.0, k))
    copies = [tuple(copy.values()) for copy in inputs()]
    baseline = Baseline(way, copies, Session([0.0]), rounds_scores=0)
    baseline.enqueue(1)
    first = calls[0][0]
    np.testing.assert_allclose(first.array, copies[1][0].array / 2)
    copies[1][0].array *= 3
    baseline.refresh()
    baseline.enqueue(1)
    assert calls[1][0] is first  # captured graphs hold its address
    np.testing.assert_allclose(first.array, copies[1][0].array / 2)


def test_every_baseline_has_ways_and_says_how_to_get_it():
    assert set(WAYS) == set(PACKAGES) == set(KNOWN_BASELINES) == {*BASELINES, OWN_BF16}
    assert all(package.fix for package in PACKAGES.values())


# -- FlashAttention -------------------------------------------------------------------------


class Attention(ModuleType):
    """A package whose flash_attn_func keeps what it was called with, or raises."""

    def __init__(self, name, error=None):
        super().__init__(name)
        self.calls, self.error = [], error

    def flash_attn_func(self, *tensors, **options):
        if self.error:
            raise self.error
        self.calls.append((tensors, options))
        return tensors[0], "lse"


def installed(monkeypatch, *packages):
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package.__name__, package)


def flash_3(torch, name="flash_attn_3", dtype="fp16"):
    problem = Problem(2, 8, 2, 64, 128, 64, dtype, True)
    return prepare(name, problem, inputs(problem), Session([0.0]))


def test_flash_attention_3_comes_from_either_package(torch, monkeypatch):
    whole, forward_only = Attention("flash_attn_interface"), Attention("fa3_fwd_interface")
    installed(monkeypatch, whole, forward_only)
    flash_3(torch)
    (tensors, options) = whole.calls[0]
    assert [x.shape for x in tensors] == [(2, 64, 8, 64), (2, 128, 2, 64), (2, 128, 2, 64)]
    assert options == {"causal": True}
    assert forward_only.calls == []  # two in one process may clash
    installed(monkeypatch, forward_only)
    flash_3(torch, dtype="bf16")
    assert forward_only.calls


def test_what_one_package_cannot_do_the_other_does(torch, monkeypatch):
    broken = Attention("flash_attn_interface", RuntimeError("head_dim 64 was not compiled"))
    forward_only = Attention("fa3_fwd_interface")
    installed(monkeypatch, broken, forward_only)
    flash_3(torch, dtype="bf16")
    assert forward_only.calls
    with pytest.raises(Unavailable, match="head_dim 64 was not compiled"):
        flash_3(torch)


def test_without_a_package_for_the_dtype_it_says_what_to_install(torch, monkeypatch):
    installed(monkeypatch, Attention("fa3_fwd_interface"))
    with pytest.raises(Unavailable, match="fa3-fwd does not do fp16: pip install tokenspeed-fa3"):
        flash_3(torch)
    installed(monkeypatch)
    with pytest.raises(Unavailable, match=r"not installed: pip install tokenspeed-fa3 .* fa3-fwd"):
        flash_3(torch)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_fp8_inputs_are_scaled_by_batch_and_head_of_k_before_any_call(torch, monkeypatch, dtype):
    package = Attention("fa3_fwd_interface")
    installed(monkeypatch, package)
    baseline = flash_3(torch, "flash_attn_3_fp8", dtype)
    (q, k, v), options = package.calls[0]
    assert [x.dtype for x in (q, k, v)] == ["float8_e4m3fn"] * 3
    own = inputs(Problem(2, 8, 2, 64, 128, 64, dtype, True))[0]
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        descale = options[f"{name}_descale"]
        assert (descale.shape, descale.dtype) == ((2, 2), "float32")
        assert np.abs(tensor.array).max(axis=(1, 3)).max() == pytest.approx(448, rel=1e-5)
        heads = tensor.shape[2]
        back = tensor.array * np.repeat(descale.array, heads // 2, axis=1)[:, None, :, None]
        np.testing.assert_allclose(np.swapaxes(back, 1, 2), own[name].array, rtol=1e-4, atol=1e-6)
    assert options["causal"] is True
    before = len(package.calls)
    baseline.enqueue()
    assert package.calls[before][0][0] is q  # not converted in the call


# -- cuDNN ----------------------------------------------------------------------------------


class Cudnn(ModuleType):
    """cuDNN's frontend: the methods that a forward needs, with the names of their arguments."""

    def __init__(self, version=91900, unsupported=()):
        super().__init__("cudnn")
        self.graphs, self.streams, self.destroyed = [], {}, []
        self.version, self.unsupported = version, unsupported
        names = {"HALF": "half", "BFLOAT16": "bf16", "FLOAT": "float", "FP8_E4M3": "e4m3"}
        self.data_type = SimpleNamespace(**names)
        self.diagonal_alignment = SimpleNamespace(TOP_LEFT="top", BOTTOM_RIGHT="bottom")
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")

    def backend_version(self):
        return self.version

    def create_handle(self):
        return 1000 + len(self.graphs)

    def destroy_handle(self, handle):
        self.destroyed.append(handle)

    def set_stream(self, handle, stream):
        self.streams[handle] = stream

    def pygraph(self, *, handle, io_data_type, intermediate_data_type, compute_data_type):
        graph = Graph(self, handle, (io_data_type, intermediate_data_type, compute_data_type))
        self.graphs.append(graph)
        return graph


class Graph:
    def __init__(self, cudnn, handle, types):
        self.cudnn, self.handle, self.types = cudnn, handle, types
        self.tensors, self.steps, self.executed = {}, [], []

    def tensor(self, dim, stride, data_type=None, name="", uid=-1):
        self.tensors[name] = {"dim": dim, "stride": stride, "type": data_type, "uid": uid}
        return name

    def sdpa(
        self, q, k, v, attn_scale=None, generate_stats=None, diagonal_alignment="top",
        diagonal_band_right_bound=None, compute_data_type=None, name="",
    ):  # fmt: skip
        self.options = dict(locals())
        self.out = Output()
        return self.out, None

    def sdpa_fp8(
        self, q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o,
        attn_scale=None, diagonal_alignment="top", right_bound=None, compute_data_type=None,
        name="", generate_stats=None,
    ):  # fmt: skip
        self.options = dict(locals())
        self.out, self.largest = Output(), (Output(), Output())
        return self.out, None, *self.largest

    def check_support(self):
        self.steps.append("check_support")
        if self.out.told["data_type"] in self.cudnn.unsupported:
            raise RuntimeError("No bf16 output\nhere")
        if self.tensors["q"]["stride"][1] in self.cudnn.unsupported:
            raise RuntimeError("No valid engine configs\nfor this graph")

    def validate(self):
        self.steps.append("validate")

    def build_operation_graph(self):
        self.steps.append("build_operation_graph")

    def create_execution_plans(self, modes):
        self.steps.append(tuple(modes))

    def build_plans(self):
        self.steps.append("build_plans")

    def get_workspace_size(self):
        return 0

    def execute(self, buffers, workspace, handle=None):
        self.executed.append((buffers, workspace, handle))


class Output:
    def __init__(self):
        self.told = {}

    def __getattr__(self, name):
        def tell(value):
            self.told[name.removeprefix("set_")] = value
            return self

        return tell


STRIDES = {"bhsd": (32768, 4096, 64, 1), "bshd": (32768, 64, 512, 1)}  # q of PROBLEM


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("causal", "square"), [(True, False), (True, True), (False, False)])
def test_cudnn_is_asked_for_the_problem_and_planned_once(torch, layout, dtype, causal, square):
    cudnn = Cudnn()
    problem = Problem(2, 8, 2, 64, 64 if square else 128, 64, dtype, causal)
    forward, convert = cudnn_graph.build(torch, cudnn, problem, 77, layout)
    (graph,) = cudnn.graphs
    kind = "half" if dtype == "fp16" else "bf16"
    assert graph.types == (kind, "float", "float")
    assert cudnn.streams == {graph.handle: 77}
    assert graph.steps == [
        *("validate", "build_operation_graph", ("A", "fallback"), "check_support", "build_plans")
    ]
    keys = problem.seqlen_k
    assert graph.tensors["q"]["dim"] == [2, 8, 64, 64]
    assert graph.tensors["k"]["dim"] == graph.tensors["v"]["dim"] == [2, 2, keys, 64]
    assert tuple(graph.tensors["q"]["stride"]) == STRIDES[layout]
    assert len({tensor["uid"] for tensor in graph.tensors.values()}) == 3
    assert graph.options["attn_scale"] == 1 / 8
    assert graph.options["generate_stats"] is False
    assert graph.options["diagonal_band_right_bound"] == (0 if causal else None)
    assert graph.options["diagonal_alignment"] == ("top" if square else "bottom")
    assert graph.out.told["output"] is True
    assert tuple(graph.out.told["stride"]) == STRIDES[layout]
    q, k, v = (Tensor(np.zeros(problem.shape_of(t))) for t in "qkv")
    for _ in range(2):
        out = forward(q, k, v)
    (buffers, workspace, handle), (_, again, _) = graph.executed
    assert list(buffers.values())[:3] == [q, k, v]
    assert out.strides == STRIDES[layout]
    assert graph.out.told["uid"] == list(buffers)[3]
    assert (workspace.size, handle) == (1, graph.handle)
    assert workspace is again
    assert (convert is None) == (layout == "bhsd")
    if convert is not None:
        laid = convert(q, k, v)[0].array
        assert laid.shape == (2, 8, 64, 64)
        assert [stride // laid.itemsize for stride in laid.strides] == [*STRIDES["bshd"]]


def test_a_layout_that_cudnn_refuses_is_left_out_and_both_are_a_reason(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(unsupported={4096}))
    ways = WAYS["cudnn"](torch, PROBLEM, Session([0.0]))
    assert [way.convert is not None for way in ways] == [True]
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(unsupported={4096, 64}))
    with pytest.raises(Unavailable, match=r"^No valid engine configs$"):
        prepare("cudnn", PROBLEM, inputs(), Session([0.0]))


def test_another_cudnn_than_pytorchs_is_not_timed(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(version=91000))
    with pytest.raises(Unavailable, match="loads cuDNN 91000, but PyTorch has 91900"):
        prepare("cudnn", PROBLEM, inputs(), Session([0.0]))


def test_without_the_frontend_it_says_how_to_get_it(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(Unavailable, match="pip install nvidia-cudnn-frontend"):
        prepare("cudnn", PROBLEM, inputs(), Session([0.0]))


def test_a_handle_ends_with_its_call(torch):
    cudnn = Cudnn()
    forward, _ = cudnn_graph.build(torch, cudnn, PROBLEM, 77, "bhsd")
    assert cudnn.destroyed == []
    del forward
    assert cudnn.destroyed == [cudnn.graphs[0].handle]


# -- FP8 ------------------------------------------------------------------------------------


def fp8(dtype="e4m3", causal=True, keys=128, **sizes):
    return Problem(2, 8, 2, 64, keys, 64, dtype, causal)


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
        ("torch_flash", "e4m3", "torch_flash is no baseline for e4m3: it takes no FP8 inputs"),
        ("flash_attn_3", "e4m3_tensor", "flash_attn_3 is no baseline for e4m3_tensor"),
        ("triton_flash", "e4m3", "it takes no FP8 inputs"),
        ("unfused", "e4m3", "it takes no FP8 inputs"),
    ],
)
def test_a_peer_without_this_fp8_says_so(torch, monkeypatch, name, dtype, reason):
    installed(monkeypatch, Attention("fa3_fwd_interface"))
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn())
    with pytest.raises(Unavailable, match=reason):
        prepare(name, fp8(dtype), fp8_inputs(fp8(dtype)), Session([0.0]))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("causal", "keys"), [(True, 128), (True, 64), (False, 64)])
def test_cudnn_in_fp8_gets_the_scales_of_the_tensors(torch, layout, causal, keys):
    module, problem = Cudnn(), fp8("e4m3_tensor", causal, keys)
    way = cudnn_graph.build_fp8(torch, module, problem, 77, layout, "BFLOAT16")
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
    ways = WAYS["cudnn"](torch, problem, Session([0.0]))
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
    with pytest.raises(Unavailable, match="attnsweep_bf16 is no baseline for fp16: it stands"):
        prepare(OWN_BF16, PROBLEM, inputs(), Session([0.0]))


def test_a_peer_in_the_problems_own_format_is_a_base():
    assert in_other_format("flash_attn_3_fp8", PROBLEM)
    assert not in_other_format("flash_attn_3_fp8", fp8())
    assert not in_other_format("cudnn", fp8("e4m3_tensor"))
    assert in_other_format(OWN_BF16, fp8())


# -- Triton ---------------------------------------------------------------------------------


class Kernel:
    """A kernel of Triton's: keeps what it is warmed up and launched with."""

    def __init__(self, function):
        self.launched, self.warmed = [], []

    def warmup(self, *arguments, grid, **constants):
        self.warmed.append((arguments, constants))

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


@pytest.fixture
def triton(monkeypatch):
    made = ModuleType("triton")
    made.Config = lambda kwargs, num_warps, num_stages: SimpleNamespace(
        kwargs=kwargs, num_warps=num_warps, num_stages=num_stages
    )
    made.jit = Kernel
    made.cdiv = lambda a, b: -(-a // b)
    made.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    made.AsyncCompileMode = lambda pool, ignore_errors: nullcontext()
    language = ModuleType("triton.language")
    monkeypatch.setitem(sys.modules, "triton", made)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "attnsweep.gpu.triton_flash", raising=False)
    module = importlib.import_module("attnsweep.gpu.triton_flash")
    yield module
    sys.modules.pop("attnsweep.gpu.triton_flash", None)


def test_triton_is_tuned_for_the_very_problem_over_24_configs_and_more(torch, triton):
    """It was tuned once for a key without batch and heads, from ten configs, with a cold L2."""
    problem = Problem(3, 8, 2, 100, 128, 96, "bf16", True)
    ways = WAYS["triton_flash"](torch, problem, Session([0.0]))
    assert len(ways) == len(triton.CONFIGS) >= 24
    settings = {(*c.kwargs.values(), c.num_warps, c.num_stages) for c in triton.CONFIGS}
    assert len(settings) == len(triton.CONFIGS)
    for way in ways:
        way.forward(*inputs(problem)[0].values())
    grids = {(grid, tuple(constants.items())) for grid, _, constants in triton._forward.launched}
    assert len(grids) == len(triton.CONFIGS)
    for (grid, arguments, constants), (warm, same) in zip(
        triton._forward.launched, triton._forward.warmed, strict=True
    ):
        assert grid == (-(-100 // constants["BLOCK_M"]), 3 * 8)
        assert arguments[5:] == (4, 100, 128) == warm[5:]
        assert constants == same  # what was compiled ahead is what is launched
        assert (constants["HEAD_DIM"], constants["BLOCK_D"]) == (96, 128)


def test_an_older_triton_compiles_at_the_first_call(torch, triton, monkeypatch):
    monkeypatch.delattr(sys.modules["triton"], "AsyncCompileMode")
    triton.compile_all("float16", (1, 2, 64, 64), (1, 2, 64, 64), causal=False)
    assert triton._forward.warmed == []

"""How baselines are called, on a PyTorch of numbers: the chosen way, or why none can run."""

import gc
import importlib
import sys
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from fake_baselines import Attention, Cudnn, Session, installed
from fake_torch import Tensor, torch_of

import attnsweep
from attnsweep.baselines import cudnn as baselines_cudnn
from attnsweep.baselines import fp8 as baselines_fp8
from attnsweep.baselines.backend import Unavailable, Way
from attnsweep.baselines.prepare import BoundBaseline, prepare
from attnsweep.baselines.registry import BACKENDS
from attnsweep.core.problem import Problem
from attnsweep.specs.model import (
    BASELINES,
    CUDNN_DETERMINISTIC,
    FLASHINFER,
    FLEX,
    KNOWN_BASELINES,
    OF_PAGED,
    OWN_BF16,
    VARLEN,
)

PROBLEM = Problem(2, 8, 2, 64, 128, 64, "fp16", causal=True)


@pytest.fixture
def torch(monkeypatch):
    made = torch_of()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def inputs(problem=PROBLEM, copies=2, seed=0):
    random = np.random.default_rng(seed)
    return [{t: Tensor(random.standard_normal(problem.shape_of(t))) for t in "qkv"} for _ in range(copies)]


class Ways:
    """Ways to call a baseline, whose calls take what a test says, on a clock of their own.

    us: name of a way to microseconds, or its error. A pair is the microseconds of a call that the
    host launches, and of one in a graph. called: the ways, and those for each shape of q.
    """

    launch_us = 13.0  # of a graph, which one of few calls does not hide

    def __init__(self, us, torch):
        self.us, self.clock, self.called, self.of_shape, self.captured = us, [0.0], [], {}, False
        torch.cuda.CUDAGraph, torch.cuda.graph = SimpleNamespace, self.capture

    @contextmanager
    def capture(self, graph, stream):
        """A replay takes what the captured calls took."""
        before, self.captured = self.clock[0], True
        yield
        us, self.captured = self.clock[0] - before, False
        graph.replay = lambda: self.clock.__setitem__(0, self.clock[0] + self.launch_us + us)

    def way(self, label, own=None):
        own = own or self.us

        def forward(q, *_):
            self.called.append(label)
            self.of_shape.setdefault(q.shape, {})[label] = None
            if isinstance(us := own[label], Exception):
                raise us
            self.clock[0] += us[self.captured] if isinstance(us, tuple) else us
            return label

        return Way(forward, spare=label.startswith("spare"))

    def all(self, torch, problem, session):
        return [self.way(label) for label in self.us]


def timed(us, monkeypatch, torch, name="torch_flash"):
    """What prepare() takes of these ways, and what was called."""
    ways = Ways(us, torch)
    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], builders={"forward": ways.all}))
    baseline = prepare(name, PROBLEM, inputs(), Session(ways.clock))
    baseline.enqueue()
    return ways.called[-1], ways.called


def test_the_fastest_of_several_ways_is_taken_and_those_that_fail_are_none(torch, monkeypatch):
    ways = {"a": 40.0, "b": RuntimeError("out of resources"), "c": 10.0, "d": 12.0, "e": 11.0}
    assert timed(ways, monkeypatch, torch)[0] == "c"


def test_ways_are_compared_in_graphs_as_they_are_then_timed(torch, monkeypatch):
    ways = {"a": (10.0, 9.0), "launched slowly": (80.0, 4.0), "b": (12.0, 8.0), "c": (9.0, 9.0)}
    assert timed(ways, monkeypatch, torch)[0] == "launched slowly"
    assert timed({"host stood still": (5_000.0, 9.0), "b": (12.0, 10.0)}, monkeypatch, torch)[0] == "host stood still"


def test_a_spare_way_is_tried_only_if_none_before_it_works(torch, monkeypatch):
    assert timed({"a": 40.0, "spare": 10.0}, monkeypatch, torch) == ("a", ["a", "a"])
    ways = {"a": RuntimeError("no fp16"), "spare": 10.0}
    assert timed(ways, monkeypatch, torch)[0] == "spare"


def test_if_every_way_fails_the_first_reason_is_told(torch, monkeypatch):
    ways = {"a": RuntimeError("too many\nlines"), "b": Unavailable("another")}
    with pytest.raises(Unavailable, match=r"^too many$"):
        timed(ways, monkeypatch, torch)


LONG = Problem.parse("(1,32,131072,128) bf16 causal")
SHORT = Problem.parse("(1,32,16384,128) bf16 causal")


class OfBoth(Ways):
    """Ways that may take something else on the long problem."""

    def __init__(self, on_short, on_long, torch):
        super().__init__(on_short, torch)
        self.on_long = on_long

    def all(self, torch, problem, session):
        own = self.us if problem == SHORT else self.on_long
        return [self.way(label, own) for label in own]


def called_on(torch, monkeypatch, on_short, **on_long):
    """The ways that are called on a shorter problem and on the long one; `us` as `Ways` has them."""
    ways = OfBoth(on_short, on_long or on_short, torch)
    torch.randn = lambda shape, device: Tensor(np.broadcast_to(np.float32(1), shape))
    monkeypatch.setitem(BACKENDS, "triton_flash", replace(BACKENDS["triton_flash"], builders={"forward": ways.all}))
    prepare("triton_flash", LONG, [{t: torch.randn(LONG.shape_of(t), "cuda") for t in "qkv"}], Session(ways.clock))
    assert {*ways.of_shape} <= {SHORT.shape_of("q"), LONG.shape_of("q")}
    return ["".join(ways.of_shape.get(each.shape_of("q"), "")) for each in (SHORT, LONG)]


def test_of_a_long_problem_the_way_that_is_fastest_on_a_shorter_one_is_left(torch, monkeypatch):
    ways = {"a": 40.0, "b": 10.0, "c": 20.0}
    assert called_on(torch, monkeypatch, ways) == ["abc", "b"]
    ways["b"] = RuntimeError("out of resources")
    assert called_on(torch, monkeypatch, ways) == ["abc", "c"]


@pytest.mark.parametrize(
    "ways",
    [{"a": RuntimeError("no"), "b": RuntimeError("no"), "c": RuntimeError("no")}, {"a": 1.0}],
    ids=["none works there", "another number of ways there"],
)
def test_of_a_long_problem_all_ways_stay_where_a_shorter_one_tells_nothing(ways, torch, monkeypatch):
    assert called_on(torch, monkeypatch, ways, a=3.0, b=2.0, c=1.0)[1] == "abc"


def test_converted_inputs_are_converted_again_where_they_are(torch):
    calls = []
    way = Way(lambda *given: calls.append(given), lambda q, k, v: (q / 2.0, k))
    copies = [tuple(copy.values()) for copy in inputs()]
    baseline = BoundBaseline(way, copies, Session([0.0]), rounds_scores=0)
    baseline.enqueue(1)
    first = calls[0][0]
    np.testing.assert_allclose(first.array, copies[1][0].array / 2)
    copies[1][0].array *= 3
    baseline.refresh()
    baseline.enqueue(1)
    assert calls[1][0] is first  # captured graphs hold its address
    np.testing.assert_allclose(first.array, copies[1][0].array / 2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_output_is_written_where_it_is_judged_in_the_problems_type(torch, dtype):
    copies = [tuple(copy.values()) for copy in inputs()]
    way = Way(lambda q, k, v: q * q, finish=lambda out, q, k, v: out / 2)
    baseline = BoundBaseline(way, copies, Session([0.0]), rounds_scores=0, dtype=dtype)
    expected = copies[0][0].array ** 2 / 2
    into = Tensor(np.zeros(expected.shape), "int16")
    baseline.enqueue()
    baseline.collect(0, [into])
    np.testing.assert_allclose(into.array, expected)
    with pytest.raises(ValueError, match=r"its output has the shape \(2, "):
        baseline.collect(0, [Tensor(np.zeros((1, *expected.shape)), "int16")])


def test_every_baseline_has_ways_and_says_how_to_get_it():
    asked = {OWN_BF16, FLEX, VARLEN, CUDNN_DETERMINISTIC, *OF_PAGED, *FLASHINFER} - {"flash_attn_3", "flash_attn_3_fp8"}
    assert set(BACKENDS) == set(KNOWN_BASELINES) == {*BASELINES} | asked
    assert all(backend.package.fix for backend in BACKENDS.values())


# -- FlashAttention -------------------------------------------------------------------------


def flash_3(torch, name="flash_attn_3", dtype="fp16"):
    problem = Problem(2, 8, 2, 64, 128, 64, dtype, causal=True)
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


def test_flash_attention_3_may_split_the_keys_where_queries_are_few(torch, monkeypatch):
    whole = Attention("flash_attn_interface")
    installed(monkeypatch, whole)
    ways = BACKENDS["flash_attn_3"].ways(torch, PROBLEM, Session([0.0]))
    for way in ways:
        way.forward(*inputs()[0].values())
    assert [options.get("num_splits") for _, options in whole.calls] == [None, 0]
    square = Problem(2, 8, 2, 128, 128, 64, "fp16", causal=True)
    assert len(BACKENDS["flash_attn_3"].ways(torch, square, Session([0.0]))) == 1


def test_flash_attention_3_takes_padded_problems_as_caches_that_are_filled_in_part(torch, monkeypatch):
    whole = Attention("flash_attn_interface")
    installed(monkeypatch, whole)
    padded = Problem.parse("(3,8/2,1x200,64) bf16 full padded(right,30) scale(1) softcap(20)")
    ways = BACKENDS["flash_attn_3"].ways(torch, padded, Session([0.0]))
    (given,) = inputs(padded, copies=1)
    outputs = [way.forward(*given.values()) for way in ways]
    assert [out.shape for out in outputs] == [padded.shape_of("o")] * 2
    for (tensors, options), splits in zip(whole.calls, ({}, {"num_splits": 0}), strict=True):
        assert [x.shape for x in tensors] == [(3, 1, 8, 64), (3, 200, 2, 64), (3, 200, 2, 64)]
        lengths = options.pop("cache_seqlens")
        assert (lengths.dtype, lengths.array.tolist()) == ("int32", [60, 130, 200])
        assert options == {"softmax_scale": 1.0, "softcap": 20.0} | splits


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_3_ready"])
@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"CONFIG": {}},
        {"CONFIG": {"build_flags": {}}},
        {"CONFIG": {"build_flags": {"FLASH_ATTENTION_DISABLE_HDIMDIFF64": True}}},
    ],
)
def test_a_flash_attention_3_without_the_kernel_of_latent_keys_is_not_timed(torch, monkeypatch, name, config):
    """It takes the call, and computes 64 of 512 columns: an output that is wrong, faster than light."""
    installed(monkeypatch, Attention("flash_attn_interface"))
    monkeypatch.delitem(sys.modules, "flash_attn_config", raising=False)
    if config is not None:
        monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace(**config))
    problem = Problem.parse("(4,16/1,1x150,576/512) bf16 causal paged(64) value_in_key")
    with pytest.raises(Unavailable, match="no head_dim 64 beside values of 512, and so reads no qv"):
        BACKENDS[name].ways(torch, problem, Session([0.0]))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("flash_attn_3", "(3,8/2,1x200,64) bf16 full padded(right,0)", None),
        ("flash_attn_3", "(3,8/2,1x200,64) bf16 full padded(left,30)", "no padding on the left"),
        ("flash_attn_3", "(3,8,200,64) bf16 causal padded(right,30)", "beside no other mask"),
        ("flash_attn_3", "(3,8,200,64) bf16 full padded(right,30) backward", "beside no other mask"),
        ("flash_attn_3", "(3,8,1x200,64) bf16 boolean(padding,7)", "boolean"),
        ("flash_attn_2", "(3,8,1x200,64) bf16 full padded(right,30)", "no padding"),
        ("flash_attn_3_fp8", "(3,8,1x200,64) e4m3 full padded(right,30)", "no padding"),
    ],
)
def test_which_padding_flash_attention_can_say(name, text, reason):
    said = BACKENDS[name].supports(Problem.parse(text))
    assert said is reason is None or (said is not None and reason is not None and reason in said)


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
    own = inputs(Problem(2, 8, 2, 64, 128, 64, dtype, causal=True))[0]
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


STRIDES = {"bhsd": (32768, 4096, 64, 1), "bshd": (32768, 64, 512, 1)}  # q of PROBLEM


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("causal", "square"), [(True, False), (True, True), (False, False)])
def test_cudnn_is_asked_for_the_problem_and_planned_once(torch, layout, dtype, causal, square):
    cudnn = Cudnn()
    problem = Problem(2, 8, 2, 64, 64 if square else 128, 64, dtype, causal=causal)
    way = baselines_cudnn.build(torch, cudnn, problem, 77, layout)
    forward, convert = way.forward, way.convert
    (graph,) = cudnn.graphs
    kind = "half" if dtype == "fp16" else "bf16"
    assert graph.types == (kind, "float", "float")
    assert cudnn.streams == {graph.handle: 77}
    assert graph.steps == [*("validate", "build_operation_graph", ("A", "fallback"), "check_support", "build_plans")]
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


def integers(graph, name):
    """The numbers of an input in the last call, as they are told and as they are."""
    told, (buffers, *_) = graph.tensors[name], graph.executed[-1]
    given = buffers[told["uid"]]
    assert given.shape == tuple(told["dim"])
    assert given.dtype == told["type"]
    return given.array.ravel().tolist()


@pytest.mark.parametrize(
    ("text", "left", "right"),
    [("64,64) bf16 causal", None, 0), ("64,64) bf16 window(8,3)", 9, 3), ("64x128,64) bf16 full", None, None)],
)
def test_cudnn_is_told_lengths_of_keys_beside_all_queries(torch, monkeypatch, text, left, right):
    cudnn, problem = Cudnn(), Problem.parse(f"(3,8/2,{text} padded(right,40)")
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    ways = BACKENDS["cudnn"].ways(torch, problem, Session([0.0]))
    assert len(ways) == 2
    for way, graph in zip(ways, cudnn.graphs, strict=True):
        way.forward(*(Tensor(np.zeros(problem.shape_of(t))) for t in "qkv"))
        options = graph.options
        assert (options["use_padding_mask"], options["seq_len_q"]) == (True, "seq_len_q")
        assert integers(graph, options["seq_len_q"]) == [64] * 3
        assert integers(graph, options["seq_len_kv"]) == [end for _, end in problem.key_ranges]
        assert options["diagonal_band_left_bound"] == left
        assert options["diagonal_band_right_bound"] == right
        assert options["diagonal_alignment"] == ("bottom" if "full" in text else "top")
        assert graph.tensors["q"]["dim"] == [3, 8, 64, 64]
        uids = [told["uid"] for told in graph.tensors.values()]
        assert len({*uids, graph.out.told["uid"]}) == 6


@pytest.mark.parametrize(("sizes", "aligned"), [("300", "top"), ("200x300", "bottom")])
def test_cudnn_gets_packed_sequences_as_ragged_tensors(torch, monkeypatch, sizes, aligned):
    problem = Problem.parse(f"(1,8/2,{sizes},64/32) bf16 causal packed(3,40)")
    cudnn = Cudnn()
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    (way,) = BACKENDS["cudnn"].ways(torch, problem, Session([0.0]))
    (graph,) = cudnn.graphs
    given = way.convert(*(Tensor(np.zeros(problem.shape_of(t))) for t in "qkv"))
    assert [each.shape for each in given] == [
        *((problem.seqlen_q, 8, 64), (problem.seqlen_k, 2, 64), (problem.seqlen_k, 2, 32))
    ]
    assert way.forward(*given).shape == problem.shape_of("o")
    assert graph.options["diagonal_alignment"] == aligned
    of_q, of_k = ([0, *(end for _, end in each)] for each in zip(*problem.sequence_ranges, strict=True))
    for name, begins, heads, columns in (
        ("q", of_q, 8, 64),
        ("k", of_k, 2, 64),
        ("v", of_k, 2, 32),
        ("o", of_q, 8, 32),
    ):
        longest = int(np.diff(begins).max())
        told = graph.out.told if name == "o" else graph.tensors[name]
        assert list(told["dim"]) == [3, heads, longest, columns]
        assert list(told["stride"]) == [longest * heads * columns, columns, heads * columns, 1]
        ragged = told["ragged_offset"] if name == "o" else graph.options[name].ragged
        assert integers(graph, ragged) == [begin * heads * columns for begin in begins]
    assert integers(graph, graph.options["seq_len_q"]) == np.diff(of_q).tolist()
    assert integers(graph, graph.options["seq_len_kv"]) == np.diff(of_k).tolist()


def test_offsets_of_large_tensors_have_64_bits(torch, monkeypatch):
    problem, cudnn = Problem.parse("(1,64,600000,64) bf16 causal packed(2)"), Cudnn()
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    BACKENDS["cudnn"].ways(torch, problem, Session([0.0]))
    assert {name: told["type"] for name, told in cudnn.graphs[0].tensors.items() if told["type"] != "bf16"} == {
        **dict.fromkeys(("of_q", "of_k", "of_v", "of_o"), "int64"),
        **dict.fromkeys(("seq_len_q", "seq_len_kv"), "int32"),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(2,8,64,64) bf16 full padded(left,40)", "no padding on the left"),
        ("(2,8,64,64) bf16 boolean(causal,item)", "has no mask"),
        ("(2,8,64x128,64) bf16 causal padded(right,40)", "to the last key of each item"),
        ("(2,8,64x128,64) bf16 full padded(right,40)", None),
        ("(2,8,64,64) bf16 causal padded(right,40) backward", None),
        ("(1,8,256,64) bf16 window(9,0) packed(3)", None),
        ("(2,8,64,64) e4m3_tensor causal padded(right,40)", None),
    ],
)
def test_what_cudnn_cannot_say_is_refused_with_the_reason(text, reason):
    said = BACKENDS["cudnn"].supports(Problem.parse(text))
    assert said is reason is None or (said is not None and reason is not None and reason in said)


def test_a_layout_that_cudnn_refuses_is_left_out_and_both_are_a_reason(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(unsupported={4096}))
    ways = BACKENDS["cudnn"].ways(torch, PROBLEM, Session([0.0]))
    assert [way.convert is not None for way in ways] == [True]
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(unsupported={4096, 64}))
    with pytest.raises(Unavailable, match=r"^No valid engine configs$"):
        prepare("cudnn", PROBLEM, inputs(), Session([0.0]))


@pytest.mark.parametrize(
    ("module", "said"),
    [(Cudnn(version=91000), "loads cuDNN 91000, but PyTorch has 91900"), (None, "pip install nvidia-cudnn-frontend")],
    ids=["another than PyTorch's", "no frontend"],
)
def test_a_cudnn_that_is_not_timed_is_a_reason(torch, monkeypatch, module, said):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    with pytest.raises(Unavailable, match=said):
        prepare("cudnn", PROBLEM, inputs(), Session([0.0]))


# -- Triton ---------------------------------------------------------------------------------


class Kernel:
    """A kernel of Triton's. They keep what they are warmed up and launched with.

    compiled: what warming up gives, if it is anything.
    """

    def __init__(self, function):
        Kernel.launched, Kernel.warmed, Kernel.compiled = [], [], iter(())

    def warmup(self, *arguments, grid, **constants):
        self.warmed.append((arguments, constants))
        return next(self.compiled, None)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


@pytest.fixture
def triton(monkeypatch):
    made = ModuleType("triton")
    made.Config = lambda kwargs, num_warps, num_stages: SimpleNamespace(
        kwargs=kwargs, num_warps=num_warps, num_stages=num_stages
    )
    made.jit = Kernel
    made.autotune = lambda configs, **how: lambda kernel: SimpleNamespace(fn=kernel, configs=configs)
    made.cdiv = lambda a, b: -(-a // b)
    made.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    made.AsyncCompileMode = lambda pool, ignore_errors: nullcontext()
    language = ModuleType("triton.language")
    monkeypatch.setitem(sys.modules, "triton", made)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "attnsweep.baselines.triton_kernel", raising=False)
    module = importlib.import_module("attnsweep.baselines.triton_kernel")
    yield module
    sys.modules.pop("attnsweep.baselines.triton_kernel", None)


def test_triton_is_tuned_for_the_very_problem_over_24_configs_and_more(torch, triton):
    problem = Problem(3, 8, 2, 100, 128, 96, "bf16", causal=True)
    ways = BACKENDS["triton_flash"].ways(torch, problem, Session([0.0]))
    assert len(ways) == len(triton.CONFIGS) >= 24
    settings = {(*c.kwargs.values(), c.num_warps, c.num_stages) for c in triton.CONFIGS}
    assert len(settings) == len(triton.CONFIGS)
    for way in ways:
        way.forward(*inputs(problem)[0].values())
    assert len({tuple(constants.items()) for _, _, constants in Kernel.launched}) == len(triton.CONFIGS)
    for (grid, arguments, constants), (warm, same) in zip(Kernel.launched, Kernel.warmed, strict=True):
        assert grid(constants) == (-(-100 // constants["BLOCK_M"]), 3 * 8)
        assert arguments[5:] == (4, 100, 128) == warm[5:]
        assert constants == same  # what was compiled ahead is what is launched
        assert (constants["HEAD_DIM"], constants["BLOCK_D"]) == (96, 128)


def test_no_garbage_is_collected_while_a_baseline_is_captured(torch):
    """A finalizer that waits for the device, as cuDNN's handle's, would end the capture."""
    seen = []
    way = Way(lambda *inputs: seen.append(gc.isenabled()) or inputs[0])
    baseline = BoundBaseline(way, [(Tensor(np.zeros(2)),) * 3], Session([0]), rounds_scores=0)
    baseline.capture(2)
    assert seen == [False, False]
    assert gc.isenabled()


@pytest.mark.parametrize("calls", [1, 4, 5, 30])
def test_some_outputs_of_a_callable_lie_where_nothing_was_written(calls, torch):
    """As calls have the same inputs, one that writes nothing would find there what is right."""
    free, made, written, outputs = [], [0], set(), []

    class Memory(Tensor):
        """As PyTorch gives it, by pieces of two; what was freed last is used again first."""

        def __init__(self):
            super().__init__(np.zeros(2))
            if not free:
                free.extend((made[0], made[0] + 1))
                made[0] += 2
            self.block = free.pop()

        def __del__(self):
            free.append(self.block)

    def forward(*inputs):
        source, out = Memory(), Memory()
        outputs.append((out.block, out.block in written))
        written.update((source.block, out.block))
        return out

    torch.Tensor, torch.empty_like = Memory, lambda one: Memory()
    torch.cuda.memory_reserved = lambda: made[0]
    inputs = [(Tensor(np.zeros(2)),) * 3]
    baseline = BoundBaseline(Way(forward), inputs, Session([0]), rounds_scores=0, held=True)
    baseline.room = 3
    baseline.capture(calls)()
    kept = [used for block, used in outputs if block not in free]
    assert not any(kept)
    assert min(calls, 2) <= len(kept) <= 3


def test_what_is_no_tensor_is_refused_in_a_graph_of_many_calls_too(torch):
    torch.Tensor, torch.strided = Tensor, "strided"
    way = Way(lambda *inputs: str(object()))
    inputs = [(Tensor(np.zeros(2)),) * 3]
    baseline = BoundBaseline(way, inputs, Session([0]), rounds_scores=0, held=True)
    baseline.capture(9)()
    with pytest.raises(Unavailable, match=r"returned str in place of a torch\.Tensor"):
        baseline.kept(0)


def test_a_callable_that_was_called_out_of_step_is_freed_with_its_entry(torch):
    way = Way(lambda *inputs: Tensor(np.zeros(2)))
    inputs = [(Tensor(np.zeros(2)),) * 3]
    baseline = BoundBaseline(way, inputs, Session([0]), rounds_scores=0, held=True)
    baseline.out_of_step(64)
    there = weakref.ref(baseline)
    gc.disable()
    try:
        del baseline
        assert there() is None
    finally:
        gc.enable()


# ----
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
        ("torch_flash", "e4m3", "torch_flash does not do e4m3"),
        ("flash_attn_3", "e4m3_tensor", "flash_attn_3 does not do e4m3_tensor"),
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
    way = baselines_fp8.build_fp8(torch, module, problem, 77, layout, "BFLOAT16")
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
    assert [graph.out.told["data_type"] for graph in module.graphs] == [*["bf16"] * 2, *["e4m3"] * 2]
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
    assert [(way.spare, way.finish is None) for way in ways] == [(False, True)] * 2 + [(True, False)] * 2


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

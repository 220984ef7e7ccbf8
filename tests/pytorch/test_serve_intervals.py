"""window, causal_offset and key_lengths in PyTorch, with a fake driver and kernels of NumPy's."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from attending import seen  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from operators import close, compiled, exact, make, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

import attnsweep  # noqa: E402
from attnsweep.core.layouts import Padded  # noqa: E402
from attnsweep.core.masks import CAUSAL, Interval  # noqa: E402
from attnsweep.serve.runtime import pytorch_calls  # noqa: E402
from attnsweep.serve.runtime.mask_lists import MaskLists  # noqa: E402
from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.sdpa_patch import sdpa  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, ROWS = 2, 4, 128
SIZES = ((ROWS, ROWS), (ROWS, 192), (192, ROWS))
KINDS = ("window", "padded", "boolean", "causal")


def kernels(*kinds):
    """Winners of these kinds, for each number of queries and keys."""
    made = []
    for rows, keys in SIZES:
        one = shape(BATCH, HEADS, rows, seqlen_k=keys)
        of = {
            "window": [replace(one, mask=Interval(30, 0))],
            "padded": [replace(one, layout=Padded("right", 40))],
            "boolean": [replace(one, mask=one.mask.as_boolean(own)) for own in ((), ("item",))],
            "causal": [replace(one, mask=CAUSAL)] if rows <= keys else [],
        }
        made += [winner(problem, gain=4.0) for kind in kinds for problem in of[kind]]
    return made


@pytest.fixture
def operator(tmp_path, driver, kernel):
    """An operator that has kernels of each kind of mask, and PyTorch's none of these."""
    return make(tmp_path, driver, *kernels("window", "padded", "boolean"))


def given_of(rows=ROWS, keys=ROWS, **options):
    q, _, _ = tensors(BATCH, HEADS, rows, **options)
    _, k, v = tensors(BATCH, HEADS, keys, **options)
    return q, k, v


def right(out, tensors_, scale=None, **limits):
    """Whether an output is what the arguments say, and 0 where a query sees nothing."""
    mask = seen(*tensors_[:2], **limits)
    empty = ~mask.any(-1, keepdim=True)
    return close(out, exact(*tensors_, mask, scale=scale)) and not out[empty.expand_as(out)].any()


LENGTHS = torch.tensor([50, 128])
CASES = {
    "window": {"window": (100, 0)},
    "both sides": {"window": (30, 20)},
    "open on the left": {"window": (None, 20)},
    "open on the right": {"window": [7, -1]},
    "a lone key": {"window": (0, 0)},
    "causal window": {"window": (50, None), "is_causal": True},
    "bottom-right": {"causal_offset": 64},
    "causal with an offset": {"causal_offset": 5, "is_causal": True},
    "behind": {"causal_offset": -3},
    "none": {"causal_offset": -500},
    "a window behind": {"window": (20, None), "causal_offset": -30},
    "right padding": {"key_lengths": LENGTHS},
    "of 32 bits, in a column": {"key_lengths": torch.stack((LENGTHS, LENGTHS), 1).int()[:, 1]},
    "left padding": {"key_lengths": torch.tensor([[50, 128], [0, 128]])},
    "both paddings": {"key_lengths": torch.tensor([[50, 100], [7, 8]])},
    "no key of one": {"key_lengths": torch.tensor([0, 128])},
    "beyond": {"key_lengths": torch.tensor([[-7, 2**40], [100, 50]])},
    "causal padding": {"key_lengths": LENGTHS, "is_causal": True},
    "window and padding": {"key_lengths": LENGTHS, "window": (64, 0)},
    "behind and padding": {"key_lengths": LENGTHS, "causal_offset": -9},
}


@pytest.mark.nightly(push=60)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by", [KINDS[:3], KINDS[2:3], ()])
def test_kernels_and_pytorch_agree(tmp_path, driver, kernel, case, sizes, by):
    """By the kind's own kernel, by one for boolean masks, and by PyTorch."""
    operator = make(tmp_path, driver, *kernels(*by))
    tensors_ = given_of(*sizes)
    assert right(operator.attention(*tensors_, **CASES[case]), tensors_, **CASES[case])
    assert ("kernel" in operator.counters()) == bool(by), operator.counters()
    explained = operator.explain(*tensors_, **CASES[case])
    assert (explained.kernel is not None) == bool(by), explained


def test_a_dense_mask_beyond_32_bits_is_not_scanned(tmp_path, driver):
    """The launch has its strides as such numbers."""
    operator = make(tmp_path, driver, winner(shape(1, 1, 46341, boolean=()), gain=4.0))
    for rows, code in ((46336, "near"), (46341, "too_large")):
        explained = operator.explain(*tensors(1, 1, rows), window=(100, 0))
        assert explained.code == code, explained


def test_bottom_right_is_of_a_causal_kernel(tmp_path, driver):
    """Which needs no scan; and with more queries than keys, whose first see none, it is not one."""
    operator = make(tmp_path, driver, *kernels("causal"))
    tensors_ = given_of(ROWS, 192)
    for limits in ({"causal_offset": 64}, {"window": (-1, 0)}):
        assert right(operator.attention(*tensors_, **limits), tensors_, **limits)
    assert [launch["function"][1] for launch in driver.launches] == ["flash_fwd_wgmma"] * 2
    assert operator.explain(*given_of(192, ROWS), window=(None, 0)).kernel is None


PLAIN = {
    "all": ({"window": (None, -1)}, False),
    "wide": ({"window": (ROWS - 1, 900), "causal_offset": ROWS - 1}, False),
    "causal in a wide window": ({"window": (900, 0)}, True),
    "is_causal": ({"causal_offset": 0}, True),
    "with a window that is open": ({"window": (-1, -1), "is_causal": True}, True),
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_is_causal_says_alone_is_an_ordinary_call(tmp_path, driver, case):
    limits, causal = PLAIN[case]
    operator = make(tmp_path, driver, winner(shape(BATCH, HEADS, ROWS, causal=causal)))
    tensors_ = given_of()
    assert operator.explain(*tensors_, **limits) == operator.explain(*tensors_, is_causal=causal)
    out = operator.attention(*tensors_, **limits)
    assert torch.equal(out, operator.attention(*tensors_, is_causal=causal))
    assert operator.counters() == {"kernel": 2}


# ---- what PyTorch serves ----
@pytest.mark.parametrize("case", CASES)
def test_pytorchs_gradients_are_those_of_float64_whatever_it_does_where_no_key_is_seen(operator, monkeypatch, case):
    """Softmax of a row that is all hidden is NaN, and 0 times NaN is NaN; cuDNN's of 2.11 sees all keys there."""

    def nans(q, k, v, mask, *rest, **how):
        if mask is None:
            return sdpa(q, k, v, mask, *rest, **how)
        scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -1) @ v

    monkeypatch.setattr(pytorch_calls, "sdpa", nans)
    tensors_ = [t[:, :, :64].float().requires_grad_() for t in given_of()]
    direction, limits = torch.randn(BATCH, HEADS, 64, 64), CASES[case]
    got = operator.attention(*tensors_, **limits)
    doubles = [t.detach().double().requires_grad_() for t in tensors_]
    mask = seen(*tensors_[:2], **limits)
    empty = ~mask.any(-1, keepdim=True)
    out = exact(*doubles, mask | empty).masked_fill(empty, 0)
    assert torch.allclose(got, out.float(), atol=1e-4)
    assert not got[empty.expand_as(got)].any()
    expected = torch.autograd.grad(out, doubles, direction.double())
    got = torch.autograd.grad(got, tensors_, direction)
    assert all(torch.allclose(a, b.float(), atol=1e-4) for a, b in zip(got, expected, strict=True))


OTHERS = {
    "another dtype": lambda t: t.double(),
    "another head_dim": lambda t: t[..., :32],
    "few queries": lambda t: t[:, :, :8],
    "negated": torch._neg_view,
    "with gradients": lambda t: t.detach().requires_grad_(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_no_kernel_serves_is_right(operator, driver, what):
    tensors_ = [OTHERS[what](t) for t in given_of()]
    limits = {"window": (5, 1), "key_lengths": torch.tensor([0, 7])}
    assert right(operator.attention(*tensors_, **limits), tensors_, **limits)
    assert operator.explain(*tensors_, **limits).kernel is None
    assert driver.launches == []
    assert sum(operator.counters().values()) == 1


@pytest.mark.parametrize("limits", [{"causal_offset": ROWS - 2}, {"window": (ROWS - 2, None)}])
def test_a_lone_pair_is_hidden(operator, limits):
    q, k, v = given_of()
    v[:, :, [0, -1]] *= 1000
    assert right(operator.attention(q, k, v, **limits), (q, k, v), **limits)


def test_dropout_is_pytorchs(operator, driver):
    tensors_ = given_of()
    torch.manual_seed(1)
    out = operator.attention(*tensors_, dropout_p=0.5, window=(9, 0))
    torch.manual_seed(1)
    mask = seen(*tensors_[:2], window=(9, 0))[0, 0]
    assert torch.equal(out, F.scaled_dot_product_attention(*tensors_, mask, 0.5))
    assert operator.counters() == {"dropout": 1}


def test_windows_of_tensors_of_three_dimensions(operator):
    tensors_ = given_of()
    out = operator.attention(*(t[0] for t in tensors_), window=(9, 0))
    assert right(out[None], [t[:1] for t in tensors_], window=(9, 0))


def test_the_shipped_function_has_the_arguments():
    """On the CPU, where PyTorch serves all."""
    tensors_ = given_of()
    for case in ("window", "behind", "window and padding"):
        out = attnsweep.attention(*tensors_, **CASES[case])
        assert right(out, tensors_, **CASES[case])
    assert torch.equal(attnsweep.attention(*tensors_, cache=False), F.scaled_dot_product_attention(*tensors_))
    one, other = (inspect.signature(each).parameters for each in (attnsweep.attention, Operator.attention))
    assert [*one] == [*other][1:]


# ---- errors ----
WRONG = {
    "window (1, 2, 3)": ({"window": (1, 2, 3)}, TypeError),
    "window is 512": ({"window": 512}, TypeError),
    "window (512.0, 0): 512.0": ({"window": (512.0, 0)}, TypeError),
    "window is (-2, 0)": ({"window": (-2, 0)}, ValueError),
    "causal_offset: 1.5": ({"causal_offset": 1.5}, TypeError),
    "key_lengths is list": ({"key_lengths": [1, 2]}, TypeError),
    "key_lengths is torch.float32": ({"key_lengths": LENGTHS.float()}, TypeError),
    "key_lengths is torch.bool": ({"key_lengths": LENGTHS > 70}, TypeError),
    "key_lengths is (3,), not (2,) or (2, 2)": ({"key_lengths": LENGTHS.new_ones(3)}, ValueError),
    "key_lengths is (2, 1), not": ({"key_lengths": LENGTHS[:, None]}, ValueError),
    "key_lengths is on meta, and query on cpu": ({"key_lengths": LENGTHS.to("meta")}, ValueError),
    "leave these out": ({"window": (9, 0), "attn_mask": torch.ones(ROWS, ROWS, dtype=torch.bool)}, ValueError),
}


@pytest.mark.parametrize("says", WRONG)
def test_errors_name_the_argument_and_its_value(operator, driver, says):
    limits, error = WRONG[says]
    operator.attention(*given_of(), window=(512, 0))  # equals (512.0, 0)
    for call in (operator.attention, operator.explain):
        with pytest.raises(error) as raised:
            call(*given_of(), **limits)
        assert says.replace("window (1", "window is (1") in str(raised.value)


def test_lengths_need_a_batch(operator):
    with pytest.raises(ValueError, match="not of 3 dimensions"):
        operator.attention(*(t[0] for t in given_of()), key_lengths=LENGTHS)


# ---- compiled code ----
@pytest.mark.parametrize("case", ["causal window", "behind", "right padding", "window and padding"])
def test_compiled_code_has_one_operator(operator, kernel, case):
    torch._dynamo.reset()
    tensors_, limits = given_of(), dict(CASES[case])
    lengths = limits.pop("key_lengths", None)
    block, graphs = compiled(lambda q, k, v, n: operator.attention(q, k, v, key_lengths=n, **limits) * 1.0)
    for _ in range(2):
        limits_ = limits if lengths is None else {**limits, "key_lengths": lengths}
        assert right(block(*tensors_, lengths), tensors_, **limits_)
    assert [graph.code.count(".attention_masked.") for graph in graphs] == [1]
    assert kernel.scans == 2, "nothing is kept"


def test_compiled_code_that_no_kernel_serves_is_pytorchs(operator, driver):
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    def block(q, k, v):
        return operator.attention(q, k, v, window=(9, 0))

    tensors_ = [t[:, :, :8] for t in given_of()]
    with torch.no_grad():
        assert right(block(*tensors_), tensors_, window=(9, 0))
    assert "intervals" not in graphs[0]
    assert driver.launches == []


# ---- at random ----
SIDE = st.one_of(st.none(), st.integers(-1, 400))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arguments_at_random(operator, data):
    rows, keys = data.draw(st.sampled_from([*SIZES, (1, 192), (70, 300), (300, 70)]))
    tensors_ = given_of(rows, keys, layout=data.draw(st.sampled_from(["bhsd", "bshd", "packed"])))
    limits = {
        "window": data.draw(st.one_of(st.none(), st.tuples(SIDE, SIDE))),
        "causal_offset": data.draw(st.one_of(st.none(), st.integers(-400, 400))),
        "is_causal": data.draw(st.booleans()),
    }
    if data.draw(st.booleans()):
        end = st.integers(-10, keys + 10)
        of = data.draw(st.sampled_from([end, st.lists(end, min_size=2, max_size=2)]))
        values = data.draw(st.lists(of, min_size=BATCH, max_size=BATCH))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        limits["key_lengths"] = torch.tensor(values, dtype=dtype)
    scale = data.draw(st.sampled_from([None, 0.3]))
    out = operator.attention(*tensors_, scale=scale, **limits)
    assert right(out, tensors_, scale, **limits), operator.explain(*tensors_, **limits)


STEPS = {
    "a mask": lambda s: {"attn_mask": s.mask},
    "lengths": lambda s: {"key_lengths": s.lengths},
    "lengths, causal": lambda s: {"key_lengths": s.lengths, "is_causal": True},
    "lengths in a window": lambda s: {"key_lengths": s.lengths, "window": (9, 9)},
    "lengths without the cache": lambda s: {"key_lengths": s.lengths, "cache": False},
    "a window": lambda s: {"window": (9, 9)},
    "another window": lambda s: {"window": (9, 0)},
    "change both": lambda s: (s.mask.logical_not_(), s.lengths.add_(torch.tensor([7, -11]))),
    "change both behind a view": lambda s: (s.mask[0].zero_(), s.lengths[1:].mul_(2)),
    "change both for others": lambda s: (setattr(s, "mask", ~s.mask), setattr(s, "lengths", s.lengths.flip(0))),
    "another stream": lambda s: setattr(s, "stream", 1 - s.stream),
    "a capture": lambda s: setattr(s, "capture", {0: 1, 1: 2, 2: None, None: 0}[s.capture]),
    "other tensors": lambda s: setattr(s, "given", [t.clone() for t in s.given]),
}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from([*STEPS]), min_size=4, max_size=24))
def test_no_call_of_a_sequence_is_stale(tmp_path, driver, kernel, steps):
    """Calls in any order, between changes of what they read, streams and captures.

    And none scans again what was not changed since, in its stream and its capture.
    """
    state = SimpleNamespace(stream=0, capture=0, given=given_of(), lengths=LENGTHS.clone())
    operator = make(tmp_path, driver, *kernels(*KINDS[:3]))
    operator.launcher.masks = MaskLists(lambda _: state.capture)
    state.mask = torch.rand(BATCH, 1, ROWS, ROWS, generator=torch.Generator().manual_seed(0)) < 0.5
    operator.launcher.stream = lambda _: state.stream
    kept, changes, begun = {}, 0, kernel.scans
    for step in steps:
        limits = STEPS[step](state)
        if not isinstance(limits, dict):
            changes += step.startswith("change")
            continue
        out = operator.attention(*state.given, **limits)
        read = (state.stream, state.capture, changes if {"attn_mask", "key_lengths"} & {*limits} else 0)
        begun += kept.get(step) != read
        assert kernel.scans == begun, steps
        if limits.pop("cache", True) and state.capture is not None:
            kept[step] = read
        mask = limits.pop("attn_mask", None)
        mask = seen(*state.given[:2], **limits) if mask is None else mask
        assert close(out, exact(*state.given, mask)), steps
    assert set(operator.counters()) <= {"kernel"}

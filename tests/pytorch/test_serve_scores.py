"""softcap and sinks in PyTorch, with a fake driver and kernels of NumPy's."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from attending import seen  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from operators import close, compiled, exact, make, tensors, traced  # noqa: E402
from packages import shape, winner  # noqa: E402

from attnsweep.core.masks import CAUSAL, FULL, Interval  # noqa: E402
from attnsweep.core.scores import Scores  # noqa: E402
from attnsweep.serve.runtime import changed_scores  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, ROWS = 2, 4, 128
SINKS = torch.tensor([0.5, -3.0, 2.0, 30.0])
CHANGES = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "sinks of bf16": {"sinks": SINKS.bfloat16()},
    "both": {"softcap": 3, "sinks": torch.stack((SINKS, SINKS), 1)[:, 1]},
}
LENGTHS = torch.tensor([50, 128])
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (30, 0)},
    "behind": {"causal_offset": -5},
    "lengths": {"key_lengths": LENGTHS, "is_causal": True},
}


def kernels(heads_kv=HEADS):
    """Of each mask and each change, as fast as anything."""
    one = shape(BATCH, HEADS, ROWS, heads_kv=heads_kv)
    masks = (FULL, CAUSAL, Interval(30, 0), *(FULL.as_boolean(own) for own in ((), ("item",))))
    scores = (Scores(2.0), Scores(0, True), Scores(2.0, True))
    return [winner(replace(one, mask=mask, scores=how), gain=4.0) for mask in masks for how in scores]


@pytest.fixture
def operator(tmp_path, driver):
    return make(tmp_path, driver, *kernels())


@pytest.fixture
def without(tmp_path, driver):
    """An operator that has no such kernels."""
    return make(tmp_path, driver, winner(shape(BATCH, HEADS, ROWS)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("by", ["operator", "without"])
def test_kernels_and_pytorch_agree(request, by, mask, change):
    operator = request.getfixturevalue(by)
    given_ = q, k, _ = tensors(BATCH, HEADS, ROWS)
    how = MASKS[mask] | CHANGES[change]
    out = operator.attention(*given_, **how)
    assert close(out, exact(*given_, seen(q, k, **MASKS[mask]), **CHANGES[change]))
    explained = operator.explain(*given_, **how)
    assert (explained.kernel is not None) == (by == "operator"), explained
    assert operator.counters() == {"kernel" if by == "operator" else explained.code: 1}


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by", ["operator", "without"])
def test_beside_a_mask(request, by, dtype):
    operator = request.getfixturevalue(by)
    given_ = tensors(BATCH, HEADS, ROWS)
    mask = torch.randn(BATCH, 1, ROWS, ROWS)
    mask = (mask > 0) if dtype is torch.bool else mask.to(dtype)
    mask[:, :, 3] = False if dtype is torch.bool else -torch.inf
    out = operator.attention(*given_, mask, sinks=SINKS)
    assert close(out, exact(*given_, mask, sinks=SINKS))
    assert not out[:, :, 3].any()
    assert ("kernel" in operator.counters()) == (by == "operator" and dtype is torch.bool)


def test_sinks_that_change_are_read_anew(operator):
    given_, sinks = tensors(BATCH, HEADS, ROWS), SINKS.clone()
    for number in (0.0, 5.0, -20.0):
        sinks.fill_(number)
        out = operator.attention(*given_, window=(30, 0), sinks=sinks)
        mask = seen(*given_[:2], window=(30, 0))
        assert close(out, exact(*given_, mask, sinks=sinks))


def test_a_softcap_is_not_another(operator):
    """One plan each: a launch has its own number."""
    given_ = [8 * each for each in tensors(BATCH, HEADS, ROWS)]
    for softcap in (1.0, 7.0, None, 0, torch.tensor(3.0)):
        out = operator.attention(*given_, softcap=softcap)
        assert close(out / 8, exact(*given_, softcap=float(softcap or 0)) / 8), softcap


@pytest.mark.parametrize("softcap", [1e-9, 1e9])
def test_a_softcap_beyond_what_kernels_hold_is_pytorchs(operator, softcap):
    given_ = tensors(BATCH, HEADS, ROWS)
    assert close(operator.attention(*given_, softcap=softcap), exact(*given_, softcap=softcap))
    assert operator.counters() == {"scores": 1}


def gradients(function, *inputs):
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    out = function(*inputs)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad(out, inputs, seed.to(out.dtype))


@pytest.mark.parametrize("mask", MASKS)
def test_gradients(operator, mask):
    """By PyTorch's operators, also for sinks, and finite where a query sees nothing."""
    q, k, v = tensors(BATCH, HEADS, ROWS, 2)
    how = {"softcap": 2.0, "enable_gqa": True, **MASKS[mask]}
    got = gradients(lambda q, k, v, s: operator.attention(q, k, v, sinks=s, **how), q, k, v, SINKS)
    hides = seen(q, k, **MASKS[mask])
    wanted = gradients(lambda q, k, v, s: exact(q, k, v, hides, 2.0, s), *(t.double() for t in (q, k, v, SINKS)))
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()
    assert operator.counters() == {"scores": 1}
    with torch.no_grad():
        operator.attention(q, k, v, sinks=SINKS.clone().requires_grad_(), enable_gqa=True)
    assert "kernel" in operator.counters()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_arguments(operator, data):
    rows, keys = (data.draw(st.sampled_from([1, 7, ROWS])) for _ in "qk")
    q, _, _ = tensors(BATCH, HEADS, rows)
    _, k, v = tensors(BATCH, HEADS, keys, data.draw(st.sampled_from([1, 4])))
    how = {}
    if data.draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(-1, 140))
        how["window"] = (data.draw(side), data.draw(side))
    if data.draw(st.booleans()):
        how["causal_offset"] = data.draw(st.integers(-150, 150))
    if data.draw(st.booleans()):
        how["key_lengths"] = torch.tensor(data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2)))
    change = CHANGES[data.draw(st.sampled_from([*CHANGES]))]
    scale = data.draw(st.sampled_from([None, 0.3]))
    out = operator.attention(q, k, v, scale=scale, enable_gqa=True, **how, **change)
    assert close(out, exact(q, k, v, seen(q, k, **how), scale=scale, **change)), (how, change)


def test_many_queries_are_computed_in_parts(without, constants):
    """873 of these at once, and then 327, which see other keys."""
    constants(changed_scores, _MOST_SCORES=2**20)
    q, k, _ = given_ = tensors(1, 1, 1200)
    out = without.attention(*given_, window=(10, 0), sinks=SINKS[:1])
    assert close(out, exact(*given_, seen(q, k, window=(10, 0)), sinks=SINKS[:1]))


def test_under_autocast(operator, without):
    given_ = [each.float() for each in tensors(BATCH, HEADS, ROWS)]
    for each in (operator, without):
        with torch.autocast("cpu", torch.bfloat16):
            out = each.attention(*given_, softcap=2.0)
        assert out.dtype is torch.bfloat16
        assert close(out, exact(*given_, softcap=2.0))
    assert operator.counters() == {"kernel": 1}


def test_dropout_is_pytorchs(operator):
    q, k, _ = tensors(BATCH, HEADS, ROWS)
    out = operator.attention(q, k, torch.ones_like(k), dropout_p=0.5, softcap=2.0)
    assert operator.counters() == {"dropout": 1}
    assert 0.9 < out.float().mean() < 1.1
    assert out.float().std() > 0.03


FAULTS = {
    "a negative softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0, not a number above 0"),
    "no number": ({"softcap": "50"}, ValueError, "softcap is '50'"),
    "infinite": ({"softcap": float("inf")}, ValueError, "softcap is inf"),
    "a list": ({"sinks": [0.0] * HEADS}, TypeError, "sinks is list, not a tensor"),
    "whole numbers": ({"sinks": torch.arange(HEADS)}, TypeError, "sinks is torch.int64"),
    "too few": ({"sinks": SINKS[:2]}, ValueError, "one number for each head"),
    "of items": ({"sinks": SINKS.expand(2, 4)}, ValueError, "one number for each head"),
    "elsewhere": ({"sinks": SINKS.to("meta")}, ValueError, "sinks is on meta"),
    "two masks": ({"softcap": 1.0, "is_causal": True, "attn_mask": torch.ones(ROWS, ROWS).bool()}, ValueError,
        "attn_mask and is_causal"),
    "a mask of whole numbers": ({"softcap": 1.0, "attn_mask": torch.ones(ROWS, ROWS).long()}, TypeError,
        "attn_mask is torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input(operator, fault):
    how, error, what = FAULTS[fault]
    for call in (operator.attention, operator.explain):
        with pytest.raises(error, match=what):
            call(*tensors(BATCH, HEADS, ROWS), **how)
    assert operator.counters() == {}


def test_heads_that_do_not_agree(without):
    given_ = tensors(BATCH, HEADS, ROWS, 2)
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        without.attention(*given_, softcap=2.0)
    q, k, v = given_
    with pytest.raises(ValueError, match="do not divide"):
        without.attention(q[:, :3], k, v, softcap=2.0, enable_gqa=True)
    with pytest.raises(ValueError, match="4 dimensions"):
        without.attention(q[0], k[0], v[0], softcap=2.0)


# ---- compiled code ----
@pytest.mark.parametrize("mask", MASKS)
def test_compiled_code_has_one_operator(operator, mask):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    how = MASKS[mask] | CHANGES["both"]
    function, graphs = compiled(lambda q, k, v: operator.attention(q, k, v, **how))
    assert close(function(q, k, v), exact(q, k, v, seen(q, k, **MASKS[mask]), **CHANGES["both"]))
    assert ["attention_masked" in graph.code for graph in graphs] == [True]
    assert operator.counters() == {"kernel": 1}


def test_compiled_gradients_are_pytorchs(operator):
    q, k, v = tensors(BATCH, HEADS, ROWS)

    def attention(q, k, v):
        return operator.attention(q, k, v, softcap=2.0, is_causal=True)

    graphs, got = traced(attention, (q, k, v))
    assert not any("forward_masked" in each for each in graphs)
    inputs = [each.double().requires_grad_() for each in (q, k, v)]
    exact(*inputs, seen(q, k, is_causal=True), 2.0).sum().backward()
    for one, other in zip(got, inputs, strict=True):
        assert (one - other.grad).norm() <= 1e-2 * other.grad.norm()

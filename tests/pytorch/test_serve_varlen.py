"""Packed sequences in PyTorch, with a fake driver and kernels of NumPy's."""

import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import operators  # noqa: E402
from attending import Kernel, seen  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from operators import alive, close, compiled, make  # noqa: E402
from packages import package_of, shape, winner  # noqa: E402

from attnsweep.core.layouts import Packed  # noqa: E402
from attnsweep.core.scores import Scores  # noqa: E402
from attnsweep.serve.runtime.packed import VarlenOperator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS, HEADS = 256, 4
OPTIONS = {"causal": False, "window": None, "scale": None, "softcap": None, "sinks": None}


def kernels():
    one = replace(shape(1, HEADS, TOKENS), layout=Packed(3))
    return [winner(replace(one, scores=each), gain=4.0) for each in (Scores(), Scores(0, True))]


@pytest.fixture
def operator(tmp_path, driver, kernel):
    return make(tmp_path, driver, *kernels())


@functools.cache
def of(operator):
    return VarlenOperator(operator)


def varlen(operator, q, k, v, of_q, of_k=None, *, longest=(None, None), cache=True, **options):
    of_k = of_q if of_k is None else of_k
    how = {"dropout_p": 0.0, "cache": cache, **OPTIONS, **options}
    return of(operator).attention(q, k, v, of_q, of_k, *longest, **how)


def packed(tokens=TOKENS, keys=None, heads_kv=HEADS):
    torch.manual_seed(0)
    sizes = ((tokens, HEADS), (keys or tokens, heads_kv), (keys or tokens, heads_kv))
    return [torch.randn(*each, 64).bfloat16() for each in sizes]


def begins(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def exact(q, k, v, of_q, of_k=None, causal=False, window=None, **how):
    """In float64, one sequence after the other; 0 where a query sees no key."""
    out, of_k = torch.zeros_like(q, dtype=torch.float64), of_q if of_k is None else of_k
    for one in range(len(of_q) - 1):
        rows, keys = (slice(each[one], each[one + 1]) for each in (of_q.tolist(), of_k.tolist()))
        given_ = [t[of].transpose(0, 1)[None] for t, of in ((q, rows), (k, keys), (v, keys))]
        offset = given_[1].shape[2] - given_[0].shape[2] if causal else None
        mask = seen(*given_[:2], window=window, causal_offset=offset)
        out[rows] = operators.exact(*given_, mask, **how)[0].transpose(0, 1)
    return out


CASES = {
    "full": ((0, 100, 101, 256), None, {}),
    "causal": ((0, 100, 101, 256), None, {"causal": True}),
    "window": ((0, 10, 200, 256), None, {"window": (20, 5)}),
    "causal window": ((0, 10, 200, 256), None, {"window": (20, -1), "causal": True}),
    "other keys": ((0, 100, 120, 256), (0, 8, 200, 256), {"causal": True}),
    "empty ones": ((0, 0, 256, 256), (0, 100, 100, 256), {}),
    "tokens of none": ((0, 50, 60, 200), (0, 70, 80, 190), {"window": (None, 3)}),
    "sinks": ((0, 100, 101, 256), None, {"sinks": torch.tensor([1.0, -2.0, 0.0, 9.0])}),
    "grouped": ((0, 100, 101, 256), None, {"causal": True, "scale": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_and_pytorch_agree(tmp_path, driver, kernel, case, served, dtype):
    operator = make(tmp_path, driver, *kernels()[: 2 * served] or [winner(shape(1, HEADS, TOKENS))])
    of_q, of_k, how = CASES[case]
    tensors = packed(heads_kv=2 if case == "grouped" else HEADS)
    cu = [begins(*each, dtype=dtype) for each in (of_q, of_k or of_q)]
    out = varlen(operator, *tensors, *cu, **how)
    assert out.shape == tensors[0].shape
    assert out.is_contiguous()
    assert close(out, exact(*tensors, *cu, **how))
    explained = of(operator).explain(*tensors, *cu, dropout_p=0.0, **OPTIONS | how)
    assert (explained.kernel is not None) == served, explained
    assert operator.counters() == {"kernel" if served else explained.code: 1}


def test_lists_are_kept_until_either_tensor_changes(operator, kernel):
    tensors, of_q, of_k = packed(), begins(0, 100, 101, 256), begins(0, 50, 60, 256)
    for change, scans in (
        (lambda: None, 1),
        (lambda: None, 1),
        (lambda: of_k[1:2].add_(5), 2),
        (lambda: of_q[2:3].add_(5), 3),
        (lambda: None, 3),
    ):
        change()
        assert close(varlen(operator, *tensors, of_q, of_k), exact(*tensors, of_q, of_k))
        assert kernel.scans == scans
    varlen(operator, *tensors, of_q, of_k, cache=False)
    assert kernel.scans == 4
    # The same tensors in each other's place are another packing.
    assert close(varlen(operator, *tensors, of_k, of_q), exact(*tensors, of_k, of_q))
    there, other = alive(), of_k.clone()
    assert close(varlen(operator, *tensors, of_q, other), exact(*tensors, of_q, other))
    assert kernel.scans == 6
    del other
    assert alive() == there


def test_strides_and_v_of_another_head_dim(operator):
    """q, k and v in one tensor, as models have them; with fewer columns v is PyTorch's."""
    (q, k, v), cu = torch.randn(TOKENS, 3, HEADS, 64).bfloat16().unbind(1), begins(0, 100, 101, 256)
    for of_v in (64, 40):
        for how in ({"causal": True}, {"window": (20, 3)}):
            out = varlen(operator, q, k, v[..., :of_v], cu, **how)
            assert close(out, exact(q, k, v, cu, **how)[..., :of_v])
    assert operator.counters()["kernel"] == 2


def test_gradients_are_pytorchs(operator):
    tensors, cu = packed(heads_kv=2), begins(0, 100, 101, 256)
    got = [each.clone().requires_grad_() for each in tensors]
    varlen(operator, *got, cu, causal=True).float().sum().backward()
    wanted = [each.double().requires_grad_() for each in tensors]
    exact(*wanted, cu, causal=True).sum().backward()
    for one, other in zip(got, wanted, strict=True):
        assert (one.grad - other.grad).norm() <= 1e-2 * other.grad.norm()
    assert operator.counters() == {"packed": 1}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing(operator, data):
    def drawn(tokens):
        inner = data.draw(st.lists(st.integers(0, tokens), min_size=2, max_size=2))
        return begins(0, *sorted(inner), tokens)

    tensors = packed(data.draw(st.sampled_from([1, 70, TOKENS])), data.draw(st.sampled_from([1, 90])))
    cu = (drawn(tensors[0].shape[0]), drawn(tensors[1].shape[0]))
    side = st.one_of(st.none(), st.integers(-1, 100))
    how = {"causal": data.draw(st.booleans()), "window": (data.draw(side), data.draw(side))}
    assert close(varlen(operator, *tensors, *cu, **how), exact(*tensors, *cu, **how)), (cu, how)


FAULTS = {
    "a list": ({"of_q": [0, 256]}, TypeError, "cu_seqlens_q is list"),
    "floats": ({"of_k": torch.tensor([0.0, 256.0])}, TypeError, "cu_seqlens_k is torch.float32"),
    "elsewhere": ({"of_q": begins(0, 256).to("meta")}, ValueError, "cu_seqlens_q is on meta"),
    "one number": ({"of_q": begins(0)}, ValueError, "one number for each sequence"),
    "two dimensions": ({"of_q": begins(0, 1)[None]}, ValueError, "one number for each sequence"),
    "not as many": ({"of_q": begins(0, 9, 256)}, ValueError, "3 and 2 numbers"),
    "a window of one": ({"window": 5}, TypeError, "window is 5"),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, "one number for each head"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input(operator, fault):
    how, error, what = FAULTS[fault]
    how = {"of_q": begins(0, 256), "of_k": begins(0, 256)} | how
    with pytest.raises(error, match=what):
        varlen(operator, *packed(), **how)
    with pytest.raises(ValueError, match="packed tensors are"):
        varlen(operator, *(each[None] for each in packed()), begins(0, 256))


def test_compiled_code_has_one_operator(operator):
    tensors, cu, one = packed(), begins(0, 100, 101, 256), of(operator)
    how = OPTIONS | {"causal": True, "dropout_p": 0.0, "cache": True}
    call, graphs = compiled(lambda q, k, v, cu: one.attention(q, k, v, cu, cu, None, None, **how))
    for ends in ((100, 101), (30, 250), (0, 0)):
        cu.data[1:3] = torch.tensor(ends)  # as a compiler does that uses its memory again: PyTorch sees nothing
        assert close(call(*tensors, cu), exact(*tensors, cu, causal=True))
    assert [graph.code.count("forward_varlen") for graph in graphs] == [1]
    assert operator.counters() == {"kernel": 3}


# ---- flash_attn's functions ----
@pytest.fixture
def package(tmp_path):
    driver = FakeDriver(Kernel())
    one = shape(2, HEADS, 128)
    return package_of(tmp_path, driver, *kernels(), winner(one))


@pytest.mark.parametrize("keys", [128, 90, 200])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": True},
        {"window_size": (30, 4)},
        {"softcap": 2.0},
        {"causal": True, "window_size": (9, 9), "softmax_scale": 0.2},
    ],
)
def test_flash_attn_func(package, keys, how):
    q, k, v = (torch.randn(2, 128, HEADS, 64), torch.randn(2, keys, 2, 64), torch.randn(2, keys, 2, 64))
    q, k, v = (each.bfloat16() for each in (q, k, v))
    out = package.flash_attn_func(q, k, v, **how)
    names = {"softmax_scale": "scale", "window_size": "window"}
    ours = {names.get(name, name): value for name, value in how.items()}
    for item in range(2):
        whole = (begins(0, 128), begins(0, keys))
        assert close(out[item], exact(q[item], k[item], v[item], *whole, **ours))
    assert out.is_contiguous()


def test_flash_attn_varlen_func(package):
    tensors, cu = packed(), begins(0, 100, 101, 256)
    out = package.flash_attn_varlen_func(*tensors, cu, cu, 155, 155, causal=True, window_size=(40, 0))
    assert close(out, exact(*tensors, cu, causal=True, window=(40, 0)))
    assert package.counters() == {"kernel": 1}
    explained = package.explain_varlen(*tensors, cu, cu, causal=True)
    assert explained.kernel is not None
    again = package.attention_varlen(*tensors, cu, cu, window=(40, 0))
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", ["alibi_slopes", "return_attn_probs", "deterministic"])
def test_what_flash_attn_computes_alone_is_an_error(package, name):
    tensors, cu = [each.requires_grad_() for each in packed()], begins(0, 256)
    given_ = {name: torch.ones(HEADS) if name == "alibi_slopes" else True}
    with pytest.raises(NotImplementedError, match=name):
        package.flash_attn_func(*(each[None] for each in tensors), **given_)
    with pytest.raises(NotImplementedError, match=name):
        package.flash_attn_varlen_func(*tensors, cu, cu, TOKENS, TOKENS, **given_)
    with pytest.raises(NotImplementedError, match="block_table"):
        package.flash_attn_varlen_func(*tensors, cu, cu, TOKENS, TOKENS, block_table=cu)


def test_a_window_of_one_number_is_refused_in_words(package):
    tensors, cu, said = packed(), begins(0, 256), "window_size is 4, not .left, right., such as .512, 0."
    with pytest.raises(TypeError, match=said):
        package.flash_attn_func(*(each[None] for each in tensors), window_size=4)
    with pytest.raises(TypeError, match=said):
        package.flash_attn_varlen_func(*tensors, cu, cu, TOKENS, TOKENS, window_size=4)

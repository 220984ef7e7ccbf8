"""The whole operator with sizes, masks and arguments drawn at random, against float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from attending import seen  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from operators import exact  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"
SIZES = st.sampled_from([1, 17, 64, 65, 129, 300, 512, 777, 1024, 1500])
KINDS = {
    "causal": lambda i, j, n: j <= i,
    "bottom-right": lambda i, j, n: j <= i + n[1] - n[0],
    "window": lambda i, j, n: (i - j).abs() < 1 + n[2] % 200,
    "padded right": lambda i, j, n: j < n[2] % (n[1] + 1),
    "padded left": lambda i, j, n: j >= n[2] % (n[1] + 1),
    "documents": lambda i, j, n: i * 5 // n[0] == j * 5 // n[1],
    "a hole": lambda i, j, n: (i != n[2] % n[0]) | (j != n[2] % n[1]),
    "half": lambda i, j, n: (i * 7919 + j * 104729 + n[2]) % 13 < 6,
    "none": lambda i, j, n: j < 0,
}


@pytest.fixture(autouse=True)
def card():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    q = torch.zeros(4, 16, 1024, 128, device=DEVICE, dtype=torch.bfloat16)
    explained = attnsweep.explain_attention(q, q, q, torch.ones(1024, 1024, device=DEVICE).bool())
    if explained.code == "gpu":
        pytest.skip(explained.reason)


def drawn_mask(data, batch, heads, rows, keys):
    """(1 or batch, 1 or heads, 1 or rows, 1 or keys), in memory of some order."""
    i, j = torch.arange(rows, device=DEVICE)[:, None], torch.arange(keys, device=DEVICE)
    sizes = [data.draw(st.sampled_from([1, n])) for n in (batch, heads)]
    every = []
    for _ in range(sizes[0] * sizes[1]):
        names = data.draw(st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=2))
        parts = [KINDS[name](i, j, (rows, keys, data.draw(st.integers(0, 2000)))) for name in names]
        both = parts[0] & parts[-1] if data.draw(st.booleans()) else parts[0] | parts[-1]
        every.append(both.expand(rows, keys))
    mask = torch.stack(every).view(*sizes, rows, keys)
    how = data.draw(st.sampled_from(["whole", "transposed", "sliced", "of keys", "of queries", "two dimensions"]))
    if how == "transposed":
        return mask.mT.contiguous().mT
    if how == "sliced":
        return torch.cat((~mask, mask), -1)[..., keys:]
    if how == "of keys":
        return mask[:, :, :1]
    if how == "of queries":
        return mask[..., :1]
    return mask[0, 0] if how == "two dimensions" else mask


def right(out, want):
    error, norm = (each.norm(dim=-1) for each in (out.double() - want, want))
    return bool((error <= 1e-2 * norm).all())  # so that rows without a key are 0


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_the_operator_is_right_and_never_stale(data):
    draw = data.draw
    batch, rows, keys = draw(st.integers(1, 4)), draw(SIZES), draw(SIZES)
    keys = rows if draw(st.booleans()) else keys
    heads, heads_kv = draw(st.sampled_from([(4, 4), (8, 2), (16, 16)]))
    dtype, dim = draw(st.sampled_from([torch.bfloat16, torch.float16])), draw(st.sampled_from([64, 128]))
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = [(batch, n, of, dim) for n, of in ((heads, rows), (heads_kv, keys), (heads_kv, keys))]
    qkv = [torch.randn(size, device=DEVICE, dtype=dtype) for size in sizes]
    if draw(st.booleans()):
        qkv = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in qkv]
    how, scores = {"enable_gqa": heads != heads_kv}, {}
    change = draw(st.sampled_from(["none", "none", "softcap", "sinks"]))
    if change != "none":
        scores = {"softcap": 2.5} if change == "softcap" else {"sinks": torch.randn(heads, device=DEVICE)}
    kind = draw(st.sampled_from(["mask", "mask", "bias", "arguments"]))
    if kind == "arguments":
        side = st.one_of(st.none(), st.integers(0, 300))
        limits = {
            "window": draw(st.one_of(st.none(), st.tuples(side, side))),
            "causal_offset": draw(st.one_of(st.none(), st.integers(-20, 300))),
            "key_lengths": torch.tensor([draw(st.integers(-3, keys + 9)) for _ in range(batch)], device=DEVICE),
        }
        for _ in range(2):
            out = attnsweep.attention(*qkv, **how, **scores, **limits)
            assert right(out, exact(*qkv, seen(*qkv[:2], **limits), **scores)), (limits, sizes)
            limits["key_lengths"] -= 5
        return
    mask = drawn_mask(data, batch, heads, rows, keys)
    if kind == "bias":
        mask = torch.randn(mask.shape, device=DEVICE).to(dtype).masked_fill(~mask, -torch.inf)
    else:
        mask = mask.clone(memory_format=torch.preserve_format)
    if attnsweep.explain_attention(*qkv, mask, **how, **scores).kernel is None:
        return  # PyTorch's own gives a row without a key attention without a mask
    for _ in range(2):
        out = attnsweep.attention(*qkv, mask, **how, **scores)
        assert right(out, exact(*qkv, mask, **scores)), (kind, mask.shape, mask.stride(), sizes)
        mask.mul_(0.5) if kind == "bias" else mask.logical_not_()

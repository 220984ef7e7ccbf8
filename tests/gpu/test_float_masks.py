"""Float masks, which are added to scores, by the kernels that come with attnsweep."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from on_card import near, served_since  # noqa: E402
from operators import exact  # noqa: E402

import attnsweep  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BATCH, HEADS, ROWS, KEYS, DIM = 2, 8, 1024, 1024, 64


@pytest.fixture(autouse=True)
def card():
    yield served_since(lambda: attnsweep.explain_attention(*tensors(), bias(BATCH, HEADS, ROWS, KEYS)))
    attnsweep.disable()


def tensors(keys=KEYS, head_dim=DIM, dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = [(BATCH, HEADS, n, head_dim) for n in (ROWS, keys, keys)]
    return [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]


def bias(*sizes, dtype=torch.bfloat16):
    made = torch.randn(sizes, device="cuda", dtype=dtype)
    return made.masked_fill(torch.rand(sizes, device="cuda") < 0.1, float("-inf"))


def served(given, mask, attention=None):
    """By a kernel, and right."""
    before = attnsweep.attention_counters().get("kernel", 0)
    out = (attention or attnsweep.attention)(*given, mask)
    assert attnsweep.attention_counters().get("kernel", 0) > before, str(attnsweep.explain_attention(*given, mask))
    assert near(out, exact(*given, mask.double()))
    return out


FORMS = {
    "of both": (BATCH, HEADS, ROWS, KEYS),
    "of items": (BATCH, 1, ROWS, KEYS),
    "of heads": (1, HEADS, ROWS, KEYS),
    "one": (ROWS, KEYS),
    "of three dimensions": (HEADS, ROWS, KEYS),
    "of keys": (BATCH, 1, 1, KEYS),
    "of heads and keys": (BATCH, HEADS, 1, KEYS),
    "one row": (1, KEYS),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form, head_dim):
    served(tensors(head_dim=head_dim), bias(*FORMS[form]))


def test_fp16_and_lengths_that_are_no_multiple_of_a_tile():
    given = tensors(keys=1000, dtype=torch.float16)
    served(given, bias(BATCH, HEADS, ROWS, 1000, dtype=torch.float16))
    wide = bias(BATCH, HEADS, ROWS, 1008, dtype=torch.float16)
    wide[..., 1001:] = float("nan")
    served([*given[:1], *(F.pad(x, (0, 0, 0, 1)) for x in given[1:])], wide[..., :1001])


def test_strides():
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()]
    served(given, bias(BATCH, HEADS, ROWS, KEYS))
    served(given, bias(BATCH, ROWS, HEADS, KEYS).transpose(1, 2))
    served(given, bias(BATCH, 1, ROWS, KEYS).expand(BATCH, HEADS, ROWS, KEYS))
    served(given, bias(1, 1, ROWS, 2 * KEYS)[..., 64 : 64 + KEYS])


def test_rows_without_a_key_are_0():
    mask = bias(BATCH, 1, ROWS, KEYS)
    mask[:, :, 70:200] = float("-inf")
    out = served(tensors(), mask)
    assert (out[:, :, 70:200] == 0).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_float32_mask_is_no_mask_of_half_precision(compiled):
    """cuDNN reads it so, silently."""
    given, mask = tensors(), bias(BATCH, 1, ROWS, KEYS).float()
    assert attnsweep.explain_attention(*given, mask).code == "mask"
    attention = torch.compile(lambda *of: attnsweep.attention(*of), fullgraph=True) if compiled else attnsweep.attention
    out = attention(*given, mask)
    assert out.dtype is given[0].dtype
    assert near(out, exact(*given, mask.double()))


def test_a_float32_mask_of_one_key():
    """PyTorch takes its memory-efficient backend, which refuses such a mask."""
    q, k, v = (torch.randn(2, 1, 1, 72, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.full((1, 1), -1e4, device="cuda")
    assert near(attnsweep.attention(q, k, v, mask), v.double())


def test_a_bias_whose_keys_are_apart_is_copied_once_a_version():
    given = tensors()
    mask = bias(ROWS, 2 * KEYS)[:, ::2]
    first = served(given, mask)
    assert (served(given, mask) - first).abs().max() == 0
    mask.mul_(2)
    served(given, mask)


def test_new_contents_at_the_same_address_and_in_a_graph():
    given, mask = tensors(), bias(BATCH, HEADS, ROWS, KEYS)
    served(given, mask)
    mask.copy_(bias(BATCH, HEADS, ROWS, KEYS))
    served(given, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnsweep.attention(*given, mask)
    mask.copy_(bias(BATCH, HEADS, ROWS, KEYS))
    graph.replay()
    assert (out - served(given, mask)).abs().max() == 0


def test_gradients_are_pytorchs():
    given, mask = tensors(), bias(BATCH, HEADS, ROWS, KEYS)
    mask.requires_grad_()
    given[0].requires_grad_()  # PyTorch 2.11 refuses the gradient of a mask alone
    attnsweep.attention(*given, mask).float().sum().backward()
    assert mask.grad is not None


def test_compiled_as_one_graph():
    given, mask = tensors(), bias(1, HEADS, ROWS, KEYS)

    @torch.compile(fullgraph=True)
    def compiled(q, k, v, mask):
        return attnsweep.attention(2 * q, k, v, mask) + 1

    out = compiled(*given, mask)
    assert (out - (attnsweep.attention(2 * given[0], *given[1:], mask) + 1)).abs().max() <= 2e-2


def test_enabled_programs_are_served():
    attnsweep.enable()
    served(tensors(), bias(BATCH, 1, 1, KEYS), F.scaled_dot_product_attention)

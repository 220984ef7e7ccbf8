"""Float masks in PyTorch, with a fake driver and kernels of NumPy's."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from attending import MaskedKernel  # noqa: E402
from operators import close, make, tensors  # noqa: E402
from packages import shape, winner  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, ROWS = 2, 4, 256


@pytest.fixture
def operator(tmp_path, driver):
    driver.on_launch = MaskedKernel()
    owns = ((), ("item",), ("head",), ("item", "head"))
    return make(tmp_path, driver, *(winner(shape(BATCH, HEADS, ROWS, bias=own)) for own in owns))


def numbers(*sizes):
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(1)).bfloat16()
    return made.masked_fill(made > 1.5, float("-inf"))


def right(operator, mask, *, by="kernel"):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    out = operator.attention(q, k, v, mask)
    want = F.scaled_dot_product_attention(*(x.float() for x in (q, k, v, mask)))
    assert close(out, want.nan_to_num(0))
    assert operator.counters() == {by: 1}


FORMS = {
    "one": (ROWS, ROWS),
    "of three dimensions": (HEADS, ROWS, ROWS),
    "of items": (BATCH, 1, ROWS, ROWS),
    "of heads": (1, HEADS, ROWS, ROWS),
    "of both": (BATCH, HEADS, ROWS, ROWS),
    "of keys": (BATCH, 1, 1, ROWS),
    "of keys and heads": (BATCH, HEADS, 1, ROWS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_broadcasts(operator, form):
    right(operator, numbers(*FORMS[form]))


STRIDES = {
    "expanded": lambda: numbers(1, 1, ROWS, ROWS).expand(BATCH, HEADS, ROWS, ROWS),
    "transposed heads": lambda: numbers(BATCH, ROWS, HEADS, ROWS).transpose(1, 2),
    "sliced": lambda: numbers(BATCH, 1, ROWS, ROWS + 8)[..., 8:],
    "an expanded row": lambda: numbers(BATCH, 1, 1, ROWS).expand(BATCH, 1, ROWS, ROWS),
}


@pytest.mark.parametrize("how", STRIDES)
def test_strides(operator, how):
    right(operator, STRIDES[how]())


OTHERS = {
    "transposed": lambda: numbers(ROWS, ROWS).mT,
    "every second key": lambda: numbers(ROWS, 2 * ROWS)[:, ::2],
    "rows of no 16 bytes": lambda: numbers(ROWS, ROWS + 1)[:, :ROWS],
}


@pytest.mark.parametrize("how", OTHERS)
def test_what_tma_cannot_read_is_pytorchs(operator, how):
    right(operator, OTHERS[how](), by="mask")


def test_a_mask_that_begins_elsewhere_is_pytorchs(operator):
    right(operator, numbers(BATCH, 1, ROWS, ROWS + 8)[..., 1 : 1 + ROWS], by="alignment")


def test_another_dtype_and_gradients_of_the_mask_are_pytorchs(operator):
    q, k, v = tensors(BATCH, HEADS, ROWS)
    assert operator.explain(q, k, v, numbers(ROWS, ROWS).float()).code == "mask"
    mask = numbers(ROWS, ROWS).clamp(min=-5).requires_grad_()
    operator.attention(q, k, v, mask).float().sum().backward()
    assert mask.grad is not None
    assert operator.counters() == {"mask": 1}


def test_an_empty_row_is_0(operator):
    mask = numbers(BATCH, 1, ROWS, ROWS)
    mask[:, :, 30:50] = float("-inf")
    right(operator, mask)


def test_a_batch_of_calls_with_a_float32_mask_is_pytorchs(operator):
    """`torch.vmap` cannot be asked which of its kernels PyTorch would take."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():  # whose tensors are on a card
        each = torch.empty(3, 2, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
        mask = torch.empty(8, 8, device="cuda")
        out = torch.vmap(lambda q: operator.attention(q, q, q, mask))(each)
    assert (out.shape, out.dtype) == (each.shape, torch.bfloat16)

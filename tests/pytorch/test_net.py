"""Calls at random of the whole operator over a fake driver; and that they find what is planted."""

import hashlib
import math

import pytest

torch = pytest.importorskip("torch")

import drawn_calls  # noqa: E402
import net  # noqa: E402
from drawn_calls import Drawn, Mask, draw, exact, make  # noqa: E402
from net_stand_in import stand_in  # noqa: E402
from planted_faults import PLANTED  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CALLS = 300


@pytest.fixture
def operator(tmp_path):
    with stand_in(tmp_path) as made:
        yield made


def seed_of(*words):
    return int(hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest()[:6], 16)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(80))
def test_calls_at_random_are_right(operator, drawn_by, number):
    calls = net.Net(net.STAND_IN, "cpu", seed_of(drawn_by, number))
    wrong = [str(found) for _, found in calls.run(range(CALLS)) if found is not None]
    assert not wrong, "\n".join(wrong[:5])
    assert operator.counters()["kernel"] > CALLS / 20


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(operator, drawn_by, name):
    if any(known.split()[0] == name.split()[0] for known in net.OPEN):
        pytest.skip("the operator still has it")
    found = net.finds(PLANTED[name], net.Net(net.STAND_IN, "cpu", seed_of(drawn_by, name)), 60.0)
    assert found is not None
    assert f"--only {found.number}" in str(found)
    assert str(found.drawn) in str(found)


def test_kernels_get_masks_whose_rows_hide_all_by_finite_numbers(operator):
    made = [make(drawn, "cpu", {}) for drawn in (draw(net.STAND_IN, 7, number) for number in range(400)) if drawn.mask]
    assert sum(bool(net.far_rows(each).any()) and not net.by_pytorch(each) for each in made) > 10


def test_a_call_is_drawn_again_by_its_seed_and_by_its_text():
    for number in range(60):
        drawn = draw(net.STAND_IN, 7, number)
        assert drawn == draw(net.STAND_IN, 7, number)
        assert eval(str(drawn), vars(drawn_calls)) == drawn
    assert len({draw(net.STAND_IN, 7, number).kind for number in range(200)}) == 8
    assert len({draw(net.STAND_IN, 7, number).entry for number in range(200)}) == 5


def by_autograd(made, direction):
    """Output and gradients of the same call by PyTorch's autograd in float64."""
    drawn = made.drawn
    q, k, v = leaves = [t.double().requires_grad_() for t in made.exact_inputs]
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[3] ** -0.5 if drawn.scale is None else drawn.scale)
    scores = drawn.softcap * torch.tanh(scores / drawn.softcap) if drawn.softcap else scores
    hidden = torch.zeros(scores.shape, dtype=torch.bool) if made.seen is None else ~made.seen.expand_as(scores)
    if made.added is not None:
        rounded = (scores.float() + made.added.float()).double().detach()
        hidden = hidden | (rounded == -math.inf)
        scores = scores + (rounded - scores.detach()).masked_fill(hidden, 0)
    empty = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~(empty & (made.sinks is None)), -math.inf)
    if made.sinks is not None:
        scores = torch.cat((scores, made.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)), 3)
    p = torch.softmax(scores, -1)[..., : k.shape[2]].masked_fill(empty, 0)
    out = p @ v.repeat_interleave(group, 1)
    return out, torch.autograd.grad(out, leaves, direction)


def test_what_is_right_is_right():
    """The formulas of gradients agree with autograd's."""
    for number in range(120):
        drawn = draw(net.STAND_IN, 11, number)
        if drawn.sizes.batch * drawn.sizes.heads > 100 or drawn.inputs == "apart":
            continue
        made = make(drawn, "cpu", {})
        direction = torch.randn(*made.q.shape[:3], made.v.shape[3], dtype=torch.float64)
        want, (out, grads) = exact(made, direction), by_autograd(made, direction)
        torch.testing.assert_close(want.out, out)
        for name, grad in zip("qkv", grads, strict=True):
            torch.testing.assert_close(want.grads[name], grad, msg=lambda text, drawn=drawn: f"{drawn}: {text}")


@pytest.mark.parametrize("least", ["min", "-1e30", "-1e9"])
def test_keys_that_are_all_far_below_count_alike(least):
    mask = Mask(patterns=("rows", "nothing"), hides=(least, least))
    made = make(Drawn(kind="additive", mask=mask), "cpu", {})
    rows = made.added[0, 0, :, 0] < -1e8
    assert 0 < int(rows.sum()) < 128
    mean = made.exact_inputs[2].double().mean(2, keepdim=True).expand(2, 4, int(rows.sum()), 64)
    torch.testing.assert_close(exact(made).out[:, :, rows], mean)


def test_two_masks_may_hide_by_their_sum():
    mask = Mask(patterns=("rows", "rows"), hides=("min", "min"))
    made = make(Drawn(kind="additive", mask=mask), "cpu", {})
    assert bool((made.added == -math.inf).any())
    want = exact(made)
    assert bool(want.empty.any())
    assert not want.out.masked_select(want.empty).any()


def test_layouts_hold_the_same_values():
    values = torch.randn(2, 4, 9, 8)
    for layout in drawn_calls.LAYOUTS:
        if not layout.startswith("one"):
            assert torch.equal(drawn_calls.laid(values, layout), values), layout
    assert drawn_calls.laid(values.bfloat16(), "2 bytes off").data_ptr() % 16 == 2

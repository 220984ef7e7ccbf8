"""Gradients of calls with a window, an offset or key lengths, over a fake driver on the CPU."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import operators  # noqa: E402
from attending import MaskedBackwardKernel, seen  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from operators import aten, close, exact, make, no_room, tensors, traced  # noqa: E402
from packages import PLAIN_BACKWARD, RECOMPUTED, shape, winner  # noqa: E402

from attnsweep.core.layouts import Padded  # noqa: E402
from attnsweep.core.masks import CAUSAL, FULL, Interval  # noqa: E402
from attnsweep.core.ops import BACKWARD  # noqa: E402
from attnsweep.serve.runtime import backward_operator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, HEADS_KV, ROWS = 2, 4, 2, 128
ONE = shape(BATCH, HEADS, ROWS, heads_kv=HEADS_KV)
LENGTHS = torch.tensor([50, 128])
WINDOW = replace(ONE, mask=Interval(30, 0))
FULL_LENGTHS = replace(ONE, layout=Padded("right", 40))
CAUSAL_LENGTHS = replace(ONE, mask=CAUSAL, layout=Padded("right", 40))
OF_ROWS = replace(ONE, mask=Interval(5, 0), layout=Padded("right", 40))
CASES = {
    "window": {"window": (30, 0)},
    "causal and a window": {"window": (30, None), "is_causal": True},
    "lengths": {"key_lengths": LENGTHS},
    "of both sides": {"key_lengths": torch.tensor([[50, 100], [7, 8]])},
    "beyond": {"key_lengths": torch.tensor([[-7, 2**40], [100, 50]])},
    "no key of one": {"key_lengths": torch.tensor([0, 128], dtype=torch.int32)},
    "causal lengths": {"key_lengths": LENGTHS, "is_causal": True},
    "a window of lengths": {"key_lengths": LENGTHS, "window": (5, 0)},
}


@pytest.fixture
def driver():
    return FakeDriver(MaskedBackwardKernel())


def made_of(tmp_path, driver, *shapes, kernel=PLAIN_BACKWARD, low=None):
    shapes = shapes or (WINDOW, FULL_LENGTHS, CAUSAL_LENGTHS, OF_ROWS)
    backward = [winner(replace(of, op=BACKWARD), kernel, 4.0, low) for of in shapes]
    return make(tmp_path, driver, *(winner(of, gain=4.0) for of in shapes), *backward)


@pytest.fixture
def operator(tmp_path, driver):
    return made_of(tmp_path, driver)


def given_of(layout="bhsd"):
    return tensors(BATCH, HEADS, ROWS, HEADS_KV, layout=layout)


def gradients_of(attention, given, **how):
    return operators.gradients_of(attention, given, enable_gqa=True, **how)


def right(got, given, scale=None, **limits):
    """Whether gradients are those of float64, and 0 where nothing is seen."""
    mask = seen(*given[:2], **limits)
    direction = torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(given[0].dtype)
    doubles = [t.double() for t in given]
    wanted = operators.gradients_of(exact, doubles, direction.double(), mask=mask, scale=scale)
    unseen = ~mask.any(2)[:, 0, :, None]
    none = [each.masked_select(unseen[:, None].expand_as(each)) for each in got[1:]]
    off = [(a.double() - b).norm() / b.norm() for a, b in zip(got, wanted, strict=True)]
    return max(off) < 2e-2 and not any(each.any() for each in none)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [PLAIN_BACKWARD, RECOMPUTED])
@pytest.mark.parametrize("layout", ["bhsd", "packed"])
def test_gradients_by_the_kernels(tmp_path, driver, case, kernel, layout):
    operator = made_of(tmp_path, driver, kernel=kernel)
    given, limits = given_of(layout), CASES[case]
    for count in (1, 2):
        got = gradients_of(operator.attention, given, scale=0.3, **limits)
        assert right(got, given, 0.3, **limits)
        assert operator.counters() == {"kernel": count, "kernel_backward": count}
    told = operator.explain(*(t.requires_grad_() for t in given), enable_gqa=True, **limits)
    assert told.backward == kernel.config
    assert "gradients by" in str(told)


def test_what_did_not_win_is_pytorchs(tmp_path, driver):
    """A window of another size, other numbers of heads, a table without gradients of lengths."""
    operator = made_of(tmp_path, driver, WINDOW)
    given = given_of()
    for limits in ({"window": (31, 0)}, {"key_lengths": LENGTHS}, {"causal_offset": -3}):
        assert right(gradients_of(operator.attention, given, **limits), given, **limits)
        with torch.enable_grad():
            told = operator.explain(*(t.detach().requires_grad_() for t in given), **limits)
        assert (told.kernel, told.backward) == (None, None)
    assert driver.launches == []
    slow = made_of(tmp_path, driver, WINDOW, low=0.98)
    assert right(gradients_of(slow.attention, given, window=(30, 0)), given, window=(30, 0))
    assert slow.counters() == {"mask": 1}


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_are_pytorchs_where_only_code_of_boolean_masks_serves_the_forward(tmp_path, driver, how):
    """It writes no log-sum-exp, and by PyTorch's operators that takes all scores in float32."""
    forward = winner(shape(BATCH, HEADS, ROWS, heads_kv=HEADS_KV, boolean=()), gain=4.0)
    operator = make(tmp_path, driver, forward, winner(replace(WINDOW, op=BACKWARD), PLAIN_BACKWARD, 4.0))
    given = given_of()

    def attention(q, k, v, **how):
        return operator.attention(q, k, v, window=(30, 0), **how)

    if how == "eager":
        assert right(gradients_of(attention, given), given, window=(30, 0))
        assert operator.counters() == {"not_tuned": 1}
        return
    names, _ = traced(lambda *each: attention(*each, enable_gqa=True), given)
    assert not [name for name in names if "_lse" in name]
    assert operator.counters() == {}
    with torch.no_grad():
        attention(*given, enable_gqa=True)
    assert operator.counters() == {"kernel": 1}


def test_the_other_dtype_needs_code_of_its_own(operator):
    given = [t.half() for t in given_of()]
    got = gradients_of(operator.attention, given, window=(30, 0))
    assert right(got, given, window=(30, 0))
    assert "kernel_backward" not in operator.counters()


def test_other_lengths_of_a_tuned_shape_are_served(operator):
    given = given_of()
    for lengths in ([1, 2], [128, 128], [77, 3]):
        limits = {"key_lengths": torch.tensor(lengths)}
        assert right(gradients_of(operator.attention, given, **limits), given, **limits)
    assert operator.counters() == {"kernel": 3, "kernel_backward": 3}


@pytest.mark.parametrize("cache", [True, False])
def test_lengths_that_change_after_the_forward_do_not_matter(operator, cache):
    lengths, given = LENGTHS.clone(), given_of()
    leaves = [t.detach().requires_grad_() for t in given]
    how = {"enable_gqa": True, "key_lengths": lengths, "cache": cache}
    first = operator.attention(*leaves, **how)
    lengths -= 20
    second = operator.attention(*leaves, **how)
    direction = torch.randn(first.shape, generator=torch.manual_seed(7)).to(first.dtype)
    for out, before in ((first, LENGTHS), (second, LENGTHS - 20)):
        got = torch.autograd.grad(out, leaves, direction)
        assert right(got, given, key_lengths=before)
    assert operator.counters() == {"kernel": 2, "kernel_backward": 2}


def test_lengths_beyond_the_keys_of_one_call_are_within_those_of_another(tmp_path, driver):
    operator = made_of(tmp_path, driver, FULL_LENGTHS, replace(FULL_LENGTHS, seqlen_k=80))
    lengths, (q, k, v) = torch.tensor([100, 120]), given_of()
    for keys in (80, ROWS, 80):
        given = (q, k[:, :, :keys], v[:, :, :keys])
        assert right(gradients_of(operator.attention, given, key_lengths=lengths), given, key_lengths=lengths)
    assert operator.counters() == {"kernel": 3, "kernel_backward": 3}


@pytest.mark.parametrize("write", ["data", "memory"])
def test_without_the_cache_lengths_that_pytorch_did_not_see_change_are_read(operator, write):
    lengths, given = LENGTHS.clone(), given_of()
    for cache in (True, False):
        how = {"key_lengths": lengths, "cache": cache}
        assert right(gradients_of(operator.attention, given, **how), given, key_lengths=lengths)
        if write == "data":
            lengths.data -= 20
        else:
            lengths.numpy()[:] -= 20
    assert operator.counters() == {"kernel": 2, "kernel_backward": 2}


def test_deterministic_algorithms_have_a_kernel_that_is(tmp_path, driver, operator):
    given, limits = given_of(), {"window": (30, 0)}
    torch.use_deterministic_algorithms(True)
    try:
        assert right(gradients_of(operator.attention, given, **limits), given, **limits)
        assert operator.counters() == {"mask": 1}
        made = made_of(tmp_path / "other", driver, kernel=RECOMPUTED)
        assert right(gradients_of(made.attention, given, **limits), given, **limits)
        assert made.counters() == {"kernel": 1, "kernel_backward": 1}
    finally:
        torch.use_deterministic_algorithms(False)
    assert right(gradients_of(operator.attention, given, **limits), given, **limits)
    assert operator.counters() == {"mask": 1, "kernel": 1, "kernel_backward": 1}


FAILURES = ("driver", "memory", "deterministic", "no code")


@pytest.mark.parametrize("failure", FAILURES)
def test_where_the_backward_cannot_run_pytorch_computes_all_again(operator, driver, failure):
    given, limits = given_of(), {"key_lengths": LENGTHS, "window": (5, 0)}
    leaves = [t.detach().requires_grad_() for t in given]
    out = operator.attention(*leaves, enable_gqa=True, **limits)
    direction = torch.randn(out.shape, generator=torch.manual_seed(7)).to(out.dtype)
    if failure == "driver":
        driver.refuses.add("cuLaunchKernelEx")
    elif failure == "no code":
        (gpu,) = operator.table.gpus.values()
        for each in gpu.winners:
            if each.problem.op == BACKWARD:
                del each.kernel.stages["keys"]
    torch.use_deterministic_algorithms(failure == "deterministic")
    try:
        with aten(**({"new_empty": no_room} if failure == "memory" else {})):
            got = torch.autograd.grad(out, leaves, direction)
    finally:
        torch.use_deterministic_algorithms(False)
    assert right(got, given, **limits)
    assert operator.counters()["pytorch_backward"] == 1


def test_a_forward_that_cannot_run_is_pytorchs_with_its_gradients(operator, driver):
    driver.refuses.add("cuLaunchKernelEx")
    given, limits = given_of(), {"key_lengths": torch.tensor([0, 60])}
    assert right(gradients_of(operator.attention, given, **limits), given, **limits)
    assert "kernel_backward" not in operator.counters()


def test_gradients_of_gradients_and_batches_of_them(operator):
    """By PyTorch's attention, computed again: a kernel's gradients would count as constants.

    What it cannot do on the CPU, it refuses.
    """
    given = [t.float().to(torch.bfloat16).requires_grad_() for t in given_of()]
    out = operator.attention(*given, enable_gqa=True, window=(30, 0))
    ones = torch.ones_like(out)
    dq, *_ = torch.autograd.grad(out, given, ones, create_graph=True)
    assert "kernel_backward" not in operator.counters()
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(dq.float().sum(), given, retain_graph=True)
    once = torch.autograd.grad(out, given, ones, retain_graph=True)
    both = torch.autograd.grad(out, given, torch.stack([ones, 2 * ones]), is_grads_batched=True)
    assert all(close(b[1], 2 * a) for a, b in zip(once, both, strict=True))


@pytest.mark.parametrize("case", ["window", "lengths", "of both sides", "causal lengths"])
def test_compiled_code_calls_the_kernels(operator, case):
    given, limits = given_of(), CASES[case]
    direction = torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(torch.bfloat16)
    options = {"enable_gqa": True, **limits}
    graphs, got = traced(lambda *of: operator.attention(*of, **options), given, direction)
    assert f"{operator.namespace}.backward_intervals" in graphs[-1]
    assert right(got, given, **limits)
    assert operator.counters() == {"kernel": 1, "kernel_backward": 1}


def test_the_same_code_compiled_for_several_sizes_calls_the_kernels(tmp_path, driver):
    """From the second on a compiler takes sizes as numbers that vary, of lengths too."""
    lengths = Padded("right", 40)
    problems = {
        shape(2, 8, 190, heads_kv=2): (Interval(20, 0), {"window": (20, 0)}),
        shape(3, 8, 128): (FULL, {"key_lengths": torch.tensor([[0, 128], [10, 33], [0, 0]])}),
        shape(3, 8, 170, heads_kv=2): (CAUSAL, {"key_lengths": torch.tensor([1, 170, 35]), "is_causal": True}),
        shape(2, 4, 160): (Interval(10, 0), {"key_lengths": torch.tensor([160, 7]), "window": (10, 0)}),
    }
    tuned = [
        replace(of, mask=mask, layout=lengths if "key_lengths" in limits else of.layout)
        for of, (mask, limits) in problems.items()
    ]
    operator = made_of(tmp_path, driver, *tuned)
    for count, (of, (_, limits)) in enumerate(problems.items(), 1):
        given = tensors(of.batch, of.heads, of.seqlen_q, of.heads_kv, layout="packed")
        direction = torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(torch.bfloat16)
        options = {"enable_gqa": True, **limits}
        graphs, got = traced(lambda *q: operator.attention(*q, **options), given, direction)  # noqa: B023
        assert f"{operator.namespace}.backward_intervals" in graphs[-1]
        assert right(got, given, **limits)
        assert operator.counters() == {"kernel": count, "kernel_backward": count}


def test_compiled_code_has_pytorchs_where_nothing_won(operator):
    given, limits = given_of(), {"window": (31, 0)}
    direction = torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(torch.bfloat16)
    options = {"enable_gqa": True, **limits}
    graphs, got = traced(lambda *of: operator.attention(*of, **options), given, direction)
    assert operator.namespace not in "".join(graphs)
    assert right(got, given, **limits)
    assert operator.counters() == {}


@pytest.mark.parametrize("limits", [{"window": (30, 0)}, {"key_lengths": LENGTHS}], ids=str)
def test_compiled_code_of_sizes_that_vary_looks_for_a_winner_at_run_time(operator, monkeypatch, limits):
    """Where there is none nobody computes a log-sum-exp, and PyTorch has the gradients."""

    def attention(q, k, v):
        return operator.attention(q, k, v, enable_gqa=True, **limits)

    monkeypatch.setattr(backward_operator, "log_sum_exp", None)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (96, 128, 160):
        given = tensors(BATCH, HEADS, rows, HEADS_KV)
        assert right(gradients_of(lambda *of, **_: compiled(*of), given), given, **limits)
        served = operator.counters().get("kernel_backward", 0)
        assert served == (rows >= 128)
        assert operator.counters().get("pytorch_backward", 0) == 0


def test_compiled_code_of_sizes_that_no_winner_has_is_pytorchs(operator):
    """Of heads that none has, say: then no size at run time makes it a winner's."""

    def attention(q, k, v):
        return operator.attention(q, k, v, enable_gqa=True, window=(30, 0))

    given = tensors(BATCH, 2 * HEADS, ROWS, HEADS_KV)
    for each in given:
        torch._dynamo.mark_dynamic(each, 2)
    direction = torch.ones_like(given[0])
    graphs, _ = traced(attention, given, direction)
    assert operator.namespace not in "".join(graphs)
    assert operator.counters() == {}


@pytest.mark.parametrize("launched", [True, False])
def test_settings_that_change_between_forward_and_backward_leave_gradients_right(operator, driver, launched):
    """A compiled forward in deterministic mode has the log-sum-exp that a later kernel reads."""
    given, limits = given_of(), {"key_lengths": LENGTHS}
    call = getattr(torch.ops, operator.namespace).forward_intervals_lse
    torch.use_deterministic_algorithms(True)
    driver.refuses |= set() if launched else {"cuLaunchKernelEx"}
    try:
        leaves = [t.detach().requires_grad_() for t in given]
        ranges = torch.tensor([[0, 50], [0, 128]], dtype=torch.int32)
        out, _ = call(*leaves, ranges, None, None, 0.125)
    finally:
        torch.use_deterministic_algorithms(False)
        driver.refuses.clear()
    direction = torch.randn(out.shape, generator=torch.manual_seed(7)).to(out.dtype)
    got = torch.autograd.grad(out, leaves, direction)
    assert operator.counters()["kernel_backward"] == 1
    assert operator.counters().get("kernel", 0) == launched
    assert right(got, given, **limits)


def test_compiled_code_whose_launches_fail_has_right_gradients(operator, driver):
    given, limits = given_of(), {"key_lengths": torch.tensor([0, 60])}
    direction = torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(torch.bfloat16)
    driver.refuses.add("cuLaunchKernelEx")
    options = {"enable_gqa": True, **limits}
    _, got = traced(lambda *of: operator.attention(*of, **options), given, direction)
    assert right(got, given, **limits)
    assert not {"kernel", "kernel_backward"} & operator.counters().keys()


def test_a_compiled_forward_that_fails_gives_the_backward_right_statistics(tmp_path, driver, operator):
    """The kernel of the backward may run yet: after a tensor that begins anywhere, say."""
    ranges = torch.tensor([[0, 0], [7, 60]], dtype=torch.int32)
    call = (*given_of(), ranges, -5, 0, 0.3)
    expected = getattr(torch.ops, operator.namespace).forward_intervals_lse(*call)
    assert operator.counters() == {"kernel": 1}
    other = made_of(tmp_path / "other", driver)
    driver.refuses.add("cuLaunchKernelEx")
    found = getattr(torch.ops, other.namespace).forward_intervals_lse(*call)
    assert "kernel" not in other.counters()
    assert close(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], atol=1e-4)
    assert torch.isinf(found[1][0]).all()

"""Gradients of the operator's calls by backward kernels, over a fake driver on the CPU."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import operators  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from attending import BackwardKernel, seen  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from operators import alive, aten, close, exact, flash_backward, make, no_room, tensors, traced  # noqa: E402
from packages import PLAIN_BACKWARD, RECOMPUTED, shape, winner, with_config  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from attnsweep.core.layouts import Padded  # noqa: E402
from attnsweep.core.masks import CAUSAL, FULL, Interval  # noqa: E402
from attnsweep.core.ops import BACKWARD  # noqa: E402
from attnsweep.serve.runtime import backward_operator  # noqa: E402
from attnsweep.serve.runtime.serving_plan import ServingPlan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, HEADS_KV, ROWS = 2, 4, 2, 128
ONE = shape(BATCH, HEADS, ROWS, heads_kv=HEADS_KV)
LENGTHS = torch.tensor([50, 128])
WINDOW = replace(ONE, mask=Interval(30, 0))
FULL_LENGTHS = replace(ONE, layout=Padded("right", 40))
CAUSAL_LENGTHS = replace(ONE, mask=CAUSAL, layout=Padded("right", 40))
OF_ROWS = replace(ONE, mask=Interval(5, 0), layout=Padded("right", 40))
SHAPES = (ONE, replace(ONE, mask=CAUSAL), WINDOW, FULL_LENGTHS, CAUSAL_LENGTHS, OF_ROWS)
CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (30, 0)},
    "causal and a window": {"window": (30, None), "is_causal": True},
    "lengths": {"key_lengths": LENGTHS},
    "of both sides": {"key_lengths": torch.tensor([[50, 100], [7, 8]])},
    "beyond": {"key_lengths": torch.tensor([[-7, 2**40], [100, 50]])},
    "no key of one": {"key_lengths": torch.tensor([0, 128], dtype=torch.int32)},
    "causal lengths": {"key_lengths": LENGTHS, "is_causal": True},
    "a window of lengths": {"key_lengths": LENGTHS, "window": (5, 0)},
}
both_ways = pytest.mark.parametrize("case", ["full", "a window of lengths"])


@pytest.fixture
def driver():
    return FakeDriver(BackwardKernel())


@pytest.fixture(autouse=True)
def pytorchs():
    """PyTorch's own flash backward on the CPU, where it has none."""
    with aten(_scaled_dot_product_flash_attention_backward=flash_backward):
        yield


def made_of(tmp_path, driver, *shapes, kernel=PLAIN_BACKWARD, low=None):
    """An operator with a forward and a backward of each shape."""
    shapes = shapes or SHAPES
    backward = [winner(replace(of, op=BACKWARD), kernel, 4.0, low) for of in shapes]
    return make(tmp_path, driver, *(winner(of, gain=4.0) for of in shapes), *backward)


@pytest.fixture
def operator(tmp_path, driver):
    return made_of(tmp_path, driver)


@contextmanager
def deterministic(on=True):
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def given_of(layout="bhsd"):
    return tensors(BATCH, HEADS, ROWS, HEADS_KV, layout=layout)


def leaves_of(given):
    return [t.detach().requires_grad_() for t in given]


def drawn(given):
    """A gradient of the output."""
    return torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(given[0].dtype)


def gradients_of(attention, given, direction=None, **how):
    return operators.gradients_of(attention, given, direction, enable_gqa=True, **how)


def right(got, given, direction=None, scale=None, **limits):
    """Whether gradients are those of float64, and 0 where nothing is seen."""
    mask = seen(*given[:2], **limits)
    direction = drawn(given) if direction is None else direction
    doubles = [t.double() for t in given]
    wanted = operators.gradients_of(exact, doubles, direction.double(), mask=mask, scale=scale)
    unseen = ~mask.any(2)[:, 0, :, None]
    none = [each.masked_select(unseen[:, None].expand_as(each)) for each in got[1:]]
    off = [(a.double() - b).norm() / b.norm() for a, b in zip(got, wanted, strict=True)]
    return max(off) < 2e-2 and not any(each.any() for each in none)


def compiled(operator, given, **limits):
    """The graphs of a call and its backward, and the gradients."""
    return traced(lambda *of: operator.attention(*of, enable_gqa=True, **limits), given, drawn(given))


@pytest.mark.nightly(push=8)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kernel", "layout"), [(PLAIN_BACKWARD, "bshd"), (RECOMPUTED, "packed")])
def test_gradients_by_the_kernels(tmp_path, driver, case, kernel, layout):
    operator = made_of(tmp_path, driver, kernel=kernel)
    given, limits = given_of(layout), CASES[case]
    for count in (1, 2):
        got = gradients_of(operator.attention, given, scale=0.3, **limits)
        assert right(got, given, scale=0.3, **limits)
        assert operator.counters() == {"kernel": count, "kernel_backward": count}
    assert [t.stride() for t in got] == [torch.empty_like(t).stride() for t in given]
    q, k, v = given
    assert operator.explain(q, k, v, enable_gqa=True, **limits).backward is None
    told = operator.explain(q.requires_grad_(), k, v, enable_gqa=True, **limits)
    assert told.backward == kernel.config
    assert f"gradients by {kernel.config}" in str(told)
    with torch.no_grad():
        assert operator.explain(q, k, v, enable_gqa=True, **limits).backward is None


@pytest.mark.parametrize("kernel", [PLAIN_BACKWARD, RECOMPUTED])
@pytest.mark.parametrize("statistics", [1, 2])
def test_statistics_in_sums_from_the_first_are_of_the_calls_scale(tmp_path, statistics, kernel):
    driver = FakeDriver(BackwardKernel(statistics=statistics))
    made = made_of(tmp_path, driver, kernel=with_config(kernel, STATISTICS=statistics))
    for scale in (0.3, None, 0.05):
        given = given_of()
        assert right(gradients_of(made.attention, given, scale=scale), given, scale=scale), scale
    assert made.counters() == {"kernel": 3, "kernel_backward": 3}


def test_launches_that_follow_one_of_pytorchs_wait_for_it(tmp_path, driver):
    gradients_of(made_of(tmp_path, driver, kernel=RECOMPUTED).attention, given_of())
    names = [launch["function"][1] for launch in driver.launches]
    assert names == ["flash_fwd_wgmma", "flash_bwd_wgmma_queries", "flash_bwd_wgmma_keys"]
    assert [launch["config"].numAttrs for launch in driver.launches[1:]] == [0, 0]


@pytest.mark.parametrize("kind", ["expanded", "transposed", "shifted", "zeros", "rows apart"])
def test_gradients_of_the_output_lie_anyhow(operator, kind):
    given = given_of()
    made = drawn(given)
    direction = {
        "expanded": lambda: made[:1, :1, :1, :1].expand_as(made),
        "transposed": lambda: made.mT.contiguous().mT,
        "shifted": lambda: operators.shifted(made),
        "zeros": lambda: torch._efficientzerotensor(made.shape, dtype=made.dtype),
        "rows apart": lambda: torch.cat((made, made), 3)[..., :64],
    }[kind]()
    got = gradients_of(operator.attention, given, direction)
    assert not any(t.any() for t in got) if kind == "zeros" else right(got, given, direction)
    assert operator.counters()["kernel_backward"] == 1


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 2)])
def test_gradients_of_some_inputs(operator, wanted):
    given = given_of()
    mixed = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
    out = operator.attention(*mixed, enable_gqa=True)
    own = dict(zip(wanted, torch.autograd.grad(out, [mixed[i] for i in wanted], drawn(given)), strict=True))
    whole = gradients_of(operator.attention, given)
    assert right([own.get(i, whole[i]) for i in range(3)], given)
    assert operator.counters() == {"kernel": 2, "kernel_backward": 2}


def test_a_wrong_kernel_would_show(tmp_path):
    given = given_of()
    made = made_of(tmp_path, FakeDriver(BackwardKernel(gone=0.5)))
    assert not right(gradients_of(made.attention, given), given)


OTHERS = {
    "of another shape": [winner(replace(shape(seqlen=64, head_dim=128), op=BACKWARD), PLAIN_BACKWARD)],
    "not faster": [winner(replace(ONE, op=BACKWARD), PLAIN_BACKWARD, 1.1, 0.98)],
    "none": [],
}


@pytest.mark.parametrize("what", OTHERS)
def test_without_a_backward_that_won_the_gradients_are_pytorchs(tmp_path, driver, what):
    made, given = make(tmp_path, driver, winner(ONE), *OTHERS[what]), given_of()
    assert right(gradients_of(made.attention, given), given)
    assert made.counters() == {"kernel": 1} | ({} if what == "none" else {"pytorch_backward": 1})
    assert made.explain(*leaves_of(given), enable_gqa=True).backward is None
    graphs, got = compiled(made, given)
    assert f"{made.namespace}.backward" not in graphs[-1]
    assert right(got, given)


def test_limits_that_did_not_win_are_pytorchs(tmp_path, driver):
    """A window of another size, other numbers of heads, a table without gradients of lengths."""
    operator = made_of(tmp_path, driver, WINDOW)
    given = given_of()
    for limits in ({"window": (31, 0)}, {"key_lengths": LENGTHS}, {"causal_offset": -3}):
        assert right(gradients_of(operator.attention, given, **limits), given, **limits)
        told = operator.explain(*leaves_of(given), **limits)
        assert (told.kernel, told.backward) == (None, None)
    graphs, got = compiled(operator, given, window=(31, 0))
    assert operator.namespace not in "".join(graphs)
    assert right(got, given, window=(31, 0))
    assert driver.launches == []
    slow = made_of(tmp_path, driver, WINDOW, low=0.98)
    assert right(gradients_of(slow.attention, given, window=(30, 0)), given, window=(30, 0))
    assert slow.counters() == {"mask": 1}


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_are_pytorchs_where_only_code_of_boolean_masks_serves_the_forward(tmp_path, driver, how):
    """It writes no log-sum-exp, and by PyTorch's operators that takes all scores in float32."""
    forward = winner(shape(BATCH, HEADS, ROWS, heads_kv=HEADS_KV, boolean=()), gain=4.0)
    operator = make(tmp_path, driver, forward, winner(replace(WINDOW, op=BACKWARD), PLAIN_BACKWARD, 4.0))
    given, limits = given_of(), {"window": (30, 0)}
    if how == "eager":
        assert right(gradients_of(operator.attention, given, **limits), given, **limits)
        assert operator.counters() == {"not_tuned": 1}
        return
    names, _ = compiled(operator, given, **limits)
    assert not [name for name in names if "_lse" in name]
    assert operator.counters() == {}
    with torch.no_grad():
        operator.attention(*given, enable_gqa=True, **limits)
    assert operator.counters() == {"kernel": 1}


def test_the_other_dtype_needs_code_of_its_own(operator):
    given = [t.half() for t in given_of()]
    got = gradients_of(operator.attention, given, window=(30, 0))
    assert right(got, given, window=(30, 0))
    assert "kernel_backward" not in operator.counters()


@pytest.mark.parametrize("cache", [True, False])
def test_lengths_that_change_after_the_forward_do_not_matter(operator, cache):
    lengths, given = LENGTHS.clone(), given_of()
    leaves = leaves_of(given)
    how = {"enable_gqa": True, "key_lengths": lengths, "cache": cache}
    first = operator.attention(*leaves, **how)
    lengths -= 20
    second = operator.attention(*leaves, **how)
    for out, before in ((first, LENGTHS), (second, LENGTHS - 20)):
        assert right(torch.autograd.grad(out, leaves, drawn(given)), given, key_lengths=before)
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


@both_ways
def test_gradients_of_gradients_and_batches_of_them_are_pytorchs(operator, case):
    """A kernel's gradients would count as constants. What PyTorch cannot do on the CPU, it refuses."""
    given, limits = given_of(), CASES[case]
    leaves = leaves_of(given)
    out = operator.attention(*leaves, enable_gqa=True, **limits)
    dq, *_ = torch.autograd.grad(out, leaves, drawn(given), create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(dq.float().sum(), leaves, retain_graph=True)
    both = torch.stack([drawn(given), 2 * drawn(given)])
    got = torch.autograd.grad(out, leaves, both, is_grads_batched=True, retain_graph=True)
    assert right([each[0] for each in got], given, **limits)
    assert "kernel_backward" not in operator.counters()
    once = torch.autograd.grad(out, leaves, drawn(given), retain_graph=True)
    twice = torch.autograd.grad(out, leaves, 2 * drawn(given))
    assert all(close(2 * a, b) for a, b in zip(once, twice, strict=True))
    assert operator.counters()["kernel_backward"] == 2


@both_ways
def test_deterministic_algorithms_have_a_kernel_that_is(tmp_path, driver, operator, case):
    given, limits = given_of(), CASES[case]
    with deterministic():
        assert right(gradients_of(operator.attention, given, **limits), given, **limits)
        assert "kernel_backward" not in operator.counters()
        made = made_of(tmp_path / "other", driver, kernel=RECOMPUTED)
        assert right(gradients_of(made.attention, given, **limits), given, **limits)
        assert made.counters() == {"kernel": 1, "kernel_backward": 1}
    assert right(gradients_of(operator.attention, given, **limits), given, **limits)
    assert operator.counters()["kernel_backward"] == 1


def test_checkpointing_and_autocast(operator):
    given = given_of()

    def kept(*tensors, **how):
        return checkpoint(operator.attention, *tensors, use_reentrant=False, **how)

    assert right(gradients_of(kept, given), given)
    assert operator.counters() == {"kernel": 2, "kernel_backward": 1}
    leaves = [t.float().requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16):
        out = operator.attention(*leaves, enable_gqa=True)
    got = torch.autograd.grad(out, leaves, drawn(given))
    assert {each.dtype for each in got} == {torch.float32}
    assert right(got, given)
    assert operator.counters()["kernel_backward"] == 2


@both_ways
@pytest.mark.parametrize("failure", ["driver", "memory", "deterministic", "no code"])
def test_where_the_backward_cannot_run_the_gradients_are_pytorchs(operator, driver, failure, case, caplog):
    """A driver that refused is not asked again; memory may be there the next time."""
    given, limits = given_of(), CASES[case]
    leaves = leaves_of(given)
    out = operator.attention(*leaves, enable_gqa=True, **limits)
    if failure == "driver":
        driver.refuses.add("cuLaunchKernelEx")
    elif failure == "no code":
        (gpu,) = operator.table.gpus.values()
        for each in gpu.winners:
            if each.problem.op == BACKWARD:
                del each.kernel.stages["keys"]
    with deterministic(failure == "deterministic"), aten(**({"new_empty": no_room} if failure == "memory" else {})):
        got = torch.autograd.grad(out, leaves, drawn(given), retain_graph=True)
    assert right(got, given, **limits)
    assert operator.counters()["pytorch_backward"] == 1
    assert ("refused a launch" in caplog.text) == (failure == "driver")
    driver.refuses.clear()
    assert right(torch.autograd.grad(out, leaves, drawn(given)), given, **limits)
    assert operator.counters().get("kernel_backward", 0) == (failure in ("memory", "deterministic"))


def test_a_forward_that_cannot_run_is_pytorchs_with_its_gradients(operator, driver):
    driver.refuses.add("cuLaunchKernelEx")
    given, limits = given_of(), {"key_lengths": torch.tensor([0, 60])}
    assert right(gradients_of(operator.attention, given, **limits), given, **limits)
    _, got = compiled(operator, given, **limits)
    assert right(got, given, **limits)
    assert not {"kernel", "kernel_backward"} & operator.counters().keys()


@pytest.fixture
def plain(tmp_path, driver):
    """An operator of `tensors()`, whose heads have no groups."""
    return made_of(tmp_path, driver, shape())


def test_a_dispatch_mode_sees_pytorchs_operators(plain):
    """So that FLOPs are counted, for example."""
    given = tensors()
    with FlopCounterMode(display=False) as theirs:
        operators.gradients_of(F.scaled_dot_product_attention, given)
    with FlopCounterMode(display=False) as ours:
        operators.gradients_of(plain.attention, given)
    assert ours.get_total_flops() == theirs.get_total_flops()
    assert plain.counters() == {"subclass": 1}
    assert right(operators.gradients_of(plain.attention, given, drawn(given)), given)
    assert plain.counters()["kernel_backward"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_policy_of_what_to_keep_has_pytorchs_operators(plain, compiled):
    """It names those, so that a checkpoint would compute another's output again."""
    torch._dynamo.reset()
    met = []

    def policy(context, op, *_, **__):
        met.append(op)
        return CheckpointPolicy.MUST_SAVE

    kept = functools.partial(create_selective_checkpoint_contexts, policy)

    def block(q, k, v):
        return checkpoint(plain.attention, q, k, v, use_reentrant=False, context_fn=kept)

    block = torch.compile(block, backend="aot_eager") if compiled else block
    given = tensors()
    assert right(operators.gradients_of(block, given, drawn(given)), given)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in met


# ---- compiled code ----
@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("case", ["full", "window", "lengths", "of both sides", "causal lengths"])
def test_compiled_code_calls_the_kernels(operator, case):
    given, limits = given_of(), CASES[case]
    graphs, got = compiled(operator, given, **limits)
    assert f"{operator.namespace}.backward{'_intervals' if limits else ''}" in graphs[-1]
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
        _, got = compiled(operator, given, **limits)
        assert right(got, given, **limits)
        assert operator.counters() == {"kernel": count, "kernel_backward": count}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("case", ["full", "window", "lengths"])
def test_compiled_code_of_sizes_that_vary_looks_for_a_winner_at_run_time(operator, monkeypatch, case):
    """Where there is none nobody computes a log-sum-exp, and PyTorch has the gradients."""
    limits = CASES[case]
    monkeypatch.setattr(backward_operator, "log_sum_exp", None)

    def attention(q, k, v):
        return operator.attention(q, k, v, enable_gqa=True, **limits)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (96, 128, 160):
        given = tensors(BATCH, HEADS, rows, HEADS_KV)
        assert right(gradients_of(lambda *of, **_: compiled(*of), given), given, **limits)
        if limits:
            assert operator.counters().get("kernel_backward", 0) == (rows >= 128)
            assert operator.counters().get("pytorch_backward", 0) == 0
    assert operator.counters()["kernel_backward"] == (1 if limits else 3)


def test_compiled_code_of_sizes_that_no_winner_has_is_pytorchs(operator):
    """No winner has as many heads, so no size that is known at run time alone makes the call one of theirs."""
    given = tensors(BATCH, 2 * HEADS, ROWS, HEADS_KV)
    for each in given:
        torch._dynamo.mark_dynamic(each, 2)
    graphs, _ = compiled(operator, given, window=(30, 0))
    assert operator.namespace not in "".join(graphs)
    assert operator.counters() == {}


@pytest.mark.parametrize("launched", [True, False])
def test_settings_that_change_between_forward_and_backward_leave_gradients_right(operator, driver, launched):
    """A compiled forward in deterministic mode has the log-sum-exp that a later kernel reads."""
    given, leaves = given_of(), leaves_of(given_of())
    call = getattr(torch.ops, operator.namespace).forward_intervals_lse
    driver.refuses |= set() if launched else {"cuLaunchKernelEx"}
    with deterministic():
        ranges = torch.tensor([[0, 50], [0, 128]], dtype=torch.int32)
        out, _ = call(*leaves, ranges, None, None, 0.125)
    driver.refuses.clear()
    got = torch.autograd.grad(out, leaves, drawn(given))
    assert operator.counters()["kernel_backward"] == 1
    assert operator.counters().get("kernel", 0) == launched
    assert right(got, given, key_lengths=LENGTHS)


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


def test_the_cache_of_plans_has_a_limit(operator, remember):
    remember(plans=2)
    before = alive(ServingPlan)
    for scale in (0.1, 0.2, 0.3, 0.4):
        given = given_of()
        assert right(gradients_of(operator.attention, given, scale=scale), given, scale=scale)
    assert operator.counters() == {"kernel": 4, "kernel_backward": 4}
    assert alive(ServingPlan) - before <= 2 + 2, "of forwards and of backwards"

"""Gradients of the operator's calls by backward kernels, over a fake driver on the CPU."""

import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from attending import BackwardKernel  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from operators import alive, aten, close, flash_backward, gradients_of, make, no_room, tensors, traced  # noqa: E402
from packages import PLAIN_BACKWARD, RECOMPUTED, shape, winner, with_config  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from attnsweep.core.ops import BACKWARD  # noqa: E402
from attnsweep.serve.runtime.plans import Plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def backward(of, kernel=PLAIN_BACKWARD, **how):
    return winner(replace(of, op=BACKWARD), kernel, **how)


@pytest.fixture
def driver():
    return FakeDriver(BackwardKernel())


@pytest.fixture(autouse=True)
def pytorchs():
    """PyTorch's own flash backward on the CPU, where it has none."""
    with aten(_scaled_dot_product_flash_attention_backward=flash_backward):
        yield


@pytest.fixture
def operator(tmp_path, driver):
    """A forward and a backward, of 4 heads and of 4 heads to 2 of keys."""
    shapes = (shape(), shape(batch=2, heads_kv=2))
    return make(tmp_path, driver, *map(winner, shapes), *map(backward, shapes))


def expected(given, direction=None, **how):
    if direction is None:
        direction = torch.randn(given[0].shape, generator=torch.manual_seed(7)).to(given[0].dtype)
    doubles = [t.double() for t in given]
    return gradients_of(F.scaled_dot_product_attention, doubles, direction.double(), enable_gqa=True, **how)


def right(got, given, direction=None, **how):
    wanted = expected(given, direction, **how)
    return all(close(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_any_layout_by_the_kernels(operator, layout, grouped):
    given = tensors(*((2, 4, 256, 2) if grouped else ()), layout=layout)
    got = gradients_of(operator.attention, given, enable_gqa=True, scale=0.3)
    assert right(got, given, scale=0.3)
    for of, mine in zip(given, got, strict=True):
        assert mine.stride() == torch.empty_like(of).stride()
    assert operator.counters() == {"kernel": 1, "kernel_backward": 1}
    gradients_of(operator.attention, given, enable_gqa=True, scale=0.3)
    assert operator.counters()["kernel_backward"] == 2


@pytest.mark.parametrize("kernel", [PLAIN_BACKWARD, RECOMPUTED])
@pytest.mark.parametrize("statistics", [1, 2])
def test_statistics_in_sums_from_the_first_are_of_the_calls_scale(tmp_path, statistics, kernel):
    driver = FakeDriver(BackwardKernel(statistics=statistics))
    kernel = with_config(kernel, STATISTICS=statistics)
    made = make(tmp_path, driver, winner(shape()), backward(shape(), kernel))
    for scale in (0.3, None, 0.05):
        given = tensors()
        assert right(gradients_of(made.attention, given, scale=scale), given, scale=scale), scale
    assert made.counters() == {"kernel": 3, "kernel_backward": 3}


def test_causal_and_recomputed(tmp_path):
    driver = FakeDriver(BackwardKernel(causal=True))
    of = shape(causal=True)
    made = make(tmp_path, driver, winner(of), backward(of, RECOMPUTED))
    given = tensors()
    assert right(gradients_of(made.attention, given, is_causal=True), given, is_causal=True)
    names = [launch["function"][1] for launch in driver.launches]
    assert names == ["flash_fwd_wgmma", "flash_bwd_wgmma_queries", "flash_bwd_wgmma_keys"]
    # The first follows a launch of PyTorch's.
    assert [launch["config"].numAttrs for launch in driver.launches[1:]] == [0, 0]


@pytest.mark.parametrize("kind", ["expanded", "transposed", "shifted", "zeros", "rows apart"])
def test_gradients_of_the_output_lie_anyhow(operator, kind):
    given = tensors()
    made = torch.randn(given[0].shape).to(torch.bfloat16)
    direction = {
        "expanded": lambda: made[:1, :1, :1, :1].expand_as(made),
        "transposed": lambda: made.mT.contiguous().mT,
        "shifted": lambda: torch.empty(made.numel() + 1).to(made)[1:].view_as(made).copy_(made),
        "zeros": lambda: torch._efficientzerotensor(made.shape, dtype=made.dtype),
        "rows apart": lambda: torch.cat((made, made), 3)[..., :64],
    }[kind]()
    got = gradients_of(operator.attention, given, direction)
    assert right(got, given, direction)
    assert operator.counters()["kernel_backward"] == 1


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 2)])
def test_gradients_of_some_inputs(operator, wanted):
    given = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors())]
    out = operator.attention(*given)
    own = [given[i] for i in wanted]
    ones = torch.ones_like(out)
    whole = expected(given, ones)
    for i, got in zip(wanted, torch.autograd.grad(out, own, ones), strict=True):
        assert close(got, whole[i])
    assert operator.counters() == {"kernel": 1, "kernel_backward": 1}


def test_a_wrong_kernel_would_show(tmp_path):
    driver = FakeDriver(BackwardKernel(gone=0.5))
    made = make(tmp_path, driver, winner(shape()), backward(shape()))
    given = tensors()
    assert not right(gradients_of(made.attention, given), given)


@pytest.mark.parametrize(
    "others",
    [[backward(shape(seqlen=64, head_dim=128))], [backward(shape(), gain=1.1, low=0.98)], []],
    ids=["of another shape", "not faster", "none"],
)
def test_without_a_backward_that_won_the_gradients_are_pytorchs(tmp_path, driver, others):
    made = make(tmp_path, driver, winner(shape()), *others)
    given = tensors()
    assert right(gradients_of(made.attention, given), given)
    assert made.counters() == {"kernel": 1} | ({"pytorch_backward": 1} if others else {})


def test_a_kernel_without_the_code_of_a_stage_is_not_called(operator):
    (gpu,) = operator.table.gpus.values()
    for each in gpu.winners:
        if each.problem.op == BACKWARD:
            del each.kernel.stages["convert"]
    given = tensors()
    assert right(gradients_of(operator.attention, given), given)
    assert operator.counters() == {"kernel": 1, "pytorch_backward": 1}


def test_two_backwards_of_one_forward(operator):
    given = [t.detach().requires_grad_() for t in tensors()]
    out = operator.attention(*given)
    ones = torch.ones_like(out)
    first = torch.autograd.grad(out, given, ones, retain_graph=True)
    second = torch.autograd.grad(out, given, 2 * ones)
    assert all(close(2 * a, b) for a, b in zip(first, second, strict=True))
    assert operator.counters()["kernel_backward"] == 2


def test_gradients_of_gradients_are_refused_and_never_wrong(operator):
    """PyTorch's own backward says so; a kernel's gradients would count as constants."""
    given = [t.detach().requires_grad_() for t in tensors()]
    out = operator.attention(*given)
    dq, *_ = torch.autograd.grad(out, given, torch.ones_like(out), create_graph=True)
    assert operator.counters() == {"kernel": 1}
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(dq.float().sum(), given)


def test_batches_of_gradients_are_pytorchs(operator):
    given = [t.detach().requires_grad_() for t in tensors()]
    out = operator.attention(*given)
    both = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    got = torch.autograd.grad(out, given, both, is_grads_batched=True)
    once = expected([t.detach() for t in given], torch.ones_like(out))
    assert all(close(g[1], 2 * e) for g, e in zip(got, once, strict=True))
    assert "kernel_backward" not in operator.counters()


def test_deterministic_algorithms_have_a_kernel_that_is(operator, tmp_path, driver):
    given = tensors()
    torch.use_deterministic_algorithms(True)
    try:
        assert right(gradients_of(operator.attention, given), given)
        assert operator.counters() == {"kernel": 1, "pytorch_backward": 1}
        made = make(tmp_path, driver, winner(shape()), backward(shape(), RECOMPUTED))
        assert right(gradients_of(made.attention, given), given)
        assert made.counters() == {"kernel": 1, "kernel_backward": 1}
    finally:
        torch.use_deterministic_algorithms(False)
    assert right(gradients_of(operator.attention, given), given)
    assert operator.counters()["kernel_backward"] == 1


def test_checkpointing_and_autocast(operator):
    given = tensors()

    def kept(*tensors):
        return checkpoint(operator.attention, *tensors, use_reentrant=False)

    assert right(gradients_of(kept, given), given)
    assert operator.counters() == {"kernel": 2, "kernel_backward": 1}
    leaves = [t.float().requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16):
        out = operator.attention(*leaves)
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert {each.dtype for each in got} == {torch.float32}
    assert right(got, given, torch.ones_like(out))
    assert operator.counters()["kernel_backward"] == 2


def test_a_driver_that_refuses_leaves_the_call_to_pytorch(operator, driver, caplog):
    given = [t.detach().requires_grad_() for t in tensors()]
    out = operator.attention(*given)
    driver.refuses.add("cuLaunchKernelEx")
    with caplog.at_level("WARNING"):
        got = torch.autograd.grad(out, given, torch.ones_like(out), retain_graph=True)
    assert right(got, [t.detach() for t in given], torch.ones_like(out))
    assert "refused a launch" in caplog.text
    driver.refuses.clear()
    again = torch.autograd.grad(out, given, torch.ones_like(out))  # not tried again
    assert right(again, [t.detach() for t in given], torch.ones_like(out))
    assert "kernel_backward" not in operator.counters()


def test_without_memory_for_sums_the_call_is_pytorchs(operator):
    given = tensors()
    leaves = [t.detach().requires_grad_() for t in given]
    out = operator.attention(*leaves)
    with aten(new_empty=no_room):
        got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert right(got, given, torch.ones_like(out))
    assert operator.counters() == {"kernel": 1, "pytorch_backward": 1}
    gradients_of(operator.attention, given)  # memory may be there again
    assert operator.counters()["kernel_backward"] == 1


def test_a_dispatch_mode_sees_pytorchs_operators(operator):
    """So that FLOPs are counted, for example."""
    given = tensors()
    with FlopCounterMode(display=False) as theirs:
        gradients_of(F.scaled_dot_product_attention, given)
    with FlopCounterMode(display=False) as ours:
        gradients_of(operator.attention, given)
    assert ours.get_total_flops() == theirs.get_total_flops()
    assert operator.counters() == {"subclass": 1}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_policy_of_what_to_keep_has_pytorchs_operators(operator, compiled):
    """It names those, so that a checkpoint would compute another's output again."""
    torch._dynamo.reset()
    seen = []

    def policy(context, op, *_, **__):
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE

    kept = functools.partial(create_selective_checkpoint_contexts, policy)

    def block(q, k, v):
        return checkpoint(operator.attention, q, k, v, use_reentrant=False, context_fn=kept)

    block = torch.compile(block, backend="aot_eager") if compiled else block
    given = tensors()
    assert right(gradients_of(block, given), given)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in seen


def test_compiled_code_calls_the_kernels(operator):
    given = tensors()
    ones = torch.ones(given[0].shape, dtype=torch.bfloat16)
    graphs, got = traced(operator.attention, given, ones)
    assert f"{operator.namespace}.backward" in graphs[-1]
    assert right(got, given, ones)
    assert operator.counters() == {"kernel": 1, "kernel_backward": 1}


def test_compiled_code_has_pytorchs_where_no_kernel_would_serve(tmp_path, driver):
    made = make(tmp_path, driver, winner(shape()), backward(shape(), gain=1.1, low=0.98))
    given = tensors()
    graphs, got = traced(made.attention, given, torch.ones_like(given[0]))
    assert "aten._scaled_dot_product" in graphs[-1]
    assert f"{made.namespace}.backward" not in graphs[-1]
    assert right(got, given, torch.ones_like(given[0]))


def test_sizes_that_change_are_planned_when_they_are_known(operator):
    attention = torch.compile(
        lambda q, k, v: operator.attention(q, k, v), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for seqlen in (256, 320, 256):
        given = tensors(seqlen=seqlen)
        assert right(gradients_of(attention, given), given)
    assert operator.counters() == {"kernel": 3, "kernel_backward": 3}


def test_explain_says_whose_gradients(operator, tmp_path, driver):
    q, k, v = tensors()
    assert operator.explain(q, k, v).backward is None
    told = operator.explain(q.requires_grad_(), k, v)
    assert told.backward == PLAIN_BACKWARD.config
    assert f"gradients by {PLAIN_BACKWARD.config}" in str(told)
    with torch.no_grad():
        assert operator.explain(q, k, v).backward is None
    slow = make(tmp_path, driver, winner(shape()), backward(shape(), gain=1.1, low=0.9))
    assert slow.explain(q, k, v).backward is None


def test_the_cache_of_plans_has_a_limit(operator, remember):
    remember(plans=2)
    before = alive(Plan)
    for scale in (0.1, 0.2, 0.3, 0.4):
        given = tensors()
        assert right(gradients_of(operator.attention, given, scale=scale), given, scale=scale)
    assert operator.counters() == {"kernel": 4, "kernel_backward": 4}
    assert alive(Plan) - before <= 2 + 2, "of forwards and of backwards"

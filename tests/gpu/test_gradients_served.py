"""Gradients by the backward kernels of a package on a GPU: eager, compiled, in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import recorded

torch = pytest.importorskip("torch")

import on_card  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from attending import seen  # noqa: E402
from operators import traced  # noqa: E402

from attnsweep.choose.ranking import rank  # noqa: E402
from attnsweep.core.hardware import arch_named  # noqa: E402
from attnsweep.core.layouts import Padded  # noqa: E402
from attnsweep.core.masks import Interval  # noqa: E402
from attnsweep.core.ops import BACKWARD  # noqa: E402
from attnsweep.core.problem import CAUSAL, FULL, Problem  # noqa: E402
from attnsweep.family.discover import discover  # noqa: E402
from attnsweep.serve.export_code import FAMILY, config_of  # noqa: E402
from attnsweep.serve.runtime.families import WGMMA_BACKWARD  # noqa: E402
from attnsweep.store import run as store_run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NAME = "gradients_for_tests"
# What a problem has, and how a config differs from the first one.
SHAPES = {
    Problem(2, 8, 8, 1024, 1024, 128, "bf16", CAUSAL): {},
    Problem(2, 8, 8, 1000, 1000, 128, "bf16", FULL): {"PDL": 1},
    Problem(1, 8, 2, 700, 700, 64, "bf16", CAUSAL): {"BLOCK_M": 128},
    Problem(3, 4, 4, 333, 333, 64, "bf16", FULL): {"RECOMPUTE": 1},
}
# What queries see beside it, as arguments of `attention`, of problems of such kinds. The lengths of
# a problem are others.
PADDED = Padded("right", 40)
INTERVALS = {
    Problem(2, 8, 2, 900, 900, 128, "bf16", Interval(200, 0)): ({"window": (200, 0)}, {}),
    Problem(3, 8, 8, 512, 512, 128, "bf16", FULL, PADDED): ({"key_lengths": [[0, 512], [100, 333], [0, 0]]},
        {"RECOMPUTE": 1}),
    Problem(3, 8, 2, 700, 700, 64, "bf16", CAUSAL, PADDED): ({"key_lengths": [1, 700, 350], "is_causal": True},
        {"BLOCK_M": 128}),
    Problem(2, 4, 4, 600, 600, 64, "bf16", Interval(100, 0), PADDED): ({"key_lengths": [600, 77], "window": (100, 0)},
        {"RECOMPUTE": 1, "PDL": 1}),
}  # fmt: skip


def rows_of(run, shape, changes):
    """A forward winner of the run on the shape, and a backward, as if they had been timed there."""
    family, other = discover()[WGMMA_BACKWARD.kernel.name], replace(shape, op=BACKWARD)
    alike = [
        t
        for t in run.trials
        if t.problem.head_dim == shape.head_dim and t.problem.causal == (shape.causal and shape.kind == "causal")
    ]
    forward, arch = discover()[FAMILY], arch_named(run.environment.arch)
    won = next(
        t
        for t in rank(alike, run.environment)["trial"]
        if t.kernel == FAMILY and not forward.refused_by(config_of(t, forward), shape, arch)
    )
    (pytorchs, *_) = [t for t in alike if t.provider.startswith("torch_") and t.problem == won.problem]
    values = {param.name: param.values[0] for param in family.params}
    backward = won.with_(problem=other, kernel=family.name, config=values | changes)
    both = (won.with_(problem=shape), pytorchs.with_(problem=shape))
    return (*both, backward, pytorchs.with_(problem=other))


@pytest.fixture(scope="module")
def operator(tmp_path_factory):
    place = tmp_path_factory.mktemp("gradients")

    def with_gradients(runs):
        run = store_run.open_run(next(each for each in runs if each.name == "flash_training"))
        every = SHAPES | {shape: changes for shape, (_, changes) in INTERVALS.items()}
        trials = [row for shape, changes in every.items() for row in rows_of(run, shape, changes)]
        return [recorded.changed(run, place / "run", trials)]

    with on_card.exported_package(recorded.RUNS, place, NAME, with_gradients) as package:
        yield on_card.always(package, NAME)


def tensors(shape, layout):
    torch.manual_seed(1)
    batch, heads, heads_kv, seqlen = shape.batch, shape.heads, shape.heads_kv, shape.seqlen_q
    if layout == "packed":
        sizes = (batch, seqlen, heads + 2 * heads_kv, shape.head_dim)
        both = torch.randn(sizes, device="cuda").bfloat16()
        return [t.transpose(1, 2) for t in both.split([heads, heads_kv, heads_kv], 2)]
    each = (heads, heads_kv, heads_kv)
    return [torch.randn(batch, n, seqlen, shape.head_dim, device="cuda").bfloat16() for n in each]


def check(got, given, direction, options):
    """Near float64, as PyTorch's own are: dS of an already rounded P errs by a quarter more."""
    doubles = [t.detach().double().requires_grad_() for t in given]
    leaves = [t.detach().requires_grad_() for t in given]
    sdpa = F.scaled_dot_product_attention
    exact = torch.autograd.grad(sdpa(*doubles, **options), doubles, direction.double())
    theirs = torch.autograd.grad(sdpa(*leaves, **options), leaves, direction)
    for mine, other, right in zip(got, theirs, exact, strict=True):
        assert on_card.error(mine, right) <= 1.3 * on_card.error(other, right) + 1e-4


def options_of(shape):
    return {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.heads_kv}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", ["packed", "heads_first"])
@pytest.mark.parametrize("of_output", ["as it is", "expanded", "heads beside each other"])
def test_eager(operator, shape, layout, of_output):
    given, options = tensors(shape, layout), options_of(shape)
    leaves = [t.detach().requires_grad_() for t in given]
    before = operator.counters().get("kernel_backward", 0)
    out = operator.attention(*leaves, **options)
    direction = torch.randn_like(out)
    if of_output == "expanded":
        direction = direction[:1, :1, :, :1].expand_as(out)
    elif of_output != "as it is":
        direction = direction.transpose(1, 2).contiguous().transpose(1, 2)
    got = torch.autograd.grad(out, leaves, direction)
    assert operator.counters().get("kernel_backward", 0) == before + 1
    assert operator.explain(*leaves, **options).backward
    for mine, of in zip(got, given, strict=True):
        assert mine.stride() == torch.empty_like(of).stride()
    check(got, given, direction, options)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_compiled(operator, shape):
    given, options = tensors(shape, "packed"), options_of(shape)
    direction = torch.randn_like(given[0])
    graphs, got = traced(lambda *of: operator.attention(*of, **options), given, direction)
    assert f"{operator.namespace}.backward" in graphs[-1]
    check(got, given, direction, options)


def test_recomputed_gradients_are_equal_bit_for_bit(operator):
    shape = next(shape for shape, changes in SHAPES.items() if "RECOMPUTE" in changes)
    leaves = [t.requires_grad_() for t in tensors(shape, "heads_first")]
    direction = torch.randn_like(leaves[0])
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (torch.autograd.grad(operator.attention(*leaves), leaves, direction) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)
    assert operator.counters()["kernel_backward"] >= 20
    assert all(torch.equal(a, b) for each in others for a, b in zip(first, each, strict=True))


# ---- windows and lengths ----
def said(limits):
    """Arguments of `attention`, with lengths on the GPU."""
    lengths = limits.get("key_lengths")
    made = {} if lengths is None else {"key_lengths": torch.tensor(lengths, device="cuda")}
    return {"enable_gqa": True, **limits, **made}


def check_intervals(got, given, direction, limits):
    """Near float64, and 0 where nothing is seen."""
    q, k, v = leaves = [t.detach().double().requires_grad_() for t in given]
    group = q.shape[1] // k.shape[1]
    mask = seen(q, k, **{name: x for name, x in limits.items() if name != "enable_gqa"})
    empty = ~mask.any(-1, keepdim=True)
    scores = (q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5).masked_fill(~(mask | empty), -torch.inf)
    out = (torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)).masked_fill(empty, 0)
    exact = torch.autograd.grad(out, leaves, direction.double())
    for mine, right in zip(got, exact, strict=True):
        assert on_card.error(mine, right) <= 8e-3  # of bf16: P, dS and O are rounded
    unseen = ~mask.any(2)[:, 0, :, None]
    for mine in got[1:]:
        assert not mine.masked_select(unseen[:, None].expand_as(mine)).any()
    assert not got[0].masked_select(empty.expand_as(got[0])).any()


@pytest.mark.parametrize("shape", INTERVALS, ids=lambda shape: shape.label)
@pytest.mark.parametrize("layout", ["packed", "heads_first"])
def test_windows_and_lengths(operator, shape, layout):
    given, limits = tensors(shape, layout), said(INTERVALS[shape][0])
    leaves = [t.detach().requires_grad_() for t in given]
    before = operator.counters().get("kernel_backward", 0)
    out = operator.attention(*leaves, **limits)
    direction = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, direction)
    assert operator.counters().get("kernel_backward", 0) == before + 1
    assert operator.explain(*leaves, **limits).backward
    check_intervals(got, given, direction, limits)


@pytest.mark.parametrize("shape", INTERVALS, ids=lambda shape: shape.label)
def test_windows_and_lengths_compiled(operator, shape):
    given, limits = tensors(shape, "packed"), said(INTERVALS[shape][0])
    direction = torch.randn_like(given[0])
    graphs, got = traced(lambda *of: operator.attention(*of, **limits), given, direction)
    assert f"{operator.namespace}.backward_intervals" in graphs[-1]
    check_intervals(got, given, direction, limits)


@pytest.mark.parametrize("lengths", [False, True])
def test_a_step_in_a_cuda_graph(operator, lengths):
    """Replayed on other inputs, and lengths, than it was captured with."""
    shape = next(each for each in (INTERVALS if lengths else SHAPES) if each.causal)
    options = said(INTERVALS[shape][0]) if lengths else options_of(shape)
    leaves = [t.requires_grad_() for t in tensors(shape, "heads_first")]
    direction = torch.randn_like(leaves[0])

    def step():
        return torch.autograd.grad(operator.attention(*leaves, **options), leaves, direction)

    graph, got = on_card.captured(step)
    if lengths:
        options["key_lengths"].copy_(torch.tensor([350, 2, 699]))
    with torch.no_grad():
        for each in leaves:
            each.copy_(torch.randn_like(each))
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    (check_intervals if lengths else check)(got, leaves, direction, options)

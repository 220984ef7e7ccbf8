"""Backward problems: how they are written, their inputs, their gradients in NumPy, their limits."""

import pickle
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from fake_baselines import Cudnn, Session
from fake_torch import Tensor, torch_of

from attnsweep.baselines import cudnn, flash
from attnsweep.baselines.backend import Unavailable
from attnsweep.baselines.registry import BACKENDS, backend_of
from attnsweep.core.cases import Case, small_cases
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import BACKWARD, Padded, Problem
from attnsweep.specs.shapes import read_shapes
from attnsweep.store.run import open_run
from attnsweep.verify import backward, backward_limits
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.measures import measures
from attnsweep.verify.reference import hidden_keys

PROBLEMS = (
    Problem(2, 4, 2, 70, 130, 64, "bf16", CAUSAL, op=BACKWARD),
    Problem(1, 2, 2, 130, 70, 64, "fp16", CAUSAL, op=BACKWARD),  # queries that see no key
    Problem(1, 3, 1, 130, 70, 24, "fp16", Interval(20, 3), op=BACKWARD),
    Problem(1, 2, 1, 9, 65, 128, "bf16", FULL, op=BACKWARD),
    Problem(3, 4, 2, 40, 90, 64, "bf16", CAUSAL, Padded("left", 0), op=BACKWARD),
    Problem(2, 2, 1, 70, 130, 64, "fp16", Interval(20, 3), Padded("right", 30), op=BACKWARD),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_a_backward_is_no_forward_and_has_two_and_a_half_times_its_work(problem):
    assert pickle.loads(pickle.dumps(problem)).op is BACKWARD
    forward = backward.forward_of(problem)
    assert hash(forward) != hash(problem)
    assert "op" not in forward.facts
    assert problem.flops == 2.5 * forward.flops


def test_its_tensors_are_those_of_a_backward():
    assert read_shapes(["B=1", "H=2", "S=64", "D=64", "op=Backward", "1,2,64,64"]) == [
        Problem(1, 2, 2, 64, 64, 64, op=BACKWARD),
        Problem(1, 2, 2, 64, 64, 64),
    ]
    problem = Problem(2, 8, 2, 30, 50, 64, "bf16", op=BACKWARD)
    assert problem.inputs == ("q", "k", "v", "o", "lse", "do")
    shapes = {name: problem.shape_of(name) for name in (*problem.inputs, *problem.outputs)}
    of_q, of_k = (2, 8, 30, 64), (2, 2, 50, 64)
    assert shapes == {
        **dict.fromkeys(("q", "o", "do", "dq"), of_q),
        **dict.fromkeys(("k", "v", "dk", "dv"), of_k),
        "lse": (2, 8, 30),
    }
    assert problem.tensor_bytes == 2 * (4 * 2 * 8 * 30 * 64 + 4 * 2 * 2 * 50 * 64) + 4 * 2 * 8 * 30


def plain_gradients(inputs, problem):
    """By the derivative of a softmax whose output and sums are computed here."""
    q, k, v, do = (from_bits(inputs[n], problem.dtype).astype(np.float64) for n in ["q", "k", "v", "do"])
    group = problem.heads // problem.heads_kv
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * problem.scale
    for item in range(problem.batch):
        scores[item, :, hidden_keys(problem, np.arange(problem.seqlen_q), item)] = -np.inf
    largest = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
    p = np.exp(scores - largest)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
    dp = do @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * problem.scale

    def of_group(x):
        return x.reshape(problem.batch, problem.heads_kv, group, *x.shape[2:]).sum(axis=2)

    dk, dv = (of_group(x) for x in (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do))
    return {"dq": ds @ k, "dk": dk, "dv": dv}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_gradients_are_those_of_attention_but_for_what_rounding_its_output_costs(problem):
    inputs = backward.make_inputs(Case(problem), 1)
    every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    (found,) = backward.gradients(inputs, problem, *every)
    for name, expected in plain_gradients(inputs, problem).items():
        error = np.linalg.norm(found[name] - expected) / np.linalg.norm(expected)
        assert error < (1e-6 if name == "dv" else 1e-3), name
    some = np.array([0, 3, 8]), np.array([1, 60])
    (part,) = backward.gradients(inputs, problem, *some)
    assert np.allclose(part["dq"], found["dq"][:, :, some[0]], rtol=1e-12, atol=1e-12)
    assert np.allclose(part["dv"], found["dv"][:, :, some[1]], rtol=1e-12, atol=1e-12)


def test_gradients_of_exact_inputs_are_those_whose_outputs_alone_are_rounded():
    problem = Problem(1, 2, 1, 192, 64, 128, "bf16", op=BACKWARD)
    inputs = backward.make_inputs(Case(problem, "exact"), 1)
    assert not inputs["q"].any()
    every = np.arange(192), np.arange(64)
    exact, *outs = backward.gradients(inputs, problem, *every, (backward.EXACT, *backward.ROUNDED))
    for name, expected in exact.items():
        for out in outs:
            off = np.abs(out[name] - expected)
            assert (off <= (2.0**-8 + 1e-6) * np.abs(expected) + 1e-12).all(), name
    assert np.abs(exact["dq"]).max() > 0.1
    assert not exact["dk"].any()


@cache
def limits_of(case):
    return backward_limits.limits(case, backward_limits.same_maths(case))


def rounded_as_a_kernel_may(case, seed, change=lambda name, values: values):
    """Which outputs of the rounded maths are over a limit, after a change."""
    inputs, problem = backward.make_inputs(case, seed), case.problem
    every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    maths = (backward.EXACT, *backward.ROUNDED)
    exact, *outs = backward.gradients(inputs, problem, *every, maths)
    least = backward.least_lengths(inputs, problem)
    most = limits_of(case)
    over = set()
    for out in outs:
        for name, values in out.items():
            found = change(name, values), exact[name], problem.dtype
            taken = measures(*found, least=least[name])
            shares = taken.shares(most[name])
            over |= {f"{name} {which}" for which, share in shares.items() if not share <= 1}
    return over


@pytest.mark.nightly(push=1, of="right gradients by NumPy")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_right_gradients_are_within_the_limits(dtype, mask):
    problem = Problem(1, 4, 2, 700, 700, 64, dtype, mask, op=BACKWARD)
    for case in (Case(problem), *small_cases(problem)):
        assert rounded_as_a_kernel_may(case, 3) == set(), case.label


@pytest.mark.nightly(push=1, of="right gradients by NumPy")
@pytest.mark.parametrize(("side", "mask"), [("right", FULL), ("left", CAUSAL)])
def test_gradients_of_padding_are_zero_within_the_limits(side, mask):
    padded = Padded(side, 30)
    problem = Problem(3, 4, 2, 500, 600, 64, "bf16", mask, padded, op=BACKWARD)
    assert rounded_as_a_kernel_may(Case(problem), 3) == set()
    for case in small_cases(problem)[2::4]:
        assert rounded_as_a_kernel_may(case, 3) == set(), case.label
    (first, end), *_ = problem.key_ranges
    hidden = end if side == "right" else first - 1

    def leaked(name, values):
        if name != "dq":
            values[0, :, hidden] = 0.02 * values[0, :, (first + end) // 2]
        return values

    assert rounded_as_a_kernel_may(Case(problem), 3, leaked) >= {"dk row", "dv row"}


@pytest.mark.nightly(push=1, of="right gradients by NumPy")
@pytest.mark.parametrize("dim", [8, 16, 40, 256])
def test_right_gradients_of_narrow_and_wide_heads_are_within_the_limits(dim, some):
    for number, sizes in enumerate([(2, 4, 4, 300, 512), (1, 4, 2, 512, 512), (4, 4, 2, 133, 161)]):
        mask, dtype = ((FULL, "fp16"), (CAUSAL, "bf16"), (FULL, "bf16"))[number]
        problem = Problem(*sizes, dim, dtype, mask, op=BACKWARD)
        for seed in some([*range(50, 54)], 1):
            assert rounded_as_a_kernel_may(Case(problem), seed) == set(), (problem.label, seed)
    for case in some([*small_cases(problem)], 6):
        assert rounded_as_a_kernel_may(case, 3) == set(), case.label


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("length", "dim"), [(150, 64), (449, 128)])
def test_no_tile_of_many_right_heads_comes_near_its_limit(length, dim, some):
    """Many short turns have hundreds of heads. Their last tile has few rows, or one."""
    problem = Problem(528, 1, 1, length, length, dim, "bf16", CAUSAL, op=BACKWARD)
    case, few = Case(problem), replace(problem, batch=1)
    most = backward_limits.limits(case, backward_limits.same_maths(case))
    rows = np.arange(length), np.arange(length)
    for seed in some([*range(60)], 12):
        inputs = backward.make_inputs(Case(few), seed)
        exact, made = backward.gradients(inputs, few, *rows, (backward.EXACT, backward.ROUNDED[0]))
        for name, limit in most.items():
            share = measures(made[name], exact[name], "bf16").tile_gain / limit.tile_gain
            assert share < (1 if length % 64 == 1 else 0.5), (name, seed)


def test_wrong_gradients_are_not():
    case = Case(Problem(1, 2, 2, 600, 600, 64, "bf16", CAUSAL, op=BACKWARD))

    def scaled(name, values):
        return values * (1.002 if name == "dk" else 1)

    assert "dk gain" in rounded_as_a_kernel_may(case, 3, scaled)

    def last_row(name, values):
        values[0, 0, -1] *= 1.1 if name == "dq" else 1
        return values

    assert "dq row" in rounded_as_a_kernel_may(case, 3, last_row)
    rng = np.random.default_rng(1)

    def added_in_bf16(name, values):  # as of many sums in bf16
        return values * (1 + rng.normal(0, 4.5e-3, values.shape)) if name == "dq" else values

    assert "dq rms" in rounded_as_a_kernel_may(case, 3, added_in_bf16)


ONE_KEY = Problem(1, 1, 1, 66, 130, 64, "fp16", FULL, Padded("right", 1, 8), op=BACKWARD)


def of_one_key(seed, dim=64, scale_of_delta=1.0, of_o=np.asarray, hidden_too=False):
    """dQ and dK where queries see one key, in fp32 one product after another; both should be 0.

    scale_of_delta, of_o, hidden_too: mistakes.
    """
    case = Case(replace(ONE_KEY, head_dim=dim))
    assert case.problem.key_ranges == ((0, 1),)
    inputs = backward.make_inputs(case, seed)
    q, k, v, o, do = (from_bits(inputs[name], "fp16")[0, 0].astype(np.float32) for name in ("q", "k", "v", "o", "do"))
    dp, delta = np.zeros(66, np.float32), np.zeros(66, np.float32)
    for column in range(dim):
        dp += do[:, column] * v[0, column]
        delta += do[:, dim - 1 - column] * of_o(o)[:, dim - 1 - column]
    ds = (dp - delta * np.float32(scale_of_delta)).astype(np.float16).astype(np.float64)
    if hidden_too:
        ds = ds + 1e-4 * (do @ v[1] - delta)
    scale = case.problem.scale
    made = {"dq": ds[:, None] * k[:1], "dk": (ds @ q)[None]}
    least, over = backward.least_lengths(inputs, case.problem), set()
    for name, values in made.items():
        values = (scale * values).astype(np.float16).astype(np.float64)[None, None]
        taken = measures(values, np.zeros_like(values), "fp16", least=least[name])
        assert taken.row == pytest.approx(np.linalg.norm(values, axis=-1).max() / least[name])
        shares = taken.shares(limits_of(case)[name])
        over |= {f"{name} {which}" for which, share in shares.items() if not share <= 1}
    return over


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("dim", [64, 256])
def test_gradients_that_are_zero_may_have_the_noise_of_their_sums_and_no_more(dim):
    """A device measures them by the length that a row counts at least, and so must the limits."""
    for seed in range(12):
        assert of_one_key(seed, dim) == set(), seed
    every = {"dq row", "dq element", "dk row", "dk element"}
    for wrong in (
        {"scale_of_delta": 0.999},
        {"scale_of_delta": 0.0},
        {"of_o": lambda o: o.astype(np.float16) * np.float32(1 + 2.0**-11)},
        {"hidden_too": True},
    ):
        assert of_one_key(3, dim, **wrong) == every, wrong


# -- baselines ------------------------------------------------------------------------------------


def test_few_baselines_have_a_backward():
    problem = PROBLEMS[3]
    able = {name for name, backend in BACKENDS.items() if backend.supports(problem) is None}
    own = {"cudnn", "cudnn_deterministic", "flash_attn_3", "flash_attn_4"}
    assert able == {"torch_cudnn", "torch_efficient", "torch_flash"} | own
    assert BACKENDS["unfused"].supports(problem) == "unfused is timed in no backward"
    only = BACKENDS["cudnn_deterministic"].supports(backward.forward_of(problem))
    assert only == "cudnn_deterministic is timed in no forward"
    assert backend_of("some.module:gradients").supports(problem) is None


def on_host(torch, **own):
    """PyTorch whose new tensors are on the host, whatever device is named; own: other parts."""
    made = {name: getattr(torch, name) for name in ("arange", "tensor", "empty")}
    here = {name: lambda *a, of=f, **o: of(*a, **o | {"device": "cpu"}) for name, f in made.items()}
    return SimpleNamespace(**vars(torch) | here | own)


OF_A_LIBRARY = Problem(2, 4, 2, 8, 16, 64, "bf16", CAUSAL, op=BACKWARD)
IN_WINDOW = Problem(2, 4, 2, 8, 8, 64, "bf16", Interval(3, 0), op=BACKWARD)


def tensors_of(problem):
    dtypes = {"bf16": "bfloat16", "fp32": "float32"}
    return {
        t.name: Tensor(np.full(t.shape, number, np.float32), dtypes[t.dtype])
        for number, t in enumerate(problem.op.inputs(problem))
    }


@pytest.mark.parametrize("name", ["cudnn", "cudnn_deterministic"])
@pytest.mark.parametrize("problem", [OF_A_LIBRARY, IN_WINDOW], ids=lambda p: p.label)
def test_cudnns_own_backward_gets_the_problem_in_either_layout(name, problem, monkeypatch):
    module = Cudnn()
    monkeypatch.setitem(sys.modules, "cudnn", module)
    plain, turned = BACKENDS[name].ways(torch_of(), problem, Session([0.0]))
    graph, other = module.graphs
    for each, layout in ((graph, "bhsd"), (other, "bshd")):
        for tensor, given in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "o"), ("do", "do")):
            assert tuple(each.tensors[tensor]["dim"]) == problem.shape_of(given)
            own = cudnn.strides(problem.shape_of(given), layout)
            assert tuple(each.tensors[tensor]["stride"]) == own
        rows = problem.seqlen_q
        assert each.tensors["stats"]["dim"] == [2, 4, rows, 1]
        assert (each.tensors["stats"]["stride"], each.tensors["stats"]["type"]) == ([4 * rows, rows, 1, 1], "float")
        assert each.options["attn_scale"] == 1 / 8
        assert each.options["use_deterministic_algorithm"] is (name != "cudnn")
        assert each.options["diagonal_band_right_bound"] == 0
        left = each.options["diagonal_band_left_bound"]
        assert left == (4 if problem is IN_WINDOW else None)  # it counts the diagonal
        aligned = "top" if problem is IN_WINDOW else "bottom"
        assert each.options["diagonal_alignment"] == aligned
        assert each.steps[-1] == "build_plans"
        for out, of in zip(each.grads, problem.outputs, strict=True):
            assert tuple(out.told["dim"]) == problem.shape_of(of)
            assert (out.told["data_type"], out.told["output"]) == ("bf16", True)
    inputs = tensors_of(problem)
    made = plain.forward(*inputs.values())
    ((buffers, workspace, _),) = graph.executed
    by_uid = {graph.tensors[n]["uid"]: n for n in ("q", "k", "v", "o", "do", "stats")}
    for uid, tensor in by_uid.items():
        expected = inputs["lse"].unsqueeze(-1) if tensor == "stats" else inputs[tensor]
        assert buffers[uid].shape == expected.shape
        assert (buffers[uid].array == expected.array).all()
    assert [buffers[out.told["uid"]] for out in graph.grads] == [*made]
    assert len(buffers) == 9
    assert workspace is not None
    laid = dict(zip(inputs, turned.convert(*inputs.values()), strict=True))
    assert laid["lse"] is inputs["lse"]
    assert laid["do"].array.strides[1] < laid["do"].array.strides[2]


def of_flash(monkeypatch, problem, torch=None):
    """The calls of both FlashAttentions with a backward, which are installed."""
    asked = {}

    def by_3(*given, **options):
        asked["flash_attn_3"] = given, options
        return ("sums",)

    def by_4(*given, **options):
        asked["flash_attn_4"] = given, options
        return (*given[:3], "more")

    torch = torch or torch_of()
    torch.ops = SimpleNamespace(flash_attn_3=SimpleNamespace(bwd=by_3))
    cute = ModuleType("flash_attn.cute")
    cute.interface = SimpleNamespace(_flash_attn_bwd=by_4)
    for module in (ModuleType("xformers.flash_attn_3._C"), cute):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("flash_attn_3", "flash_attn_4"):
        inputs = tensors_of(problem)
        plain, turned = BACKENDS[name].ways(torch, problem, None)
        made = plain.forward(*inputs.values())
        shapes = [problem.shape_of(out) for out in problem.outputs]
        assert [each.shape for each in made] == shapes
        assert turned.convert(*inputs.values())[4] is inputs["lse"]
    return asked


@pytest.mark.parametrize("problem", [OF_A_LIBRARY, IN_WINDOW], ids=lambda p: p.label)
def test_flash_attentions_backward_gets_rows_of_heads_and_the_mask(problem, monkeypatch):
    asked = of_flash(monkeypatch, problem)
    order = {
        "flash_attn_3": ("do", "q", "k", "v", "o", "lse", "q", "k", "v"),  # like dq, dk, dv
        "flash_attn_4": ("q", "k", "v", "o", "do", "lse"),
    }
    inputs, windowed = tensors_of(problem), problem is IN_WINDOW
    for name, (given, _) in asked.items():
        for got, tensor in zip(given, order[name], strict=False):
            own = inputs[tensor].array
            own = own if tensor == "lse" else np.swapaxes(own, 1, 2)
            assert (got.array == own).all(), (name, tensor)
            assert got.shape == own.shape
    of_3, of_4 = asked["flash_attn_3"][1], asked["flash_attn_4"]
    left = 3 if windowed else -1
    assert of_3 == {
        "softmax_scale": 1 / 8,
        "is_causal": not windowed,
        "window_size_left": left,
        "window_size_right": 0 if windowed else -1,
    }
    assert of_4[0][6:] == (1 / 8, not windowed)
    sides = (3, 0) if windowed else (None, None)
    assert tuple(of_4[1].values()) == sides


@pytest.mark.skipif(flash.importable("flash_attn"), reason="FlashAttention is installed")
def test_without_a_build_that_has_a_backward_flash_attention_says_which_has():
    for name, fix in (("flash_attn_3", "xformers==0.0.34"), ("flash_attn_4", "flash-attn-4")):
        with pytest.raises(Unavailable, match=f"no {name} with a backward .*{fix}"):
            BACKENDS[name].ways(torch_of(), OF_A_LIBRARY, None)


PADDED = Problem(3, 4, 2, 9, 20, 16, "bf16", FULL, Padded("right", 30), op=BACKWARD)


def test_pytorchs_efficient_backward_gets_keys_of_each_query_head():
    """Called as it wants its rows to begin, it has the gradients of all query heads of a group."""
    torch = pytest.importorskip("torch")
    problem = Problem(1, 4, 2, 20, 20, 8, "bf16", CAUSAL, op=BACKWARD)

    def called(do, q, k, v, bias, o, lse, *rest, scale):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert lse.shape[-1] % 32 == 0
        assert torch.isinf(lse[..., q.shape[2] :]).all()
        assert rest[3:] == ([True, True, True, False], True)
        assert bias is None
        mask = torch.full(q.shape[2:3] + k.shape[2:3], -torch.inf).triu(1)
        p = torch.exp(q @ k.mT * scale + mask - lse[..., : q.shape[2], None])
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ do, None

    aten = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=SimpleNamespace(default=called))
    host = on_host(torch, ops=SimpleNamespace(aten=aten))
    inputs = backward.make_inputs(Case(problem), 1)
    given = [
        torch.from_numpy(x if n == "lse" else from_bits(x, problem.dtype))
        for n, x in ((n, inputs[n]) for n in problem.values)
    ]
    every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    (exact,) = backward.gradients(inputs, problem, *every)
    for way in BACKENDS["torch_efficient"].ways(host, problem, None):
        found = way.forward(*way.convert(*given))
        for name, one in zip(problem.outputs, found, strict=True):
            assert np.allclose(one.numpy(), exact[name], rtol=1e-3, atol=1e-3), name
    with pytest.raises(Unavailable, match="no mask for padding"):
        BACKENDS["torch_flash"].ways(torch, PADDED, None)
    with pytest.raises(Unavailable, match="with a mask ends in an illegal memory access"):
        BACKENDS["torch_efficient"].ways(torch, PADDED, None)
    with pytest.raises(Unavailable, match="no query that sees no key"):
        BACKENDS["torch_efficient"].ways(torch, PROBLEMS[4], None)


# -- a sweep, on a stand-in for the GPU -----------------------------------------------------------


def test_a_shape_is_tuned_reported_and_explained(tuned):
    slower = {"AHEAD=0": 100.0, "RECOMPUTE=0": 50.0}
    run = tuned("4,4,1024,128 bf16 causal backward", "flash_bwd_wgmma", 500.0, slower)
    assert {row.problem.op for row in open_run(run).trials} == {BACKWARD}

"""The FP8 operator of a package in PyTorch, with a fake driver whose kernels are NumPy's."""

import gc
import importlib
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from attending import Fp8Kernel  # noqa: E402
from fake_compiler import FakeCompiler  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from operators import alive, shifted  # noqa: E402
from packages import H100, on_cpu  # noqa: E402

from attnsweep.core.hardware import ARCHS  # noqa: E402
from attnsweep.core.problem import Problem  # noqa: E402
from attnsweep.family.discover import discover  # noqa: E402
from attnsweep.serve import export  # noqa: E402
from attnsweep.serve.runtime.driver import Ready  # noqa: E402
from attnsweep.serve.runtime.fp8_operator import Fp8Operator  # noqa: E402
from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.serving_plan import ServingPlan  # noqa: E402
from attnsweep.serve.runtime.table import CUBINS, PackageError, read_table  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).parent.parent.parent / "results/h100-80gb-hbm3/fp8_h100"
NUMBERS = itertools.count()
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    place = tmp_path_factory.mktemp("fp8")
    compilers = {"sm_90a": FakeCompiler(ARCHS["sm_90a"], place / "cache")}
    return export.export([RUN], place / "tuned_fp8", discover(), compilers=compilers)


@pytest.fixture
def driver():
    return FakeDriver(Fp8Kernel())


@pytest.fixture
def table(exported):
    """With the winners at head_dim 64 also for scales of blocks of keys."""
    made = read_table(exported.directory / exported.name)
    known = made.fp8[H100]
    blocks = tuple(
        replace(
            winner,
            problem=replace(winner.problem, dtype="e4m3_block"),
            kernel=replace(winner.kernel, dtype="e4m3_block"),
        )
        for winner in known.winners
        if winner.problem.head_dim == 64
    )
    return replace(made, fp8={H100: replace(known, winners=known.winners + blocks)})


@pytest.fixture(autouse=True)
def on_h100(has):
    has(H100)


@pytest.fixture
def operator(table, driver):
    return fp8_operator(table, driver)


def fp8_operator(table, driver, devices=("cpu",)):
    return Fp8Operator(Operator(table, f"fp8_{next(NUMBERS)}", driver, devices))


def quantised(heads=4, seqlen=200, heads_kv=None, seqlen_k=None, batch=2, head_dim=64):
    torch.manual_seed(0)
    heads_kv, seqlen_k = heads_kv or heads, seqlen_k or seqlen
    sizes = ((heads, seqlen), (heads_kv, seqlen_k), (heads_kv, seqlen_k))
    return [(50 * torch.randn(batch, n, rows, head_dim)).to(E4M3) for n, rows in sizes]


def scales_of(kind, batch=2, heads_kv=4, blocks=2):
    torch.manual_seed(1)
    shapes = {
        "numbers": (),
        "tensors": ((), (1,), ()),
        "heads": [(batch, heads_kv)] * 3,
        "blocks": [(batch, heads_kv), *[(batch, heads_kv, blocks)] * 2],
        "mixed": [(), (batch, heads_kv), (1,)],
        "mixed blocks": [(1,), (batch, heads_kv), (batch, heads_kv, blocks)],
    }[kind]
    if kind == "numbers":
        return [0.02, 0.03, 1]
    return [torch.rand(shape) * 0.05 + 0.01 for shape in shapes]


def expected(tensors, scales, causal=False, scale=None):
    def values(tensor, by):
        by = torch.as_tensor(by)
        if by.dim() == 3:
            by = by.repeat_interleave(128, 2)[:, :, : tensor.shape[2], None]
        elif by.dim() == 2:
            by = by.repeat_interleave(tensor.shape[1] // by.shape[1], 1)[..., None, None]
        return tensor.double() * by

    q, k, v = map(values, tensors, scales)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def close(got, tensors, scales, **options):
    assert (got.dtype, got.shape) == (torch.bfloat16, tensors[0].shape)
    assert got.is_contiguous()
    exact = expected(tensors, scales, **options)
    return ((got - exact).norm() / exact.norm()).item() < 6e-3


@pytest.mark.parametrize("kind", ["numbers", "tensors", "heads", "blocks", "mixed", "mixed blocks"])
def test_scales_of_every_kind(operator, driver, kind):
    driver.on_launch.scale_block = 128 if "blocks" in kind else 0
    tensors, scales = quantised(), scales_of(kind)
    assert close(operator.attention(*tensors, *scales), tensors, scales)
    assert operator.counters() == {"kernel_fp8": 1}


def test_scales_that_lie_as_the_kernel_reads_them_are_not_copied(operator, driver):
    tensors, scales = quantised(), scales_of("heads")
    scales[0].requires_grad_()
    with torch.no_grad():
        out = operator.attention(*tensors, *scales)
    assert not out.requires_grad
    (launch,) = driver.launches
    assert launch["values"][4:7] == [scale.data_ptr() for scale in scales]
    assert [m["pointer"] for m in launch["values"][:4]] == [each.data_ptr() for each in (*tensors, out)]


@pytest.mark.parametrize(
    ("causal", "seqlen", "seqlen_k"), [(c, n, None) for c in (False, True) for n in (1, 65, 300)] + [(False, 1, 500)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_tails_and_grouped_heads(operator, driver, table, causal, seqlen, seqlen_k, head_dim):
    driver.on_launch.causal = causal
    tensors = quantised(8, seqlen, 4, seqlen_k, head_dim=head_dim)
    scales = scales_of("heads")
    options = {"causal": causal, "scale": 0.05}
    out = operator.attention(*tensors, *scales, enable_gqa=True, **options)
    assert close(out, tensors, scales, **options)
    # The machine code is of this mask and head_dim: the driver cannot know.
    known = table.fp8[H100]
    loaded = driver.modules[driver.launches[0]["function"][0]]
    kernels = [*(winner.kernel for winner in known.winners), *known.spare]
    of_code = {(k.head_dim, k.mask) for k in kernels if table.code(k.stages["fwd"]) == loaded}
    assert of_code == {(head_dim, "causal" if causal else "full")}


def test_explain_says_which_kernel_and_launches_nothing(operator, driver, table):
    tensors, scales = quantised(), scales_of("heads")
    said = operator.explain(*tensors, *scales)
    assert (said.code, said.gpu) == ("near", H100.label)
    assert said.kernel in {w.kernel.config for w in table.fp8[H100].winners}
    assert operator.explain(*quantised(seqlen=20), *scales).code == "spare"
    tuned = [t.expand(16, 32, 1024, 64).contiguous() for t in quantised(1, 1, batch=1)]
    said = operator.explain(*tuned, 1.0, 1.0, 1.0)
    (won,) = (w for w in table.fp8[H100].winners if w.problem == Problem(16, 32, 32, 1024, 1024, 64, "e4m3_tensor"))
    assert (said.code, said.reason) == ("tuned", f"this shape was tuned, {won.time_us:.4g} µs")
    assert driver.launches == []


def refused(q, k, v, qs, ks, vs):
    """Wrong arguments by what is said of them."""
    rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    return {
        "query is torch.bfloat16": (TypeError, (q.bfloat16(), k, v, qs, ks, vs), {}),
        "value is torch.float8_e5m2": (TypeError, (q, k, v.to(torch.float8_e5m2), qs, ks, vs), {}),
        "key is no": (TypeError, (q, k[0], v, qs, ks, vs), {}),
        "value is no": (TypeError, (q, k, None, qs, ks, vs), {}),
        r"query is \(2, 4, 0, 64\)": (ValueError, (q[:, :, :0], k, v, qs, ks, vs), {}),
        "shapes do not agree": (ValueError, (q, k, v[:, :, :9], qs, ks, vs), {}),
        "do not agree": (ValueError, (q, k[:1], v[:1], qs, ks, vs), {}),
        "enable_gqa": (ValueError, (q, k[:, :2], v[:, :2], qs, ks, vs), {}),
        r"query has strides .*contiguous": (ValueError, (rows_first, k, v, qs, ks, vs), {}),
        "key does not begin": (ValueError, (q, shifted(k), v, qs, ks, vs), {}),
        "align the mask": (ValueError, (q[:, :, :9].clone(), k, v, qs, ks, vs), {"causal": True}),
        "scale is -1.0": (ValueError, (q, k, v, qs, ks, vs), {"scale": -1.0}),
        "scale is nan": (ValueError, (q, k, v, qs, ks, vs), {"scale": math.nan}),
        "k_scale is None": (TypeError, (q, k, v, qs, None, vs), {}),
        "k_scale is torch.float64": (TypeError, (q, k, v, qs, ks.double(), vs), {}),
        "q_scale is 0": (ValueError, (q, k, v, 0, ks, vs), {}),
        "q_scale is -0.5": (ValueError, (q, k, v, -0.5, ks, vs), {}),
        "v_scale is nan": (ValueError, (q, k, v, qs, ks, math.nan), {}),
        "v_scale is inf": (ValueError, (q, k, v, qs, ks, math.inf), {}),
        "v_scale is 1e-60": (ValueError, (q, k, v, qs, ks, 1e-60), {}),
        "v_scale is 1e.39": (ValueError, (q, k, v, qs, ks, 1e39), {}),
        r"k_scale is \(2, 8\)": (ValueError, (q, k, v, qs, torch.ones(2, 8), vs), {}),
        r"v_scale is \(2, 4, 3\)": (ValueError, (q, k, v, qs, ks, torch.ones(2, 4, 3)), {}),
        r"q_scale is \(2, 4, 2\)": (ValueError, (q, k, v, torch.ones(2, 4, 2), ks, vs), {}),
        "v_scale is on meta": (ValueError, (q, k, v, qs, ks, vs.to("meta")), {}),
        "no gradients": (ValueError, (q, k, v, qs, ks, vs.clone().requires_grad_()), {}),
        "head_dim 32": (PackageError, (*(t[..., :32].clone() for t in (q, k, v)), qs, ks, vs), {}),
    }


@pytest.mark.parametrize("said", refused(*quantised(), *scales_of("heads")))
def test_what_cannot_be_served_is_an_error(operator, driver, said):
    kind, arguments, options = refused(*quantised(), *scales_of("heads"))[said]
    for call in (operator.attention, operator.explain):
        with pytest.raises(kind, match=said):
            call(*arguments, **options)
    assert (driver.launches, operator.counters()) == ([], {})


def test_2_31_elements_are_too_many(operator, driver):
    """Memory that nobody touches."""
    driver.on_launch = None
    large = torch.empty(1, 1, 2**25, 64, dtype=E4M3)
    for given, wrong in (([large] * 3, "query"), ([large[:, :, :100], large, large], "key")):
        with pytest.raises(ValueError, match=rf"{wrong} has 2\^31 elements or more; cut the batch"):
            operator.attention(*given, 1.0, 1.0, 1.0)
    assert driver.launches == []


def test_another_gpu_and_another_device(operator, table, driver, has):
    tensors, scales = quantised(), scales_of("heads")
    has(H100._replace(sm_count=114))
    with pytest.raises(PackageError, match="not tuned in FP8; the package knows sm_90, 132 SMs"):
        operator.attention(*tensors, *scales)
    of_gpus = fp8_operator(table, driver, ("cuda",))
    with pytest.raises(ValueError, match="query is on cpu"):
        of_gpus.attention(*tensors, *scales)


@pytest.mark.parametrize("said", ["refused a launch", "SHA-256", "no code of a stage; export again"])
def test_a_kernel_that_cannot_run_is_an_error(table, tmp_path, driver, said):
    known = table.fp8[H100]
    if said == "SHA-256":
        table = replace(table, directory=tmp_path)
        (tmp_path / CUBINS).mkdir()
        for winner in known.winners:
            (tmp_path / CUBINS / winner.kernel.stages["fwd"].file).write_bytes(b"x")
    elif "code" in said:
        bare = tuple(replace(winner, kernel=replace(winner.kernel, stages={})) for winner in known.winners)
        table = replace(table, fp8={H100: replace(known, winners=bare)})
    driver.refuses |= {"cuLaunchKernelEx"} if "launch" in said else set()
    operator = fp8_operator(table, driver)
    with pytest.raises(PackageError, match=said):
        operator.attention(*quantised(), *scales_of("heads"))
    driver.refuses.clear()
    if "launch" in said:
        operator.attention(*quantised(), *scales_of("heads"))
    assert operator.counters() == ({"kernel_fp8": 1} if "launch" in said else {})


def test_launches_are_remembered_and_never_grow_without_end(operator, driver, remember):
    remember(plans=3, ready=3)
    before = alive(ServingPlan), alive(Ready)
    for seqlen in range(100, 120):
        operator.attention(*quantised(seqlen=seqlen), *scales_of("heads"))
        if seqlen % 4 == 0:
            assert alive(ServingPlan) - before[0] <= 3
            assert alive(Ready) - before[1] <= 3


def test_addresses_and_scales_that_keep_changing(operator, driver, remember):
    remember(of_a_kind=2)
    given = [([t.clone() for t in quantised()], [s * n for s in scales_of("heads")]) for n in (1, 2, 3)]
    for n in (0, 1, 2, 0, 2, 1, 1):
        assert close(operator.attention(*given[n][0], *given[n][1]), *given[n])
        given[n][1][2].mul_(1.5)  # in its place
    assert driver.replaced


def test_the_operator_keeps_its_library(table, driver):
    """Without it PyTorch frees the operator, and a call ends the process."""
    made = fp8_operator(table, driver)
    gc.collect()
    made.attention(*quantised(), *scales_of("heads"))


# ---- compilers ----
def test_opcheck(table, driver):
    """Not its test_schema, which compares arguments as PyTorch cannot in FP8."""
    arguments = (*quantised(), *scales_of("tensors"), False, 0.125)
    utilities = ("test_faketensor", "test_autograd_registration")
    whole = Operator(table, f"fp8_{next(NUMBERS)}", driver, ("cpu",))
    kept, op = Fp8Operator(whole), getattr(torch.ops, whole.namespace).forward_fp8.default
    torch.library.opcheck(op, arguments, test_utils=utilities)
    assert kept.counters()["kernel_fp8"] > 0


def test_compiles_as_one_graph(operator, driver):
    def block(q, k, v, k_scale):
        scale = q.abs().amax() / 448
        return operator.attention((q / scale).to(E4M3), k, v, scale, k_scale, 0.5) + 1

    _, k, v = quantised()
    q, k_scale = torch.randn(k.shape), torch.rand(2, 4) + 0.1
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, k_scale), block(q, k, v, k_scale))
    assert operator.counters() == {"kernel_fp8": 2}


def test_a_compiled_call_that_cannot_be_served_is_an_error(operator):
    compiled = torch.compile(
        lambda q, k, v: operator.attention(q, k, v, 1.0, 1.0, 1.0), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for seqlen in (100, 200, 333):
        tensors = quantised(seqlen=seqlen)
        assert torch.equal(compiled(*tensors), operator.attention(*tensors, 1.0, 1.0, 1.0))
    q, k, v = quantised()
    with pytest.raises(Exception, match="contiguous"):
        compiled(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)


# ---- the package ----
def test_a_package_as_a_program_imports_it(exported):
    sys.path.insert(0, str(exported.directory))
    try:
        tuned = importlib.import_module(exported.name)
    finally:
        sys.path.remove(str(exported.directory))
    tensors, scales = quantised(), scales_of("heads")
    with pytest.raises(ValueError, match="query is on cpu"):
        tuned.attention_fp8(*tensors, *scales)
    on_cpu(tuned, FakeDriver(Fp8Kernel()))
    assert close(tuned.attention_fp8(*tensors, *scales), tensors, scales)
    assert tuned.explain_fp8(*tensors, *scales).code == "near"
    q = torch.randn(1, 2, 8, 64)
    assert tuned.explain(q, q, q).kernel is None
    assert tuned.counters() == {"kernel_fp8": 1}


def test_a_package_without_fp8_says_so():
    from attnsweep.serve.runtime import package as shipped

    with pytest.raises(PackageError, match="no FP8 kernels; export a run"):
        shipped.attention_fp8(*quantised(), *scales_of("heads"))

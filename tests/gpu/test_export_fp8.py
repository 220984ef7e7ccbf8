"""FP8 kernels of an exported package on a GPU: outputs are those of float64 within the limits."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import recorded

torch = pytest.importorskip("torch")

import on_card  # noqa: E402

from attnsweep.compile.nvrtc import Compiler  # noqa: E402
from attnsweep.core import cases  # noqa: E402
from attnsweep.core.hardware import arch_named  # noqa: E402
from attnsweep.core.problem import Problem  # noqa: E402
from attnsweep.family.discover import discover  # noqa: E402
from attnsweep.serve.runtime.families import FP8  # noqa: E402
from attnsweep.serve.runtime.fp8_operator import Fp8Operator  # noqa: E402
from attnsweep.serve.runtime.operator import Operator  # noqa: E402
from attnsweep.serve.runtime.table import GpuKey, read_table  # noqa: E402
from attnsweep.verify import inputs as verify_inputs  # noqa: E402
from attnsweep.verify import limits, measures  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NAME = "exported_fp8_for_tests"
FAMILY = discover()[FP8.kernel.name]
DEVICE = "cuda"


def this_gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the family is for Hopper")
    return GpuKey.of(torch.cuda.get_device_properties(0))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A recorded run as a program imports it: this GPU's, or another's that it can run."""
    this_gpu()
    with on_card.exported_package(recorded.FP8_RUNS, tmp_path_factory.mktemp("package"), NAME) as made:
        yield made


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A package of every head_dim, mask and kind of scales, for this GPU."""
    key, compiler, notes = this_gpu(), Compiler(arch_named(FAMILY.min_arch)), []
    try:
        made = recorded.fp8_table(key, compiler, tmp_path_factory.mktemp("made"), notes)
    finally:
        compiler.close()
    assert notes == [], "spills"
    return made


@pytest.fixture(scope="module")
def operator(table):
    return Fp8Operator(Operator(table, "exported_fp8_every"))


@cache
def inputs(problem):
    """q, k, v and their scales on the GPU, drawn as a sweep draws them."""
    made = verify_inputs.make_inputs(cases.Case(problem, "normal"), 7)
    tensors = [torch.from_numpy(made[n]).to(DEVICE).view(torch.float8_e4m3fn) for n in "qkv"]
    scales = [torch.from_numpy(made[f"{n}_scale"]).to(DEVICE) for n in "qkv"]
    if problem.dtype == "e4m3_tensor":  # as a user has them
        scales = [scale.flatten()[0].clone() for scale in scales]
    return (*tensors, *scales)


def large_inputs(problem):
    """As `inputs`, of one head, whose rows the other heads have in another order: in less time.

    For scales of tensors or of heads.
    """
    small = replace(problem, batch=1, heads=1, heads_kv=1, dtype="e4m3_tensor")
    *tensors, q_scale, k_scale, v_scale = inputs(small)
    made = []
    for name, tensor in zip("qkv", tensors, strict=True):
        batch, heads, rows, head_dim = problem.shape_of(name)
        shifts = torch.arange(batch * heads, device=DEVICE)[:, None] * 131
        order = (torch.arange(rows, device=DEVICE) + shifts) % rows
        bytes_of = tensor[0, 0].view(torch.uint8)[order].view(batch, heads, rows, head_dim)
        made.append(bytes_of.view(torch.float8_e4m3fn))
    scales = (q_scale, k_scale, v_scale)
    if problem.dtype == "e4m3":
        of_heads = (problem.batch, problem.heads_kv)
        scales = tuple(scale.expand(of_heads).contiguous() for scale in scales)
    return (*made, *scales)


def exact_rows(given, problem, rows):
    """Rows of attention of the dequantised values, in float64 on the GPU."""
    q, k, v, *scales = given
    q = q[:, :, rows]

    def values(tensor, scale, heads):
        if scale.dim() == 3:
            scale = scale.repeat_interleave(128, 2)[:, :, : tensor.shape[2], None]
        elif scale.dim() == 2:
            scale = scale.repeat_interleave(heads // problem.heads_kv, 1)[..., None, None]
        return tensor.double() * scale

    q = values(q, scales[0], problem.heads)
    group = problem.heads // problem.heads_kv
    k, v = (values(t, s, problem.heads_kv).repeat_interleave(group, 1) for t, s in zip((k, v), scales[1:], strict=True))
    scores = q @ k.mT * problem.scale
    if problem.causal:
        seen = torch.arange(problem.seqlen_k, device=DEVICE) <= rows[:, None]
        scores.masked_fill_(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def tiles(problem):
    """Rows of the first tile, the last one and two others."""
    whole = range(-(-problem.seqlen_q // measures.TILE))
    chosen = sorted({0, whole[-1], whole[len(whole) // 3], whole[len(whole) // 2]})
    rows = torch.cat([measures.TILE * tile + torch.arange(measures.TILE) for tile in chosen])
    return rows[rows < problem.seqlen_q].to(DEVICE)


def check(attention, problem, given, explained):
    grouped = problem.heads != problem.heads_kv
    got = attention(*given, causal=problem.causal, enable_gqa=grouped)
    assert (got.dtype, got.shape) == (torch.bfloat16, given[0].shape)
    rows = tiles(problem)
    exact = exact_rows(given, problem, rows).cpu().numpy()
    found = measures.measures(got[:, :, rows].double().cpu().numpy(), exact, "bf16")
    shares = found.shares(limits.limits(cases.Case(problem, "normal"), 0))
    shares.pop("scale", None)
    assert all(share <= 1 for share in shares.values()), (problem.label, explained, shares)


@pytest.mark.parametrize("dtype", recorded.FP8_DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", recorded.FP8_SIZES, ids=str)
def test_outputs(operator, dtype, causal, head_dim, sizes):
    if causal and sizes[3] != sizes[4]:
        given = inputs(Problem(*sizes, head_dim, dtype, causal=False))
        with pytest.raises(ValueError, match="libraries differ in how they align the mask"):
            operator.attention(*given, causal, None, True)
        return
    problem = Problem(*sizes, head_dim, dtype, causal=causal)
    if head_dim == 256 and sizes[3] <= 64:
        with pytest.raises(Exception, match="no FP8 kernel of the package may run"):
            operator.attention(*inputs(problem), causal, None, True)
        return
    given = inputs(problem)
    options = {"causal": causal, "enable_gqa": problem.heads != problem.heads_kv}
    check(operator.attention, problem, given, operator.explain(*given, **options))


def test_every_winner_of_the_recorded_run(package):
    """On the shape that it won, and half a tile off it."""
    table = read_table(Path(package.__file__).parent)
    winners = [w for w in table.fp8[this_gpu()].winners if w.problem.dtype != "e4m3_block"]
    assert winners
    for winner in winners:
        tuned = winner.problem
        for problem in (tuned, recorded.off(tuned)):
            given = large_inputs(problem)
            explained = package.explain_fp8(*given, causal=tuned.causal)
            if problem is tuned:
                assert (explained.code, explained.kernel) == ("tuned", winner.kernel.config)
            check(package.attention_fp8, problem, given, explained)
    assert package.counters()["kernel_fp8"] == 2 * len(winners)


def test_winners_of_16_bits_are_not_needed(package):
    q = torch.randn(1, 4, 256, 64, device=DEVICE).bfloat16()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(package.attention(q, q, q), sdpa(q, q, q))


@pytest.mark.parametrize("dtype", recorded.FP8_DTYPES)
def test_cuda_graphs_and_streams(table, dtype):
    """The first call is in a capture, and scales are read anew by each replay."""
    fresh = Fp8Operator(Operator(table, f"exported_fp8_{dtype}"))
    given = [each.clone() for each in inputs(Problem(2, 8, 8, 1000, 1000, 128, dtype, causal=True))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fresh.attention(*given, True)
    graph.replay()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(fresh.attention(*given, True), out)
    given[5].mul_(2)
    before = out.clone()
    graph.replay()
    assert torch.equal(out, fresh.attention(*given, True))
    assert torch.equal(out, 2 * before)
    assert fresh.counters() == {"kernel_fp8": 3}


def test_a_new_thread(operator):
    given = inputs(Problem(2, 8, 8, 1000, 1000, 64, "e4m3"))
    expected = operator.attention(*given)
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(operator.attention, *given).result(), expected)


def test_compiled_as_one_graph(operator):
    def block(q, k, v):
        def quantise(x):
            scale = x.abs().amax().float() / 448
            return (x.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale

        pairs = [quantise(x) for x in (q, k, v)]
        return operator.attention(*(x for x, _ in pairs), *(s for _, s in pairs), causal=True) * 2

    torch.manual_seed(0)
    given = [torch.randn(2, 700, 8, 128, device=DEVICE).bfloat16().transpose(1, 2) for _ in "qkv"]
    before = operator.counters().get("kernel_fp8", 0)
    with torch.no_grad():
        got, expected = torch.compile(block, fullgraph=True)(*given), block(*given)
    # A compiler may round the quotients of a few numbers otherwise.
    assert ((got - expected).double().norm() / expected.double().norm()).item() < 0.02
    assert operator.counters()["kernel_fp8"] == before + 2


def test_what_scales_hold_is_not_looked_at_but_a_nan_is_seen(operator):
    given = list(inputs(Problem(2, 8, 8, 1000, 1000, 64, "e4m3")))
    for place in (3, 4, 5):
        spoiled = [each.clone() for each in given]
        spoiled[place][1, 3] = float("nan")
        out = operator.attention(*spoiled)
        assert out[1, 3].isnan().all()
        assert not out[0].isnan().any()


def test_errors(operator):
    given = inputs(Problem(2, 8, 8, 1000, 1000, 64, "e4m3"))
    with pytest.raises(ValueError, match="k_scale is on cpu"):
        operator.attention(*given[:4], given[4].cpu(), given[5])
    with pytest.raises(ValueError, match="query is on cpu"):
        operator.attention(*(each.cpu() for each in given))
    with pytest.raises(ValueError, match="contiguous"):
        operator.attention(given[0].transpose(1, 2).contiguous().transpose(1, 2), *given[1:])


def test_memory_stays_with_changing_shapes(operator):
    def sweep(first):
        for seqlen in range(first, first + 200):
            shape = (1, 8, seqlen, 64)
            given = torch.zeros(3, *shape, device=DEVICE).to(torch.float8_e4m3fn)
            operator.attention(*given, 1.0, 1.0, 1.0)
        del given
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    assert sweep(500) == sweep(500) == sweep(900)

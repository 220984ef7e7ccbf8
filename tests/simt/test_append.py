"""append_paged_wgmma on the CPU: requests that end anywhere, their tokens and pages, and what should not lie there."""

import random
from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, TensorMap
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

from .harness import ARCH, COMPILER, LSE_LIMIT, SimtError, config_of, error_of_lse, sources

KERNEL = discover()["append_paged_wgmma"]
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
UNWRITTEN = 0xFFFF
# SMs, config and problem. Few SMs: a block has several tiles.
RUNS = (
    (1, "LSE=1 BLOCK_N=128", "(1,8/2,130x640,128) bf16 causal paged(16)"),
    (2, "LSE=1 BLOCK_N=64 MAXIMA=2", "(1,8/2,130x640,128) bf16 causal paged(64)"),
    (3, "LSE=1 WARPGROUPS=3", "(1,14/2,60x640,64) fp16 causal paged(64,hnd)"),
    (2, "LSE=1 BLOCK_N=176 WARPGROUPS=1 OVERLAP=0", "(1,10/2,60x640,96) fp16 window(100,3) paged(8) softcap(5) sinks"),
    (1, "LSE=1 BLOCK_N=128 PINGPONG=1 NUM_STAGES=3", "(1,16/1,60x640,64) bf16 full paged(256) sinks"),
    (2, "LSE=1 BLOCK_N=64 PINGPONG=1", "(1,4,70x640,256) bf16 causal paged(48)"),
    (2, "LSE=1 BLOCK_N=96 MAXIMA=2 WARPGROUPS=3 PINGPONG=1", "(1,12/1,60x640,64) fp16 window(40,0) paged(24)"),
    (3, "LSE=1 BLOCK_N=128 OVERLAP=0 WARPGROUPS=3", "(1,4,200x640,64) bf16 full paged(16,hnd) softcap(30)"),
    (30, "LSE=1 BLOCK_N=64 WARPGROUPS=1 SPLITS=2", "(2,16/2,20x900,64) bf16 causal paged(16) sinks"),
    (9, "LSE=1 BLOCK_N=64 SPLITS=4", "(1,14/2,9x1700,64) fp16 window(900,3) paged(8) softcap(5)"),
    (1, "LSE=1 BLOCK_N=128", "(1,8/2,130x640,128) bf16 causal paged(1)"),
    (2, "LSE=1 BLOCK_N=96 WARPGROUPS=3", "(1,14/2,60x640,64) fp16 window(100,3) paged(4,hnd) softcap(5) sinks"),
    (2, "LSE=1 BLOCK_N=64 OVERLAP=0 WARPGROUPS=3", "(1,4,70x640,96) bf16 full paged(2)"),
    (1, "LSE=1 BLOCK_N=128", "(1,8/2,130x640,128) bf16 causal paged(16,e4m3)"),
    (2, "LSE=1 BLOCK_N=64 MAXIMA=2 NUM_STAGES=3", "(1,16/1,60x640,64) fp16 causal paged(64,hnd,e4m3) sinks"),
    (3, "LSE=1 BLOCK_N=64 WARPGROUPS=1", "(1,4,70x640,256) bf16 window(100,3) paged(1,e4m3)"),
    (2, "LSE=1 BLOCK_N=96 PINGPONG=1", "(1,8/2,60x640,96) fp16 full paged(2,e4m3) softcap(30)"),
    (9, "LSE=1 BLOCK_N=64 SPLITS=4", "(1,14/2,9x1700,64) bf16 causal paged(1,e4m3) softcap(5) sinks"),
    (1, "LSE=1 BLOCK_N=128 COPY_WARPS=8", "(1,8/2,130x640,128) bf16 causal paged(16,e4m3)"),
    (2, "LSE=1 BLOCK_N=96 WARPGROUPS=1 COPY_WARPS=8", "(1,8/2,60x640,96) fp16 window(40,0) paged(2,e4m3)"),
)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize(("sms", "words", "label"), RUNS)
def test_right_whatever_the_lengths(simulator, some, sms, words, label):
    config, arch = config_of(KERNEL, words), replace(ARCH, sm_count=sms)
    for case in some(small_cases(Problem.parse(label)), 2):
        result = simulator.check(KERNEL, config, case, arch=arch)
        assert result.ok, (config.label, case.label, str(result))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(60))
def test_random_config_of_random_requests_is_right(simulator, drawn_by, number):
    rng = random.Random(f"{drawn_by} append {number}")
    page, stored = rng.choice((1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)), rng.choice(("", ",e4m3"))
    group, heads_kv, queries = (
        rng.choice((1, 2, 3, 4, 5, 7, 8, 16)),
        rng.choice((1, 2)),
        rng.choice((1, 9, 33, 70, 150)),
    )
    edges = (0, 1, queries, page, page + 1, 63, 65, 129, rng.randint(1, 700))
    lengths = [rng.choice(edges) for _ in range(rng.choice((1, 2, 5, 40 if queries < 20 else 3)))]
    shared = rng.random() < 0.3  # keys of more than the least fair share
    if shared:
        queries, lengths = min(queries, 33), [rng.randint(768, 1600), *lengths[:4], rng.randint(768, 2200)]
    lengths[0] = max(lengths[0], 1)
    left, right = rng.randint(0, 200), rng.randint(0, 4)
    mask = rng.choice(("full", "causal", "causal", f"window({left},0)", f"window({left},{right})"))
    scores = rng.choice(("", "", " softcap(5)", " sinks", " softcap(5) sinks"))
    said = "+".join(f"1x{length}" for length in lengths)
    head_dim = rng.choice(KERNEL.head_dims)
    problem = Problem.parse(
        f"({len(lengths)},{group * heads_kv}/{heads_kv},{queries}x{max(lengths)},{head_dim}) "
        f"{rng.choice(KERNEL.dtypes)} {mask} paged({page},{rng.choice(('nhd', 'hnd'))}{stored},{said}){scores}"
    )
    values = {param.name: rng.choice(param.values) for param in KERNEL.params} | {"LSE": 1}
    values["BLOCK_N"] = rng.choice((64, 80, 128, 176)) if head_dim < 256 else 64
    if stored or page % 8:
        values["BLOCK_N"] = min(values["BLOCK_N"], 128)
    values["NUM_STAGES"] = 2 if head_dim * values["BLOCK_N"] > 64 * 128 else values["NUM_STAGES"]
    values["WARPGROUPS"] = 1 if head_dim == 256 else min(values["WARPGROUPS"], 2 if head_dim == 128 else 3)
    values["COPY_WARPS"] = values["COPY_WARPS"] if stored else 4
    if shared:
        values |= {"SPLITS": rng.choice((2, 4, 16)), "BLOCK_N": 64}
    values["PINGPONG"] &= values["OVERLAP"] & (values["WARPGROUPS"] > 1)
    arch = replace(ARCH, sm_count=60 if shared else rng.choice((1, 2, 5, 60)))
    try:
        case = Case(problem)
        result = simulator.check(KERNEL, Config(values), case, arch=arch, schedules=(0, 1, 2, number + 3))
    except SimtError as error:
        pytest.fail(f"{values} {problem.label}, {arch.sm_count} SMs\n{error}")
    assert result.ok, f"{values} {problem.label}, {arch.sm_count} SMs: {result}"


class Call:
    """A problem of equally many queries, and calls of a config in which requests have some of them.

    As serving engines have them: q and o are (tokens, heads, head_dim), and a request's tokens are its last ones.
    """

    def __init__(self, simulator, label, words, sms=2):
        self.simulator, self.problem, self.config = simulator, Problem.parse(label), config_of(KERNEL, words)
        case, arch = Case(self.problem), replace(ARCH, sm_count=sms)
        self.inputs = dict(oracle_of(self.problem).make_inputs(case, 1))
        self.stages = simulator.build(KERNEL, self.config, case, arch=arch)
        launch, _ = self.stages["fwd"]
        launch = replace(launch, defines=dict(launch.defines) | {"QUERIES": 1})
        defines = KERNEL.stages["fwd"].defines(self.config, self.problem, launch)
        self.stages["fwd"] = launch, simulator.stage(KERNEL, sources(KERNEL), launch.function, defines, asan=False)

    def run(self, begins, ends, tokens, schedule=0, **inputs):
        """The output, (tokens, heads, head_dim), and the log-sum-exp, (heads, tokens), of these tokens."""
        problem, heads, columns = self.problem, self.problem.heads, self.problem.head_dim
        rows = np.full((tokens, heads, columns), UNWRITTEN, np.uint16)  # NaN where no request has a token
        for request, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            own = range(max(begin, 0), min(end, tokens))
            count = len(own)
            if count:
                rows[own.start : own.stop] = self.inputs["q"][request, :, -count:].swapaxes(0, 1)
        launch, made = self.stages["fwd"]
        args = [*launch.args]
        strides = (2 * columns, 2 * columns * heads, 2 * columns * heads * tokens)
        args[0] = TensorMap("q", (columns, heads, tokens, 1), strides, args[0].box)
        args[6:8] = "query_begins", "query_ends"
        args[15:17] = tokens, tokens
        args[22:25] = 0, columns, columns * heads
        stages = self.stages | {"fwd": (replace(launch, args=tuple(args)), made)}
        given = self.inputs | {"q": rows, "query_begins": np.int32(begins), "query_ends": np.int32(ends)} | inputs
        sizes = KERNEL.workspaces(self.config, problem) | {"lse": 4 * heads * tokens}
        left = self.simulator.run(stages, given, {"o": 2 * rows.size}, sizes, schedule=schedule, calls=2)
        return left["o"].view(np.uint16).reshape(rows.shape), left["lse"].view(np.float32).reshape(heads, tokens)

    def expected(self):
        """The exact output, (requests, queries, heads, head_dim), and the log-sum-exp of all queries."""
        exact, _ = oracle_of(self.problem).exact(self.inputs, self.problem)
        return exact["o"].swapaxes(1, 2), log_sum_exp(self.inputs, self.problem, np.arange(self.problem.seqlen_q))

    def assert_right(self, begins, ends, tokens, **how):
        out, lse = self.run(begins, ends, tokens, **how)
        values, (exact, sums) = from_bits(out, self.problem.dtype).astype(np.float64), self.expected()
        theirs = np.zeros(tokens, bool)
        for request, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            count = end - begin
            if count <= 0:
                continue
            theirs[begin:end] = True
            want = exact[request, -count:]
            error = np.linalg.norm(values[begin:end] - want, axis=-1)
            assert (error <= 5e-3 * np.linalg.norm(want, axis=-1)).all(), f"request {request}"
            assert error_of_lse(lse[:, begin:end], sums[request, :, -count:]) <= LSE_LIMIT
        assert (out[~theirs] == UNWRITTEN).all()
        return out, lse


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("words", "paged"),
    [
        ("LSE=1 BLOCK_N=64", "16"),
        ("LSE=1 BLOCK_N=128 WARPGROUPS=3 MAXIMA=2", "16"),
        ("LSE=1 BLOCK_N=64", "1"),
        ("LSE=1 BLOCK_N=128 WARPGROUPS=3", "16,e4m3"),
    ],
)
def test_tokens_of_requests_lie_anywhere_and_nothing_else_is_stored(simulator, words, paged):
    """One query, none, a tile's last ones, more than a tile; no order, and NaN in between."""
    label = f"(6,8/2,80x300,64) bf16 causal paged({paged},1x300+1x170+1x33+1x0+1x90+1x128)"
    call = Call(simulator, label, words)
    begins, ends = (90, 10, 0, 60, 20, 70), (170, 11, 0, 63, 53, 85)
    first = call.assert_right(begins, ends, 175)
    again = call.assert_right(begins, ends, 175, schedule=2)
    assert all(np.array_equal(*each, equal_nan=True) for each in zip(first, again, strict=True))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("words", "paged"),
    [
        ("LSE=1 BLOCK_N=64 WARPGROUPS=1 SPLITS=4", "16"),
        ("LSE=1 BLOCK_N=64 WARPGROUPS=2 SPLITS=16", "64"),
        ("LSE=1 BLOCK_N=64 WARPGROUPS=2 SPLITS=4", "2"),
        ("LSE=1 BLOCK_N=64 WARPGROUPS=2 SPLITS=16 COPY_WARPS=8", "16,e4m3"),
    ],
)
def test_long_requests_among_short_ones_share_their_keys(simulator, words, paged):
    """Equal calls give equal bits. The 32 requests that a warp looks at together end between two long ones."""
    lengths = "+".join(f"1x{length}" for length in (*range(1, 34), 1900, 2300, 40, 1500))
    label = f"(37,8/2,20x2300,64) bf16 causal paged({paged},{lengths},seed70)"
    call = Call(simulator, label, words, sms=80)
    counts = [min(20, 1 + length // 60) for length in call.inputs["seqused_k"]]
    assert [at for at, count in enumerate(counts) if count == 20] == [30, 32, 33]
    ends = np.cumsum(counts)
    first = call.assert_right(ends - counts, ends, ends[-1] + 2)
    again = call.assert_right(ends - counts, ends, ends[-1] + 2, schedule=2)
    assert all(np.array_equal(*each, equal_nan=True) for each in zip(first, again, strict=True))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("stored", ["", ",e4m3"])
def test_tokens_pages_and_lengths_that_cannot_be_touch_nothing_outside(simulator, stored, splits):
    """A simulated run ends if something outside the tensors is read or written. Pages that there are not are zeros."""
    label, words = f"(4,4/2,40x100,64) bf16 full paged(16{stored},4x100)", f"LSE=1 BLOCK_N=64 SPLITS={splits}"
    call = Call(simulator, label, words)
    pages, blocks = len(call.inputs["k"]), call.inputs["block_table"].shape[1]
    table, lengths = call.inputs["block_table"].copy(), np.int32([100, 2**31 - 1, -(2**31), 16 * blocks])
    table[0, 1:3] = -7, pages
    table[3] = 2**31 - 1, -(2**31), *table[3, 2:]
    begins, ends = np.int32([0, 100, -5, 2**31 - 1]), np.int32([40, 2**31 - 1, 1, 2**31 - 1])
    out, lse = call.run(begins, ends, 120, seqused_k=lengths, block_table=table)
    assert not np.isnan(from_bits(out[:40], "bf16")).any()
    assert (out[40:100] == UNWRITTEN).all()
    # Keys of zeros count; two of seven pages of the first request are such.
    q = from_bits(call.inputs["q"], "bf16").astype(np.float64)
    k = from_bits(call.inputs["k"], "e4m3" if stored else "bf16").astype(np.float64)
    if stored:
        k *= call.inputs["k_scale"][0][:, None]
    keys = k[table[0, [0, *range(3, blocks)]]].reshape(-1, 2, 64)[: 100 - 32].swapaxes(0, 1)
    scores = q[0].reshape(2, 2, 40, 64) @ keys[:, None].swapaxes(2, 3) / 8
    sums = np.log(np.exp(scores).sum(-1) + 32).reshape(4, 40)
    # The third has the token 0 too, of no key; whose of both is stored last is not said.
    assert error_of_lse(lse[:, 1:40], sums[:, 1:]) <= LSE_LIMIT


def test_scales_that_all_requests_share_and_one_of_zero(simulator):
    """Strides of 0; keys that count nothing weigh alike."""
    call = Call(simulator, "(2,4/2,40x100,64) bf16 full paged(16,e4m3,2x100)", "LSE=1 BLOCK_N=64")
    ends = (40, 80)
    for k_scale in (0.5, 0.0):
        scales = {"k_scale": np.full((2, 2), k_scale, np.float32), "v_scale": np.full((2, 2), 2, np.float32)}
        call.inputs |= scales
        launch, made = call.stages["fwd"]
        call.stages["fwd"] = replace(launch, args=(*launch.args[:-2], 0, 0)), made
        call.assert_right((0, 40), ends, 80, k_scale=np.float32([k_scale]), v_scale=np.float32([2]))

"""compare.cu against NumPy: attention in float64, what an error measures, digests, mixes."""

from __future__ import annotations

import math
import subprocess
from contextlib import nullcontext
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnsweep.core.cases import Case
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import Problem
from attnsweep.verify import encoding, measures, rounded
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.compare import PART_OF, PARTS, ComparedOutput, judge_source
from attnsweep.verify.device_case import DeviceCase, Errors, WrongResult
from attnsweep.verify.expected import OPPOSITE, PLAIN, negated_heads
from attnsweep.verify.measures import TILT, Measures
from attnsweep.verify.sample import ALL, Sample

from .device import DTYPES, KERNEL, HostBuffer, sign_of, small, uploaded
from .harness import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

FP8 = ("e4m3", "e4m3_tensor", "e4m3_block")

# -- its parts ---------------------------------------------------------------------------------


def kernels_of(*defines):
    source = judge_source("bf16", 1)[0]
    command = [COMPILER, "-E", "-P", "-x", "c++", *(f"-D{define}" for define in defines), source]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return KERNEL.findall(found.stdout)


def test_each_kernel_is_in_the_part_in_which_it_is_looked_up():
    parts = {
        part: kernels_of(*(f"{name}={value}" for name, value in judge_source("bf16", part)[1].items()))
        for part in PARTS["backward"]
    }
    every = [(name, part) for part, names in parts.items() for name in names]
    assert sorted(name for name, _ in every) == sorted(kernels_of("DTYPE_BF16=1"))
    assert [part for _, part in every] == [PART_OF.get(name, 1) for name, _ in every]
    of_forward = {name for part in PARTS["forward"] for name in parts[part]}
    assert {"reference_64", "reference_128", "judge", "judge_rows"} <= of_forward
    assert not {name for name in of_forward if name.startswith("backward_")}


# -- the reference ----------------------------------------------------------------------------

SHAPES = (
    Problem(1, 1, 1, 1, 1, 8),  # one query, one key
    Problem(1, 1, 1, 1, 130, 72, "bf16"),
    Problem(2, 4, 2, 9, 17, 8, "fp16", causal=True),  # batches, grouped heads, seqlen_q != seqlen_k
    Problem(1, 2, 1, 65, 129, 64, "bf16", causal=True),
    Problem(1, 1, 1, 67, 140, 96, "fp32", causal=True),
    Problem(1, 3, 1, 5, 66, 130, "fp16", causal=True),  # columns in two parts
    Problem(2, 2, 2, 3, 64, 200, "bf16"),
    Problem(2, 4, 2, 70, 90, 192, "bf16", causal=True, head_dim_v=40),
    Problem(1, 2, 1, 5, 66, 24, "fp16", head_dim_v=136),  # columns in two parts
    Problem(1, 1, 1, 129, 129, 3, "fp16", causal=True),  # an odd head
    Problem(2, 4, 2, 9, 300, 16, "e4m3", causal=True),  # a scale of each head
    Problem(2, 2, 2, 5, 140, 64, "e4m3_tensor"),
    Problem(2, 4, 2, 5, 300, 48, "e4m3_block", causal=True),  # of each block of keys, the last short
    Problem(1, 2, 1, 3, 128, 144, "e4m3_block"),  # one block, and columns in two parts
)


def differences(device, case, seed, tilt=0.0):
    """Of the device's reference and NumPy's: of rows, and of the log-sum-exp."""
    problem, rows = case.problem, np.arange(case.problem.seqlen_q)
    inputs = verify_inputs.make_inputs(case, seed)
    shape = problem.shape_of("o")
    out = HostBuffer(8 * math.prod(shape))
    lse = HostBuffer(8 * math.prod(shape[:3]))
    buffers = {name: uploaded(bits) for name, bits in inputs.items()}
    device.judge(problem.dtype).reference(buffers, problem, out, lse, tilt)
    if tilt:  # NumPy's has no such argument
        k = encoding.from_bits(inputs["k"], problem.dtype).astype(np.float64) * (1 + tilt)
        inputs = inputs | {"k": encoding.to_bits(k, problem.dtype)}
    expected = rounded.reference(inputs, problem, rows)
    log_sums = rounded.log_sum_exp(inputs, problem, rows)
    off = np.abs(lse.of(np.float64).reshape(shape[:3]) - log_sums)
    return (
        measures.row_error(out.of(np.float64).reshape(shape), expected),
        float((off / np.maximum(1, np.abs(log_sums))).max()),
    )


@pytest.mark.nightly(push=5)
@pytest.mark.parametrize("problem", SHAPES, ids=lambda p: p.label)
def test_the_reference_is_attention(problem, device):
    row, lse = differences(device, Case(problem), 1)
    assert row <= 1e-12
    assert lse <= 1e-12


@pytest.mark.parametrize("dtype", [*DTYPES, *FP8])
def test_the_reference_is_attention_of_hard_inputs(dtype, device):
    for inputs in ("far_below", "far_above", "tiny_ends", "one_hot", "wide", "sink"):
        row, lse = differences(device, Case(Problem(1, 2, 1, 3, 150, 16, dtype), inputs), 2)
        assert row <= 1e-12, inputs
        assert lse <= 1e-12, inputs


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_the_reference_takes_each_scale_from_its_place(name, device):
    """Two of a tensor exchanged, and the reference differs."""
    problem = Problem(2, 4, 2, 5, 300, 16, "e4m3_block")
    inputs, rows = verify_inputs.make_inputs(Case(problem), 1), np.arange(5)
    shape = problem.shape_of("o")

    def reference(inputs):
        out, lse = HostBuffer(8 * math.prod(shape)), HostBuffer(8 * math.prod(shape[:3]))
        buffers = {name: uploaded(bits) for name, bits in inputs.items()}
        device.judge(problem.dtype).reference(buffers, problem, out, lse)
        return out.of(np.float64).reshape(shape).copy()

    exact = rounded.reference(inputs, problem, rows)
    turned = inputs | {name: np.roll(inputs[name], 1, axis=-1)}
    assert measures.row_error(reference(inputs), exact) <= 1e-12
    assert measures.row_error(reference(turned), rounded.reference(turned, problem, rows)) <= 1e-12
    assert measures.row_error(reference(turned), exact) > 0.1


def test_every_value_of_e4m3_is_read_exactly(device):
    """One key, whose value is then the output: all codes but NaN, times the scale."""
    problem = Problem(1, 1, 1, 1, 1, 256, "e4m3")
    codes = np.arange(256, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    inputs = verify_inputs.make_inputs(Case(problem), 1)
    inputs |= {"v": codes.reshape(1, 1, 1, 256), "v_scale": np.full((1, 1), 3.0, np.float32)}
    out, lse = HostBuffer(8 * 256), HostBuffer(8)
    buffers = {name: uploaded(bits) for name, bits in inputs.items()}
    device.judge("e4m3").reference(buffers, problem, out, lse)
    assert (out.of(np.float64) == 3.0 * encoding.from_bits(codes, "e4m3")).all()


def test_the_reference_at_another_scale_is_that_of_scaled_keys(device):
    # A power of two, so that scaled keys are exact: 1 + tilt is 2.
    row, lse = differences(device, Case(Problem(1, 1, 1, 5, 70, 16, "fp32")), 3, tilt=1.0)
    assert row <= 1e-12
    assert lse <= 1e-12


_SIDE = st.none() | st.integers(0, 150)


@small
@given(
    batch=st.integers(1, 2),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=st.integers(1, 70),
    more_keys=st.integers(0, 70),
    head_dim=st.integers(1, 40),
    of_v=st.none() | st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from([FULL, CAUSAL]) | st.builds(Interval, _SIDE, _SIDE),
)
def test_the_reference_is_attention_of_any_shape(
    device, batch, heads_kv, group, seqlen_q, more_keys, head_dim, of_v, dtype, mask
):
    seqlen_k = seqlen_q + more_keys
    shape = (batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim)
    row, lse = differences(device, Case(Problem(*shape, dtype, mask, head_dim_v=of_v)), 4)
    assert row <= 1e-12
    assert lse <= 1e-12


def test_threads_in_another_order_give_the_same_reference(simulator, device):
    case = Case(Problem(1, 2, 1, 66, 80, 24, "bf16", causal=True))
    results = []
    for schedule in (0, 1, 2):
        device.schedule = schedule
        fixture = DeviceCase(case, 1, device, device.judge("bf16"))
        results.append(fixture.sides[0]["o"].of(np.uint64).copy())
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


# -- a sample of the tiles ----------------------------------------------------------------------

SPARSE = Sample(every=3, phase=1)
WIDE = Problem(2, 2, 1, 400, 450, 24, "bf16", causal=True)  # tiles 0 to 6, of which 0, 1, 4, 6 are judged


def sampled(device):
    """A fixture of which a sample is judged, and its expected output in bf16."""
    whole = DeviceCase(Case(WIDE), 1, device, device.judge("bf16"))
    right = encoding.to_bits(whole.sides[0]["o"].of(np.float64), "bf16")
    fixture = DeviceCase(Case(WIDE), 1, device, device.judge("bf16"), sample=SPARSE)
    return fixture, right.reshape(WIDE.shape_of("o")), whole


def test_a_sample_has_both_ends_and_every_so_many_tiles(device):
    assert SPARSE.tiles(WIDE).tolist() == [0, 1, 4, 6]
    assert SPARSE.rows(WIDE) == 4 * (3 * 64 + 400 - 6 * 64)
    assert ALL.rows(WIDE) == 4 * 400
    rows = np.array([0, 63, 64, 127, 130, 300, 399])
    assert ALL.moved(rows, WIDE).tolist() == rows.tolist()
    assert SPARSE.moved(rows, WIDE).tolist() == [0, 63, 64, 127, 258, 300, 399]
    fixture, _, whole = sampled(device)
    expected = fixture.sides[0]["o"].of(np.float64).reshape(WIDE.shape_of("o"))
    right = whole.sides[0]["o"].of(np.float64).reshape(expected.shape)
    same = (expected == right).all(axis=(0, 1, 3))
    assert np.unique(np.arange(400)[same] // 64).tolist() == [0, 1, 4, 6]
    assert same.sum() == 3 * 64 + 400 - 6 * 64


FOUND_IN_A_SAMPLE = (
    *((row, 9.0, True) for row in (0, 70, 319, 399)),
    (128, 9.0, False),  # not in the sample: only what is no number shows
    (128, np.nan, True),
    (383, np.inf, True),
)


def test_what_a_sample_finds(device):
    fixture, right, _ = sampled(device)
    for row, value, refused in FOUND_IN_A_SAMPLE:
        output = right.copy()
        output[1, 1, row, 5] = encoding.to_bits(np.float32([value]), "bf16")[0]
        fixture.buffers["o"].upload(output)
        fixture.comparer.clear()
        fixture.compare(0)
        found = Errors(fixture.comparer.found(1), {})
        with pytest.raises(WrongResult) if refused else nullcontext():
            fixture.accuracy(found, 0)


def test_log_sum_exps_of_a_sample(device):
    judge = device.judge("bf16")
    expected = np.linspace(-1, 1, 1600)
    for row, off, worst in ((70, 0.5, 0.5), (128, 0.5, 0.0), (128, np.nan, 1e300)):
        written = expected.astype(np.float32)
        written[800 + row] += off
        judge.clear()
        judge.compare_lse(uploaded(written), uploaded(expected), WIDE, SPARSE, 3)
        assert judge.counts(4).view(np.float64)[3] == pytest.approx(worst, abs=1e-6)


# -- what an error measures ---------------------------------------------------------------------


def found_in(device, out, expected, dtype, tilted=None, opposite=None, mix=PLAIN, group=1):
    """Measures and NaN of an output (batch, heads, rows, head_dim), in storage form."""
    batch, heads, rows, head_dim = out.shape
    problem = Problem(batch, heads, heads // group, rows, rows, head_dim, dtype)
    judge = device.judge(dtype)
    judge.clear()
    norms = np.sqrt(np.einsum("...d,...d->...", expected, expected))
    floor = 1e-3 * float(np.sqrt(np.mean(norms**2)))
    written = uploaded(out)
    both = [uploaded(expected), *([] if opposite is None else [uploaded(opposite)])]
    mixes = None if opposite is None else uploaded(np.array([mix], np.uint64))
    slope = None if tilted is None else uploaded(tilted)
    judge.compare(ComparedOutput(written.pointer, problem, both, mixes, slope, floor, "o"), 7)
    found = judge.found(8)[7]
    count = batch * heads * rows
    measured = Measures(
        **{name: found[name] for name in ("row", "element", "row_gain", "tile_gain")},
        rms=math.sqrt(found["squares"] / count),
        gain=abs(found["gains"]) / count,
        scale=TILT * abs(found["tilt"]) / (found["tilt_norm"] or 1.0),
    )
    return measured, found


PLANTS = ("none", "element", "row", "tile", "all", "zeroed", "small_row")


@small
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 150), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    plant=st.sampled_from(PLANTS),
    tilts=st.booleans(),
    seed=st.integers(0, 99),
)
@example((1, 300, 1, 8), "bf16", "element", False, 0)  # more tiles than threads of summary
@example((1, 1, 129, 70), "fp16", "tile", True, 1)
@example((2, 2, 65, 33), "fp32", "row", True, 2)
@example((2, 3, 64, 16), "fp16", "small_row", True, 3)
def test_measures_are_those_of_numpy(device, shape, dtype, plant, tilts, seed):
    rng = np.random.default_rng(seed)
    expected = rng.standard_normal(shape)
    wrong = expected.copy()
    at = tuple(int(rng.integers(size)) for size in shape)
    tile = slice(at[2] // 64 * 64, at[2] // 64 * 64 + 64)
    if plant == "element":
        wrong[at] += 0.3
    elif plant == "row":
        wrong[at[:3]] *= 1.01
    elif plant == "tile":
        wrong[at[0], at[1], tile] *= 1.02
    elif plant == "all":
        wrong *= 1.0005
    elif plant == "zeroed":
        wrong[at[:2]] = 0
    elif plant == "small_row":
        expected[at[:3]] *= 1e-7
    tilted = expected + 1e-3 * rng.standard_normal(shape) if tilts else None
    out = encoding.to_bits(wrong.astype(np.float32), dtype)
    stored = encoding.from_bits(out, dtype).astype(np.float64)
    measured, found = found_in(device, out, expected, dtype, tilted)
    wanted = measures.measures(stored, expected, dtype, tilted)
    for field in fields(Measures):
        got, want = getattr(measured, field.name), getattr(wanted, field.name)
        assert got == pytest.approx(want, rel=1e-10, abs=1e-15), field.name
    assert found["nans"] == 0
    errors = np.sqrt(((stored - expected) ** 2).sum(-1)) / np.sqrt((expected**2).sum(-1))
    if plant == "row":
        assert found["row_at"] == errors.argmax()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_storage_is_read_exactly(dtype, device):
    """Each subnormal and each NaN; of fp32 a sample with both ends."""
    if dtype == "fp32":
        some = np.random.default_rng(0).integers(0, 2**32, 2**16 - 8, dtype=np.uint32)
        ends = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xFFFFFFFF]
        bits = np.concatenate([some, np.array(ends, np.uint32)])
    else:
        bits = np.arange(2**16, dtype=np.uint16)
    bits = bits.reshape(1, 1, 1024, 64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = encoding.from_bits(bits, dtype).astype(np.float64)
    _, found = found_in(device, bits, np.nan_to_num(values, posinf=0, neginf=0), dtype)
    assert found["nans"] == np.isnan(values).sum() > 0
    finite = np.where(np.isfinite(values), bits, 0).astype(bits.dtype)
    measured, found = found_in(device, finite, np.where(np.isfinite(values), values, 0), dtype)
    assert found["nans"] == 0
    assert (measured.row, measured.element, measured.rms) == (0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_is_over_every_limit(dtype, sign, device):
    expected = np.random.default_rng(0).standard_normal((1, 1, 70, 16))
    expected[0, 0, 66, 3] = 0.0  # infinity times zero is NaN
    out = encoding.to_bits(expected.astype(np.float32), dtype)
    out[0, 0, 66, 3] = encoding.INFINITY_BITS[dtype] | (sign_of(dtype) if sign < 0 else 0)
    measured, found = found_in(device, out, expected, dtype)
    assert (measured.row, measured.element) == (np.inf, np.inf)
    assert found["row_at"] == 66


def test_a_reference_that_is_nan_is_within_nothing(device):
    """Its differences are NaN, which no maximum shows."""
    expected = np.ones((1, 1, 70, 16))
    expected[0, 0, 66, 3] = np.nan
    out = encoding.to_bits(np.ones(expected.shape, np.float32), "bf16")
    _, found = found_in(device, out, expected, "bf16")
    assert found["nans"] == 1


def test_what_was_not_compared_is_nan(device):
    judge = device.judge("fp16")
    judge.clear()
    assert all(math.isnan(value) for value in judge.found(2)[1].values())


@small
@given(mix=st.sampled_from([PLAIN, OPPOSITE]) | st.integers(2, 2**64 - 1), heads_kv=st.integers(1, 5))
def test_each_head_is_compared_with_its_side(device, mix, heads_kv):
    group = 2
    rng = np.random.default_rng(0)
    sides = rng.standard_normal((2, 1, heads_kv * group, 3, 8))
    chosen = negated_heads(mix, heads_kv).repeat(group).astype(int)
    exact = np.stack([sides[side, 0, head] for head, side in enumerate(chosen)])[None]
    out = exact.astype(np.float32).view(np.uint32)
    plain, opposite = sides
    one, _ = found_in(device, out, plain, "fp32", opposite=opposite, mix=mix, group=group)
    assert one.row < 1e-6
    other, _ = found_in(device, out, opposite, "fp32", opposite=plain, mix=mix, group=group)
    assert other.row > 0.1


def test_mixes_are_even():
    counted = sum(negated_heads(mix, 64).sum() for mix in range(2, 1002)) / 64_000
    assert counted == pytest.approx(0.5, abs=0.01)


# -- the log-sum-exp ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 256, 700])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(("wrong", "worst"), [(0.5, 0.5), (np.nan, 1e300), (-np.inf, np.inf)])
def test_the_worst_log_sum_exp_counts(rows, place, wrong, worst, device):
    expected = np.linspace(-1, 1, rows)
    written = expected.astype(np.float32)
    written[place] = expected[place] + wrong
    judge = device.judge("fp16")
    judge.clear()
    problem = Problem(1, 1, 1, rows, rows, 8)
    judge.compare_lse(uploaded(written), uploaded(expected), problem, ALL, 3)
    assert judge.counts(4).view(np.float64)[3] == pytest.approx(worst, rel=1e-6)

"""How flash_fwd_fp8_wgmma brings P and V together, by what the PTX manual says of each instruction.

A model of common/tile/shared_tile.cuh and of the consumer's fragments in NumPy: which key and which
column each byte holds. The simulator runs the code itself.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.files import shipped
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, TensorMap
from attnsweep.verify.encoding import round_to

HEADER = (shipped("kernels") / "common/tile/shared_tile.cuh").read_text()
LANES = range(32)


def accumulator(lane: int, i: int) -> tuple[int, int]:
    """Row and column of register i of a warp's accumulator ("Accumulator D", m64nN)."""
    return lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def fragment(lane: int, register: int, byte: int) -> tuple[int, int]:
    """Row and column of a byte of A ("Matrix Fragments for wgmma.mma_async.m64nNk32")."""
    return lane // 4 + 8 * (register % 2), 4 * (lane % 4) + byte + 16 * (register // 2)


def packed(i: int) -> tuple[int, int]:
    """Register and byte of A that the consumer packs accumulator i of 32 keys into.

    Of eight exponentials e[0], e[1], e[4], e[5] become one register, the others the next.
    """
    eight, e = divmod(i, 8)
    return 2 * eight + e // 2 % 2, e % 2 + 2 * (e // 4)


def key_of(position: int) -> int:
    """The key that a byte of a row of transposed V has, as the header says it."""
    q, rest = divmod(position % 16, 4)
    return position // 16 * 16 + (2 * q, 2 * q + 1, 8 + 2 * q, 9 + 2 * q)[rest]


def permute(low: int, high: int, selector: int) -> list[int]:
    """prmt of two registers, each a list of four bytes, lowest first."""
    both = [*low, *high]
    return [both[selector >> 4 * i & 15] for i in range(4)]


def swizzle(row: int, width: int) -> int:
    return row * width // 128 % (width // 16)


def test_p_comes_in_the_order_of_the_keys_of_transposed_v():
    for lane in LANES:
        for i in range(16):
            row, key = accumulator(lane, i)
            of_a, position = fragment(lane, *packed(i))
            assert (of_a, key_of(position)) == (row, key)


def test_a_byte_of_a_has_one_accumulator():
    assert len({packed(i) for i in range(16)}) == 16
    assert sorted(map(key_of, range(64))) == list(range(64))


def transposed(v: np.ndarray, warp: int, piece: tuple[int, int], out: np.ndarray) -> list[int]:
    """A piece of 32 keys and 16 columns; returns where in `out` its 128 stored rows begin.

    v: (keys, columns); out: (columns, keys). Neither is swizzled here.
    """
    (even, odd) = (int(digits, 16) for digits in re.findall(r"0x(\d{4}) : 0x(\d{4})", HEADER)[0])
    keys, columns = 32 * piece[0], 16 * (warp + 4 * piece[1])
    pairs = v[keys : keys + 32, columns : columns + 16].reshape(4, 8, 8, 2)  # matrix, row, pair
    stored: dict[int, list[list[int]]] = {}
    for lane in LANES:
        # ldmatrix.trans: of each matrix, element lane / 4 of rows 2 (lane % 4) and the next.
        x = [[*pairs[m, lane % 4 * 2, lane // 4], *pairs[m, lane % 4 * 2 + 1, lane // 4]] for m in range(4)]
        first = even if lane < 16 else odd
        second = first ^ 0x1111
        stored[lane] = [permute(*x[:2], first), permute(*x[:2], second)]
        stored[lane] += [permute(*x[2:], first), permute(*x[2:], second)]
    begins = []
    for lane in LANES:  # stmatrix: this lane's address is that of row lane % 8 of matrix lane / 8
        row, matrix = lane % 8, lane // 8
        column = 2 * row + ((row >= 4) ^ matrix % 2)
        at = keys + matrix // 2 * 16
        values = [byte for q in range(4) for byte in stored[4 * row + q][matrix]]
        out[columns + column, at : at + 16] = values
        begins.append((columns + column, at))
    return begins


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_v_is_transposed_in_that_order(columns):
    keys = 96
    v = np.arange(keys * columns).reshape(keys, columns)
    out = np.full((columns, keys), -1)
    for warp in range(4):
        for piece in np.ndindex(keys // 32, columns // 64):
            transposed(v, warp, piece, out)
    assert (out == v.T[:, [key_of(position) for position in range(keys)]]).all()


@pytest.mark.parametrize("width", [64, 128])
def test_no_two_rows_that_move_together_lie_in_one_bank(width):
    """ldmatrix and stmatrix move eight rows of 16 bytes at once: as many as there are banks."""
    out = np.zeros((256, 96), int)
    for warp in range(4):
        for piece in np.ndindex(3, 4):
            begins = transposed(np.zeros((96, 256), int), warp, piece, out)
            for matrix in range(4):
                banks = set()
                for row, key in begins[8 * matrix : 8 * matrix + 8]:
                    chunk = key % width // 16 ^ swizzle(row, width)
                    banks.add((row * width + chunk * 16) % 128)
                assert len(banks) == 8
    for chunk in range(width // 16):
        read = {(row * width + (chunk ^ swizzle(row, width)) * 16) % 128 for row in range(8)}
        assert len(read) == 8


def test_products_of_permuted_operands_are_p_v():
    rng = np.random.default_rng(1)
    p, v = rng.integers(0, 9, (16, 32)), rng.integers(-9, 9, (32, 64))
    a = np.zeros((16, 32), int)
    for lane in LANES:
        for i in range(16):
            a[fragment(lane, *packed(i))] = p[accumulator(lane, i)]
    b = np.zeros((64, 32), int)
    for warp in range(4):
        transposed(v, warp, (0, 0), b)
    assert (a @ b.T == p @ v).all()


# -- what it works out on the host ---------------------------------------------------------

FAMILY = discover()["flash_fwd_fp8_wgmma"]
ARCH = ARCHS["sm_90a"]
LONG = Problem(4, 16, 8, 4096, 4096, 128, "e4m3")


def config(**values: int) -> Config:
    """The first values, but for these."""
    return Config({param.name: param.values[0] for param in FAMILY.params} | values)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (128, 128), (256, 128)])
def test_maps_count_pairs_of_bytes(head_dim, width):
    """A tensor map is of 16-bit numbers; a box is a panel of `width` bytes, swizzled over it."""
    problem = replace(LONG, head_dim=head_dim)
    launch = FAMILY.launches(config(BLOCK_N=96), problem, ARCH)["fwd"]
    q, k, v, o = (arg for arg in launch.args if isinstance(arg, TensorMap))
    assert (q.dims, q.strides) == ((head_dim // 2, 4096, 64), (head_dim, 4096 * head_dim))
    assert k.dims == v.dims == (head_dim // 2, 4096, 32)
    assert [made.box for made in (q, k, v)] == [(width // 2, 64, 1)] + 2 * [(width // 2, 96, 1)]
    assert {made.swizzle_bytes for made in (q, k, v)} == {width}
    assert (o.dims, o.strides[0], o.box) == ((head_dim, 4096, 64), 2 * head_dim, (64, 16, 1))


@pytest.mark.parametrize("dtype", ["e4m3", "e4m3_tensor", "e4m3_block"])
def test_a_tile_has_one_scale(dtype):
    problem = replace(LONG, dtype=dtype)
    refused = {n: FAMILY.refused_by(config(BLOCK_N=n), problem, ARCH) for n in (64, 96, 128)}
    per_block = dtype == "e4m3_block"
    assert refused == {64: None, 96: "one_scale" if per_block else None, 128: None}
    launch = FAMILY.launches(config(), problem, ARCH)["fwd"]
    assert launch.defines["SCALE_BLOCK"] == (128 if per_block else 0)
    assert {"q_scale", "k_scale", "v_scale"} < {arg for arg in launch.args if isinstance(arg, str)}


def test_a_producer_has_what_consumers_can_spare():
    def given(**values: int) -> tuple[int, int]:
        defines = FAMILY.launches(config(**values), LONG, ARCH)["fwd"].defines
        return defines["PRODUCER_REGISTERS"], defines["CONSUMER_REGISTERS"]

    assert given(BLOCK_N=128) == (56, 224)
    assert given(BLOCK_N=128, INTERVAL=128) == (40, 232)
    assert given(BLOCK_N=96, WARPGROUPS=3) == (56, 152)
    for values in ({"BLOCK_N": 128, "INTERVAL": 128}, {"BLOCK_N": 224}):
        producer, consumer = given(**values)
        assert producer + 2 * consumer <= 3 * 168  # of each thread at the launch


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"BLOCK_N": 128, "INTERVAL": 96}, "intervals"),
        ({"BLOCK_N": 128, "INTERVAL": 48}, "intervals"),
        ({"BLOCK_N": 128, "INTERVAL": 64}, "registers"),
        ({"BLOCK_N": 224, "V_STAGES": 1}, "producer_registers"),
        ({"BLOCK_N": 80}, "tiles"),
        ({"SUMS": 1, "LSE": 1}, "sums"),
        ({"HEADROOM": 6}, "small_weights"),
        ({"SUMS": 2, "HEADROOM": 2}, "sums_by_headroom"),
        ({"SUMS": 1, "INTERVAL": 64, "HEADROOM": 5}, "sums_by_headroom"),
        ({"MAXIMA": 2, "OVERLAP": 0}, "tried_tiles"),
        ({"NUM_STAGES": 2, "V_STAGES": 3}, "no_idle_tile"),
    ],
)
def test_a_config_is_refused_by_its_rule(values, rule):
    assert FAMILY.refused_by(config(**values), LONG, ARCH) == rule


@pytest.mark.parametrize(
    ("headroom", "least", "most"), [(0, 0, 0.003), (1, 0.001, 0.01), (2, 0.01, 0.04), (5, 0.12, 0.3)]
)
def test_sums_of_rounded_weights_need_little_headroom(headroom, least, most):
    """A row as those that an H200 showed: one key 11.2 nats above 16,384 that spread by 1.6."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        scores = rng.normal(0, 1.57, 16384)
        scores[-1] = 11.2
        weights = np.exp(scores - scores.max()) * 2.0 ** (8 - headroom)
        lost = 1 - round_to(weights.astype(np.float32), "e4m3").sum(dtype=float) / weights.sum()
        assert least <= abs(lost) <= most
    values = config(SUMS=2, HEADROOM=headroom)
    allowed = FAMILY.refused_by(values, LONG, ARCH) is None
    assert allowed == (most <= 0.01)


def test_sums_of_a_wide_head_are_of_a_part_of_a_tile():
    wide = replace(LONG, head_dim=256)
    for interval, rule in ((64, None), (32, None), (128, "intervals")):
        values = config(BLOCK_N=64, INTERVAL=interval)
        assert FAMILY.refused_by(values, wide, ARCH) == rule


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_other_dtypes_are_refused(dtype):
    assert FAMILY.refusal(replace(LONG, dtype=dtype), ARCH) == (
        f"dtype {dtype} is not one of e4m3, e4m3_tensor, e4m3_block"
    )

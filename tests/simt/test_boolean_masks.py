"""Masks that a call gives as a boolean tensor: any, also with holes and with queries without keys.

What a problem's own mask is plays no part: the kernel reads bits, which a scan makes of the tensor.
"""

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.masks import FULL
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs

from .harness import ARCH, COMPILER, POISON, _request, _run, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wgmma"]
CONFIGS = {
    "BLOCK_N=64 WARPGROUPS=2 MAXIMA=1 LSE=1": 64,
    "BLOCK_N=128 WARPGROUPS=2 PINGPONG=1 Q_REGISTERS=8 PERSISTENT=1 MAXIMA=2": 128,
    "BLOCK_N=96 WARPGROUPS=3 MAXIMA=1 EXP2_POLY=2": 64,
    "BLOCK_N=64 WARPGROUPS=2 P_SHARED=1 BLOCKS_PER_SM=2 MAXIMA=2": 64,
}
# Sizes, and whose own the masks are. 304 keys are read by 16 bytes, 421 are not.
SIZES = (
    ((2, 2, 1, 300, 304), ("item",)),
    ((1, 2, 2, 97, 421), ()),
    ((2, 2, 1, 130, 130), ("item", "head")),
    ((2, 2, 2, 100, 160), ("head",)),
)
KINDS = (
    *("all", "none", "causal", "padded right", "causal, padded left", "window", "later queries"),
    *("documents", "a corner", "a hole", "half", "few", "blocks"),
)
LIMIT = 6e-3  # of a row, in bf16: P is rounded, and V's rows differ in sign


def masks(kind, rng, count, rows, keys):
    """(count, rows, keys): True where a query sees a key."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    causal, length = i + keys - rows >= j, np.linspace(0.4 * keys, keys, count).astype(int)
    blocks = rng.random((count, -(-rows // 64), -(-keys // 64))) < 0.3
    made = {
        "all": causal | True,
        "none": causal & False,
        "causal": causal,
        "padded right": (j < length[:, None, None]) & (i >= 0),
        "causal, padded left": causal & (j >= keys - length[:, None, None]),
        "window": causal & (i + keys - rows - j < 40),
        "later queries": (i >= 64) & causal,
        "documents": i * 5 // rows == j * 5 // keys,
        "a corner": (i % 64 == 63) & (j == keys - 1) | (i == 70) & (j == 0),
        "a hole": causal & (j != 77),
        "half": rng.random((count, rows, keys)) < 0.5,
        "few": rng.random((count, rows, keys)) < 0.01,
        "blocks": np.kron(blocks, np.ones((64, 64), bool))[:, :rows, :keys],
    }
    return np.broadcast_to(made[kind], (count, rows, keys))


def expected(q, k, v, seen, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    p = np.where(seen, np.exp(q @ k.swapaxes(2, 3) * scale), 0)  # of normal values: no overflow
    return p @ v / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def served(simulator, config, case, inputs, schedule):
    problem = case.problem
    sizes = FAMILY.workspaces(config, problem)
    with simulator._lock:
        simulator._runs += 1
        place = simulator.root / f"boolean{simulator._runs}"
    place.mkdir()
    written = {"o": problem.bytes_of("o")} | sizes
    poison = {name: np.full(nbytes, POISON, np.uint8) for name, nbytes in written.items()}
    for name, array in {**inputs, **poison}.items():
        np.ascontiguousarray(array).tofile(place / name)
    kinds = dict.fromkeys(inputs, "input") | {"o": "output"} | dict.fromkeys(sizes, "workspace")
    for name, (launch, made) in simulator.build(FAMILY, config, case).items():
        request = place / f"{name}.request"
        request.write_text(_request(launch, kinds, place, schedule))
        _run((simulator._runner(False).result(), made.result()), request, 120)
    bits = np.fromfile(place / "o", np.uint16).reshape(problem.shape_of("o"))
    return from_bits(bits, problem.dtype).astype(np.float64)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("batch_to_keys", "own"), SIZES)
@pytest.mark.parametrize("words", CONFIGS)
def test_each_query_sees_what_the_mask_says(simulator, words, batch_to_keys, own):
    config = config_of(FAMILY, words)
    case = Case(Problem(*batch_to_keys, CONFIGS[words], "bf16", FULL.as_boolean(own)))
    problem, rng = case.problem, np.random.default_rng(3)
    assert FAMILY.refused_by(config, problem, ARCH) in (None, "turns_of_blocks")
    drawn = {name: make_inputs(case, 1)[name] for name in "qkv"}
    q, k, v = (from_bits(bits, "bf16").astype(np.float64) for bits in drawn.values())
    items, heads, rows, keys = problem.shape_of("mask")
    for number, kind in enumerate(KINDS):
        seen = masks(kind, rng, items * heads, rows, keys).reshape(items, heads, rows, keys)
        inputs = drawn | {"mask": seen.astype(np.uint8)}
        out = served(simulator, config, case, inputs, number % 2)
        want = expected(q, k, v, seen, problem.scale)
        norm, error = (np.linalg.norm(x, axis=-1) for x in (want, out - want))
        empty = ~np.broadcast_to(seen.any(-1), norm.shape)
        assert (error[empty] == 0).all(), kind
        assert (error[~empty] <= LIMIT * norm[~empty]).all(), kind

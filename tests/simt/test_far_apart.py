"""fp32 numbers far apart, beyond what fp16 holds, are right in families that split them in parts."""

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import to_bits

from .harness import COMPILER, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILIES = discover()
CONFIGS = {
    "flash_fwd_fp32_halves": "BLOCK_M=64 BLOCK_N=32 NUM_STAGES=2",
    "flash_fwd_fp32_mma": "BLOCK_M=64 BLOCK_N=32 NUM_STAGES=2",
}
KEYS, HIDDEN, COLUMN = 200, 199, 5  # the last query alone sees the last key


def times(**factors):
    def change(x):
        for name, factor in factors.items():
            x[name] *= np.float32(factor)

    return change


def put(name, place, value):
    return lambda x: x[name].__setitem__((0, 0, *place), np.float32(value))


def unseen(value):
    """v of a key which the last query alone sees, and gives no weight."""

    def change(x):
        x["k"][0, 0, HIDDEN] = -20 * x["q"][0, 0, -1]
        x["v"][0, 0, HIDDEN] = value

    return change


def column_times(**factors):
    def change(x):
        for name, factor in factors.items():
            x[name][..., COLUMN] *= np.float32(factor)

    return change


def small_weights(x):
    """32 keys, and one of another tile, have weights of 2^-30 and values of 2^25."""
    x["q"][:], x["k"][:] = 0, 0
    x["q"][..., 0] = np.sqrt(x["q"].shape[-1])
    for place in (7, slice(64, 96)):
        x["k"][0, 0, place, 0] = -30 * np.log(2)
        x["v"][0, 0, place] *= 2.0**25


def sparse(x):
    for values in x.values():
        values[..., 3::4] = 0
    x["v"][0, 0, 32:96] = 0


CHANGES = {
    "k of a hidden key is 1e12": put("k", (HIDDEN,), 1e12),
    "k of a hidden key is 1e30": put("k", (HIDDEN,), 1e30),
    "v of a key without weight is 1e12": unseen(1e12),
    "v of a key without weight is 1e30": unseen(1e30),
    "one of v is 1e6": put("v", (70, COLUMN), 1e6),
    "one of k is 1e6": put("k", (70, COLUMN), 1e6),
    "a column of k is 1e12, of q 1e-12": column_times(k=1e12, q=1e-12),
    "a column of q is 1e12, of k 1e-12": column_times(q=1e12, k=1e-12),
    "q is 1e35, k 1e-35": times(q=1e35, k=1e-35),
    "k is 1e35, q 1e-35": times(k=1e35, q=1e-35),
    "v is 1e-35": times(v=1e-35),
    "v is 1e36": times(v=1e36),
    "all are 1e-20": times(q=1e-20, k=1e-20, v=1e-20),
    "weights of 2^-30, values of 2^25": small_weights,
    "zeros": sparse,
    "all of q is 0": times(q=0),
    "all of k is 0": times(k=0),
}


@pytest.mark.nightly(push=8)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_far_apart_are_right(simulator, name, change):
    problem = Problem(1, 1, 1, 96, KEYS, 64, "fp32", causal=True)
    rng = np.random.default_rng(4)
    given = {of: rng.standard_normal(problem.shape_of(of), dtype=np.float32) for of in "qkv"}
    CHANGES[change](given)
    inputs = {of: to_bits(values, "fp32") for of, values in given.items()}
    config = config_of(FAMILIES[name], CONFIGS[name])
    result = simulator.check(FAMILIES[name], config, Case(problem), inputs=inputs)
    assert result.ok, str(result)
    assert result.error <= 5e-6, str(result)

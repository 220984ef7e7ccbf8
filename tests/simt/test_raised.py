"""References of FP8 weights that are raised above the maximum, so that few tiles are done twice.

Rows of equal scores, of one score far above the others that comes first, and of tiles that each
have larger scores than the ones before, side by side in each warp. The log-sum-exp is of weights
that are not rounded, so a reference that threads do not agree on, or that what was summed does not
follow, shows in it whatever rounding costs.
"""

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.verify import encoding
from attnsweep.verify import inputs as verify_inputs

from .harness import ARCH, COMPILER, sources
from .mutations import mutated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

KERNEL = discover()["flash_fwd_fp8_wgmma"]
BLOCK_N, TILES = 64, 6
CASE = Case(Problem(1, 1, 1, 64, BLOCK_N * TILES, 64, "e4m3_tensor"))
EQUAL, ONE_FIRST, GROWING = range(3)
TRIED = "return false; l[0] += sum[0], l[1] += sum[1]; return true;"


def config(headroom: int, **values: int) -> Config:
    own = {param.name: param.values[0] for param in KERNEL.params}
    own |= {"BLOCK_N": BLOCK_N, "WARPGROUPS": 2, "MAXIMA": 2, "HEADROOM": headroom, "LSE": 1}
    return Config(own | values)


def scores(kind: int) -> np.ndarray:
    """The scores of one row, in nats. Kernels begin at the right end."""
    keys = CASE.problem.seqlen_k
    tile = np.arange(keys)[::-1] // BLOCK_N
    if kind == EQUAL:
        return np.full(keys, 26.0)
    if kind == ONE_FIRST:
        return np.where(np.arange(keys) == keys - 3, 10.0, 0.0)
    # One thread's keys of each tile are larger than the others'.
    return tile * 2.5 + np.where(np.arange(keys) % 8 < 2, 1.5, 0.0)


def inputs(kinds: tuple[int, ...]):
    """Inputs whose rows are of these kinds, in turn: q of a row selects a channel of k."""
    problem = CASE.problem
    q, k = np.zeros(problem.shape_of("q")), np.zeros(problem.shape_of("k"))
    for row in range(problem.seqlen_q):
        q[0, 0, row, kinds[row % len(kinds)]] = 1 / problem.scale
    for kind in set(kinds):
        k[0, 0, :, kind] = scores(kind)
    v = np.random.default_rng(5).standard_normal(k.shape)
    made = verify_inputs.make_inputs(CASE, 1)
    for name, values in {"q": q, "k": k, "v": v}.items():
        made[name] = encoding.to_bits(values.astype(np.float32), "e4m3")
        made[f"{name}_scale"] = np.ones_like(made[f"{name}_scale"])
    return made


def run(simulator, config, kinds, bug=None):
    assert KERNEL.refused_by(config, Problem(16, 16, 16, 1024, 1024, 64, "e4m3"), ARCH) is None
    changed = {"fwd": mutated(sources(KERNEL), bug)} if bug else None
    given = inputs(kinds)
    return simulator.check(KERNEL, config, CASE, changed=changed, schedules=(0,), inputs=given)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("headroom", [0, 1, 2, 3, 5])
def test_rows_of_all_kinds_are_right(headroom, simulator):
    kinds = (EQUAL, ONE_FIRST, GROWING)
    result = run(simulator, config(headroom), kinds)
    assert result.ok, str(result)
    assert result.error < 0.03


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("kind", "again"), [(EQUAL, False), (ONE_FIRST, False), (GROWING, True)])
def test_only_rows_that_grow_are_done_again(kind, again, simulator):
    """What is summed is spoiled where a tile that was tried does not fit."""
    spoiled = {"find": TRIED, "put": f"l[0] = l[1] = 1e30f; {TRIED}"}
    assert run(simulator, config(2), (kind,), spoiled).ok == (not again)


BUGS = {
    "threads disagree": ("raise<N>(quad_max(part))", "raise<N>(part)"),
    "sums stay": ("l[r] *= by[r]; } return !first;", "} return !first;"),
    "output stays": ("to_fragments(p)); sums.scale<0, OUT_COLUMNS>(by);", "to_fragments(p));"),
    "by the maximum alone": (
        "by[r] = exp2_approx(from - reference); l[r] *=",
        "by[r] = exp2_approx(from - fmaxf(from, quad_max(largest[r]))); l[r] *=",
    ),
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("bug", BUGS)
def test_a_raise_that_is_not_followed_is_found(bug, simulator):
    find, put = BUGS[bug]
    kinds = (EQUAL, ONE_FIRST, GROWING)
    assert not run(simulator, config(2), kinds, {"find": find, "put": put}).ok

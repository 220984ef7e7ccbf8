"""What flash_fwd_wgmma works out on the host: how blocks that take turns share the work."""

from __future__ import annotations

import pytest

from attnsweep.arch import ARCHS
from attnsweep.kernel import Config, discover
from attnsweep.problem import Problem

FAMILY = discover()["flash_fwd_wgmma"]


def heads_together(problem: Problem, config: Config) -> int:
    """The argument of the launch."""
    launch = FAMILY.launches(config, problem, ARCHS["sm_90a"])["fwd"]
    return [value for value in launch.args if isinstance(value, int)][2]


def busiest(problem: Problem, config: Config, together: int) -> float:
    """Tiles of keys of the block that has most of them over the average, as Schedule deals them."""
    heads, block_m = problem.batch * problem.heads, 64 * int(config["WARPGROUPS"])
    tiles = -(-problem.seqlen_q // block_m)
    blocks = int(config["PERSISTENT"]) * int(config["BLOCKS_PER_SM"])
    load, seen = [0] * blocks, set()
    for item in range(tiles * heads):
        turn, block = divmod(item, blocks)
        section, within = divmod(item, together * tiles)
        count = min(together, heads - section * together)
        tile, head = tiles - 1 - within // count, section * together + within % count
        seen.add((tile, head))
        keys = min((tile + 1) * block_m, problem.seqlen_k)
        load[blocks - 1 - block if turn % 2 else block] += -(-keys // int(config["BLOCK_N"]))
    assert len(seen) == tiles * heads, "a tile is left out or done twice"
    return max(load) * blocks / sum(load)


@pytest.mark.parametrize(
    ("shape", "warpgroups", "blocks_per_sm"),
    [
        ((16, 16, 1024, 128), 2, 1),
        ((4, 16, 4096, 128), 2, 1),
        ((16, 32, 1024, 64), 2, 2),
        ((4, 32, 4096, 64), 2, 2),
        ((4, 16, 2048, 192), 2, 1),
    ],
)
def test_causal_turns_are_even(shape, warpgroups, blocks_per_sm):
    """With heads_together a divisor of the heads, as it was, 18 to 59 % too much here."""
    batch, heads, seqlen, head_dim = shape
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal=True)
    values = {param.name: param.values[0] for param in FAMILY.params} | {
        "WARPGROUPS": warpgroups,
        "BLOCKS_PER_SM": blocks_per_sm,
        "BLOCK_N": 64,
        "ORDER": 1,
        "PERSISTENT": 132,
    }
    config = Config(values)
    assert busiest(problem, config, heads_together(problem, config)) < 1.06


def test_full_tiles_take_as_many_heads_as_fit():
    problem = Problem(16, 16, 16, 1024, 1024, 128)
    values = {param.name: param.values[0] for param in FAMILY.params} | {
        "WARPGROUPS": 2,
        "PERSISTENT": 132,
    }
    assert heads_together(problem, Config(values)) == 64

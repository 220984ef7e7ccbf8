"""Helpers of Hopper declarations against plain counting."""

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from attnsweep.compile.cubin import residency
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.family.hopper import busiest_turns, even_turns, heads_sharing_l2, registers_at_entry, registers_of_roles

ARCH = arch_named("sm_90a")


@given(st.integers(1, 32), st.integers(1, 8))
def test_registers_at_entry_are_the_most_with_which_the_blocks_fit(warps, blocks):
    if warps * blocks > 64:
        return
    registers = registers_at_entry(ARCH, 32 * warps, blocks)
    roomy = replace(ARCH, max_threads_per_sm=1 << 20, max_blocks_per_sm=64)
    assert residency(roomy, registers, 32 * warps, 0)[0] >= blocks
    assert registers == 255 or residency(roomy, registers + 8, 32 * warps, 0)[0] < blocks
    assert registers == 255 or registers % 8 == 0


@given(st.integers(3, 31).map(lambda n: 8 * n), st.integers(1, 3), st.integers(24, 64))
def test_roles_share_the_registers_of_the_block_and_no_more(entry, warpgroups, producer):
    producer = min(producer, entry)
    whole = (warpgroups + 1) * entry
    fits = [n for n in range(0, 241, 8) if n * warpgroups + producer <= whole]
    assert registers_of_roles(entry, warpgroups, producer) == max(fits)
    assert registers_of_roles(entry, warpgroups, None) == entry


def busiest(heads, together, costs, blocks):
    """Work of the busiest block, dealt tile by tile: 0, 1, ..., 1, 0, 0, 1, ..."""
    load = [0] * blocks
    turns = itertools.cycle([*range(blocks), *reversed(range(blocks))])
    for first in range(0, heads, together):
        members = range(first, min(first + together, heads))
        for cost in costs:
            for _ in members:
                load[next(turns)] += cost
    return max(load)


def best_group(heads, fit, costs, blocks):
    """The largest of the groups, no smaller than half of what fits, with the least such work."""
    sizes = [n for n in range(1, fit + 1) if 2 * n >= fit]
    return min(sizes, key=lambda n: (busiest(heads, n, costs, blocks), -n))


@given(st.data())
def test_even_turns_are_the_best_of_all_dealt_out(data):
    heads = data.draw(st.integers(1, 24))
    fit = data.draw(st.integers(1, heads))
    costs = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    blocks = data.draw(st.integers(1, 12))
    alike = len(set(costs)) == 1
    expected = fit if alike else best_group(heads, fit, costs, blocks)
    assert even_turns(heads, fit, costs, blocks) == expected


@given(st.data())
def test_heads_that_share_l2_fit_it_and_are_dealt_longest_first(data):
    draw, some = data.draw, st.integers
    heads_kv, group = draw(some(1, 4)), draw(some(1, 4))
    seqlen_q = draw(some(1, 40))
    seqlen_k = seqlen_q + draw(some(0, 40))
    p = Problem(draw(some(1, 3)), heads_kv * group, heads_kv, seqlen_q, seqlen_k, 64, causal=draw(st.booleans()))
    block_m, block_n, blocks = draw(some(1, 16)), draw(some(1, 16)), draw(some(0, 6))
    l2_bytes = draw(some(1, 40 * 2 * 2 * 64 * 40))
    heads = p.batch * p.heads
    # K and V of 2 bytes an element; a group of heads shares them.
    both = 2 * 2 * p.seqlen_k * p.head_dim
    fits = [n for n in range(1, heads + 1) if n == 1 or n * both <= l2_bytes * group]
    found = heads_sharing_l2(p, block_m, block_n, blocks, l2_bytes)
    if not blocks:
        assert found == max(n for n in fits if heads % n == 0)
        return
    costs = []
    for first in reversed(range(0, p.seqlen_q, block_m)):
        last = min(first + block_m, p.seqlen_q) - 1
        seen = p.seqlen_k
        if p.causal:
            seen = sum(key <= last + p.seqlen_k - p.seqlen_q for key in range(p.seqlen_k))
        costs.append(2 * len(range(0, seen, block_n)) + 3)
    alike = len(set(costs)) == 1
    assert found == (max(fits) if alike else best_group(heads, max(fits), costs, blocks))


def test_a_huge_problem_costs_no_seconds():
    """Weighing groups of 4,096 heads of 2,048 tiles would; any group gives the right output."""
    p = Problem(64, 64, 64, 8192, 8192, 128, causal=True)
    assert heads_sharing_l2(p, 128, 128, 132, 32 << 20) == 8
    p = replace(p, batch=1, heads=256, heads_kv=256, seqlen_q=262144, seqlen_k=262144)
    assert heads_sharing_l2(p, 128, 128, 132, 32 << 20) == 1


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 30))
def test_the_busiest_block_is_the_one_of_blocks_that_take_turns(heads, together, costs, blocks):
    assert busiest_turns(heads, together, tuple(costs), blocks) == busiest(heads, together, costs, blocks)

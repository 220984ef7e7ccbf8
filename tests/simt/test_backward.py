"""Backward families on the CPU: every case, tails, grouped heads, seqlen_q != seqlen_k."""

from __future__ import annotations

import math
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest

from attnsweep.compile.launches import LaunchPlan
from attnsweep.core import cases
from attnsweep.core.cases import Case, small_cases
from attnsweep.core.layouts import DENSE
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import BACKWARD, Padded, Problem
from attnsweep.family.discover import discover
from attnsweep.serve.runtime.families import WGMMA_BACKWARD
from attnsweep.verify import measures
from attnsweep.verify.backward import gradients, make_inputs
from attnsweep.verify.device_case import WrongResult
from attnsweep.verify.encoding import from_bits, to_bits
from attnsweep.verify.expected import PLAIN

from .device import Device, HostBuffer, uploaded
from .harness import ARCH, COMPILER, BuildError, SimtError, config_of, sources
from .proving import Bench, Call, differentiate, inputs_in
from .test_rows import drawn_rows
from .test_window import WINDOWS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_bwd_wgmma"]
APART = "KV_WARPGROUPS=1 DKV_WARPGROUPS=2"
# Config, head_dim, and what else a problem of it has.
CONFIGS = (
    ("RECOMPUTE=0 PDL=1", 128, "bf16", FULL),
    ("RECOMPUTE=0 AHEAD=3 STATISTICS=1", 128, "fp16", CAUSAL),
    ("RECOMPUTE=0 BLOCK_M=128 AHEAD=3", 64, "bf16", CAUSAL),
    ("RECOMPUTE=0 AHEAD=1 STATISTICS=2", 64, "fp16", FULL),
    ("RECOMPUTE=0 AHEAD=2 STATISTICS=1", 96, "bf16", CAUSAL),
    ("RECOMPUTE=0 KV_WARPGROUPS=1 BLOCKS_PER_SM=2", 64, "bf16", CAUSAL),
    ("RECOMPUTE=1 KV_WARPGROUPS=1 BLOCKS_PER_SM=2 AHEAD=2", 128, "bf16", CAUSAL),
    ("RECOMPUTE=1 AHEAD=3 Q_BLOCK_N=96 PDL=1", 128, "fp16", FULL),
    ("RECOMPUTE=1 BLOCK_M=128 AHEAD=1 Q_BLOCK_N=64", 64, "bf16", CAUSAL),
    ("RECOMPUTE=0 AHEAD=1 PDL=1", 96, "bf16", CAUSAL),
    ("RECOMPUTE=0", 120, "fp16", FULL),
    ("RECOMPUTE=0 BLOCK_M=128 STATISTICS=2", 40, "fp16", CAUSAL),
    ("RECOMPUTE=1 AHEAD=2 STATISTICS=2", 72, "bf16", FULL),
    ("RECOMPUTE=1 Q_BLOCK_N=80", 160, "bf16", FULL),
    (f"RECOMPUTE=0 {APART} AHEAD=1", 192, "bf16", CAUSAL),
    (f"RECOMPUTE=0 {APART} DQ_ADD=1 PDL=1", 256, "bf16", CAUSAL),
    (f"RECOMPUTE=1 {APART} Q_STAGES=1 Q_BLOCK_N=64 AHEAD=1 STATISTICS=2", 256, "fp16", CAUSAL),
    (f"RECOMPUTE=1 {APART} Q_BLOCK_N=80 NUM_STAGES=3 CLUSTER=2", 184, "bf16", FULL),
    (f"RECOMPUTE=0 {APART} DQ_ADD=1 CLUSTER=2 AHEAD=1", 232, "bf16", CAUSAL),
)
# Tiles and half tiles that a block passes by, tails on both sides, queries that see no key, three
# heads to one of keys.
SHAPES = (
    (2, 6, 2, 200, 330),
    (1, 2, 2, 300, 130),
    (1, 3, 1, 129, 65),
    (1, 1, 1, 64, 192),
    (1, 2, 1, 1, 127),
    (1, 1, 1, 63, 1),
)


def config_for(words, problem):
    config = config_of(FAMILY, words)
    assert FAMILY.refused_by(config, problem, ARCH) is None
    return config


@pytest.mark.nightly(push=1, of="right gradients of all kinds")
@pytest.mark.parametrize(("words", "head_dim", "dtype", "mask"), CONFIGS)
def test_right_on_every_case(simulator, words, head_dim, dtype, mask):
    problem = Problem(1, 4, 2, 2048, 2048, head_dim, dtype, mask, op=BACKWARD)
    config = config_for(words, problem)
    shapes = [Case(Problem(*sizes, head_dim, dtype, mask, op=BACKWARD)) for sizes in SHAPES]
    for number, case in enumerate((*small_cases(problem), *shapes)):
        both = (0, 1, 2) if number % 3 == 2 else (number % 3,)
        result = simulator.check(FAMILY, config, case, schedules=both)
        assert result.ok, (config.label, case.label, str(result))


# Configs of both stages, and head_dims, that windows and padding are tried with.
OF_MASKS = (
    ("RECOMPUTE=0 PDL=1", 64),
    ("RECOMPUTE=0 BLOCK_M=128", 40),
    ("RECOMPUTE=1 AHEAD=1 Q_BLOCK_N=96", 64),
    ("RECOMPUTE=1 KV_WARPGROUPS=1 BLOCKS_PER_SM=2 AHEAD=2 Q_BLOCK_N=64", 128),
    (f"RECOMPUTE=0 {APART} DQ_ADD=1 CLUSTER=2 AHEAD=1", 136),
    (f"RECOMPUTE=1 {APART} Q_STAGES=1 Q_BLOCK_N=64", 200),
)


@pytest.mark.nightly(push=1, of="right gradients of all kinds")
@pytest.mark.parametrize(("words", "head_dim"), OF_MASKS)
def test_right_on_windows_of_every_kind(simulator, words, head_dim):
    """Also where blocks of queries see no key, and no query sees a block of keys."""
    shapes = ((1, 4, 2, 200, 330), (1, 2, 2, 300, 130), (1, 1, 1, 450, 450), (1, 2, 1, 64, 192))
    for number, sides in enumerate((*WINDOWS, (0, 90))):
        for sizes in shapes[number % 2 :: 2]:
            dtype = ("bf16", "fp16")[number // 2 % 2]
            of = Problem(*sizes, head_dim, dtype, Interval(*sides), op=BACKWARD)
            config = config_for(words, of)
            result = simulator.check(FAMILY, config, Case(of), schedules=(number % 3,))
            assert result.ok, (config.label, of.label, str(result))
    of = Problem(1, 4, 2, 2048, 2048, head_dim, "bf16", Interval(256, 0), op=BACKWARD)
    for case in small_cases(of)[1::2]:
        result = simulator.check(FAMILY, config_for(words, of), case)
        assert result.ok, (words, case.label, str(result))


@pytest.mark.nightly(push=1, of="right gradients of all kinds")
@pytest.mark.parametrize(("words", "head_dim"), OF_MASKS)
def test_right_on_padding_on_either_side(simulator, words, head_dim):
    """Also where an item has no key, and where padding leaves some queries none."""
    shapes = ((4, 4, 2, 200, 330), (5, 2, 2, 300, 130), (4, 1, 1, 450, 450), (3, 2, 1, 64, 192))
    masks = (FULL, CAUSAL, Interval(100, 0), Interval(60, 30))
    for number, (mask, side, least) in enumerate(product(masks, ("right", "left"), (0, 40))):
        own = head_dim, ("bf16", "fp16")[number % 2], mask, Padded(side, least, number)
        of = Problem(*shapes[number % 3], *own, op=BACKWARD)
        result = simulator.check(FAMILY, config_for(words, of), Case(of), schedules=(number % 3,))
        assert result.ok, (words, of.label, str(result))
    padded = Padded("right", 40)
    of = Problem(1, 4, 2, 2048, 2048, head_dim, "bf16", CAUSAL, padded, op=BACKWARD)
    for case in small_cases(of):
        result = simulator.check(FAMILY, config_for(words, of), case, schedules=(0,))
        assert result.ok, (words, case.label, str(result))


def test_each_query_head_counts_in_the_gradients_of_its_key_head(simulator):
    """Where blocks take heads in groups, of which the last is smaller."""
    problem = Problem(3, 2, 1, 100, 4000, 64, "bf16", op=BACKWARD)
    config = config_for("RECOMPUTE=1", problem)
    few = FAMILY.launches(config, problem, ARCH)["keys"].args
    assert few[-3] == 3  # all heads together: none is left for another group
    grouped = Problem(5, 2, 1, 100, 130, 64, "bf16", CAUSAL, op=BACKWARD)
    stage = FAMILY.stages["keys"]
    given = stage.launch.__globals__["together"]
    stage.launch.__globals__["together"] = lambda *_: 2
    try:
        assert FAMILY.launches(config, grouped, ARCH)["keys"].args[-3] == 2
        result = simulator.check(FAMILY, config, Case(grouped))
    finally:
        stage.launch.__globals__["together"] = given
    assert result.ok, str(result)


@contextmanager
def waves(heads, with_delta):
    """Blocks of so many heads of keys run at once, as those of long sequences do.

    with_delta: they also make delta of the next wave, for which short ones have no time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for kernel in (FAMILY, WGMMA_BACKWARD.kernel):  # a package launches by a declaration of its own
            declared = kernel.stages["keys"].launch.__globals__
            patch.setitem(declared, "together", lambda *_: heads)
            patch.setitem(declared, "lead", lambda c, p, sms: heads if with_delta else p.batch * p.heads_kv)
        yield


# Config, head_dim, dtype, sizes, mask and layout; heads of a wave, and whether blocks make delta.
OF_WAVES = (
    ("PDL=1 DQ_RING=2", 128, "bf16", (5, 2, 2, 200, 330), FULL, DENSE, 2, True),
    ("DQ_RING=4", 128, "fp16", (9, 4, 2, 200, 330), CAUSAL, DENSE, 2, True),
    ("DQ_RING=3 BLOCK_M=128", 64, "bf16", (7, 1, 1, 300, 300), CAUSAL, DENSE, 1, False),
    ("DQ_RING=3 AHEAD=2 STATISTICS=2", 72, "fp16", (4, 2, 2, 300, 130), Interval(100, 0), DENSE, 1, False),
    ("DQ_RING=3", 40, "bf16", (6, 2, 1, 130, 450), CAUSAL, Padded("right", 40), 1, False),
    ("DQ_RING=2", 120, "fp16", (3, 3, 1, 257, 330), FULL, DENSE, 1, True),
    (f"{APART} DQ_ADD=1 DQ_RING=3 CLUSTER=2", 136, "bf16", (5, 2, 1, 130, 450), FULL, DENSE, 1, True),
)


@pytest.mark.nightly(push=1, of="right gradients of all kinds")
@pytest.mark.parametrize("case", OF_WAVES, ids=lambda case: f"{case[0]} {case[1]}")
def test_right_where_blocks_convert_heads_of_waves_before(simulator, case):
    words, head_dim, dtype, sizes, mask, layout, heads, with_delta = case
    of = Problem(*sizes, head_dim, dtype, mask, layout, op=BACKWARD)
    with waves(heads, with_delta):
        config = config_for(f"RECOMPUTE=0 {words}", of)
        result = simulator.check(FAMILY, config, Case(of))
    assert result.ok, (config.label, of.label, str(result))


# What is wrong with a block's work for other heads.
WRONG_WAVES = {
    "sums that are not cleared": ("keys", "of + call.ring < heads_kv", "false"),
    "a head converted before all of it is added": ("keys", "flag_wait(call.count(of, Call::ADDED), gridDim",
        "if (false) flag_wait(call.count(of, Call::ADDED), gridDim"),
    "counted before it is added": ("keys", "    bulk_wait_all();\n#if DQ_RING", "#if DQ_RING"),
    "dQ without its scale": ("keys", "pack(b.x * scale", "pack(b.x"),
    "a panel overwritten before it is stored": ("keys",
        "if (lane == 0) tma_store_wait_read<0>();\n                __syncwarp();", ""),
    "delta of other rows": ("keys", "put(query, first + 32, sum_32)", "put(query, first + 32, sum)"),
}  # fmt: skip


# The stage, what stands there, what stands there instead, and how often if that is not once.
WRONG = {
    "sums that are not cleared": ("delta", "if (has_columns) sums", "if (false) sums"),
    "keys past the last have weight": ("keys", "NEVER = 1 << 30", "NEVER = 0"),
    "no scale of dK": ("keys", "(dk, scale,", "(dk, 1.f,"),
    "dQ of half of the keys": ("keys", "i < BLOCK_N / 16", "i < BLOCK_N / 32"),
    "queries released before dK has read them": ("keys", "begin_sum(dk, ds, q, j);",
        "release(j); begin_sum(dk, ds, q, j);", 2),
    "dS overwritten before dQ has read it": ("keys", "ds_empty(at.stage), at.phase ^ 1", "ds_empty(0), 1"),
    "dQ's staging overwritten before it is added": ("keys", "added(part), (j & 1) ^ 1", "added(part), 1"),
    "dK written over K before dQ has read it": ("keys", "if (DQ) named_barrier_sync(K_READ_BARRIER",
        "if (false) named_barrier_sync(9"),
}  # fmt: skip


# The same where queries see keys up to their own.
WRONG_CAUSAL = {
    "a tile is passed by too early": ("keys", "row + BLOCK_M <= seen", "row + 1 <= seen"),
    "a tile is masked too late": ("keys", "last = own + 63;", "last = own;"),
    "a query sees a key too many": ("queries", "query + end) :", "query + end + 1) :"),
    "V given back before it is read": ("queries", "wgmma_wait<1>();\n            warpgroup_fence_operand(s);",
        "wgmma_wait<1>(); arrive(at.v_empty(now.stage)); warpgroup_fence_operand(s);"),
}  # fmt: skip


# The same where statistics are in the sums from the first.
WRONG_FIRST = {
    "delta added to dP": ("keys", "Memory::DELTA, at.stage, -1.f", "Memory::DELTA, at.stage, 1.f"),
    "S begins with a log-sum-exp of base 2": ("queries", "LSE_FIRST ? 1.f / scale : LOG2E", "LOG2E / scale"),
}  # fmt: skip
# The same where tiles that are seen whole have a loop of their own.
WRONG_LOOPS = {
    "a tile that is seen in part taken as whole": ("keys", "own + 63 + call.diagonal", "own + call.diagonal"),
    "dV of the next tile's P": ("keys", "if constexpr (AHEAD == 3) begin_sum(dv, p, o, j);",
        "if constexpr (AHEAD == 3) begin_sum(dv, p, o, j + 1);"),
}  # fmt: skip
WRONG_LAST_KEYS = {
    "keys past the last in the loop without a mask": ("keys", "own + 64 > call.seqlen_k ? end",
        "own > call.seqlen_k ? end"),
}  # fmt: skip


# The same where queries see a window, of which blocks and warpgroups pass by tiles on both sides.
WRONG_WINDOWS = {
    "a tile is not masked where its last queries are too late": ("keys", "row + BLOCK_M > own + 1 + call.reach",
        "row > own + 1 + call.reach"),
    "a warpgroup ends with its first key": ("keys", "min(own + 64, call.seqlen_k) + call.reach",
        "own + 1 + call.reach"),
    "a warpgroup leaves tiles that only others see": ("keys", "for (; row < end; row += BLOCK_M, ++j) pass(j);", ""),
    "a query sees a key too early": ("queries", "< row + low)", "< row + low - 1)"),
    "a warpgroup ends with the first key of its last query": ("queries", "max(PADDED ? first_key : 0, own + low)",
        "max(0, own + 63 + low)"),
    "a warpgroup of queries begins a tile late": ("queries", "seen - before)", "seen - before - 1)"),
}  # fmt: skip


# The same where items of the batch have fewer keys than the tensors: padding is on the right.
WRONG_LENGTHS = {
    "keys of the first item": ("keys", "work.head / heads_of_item,", "0,"),
    "a key too many in dK": ("keys", "min(seqlen_k, end)", "min(seqlen_k, end + 1)"),
    "the last tile of keys is left out of dQ": ("queries", "+ BLOCK_N - 1) / BLOCK_N;", ") / BLOCK_N;", 2),
    "the gradients of padding are not written": ("keys", "<= first_key) end = 0;", "<= first_key) return;"),
    "a block with some keys of the item computes nothing": ("keys", "work.tile * CLUSTER_N >= seqlen_k",
        "(work.tile + 1) * CLUSTER_N >= seqlen_k"),
    "a tile with padding is not masked": ("keys", "last = last_key;", "last = own + 63;"),
}  # fmt: skip
# The same with padding on the left, which leaves some queries no key.
WRONG_FIRST_KEYS = {
    "a key too many in dK": ("keys", "max(0, first)", "max(0, first - 1)"),
    "padding is seen": ("queries", "if (PADDED && of_i < first_key)", "if (false)"),
    "queries without a key wait for some": ("queries", "if (PADDED) unseen =", "if (false) unseen ="),
    "a warpgroup with some keys of the item passes them by": ("keys", "own + 64 <= call.first_key",
        "own <= call.first_key"),
}  # fmt: skip


# The same where one warpgroup has dV of its keys, and another dK; of 256 columns.
WRONG_APART = {
    "P overwritten before the other has read it": ("keys", "p_empty(at.stage), at.phase ^ 1", "p_empty(0), 1"),
    "dO given back before dV has read it": ("keys", "if constexpr (Second) take_p(x, a, j);",
        "if (lane == 0 && !Second) mbarrier_arrive(Memory::o_empty(i)); if constexpr (Second) take_p(x, a, j);"),
    "dV written over V before dP has read it": ("keys", "named_barrier_sync(K_READ_BARRIER, 128 * (CONSUMERS + DQ));",
        ""),
    "dQ added to another head's": ("keys", "call.at(j / call.tiles,", "call.at(0,"),
}  # fmt: skip
# Where two blocks with neighbouring keys load half of the queries each.
WRONG_CLUSTERS = {
    "both load the same half": ("keys", "p * 64, row, head, rank);", "p * 64, row, head, 0);", 2),
    "queries given back to one block alone": ("keys", "cluster_address(empty, lane % CLUSTER)", "empty"),
    "each begins at its own keys": ("keys", "max(0, work.tile * CLUSTER_N + diagonal)", "max(0, key + diagonal)"),
    "a block ends before the other has told it": ("keys",
        "if (CLUSTER > 1) __syncwarp(), cluster_arrive(), cluster_wait();", ""),
}  # fmt: skip
# The same where queries see a window.
WRONG_WINDOWS_OF_CLUSTERS = {
    "each ends at its own keys": ("keys", "min((work.tile + 1) * CLUSTER_N, seqlen_k)", "min(key + BLOCK_N, seqlen_k)")
}
WRONG_TURNS = {
    "V where K is": ("queries", "TURNS ? 2 * j + 1 : j", "TURNS ? 2 * j : j"),
    "K and V in stages of their own": ("queries", "if (TURNS) ring.next();", ""),
    "K given back before dQ has read it": ("queries", "arrive(at.v_empty(now_v.stage));\n#pragma",
        "arrive(at.v_empty(now_v.stage)), arrive(at.k_empty(now.stage));\n#pragma"),
}  # fmt: skip


def problem_of(*sizes, head_dim, dtype="bf16", mask=FULL, layout=DENSE):
    return Problem(*sizes, head_dim, dtype, mask, layout, op=BACKWARD)


# What is changed, the config that is right without, and a case that shows it. Where log-sum-exps
# are far below 0, what is not hidden becomes infinite.
PLANTED = [
    pytest.param(wrong, words, case, id=name)
    for table, words, case in (
        (WRONG, "RECOMPUTE=0", Case(problem_of(1, 2, 1, 350, 200, head_dim=64), "far_below")),
        (WRONG_CAUSAL, "RECOMPUTE=1", Case(problem_of(1, 4, 2, 350, 410, head_dim=64, mask=CAUSAL))),
        (WRONG_FIRST, "RECOMPUTE=1 AHEAD=2 STATISTICS=2", Case(problem_of(1, 2, 1, 350, 200, head_dim=64))),
        (WRONG_LOOPS, "RECOMPUTE=0 AHEAD=3", Case(problem_of(1, 2, 1, 350, 200, head_dim=64, mask=CAUSAL))),
        (WRONG_LAST_KEYS, "RECOMPUTE=0 AHEAD=3", Case(problem_of(1, 2, 1, 350, 200, head_dim=64), "far_below")),
        (WRONG_WINDOWS, "RECOMPUTE=1 Q_BLOCK_N=64",
         Case(problem_of(1, 4, 2, 350, 410, head_dim=64, mask=Interval(100, 30)))),
        *((table, "RECOMPUTE=1 Q_BLOCK_N=64",
            Case(problem_of(3, 4, 2, 300, 330, head_dim=64, mask=CAUSAL, layout=layout), inputs))
            for table, layout, inputs in (
                (WRONG_LENGTHS, Padded("right", 30), "normal"),
                # K and V of padding are cleared, so that only a P that overflows shows it.
                (WRONG_FIRST_KEYS, Padded("left", 30), "far_below"))),
        (WRONG_APART, f"RECOMPUTE=0 {APART} DQ_ADD=1", Case(problem_of(1, 2, 1, 350, 70, head_dim=256))),
        (WRONG_CLUSTERS, f"RECOMPUTE=0 {APART} DQ_ADD=1 CLUSTER=2",
         Case(problem_of(1, 2, 2, 350, 330, head_dim=136, mask=CAUSAL))),
        (WRONG_WINDOWS_OF_CLUSTERS, f"RECOMPUTE=0 {APART} DQ_ADD=1 CLUSTER=2",
         Case(problem_of(1, 2, 2, 350, 330, head_dim=136, mask=Interval(50, 0)))),
        (WRONG_TURNS, f"RECOMPUTE=1 {APART} Q_STAGES=1 Q_BLOCK_N=64",
         Case(problem_of(1, 2, 1, 150, 350, head_dim=256, dtype="fp16", mask=CAUSAL))),
    )
    for name, wrong in table.items()
]  # fmt: skip


@pytest.mark.nightly(push=1, of="wrong gradients")
@pytest.mark.parametrize("wrong", WRONG_WAVES.values(), ids=WRONG_WAVES)
def test_wrong_work_for_other_heads_is_found(simulator, wrong):
    case = Case(problem_of(5, 2, 1, 350, 200, head_dim=128))
    with waves(1, with_delta=True):
        planted(simulator, wrong, "RECOMPUTE=0 DQ_RING=2", case)


@pytest.mark.nightly(push=1, of="wrong gradients")
@pytest.mark.parametrize(("wrong", "words", "case"), PLANTED)
def test_wrong_kernels_are_found(simulator, wrong, words, case):
    planted(simulator, wrong, words, case)


def planted(simulator, wrong, words, case):
    """A change of a right kernel, which must be found."""
    stage, before, after, times = (*wrong, 1)[:4]
    texts = dict(sources(FAMILY))
    found = [n for n, text in texts.items() if before in text and n.startswith("flash_bwd_")]
    (file,) = [name for name in found if stage in name] or found
    assert texts[file].count(before) == times
    texts[file] = texts[file].replace(before, after)
    config = config_for(words, case.problem)
    assert simulator.check(FAMILY, config, case).ok
    try:
        result = simulator.check(FAMILY, config, case, changed={stage: texts})
    except BuildError:
        raise
    except SimtError:  # a race, say, which says so
        return
    assert not result.ok


# In both ways to compute dQ, and both layouts of the sums of wide heads.
KINDS = ("RECOMPUTE=0", "RECOMPUTE=1 Q_BLOCK_N=64")


@pytest.mark.nightly(push=1, of="right gradients of all kinds")
@pytest.mark.parametrize("dim", FAMILY.head_dims)
def test_right_for_every_head_dim(simulator, dim):
    number = dim // 8
    for words in KINDS:
        if dim > 128:
            words += f" {APART} AHEAD={number % 2} CLUSTER={1 + number // 2 % 2}"
            words += " DQ_ADD=1" * (words.startswith(KINDS[0]) and (dim > 192 or number % 3 == 0))
            words += " Q_STAGES=1" * (words.startswith(KINDS[1]) and dim > 192)
        padded = Padded(("right", "left")[number // 2 % 2], 30)
        for turn, (sizes, mask, layout) in enumerate(
            zip(
                (*SHAPES[number % 2 :: 2], SHAPES[number % 2], SHAPES[0]),
                (CAUSAL, FULL, CAUSAL, Interval(70, 20), (CAUSAL, FULL)[number % 2]),
                (*[DENSE] * 4, padded),
                strict=True,
            )
        ):
            dtype = ("bf16", "fp16")[(number + turn) % 2]
            case = Case(Problem(*sizes, dim, dtype, mask, layout, op=BACKWARD))
            config = config_of(FAMILY, words)
            assert FAMILY.refused_by(config, case.problem, ARCH) in (None, "no_idle_tile")
            result = simulator.check(FAMILY, config, case, schedules=(turn % 3,))
            assert result.ok, (words, case.label, str(result))


REFERENCES = (
    Problem(2, 4, 2, 70, 130, 64, "bf16", CAUSAL, op=BACKWARD),
    Problem(1, 2, 2, 200, 70, 128, "fp16", CAUSAL, op=BACKWARD),  # queries that see no key
    Problem(1, 3, 1, 130, 70, 24, "fp16", Interval(20, 3), op=BACKWARD),
    Problem(1, 2, 1, 1, 65, 130, "bf16", FULL, op=BACKWARD),  # columns in three parts
    Problem(3, 4, 2, 70, 150, 64, "bf16", CAUSAL, Padded("left", 0), op=BACKWARD),
    Problem(3, 2, 1, 130, 150, 24, "fp16", Interval(20, 3), Padded("right", 10), op=BACKWARD),
)


@pytest.mark.nightly(push=1, of="gradients of the device")
@pytest.mark.parametrize("problem", REFERENCES, ids=lambda p: p.label)
def test_the_device_has_the_gradients_that_numpy_has(problem, device):
    for kind in ("normal", "far_below"):
        inputs = make_inputs(Case(problem, kind), 1)
        outs = {name: HostBuffer(8 * math.prod(problem.shape_of(name))) for name in problem.outputs}
        buffers = {name: uploaded(bits) for name, bits in inputs.items()}
        device.judge(problem.dtype).gradients(buffers, problem, outs)
        every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
        (expected,) = gradients(inputs, problem, *every)
        for name, exact in expected.items():
            found = outs[name].of(np.float64).reshape(exact.shape)
            assert measures.row_error(found, exact) <= 1e-11, (kind, name)


@pytest.mark.nightly(push=1, of="gradients of the device")
@pytest.mark.parametrize("problem", REFERENCES, ids=lambda p: p.label)
def test_rows_of_gradients_are_those_of_the_inputs_as_they_are(problem, device):
    """A wrong element of each output is found once its row is drawn, and no other row is wrong."""
    inputs = make_inputs(Case(problem), 1)
    every = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    (exact,) = gradients(inputs, problem, *every)
    bits = {name: to_bits(rows.astype(np.float32), problem.dtype) for name, rows in exact.items()}
    floor = dict.fromkeys(exact, 1e-3)
    judge = device.judge(problem.dtype)
    for changed in (False, True):
        if changed:
            for name in bits:
                bits[name].reshape(-1, problem.head_dim)[-1, 3] ^= 0x8000
        at = {name: uploaded(each) for name, each in (inputs | bits).items()}
        for seed in (5, 6):
            judge.clear()
            judge.judge_gradient_rows(at, problem, floor, seed, 4)
            for name, found in zip(problem.outputs, judge.found(7)[4:], strict=True):
                rows = exact[name].reshape(-1, problem.head_dim)
                out = from_bits(bits[name], problem.dtype).astype(np.float64).reshape(rows.shape)
                chosen = drawn_rows(seed, min(judge.ROWS, len(rows)), len(rows))
                norms = np.maximum(np.linalg.norm(rows[chosen], axis=1), 1e-3)
                errors = np.linalg.norm((out - rows)[chosen], axis=1) / norms
                assert found["nans"] == 0
                assert found["norm"] == pytest.approx((rows[chosen] ** 2).sum(), rel=1e-9)
                assert found["row"] == pytest.approx(errors.max(), rel=1e-6, abs=1e-12)


# -- calls that are judged ------------------------------------------------------------------------

JUDGED = Problem(2, 4, 2, 70, 90, 16, "bf16", CAUSAL, op=BACKWARD)


@pytest.fixture(scope="module")
def opened(simulator):
    """A problem with two small cases, for all tests."""
    device, own = Device(simulator), cases.small_cases
    with pytest.MonkeyPatch.context() as patch:
        device.take_place(patch)
        patch.setattr(cases, "small_cases", lambda problem: own(problem)[1:4])
        yield Bench(device, JUDGED)


@pytest.fixture
def bench(opened):
    opened.proof.timed.go_to(PLAIN)
    return opened


def changed(name, number, bit, when=lambda call: True):
    """A right call but for one bit of an output."""

    def write(problem, buffers, call):
        differentiate(problem, buffers)
        if when(call) and problem == JUDGED:
            buffers[name].of(np.uint16)[number] ^= bit

    return write


def test_right_gradients_pass_in_every_call(bench):
    accuracy, proven = bench.prove(differentiate, small=True)
    assert accuracy.output in ("dq", "dk", "dv")
    assert 0 < accuracy.rel_err <= accuracy.limit
    assert bench.proof.repeat(proven, 12, 1e3) >= 12
    _, proven = bench.prove(differentiate, deterministic=False)
    assert bench.proof.repeat(proven, 12, 1e3) >= 12


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("name", JUDGED.outputs)
def test_a_wrong_element_of_any_output_is_found_and_named(bench, name):
    with pytest.raises(WrongResult, match=rf"error .* over the limit .* \({name}, "):
        bench.prove(changed(name, 1000, 0x4000))
    with pytest.raises(WrongResult, match=r"a race.*1 of"):
        bench.repeat(changed(name, 1000, 1, lambda call: call == 9))
    late = changed(name, 1000, 0x4000, lambda call: call == 9)
    with pytest.raises(WrongResult, match=rf"over the limit .* \({name}, "):
        bench.repeat(late, deterministic=False)


@pytest.mark.parametrize("name", JUDGED.outputs)
def test_an_output_that_is_not_written_is_found_and_named(bench, name):
    def write(problem, buffers, call):
        others = {key: buffer for key, buffer in buffers.items() if key != name}
        differentiate(problem, others | {name: HostBuffer(buffers[name].nbytes)})

    with pytest.raises(WrongResult, match=rf"never written \({name}, "):
        bench.prove(write)


def test_gradients_kept_from_an_earlier_call_are_found(bench):
    """Each call has other signs of dO, and so of all gradients."""
    kept = {}

    def write(problem, buffers, call):
        key = inputs_in(problem, buffers)["do"][0, 0, 0, 0]
        if key not in kept:
            differentiate(problem, buffers)
            kept[key] = {name: buffers[name].main.copy() for name in problem.outputs}
        for name, bits in kept[key].items():
            buffers[name].main[:] = bits

    with pytest.raises(WrongResult, match="an answer kept from an earlier call"):
        bench.repeat(write)


def test_what_a_call_does_to_inputs_and_beside_outputs_is_found(bench):
    def to_lse(problem, buffers, call):
        differentiate(problem, buffers)
        buffers["lse"].main[0] ^= call == 0

    with pytest.raises(WrongResult, match="wrote to its inputs"):
        bench.prove(to_lse)

    def beside(problem, buffers, call):
        differentiate(problem, buffers)
        buffers["dv"].all[-1] ^= call == 0

    with pytest.raises(WrongResult, match="wrote 1 bytes outside 'dq, dk, dv'"):
        bench.prove(beside)
    bench.proof.timed.buffers["dv"].all[-1] ^= 1


def test_short_turns_of_a_backward_are_judged(bench):
    short = Problem(3, 2, 1, 40, 30, 16, "bf16", CAUSAL, op=BACKWARD)
    assert bench.repeat_turns(differentiate, short) >= 12


def test_a_baseline_writes_all_outputs(bench):
    inputs = bench.proof.timed.buffers

    def collect(copy, outputs):
        differentiate(JUDGED, inputs | dict(outputs))

    call = Call(lambda *_: None, LaunchPlan(JUDGED, (), {}), {})
    accuracy, proven = bench.proof.of_baseline(call, collect, 0)
    assert accuracy.rel_err > 0
    bench.proof.begin()
    bench.proof.end(proven)  # on other signs of dO
    with pytest.raises(WrongResult, match="never written"):
        bench.proof.of_baseline(call, lambda copy, outputs: None, 0)

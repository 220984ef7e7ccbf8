"""decode_paged_mma on the CPU: schedules, pages, strides, and what should not lie on a device."""

import random
from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.verify.oracle import oracle_of

from .harness import ARCH, COMPILER, SimtError, Simulator, config_of

KERNEL = discover()["decode_paged_mma"]
STRIDES = 12  # the last arguments of the stage fwd
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# SMs, config and problem. Few SMs: a block has several items, and many blocks have one.
RUNS = (
    (1, "LSE=1", "(1,4,1x640,128) bf16 causal paged(16)"),
    (3, "LSE=1 KEYS=32 NUM_STAGES=3", "(1,8/2,1x640,64) fp16 full paged(64,hnd)"),
    (5, "LSE=1 HEADS=2 ITEM_COST=2 KEYS=32", "(1,8/2,1x640,128) bf16 causal paged(1)"),
    (7, "LSE=1 WARPS=8 HEADS=2 EVICT_FIRST=0", "(1,8/2,1x640,64) bf16 full paged(8,hnd)"),
    (40, "LSE=1 ITEM_COST=0", "(1,8/2,1x640,64) fp16 causal paged(2)"),
    (2, "LSE=1 SCHEDULE=1", "(1,32/2,1x640,64) bf16 causal paged(16)"),
    (3, "LSE=1 SCHEDULE=1 PDL=1 ROW_FRAGMENTS=2", "(1,16/1,4x640,64) bf16 causal paged(16)"),
    (5, "LSE=1 ROW_FRAGMENTS=2 WARPS=8", "(1,8/2,4x640,96) fp16 causal paged(48)"),
    (4, "LSE=1 HEADS=2", "(1,8/2,16x640,64) bf16 full paged(128)"),
    (3, "LSE=1", "(1,4/2,4x640,256) fp16 causal paged(16)"),
    (2, "LSE=1 WARPS=2", "(1,4/2,2x640,256) bf16 causal paged(16)"),
    (1, "LSE=1 KEYS=32", "(1,4,1x640,128) bf16 causal paged(16,e4m3)"),
    (5, "LSE=1 HEADS=2 NUM_STAGES=3", "(1,8/2,4x640,64) fp16 causal paged(64,hnd,e4m3)"),
    (3, "LSE=1 WARPS=8 ROW_FRAGMENTS=2", "(1,16/1,1x640,96) bf16 full paged(1,e4m3)"),
    (6, "LSE=1 SCHEDULE=1 KEYS=32", "(1,8/2,2x640,256) bf16 causal paged(32,e4m3)"),
    (3, "LSE=1 KEYS=32", "(1,8/2,4x640,64) bf16 window(40,0) paged(16)"),
    (5, "LSE=1 SCHEDULE=1 HEADS=2", "(1,8/2,3x640,64) fp16 window(100,2) paged(4,e4m3)"),
    (3, "LSE=1", "(1,8/2,1x640,64) bf16 causal paged(16) softcap(2) sinks"),
    (5, "LSE=1 ROW_FRAGMENTS=2 KEYS=32", "(1,8/2,4x640,128) fp16 full paged(16,e4m3) softcap(30)"),
)


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize(("sms", "words", "label"), RUNS)
def test_right_whatever_the_lengths(simulator, some, sms, words, label):
    config, arch = config_of(KERNEL, words), replace(ARCH, sm_count=sms)
    for case in some(small_cases(Problem.parse(label)), 4):
        result = simulator.check(KERNEL, config, case, arch=arch)
        assert result.ok, (config.label, case.label, str(result))


def test_more_pages_than_a_warp_reads_ahead(simulator):
    """It has those of 32 sixteens of keys, and the next: four warps come to the third after 4096 keys."""
    case = Case(Problem.parse("(2,2/1,1x4400,64) fp16 full paged(16,1x4400+1x70)"))
    for words in ("LSE=1", "LSE=1 KEYS=32 SCHEDULE=1"):
        arch = replace(ARCH, sm_count=1)
        result = simulator.check(KERNEL, config_of(KERNEL, words), case, arch=arch)
        assert result.ok, str(result)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("number", range(60))
def test_random_config_of_random_requests_is_right(simulator, drawn_by, number):
    """Whatever the rules say of them: machine code serves problems that other configs are better for."""
    rng = random.Random(f"{drawn_by} paged {number}")
    page, stored = rng.choice((1, 2, 4, 8, 16, 32, 48, 64, 256)), rng.choice(("", ",e4m3"))
    group, heads_kv, queries = rng.choice((1, 2, 3, 4, 7, 8, 16)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4, 16))
    edges = (0, 1, queries, page, page + 1, 63, 65, 129, rng.randint(1, 700))
    lengths = [rng.choice(edges) for _ in range(rng.choice((1, 2, 5, 40)))]
    lengths[0] = max(lengths[0], 1)
    left, right = rng.randint(0, 200), rng.randint(0, 4)
    mask = rng.choice(("full", "causal", f"window({left},0)", f"window({left},{right})"))
    scores = rng.choice(("", "", " softcap(5)", " sinks", " softcap(5) sinks"))
    said = "+".join(f"1x{length}" for length in lengths)
    head_dim = rng.choice(KERNEL.head_dims)
    case = Case(
        Problem.parse(
            f"({len(lengths)},{group * heads_kv}/{heads_kv},{queries}x{max(lengths)},{head_dim}) "
            f"{rng.choice(KERNEL.dtypes)} {mask} paged({page},{rng.choice(('nhd', 'hnd'))}{stored},{said}){scores}"
        )
    )
    values = {param.name: rng.choice(param.values) for param in KERNEL.params} | {"LSE": 1}
    if head_dim == 256:  # what fits registers and shared memory
        values |= {"ROW_FRAGMENTS": 1, "KEYS": 16, "NUM_STAGES": 2, "WARPS": 4}
    values["WARPS"] = max(values["WARPS"], 2 * values["HEADS"]) if head_dim > 96 else values["WARPS"]
    launched = KERNEL.stages["fwd"].launch(Config(values), case.problem, ARCH)
    if launched is not None and launched.smem_bytes > ARCH.smem_per_block:
        values |= {"ROW_FRAGMENTS": 1, "KEYS": 16, "NUM_STAGES": 2}
    values["NUM_STAGES"] = 2 if values["WARPS"] == 8 or values["KEYS"] == 32 else values["NUM_STAGES"]
    arch = replace(ARCH, sm_count=rng.choice((1, 2, 3, 5, 13, 60)))
    try:
        result = simulator.check(KERNEL, Config(values), case, arch=arch, schedules=(0, 1, number + 2))
    except SimtError as error:
        pytest.fail(f"{values} {case.label}, {arch.sm_count} SMs\n{error}")
    assert result.ok, f"{values} {case.label}, {arch.sm_count} SMs: {result}"


class Call:
    """One problem's inputs, and the launches of a config, which may be changed."""

    def __init__(self, simulator: Simulator, label: str, words: str, sms: int = 3):
        self.simulator, self.problem = simulator, Problem.parse(label)
        self.config = config_of(KERNEL, words)
        self.inputs = dict(oracle_of(self.problem).make_inputs(Case(self.problem), 1))
        case, arch = Case(self.problem), replace(ARCH, sm_count=sms)
        self.stages = simulator.build(KERNEL, self.config, case, arch=arch)

    def pass_(self, change):
        """Changes the arguments of the stage fwd."""
        launch, made = self.stages["fwd"]
        self.stages["fwd"] = replace(launch, args=tuple(change([*launch.args]))), made

    def run(self, **inputs):
        """The output and the log-sum-exp of the last stage of each name."""
        problem = self.problem
        left = self.simulator.run(
            self.stages, self.inputs | inputs, {"o": problem.bytes_of("o")}, KERNEL.workspaces(self.config, problem)
        )
        return left["o"].view(np.uint16).reshape(problem.shape_of("o")), left["lse"].view(np.float32)


def test_the_strides_of_engines(simulator):
    """K and V side by side in one allocation, q and o with heads behind queries, one scale for all."""
    label = "(3,8/2,2x300,64) bf16 causal paged(16,e4m3,1x300+1x17+1x0)"
    call = Call(simulator, label, "LSE=1 KEYS=32")
    call.inputs |= {name: np.full((3, 2), scale, np.float32) for name, scale in (("k_scale", 0.5), ("v_scale", 2))}
    plain, lse = call.run()

    k, v = call.inputs["k"], call.inputs["v"]
    (pages, slots, heads_kv, columns), (batch, heads, queries, _) = k.shape, plain.shape
    pool = np.stack([k, v], axis=1)  # (pages, 2, slots, heads_kv, columns)
    page, row = 2 * slots * heads_kv * columns, heads * columns
    of_rows = (queries * row, columns, row)
    table = np.full((batch, 40), -5, np.int32)
    table[:, : call.inputs["block_table"].shape[1]] = call.inputs["block_table"]
    strides = (*of_rows, *of_rows, page, heads_kv * columns, columns, 40, 0, 0)
    assert len(strides) == STRIDES
    call.pass_(lambda args: [*args[:-STRIDES], *strides])
    strided, same_lse = call.run(
        k=pool,
        v=pool.ravel()[page // 2 :],
        q=call.inputs["q"].swapaxes(1, 2).copy(),
        block_table=table,
        k_scale=np.float32([0.5]),
        v_scale=np.float32([2]),
    )
    assert np.array_equal(strided.reshape(batch, queries, heads, columns).swapaxes(1, 2), plain)
    assert np.array_equal(same_lse, lse)
    assert pages == len(pool)


def test_lengths_and_pages_that_cannot_be_are_the_nearest_that_can(simulator):
    """And nothing outside the tensors is read: a simulated run ends if it is. Slots in between are NaN."""
    call = Call(simulator, "(4,4/2,1x100,64) bf16 causal paged(16,4x100)", "LSE=1")
    table = call.inputs["block_table"].copy()
    pages, (_, blocks) = len(call.inputs["k"]), table.shape
    lengths = np.int32([blocks * 16, 0, 30, 100])
    table[2, 0], table[2, 1], table[3, 2] = 0, pages - 1, pages - 1
    right = call.run(seqused_k=lengths, block_table=table)
    table[2, 0], table[2, 1], table[3, 2] = -7, 2**31 - 1, pages
    lengths = np.int32([2**31 - 1, -(2**31), 30, 100])
    wrong = call.run(seqused_k=lengths, block_table=table)
    assert np.array_equal(wrong[0], right[0])
    assert np.array_equal(wrong[1], right[1], equal_nan=True)
    assert not right[0][1].any()
    assert np.isneginf(right[1].reshape(4, 4)[1]).all()


@pytest.mark.parametrize("words", ["LSE=1", "LSE=1 SCHEDULE=1"])
def test_a_replay_with_other_lengths_finds_counters_as_the_first_call_did(simulator, words):
    """Long requests, which many blocks share, then few keys, then long ones again."""
    label = "(3,4/1,1x500,64) bf16 causal paged(16,1x500+2x300)"
    call = Call(simulator, label, words, sms=20)
    alone = call.run()
    short = np.int32([1, 0, 40])

    def of(stage, lengths):
        launch, made = call.stages[stage]
        return replace(launch, args=tuple(lengths if arg == "seqused_k" else arg for arg in launch.args)), made

    each = [stage for stage in call.stages if stage != "reset"]
    for number, lengths in enumerate(("short", "seqused_k")):
        call.stages |= {f"{stage}{number}": of(stage, lengths) for stage in each}
    again = call.run(short=short)
    assert np.array_equal(again[0], alone[0])
    assert np.array_equal(again[1], alone[1])


def test_a_schedule_of_other_lengths_stays_inside_the_tensors(simulator):
    """Its outputs are wrong; that it is caught is the operator's part."""
    call = Call(simulator, "(3,4/1,1x500,64) bf16 causal paged(16,1x500+2x300)", "LSE=1 SCHEDULE=1")
    call.run()
    launch, made = call.stages["fwd"]
    args = tuple("short" if arg == "seqused_k" else arg for arg in launch.args)
    call.stages["fwd"] = replace(launch, args=args), made
    call.run(short=np.int32([1, 0, 0]))

"""flash_fwd_wide_wgmma: every schedule, cluster and kind of keys, with copies in any order."""

import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover

from .harness import COMPILER, config_of
from .mutations import MUTATIONS
from .test_mutations import run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wide_wgmma"]
# Blocks of a cluster, and query heads among them.
CLUSTERS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
CONFIGS = tuple(
    f"BLOCK_N={keys} LAG={lag} CLUSTER={blocks} HEAD_MEMBERS={heads} ORDER={(number + lag) % 2} LSE=1"
    for keys in (64, 128)
    for lag in (0, 1)
    for number, (blocks, heads) in enumerate(CLUSTERS)
)
# Heads that a cluster's divide, and do not; tails; more keys than a ring has room for.
PROBLEMS = {
    "(1,4/1,1x1,512) bf16 full": "normal",
    "(2,4/2,97x161,512) fp16 causal": "normal",
    "(1,2/1,70x1215,512) bf16 causal": "large_scores",
    "(1,3/1,193x321,320) bf16 causal": "normal",
    "(1,2,64x700,448) bf16 full": "far_above",
    "(1,4/2,97x161,512) bf16 causal scale(1)": "far_below",
    "(1,8/2,150x200,264) fp16 causal": "normal",
    "(1,4/2,150x300,384) bf16 window(70,3)": "normal",
    "(1,2/1,130x90,504) bf16 causal": "normal",
    "(1,2,200x60,512) bf16 window_top_left(3,1)": "normal",
    "(3,4/2,130x321,512) bf16 full padded(right,0)": "nan_padding",
    "(3,2,70x321,296) fp16 causal padded(left,10)": "nan_padding",
    "(2,4/1,200x300,512) bf16 window(40,0) padded(right,30)": "huge_padding",
    "(1,4/1,66x600,512) bf16 full": "one_hot",
    "(1,4/1,130x1000,344) bf16 full": "large_scores",
    "(1,2/1,97x64,512) bf16 full": "far_below",
    "(1,2/1,97x128,512) bf16 full": "equal_keys",
    "(1,2/1,97x257,512) bf16 full": "tiny_ends",
    "(1,2/1,97x400,512) bf16 full": "sink",
}
# Blocks that split the keys, of heads that share a tile and of others.
SPLIT = tuple(
    f"BLOCK_N={keys} LAG={lag} SPLITS={splits} PACK_GQA={packed} LSE=1"
    for keys in (64, 128)
    for lag in (0, 1)
    for splits, packed in ((1, 1), (2, 0), (3, 1), (4, 1), (8, 0))
)
# Splits without a tile; tiles that end within a head, and that begin within one.
FEW_QUERIES = {
    "(2,8/4,1x1000,512) bf16 full": "normal",
    "(1,6/2,45x700,264) fp16 causal": "normal",
    "(1,34/2,5x130,320) bf16 causal": "large_scores",
    "(3,4/1,3x321,504) bf16 causal padded(right,0)": "nan_padding",
    "(2,6/2,40x400,384) fp16 window(70,3)": "normal",
    "(2,4/2,7x300,448) bf16 window(9,0) padded(left,20)": "huge_padding",
    "(1,4/1,30x20,512) bf16 causal": "normal",
    "(1,8/1,9x1,512) bf16 full": "normal",
    "(1,4/2,17x900,512) bf16 full": "far_below",
    "(1,4/2,17x600,512) bf16 full": "one_hot",
}


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("words", SPLIT)
@pytest.mark.parametrize("label", FEW_QUERIES)
def test_right_with_few_queries(simulator, words, label):
    case = Case(Problem.parse(label), FEW_QUERIES[label])
    result = simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=range(4))
    assert result.ok, str(result)


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("words", CONFIGS)
@pytest.mark.parametrize("label", PROBLEMS)
def test_right(simulator, words, label):
    case = Case(Problem.parse(label), PROBLEMS[label])
    result = simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=range(4))
    assert result.ok, str(result)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("words", CONFIGS[::5])
def test_clean_under_the_sanitizers(simulator, words):
    case = Case(Problem.parse("(2,2/1,70x200,328) bf16 full padded(right,10)"), "nan_padding")
    result = simulator.check(FAMILY, config_of(FAMILY, words), case, asan=True)
    assert result.ok, str(result)


def test_a_wait_for_a_phase_two_ahead_is_found_by_the_newest_copies_first_alone(simulator):
    bug = MUTATIONS["wide_pieces_of_the_other_skipped"]
    assert run(simulator, bug, schedules=(0, 1, 3, 4)) is None
    assert run(simulator, bug, schedules=(2,)) is not None


def test_p_that_is_overwritten_while_it_is_read_is_found_at_random(simulator):
    assert run(simulator, MUTATIONS["wide_p_overwritten_while_read"], schedules=range(3, 12)) is not None

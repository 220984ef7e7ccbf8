"""STRIDED=1, which serves models: tensors with any strides, as a package launches them."""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.layouts import DENSE
from attnsweep.core.masks import CAUSAL
from attnsweep.core.problem import BACKWARD, Padded, Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.family.launch import Arg, Launch, TensorMap
from attnsweep.serve import export_code
from attnsweep.serve.runtime import families
from attnsweep.serve.runtime.driver import StridedTensor, rows_of_group
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.measures import apart, row_error
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

from .harness import ARCH, COMPILER, LSE_LIMIT, BuildError, config_of, sources
from .test_backward import waves
from .unusual import FLASH_FWD_WGMMA

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

FAMILIES = discover()
FAMILY = FAMILIES[export_code.FAMILY]
# Which dimension lies where: the order of (batch, heads, seqlen) from the outermost, and how many
# heads lie in a row that belong to others, as in slices of one tensor of q, k and v.
LAYOUTS = {
    "heads_first": ((0, 1, 2), 0),
    "rows_first": ((0, 2, 1), 0),
    "packed": ((0, 2, 1), 3),
    "rows_outermost": ((2, 0, 1), 1),
}
PLAIN = ("BLOCK_N=64 WARPGROUPS=2", "BLOCK_N=96 WARPGROUPS=1 SPLITS=2 PDL=2", "BLOCK_N=64 WARPGROUPS=2 ORDER=1")
# Packed heads need few queries: see test_packed_heads.
CONFIGS = (*PLAIN, *(words for words in FLASH_FWD_WGMMA if "PACK_GQA=1" not in words))
POISON = 0xFFFF


def spread(array: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Memory of (batch, heads, seqlen, head_dim) with a layout, full of NaN; and the view in it."""
    order, others = LAYOUTS[layout]
    sizes = list(array.shape)
    sizes[1] += others
    memory = np.full([*(sizes[i] for i in order), sizes[3]], POISON, np.uint16)
    back = [order.index(i) for i in range(3)]
    return memory, memory.transpose(*back, 3)[:, : array.shape[1]]


def _strided(made: Launch, problem: Problem, strides: dict[str, tuple[int, ...]]) -> Launch:
    """The launch with the maps that a package's driver makes, of tensors with these strides."""

    def arg(given: Arg) -> Arg:
        if not isinstance(given, TensorMap):
            return "o" if given == "" else given  # a null pointer has the size of any other
        batch, heads, seqlen, head_dim = problem.shape_of(given.buffer)
        of_batch, of_head, of_row = (2 * stride for stride in strides[given.buffer])
        dims, pitches = (head_dim, seqlen, heads, batch), (of_row, of_head, of_batch)
        return replace(given, dims=dims, strides=pitches, box=(*given.box[:2], 1, 1))

    return replace(made, args=tuple(map(arg, made.args)))


def check(simulator, words: str, problem: Problem, layouts: dict[str, str], *, lse: bool) -> None:
    """Runs the launches of a package, and compares what they write, and what lies between.

    layouts: of each tensor of a model; what is not named lies as one like it that is: o, dO and dQ
    as q, dK as k.
    """
    backward, name = problem.op == BACKWARD, families.family_of(problem)
    family, declaration = FAMILIES[name], families.DECLARED[name]
    config = config_of(family, words)
    config = config if backward else Config({**config, "LSE": int(lse)})
    code, rows_of_heads = families.rows_of(declaration, config, problem)
    group = problem.heads // rows_of_heads.heads
    case = Case(problem)
    oracle = oracle_of(problem)
    inputs = oracle.make_inputs(case, 1)
    memory, views, strides = {}, {}, {}
    for tensor in (*inputs, *problem.outputs):
        if tensor in ("lse", "key_range", "mask") or tensor.startswith("cu_seqlens"):
            memory[tensor] = inputs[tensor]
            continue
        shape = problem.shape_of(tensor)
        like = {"o": "q", "do": "q", "dq": "q", "dk": "k", "dv": "v"}.get(tensor, tensor)
        layout = layouts.get(tensor, layouts[like])
        memory[tensor], views[tensor] = spread(np.zeros(shape, np.uint16), layout)
        if tensor in inputs:
            views[tensor][:] = inputs[tensor]
        found = StridedTensor(views[tensor].shape, tuple(n // 2 for n in views[tensor].strides))
        if tensor in "qo" and group > 1:
            found = rows_of_group(found, group)
        strides[tensor] = found.strides[:3]
    given = {"lse": lse or backward, "strides": strides}
    if "mask" in inputs:
        steps = zip(inputs["mask"].shape, inputs["mask"].strides, strict=True)
        given["mask_strides"] = tuple(step if size > 1 else 0 for size, step in steps)
    launches = families.launches(*(declaration, config, problem, problem.scale), **given)
    launches = {name: _strided(made, rows_of_heads, strides) for name, made in launches.items()}
    declared = family.launches(code, rows_of_heads, ARCH)
    sizes = {**family.workspaces(code, rows_of_heads)}
    rows, texts = np.arange(problem.seqlen_q), sources(family)
    expected, least = oracle.exact(inputs, problem)
    most = {name: limit.row for name, limit in oracle.limits(case, family.rounds_scores, None).items()}
    stages = {}
    for name, made in launches.items():
        defines = family.stages[name].defines(code, rows_of_heads, declared[name]) | {"STRIDED": "1"}
        stage = simulator.stage(family, texts, made.function, defines, False)
        stages[name] = replace(made, defines=declared[name].defines), stage
    given, out = {name: memory[name] for name in inputs}, {name: memory[name].nbytes for name in problem.outputs}
    for schedule in (0, 1):
        left = simulator.run(stages, given, out, sizes, schedule=schedule)
        for name, exact in expected.items():
            whole = left[name].view(np.uint16).reshape(memory[name].shape)
            view = np.ndarray(views[name].shape, np.uint16, whole, strides=views[name].strides)
            values = from_bits(view, problem.dtype).astype(np.float64)
            assert row_error(values, exact, least[name]) <= most[name], name
            view[:] = POISON
            assert (whole == POISON).all(), f"written between the rows of {name}"
        if lse:
            got = left["lse"].view(np.float32)
            right = log_sum_exp(inputs, problem, rows).ravel()
            size = np.maximum(1, np.abs(np.where(np.isfinite(right), right, 1)))
            assert np.max(apart(got, right) / size) <= LSE_LIMIT


def test_packed_heads_of_any_strides_are_refused(simulator, monkeypatch):
    """By the template: a package views them as queries of one head."""
    monkeypatch.setattr(families, "rows_of", lambda _, config, problem: (config, problem))
    layouts = dict.fromkeys("qkvo", "heads_first")
    with pytest.raises(BuildError, match="packed heads lie one behind the other"):
        check(simulator, "PACK_GQA=1", Problem(1, 2, 1, 5, 70, 64), layouts, lse=False)


PACKED = (
    "BLOCK_N=64 WARPGROUPS=1 PACK_GQA=1",
    "BLOCK_N=96 WARPGROUPS=2 KEY_GROUPS=2 SPLITS=2 PDL=2 PACK_GQA=1",
    "BLOCK_N=64 WARPGROUPS=1 SPLITS=2 SPLIT_CLUSTER=1 PACK_GQA=1",
)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("words", PACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_query_of_packed_heads(simulator, words, layout):
    """Heads lie anywhere, and those of a group are rows of one tile."""
    problem = Problem(2, 12, 3, 1, 200, 64, "bf16")
    layouts = dict.fromkeys("qo", layout) | {"k": "packed", "v": "rows_first"}
    check(simulator, words, problem, layouts, lse=layout != "packed")


OF_ITEMS = (
    "(3,12/3,1x421,64) bf16 full padded(right,0)",
    "(3,12/3,1x421,64) bf16 full padded(left,0)",
    "(3,12/3,5x421,64) bf16 full padded(left,0)",
    "(3,12/3,1x421,64) bf16 boolean(padding,0)",
    "(3,12/3,1x304,64) bf16 boolean(holes,50)",
    "(3,12/3,1x421,64) bf16 boolean(documents,3)",
    "(3,12/3,1x421,64) bf16 boolean(full,item)",
)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("label", OF_ITEMS)
@pytest.mark.parametrize("words", [*PACKED, "BLOCK_N=128 WARPGROUPS=1 SPLITS=2 PDL=2"])
def test_queries_that_see_the_same_keys_of_their_item(simulator, words, label):
    """A package's launches look the keys up by items of key heads, or of query heads."""
    problem = Problem.parse(label)
    layouts = dict.fromkeys("qo", "heads_first" if problem.seqlen_q > 1 else "rows_first")
    layouts |= {"k": "packed", "v": "rows_first"}
    check(simulator, f"{words} ITEM_KEYS=1", problem, layouts, lse=True)


@pytest.mark.parametrize("words", PACKED[:2])
def test_contiguous_queries_of_packed_heads(simulator, words):
    """More rows than a tile has, of 5 queries of 14 heads."""
    problem = Problem(2, 28, 2, 5, 200, 72, "fp16")
    layouts = dict.fromkeys("qo", "heads_first") | {"k": "packed", "v": "rows_first"}
    check(simulator, words, problem, layouts, lse=True)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(len(CONFIGS)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_right(simulator, layout, number):
    words = CONFIGS[number]
    causal = "ORDER=1" in words or ("CLUSTER=" not in words.replace("SPLIT_CLUSTER", "") and number % 2 == 0)
    dtype = FAMILY.dtypes[number % 2]
    head_dim = (128, 64, 72)[number % 3]
    problem = Problem(3, 4, 2, 150, 330, head_dim, dtype, causal=causal)
    words = words.replace("LSE=1", "").strip()
    layouts = {"q": layout, "k": "packed", "v": "rows_first", "o": layout}
    check(simulator, words, problem, layouts, lse=bool(number % 2) or "SPLIT" in words)


WIDE = (
    "BLOCK_N=128 LAG=1",
    "BLOCK_N=64 LAG=0 CLUSTER=2 HEAD_MEMBERS=2",
    "BLOCK_N=128 LAG=1 CLUSTER=2 HEAD_MEMBERS=1 ORDER=1",
    "BLOCK_N=64 LAG=1 SPLITS=2",
)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("words", WIDE)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("(2,4/2,150x200,512) bf16 causal", "rows_first"),
        ("(3,4/2,97x161,264) fp16 full", "packed"),
        ("(2,4/2,130x200,320) bf16 window(70,3)", "rows_outermost"),
        ("(2,4/2,130x200,512) bf16 causal padded(left,0)", "packed"),
    ],
)
def test_wide_heads(simulator, words, shape, layout):
    layouts = {"q": layout, "k": "packed", "v": "rows_first", "o": layout}
    check(simulator, words, Problem.parse(shape), layouts, lse="LAG=1" in words)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("keys", ["full", "full padded(right,0)"])
def test_one_query_of_packed_wide_heads(simulator, splits, keys):
    problem = Problem.parse(f"(2,12/3,1x421,512) bf16 {keys}")
    layouts = dict.fromkeys("qo", "rows_first") | {"k": "packed", "v": "rows_first"}
    check(simulator, f"BLOCK_N=64 LAG=1 SPLITS={splits} PACK_GQA=1", problem, layouts, lse=True)


VALUE_WORDS = (*PLAIN[:2], "BLOCK_N=64 WARPGROUPS=1 SPLITS=2 PDL=2")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("of_v", [64, 128])
@pytest.mark.parametrize("words", VALUE_WORDS)
def test_v_of_another_head_dim(simulator, words, of_v):
    """Rows of v and of the output are shorter than q's, or longer, in whatever they lie."""
    problem = Problem(2, 4, 2, 100, 200, 96, "bf16", head_dim_v=of_v)
    layouts = {"q": "packed", "k": "rows_first", "v": "packed", "o": "rows_first"}
    check(simulator, words, problem, layouts, lse=True)


@pytest.mark.nightly(push=1, of="gradients of strided tensors")
@pytest.mark.parametrize(
    ("words", "head_dim"),
    [
        ("RECOMPUTE=0 PDL=1", 64),
        ("RECOMPUTE=1 AHEAD=0", 72),
        ("RECOMPUTE=0 DKV_WARPGROUPS=2 KV_WARPGROUPS=1 AHEAD=1 CLUSTER=2", 192),
        ("RECOMPUTE=1 DKV_WARPGROUPS=2 KV_WARPGROUPS=1 Q_STAGES=1 Q_BLOCK_N=64", 256),
    ],
)
@pytest.mark.parametrize("do", ["heads_first", "rows_outermost"])
@pytest.mark.parametrize("layout", [DENSE, Padded("right", 30)], ids=lambda each: each.kind)
def test_gradients_of_the_usual_layouts_of_models(simulator, words, head_dim, do, layout):
    own = (head_dim, "bf16", CAUSAL, layout)
    problem = Problem(3 if layout != DENSE else 2, 4, 2, 100, 130, *own, op=BACKWARD)
    layouts = {"q": "packed", "k": "rows_first", "v": "packed", "o": "rows_first", "do": do}
    check(simulator, words, problem, layouts, lse=False)


@pytest.mark.nightly(push=1, of="gradients of strided tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout_where_blocks_work_for_other_heads(simulator, layout):
    problem = Problem(5, 4, 2, 100, 130, 72, "bf16", CAUSAL, op=BACKWARD)
    layouts = {"q": "packed", "k": "rows_first", "v": "packed", "o": layout, "do": "rows_first"}
    with waves(2, with_delta=True):
        check(simulator, "RECOMPUTE=0 PDL=1 DQ_RING=3", problem, layouts, lse=False)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("layout", ["rows_first", "packed"])
@pytest.mark.parametrize(
    "words", ["BLOCK_N=64 WARPGROUPS=2", "BLOCK_N=128 WARPGROUPS=2 PINGPONG=1 MAXIMA=2 PERSISTENT=2"]
)
def test_sequences_that_end_within_16_rows(simulator, words, layout):
    """Their last rows are stored by threads, and not by TMA."""
    problem = Problem.parse("(1,4/2,300,72) bf16 causal packed(4)")
    check(simulator, words, problem, {"q": layout, "k": "packed", "v": "rows_first"}, lse=True)

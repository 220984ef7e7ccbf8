"""v and o with rows of another length than q's and k's: in each way to load, join and store.

Beside the last column of a row lies the next row, and behind a tensor its guards, so that code
which takes one length for the other reads or writes what is not its own.
"""

from dataclasses import replace

import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.launch import TensorMap

from .harness import ARCH, COMPILER, SimtError, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wgmma"]
CASE = Case(Problem.parse("(2,4/2,97x161,192/128) bf16 causal"))
PLAIN = "BLOCK_N=64 WARPGROUPS=2 LSE=1"


def is_wrong(simulator, words, case=CASE):
    """Whether a run tells a wrong output, or a write or read outside."""
    try:
        return not simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=(0,)).ok
    except SimtError:
        return True


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("dims", ["192/128", "64/128"])
@pytest.mark.parametrize("tensor", ["v", "o"])
@pytest.mark.parametrize("part", ["stride", "columns"])
def test_maps_of_v_and_o_with_the_rows_of_q_are_wrong(simulator, relaunched, dims, tensor, part):
    case = Case(Problem.parse(f"(2,4/2,97x161,{dims}) bf16 full"))
    assert not is_wrong(simulator, PLAIN, case)

    def as_q(arg):
        if not isinstance(arg, TensorMap) or arg.buffer != tensor:
            return arg
        head_dim, rows, heads = case.problem.head_dim, *arg.dims[1:]
        if part == "columns":  # which end with the tensor where there are more
            return replace(arg, dims=(head_dim, rows - (head_dim > arg.dims[0]), heads))
        own, last = 2 * head_dim, rows * arg.strides[0] // (2 * head_dim)
        return replace(arg, dims=(arg.dims[0], min(rows, last), heads), strides=(own, own * rows))

    relaunched(FAMILY, "fwd", lambda made: replace(made, args=tuple(map(as_q, made.args))))
    assert is_wrong(simulator, PLAIN, case)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("words", [PLAIN, f"{PLAIN} SPLITS=2", f"{PLAIN} PERSISTENT=1"])
@pytest.mark.parametrize("dims", ["192/128", "128/192"])
def test_code_of_the_columns_of_q_alone_is_wrong(simulator, relaunched, words, dims):
    case = Case(Problem.parse(f"(2,4/2,97x161,{dims}) bf16 full"))
    assert not is_wrong(simulator, words, case)
    for stage in ("fwd", "combine"):

        def without(made):
            defines = {name: x for name, x in made.defines.items() if name != "HEAD_DIM_V"}
            return replace(made, defines=defines)

        relaunched(FAMILY, stage, without)
    assert is_wrong(simulator, words, case)


def test_room_for_an_output_that_is_wider_than_q_is_counted():
    """Where the output goes over Q: Q's place is then as large as O's."""
    wide, same = (Problem.parse(f"(1,2,97x161,{dims}) bf16 full") for dims in ("64/128", "128"))
    of_k = 2 * 64 * 64 * 2  # two tiles of 64 keys, with 64 columns fewer
    for words, of_q in ((PLAIN, 0), (f"{PLAIN} PERSISTENT=1", 128 * 64 * 2)):
        sizes = [FAMILY.launches(config_of(FAMILY, words), problem, ARCH)["fwd"].smem_bytes for problem in (same, wide)]
        assert sizes[0] - sizes[1] == of_k + of_q, words

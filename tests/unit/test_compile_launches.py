"""What a call is made of: it begins when the call before has ended, as a baseline's call does.

With a programmatic first launch, a call's prologue ran under the call before, which no baseline's
can: 0.4 to 0.7 µs a call that were none of the kernel's.
"""

from contextlib import nullcontext

import pytest
from fake_compiler import FakeCompiler

from attnsweep.compile.candidate import Build
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.device.bound_call import BoundCall
from attnsweep.family.discover import discover
from attnsweep.family.family import Config

ARCH = ARCHS["sm_90a"]
PROBLEM = Problem.parse("1,4,512x4096,64")
FLASH = {"BLOCK_N": 128, "WARPGROUPS": 2, "BLOCKS_PER_SM": 1, "PDL": 1}
# All three launches, as declared, are programmatic.
THREE = {"STATS": 0, "PDL": 2}
# Family, parameters, and which of a call's launches are programmatic: those behind another of the
# same call and stream.
CALLS = {
    "one launch": ("flash_fwd_wgmma", FLASH, [False]),
    "two": ("flash_fwd_wgmma", FLASH | {"SPLITS": 2, "SPLIT_CLUSTER": 0}, [False, True]),
    "three": ("three_kernel_wgmma", THREE, [False, True, True]),
    "chunks": ("three_kernel_wgmma", THREE | {"CHUNK_HEADS": 2}, [False] + [True] * 5),
    "streams": (
        *("three_kernel_wgmma", THREE | {"CHUNK_HEADS": 2, "STREAMS": 2}),
        [False, True, True, False, True, True],
    ),
}


def launches_of(name, tmp_path, problem=PROBLEM):
    family, parameters, _ = CALLS[name]
    kernel = discover()[family]
    config = Config({p.name: p.values[0] for p in kernel.params} | parameters)
    build = Build(kernel, config, problem, FakeCompiler(ARCH, tmp_path))
    build.submit()
    return build.launches_for(problem)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_begins_under_the_call_before(name, tmp_path):
    made = launches_of(name, tmp_path)
    assert [stage.launch.programmatic for stage in made.stages] == CALLS[name][2]


@pytest.mark.parametrize("name", CALLS)
def test_only_a_chained_call_does_and_on_several_streams_none(name, tmp_path):
    made = launches_of(name, tmp_path)
    assert made.chains == (name != "streams")


class Session:
    """Notes, launch by launch, whether it may begin under the one before."""

    def __init__(self):
        self.launched = []

    def streams(self, count):
        return [nullcontext() for _ in range(count)]

    def marks(self, count):
        return [None] * count

    def bind(self, stage, buffers):
        return lambda: self.launched.append(stage.launch.programmatic)

    def capture(self, issue):
        return issue


@pytest.mark.parametrize("name", [name for name in CALLS if name != "streams"])
def test_a_graph_holds_ordinary_calls_unless_chained_ones_are_asked_for(name, tmp_path):
    session = Session()
    call = BoundCall(session, launches_of(name, tmp_path), [{}])
    ordinary = CALLS[name][2]
    call.capture(2)()
    assert session.launched == ordinary * 2
    session.launched.clear()
    call.capture(2, chained=True)()
    assert session.launched == [True, *ordinary[1:]] * 2


@pytest.mark.parametrize("mask", ["boolean(causal)", "window(64,0)"])
def test_the_list_of_a_mask_begins_under_its_scan_and_no_call_under_them(mask, tmp_path):
    problem = Problem.parse(f"(1,4,512x4096,64) fp16 {mask}")
    made = launches_of("one launch", tmp_path, problem)
    early = {stage.name: stage.launch.programmatic for stage in made.stages}
    assert early == {"mask": False, "order": True, "fwd": False}
    assert not made.chains  # its first launch is no part of a call

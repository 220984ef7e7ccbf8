"""Occupancy planned before compiling, and counted after."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.compile.cubin import residency
from attnsweep.core.hardware import ARCHS


@given(
    arch=st.sampled_from(list(ARCHS.values())),
    warps=st.integers(1, 32),
    registers=st.sampled_from(range(8, 256, 8)),
    smem_bytes=st.integers(0, 90 * 1024),
)
def test_a_plan_is_not_below_what_the_same_registers_reach(arch, warps, registers, smem_bytes):
    """Registers in whole units of 8: the plan then differs only by shared memory's granules."""
    planned = arch.planned_blocks(warps * 32, registers, smem_bytes)
    reached, _ = residency(arch, registers, warps * 32, smem_bytes)
    rounded, _ = residency(arch, registers, warps * 32, max(0, smem_bytes - 128))
    assert planned >= 1
    assert max(1, reached) <= planned <= max(1, rounded)


def test_a_known_case():
    # 128 threads of 168 registers on Hopper: 12 warps fit, so 3 blocks.
    assert ARCHS["sm_90a"].planned_blocks(128, 168, 0) == 3
    assert ARCHS["sm_90a"].planned_blocks(1024, 255, 0) == 1


@pytest.mark.parametrize(
    ("registers", "threads", "smem_bytes", "expected"),
    [
        (168, 128, 0, (3, "registers")),
        (32, 128, 100 << 10, (2, "shared memory")),
        (32, 1024, 0, (2, "registers")),
        (16, 1024, 0, (2, "threads")),
        (16, 32, 0, (32, "blocks")),
        (16, 2048, 0, (0, "threads")),
        (16, 32, 300 << 10, (0, "shared memory")),
    ],
)
def test_what_an_sm_runs_out_of_first(registers, threads, smem_bytes, expected):
    assert residency(ARCHS["sm_90a"], registers, threads, smem_bytes) == expected

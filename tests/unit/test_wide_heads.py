"""Wide heads in 16 bits: which problems flash_fwd_wide_wgmma refuses, and in which words."""

import pytest

from attnsweep.core.errors import ProblemError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover

FAMILY = discover()["flash_fwd_wide_wgmma"]


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("(1,8/4,256,256) bf16 full", "head_dim 256 is not one of 264 to 512 in steps of 8; the nearest is 264"),
        ("(1,8/4,256,520) bf16 full", "head_dim 520 is not one of 264 to 512 in steps of 8; the nearest is 512"),
        ("(1,8/4,256,260) bf16 full", "head_dim 260 is not one of 264 to 512 in steps of 8; the nearest is 264"),
        ("(1,8/4,256,257) bf16 full", "head_dim 257 is not one of 264 to 512 in steps of 8; the nearest is 264"),
        ("(1,8/4,256,512/256) bf16 full", "v has as many columns as q and k, and not head_dim_v 256"),
        ("(1,8/4,256,512) fp32 full", "dtype fp32 is not one of fp16, bf16"),
        ("(1,8/4,256,512) bf16 boolean(holes,30)", "mask boolean(holes,30) is not one of full, causal, window"),
        ("(1,8/4,256,512) bf16 full softcap(30)", "cannot do softcap"),
        ("(1,8/4,256,512) bf16 full backward", "does no backward"),
    ],
)
def test_what_it_cannot_do_is_said_by_name(label, why):
    try:
        said = FAMILY.refusal(Problem.parse(label), ARCHS["sm_90a"])
    except ProblemError as error:
        said = error.what
    assert said == why

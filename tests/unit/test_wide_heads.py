"""Wide heads in 16 bits: which problems their families refuse, and in which words."""

import pytest

from attnsweep.core.errors import ProblemError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover

WIDE, LATENT = "flash_fwd_wide_wgmma", "flash_mla_wgmma"


def refusal(family, label):
    try:
        return discover()[family].refusal(Problem.parse(label), ARCHS["sm_90a"])
    except ProblemError as error:
        return error.what


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("(1,8/4,256,576) bf16 full", "head_dim 576 is not one of 264 to 512 in steps of 8; the nearest is 512"),
        ("(1,8/4,256,256) bf16 full", "head_dim 256 is not one of 264 to 512 in steps of 8; the nearest is 264"),
        ("(1,8/4,256,520) bf16 full", "head_dim 520 is not one of 264 to 512 in steps of 8; the nearest is 512"),
        ("(1,8/4,256,260) bf16 full", "head_dim 260 is not one of 264 to 512 in steps of 8; the nearest is 264"),
        ("(1,8/4,256,257) bf16 full", "head_dim 257 is not one of 264 to 512 in steps of 8; the nearest is 264"),
        ("(1,8/4,256,512/256) bf16 full", "v has as many columns as q and k, and not head_dim_v 256"),
        ("(1,8/4,256,320/512) bf16 full", "v has as many columns as q and k, and not head_dim_v 512"),
        ("(1,8/1,256,576/512) bf16 full value_in_key", "reads a v apart from k"),
        ("(1,8/4,256,512) bf16 full scale(0)", "scale is a number above 0, not 0.0"),
        ("(1,8/4,256,512) bf16 full scale(-1)", "scale is a number above 0, not -1.0"),
        ("(1,8/4,256,512) fp32 full", "dtype fp32 is not one of fp16, bf16"),
        ("(1,8/4,256,512) bf16 boolean(holes,30)", "mask boolean(holes,30) is not one of full, causal, window"),
        ("(1,8/4,256,512) bf16 full softcap(30)", "cannot do softcap"),
        ("(1,8/4,256,512) bf16 full backward", "does no backward"),
    ],
)
def test_what_it_cannot_do_is_said_by_name(label, why):
    assert refusal(WIDE, label) == why


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("(1,16/1,1x64,576) bf16 full paged(64)", "reads no v apart from k"),
        ("(1,16/1,256,576/512) bf16 full", "reads no v apart from k"),
        (
            "(1,16/1,1x64,512/256) bf16 full paged(64) value_in_key",
            "head_dim 512 is not one of 576; the nearest is 576",
        ),
        (
            "(1,16/1,1x64,576/256) bf16 full paged(64) value_in_key",
            "head_dim_v 256 is not one of 512; the nearest is 512",
        ),
        ("(1,16/1,1x64,576/512) bf16 full paged(32) value_in_key", "serves only pages of 64 keys"),
        ("(1,16/2,1x64,576/512) bf16 full paged(64) value_in_key", "serves only one key head"),
        ("(1,16/1,1x64,576/512) bf16 full value_in_key", "layout dense is not one of paged"),
        ("(1,16/1,1x64,576/512) bf16 full paged(64) value_in_key scale(0)", "scale is a number above 0, not 0.0"),
    ],
)
def test_what_latent_keys_cannot_be_is_said_by_name(label, why):
    assert refusal(LATENT, label) == why

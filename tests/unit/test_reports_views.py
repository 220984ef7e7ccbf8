"""Why a baseline was refused, and how to get one that is missing."""

import pytest

from attnsweep.baselines.backend import why_not
from attnsweep.family.discover import discover
from attnsweep.reports import views as view
from attnsweep.specs.model import BASELINES

# As PyTorch 2 gives them, in this order, when only the efficient backend may run.
WARNED = [
    "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:786.)",
    "Expected query, key and value to have head_dim below 256. (Triggered internally at x.h:9.)",
    "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:788.)",
    "Flash attention has been runtime disabled. (Triggered internally at sdp_utils_cpp.h:547.)",
    "cuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:790.)",
    "cuDNN attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:678.)",
]
ABORTED = RuntimeError("No available kernel. Aborting execution.\nmore")


@pytest.mark.parametrize(
    ("name", "warned", "reason"),
    [
        ("torch_efficient", WARNED, "Expected query, key and value to have head_dim below 256"),
        ("torch_flash", WARNED, "Flash attention has been runtime disabled"),
        ("torch_cudnn", WARNED, "cuDNN attention has been runtime disabled"),
        ("torch_cudnn", ["CuDNN attention kernel not used because: no plan."], "no plan"),
        ("torch_flash", WARNED[:2], "No available kernel. Aborting execution."),
        ("torch_flash", [], "No available kernel. Aborting execution."),
        ("flash_attn_2", WARNED, "No available kernel. Aborting execution."),
    ],
)
def test_a_refused_backend_gives_its_own_reason(name, warned, reason):
    assert why_not(name, ABORTED, warned) == reason


def test_list_says_how_to_get_each_baseline_that_is_missing(installed):
    installed("torch 2.9")
    text = "\n".join(line.plain for line in view.overview(discover(), BASELINES, 200))
    assert "not installed: cudnn: pip install nvidia-cudnn-frontend" in text
    assert "flash_attn_3, flash_attn_3_fp8: pip install tokenspeed-fa3 (fp16, bf16, FP8)" in text
    assert "torch_flash:" not in text
    told = view.families_json({}, BASELINES)["missing_baselines"]
    assert told["flash_attn_4"] == "pip install flash-attn-4"
    assert set(told) == {name for name in BASELINES if name.startswith(("cudnn", "triton", "flash"))}

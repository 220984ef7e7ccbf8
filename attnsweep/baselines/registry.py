"""Baselines timed in the same rounds: PyTorch's attention, unfused, cuDNN, Triton, FlashAttention.

Each is called as its users call it, on the same inputs, at its best: where there are several ways
(layouts, packages, tiles), the fastest on this very problem, from graphs with a warm L2, is taken.
A baseline that cannot run here gives the reason.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attnsweep.baselines import callable as own
from attnsweep.baselines import cudnn, flash
from attnsweep.baselines.backend import TORCH, Backend, Package
from attnsweep.baselines.cudnn import _cudnn
from attnsweep.baselines.flash import FLASH_3, _flash_attention
from attnsweep.baselines.torch_sdpa import _sdpa, _unfused, _varlen, flex, flex_cannot
from attnsweep.baselines.triton_precompile import _triton
from attnsweep.core.callables import CALLABLE, Asked
from attnsweep.core.files import install_command
from attnsweep.core.scores import KINDS
from attnsweep.specs.model import OWN_BF16

_HALF = ("fp16", "bf16")
_FP32 = (*_HALF, "fp32")
_MASKED: Any = {
    "masks": ("full", "causal", "window", "boolean"),
    "layouts": ("dense", "padded", "packed"),
}
_BOTH = ("forward", "backward")
_FP8 = ("e4m3", "e4m3_tensor", "e4m3_block")
_FLASH_2 = Package(("flash-attn",), "pip install flash-attn")
_FLASH_3 = Package(
    ("flash-attn-3", "tokenspeed-fa3", "fa3-fwd"),
    "pip install tokenspeed-fa3 (fp16, bf16, FP8) or fa3-fwd (bf16, FP8), or build "
    "FlashAttention's hopper/ directory",
)
_FLASH_4 = Package(("flash-attn-4",), "pip install flash-attn-4")
_CUDNN = Package(("nvidia-cudnn-frontend",), "pip install nvidia-cudnn-frontend")
_TRITON = Package(
    ("triton", "pytorch-triton"), f"{install_command('torch')} (on Linux it brings Triton)"
)

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("torch_flash", _sdpa("FLASH_ATTENTION"), TORCH, ops=_BOTH),
        Backend(
            "torch_cudnn", _sdpa("CUDNN_ATTENTION"), TORCH, **_MASKED, scores=("bias",), ops=_BOTH
        ),
        Backend(
            "torch_efficient",
            _sdpa("EFFICIENT_ATTENTION"),
            TORCH,
            _FP32,
            **_MASKED,
            scores=("bias",),
            ops=_BOTH,
        ),
        Backend("torch_varlen", _varlen, TORCH, layouts=("packed",), head_dim_v=False),
        Backend(
            "torch_math", _sdpa("MATH"), TORCH, _FP32, **_MASKED, scores=("bias",), rounds_scores=2
        ),
        Backend("unfused", _unfused, TORCH, _FP32, **_MASKED, scores=KINDS, rounds_scores=2),
        Backend("flex", flex, TORCH, **_MASKED, scores=KINDS, cannot=flex_cannot),
        Backend(
            "cudnn",
            _cudnn,
            _CUDNN,
            (*_HALF, *_FP8),
            layouts=("dense", "padded", "packed"),
            ops=_BOTH,
            cannot=cudnn.cannot,
        ),
        Backend(
            "cudnn_deterministic",
            partial(_cudnn, deterministic=True),
            _CUDNN,
            layouts=("dense", "padded"),
            ops=("backward",),
            cannot=cudnn.cannot,
        ),
        Backend("triton_flash", _triton, _TRITON, masks=("full", "causal"), head_dim_v=False),
        Backend(
            "flash_attn_2",
            _flash_attention("flash_attn_2", "flash_attn"),
            _FLASH_2,
            layouts=("dense", "packed"),
            scores=("softcap",),
            head_dim_v=False,
            cannot=flash.cannot,
        ),
        Backend(
            "flash_attn_3",
            _flash_attention("flash_attn_3", *FLASH_3),
            _FLASH_3,
            layouts=("dense", "padded", "packed"),
            scores=("softcap",),
            ops=_BOTH,
            cannot=flash.cannot,
        ),
        Backend(
            "flash_attn_3_fp8",
            _flash_attention("flash_attn_3_fp8", *FLASH_3),
            _FLASH_3,
            (*_HALF, *_FP8),
            cannot=flash.cannot,
        ),
        Backend(
            "flash_attn_4",
            _flash_attention("flash_attn_4", "flash_attn.cute"),
            _FLASH_4,
            layouts=("dense", "packed"),
            scores=("softcap",),
            ops=_BOTH,
            cannot=flash.cannot,
        ),
        Backend(OWN_BF16, own.own_bf16, TORCH, _FP8, masks=("full", "causal")),
    )
}


def backend_of(name: str) -> Backend:
    """The baseline called so: one of BACKENDS, or any Python callable as `module:function`."""
    if CALLABLE.fullmatch(name) is None:
        return BACKENDS[name]
    module = Asked.of(name).call.partition(":")[0]
    package = Package((), f"put {module} where Python finds it")
    return Backend(name, own.ways_of(name), package, (*_FP32, *_FP8), **_MASKED, ops=_BOTH)

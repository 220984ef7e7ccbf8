"""Peers timed in the same rounds: PyTorch's attention, unfused, cuDNN, Triton, FlashAttention.

Each peer is called as its users call it, on the same inputs, at its best: where there are several
ways (layouts, packages, tiles), the fastest on this very problem, from graphs with a warm L2, is
taken. A peer that cannot run here gives the reason.
"""

from __future__ import annotations

from attnsweep.baselines import callable as baselines_callable
from attnsweep.baselines.backend import Builder
from attnsweep.baselines.cudnn import _cudnn
from attnsweep.baselines.flash import FLASH_3, _flash_attention
from attnsweep.baselines.torch_sdpa import _sdpa, _unfused
from attnsweep.baselines.triton import _triton
from attnsweep.specs.model import OWN_BF16

WAYS: dict[str, Builder] = {
    "torch_flash": _sdpa("FLASH_ATTENTION"),
    "torch_cudnn": _sdpa("CUDNN_ATTENTION"),
    "torch_efficient": _sdpa("EFFICIENT_ATTENTION"),
    "torch_math": _sdpa("MATH"),
    "unfused": _unfused,
    "cudnn": _cudnn,
    "triton_flash": _triton,
    "flash_attn_2": _flash_attention("flash_attn_2", "flash_attn"),
    "flash_attn_3": _flash_attention("flash_attn_3", *FLASH_3),
    "flash_attn_3_fp8": _flash_attention("flash_attn_3_fp8", *FLASH_3),
    "flash_attn_4": _flash_attention("flash_attn_4", "flash_attn.cute"),
    OWN_BF16: baselines_callable.own_bf16,
}

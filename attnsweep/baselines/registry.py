"""Baselines timed in the same rounds: PyTorch's attention, unfused, cuDNN, Triton, FlashAttention.

Each is called as its users call it, on the same inputs, at its best: where there are several ways
(layouts, packages, tiles), the fastest on this very problem, from graphs with a warm L2, is taken.
A baseline that cannot run here gives the reason.
"""

from __future__ import annotations

from typing import Any

from attnsweep.baselines import callable as own
from attnsweep.baselines import cudnn, flash, flash_infer, fp8, paged
from attnsweep.baselines.backend import TORCH, Backend, Package
from attnsweep.baselines.flash import FLASH_3, flash_attention
from attnsweep.baselines.torch_sdpa import (
    _unfused,
    _varlen,
    flex,
    flex_cannot,
    sdpa,
    sdpa_gradients,
)
from attnsweep.baselines.triton_precompile import _triton
from attnsweep.core.callables import CALLABLE, Asked
from attnsweep.core.files import install_command
from attnsweep.core.formats import FORMATS
from attnsweep.core.ops import OPS
from attnsweep.core.scores import KINDS
from attnsweep.specs.model import OWN_BF16, PLAIN_READ

_HALF = ("fp16", "bf16")
_FP32 = (*_HALF, "fp32")
_MASKED: Any = {
    "masks": ("full", "causal", "window", "boolean"),
    "layouts": ("dense", "padded", "packed"),
}
_FP8 = tuple(name for name, each in FORMATS.items() if each.kind == "FP8")
_FLASH_2 = Package(("flash-attn",), "pip install flash-attn")
_FLASH_3 = Package(
    ("flash-attn-3", "tokenspeed-fa3", "fa3-fwd"),
    "pip install tokenspeed-fa3 (fp16, bf16, FP8) or fa3-fwd (bf16, FP8), or build "
    "FlashAttention's hopper/ directory",
)
_FLASH_MLA = Package(("sgl-flash-mla",), "pip install --no-deps sgl-flash-mla")
_FLASHINFER = Package(
    ("flashinfer-python",),
    "pip install --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py requests tqdm, beside "
    "nvcc and ninja",
)
_FLASH_4 = Package(("flash-attn-4",), "pip install flash-attn-4")
_CUDNN = Package(("nvidia-cudnn-frontend",), "pip install nvidia-cudnn-frontend")
_TRITON = Package(
    ("triton", "pytorch-triton"), f"{install_command('torch')} (on Linux it brings Triton)"
)


def _sdpa(name: str, backend: str, *more: Any, **facts: Any) -> Backend:
    """PyTorch's SDPA by one of its backends, and the backward that its autograd calls."""
    builders = {"forward": sdpa(backend), "backward": sdpa_gradients(backend)}
    return Backend(name, builders, TORCH, *more, **facts)


def _flash(
    name: str, *modules: str, gradients: bool = False, paged: Any = None, **facts: Any
) -> Backend:
    """A version of FlashAttention: see flash_attention. paged: its builder for such a cache."""
    builders = {"forward": flash_attention(name, *modules)}
    builders |= {"backward": flash.gradients(name)} if gradients else {}
    builders |= {"forward paged": paged} if paged else {}
    return Backend(name, builders, cannot=flash.cannot, **facts)


BACKENDS = {
    backend.name: backend
    for backend in (
        _sdpa("torch_flash", "FLASH_ATTENTION"),
        _sdpa("torch_cudnn", "CUDNN_ATTENTION", **_MASKED, scores=("bias",)),
        _sdpa("torch_efficient", "EFFICIENT_ATTENTION", _FP32, **_MASKED, scores=("bias",)),
        Backend("torch_varlen", {"forward": _varlen}, TORCH, layouts=("packed",), head_dim_v=False),
        Backend(
            *("torch_math", {"forward": sdpa("MATH")}, TORCH, _FP32),
            **_MASKED,
            scores=("bias",),
            rounds_scores=2,
        ),
        Backend(
            *("unfused", {"forward": _unfused}, TORCH, _FP32),
            **_MASKED,
            scores=KINDS,
            rounds_scores=2,
        ),
        Backend("flex", {"forward": flex}, TORCH, **_MASKED, scores=KINDS, cannot=flex_cannot),
        Backend(
            "cudnn",
            {"forward": cudnn.forward, "forward FP8": fp8.cudnn_fp8, "backward": cudnn.gradients()},
            _CUDNN,
            (*_HALF, *_FP8),
            layouts=("dense", "padded", "packed"),
            cannot=cudnn.cannot,
        ),
        Backend(
            "cudnn_deterministic",
            {"backward": cudnn.gradients(deterministic=True)},
            _CUDNN,
            layouts=("dense", "padded"),
            cannot=cudnn.cannot,
        ),
        Backend(
            *("triton_flash", {"forward": _triton}, _TRITON),
            masks=("full", "causal"),
            head_dim_v=False,
        ),
        _flash(
            *("flash_attn_2", "flash_attn"),
            package=_FLASH_2,
            layouts=("dense", "packed"),
            scores=("softcap",),
            head_dim_v=False,
        ),
        _flash(
            *("flash_attn_3", *FLASH_3),
            gradients=True,
            paged=paged.flash_3(),
            package=_FLASH_3,
            layouts=("dense", "padded", "packed", "paged"),
            scores=("softcap",),
            value_in_key=True,
        ),
        Backend(
            *("flash_attn_3_ready", {"forward": paged.flash_3(ready=True)}, _FLASH_3),
            layouts=("paged",),
            scores=("softcap",),
            value_in_key=True,
        ),
        Backend(
            *("flash_mla", {"forward": paged.flash_mla}, _FLASH_MLA),
            masks=("full", "causal"),
            layouts=("paged",),
            value_in_key=True,
            cannot=lambda p: None if p.value_in_key else "does value_in_key alone",
        ),
        Backend(
            "flash_attn_3_fp8",
            {"forward": fp8.flash_3_fp8, "forward paged": paged.flash_3(fp8=True)},
            *(_FLASH_3, (*_HALF, *_FP8)),
            layouts=("dense", "paged"),
            cannot=flash.cannot,
        ),
        Backend(
            *("flash_attn_3_fp8_ready", {"forward": paged.flash_3(ready=True, fp8=True)}, _FLASH_3),
            layouts=("paged",),
        ),
        Backend(
            *(PLAIN_READ, {"forward": paged.plain_read}, TORCH),
            masks=("full", "causal"),
            layouts=("paged",),
            scores=KINDS,
        ),
        Backend(
            *("torch_dense", {"forward": paged.dense}, TORCH), layouts=("paged",), value_in_key=True
        ),
        Backend(
            *("torch_gathered", {"forward": paged.gathered}, TORCH),
            layouts=("paged",),
            value_in_key=True,
        ),
        *(
            Backend(
                *(name, {"forward": build}, _FLASHINFER),
                masks=("full", "causal"),
                layouts=("paged",),
                scores=scores,
                cannot=flash_infer.cannot,
            )
            for name, build, scores in (
                ("flashinfer", flash_infer.decode, ("softcap",)),
                ("xqa", flash_infer.xqa, ()),
            )
        ),
        _flash(
            *("flash_attn_4", "flash_attn.cute"),
            gradients=True,
            package=_FLASH_4,
            layouts=("dense", "packed"),
            scores=("softcap",),
        ),
        Backend(OWN_BF16, {"forward": fp8.own_bf16}, TORCH, _FP8, masks=("full", "causal")),
    )
}


def backend_of(name: str) -> Backend:
    """The baseline called so: one of BACKENDS, or any Python callable as `module:function`."""
    if CALLABLE.fullmatch(name) is None:
        return BACKENDS[name]
    module = Asked.of(name).call.partition(":")[0]
    package = Package((), f"put {module} where Python finds it")
    builders = dict.fromkeys(OPS, own.ways_of(name))
    return Backend(name, builders, package, (*_FP32, *_FP8), **_MASKED)

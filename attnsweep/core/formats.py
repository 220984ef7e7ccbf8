"""Formats: how q, k and v are stored, and what follows from it. The standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Dtype = Literal["fp16", "bf16", "fp32", "e4m3", "e4m3_tensor", "e4m3_block"]
CacheDtype = Literal["e4m3"]
"""How k and v of a paged cache may be stored, if not as q is."""
SCALE_BLOCK = 128
"""Keys that share one k_scale and one v_scale in e4m3_block; the last block may have fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """How numbers are stored; there is one of each name in a process."""

    name: Dtype
    nbytes: int
    """Bytes of an element."""
    kind: str
    """What messages call it, whatever its scales are of."""
    storage: str
    """What device code calls an element: DTYPE_E4M3 of e4m3_block too."""
    out: str
    """The dtype of o."""
    aliases: tuple[str, ...]
    """Other names of it, PyTorch's among them."""
    scales: tuple[str, ...] = ()
    """Inputs that stored values are multiplied by; none if they are the values."""
    scale_block: int | None = None
    """Keys that share a scale of k and of v; None: all keys do."""
    equal_scales: bool = False
    """Whether all heads have the same scales."""
    lacks: tuple[str, ...] = ()
    """What a problem of it cannot have."""
    row_bytes: int = 1
    """Bytes that a row of a head is a multiple of."""
    tensor_rate: int = 1
    """FLOPs of tensor cores in a clock, of fp16's."""
    first_capability: tuple[int, int] = (0, 0)
    """The first compute capability that has it."""
    hard_inputs: Literal["huge_scores", "large_scores"] = "large_scores"
    """Scores whose exponentials overflow, or large ones in few bits."""
    judged_on_hard: bool = True
    """Whether our own candidates are judged on the hard case; in FP8 it takes seconds to make."""
    signs_kept: tuple[str, ...] = ()
    """Inputs whose signs stay where they are drawn anew. Scores of channels that are far from 0
    would leave only one key its weight."""
    lossy: bool = False
    """Whether it has so few bits that what rounding the inputs costs is measured, and shown."""
    cut_sums: bool = False
    """Whether tensor cores cut sums of its products: see verify/fp8.py. Then errors are no chance,
    and those of the rows of a head are alike."""


_FP8 = Format(
    *("e4m3", 1, "FP8", "E4M3", "bf16"),
    aliases=("fp8", "float8", "f8", "e4m3fn", "float8_e4m3fn", "float8_e4m3"),
    scales=("q_scale", "k_scale", "v_scale"),
    lacks=("head_dim_v", "value_in_key", "softcap", "sinks", "bias"),
    row_bytes=16,
    tensor_rate=2,
    first_capability=(8, 9),
    judged_on_hard=False,
    signs_kept=("q", "k"),
    lossy=True,
    cut_sums=True,
)
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format(
            *("fp16", 2, "FP16", "FP16", "fp16", ("float16", "half", "f16", "16")),
            hard_inputs="huge_scores",
        ),
        Format(
            *("bf16", 2, "BF16", "BF16", "bf16", ("bfloat16", "bfloat", "bp16")),
            hard_inputs="huge_scores",
        ),
        Format(
            *("fp32", 4, "FP32", "FP32", "fp32"),
            aliases=("float32", "float", "single", "f32", "tf32", "32"),
        ),
        _FP8,
        replace(_FP8, name="e4m3_tensor", aliases=(), equal_scales=True),
        replace(_FP8, name="e4m3_block", aliases=(), scale_block=SCALE_BLOCK),
    )
}
DTYPE_BYTES = {name: each.nbytes for name, each in FORMATS.items()}
CACHE_DTYPES: tuple[str, ...] = get_args(CacheDtype)

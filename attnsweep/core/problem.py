"""Problem: one attention shape, its FLOPs and its minimum bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attnsweep.core.errors import ProblemError

Dtype = Literal["fp16", "bf16", "fp32", "e4m3", "e4m3_tensor", "e4m3_block"]
DTYPE_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4} | dict.fromkeys(
    ("e4m3", "e4m3_tensor", "e4m3_block"), 1
)
SCALE_BLOCK = 128
"""Keys that share one k_scale and one v_scale in e4m3_block; the last block may have fewer."""
MOST_MEMORY_BYTES = 288 * 2**30
"""Memory of the largest card there is, a B300. No card holds the tensors of a larger problem."""
LOG2E = math.log2(math.e)
"""log2(e). Kernels scale scores by it, because the hardware computes exp2, not exp."""


def ceil_div(a: int, b: int) -> int:
    """The smallest whole number that is at least a / b."""
    return -(-a // b)


_LABEL = re.compile(
    r"\(?(\d+), ?(\d+)(?:/(\d+))?, ?(\d+)(?:x(\d+))?, ?(\d+)\)?(?: +(\w+))?(?: +(full|causal))?"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention forward: O = softmax(Q Kᵀ / sqrt(head_dim)) V.

    q, o: (batch, heads, seqlen_q, head_dim) · k, v: (batch, heads_kv, seqlen_k, head_dim), all
    contiguous. Query head h reads key head h // (heads // heads_kv). The causal mask is aligned
    bottom-right: query i sees keys 0 .. i + seqlen_k - seqlen_q (FlashAttention >= 2.1).

    In e4m3, e4m3_tensor and e4m3_block, q, k and v are FP8 (1 sign, 4 exponent, 3 mantissa bits,
    no infinity) and o is bf16. A stored value times its scale is the value. The scales are three
    more inputs of a call, float32 and above 0, which a launch names as it names q, k and v:
    q_scale, k_scale, v_scale, each (batch, heads_kv). The query heads of a key head share a scale.
    e4m3_tensor: all scales of a tensor are equal. e4m3_block: k_scale and v_scale are
    (batch, heads_kv, ceil(seqlen_k / SCALE_BLOCK)), one of each block of SCALE_BLOCK keys.
    Raises ProblemError for a shape that cannot exist.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: Dtype = "fp16"
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in get_args(Dtype):
            raise ProblemError(f"unknown dtype {self.dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        if self.scaled and self.head_dim % 16:
            raise ProblemError(
                f"{self.dtype} with head_dim {self.head_dim}: FP8 tiles have rows of 16 bytes",
                hint="use a multiple of 16",
            )
        if self.heads % self.heads_kv:
            raise ProblemError(
                f"heads_kv must divide heads: {self.heads} is not a multiple of {self.heads_kv}"
            )
        if self.has_empty_rows:
            raise ProblemError(
                f"causal with seqlen_q {self.seqlen_q} > seqlen_k {self.seqlen_k}: the first "
                f"{self.seqlen_q - self.seqlen_k} queries would see no key at all",
                hint="make seqlen_k at least seqlen_q, or drop causal",
            )
        if self.min_bytes > MOST_MEMORY_BYTES:
            raise ProblemError(
                f"{self.label}: q, k, v and o need {self.min_bytes / 2**30:,.0f} GiB, and the "
                f"largest card has {MOST_MEMORY_BYTES // 2**30} GiB",
                hint="make batch, heads, seqlen or head_dim smaller",
            )

    @property
    def has_empty_rows(self) -> bool:
        """Whether the mask leaves some queries no key, which is refused so far."""
        return self.causal and self.seqlen_q > self.seqlen_k

    def query_tiles(self, block_m: int) -> int:
        """Number of tiles of block_m queries, over all heads."""
        return self.batch * self.heads * ceil_div(self.seqlen_q, block_m)

    @property
    def label(self) -> str:
        """Short, unambiguous name: `(1,16,1024,64) fp16 causal`, `(2,32/8,64x80,128) bf16 full`."""
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        seqlen = (
            f"{self.seqlen_q}"
            if self.seqlen_q == self.seqlen_k
            else f"{self.seqlen_q}x{self.seqlen_k}"
        )
        mask = "causal" if self.causal else "full"
        return f"({self.batch},{heads},{seqlen},{self.head_dim}) {self.dtype} {mask}"

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem of a label; without dtype and mask it is fp16 and full: `1,16,1024,64`.

        Raises ProblemError for any other text.
        """
        match = _LABEL.fullmatch(text.strip())
        if match is None:
            raise ProblemError(
                f"{text!r} is not a problem",
                hint="write batch, heads, seqlen, head_dim, and dtype and mask if not fp16 and "
                "full: '1,16,1024,64' or '(2,32/8,512x2048,128) bf16 causal'",
            )
        b, heads, kv, q, k, d, dtype, mask = match.groups()
        sizes = (int(b), int(heads), int(kv or heads), int(q), int(k or q), int(d))
        known: Any = dtype or "fp16"  # Problem refuses any other dtype
        return cls(*sizes, dtype=known, causal=mask == "causal")

    @property
    def scaled(self) -> bool:
        """Whether q, k and v are FP8 with scales."""
        return self.dtype.startswith("e4m3")

    @property
    def out_dtype(self) -> str:
        """Type of o: bf16 if q, k and v are FP8, otherwise theirs."""
        return "bf16" if self.scaled else self.dtype

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of a call's inputs: q, k, v, and their scales if there are any."""
        return ("q", "k", "v", *(("q_scale", "k_scale", "v_scale") if self.scaled else ()))

    def bytes_of(self, tensor: str) -> int:
        """Bytes of an input or of `o`."""
        item = 4 if tensor.endswith("_scale") else DTYPE_BYTES[self.dtype]
        if tensor == "o":
            item = DTYPE_BYTES[self.out_dtype]
        return math.prod(self.shape_of(tensor)) * item

    @property
    def scale(self) -> float:
        """The softmax scale, 1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs over all heads: the pairs that both products and exp need."""
        per_head = self.seqlen_q * self.seqlen_k
        if self.causal:
            per_head -= self.seqlen_q * (self.seqlen_q - 1) // 2
        return self.batch * self.heads * per_head

    @property
    def flops(self) -> int:
        """FLOPs of QKᵀ and PV (multiply-add = 2), without the softmax and without masked pairs."""
        return 4 * self.pairs * self.head_dim

    @property
    def min_bytes(self) -> int:
        """Bytes of the inputs read once and o written once."""
        return sum(map(self.bytes_of, (*self.inputs, "o")))

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Shape of an input or of `o`: four sizes, but of scales two or three."""
        if tensor.endswith("_scale"):
            blocks = self.dtype == "e4m3_block" and tensor != "q_scale"
            per = (ceil_div(self.seqlen_k, SCALE_BLOCK),) if blocks else ()
            return (self.batch, self.heads_kv, *per)
        if tensor in ("q", "o"):
            return (self.batch, self.heads, self.seqlen_q, self.head_dim)
        return (self.batch, self.heads_kv, self.seqlen_k, self.head_dim)


Value = int | bool | str
"""Value of a parameter. It reaches the preprocessor, so it is never a float."""

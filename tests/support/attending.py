"""The forward kernel in PyTorch, for the fake driver: what a launch computes on the CPU."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch


def tensor_of(tensor_map: dict[str, Any]) -> Any:
    """The tensor that a map describes: (batch, heads, seqlen, head_dim), in bf16."""
    sizes, strides = tensor_map["dims"][::-1], (*tensor_map["strides"][::-1], 2)
    extent = 2 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = (ctypes.c_uint8 * extent).from_address(tensor_map["pointer"])
    view: Any = np.ndarray(sizes, np.int16, memory, strides=strides)
    return torch.from_numpy(view).view(torch.bfloat16)


class Kernel:
    """What a launch of stage `fwd` computes. causal: which machine code was compiled."""

    def __init__(self, causal: bool = False) -> None:
        self.causal = causal

    def __call__(self, launch: dict[str, Any]) -> None:
        """Write the output, and the log-sum-exp if the launch has a place for it."""
        q, k, v, o = map(tensor_of, launch["values"][:4])
        lse, _, heads, group, _, seqlen_q, seqlen_k, factor, per_batch = launch["values"][4:13]
        assert (heads, per_batch) == (q.shape[0] * q.shape[1], q.shape[1])
        assert (seqlen_q, seqlen_k) == (q.shape[2], k.shape[2])
        k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
        scores = q.float() @ k.mT * (factor / math.log2(math.e))
        if self.causal:
            hidden = ~torch.ones_like(scores, dtype=torch.bool).tril()
            scores = scores.masked_fill(hidden, -math.inf)
        o.copy_(torch.softmax(scores, -1) @ v)
        if lse:
            memory = (ctypes.c_float * (heads * seqlen_q)).from_address(lse)
            rows: Any = np.ndarray((heads * seqlen_q,), np.float32, memory)
            rows[:] = scores.logsumexp(-1).ravel()

"""What flash_attn's functions take that a package does not compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def check(
    tensors: Sequence[torch.Tensor],
    alibi_slopes: Any,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Any = None,
) -> None:
    """Raise NotImplementedError for what would change the result. tensors: q, k and v."""
    unknown = {
        "alibi_slopes": alibi_slopes is not None,
        "return_attn_probs": return_attn_probs,
        "block_table": block_table is not None,
    }
    for name, given in unknown.items():
        if given:
            raise NotImplementedError(f"{name} is not computed here: call flash_attn itself")
    if deterministic and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise NotImplementedError(
            "the gradients are those of PyTorch's own attention: leave deterministic out, and call "
            "torch.use_deterministic_algorithms(True)"
        )

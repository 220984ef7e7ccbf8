"""Calls of PyTorch's attention, and how often each kind was recorded."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from attnsweep.serve.recorded_calls import Recorded, read
from attnsweep.serve.recorder.log import Log
from attnsweep.serve.recorder.recorder import Recording

OWN = F.scaled_dot_product_attention


def qkv(*shape: int, **options: Any) -> tuple[torch.Tensor, ...]:
    """Tensors of one shape, (1, 2, 64, 32) if none is given."""
    return tuple(torch.randn(3, *(shape or (1, 2, 64, 32)), **options))


def recorded(tmp_path: Path, program: Callable[[Recording], object], every_call: bool = False) -> Recorded:
    """What is recorded of a program; at its end all of PyTorch's is in its place."""
    folder = tmp_path / secrets.token_hex(4)
    folder.mkdir()
    recording = Recording(Log(folder), every_call)
    try:
        program(recording)
    finally:
        recording.stop()
    assert F.scaled_dot_product_attention is OWN
    got = read(folder)
    assert not got.errors
    return got


def counts(tmp_path: Path, program: Callable[[Recording], object], **options: Any) -> list[int]:
    """How often each kind of a program's calls was recorded, in the order of first calls."""
    return [n for _, n in recorded(tmp_path, program, **options).calls]


def every_change(q: Any, k: Any, v: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Calls that differ from the first in one thing each, which makes another kind."""
    mask = torch.zeros(64, 64)
    long = torch.randn(3, 1, 2, 65, 32)
    yield {}, (q, k, v)
    yield {"is_causal": True}, (q, k, v)
    yield {"is_causal": True}, (q, *long[1:])
    yield {"dropout_p": 0.5}, (q, k, v)
    yield {"scale": 0.5}, (q, k, v)
    yield {"attn_mask": mask}, (q, k, v)
    yield {"attn_mask": mask, "scale": 0.5}, (q, k, v)
    yield {}, (q.double(), k.double(), v.double())
    yield {}, (q.bfloat16(), k.bfloat16(), v.bfloat16())
    yield {}, tuple(long)
    yield {}, (q, *long[1:])
    yield {}, (q.mT.contiguous().mT, k, v)
    yield {}, (q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    yield {}, (q, k.clone().requires_grad_(), v)
    yield {"enable_gqa": True}, (q, k[:, :1], v[:, :1])

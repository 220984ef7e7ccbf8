"""Calls of PyTorch's attention on the CPU, and how often each kind was recorded."""

from __future__ import annotations

import contextlib
import gc
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from attnsweep.serve.recorded_calls import read
from attnsweep.serve.recorder import eager
from attnsweep.serve.recorder.eager import CALM
from attnsweep.serve.recorder.recorder import Recording

OWN = F.scaled_dot_product_attention
WARM = CALM + 2
"""Calls of one kind after which the dispatcher's kernels are out: it is described twice."""


@contextlib.contextmanager
def given_back(held: bool = False) -> Iterator[None]:
    """Begin with nothing compiled, and end with all of PyTorch's in its place.

    held: whether what holds PyTorch's function keeps the kernels in, as other tests may hold it.
    """
    torch._dynamo.reset()  # something that was compiled before would keep the kernels in
    gc.collect()
    with contextlib.ExitStack() as stack:
        if not held:
            stack.enter_context(mock.patch.object(eager, "is_held", return_value=False))
        yield
    assert F.scaled_dot_product_attention is OWN
    assert type(torch.ops.aten._scaled_dot_product_attention_math) is torch._ops.OpOverloadPacket


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    """Tensors of one shape, (1, 2, 64, 32) if none is given."""
    return tuple(torch.randn(3, *(shape or (1, 2, 64, 32))))


def warm(recording: Recording, *tensors: torch.Tensor, n: int = WARM) -> None:
    """Calls of one kind, after which the kernels are out."""
    for _ in range(n):
        F.scaled_dot_product_attention(*(tensors or qkv()))
    assert recording.eager.gone or not recording.eager.watches


def counted(
    tmp_path: Path, program: Callable[[Recording], object], quick: bool = True
) -> list[tuple[str, int]]:
    """How often each kind of a program's calls was recorded, as it is read again.

    quick: whether calls may be counted without PyTorch's dispatcher.
    """
    folder = tmp_path / secrets.token_hex(4)
    folder.mkdir()
    recording = Recording(folder)
    try:
        if not quick:
            recording.eager.give_way()
        program(recording)
    finally:
        recording.stop()
    got = read(folder)
    assert not got.errors
    return sorted((json.dumps(call, sort_keys=True), n) for call, n in got.calls)


def counts(
    tmp_path: Path, calls: Iterable[tuple[dict[str, Any], Any]], quick: bool = True
) -> list[tuple[str, int]]:
    """`counted` of calls: options, and q, k and v."""

    def program(_: Recording) -> None:
        for options, qkv in calls:
            F.scaled_dot_product_attention(*qkv, **options)

    return counted(tmp_path, program, quick)


def every_change(q: Any, k: Any, v: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Calls that differ from the first in one thing each."""
    mask = torch.zeros(64, 64)
    long = torch.randn(3, 1, 2, 65, 32)
    yield {}, (q, k, v)
    yield {"is_causal": True}, (q, k, v)
    yield {"is_causal": True}, (q, *long[1:])
    yield {"dropout_p": 0.5}, (q, k, v)
    yield {"scale": 0.5}, (q, k, v)
    yield {"scale": 0.25}, (q, k, v)
    yield {"attn_mask": mask}, (q, k, v)
    yield {"attn_mask": mask, "scale": 0.5}, (q, k, v)
    yield {}, (q.double(), k.double(), v.double())
    yield {}, (q.bfloat16(), k.bfloat16(), v.bfloat16())
    yield {}, tuple(long)
    yield {}, (q, *long[1:])
    yield {}, (q.mT.contiguous().mT, k, v)
    yield {}, (q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    yield {}, (q.clone().requires_grad_(), k, v)
    yield {}, (q, k.clone().requires_grad_(), v)
    yield {}, (torch.nn.Parameter(q.clone()), k, v)
    yield {}, (q, q, q)
    yield {}, (q, k, k)
    yield {"enable_gqa": True}, (q, k[:, :1], v[:, :1])

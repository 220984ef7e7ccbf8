"""Python callables as baselines: `module:function`, and our own attention in bf16."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Builder, Unavailable, Way
from attnsweep.core.problem import SCALE_BLOCK, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


@contextmanager
def _from_here() -> Iterator[None]:
    """Modules of the working directory are found too, as `python -m` finds them."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def source_digest(name: str) -> str | None:
    """SHA-256 of the file that defines a callable; None if it is not found.

    Rows of a changed file are measured again. What that file imports is not in the digest.
    """
    importlib.invalidate_caches()
    with suppress(ImportError, AttributeError, ValueError, OSError), _from_here():
        spec = importlib.util.find_spec(name.partition(":")[0])
        if spec is not None and spec.origin is not None:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return None


def ways_of(name: str) -> Builder:
    """Call `module:function` as f(q, k, v, problem=problem), or f(q, k, v) if it takes no problem.

    q, k, v: contiguous CUDA tensors (batch, heads, seqlen, head_dim) of the problem's dtype; k and
    v with its heads_kv, and v with head_dim_v if the problem has one. It returns o as such a
    tensor, with v's columns. For a backward problem it is called with q, k, v, o, lse, do and
    returns (dq, dk, dv). A CUDA graph must be able to capture it, so that it may not wait for the
    device.
    """

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        module, _, attribute = name.partition(":")
        try:
            with _from_here():
                function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a module may raise anything while it is imported
            raise Unavailable(f"cannot import {name}: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise Unavailable(f"{name} is no callable but {type(function).__name__}")
        options = {"problem": problem} if _takes_problem(function) else {}

        def forward(*inputs: Any) -> Any:
            return function(*inputs, **options)

        return [Way(forward)]

    return build


def _takes_problem(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return False
    return any(p.name == "problem" or p.kind is p.VAR_KEYWORD for p in parameters)


def own_bf16(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    """Our attention in bf16, as it comes with attnsweep, on the values that FP8 inputs stand for.

    Raises Unavailable if PyTorch's own attention would answer instead.
    """
    from attnsweep import attention, explain_attention

    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise Unavailable("attention has a causal mask aligned top-left alone")
    bf16 = torch.bfloat16
    options = {"is_causal": problem.causal, "enable_gqa": problem.heads != problem.heads_kv}

    def convert(*inputs: Any) -> tuple[Any, ...]:
        return tuple(
            (x.float() * _spread(scale, x, problem)).to(bf16).contiguous()
            for x, scale in zip(inputs[:3], inputs[3:], strict=True)
        )

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, **options)

    alike = [torch.empty(problem.shape_of(t), dtype=bf16, device="cuda") for t in "qkv"]
    why = explain_attention(*alike, **options)
    if why.kernel is None:
        raise Unavailable(f"no kernel of ours in bf16 serves it: {why.reason}")
    return [Way(forward, convert)]


def _spread(scale: Any, x: Any, problem: Problem) -> Any:
    """Scales as a tensor that broadcasts with x, (batch, heads, seqlen, head_dim)."""
    if len(scale.shape) == 3:
        return scale.repeat_interleave(SCALE_BLOCK, dim=2)[:, :, : problem.seqlen_k, None]
    each = scale.repeat_interleave(x.shape[1] // problem.heads_kv, dim=1)
    return each[:, :, None, None]

"""Python callables, `module:function` or `file.py:function`, and our own attention in bf16."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Builder, Unavailable, Way
from attnsweep.core.callables import Asked
from attnsweep.core.problem import Problem
from attnsweep.core.user_code import BoundFunction, beside, built, imported, watched

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


DOES_NOT = "does not support it"
"""In the reason if a callable says so of a problem."""


def ways_of(name: str) -> Builder:
    """Call `module:function` as f(q, k, v, problem=problem), or f(q, k, v) if it takes no problem.

    q, k, v: CUDA tensors (batch, heads, seqlen, head_dim) of the problem's dtype, contiguous; k and
    v with its heads_kv, and v with head_dim_v if the problem has one; or views of these as
    (batch, seqlen, heads, head_dim), if asked for. It returns o as such a tensor, with v's columns,
    or (o, lse), or writes to the tensors that its parameters `out` and `lse` get. lse: natural
    log-sum-exps of (batch, heads, seqlen) in float32. In FP8, q_scale, k_scale and v_scale are
    keywords; so are `causal`, `is_causal`, `scale`, `sm_scale` and `softmax_scale` of a function
    that takes no problem. For a backward problem it is called with q, k, v, o, lse, do and returns
    (dq, dk, dv). A factory is called with `problem` once, and returns what is called so.

    Beside the function, its module, or the function itself, may have `supports(problem)`, which
    returns True or a reason, and `prepare(problem)`, which may compile and tune. Neither is timed.
    """
    asked = Asked.of(name)

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        module, function = imported(asked.call)
        prepare_for(name, module, function, problem)
        if asked.factory:
            function = built(name, function, problem, {})
        return [Way(BoundFunction(torch, problem, name, function))]

    return build


def prepare_for(name: str, module: Any, function: Any, problem: Problem) -> None:
    """Ask a callable whether it does a problem, and have it prepare for it. Raises Unavailable."""
    with watched(f"{name}: supports or prepare"):
        supports = beside(module, function, "supports")
        answer = supports(problem) if supports else True
        if answer is True and (prepare := beside(module, function, "prepare")):
            prepare(problem)
    if answer is not True:
        raise Unavailable(f"{name} {DOES_NOT}: {str(answer)[:300]}")


def says_what_it_supports(name: str) -> bool:
    """Whether a callable has `supports`. Raises Unavailable."""
    return beside(*imported(Asked.of(name).call), "supports") is not None


_FLAGS = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
)


def flags_of(torch: Any) -> dict[str, Any]:
    """Settings of PyTorch that would change what others compute, by their names."""
    found = {name: operator.attrgetter(name)(torch) for name in _FLAGS}
    return found | {
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def restore_flags(torch: Any, before: Mapping[str, Any]) -> list[str]:
    """Set PyTorch as it was before; returns the names of what had changed."""
    changed = [name for name, value in flags_of(torch).items() if value != before[name]]
    if not changed:
        return []
    for name in set(changed) & set(_FLAGS):
        owner, _, flag = name.rpartition(".")
        setattr(operator.attrgetter(owner)(torch), flag, before[name])
    torch.set_default_dtype(before["default dtype"])
    torch.use_deterministic_algorithms(before["deterministic algorithms"])
    torch.set_grad_enabled(before["grad mode"])
    return changed


def breach(torch: Any, made: Any, shape: Sequence[int], like: Any, inputs: Sequence[Any]) -> str:
    """Say what is wrong with a callable's output apart from its values; empty if nothing is.

    shape: the output's. like: a tensor of its dtype and device. inputs: those of the call.
    """
    if type(made) is not torch.Tensor:
        return f"returned {type(made).__name__} in place of a torch.Tensor"
    if tuple(made.shape) != tuple(shape):
        return f"returned the shape {tuple(made.shape)}, not {tuple(shape)}"
    if (made.dtype, made.device) != (like.dtype, like.device):
        of_like = f"{like.dtype} on {like.device}"
        return f"returned {made.dtype} on {made.device}, not {of_like}"
    if made.layout != torch.strided:
        return f"returned a tensor of layout {made.layout}"
    if memory_of(made) in {memory_of(given) for given in inputs}:
        return "returned memory of an input"
    return ""


def memory_of(tensor: Any) -> object:
    """The address of a tensor's memory; anything else as it is."""
    with suppress(Exception):  # a layout without storage, or no tensor
        return int(tensor.untyped_storage().data_ptr())
    return id(tensor)

"""Our own attention as a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Unavailable, Way
from attnsweep.core.problem import SCALE_BLOCK, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import Session


def own_bf16(torch: Any, problem: Problem, session: Session) -> list[Way]:
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

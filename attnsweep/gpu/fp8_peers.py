"""Peers of a problem in FP8: FlashAttention-3, cuDNN, and our own attention in bf16.

The first two take the same bytes and scales as our kernels. Only `peers` imports this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnsweep.gpu import cudnn_graph
from attnsweep.gpu.way import Unavailable, Way
from attnsweep.problem import SCALE_BLOCK, Problem

if TYPE_CHECKING:
    from attnsweep.gpu.device import Session

_E4M3_MAX = 448.0
_FLASH_SCALES = ("q_descale", "k_descale", "v_descale")


def flash_3(torch: Any, attention: Callable[[], Any], problem: Problem, *, spare: bool) -> Way:
    """FlashAttention-3 in FP8, with scales (batch, heads_kv); (batch, seqlen, heads, head_dim).

    attention: imports and returns its function. A problem that is not in FP8 is converted to it,
    and a problem that is has its bytes laid out anew, before any call is timed.
    """
    if problem.dtype == "e4m3_block":
        raise Unavailable(
            f"FlashAttention-3 has one scale of each head of keys, not of each {SCALE_BLOCK} keys"
        )

    def quantise(*inputs: Any) -> tuple[Any, ...]:
        tensors, descales = [], []
        for x in inputs:
            x = x.transpose(1, 2)
            batch, _, heads, _ = x.shape
            largest = x.abs().float().amax(dim=(1, 3)).view(batch, problem.heads_kv, -1)
            descale = (largest.amax(dim=2) / _E4M3_MAX).clamp(min=1e-12)
            each = descale.repeat_interleave(heads // problem.heads_kv, dim=1)
            scaled = x.float() / each[:, None, :, None]
            tensors.append(scaled.to(torch.float8_e4m3fn).contiguous())
            descales.append(descale.contiguous())
        return (*tensors, *descales)

    def lay_out(*inputs: Any) -> tuple[Any, ...]:
        return (*(x.transpose(1, 2).contiguous() for x in inputs[:3]), *inputs[3:])

    def forward(q: Any, k: Any, v: Any, *descales: Any) -> Any:
        scales = dict(zip(_FLASH_SCALES, descales, strict=True))
        out = attention()(q, k, v, causal=problem.causal, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Way(forward, lay_out if problem.scaled else quantise, spare)


def cudnn(torch: Any, module: Any, problem: Problem, stream: int) -> list[Way]:
    """cuDNN in FP8 through its own API, in either layout, with its output in bf16 if it has that.

    Otherwise, also if such a call fails, the output is e4m3 with the scale of v, which no output
    exceeds. Raises Unavailable, or what cuDNN raises if none of its engines does the problem.
    """
    if problem.dtype != "e4m3_tensor":
        raise Unavailable("cuDNN has one scale of each tensor: dtype e4m3_tensor")
    ways: list[Way] = []
    failed: list[Exception] = []
    for kind in ("BFLOAT16", "FP8_E4M3"):
        spare = bool(ways)
        for layout in cudnn_graph.LAYOUTS:
            try:
                way = cudnn_graph.build_fp8(torch, module, problem, stream, layout, kind)
                ways.append(replace(way, spare=spare))
            except Exception as error:  # cuDNN says here that no engine does this problem
                failed.append(error)
    if not ways:
        raise failed[-1]
    return ways


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

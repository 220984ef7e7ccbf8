"""The baselines that PyTorch brings: each backend of SDPA, and unfused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import TORCH, Builder, Unavailable, Way
from attnsweep.core import drawn
from attnsweep.core.problem import CAUSAL, DTYPE_BYTES, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"PyTorch is not installed: {TORCH.fix}") from error
    if not torch.cuda.is_available():
        raise Unavailable("this PyTorch sees no CUDA GPU")
    return torch


def hidden_keys(torch: Any, problem: Problem, device: str = "cuda") -> Any:
    """A boolean tensor of the pairs that no query sees: (seqlen_q, seqlen_k), or of each item.

    Of a padded problem, or a boolean mask, it has four dimensions, as models pass it.
    """
    if problem.mask.boolean and problem.layout.kind == "dense":
        return ~torch.from_numpy(drawn.tensor(problem)).to(device)
    low, high = problem.diagonals
    rows = torch.arange(problem.seqlen_q, device=device)[:, None]
    keys = torch.arange(problem.seqlen_k, device=device)
    after = keys - rows
    hidden = (after < low) | (after > high)
    if problem.mask.of_item:
        hidden = hidden.expand(problem.batch, 1, *hidden.shape).contiguous()
    if problem.layout.kind != "padded":
        return hidden
    first, end = torch.tensor(problem.key_ranges, device=device).T[:, :, None, None, None]
    return hidden | (keys < first) | (keys >= end)


def _sdpa(backend: str) -> Builder:
    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)
        attention = torch.nn.functional.scaled_dot_product_attention
        # PyTorch aligns is_causal top-left.
        is_causal = problem.layout.kind != "padded" and problem.mask == replace(
            CAUSAL, top_left=problem.seqlen_q != problem.seqlen_k
        )
        options: dict[str, Any] = {"is_causal": is_causal}
        if problem.heads != problem.heads_kv:
            options["enable_gqa"] = True
        masked = problem.kind in ("window", "boolean", "padded") and not is_causal
        if masked:
            if backend == "FLASH_ATTENTION":
                raise Unavailable("PyTorch's flash attention takes no mask but causal")
            options |= {"attn_mask": ~hidden_keys(torch, problem)}
        elif problem.causal and not is_causal:
            if backend == "CUDNN_ATTENTION":
                raise Unavailable("PyTorch reaches cuDNN only with a causal mask aligned top-left")
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
            options |= {"attn_mask": mask}

        def forward(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
            own = (
                options if bias is None else options | {"attn_mask": bias[..., : problem.seqlen_k]}
            )
            with sdpa_kernel([chosen]):
                return attention(q, k, v, **own)

        def repeated(q: Any, k: Any, v: Any) -> Any:
            group = problem.heads // problem.heads_kv
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            with sdpa_kernel([chosen]):
                return attention(q, k, v, attn_mask=options["attn_mask"])

        ways = [Way(forward)]
        if masked and "enable_gqa" in options and backend == "EFFICIENT_ATTENTION":
            ways.append(Way(repeated))  # as models call it, since it takes no grouped heads
        return ways

    return build


def _unfused(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    item = DTYPE_BYTES[problem.dtype]
    if scores * item * 4 > session.free_bytes:
        raise Unavailable(f"its scores need four times {scores * item / 2**30:.0f} GiB")
    mask = None if problem.kind == "full" else hidden_keys(torch, problem)
    group, how = problem.heads // problem.heads_kv, problem.scores

    def forward(q: Any, k: Any, v: Any, *beside: Any) -> Any:
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) * problem.scale
        if how.softcap:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        if how.bias is not None:
            scores = scores + beside[0][..., : problem.seqlen_k]
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        if how.sinks:  # as transformers' models have it
            sinks = beside[-1].to(scores.dtype)[None, :, None, None]
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        return torch.matmul(weights[..., : problem.seqlen_k], v)

    return [Way(forward)]

"""Any numbers of new tokens on a paged cache: `flash_attn_varlen_func` with a block_table.

Serving engines call it once a layer for a step: requests that decode have one token, or a few, and
those whose prompt is read have many. Tokens of all requests are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnsweep.serve.paged_attention import again, answered, is_compiling, refuse, remember
from attnsweep.serve.paged_call import FP8, UNMASKED, check_output, check_values, understood


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    q_v: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    s_aux: torch.Tensor | None = None,
    fa_version: int = 3,
    validate: bool = False,
) -> Any:
    """Attention of packed tokens with a paged cache, with the arguments that vLLM gives.

    q: (tokens, heads, head_dim), fp16 or bf16, of which request i has those from cu_seqlens_q[i] to
    cu_seqlens_q[i + 1], at most max_seqlen_q. k, v: (pages, page_size, heads_kv, head_dim), of q's
    dtype or float8_e4m3fn. block_table: int32 (batch, blocks). seqused_k: int32 (batch,), the keys
    of each request, those of its tokens counted; without, cu_seqlens_k says how many. Lengths,
    numbers of tokens and the table stay on the device. s_aux: (heads,), one more score of each
    head. out: where the output goes. Scales count for an FP8 cache alone.

    The last token of a request sees all its keys. Returns the output, (tokens, heads, head_dim), or
    (output, lse) with lse (heads, tokens). q_v: as `qv` of flash_attn_with_kvcache. Raises
    NotImplementedError for dropout, alibi_slopes, return_attn_probs, and FP8 queries.
    """
    scales = (k_descale, v_descale) if k.dtype == FP8 else (None, None)
    plain = dropout_p == 0 and alibi_slopes is q_v is None and not return_attn_probs
    given, numbers = (q, k, v, block_table, seqused_k, *scales, s_aux, out), None
    if (
        plain
        and not validate
        and not (cu_seqlens_q is None or seqused_k is None)
        and not is_compiling()
    ):
        rest = (window_size, softcap, return_softmax_lse)
        numbers = (max_seqlen_q, softmax_scale, causal, *rest)
        answer = again(numbers, given, None, cu_seqlens_q)
        if answer is not None:
            return answer
    refuse(
        "flash_attn_varlen_func on a block_table",
        {
            "dropout_p": bool(dropout_p),
            "alibi_slopes": alibi_slopes is not None,
            "return_attn_probs: ask for return_softmax_lse": return_attn_probs,
            "q_descale: queries are fp16 or bf16": q_descale is not None and q.dtype == FP8,
        },
    )
    if cu_seqlens_q is None or max_seqlen_q is None:
        raise TypeError("a packed call has cu_seqlens_q and max_seqlen_q")
    lengths = seqused_k
    if lengths is None:
        if cu_seqlens_k is None:
            raise TypeError("the keys of requests are told by seqused_k, or by cu_seqlens_k")
        lengths = cu_seqlens_k.diff()
    how = (*scales, s_aux, softmax_scale, softcap, causal, window_size or UNMASKED)
    packed = (cu_seqlens_q, max_seqlen_q)
    call = understood(q, k, v, lengths, block_table, *how, return_softmax_lse, *packed, q_v)
    check_output(call, out)
    if validate:
        check_values(call)
    made, lse = answered(call, None, out)
    if numbers is not None:
        remember(numbers, call, given, None, cu_seqlens_q)
    return (made, lse) if call.lse else made

"""Docstrings of `attention` and `attention_varlen`, in every package and here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])
MASKS_AND_SCORES = """
    These are masks without a tensor of the mask's size. A query sees what all of them let it see;
    one that sees nothing has output 0. Values of hidden keys are multiplied by 0, and so must be
    finite. Beside attn_mask they are refused.

    window: (left, right), the keys before and after a query's own, which is key i + seqlen_k -
    seqlen_q of query i; None or -1: all. causal_offset: query i sees the keys up to
    i + causal_offset: 0 is is_causal, whose place it takes, and seqlen_k - seqlen_q is aligned
    bottom-right. key_lengths: int32 or int64 on query's device: (batch,), how many keys each item
    of the batch has, or (batch, 2), the first and the one after the last. They are not looked at on
    the host: the device takes them for at least 0 and at most seqlen_k. Raises TypeError or
    ValueError for these three.

    softcap: scores s become softcap * tanh(s / softcap) before the softmax, as in Gemma 2; None or
    0: they stay. sinks: (heads,), a score of each query head that takes weight from the keys and
    has no value, as in gpt-oss. Both stand beside any mask. Where no kernel serves such a call,
    PyTorch's operators compute it in float32, with gradients.

    cache: False scans attn_mask or key_lengths anew, which were written to where PyTorch does not
    see it: through `.data`, DLPack or raw kernels, or by a replayed CUDA graph.
    """
PACKED = """

    query: (tokens_q, heads, head_dim); key, value: (tokens_k, heads_kv, head_dim), where heads_kv
    divides heads. cu_seqlens_q, cu_seqlens_k: int32 or int64 on query's device, (sequences + 1,),
    where each sequence begins and where the last one ends. They are not looked at on the host.
    max_seqlen_q, max_seqlen_k: tokens of the longest, which only PyTorch's flash attention needs:
    it takes longer without them where it serves a call. Queries and keys beyond the last sequence
    are no one's.

    causal and window are aligned to the end of each sequence, as in FlashAttention: query i of a
    sequence of seqlen_q queries and seqlen_k keys has key i + seqlen_k - seqlen_q for its own. The
    others are as `attention` has them. Raises TypeError or ValueError for what has no such meaning.
    """


def ends_with(text: str) -> Callable[[_Function], _Function]:
    """Add a text to the docstring of a function."""

    def add(function: _Function) -> _Function:
        function.__doc__ = f"{function.__doc__ or ''}{text}"
        return function

    return add

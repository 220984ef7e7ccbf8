"""Tuned attention kernels for PyTorch, exported by attnsweep.

`attention` has the signature and the meaning of torch.nn.functional.scaled_dot_product_attention.
`attention_fp8` serves FP8 tensors, if the package has such kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import handle_torch_function

from . import transformers_hook
from .dispatch import Explanation
from .docstrings import MASKS_AND_SCORES, PACKED, ends_with
from .fp8_operator import Fp8Operator
from .intervals import sides_of_flash_attn
from .operator import PASSING_ON, SHORT, Operator
from .packed import VarlenOperator
from .pytorch_calls import attend, watched
from .sdpa_patch import PatchedAttention, Routing, Switched, exports, flash_allowed, sdpa
from .table import PackageError, read_table

# In attnsweep itself this file is a module of the package.
_name = __name__.removesuffix(".serve.runtime.package")
_operator = Operator(read_table(Path(__file__).parent), _name)
_varlen = VarlenOperator(_operator)
_fp8 = Fp8Operator(_operator)
# Looked up once: each is asked in every call.
_Tensor = torch.Tensor
# is_compiling asks TorchScript first, which costs more where a step has emptied the caches. What
# that alone knows, a program that is exported without the compiler, has no tensors of this class.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled, _SHORT = torch.is_grad_enabled, SHORT.code
_in_function_mode = torch._C._is_torch_function_mode_enabled
_counts, _shorts, _settled = _operator.counts, _operator.shorts, _operator.short_steps.settled
_frame = sys._getframe
_compiled = _operator.traced.ops.attention_sdpa
__version__ = _operator.table.attnsweep


def serve_by(operator: Operator) -> None:
    """Replace the operator that serves the calls, by one of another driver or for other devices."""
    global _operator, _varlen, _fp8, _counts, _shorts, _settled, _compiled
    _operator, _varlen, _fp8 = operator, VarlenOperator(operator), Fp8Operator(operator)
    _counts, _shorts, _settled = operator.counts, operator.shorts, operator.short_steps.settled
    _compiled = operator.traced.ops.attention_sdpa


# Functions, since a model that has one as an attribute can be copied and pickled.
@ends_with(MASKS_AND_SCORES)
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal: bool = False,
    window: Any = None,
    causal_offset: int | None = None,
    key_lengths: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    cache: bool = True,
) -> Any:
    """scaled_dot_product_attention, by a tuned kernel where one is known to be faster.

    query: (batch, heads, seqlen_q, head_dim); key, value: (batch, heads_kv, seqlen_k, head_dim),
    value's may be another; any strides with contiguous head_dim. causal: another name of is_causal.
    `explain` says which kernel a call gets.
    """
    is_causal = True if causal else is_causal
    if cache and window is causal_offset is key_lengths is softcap is sinks is None:
        return _operator.attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    others = {"window": window, "causal_offset": causal_offset, "key_lengths": key_lengths}
    return _operator.attention(*given, **others, softcap=softcap, sinks=sinks, cache=cache)


@ends_with(PACKED)
def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    cache: bool = True,
) -> Any:
    """Attention of sequences of any lengths, one behind the other, each by itself."""
    options: Any = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    given = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen.attention(*given, **options, sinks=sinks, dropout_p=dropout_p, cache=cache)


def _refuse_others(
    tensors: tuple[torch.Tensor, ...],
    alibi_slopes: Any,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Any = None,
) -> None:
    """Raise NotImplementedError for what flash_attn's functions take and we do not compute."""
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


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`attention` with the arguments of the function of that name in the package flash_attn.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim); causal and
    window_size are aligned bottom-right. Raises NotImplementedError for alibi_slopes and
    return_attn_probs, and for deterministic where gradients are recorded.
    """
    _refuse_others((q, k, v), alibi_slopes, deterministic, return_attn_probs)
    window_size = sides_of_flash_attn(window_size)
    how: Any = {"dropout_p": dropout_p, "scale": softmax_scale, "enable_gqa": True}
    how |= {"softcap": softcap or None}
    if causal and window_size[0] == -1 and q.shape[1] == k.shape[1]:
        how |= {"is_causal": True}
    elif causal or window_size != (-1, -1):
        how |= {"window": (window_size[0], 0) if causal else window_size}
    out = _operator.attention(*(each.transpose(1, 2) for each in (q, k, v)), **how)
    return out.transpose(1, 2).contiguous()


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """`attention_varlen` with the arguments of the function of that name in flash_attn.

    Raises NotImplementedError as `flash_attn_func`, and for block_table.
    """
    _refuse_others((q, k, v), alibi_slopes, deterministic, return_attn_probs, block_table)
    how: Any = {"dropout_p": dropout_p, "scale": softmax_scale, "causal": causal}
    how |= {
        "window": sides_of_flash_attn(window_size),
        "softcap": softcap,
        "sinks": None,
        "cache": True,
    }
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen.attention(*given, **how).contiguous()


def explain(*args: Any, **options: Any) -> Explanation:
    """Which kernel `attention` would call with these arguments, and why; launches nothing."""
    return _operator.explain(*args, **options)


def explain_varlen(
    *args: Any,
    causal: bool = False,
    window: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
) -> Explanation:
    """Which kernel a call of `attention_varlen` gets, and why; args: its tensors."""
    options: Any = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    return _varlen.explain(*args, **options, sinks=sinks, dropout_p=dropout_p)


def attention_fp8(
    query: Any,
    key: Any,
    value: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of torch.float8_e4m3fn tensors by a tuned kernel; the output is bfloat16.

    query: (batch, heads, seqlen_q, head_dim); key, value: (batch, heads_kv, seqlen_k, head_dim);
    contiguous. A number times its scale is its value. Scales: numbers above 0, or float32 tensors
    on the same device, of one element or (batch, heads_kv); of k and v also (batch, heads_kv,
    ceil(seqlen_k / 128)), one of each 128 keys. Values of tensors of scales are not looked at:
    they must be finite and above 0. causal needs as many queries as keys.

    There is no other way to serve a call, so what no kernel serves raises: TypeError or ValueError
    for arguments, PackageError for a GPU or a kind of call that was not tuned. No gradients.
    """
    given = (query, key, value, q_scale, k_scale, v_scale)
    return _fp8.attention(*given, causal=causal, scale=scale, enable_gqa=enable_gqa)


def explain_fp8(*args: Any, **options: Any) -> Explanation:
    """Which kernel `attention_fp8` would call with these arguments, and why; raises as it does."""
    return _fp8.explain(*args, **options)


def counters() -> dict[str, int]:
    """Calls so far by what served them: `kernel`, or the reason for PyTorch's own attention.

    `kernel_fp8` counts those of `attention_fp8`.
    """
    return _operator.counters() | _fp8.counters()


PASSING_ON |= {attention.__code__, flash_attn_func.__code__}


class _Routed(PatchedAttention):
    """`attention` while the package is enabled, and otherwise PyTorch's own.

    PyTorch's also where torch.nn.attention.sdpa_kernel asks for other backends than flash.
    """

    __slots__ = ()

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        # As in `Operator.attention`, without frames of Python between, and with as few questions as
        # can be: each takes 0.3 to 0.8 us of a step of 150 on the host of an H100. A compiler asks
        # again before each call what it sees asked here. What this does not take, `Traced.call`
        # decides; one function for both would ask six things more. Numbers are looked at, so that
        # one that the device alone knows ends a graph, as it does at PyTorch's own.
        if _in_function_mode():  # it is told of the call, as PyTorch tells of its own
            if _routing.on:
                given = (query, key, value, attn_mask, dropout_p, is_causal)
                names: Any = {"scale": scale, "enable_gqa": enable_gqa}
                tensors = given[: 3 if attn_mask is None else 4]
                return handle_torch_function(self, tensors, *given, **names)
        elif _is_compiling():
            if (
                type(query) is type(key) is type(value) is _Tensor
                and (attn_mask is None or type(attn_mask) is _Tensor)
                and (scale is None or (type(scale) is float and abs(scale) < 1e30))
                and (0.0 <= dropout_p <= 1.0) is True  # a tensor's answer is a tensor
                and (is_causal is True or is_causal is False)
                and (enable_gqa is True or enable_gqa is False)
                and query.dim() == 4
                and not exports._is_exporting_flag
                and _routing.on
                and flash_allowed()
            ):
                return _compiled(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
        elif attn_mask is None and type(query) is _Tensor and query.requires_grad:
            try:
                place = _frame(1)
                at = (id(place.f_code) << 24) + place.f_lasti
                # They have no strides: to ask what they are like would end the process.
                nested = query.is_nested or key.is_nested or value.is_nested
                for alike, causal, _, backend in () if nested else _settled.get(at, ()):
                    if (
                        causal is is_causal
                        and alike(query, key, value)
                        and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
                        and _is_grad_enabled()
                        and _routing.on
                    ):
                        _counts[_SHORT] += 1
                        dropout_p = -0.0 if dropout_p == 0.0 else dropout_p  # as `attend` does
                        if scale is None and enable_gqa is False:  # names take PyTorch 0.2 us
                            out = sdpa(query, key, value, None, dropout_p, is_causal)
                        else:
                            names = {"scale": scale, "enable_gqa": enable_gqa}
                            out = sdpa(query, key, value, None, dropout_p, is_causal, **names)
                        if backend is None or type(out.grad_fn) is backend:
                            return out
                        return watched(out, query, key, value)
                short = not nested and (
                    query.numel() * key.shape[-2] < _routing.short_work
                    or ((query.shape, key.shape, is_causal) in _shorts and _routing.on)
                )
            # No tensor, or no place: C may call it in a thread of its own.
            except (RuntimeError, AttributeError, IndexError, ValueError):
                short = False
            if short and _is_grad_enabled() and flash_allowed():
                how = (dropout_p, is_causal, scale, enable_gqa, place.f_code, place.f_lasti)
                return _operator.short(query, key, value, *how)
        if _routing.on and flash_allowed():
            return _operator.sdpa(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        masks = (attn_mask, dropout_p, is_causal)
        return attend(query, key, value, *masks, scale=scale, enable_gqa=enable_gqa)


_routed = _Routed()
_routing = Routing(_routed, _operator.short_work)


def enable() -> Switched:
    """Send calls of torch.nn.functional.scaled_dot_product_attention to `attention`.

    For all threads, until `disable`; in a `with` statement until its end. Calls may be nested, and
    each is undone on its own. Modules that imported the function by its name are served as well.
    Raises PackageError if another package is enabled.
    """
    return _routing.enable()


def disable() -> Switched:
    """Undo every `enable`; in a `with` statement until its end."""
    return _routing.disable()


def is_enabled() -> bool:
    """Whether `attention` stands in the place of PyTorch's."""
    return _routing.on


def register(name: str = _name) -> str:
    """Make `attention` an attention implementation of transformers; returns its name.

    After it `model.set_attn_implementation(name)` or `attn_implementation=name` chooses it. Raises
    PackageError if the name means something else there, ImportError without transformers.
    """
    return transformers_hook.register(name, attention, _operator.in_model)


__all__ = [
    "Explanation",
    "PackageError",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "counters",
    "disable",
    "enable",
    "explain",
    "explain_fp8",
    "explain_varlen",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "is_enabled",
    "register",
]

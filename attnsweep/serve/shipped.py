"""The package of winners that comes with attnsweep, with PyTorch imported when it is first used.

It is the package that `attnsweep export` writes of the recorded runs of H100 and H200, in
`runtime`: scripts/winners.py puts its table and its cubins there.
"""

# Functions here only declare what the package has, so that their bodies are empty.
# mypy: disable-error-code="empty-body"
from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from attnsweep.serve.runtime.docstrings import MASKS_AND_SCORES, PACKED, ends_with

if TYPE_CHECKING:
    from attnsweep.serve.runtime.dispatch import Explanation

_Function = TypeVar("_Function", bound=Callable[..., Any])
_loaded: Any = None
_BLOCK_TABLE = 15  # where flash_attn has it among the arguments of flash_attn_varlen_func


def _package() -> Any:
    global _loaded
    try:
        from attnsweep.serve.runtime import package
        from attnsweep.serve.runtime.operator import PASSING_ON
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from attnsweep.core.files import install_command

        raise ImportError(f"needs PyTorch: {install_command('torch')}") from error
    PASSING_ON.add(attention.__code__)
    _loaded = package
    return package


def _by_package(name: str) -> Callable[[_Function], _Function]:
    """Have the package's function of that name do what a function here only declares."""

    def forwarding(declared: Any) -> Any:
        @functools.wraps(declared)
        def function(*args: Any, **options: Any) -> Any:
            return getattr(_loaded or _package(), name)(*args, **options)

        return function

    return forwarding


@_by_package("attention")
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
    """scaled_dot_product_attention, by a recorded winner where one is known to be faster.

    query: (batch, heads, seqlen_q, head_dim); key, value: (batch, heads_kv, seqlen_k, head_dim);
    any strides with contiguous head_dim. causal: another name of is_causal. Needs PyTorch and
    cuda-bindings: pip install 'attnsweep[torch]'. PyTorch's own attention serves GPUs other than
    an H100 or H200 of 132 SMs and those that differ from them in the L2 alone.
    """


@_by_package("attention_varlen")
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


@_by_package("flash_attn_func")
def flash_attn_func(*args: Any, **options: Any) -> Any:
    """`attention` with the arguments of the function of that name in the package flash_attn.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads_kv, head_dim); causal and
    window_size are aligned bottom-right. Raises NotImplementedError for alibi_slopes and
    return_attn_probs, and for deterministic where gradients are recorded.
    """


_of_paged: dict[str, Callable[..., Any]] = {}
"""Functions for paged caches, of calls before: finding one takes 1 us of a call's 4."""


def _found(name: str) -> Callable[..., Any]:
    _loaded or _package()  # which says what to install
    from attnsweep.serve import mla, paged_attention, paged_varlen

    of_others = {"flash_attn_varlen_func": paged_varlen, "mla_decode": mla, "mla_plan": mla}
    _of_paged[name] = getattr(of_others.get(name, paged_attention), name)
    return _of_paged[name]


def _by_paged(name: str) -> Callable[[_Function], _Function]:
    """Have the files of serve/ for paged caches do what a function here only declares."""

    def forwarding(declared: Any) -> Any:
        @functools.wraps(declared)
        def function(*args: Any, **options: Any) -> Any:
            return (_of_paged.get(name) or _found(name))(*args, **options)

        return function

    return forwarding


@_by_package("flash_attn_varlen_func")
def _varlen_of_tensors(*args: Any, **options: Any) -> Any:
    """See flash_attn_varlen_func: k and v are packed too."""


@_by_paged("flash_attn_varlen_func")
def _varlen_of_pages(*args: Any, **options: Any) -> Any:
    """See flash_attn_varlen_func: k and v are pages."""


def flash_attn_varlen_func(*args: Any, **options: Any) -> Any:
    """`attention_varlen` with the arguments of the function of that name in flash_attn.

    With block_table, k and v are a paged cache, (pages, page_size, heads_kv, head_dim), and the
    arguments may be those of vLLM's function too: seqused_k, out, return_softmax_lse, k_descale,
    v_descale, s_aux. Raises NotImplementedError as `flash_attn_func`.
    """
    paged = len(args) > _BLOCK_TABLE or options.get("block_table") is not None
    return (_varlen_of_pages if paged else _varlen_of_tensors)(*args, **options)


@_by_paged("flash_attn_with_kvcache")
def flash_attn_with_kvcache(*args: Any, **options: Any) -> Any:
    """A few queries on a cache of keys, with the arguments of FlashAttention-3's function.

    q: (batch, seqlen_q, heads, head_dim), fp16 or bf16; k_cache, v_cache: (pages, page_size,
    heads_kv, head_dim) with page_table (batch, blocks), or (batch, seqlen_k, heads_kv, head_dim);
    as q or float8_e4m3fn, with k_descale and v_descale (batch, heads_kv). cache_seqlens (batch,)
    and the table are int32 and stay on the device. Needs attnsweep[torch,compile]: the kernel is
    compiled when a kind of call is first met. validate=True waits and names what cannot be.
    """


@_by_paged("explain_flash_attn_with_kvcache")
def explain_flash_attn_with_kvcache(*args: Any, **options: Any) -> Explanation:
    """Which kernel `flash_attn_with_kvcache` would call, and why; launches nothing."""


@_by_paged("get_scheduler_metadata")
def get_scheduler_metadata(*args: Any, **options: Any) -> Any:
    """Share a step's keys among blocks, once; pass it to each layer as `scheduler_metadata`."""


@_by_paged("mla_decode")
def mla_decode(*args: Any, **options: Any) -> Any:
    """MLA's decoding from a paged cache of latent keys, whose first 512 columns are the values.

    q: (batch, seqlen_q, heads, 576), fp16 or bf16; kv_cache: (pages, 64, 1, 576); block_table
    (batch, blocks) and cache_seqlens (batch,) are int32 and stay on the device. softmax_scale is
    above 0; causal is bottom-right; plan is what mla_plan made for the step. Returns (batch,
    seqlen_q, heads, 512), and with return_lse the log-sum-exps (batch, heads, seqlen_q) too. Needs
    attnsweep[torch,compile]: the kernel is compiled when a kind of call is first met.
    """


@_by_paged("mla_plan")
def mla_plan(*args: Any, **options: Any) -> Any:
    """Which keys the blocks of a step's `mla_decode` calls have: cache_seqlens, heads * queries."""


@_by_package("explain")
def explain_attention(*args: Any, **options: Any) -> Explanation:
    """Which kernel `attention` would call with these arguments, and why; launches nothing."""


@_by_package("explain_varlen")
def explain_attention_varlen(*args: Any, **options: Any) -> Explanation:
    """Which kernel `attention_varlen` would call with these arguments, and why."""


@_by_package("counters")
def attention_counters() -> dict[str, int]:
    """Calls of `attention` by what served them: `kernel`, or why PyTorch's own attention did."""


@_by_package("enable")
def enable() -> AbstractContextManager[None]:
    """Send calls of torch.nn.functional.scaled_dot_product_attention to `attention`.

    For all threads, until `disable`; in a `with` statement until its end. Raises PackageError if
    another package is enabled.
    """


@_by_package("disable")
def disable() -> AbstractContextManager[None]:
    """Undo every `enable`; in a `with` statement until its end."""


@_by_package("register")
def register_attention(name: str = "attnsweep") -> str:
    """Make `attention` an attention implementation of transformers; returns its name.

    Raises PackageError if the name means something else there, ImportError without transformers.
    """

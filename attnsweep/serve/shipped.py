"""The package of winners that comes with attnsweep, with PyTorch imported when it is first used.

It is the package that `attnsweep export` writes of the recorded runs of H100 and H200, in
`runtime`: scripts/winners.py puts its table and its cubins there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnsweep.serve.runtime.plans import Explanation


_loaded: Any = None


def _package() -> Any:
    global _loaded
    try:
        from attnsweep.serve.runtime import package
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from attnsweep.core.files import install_command

        raise ImportError(f"needs PyTorch: {install_command('torch')}") from error
    _loaded = package
    return package


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
) -> Any:
    """scaled_dot_product_attention, by a recorded winner where one is known to be faster.

    query: (batch, heads, seqlen_q, head_dim); key, value: (batch, heads_kv, seqlen_k, head_dim);
    any strides with contiguous head_dim. causal: another name of is_causal. Needs PyTorch and
    cuda-bindings: pip install 'attnsweep[torch]'. PyTorch's own attention serves GPUs other than
    an H100 or H200 of 132 SMs and those that differ from them in the L2 alone.
    """
    is_causal = is_causal or causal
    return (_loaded or _package()).attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def explain_attention(*args: Any, **options: Any) -> Explanation:
    """Which kernel `attention` would call with these arguments, and why; launches nothing."""
    explanation: Explanation = _package().explain(*args, **options)
    return explanation


def attention_counters() -> dict[str, int]:
    """Calls of `attention` by what served them: `kernel`, or why PyTorch's own attention did."""
    counted: dict[str, int] = _package().counters()
    return counted


def enable() -> AbstractContextManager[None]:
    """Send calls of torch.nn.functional.scaled_dot_product_attention to `attention`.

    For all threads, until `disable`; in a `with` statement until its end. Raises PackageError if
    another package is enabled.
    """
    switched: AbstractContextManager[None] = _package().enable()
    return switched


def disable() -> AbstractContextManager[None]:
    """Undo every `enable`; in a `with` statement until its end."""
    switched: AbstractContextManager[None] = _package().disable()
    return switched


def register_attention(name: str = "attnsweep") -> str:
    """Make `attention` an attention implementation of transformers; returns its name.

    Raises PackageError if the name means something else there, ImportError without transformers.
    """
    return str(_package().register(name))

"""The baselines of FlashAttention's packages."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Builder, NotInstalled, Unavailable, Way
from attnsweep.baselines.torch_sdpa import packed_inputs, packed_lengths, rows_of_heads
from attnsweep.core.problem import FULL, Padded, Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


def flash_attention(name: str, *modules: str) -> Builder:
    """FlashAttention's own packages: (batch, seqlen, heads, head_dim), causal bottom-right.

    modules: where different builds of the package keep the function; the first that is installed
    and does the problem's dtype is used. Two of them in one process may clash, so that the next is
    loaded only if the one before fails.
    """

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        there = installed(name, modules)
        able = [m for m in there if problem.dtype != "fp16" or m not in _NO_FP16]
        if not able:
            raise Unavailable(f"{_NO_FP16[there[0]]} does not do fp16: {_FP16_FIX}")
        ways = [_in_own(module, problem, spare=module != able[0]) for module in able]
        if name == "flash_attn_3" and problem.seqlen_q < problem.seqlen_k:
            # Few queries: 0 lets it choose how many splits of the keys fill the SMs.
            ways.insert(1, _in_own(able[0], problem, num_splits=0))
        return ways

    return build


def installed(name: str, modules: Sequence[str]) -> list[str]:
    """The modules of a baseline that are installed. Raises NotInstalled."""
    there = [module for module in modules if importable(module)]
    if not there:
        raise NotInstalled(f"{name} is not installed")
    return there


def importable(module: str) -> bool:
    """Whether a module is there, without loading it (but its parent, of a dotted name)."""
    with contextlib.suppress(ImportError, ValueError):
        return module in sys.modules or importlib.util.find_spec(module) is not None
    return False


def attention_of(module: str) -> Callable[[], Any]:
    """Imports and returns its function."""
    return functools.cache(lambda: loaded(module).flash_attn_func)


def loaded(module: str) -> Any:
    """Import a baseline's package, and spare FlashAttention-3 its operator.

    It declares its forward as an operator, whose first call imports torch._dynamo and with it
    890 modules: 5 to 8 s on H100 hosts. Either way the same kernels are launched.
    """
    package = importlib.import_module(module)
    if module in FLASH_3 and (plain := getattr(getattr(package, FORWARD_3, 0), "_init_fn", None)):
        setattr(package, FORWARD_3, plain)
    return package


def cannot(problem: Problem) -> str | None:
    """Why FlashAttention's functions cannot compute a problem; None if they can."""
    if problem.kind == "padded" and (problem.mask != FULL or problem.values != ("q", "k", "v")):
        return "has lengths of a cache alone, beside no other mask"
    if isinstance(problem.layout, Padded) and problem.layout.side == "left":
        return "has no padding on the left: the lengths of a cache count from its first key"
    return "has no mask that is aligned top-left" if problem.mask.interval.top_left else None


def window(problem: Problem) -> dict[str, Any]:
    """The option of a window: keys before and after the diagonal, -1 for all of them."""
    if problem.mask.kind != "window":
        return {}
    left, right = (-1 if side is None else side for side in problem.mask.interval.sides)
    return {"window_size": (left, right)}


def changes(problem: Problem) -> dict[str, float]:
    """The options of scores: a scale of the problem's own, and a softcap."""
    how = problem.scores
    scale = {} if how.scale is None else {"softmax_scale": problem.scale}
    return scale | ({"softcap": float(how.softcap)} if how.softcap else {})


def _in_own(module: str, problem: Problem, *, spare: bool = False, **how: int) -> Way:
    attention, options = attention_of(module), window(problem) | changes(problem)
    if problem.kind == "packed":
        return _in_sequences(module, problem, options, spare=spare)
    if problem.kind == "padded":
        return _in_cache(module, problem, options | how, spare=spare)

    def forward(q: Any, k: Any, v: Any) -> Any:
        given = (x.transpose(1, 2) for x in (q, k, v))
        out = attention()(*given, causal=problem.causal, **options, **how)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Way(forward, spare=spare)


def _in_sequences(module: str, problem: Problem, options: dict[str, Any], *, spare: bool) -> Way:
    import torch

    attention = functools.cache(lambda: loaded(module).flash_attn_varlen_func)
    lengths = packed_lengths(torch, problem)

    def forward(q: Any, k: Any, v: Any) -> Any:
        out = attention()(q, k, v, *lengths, causal=problem.mask.interval.right == 0, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]

    return Way(forward, packed_inputs, spare)


def _in_cache(module: str, problem: Problem, options: dict[str, Any], *, spare: bool) -> Way:
    import torch

    attention = functools.cache(lambda: loaded(module).flash_attn_with_kvcache)
    filled = [end for _, end in problem.key_ranges]
    lengths = torch.tensor(filled, dtype=torch.int32, device="cuda")

    def forward(q: Any, k: Any, v: Any) -> Any:
        given = (x.transpose(1, 2) for x in (q, k, v))
        return attention()(*given, cache_seqlens=lengths, **options).transpose(1, 2)

    return Way(forward, spare=spare)


def gradients(name: str) -> Builder:
    """The backward that its autograd calls, on contiguous tensors, and as (b, s, heads, d)."""
    return functools.partial(_gradients, name)


def _gradients(name: str, torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
    modules, fix = _BACKWARD[name]
    there = [module for module in modules if importable(module)]
    if not there:
        raise Unavailable(f"no {name} with a backward is installed: {fix}")
    left, right = problem.mask.interval.sides if problem.mask.kind == "window" else (None, None)
    scale, causal = problem.scale, problem.causal

    def by_3(module: str, lse: Any, do: Any, q: Any, k: Any, v: Any, o: Any) -> tuple[Any, ...]:
        loaded(module)
        made = tuple(torch.empty_like(x) for x in (q, k, v))
        torch.ops.flash_attn_3.bwd(
            *(do, q, k, v, o, lse, *made),
            softmax_scale=scale,
            is_causal=causal,
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
        )
        return made

    def by_4(module: str, lse: Any, do: Any, q: Any, k: Any, v: Any, o: Any) -> tuple[Any, ...]:
        window = {"window_size_left": left, "window_size_right": right}
        call = loaded(module).interface._flash_attn_bwd
        return tuple(call(q, k, v, o, do, lse, scale, causal, **window)[:3])

    def way(module: str, convert: Callable[..., Any] | None) -> Way:
        call = by_3 if name == "flash_attn_3" else by_4

        def backward(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> Any:
            made = call(module, lse, *(x.transpose(1, 2) for x in (do, q, k, v, o)))
            return tuple(x.transpose(1, 2) for x in made)

        return Way(backward, convert, spare=module != there[0])

    return [way(module, convert) for module in there for convert in (None, rows_of_heads)]


_BACKWARD = {
    "flash_attn_3": (
        ("xformers.flash_attn_3._C", "flash_attn_interface"),
        "pip install --no-deps xformers==0.0.34 nvidia-cuda-runtime-cu12, or build "
        "FlashAttention's hopper/ directory; tokenspeed-fa3 and fa3-fwd have none",
    ),
    "flash_attn_4": (("flash_attn.cute",), "pip install flash-attn-4"),
}
"""Where builds of FlashAttention with a backward are, and how to get one."""

FLASH_3 = ("flash_attn_interface", "fa3_fwd_interface")
"""Where builds of FlashAttention-3 keep its function."""
FORWARD_3 = "_flash_attn_forward"


def has_wide_values(module: str) -> bool:
    """Whether a build of FlashAttention-3 says that it has head_dim 64 beside values of 512.

    One without takes such a call all the same: it computes 64 of the values, and reads no qv.
    """
    if module != FLASH_3[0] or not importable("flash_attn_config"):
        return False
    config = getattr(importlib.import_module("flash_attn_config"), "CONFIG", {})
    flags = config.get("build_flags", {})
    off = [flag for name, flag in flags.items() if name.endswith("DISABLE_HDIMDIFF64")]
    return off == [False]


_NO_FP16 = {"fa3_fwd_interface": "fa3-fwd"}
_FP16_FIX = "pip install tokenspeed-fa3, or build FlashAttention's hopper/ directory"

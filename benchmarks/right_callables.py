"""Ten callables that compute attention rightly: what judged.py has the judge look at."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from attnsweep import Problem

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorials" / "judge.md"


def _sdpa(backend: str) -> Any:
    def call(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

    return call


flash, cudnn = _sdpa("FLASH_ATTENTION"), _sdpa("CUDNN_ATTENTION")
efficient, math = _sdpa("EFFICIENT_ATTENTION"), _sdpa("MATH")
# A process loads this file once for each callable. Each load would compile its own mask, and after
# eight of them the compiler gives up.
KEPT = vars(sys.modules.setdefault("kept_for_right_callables", ModuleType("kept")))


def flex(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """FlexAttention, compiled at the first call."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if "flex" not in KEPT:
        KEPT["flex"] = torch.compile(flex_attention)
    if problem.causal and problem.label not in KEPT:
        sizes = (None, None, problem.seqlen_q, problem.seqlen_k)
        mask = create_block_mask(lambda _b, _h, i, j: i >= j, *sizes, device="cuda")
        KEPT[problem.label] = mask
    return KEPT["flex"](q, k, v, block_mask=KEPT.get(problem.label))


def naive(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """Three operators in float32."""
    import torch

    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    if problem.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def compiled(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """`naive`, compiled at the first call."""
    import torch

    return KEPT.setdefault("naive", torch.compile(naive))(q, k, v, problem=problem)


def flash_3(q: Any, k: Any, v: Any, *, problem: Problem, out: Any) -> None:
    """FlashAttention-3, with (batch, seqlen, heads, head_dim)."""
    made = _flash_3().flash_attn_func(q, k, v, causal=problem.causal)
    out.copy_(made[0] if isinstance(made, tuple) else made)


def _flash_3() -> Any:
    wanted = ("flash_attn_interface", "fa3_fwd_interface")
    found = (name for name in wanted if importlib.util.find_spec(name))
    return importlib.import_module(next(found, wanted[0]))


def _by_flash_3(problem: Problem) -> bool | str:
    in_bf16 = _flash_3().__name__ != "fa3_fwd_interface" or problem.dtype == "bf16"
    return in_bf16 or "fa3-fwd is built for bf16 alone"


flash_3.supports = _by_flash_3  # type: ignore[attr-defined]


def ours(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """The attention that comes with attnsweep."""
    from attnsweep import attention

    return attention(q, k, v, is_causal=problem.causal)


OWN = ("flash", "cudnn", "efficient", "math", "flex", "naive", "compiled", "flash_3", "ours")


def names(place: Path) -> dict[str, str]:
    """How each is asked for; the Triton kernel is the tutorial's, written to a file."""
    blocks = re.findall(r"```python\n(.+?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    (place / "triton_kernel.py").write_text(blocks[0], encoding="utf-8")
    found = {own: f"{__file__}:{own}" for own in OWN}
    found["flash_3"] += "?layout=bshd"
    return found | {"triton": f"{place}/triton_kernel.py:forward"}

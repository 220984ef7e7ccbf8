"""Judge callables that are right, many times: the judge may refuse none of them.

Usage: python benchmarks/right_callables.py [FILE.json] [--runs 100] [--budget-s 3000]. Ten ways to
compute attention, on three shapes in fp16 and bf16, each judged as `attnsweep judge` does beside
torch_flash. A run judges each of them once; no judgement begins after the budget. The file counts
the verdicts, and has the reason of each that is not confirmed, times, and ratios to torch_flash.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from setting import console, write

from attnsweep import KernelVerdict, Problem, Worker, judge

SHAPES = ("2,16,1024,64", "4,16,2048,128 causal", "1,32,4096,128 causal")
AGAINST = ("torch_flash",)
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
KEPT: dict[str, Any] = {}


def flex(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """FlexAttention, compiled at the first call."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not KEPT:
        KEPT["call"] = torch.compile(flex_attention)
        sizes = (None, None, problem.seqlen_q, problem.seqlen_k)
        causal = create_block_mask(lambda _b, _h, i, j: i >= j, *sizes, device="cuda")
        KEPT["mask"] = causal if problem.causal else None
    return KEPT["call"](q, k, v, block_mask=KEPT["mask"])


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
    from flash_attn_interface import flash_attn_func

    made = flash_attn_func(q, k, v, causal=problem.causal)
    out.copy_(made[0] if isinstance(made, tuple) else made)


def ours(q: Any, k: Any, v: Any, *, problem: Problem) -> Any:
    """The attention that comes with attnsweep."""
    from attnsweep import attention

    return attention(q, k, v, is_causal=problem.causal)


OWN = ("flash", "cudnn", "efficient", "math", "flex", "naive", "compiled", "flash_3", "ours")


def names(place: Path) -> dict[str, str]:
    """How each is asked for; the Triton kernel is the tutorial's, written to a file."""
    blocks = re.findall(r"```python\n(.+?)```", TUTORIAL.read_text(), re.DOTALL)
    (place / "triton_kernel.py").write_text(blocks[0])
    found = {own: f"{__file__}:{own}" for own in OWN}
    found["flash_3"] += "?layout=bshd"
    return found | {"triton": f"{place}/triton_kernel.py:forward"}


def facts(verdicts: list[KernelVerdict]) -> dict[str, Any]:
    """The verdicts of one callable on one problem."""
    return {
        "verdicts": dict(Counter(one.verdict for one in verdicts)),
        "not_confirmed": [one.reason for one in verdicts if one.verdict != "confirmed"],
        "times_us": [one.time_us for one in verdicts],
        "x_base": [one.x_base for one in verdicts],
        "calls_judged": [one.calls_judged for one in verdicts],
    }


def main() -> None:
    """Judge all of them, run by run, until the budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("right_callables.json"))
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--budget-s", type=float, default=3000.0, help="begin nothing after that")
    arguments = parser.parse_args()
    begun, found = time.monotonic(), defaultdict[tuple[str, str], list[KernelVerdict]](list)
    parsed = map(Problem.parse, SHAPES)
    problems = [replace(p, dtype=d) for p in parsed for d in ("fp16", "bf16")]
    missing: dict[str, str] = {}
    with Worker(timeout_s=60) as worker:
        environment = worker.describe()
    with tempfile.TemporaryDirectory() as place:
        asked = [(p, *one) for p in problems for one in names(Path(place)).items()]
        for problem, name, call in asked * arguments.runs:
            if time.monotonic() - begun > arguments.budget_s or name in missing:
                continue
            verdict = judge(call, problem, against=AGAINST)
            if "raised ModuleNotFoundError" in verdict.reason:
                missing[name] = verdict.reason
                continue
            found[name, problem.label].append(verdict)
            console.print(f"{name}: {verdict.sentence}")
    cases = [{"callable": n, "problem": p, **facts(each)} for (n, p), each in found.items()]
    count = Counter(one.verdict for each in found.values() for one in each)
    console.print("  ".join(f"{verdict} {number}" for verdict, number in count.items()))
    write(arguments.file, environment, {"missing": missing, "all": dict(count), "cases": cases})


if __name__ == "__main__":
    main()

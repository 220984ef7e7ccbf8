"""Try the known faults of PyTorch's attention on this card: PyTorch alone, and attnsweep beside it.

Each fault is tried in a process of its own, since some end it: `alone` by PyTorch's own function,
`attention` by attnsweep's, `enabled` by PyTorch's name while attnsweep stands in its place. A row
has the largest relative error of the output and of gradients next to float64, or how the process
ended. attnsweep/serve/runtime/pytorch_calls.py is where callers are protected.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WHO = ("alone", "attention", "enabled")
AT_ONCE, TIMEOUT_S = 4, 240
LIMIT = 0.06
"""A relative error above it is no rounding of bf16."""


def attends(who: str) -> Callable[..., Any]:
    """The function of that name; imports PyTorch."""
    import torch.nn.functional as F

    if who == "alone":
        return F.scaled_dot_product_attention
    import attnsweep

    if who == "attention":
        return attnsweep.attention
    attnsweep.enable()
    return F.scaled_dot_product_attention


def drawn(*sizes: int, factor: float = 1.0, plus: float = 0.0) -> Any:
    """Normal numbers in bf16 on the card."""
    import torch

    return (torch.randn(*sizes, device="cuda") * factor + plus).bfloat16()


def shifted(tensor: Any, by: int = 1) -> Any:
    """The same numbers, `by` elements off."""
    import torch

    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=tensor.device)
    return memory[by:].view(tensor.shape).copy_(tensor)


def exact(q: Any, k: Any, v: Any, grad: Any, mask: Any, causal: bool, scale: float | None) -> list[Any]:
    """The output, dq, dk and dv in float64; 0 where a query sees no key."""
    import torch

    q, k, v = leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ keys.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    out = weights @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def error(attend: Any, q: Any, k: Any, v: Any, grad: Any = None, mask: Any = None, **how: Any) -> dict[str, float]:
    """Relative errors of a call: of the output, and of gradients unless grad is False."""
    import torch

    q, k, v = leaves = [t.detach().requires_grad_(grad is not False) for t in (q, k, v)]
    direction = drawn(*q.shape[:3], v.shape[3]) if grad is None or grad is False else grad
    want = exact(q, k, v, direction, mask, how.get("is_causal", False), how.get("scale"))
    out = attend(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **how)
    got = [out.detach()] + ([] if grad is False else [*torch.autograd.grad(out, leaves, direction)])
    found = {}
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), got, want, strict=False):
        off = float((ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-30))
        found[name] = off if math.isfinite(off) else math.inf
    return found


def masks_of(seqlen_q: int, seqlen_k: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """No mask, causal, boolean and added: mask and options."""
    import torch

    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda").tril(seqlen_k - seqlen_q)
    added = torch.zeros(seqlen_q, seqlen_k, device="cuda", dtype=torch.bfloat16).masked_fill(~seen, -math.inf)
    made = {"full": (None, {}), "boolean": (seen[None, None], {}), "added": (added[None, None], {})}
    return made | ({"causal": (None, {"is_causal": True})} if seqlen_q == seqlen_k else {})


Found = Iterator[tuple[str, dict[str, float]]]


def layouts(attend: Any) -> Found:
    """One shape, gradients of several layouts in turn."""
    batch, heads, seqlen, head_dim = 9, 6, 1024, 64
    for heads_kv in (6, 2):
        q, k, v = (drawn(batch, n, seqlen, head_dim) for n in (heads, heads_kv, heads_kv))
        for name, (mask, how) in masks_of(seqlen, seqlen).items():
            grads = {
                "contiguous": drawn(batch, heads, seqlen, head_dim),
                "transposed": drawn(batch, seqlen, heads, head_dim).transpose(1, 2),
                "wide": drawn(batch, seqlen, 2 * heads, head_dim).transpose(1, 2)[:, ::2],
                "again": drawn(batch, heads, seqlen, head_dim),
            }
            for layout, grad in grads.items():
                yield f"{heads}/{heads_kv} {name} {layout}", error(attend, q, k, v, grad, mask, **how)


def expanded_gradients(attend: Any) -> Found:
    """One shape, an ordinary gradient and then expanded ones."""
    q, k, v = (drawn(9, n, 1024, 64) for n in (6, 2, 2))
    for name, (mask, how) in masks_of(1024, 1024).items():
        for sizes in ((9, 6, 1024, 64), (1, 1, 1, 1), (1, 6, 1024, 64), (9, 1, 1024, 64), (9, 6, 1, 64)):
            grad = drawn(*sizes).expand(9, 6, 1024, 64)
            yield f"{name} of {sizes}", error(attend, q, k, v, grad, mask, **how)


def alignment(attend: Any) -> Found:
    """q, k, v, the mask or the gradient begin 2, 4 or 8 bytes off."""
    for name, (mask, how) in masks_of(512, 512).items():
        for which in ("q", "k", "v", "grad", "mask"):
            if which == "mask" and name != "added":
                continue
            for by in (1, 2, 4):
                given = {each: drawn(4, 8, 512, 64) for each in ("q", "k", "v", "grad")} | {"mask": mask}
                given[which] = shifted(given[which], by)
                yield f"{name} {which} {2 * by} bytes", error(attend, **given, **how)
                yield f"{name} {which} {2 * by} bytes, no gradients", error(attend, **given | {"grad": False}, **how)


def strides(attend: Any) -> Found:
    """Rows of q, k and v are 65, 66, 68 or 72 elements apart, and of an expanded dimension 0."""
    for name, (mask, how) in masks_of(512, 512).items():
        for wide in (65, 66, 68, 72):
            q, k, v = (drawn(4, 8, 512, wide)[..., :64] for _ in range(3))
            yield f"{name} {wide}", error(attend, q, k, v, None, mask, **how)
        for sizes in ((1, 8, 512, 64), (4, 1, 512, 64)):
            q, k, v = (drawn(*sizes).expand(4, 8, 512, 64) for _ in range(3))
            yield f"{name} expanded {sizes}", error(attend, q, k, v, None, mask, **how)


def expanded_queries(attend: Any) -> Found:
    """Queries of a dimension with stride 0, beside v of another head_dim; each call is made twice."""
    for name, (mask, how) in masks_of(512, 512).items():
        for sizes in ((1, 8, 512, 64), (4, 1, 512, 64), (4, 8, 1, 64)):
            q, k, v = drawn(*sizes).expand(4, 8, 512, 64), drawn(4, 8, 512, 64), drawn(4, 8, 512, 128)
            for time in ("first", "second"):
                for with_gradients in (None, False):
                    said = f"{name} {sizes}, {time}" + ("" if with_gradients is None else ", no gradients")
                    try:
                        yield said, error(attend, q, k, v, with_gradients, mask, **how)
                    except RuntimeError as raised:
                        yield f"{said}: {str(raised).splitlines()[0][:90]}", {"o": math.inf}


def empty_rows(attend: Any) -> Found:
    """Masks that leave some queries no key."""
    for seqlen_q, seqlen_k in ((512, 512), (1, 64), (7, 40), (640, 704)):
        for name, (mask, _) in masks_of(seqlen_q, seqlen_k).items():
            if mask is None:
                continue
            hidden = mask.expand(4, 1, seqlen_q, seqlen_k).clone()
            hidden[1, :, : max(1, seqlen_q // 3)] = False if name == "boolean" else -math.inf
            q, k, v = (drawn(4, 8, n, 64) for n in (seqlen_q, seqlen_k, seqlen_k))
            yield f"{name} {seqlen_q}x{seqlen_k}", error(attend, q, k, v, None, hidden)
            yield f"{name} {seqlen_q}x{seqlen_k}, no gradients", error(attend, q, k, v, False, hidden)


def low_scores(attend: Any) -> Found:
    """All scores far below zero, at lengths that leave a part of a tile."""
    lengths = [(n, n) for n in (64, 192, 704, 832, 96, 160, 577, 640)] + [(704, 640), (640, 704), (640, 672)]
    for seqlen_q, seqlen_k in lengths:
        for name, (mask, how) in masks_of(seqlen_q, seqlen_k).items():
            q, k = drawn(2, 4, seqlen_q, 64, factor=0.1, plus=1.5), drawn(2, 4, seqlen_k, 64, factor=0.1, plus=-1.5)
            v = drawn(2, 4, seqlen_k, 64)
            if name == "added":
                mask = mask.clamp_min(-1e4)
            yield f"{name} {seqlen_q}x{seqlen_k}", error(attend, q, k, v, None, mask, scale=1.0, **how)


def many(attend: Any) -> Found:
    """65,536 items, heads, or both, with gradients and without."""
    for sizes in ((65536, 1, 16, 64), (1, 65536, 16, 64), (65535, 1, 16, 64), (32768, 4, 16, 64)):
        for name, (mask, how) in masks_of(16, 16).items():
            q, k, v = (drawn(*sizes) for _ in range(3))
            for with_gradients in (None, False):
                said = f"{sizes} {name}" + ("" if with_gradients is None else ", no gradients")
                try:
                    yield said, error(attend, q, k, v, with_gradients, mask, **how)
                except RuntimeError as raised:
                    if "illegal" in str(raised):
                        raise
                    yield f"{said}: {str(raised).splitlines()[0][:90]}", {"o": math.inf}


def masks_of_queries(attend: Any) -> Found:
    """A mask that has one number of each query, for all keys, at an odd length."""
    import torch

    for n in (577, 1000):
        for sizes in ((n, 1), (4, 1, n, 1), (1, 6, n, 1)):
            q, k, v = (drawn(4, 6, n, 80) for _ in range(3))
            added = torch.randn(sizes, device="cuda").bfloat16()
            for name, mask in {"added": added, "boolean": added > -1}.items():
                for grad in (None, False):
                    said = f"{name} {sizes}" + ("" if grad is None else ", no gradients")
                    if name == "boolean":  # queries without a key are another fault
                        mask = mask | True
                    yield said, error(attend, q, k, v, grad, mask)


def float32_masks(attend: Any) -> Found:
    """A float32 mask beside bf16."""
    import torch

    q, k, v = (drawn(4, 8, 512, 64) for _ in range(3))
    mask = torch.randn(1, 8, 512, 512, device="cuda")
    yield "float32 mask", error(attend, q, k, v, None, mask)
    yield "float32 mask, no gradients", error(attend, q, k, v, False, mask)
    q, k, v = (drawn(2, 1, 1, 72) for _ in range(3))
    yield "float32 mask of one key", error(attend, q, k, v, False, torch.randn(1, 1, device="cuda"))


def mask_alone(attend: Any) -> Found:
    """A mask alone records gradients."""
    import torch

    q, k, v, grad = (drawn(2, 4, 256, 64) for _ in range(4))
    mask = drawn(2, 4, 256, 256).requires_grad_()
    (got,) = torch.autograd.grad(attend(q, k, v, mask), mask, grad)
    of_mask = mask.detach().double().requires_grad_()
    weights = torch.softmax(q.double() @ k.double().mT / 8 + of_mask, -1)
    (want,) = torch.autograd.grad(weights @ v.double(), of_mask, grad.double())
    yield "dmask", {"dmask": float((got.double() - want).norm() / want.norm())}


def idle_slots(attend: Any) -> Found:
    """Packed sequences of one query or none, grouped heads, causal or not, with gradients or without."""
    import torch

    import attnsweep

    def alone(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, most_q: int, most_k: int, causal: bool) -> Any:
        return torch.ops.aten._flash_attention_forward(q, k, v, of_q, of_k, most_q, most_k, 0.0, causal, False)[0]

    if attend is torch.nn.functional.scaled_dot_product_attention and attend.__class__.__name__ != "_Routed":
        varlen = alone
    else:

        def varlen(*given: Any) -> Any:
            return attnsweep.flash_attn_varlen_func(*given[:-1], causal=given[-1])

    cases = {"idle": ([1, 0], [5, 9]), "one": ([1, 1], [5, 9]), "none sees": ([1, 0], [0, 2]), "two": ([2, 1], [0, 7])}
    for name, (of_q, of_k) in cases.items():
        for heads_kv in (4, 2):
            for causal in (False, True):
                lengths = [torch.tensor([0, *each], device="cuda").cumsum(0).int() for each in (of_q, of_k)]
                q, k, v = (
                    drawn(sum(n), h, 64).requires_grad_() for n, h in ((of_q, 4), (of_k, heads_kv), (of_k, heads_kv))
                )
                said = f"{name} 4/{heads_kv}{' causal' if causal else ''}"
                try:
                    out = varlen(q, k, v, *lengths, max(of_q), max(of_k), causal)
                    want, at_q, at_k = [], 0, 0
                    for n, m in zip(of_q, of_k, strict=True):
                        qi, ki, vi = q[None, at_q : at_q + n], k[None, at_k : at_k + m], v[None, at_k : at_k + m]
                        at_q, at_k = at_q + n, at_k + m
                        seen = torch.ones(n, m, dtype=torch.bool, device="cuda")
                        seen = seen.tril(m - n) if causal else seen
                        qi, ki, vi = (t.transpose(1, 2) for t in (qi, ki, vi))
                        grad = torch.zeros_like(qi)
                        want.append(exact(qi, ki, vi, grad, seen, False, None)[0][0].transpose(0, 1))
                    expected = torch.cat(want)
                    off = float((out.double() - expected).norm() / expected.norm().clamp_min(1e-30))
                    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
                    fine = all(bool(g.isfinite().all()) for g in grads)
                    yield said, {"o": off, "grads": 0.0 if fine else math.inf}
                except RuntimeError as raised:
                    yield f"{said}: {str(raised).splitlines()[0][:90]}", {"o": math.inf}


FAULTS: dict[str, Callable[[Any], Found]] = {
    each.__name__: each
    for each in (
        *(layouts, expanded_gradients, alignment, strides, expanded_queries, empty_rows, low_scores, many),
        *(masks_of_queries, float32_masks, mask_alone, idle_slots),
    )
}


def tried(fault: str, who: str) -> None:
    """Print what one says of each call of a fault, a JSON object a line."""
    import torch

    torch.manual_seed(0)
    for label, found in FAULTS[fault](attends(who)):
        row = [label, {name: round(each, 4) for name, each in found.items()}]
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def row_of(fault: str, who: str) -> dict[str, Any]:
    """The worst of a fault's calls, those that are wrong, and how the process ended."""
    command = [sys.executable, __file__, "--fault", fault, "--who", who]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, encoding="utf-8")
        said, ended = done.stdout, ""
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1][:160]
            ended = last or f"exit code {done.returncode}"  # a signal has no last words
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
        ended = f"no answer in {TIMEOUT_S} s"
    calls = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    wrong = [[label, of] for label, of in calls if max(of.values()) > LIMIT]
    return {"fault": fault, "who": who, "calls": len(calls), "wrong": wrong, "ended": ended}


def main() -> None:
    """Print a line for each fault and who; write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="the JSON file to write")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--who", choices=WHO, action="append")
    given = parser.parse_args()
    faults, who = given.fault or [*FAULTS], given.who or [*WHO]
    if len(faults) == len(who) == 1:
        tried(faults[0], who[0])
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda pair: row_of(*pair), [(f, w) for f in faults for w in who]))
    import torch
    from setting import console, described, write

    for row in rows:
        said = f"{len(row['wrong']):3} of {row['calls']:3} calls wrong {row['ended']}"
        console.print(f"{row['fault']:20} {row['who']:10} {said}")
    write(given.file, described(), {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()

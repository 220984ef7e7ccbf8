"""Time calls with a mask, with attnsweep and without.

Usage: python benchmarks/masks.py [FILE.json]. Needs a GPU that attnsweep has winners for.

Calls: q, k and v in bf16 and a mask as transformers makes it. Each round takes, in random order, a
sample of PyTorch's own attention (k and v repeated beforehand, as models pass them) and of
`attnsweep.attention` with the same mask, which was scanned before; `changing` is ours with a mask
that is another in each call, so that each call scans it; `unmasked` is PyTorch's without a mask. In
`arguments` a call says by arguments what it hides, and PyTorch gets the same as a mask; or both get
a float mask. In `compiled` each way but `eager` is compiled as one graph, and gets another mask in
each call; `graphs` counts what was compiled of ours. Times are medians of the device's,
microseconds a call, of calls that the host enqueues before the first begins; `ratio` is the median
of the rounds' PyTorch over ours, `changing_ratio` over those that scan. `host_us`: from call to
return, of ours; `host_sdpa_us`, `host_changing_us` and so on those of the others, and
`host_ours_unmasked_us` of ours without a mask. A loop of single calls takes the longer of device
and host.
"""

from __future__ import annotations

import inspect
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import device_us
from setting import console, described, options, write

import attnsweep

ROUNDS, SAMPLE_US = 11, 4000
SLEEP_CYCLES, SLEEP_US = 8_000_000, 4000  # the least that they take, at 1980 MHz
# batch, heads, heads_kv, seqlen, head_dim, mask
CALLS = (
    (4, 32, 8, 2048, 128, "causal, padded right"),
    (4, 32, 8, 2048, 128, "causal, padded left"),
    (8, 32, 32, 512, 64, "padded right"),
    (32, 12, 12, 512, 64, "padded right"),
    (1, 32, 8, 8192, 128, "window of 1024"),
    (2, 16, 16, 4096, 128, "window of 512"),
    (4, 16, 16, 4096, 128, "all"),
    (8, 32, 32, 512, 64, "all"),
    (2, 16, 16, 4096, 128, "causal with holes"),
    (2, 16, 16, 4096, 128, "8 documents"),
    (1, 12, 12, 256, 64, "padded right"),
)
ARGUMENTS = (
    (4, 32, 8, 2048, 128, "causal, key_lengths"),
    (8, 32, 8, 4096, 128, "one query, a cache filled to 300: key_lengths"),
    (8, 32, 8, 4096, 128, "one query, a cache filled to 300: its mask"),
    (1, 32, 8, 8192, 128, "window of 1024"),
    (2, 8, 8, 1024, 64, "bias"),
    (1, 16, 16, 2048, 64, "bias of heads"),
    (4, 16, 16, 1024, 64, "bias of keys"),
    (32, 12, 12, 512, 64, "bias of keys"),
    (4, 16, 16, 2048, 128, "bias"),
    (1, 16, 8, 4096, 256, "softcap, causal"),
    (1, 64, 8, 4096, 64, "sinks, causal"),
    (1, 64, 8, 4096, 64, "sinks, window of 128"),
    (1, 32, 8, 8192, 128, "packed, 8 sequences, causal"),
    (1, 12, 12, 32768, 64, "packed, 64 sequences, causal"),
)


def mask_of(kind: str, batch: int, seqlen: int) -> Any:
    """(batch, 1, seqlen, seqlen), True where a query sees a key."""
    i, j = torch.arange(seqlen, device="cuda")[:, None], torch.arange(seqlen, device="cuda")
    length = torch.linspace(0.4 * seqlen, seqlen, batch, device="cuda").int()[:, None, None, None]
    causal, all_of_them = i >= j, torch.ones(batch, 1, seqlen, seqlen, device="cuda").bool()
    made = {
        "all": causal | True,
        "padded right": j < length,
        "causal, padded right": causal & (j < length),
        "causal, padded left": causal & (j >= seqlen - length),
        "window of 1024": causal & (i - j < 1024),
        "causal": causal,
        "window of 128": causal & (i - j < 128),
        "window of 512": causal & (i - j < 512),
        "causal with holes": causal & (j % 7 != 3),
        "8 documents": i * 8 // seqlen == j * 8 // seqlen,
    }[kind]
    return (made & all_of_them).contiguous()


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds from a call to its return, while the device works."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - begin) / 20 * 1e6)
    return statistics.median(times)


def rounds_of(ways: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Medians of each way's times, and the median ratios of the first one to the others."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    hosts = {name: host_us(call) for name, call in ways.items()}
    # More calls than the host enqueues meanwhile would add its time to one way, and not to another.
    counts = {
        name: max(1, int(min(SAMPLE_US / device_us(call, 2, SLEEP_CYCLES), SLEEP_US / 2 / hosts[name])))
        for name, call in ways.items()
    }
    for _ in range(ROUNDS):
        for name in random.sample([*ways], len(ways)):
            times[name].append(device_us(ways[name], counts[name], SLEEP_CYCLES))
    theirs, *others = times
    ratios = {n: [a / b for a, b in zip(times[theirs], times[n], strict=True)] for n in others}
    found = {f"{n}_ratio".removeprefix("ours_"): round(statistics.median(each), 3) for n, each in ratios.items()}
    found |= {f"{n}_us": round(statistics.median(each), 1) for n, each in times.items()}
    return found | {f"host_{n}_us".replace("ours_", ""): round(us, 1) for n, us in hosts.items()}


def tensors(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a row begins with; q, k and v; k and v for all heads; options of a call of ours."""
    batch, heads, heads_kv, seqlen, head_dim, kind = shape
    sizes = [(batch, n, seqlen, head_dim) for n in (heads, heads_kv, heads_kv)]
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    whole = [x.repeat_interleave(heads // heads_kv, 1) for x in (k, v)]
    row = {"call": f"({batch},{heads}/{heads_kv},{seqlen},{head_dim}) {kind}"}
    return row, q, k, v, whole, {"enable_gqa": heads != heads_kv}


def time_arguments(shape: tuple[Any, ...]) -> dict[str, Any]:
    """A row of a call that says by arguments what it hides, or adds a float mask."""
    batch, heads, _, seqlen, _, kind = shape
    row, q, k, v, whole, options = tensors(shape)
    ours, sdpa = attnsweep.attention, F.scaled_dot_product_attention
    if kind == "causal, key_lengths":
        mask = mask_of("causal, padded right", batch, seqlen)
        lengths = torch.linspace(0.4 * seqlen, seqlen, batch, device="cuda").int()
        ways: dict[str, Callable[[], Any]] = {
            "sdpa": lambda: sdpa(q, *whole, mask),
            "ours": lambda: ours(q, k, v, is_causal=True, key_lengths=lengths, **options),
        }
    elif kind.startswith("one query"):
        q = q[:, :, :1]
        lengths = torch.full((batch,), 300, device="cuda", dtype=torch.int32)
        filled = (torch.arange(seqlen, device="cuda") < 300).expand(batch, 1, 1, seqlen)
        ways = {
            "sdpa": lambda: sdpa(q, *whole, filled),
            "grouped": lambda: sdpa(q, k, v, filled, **options),
            "ours": lambda: ours(q, k, v, filled, **options),
        }
        if kind.endswith("key_lengths"):
            ways["ours"] = lambda: ours(q, k, v, key_lengths=lengths, **options)
    elif kind == "window of 1024":
        mask = mask_of(kind, batch, seqlen)
        ways = {"sdpa": lambda: sdpa(q, *whole, mask), "ours": lambda: ours(q, k, v, window=(1023, 0), **options)}
    elif kind.startswith("bias"):
        size = (1 if kind == "bias of heads" else batch, heads, 1 if kind == "bias of keys" else seqlen, seqlen)
        bias = torch.randn(*size, device="cuda", dtype=q.dtype)
        ways = {"sdpa": lambda: sdpa(q, *whole, bias), "ours": lambda: ours(q, k, v, bias, **options)}
    elif "softcap" in kind or "sinks" in kind:
        changes = {"softcap": 50.0} if "softcap" in kind else {"sinks": torch.linspace(-2, 2, heads, device="cuda")}
        mask = mask_of("causal" if "causal" in kind else "window of 128", batch, seqlen)
        hides = {"is_causal": True} if "causal" in kind else {"window": (127, 0)}
        ways = {
            "sdpa": lambda: eager(q, k, v, mask, **changes),
            "ours": lambda: ours(q, k, v, **hides, **changes, **options),
        }
    elif "sequences" in kind:
        from torch.nn.attention.varlen import varlen_attn

        number = int(kind.split()[1])
        lengths = torch.linspace(0.4, 1, number)
        ends = (lengths / lengths.sum()).cumsum(0) * seqlen
        cu = torch.tensor([0, *ends.round().int().tolist()], device="cuda", dtype=torch.int32)
        longest = int(cu.diff().max())
        packed = [each[0].transpose(0, 1).contiguous() for each in (q, k, v)]
        how = inspect.signature(varlen_attn).parameters
        gqa: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in how else {}
        causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in how else {"is_causal": True}
        ways = {
            "sdpa": lambda: varlen_attn(*packed, cu, cu, longest, longest, **causal, **gqa),
            "ours": lambda: attnsweep.attention_varlen(*packed, cu, cu, causal=True),
        }
    else:
        raise ValueError(kind)
    before = by_kernels()
    mine, exact = ways["ours"]().float(), ways["sdpa"]().float()
    off = float((mine - exact).norm() / exact.norm())
    return row | {"served": by_kernels() > before} | rounds_of(ways) | {"off": off}


def by_kernels() -> int:
    """The calls so far that kernels served."""
    return attnsweep.attention_counters().get("kernel", 0)


def eager(q: Any, k: Any, v: Any, mask: Any, softcap: float | None = None, sinks: Any = None) -> Any:
    """As models of transformers compute it that SDPA cannot serve."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min)
    if sinks is not None:
        sink = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
        scores = scores - scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : k.shape[2]].to(q.dtype)
    return weights @ v


def time_call(shape: tuple[Any, ...]) -> dict[str, Any]:
    """A row of a call with a mask."""
    row, q, k, v, whole, options = tensors(shape)
    mask = mask_of(shape[5], shape[0], shape[3])
    masks = itertools.cycle((mask, mask.clone(), mask.clone()))
    ways: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, *whole, mask),
        "ours": lambda: attnsweep.attention(q, k, v, mask, **options),
        "changing": lambda: attnsweep.attention(q, k, v, next(masks), cache=False, **options),
        "unmasked": lambda: F.scaled_dot_product_attention(q, *whole),
    }
    found = rounds_of(ways)
    row["code"] = attnsweep.explain_attention(q, k, v, mask, **options).code
    grouped = ways["sdpa"]().float()
    off = (ways["ours"]().float() - grouped).norm() / grouped.norm()
    found["host_ours_unmasked_us"] = round(host_us(lambda: attnsweep.attention(q, k, v, **options)), 1)
    return row | found | {"off": float(off)}


def time_compiled(shape: tuple[Any, ...]) -> dict[str, Any]:
    """A row of a compiled call whose mask is another in each call."""
    row, q, k, v, whole, options = tensors(shape)
    mask = mask_of(shape[5], shape[0], shape[3])
    masks = itertools.cycle([mask.roll(n, 0) for n in range(3)])
    counters = torch._dynamo.utils.counters["stats"]

    torch._dynamo.reset()
    theirs = torch.compile(lambda *of: F.scaled_dot_product_attention(*of), fullgraph=True)
    mine = torch.compile(lambda *of: attnsweep.attention(*of, **options), fullgraph=True)
    theirs(q, *whole, mask)
    before = counters["unique_graphs"]
    ways: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: theirs(q, *whole, next(masks)),
        "ours": lambda: mine(q, k, v, next(masks)),
        "eager": lambda: attnsweep.attention(q, k, v, next(masks), cache=False, **options),
    }
    served = by_kernels()
    apart = [(mine(q, k, v, each) - theirs(q, *whole, each)).float().norm() for each in (mask, mask.roll(1, 0))]
    found = row | {"served": by_kernels() == served + 2} | rounds_of(ways)
    size = float(theirs(q, *whole, mask).float().norm())
    return found | {"graphs": counters["unique_graphs"] - before, "off": float(max(apart)) / size}


SECTIONS = {
    "arguments": (time_arguments, ARGUMENTS),
    "calls": (time_call, CALLS),
    "compiled": (time_compiled, CALLS[:5]),
}


def main() -> None:
    """Time everything, and write the file if one is named."""
    file, found = options(__doc__).parse_args().file, defaultdict(list)
    for name, (timed, shapes) in SECTIONS.items():
        for shape in shapes:
            found[name].append(timed(shape))
            console.print(found[name][-1])
            torch.cuda.empty_cache()
    write(file, described() if file else None, found)


if __name__ == "__main__":
    main()

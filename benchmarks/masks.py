"""Time calls with a mask, with attnsweep and without.

Needs a GPU that attnsweep has winners for. Calls: q, k and v in bf16 and a mask as transformers
makes it. Each round takes, in random order, a sample of PyTorch's own attention (k and v repeated
beforehand, as models pass them) and of `attnsweep.attention` with the same mask, which was scanned
before; `changing` is ours with a mask that is another in each call, so that each call scans it. In
`arguments` a call says by arguments what it hides, and PyTorch gets the same as a mask; or both get
a float mask. Times are medians of the device's, microseconds a call, of calls that the host
enqueues before the first begins; `ratio` is the median of the rounds' PyTorch over ours. `host_us`:
from call to return, of ours; `host_sdpa_us` and `host_changing_us` those of the others. A loop of
single calls takes the longer of device and host.
"""

from __future__ import annotations

import inspect
import itertools
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from setting import console, described, options, write
from timing import AHEAD_CYCLES, Way, device_us, host_us

import attnsweep

ROUNDS, SAMPLE_US = 11, 4000
SLEEP_US = 4000  # the least that AHEAD_CYCLES take
Ways = dict[str, Callable[[], Any]]


class Call:
    """Tensors of a call of (batch, heads, heads_kv, seqlen, head_dim). whole: k, v for all heads."""

    def __init__(self, *sizes: int, queries: int | None = None) -> None:
        self.batch, self.heads, heads_kv, self.seqlen, _ = sizes
        shapes = [(self.batch, n, *sizes[3:]) for n in (self.heads, heads_kv, heads_kv)]
        q, *self.kv = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        self.q = q[:, :, :queries]
        self.whole = [x.repeat_interleave(self.heads // heads_kv, 1) for x in self.kv]
        self.lengths = torch.linspace(0.4 * self.seqlen, self.seqlen, self.batch, device="cuda").int()
        self.options = {"enable_gqa": self.heads != heads_kv}

    def mask(self, kind: str) -> Any:
        """(batch, 1, seqlen, seqlen), True where a query sees a key."""
        n, length = self.seqlen, self.lengths[:, None, None, None]
        i, j = torch.arange(n, device="cuda")[:, None], torch.arange(n, device="cuda")
        made = {
            "all": lambda: (i >= j) | True,
            "causal": lambda: i >= j,
            "padded right": lambda: j < length,
            "causal, padded right": lambda: (i >= j) & (j < length),
            "causal, padded left": lambda: (i >= j) & (j >= n - length),
            "window of 128": lambda: (i >= j) & (i - j < 128),
            "window of 512": lambda: (i >= j) & (i - j < 512),
            "window of 1024": lambda: (i >= j) & (i - j < 1024),
            "causal with holes": lambda: (i >= j) & (j % 7 != 3),
            "8 documents": lambda: i * 8 // n == j * 8 // n,
        }[kind]()
        return (made & torch.ones(self.batch, 1, n, n, device="cuda").bool()).contiguous()

    def ways(self, mask: Any, **hides: Any) -> Ways:
        """PyTorch with a mask, and ours with arguments: the mask, or what hides the same."""
        scores = {name: hides[name] for name in ("softcap", "sinks") if name in hides}
        ours, sdpa, q, kv, whole = attnsweep.attention, F.scaled_dot_product_attention, self.q, self.kv, self.whole
        given = hides | self.options
        return {
            "sdpa": (lambda: eager(q, *kv, mask, **scores)) if scores else lambda: sdpa(q, *whole, mask),
            "ours": lambda: ours(q, *kv, **given),
        }


def masked(call: Call, kind: str) -> Ways:
    """A boolean mask: the same in each call, and another one."""
    mask = call.mask(kind)
    masks = itertools.cycle((mask, mask.clone(), mask.clone()))
    again = partial(attnsweep.attention, call.q, *call.kv, cache=False, **call.options)
    return call.ways(mask, attn_mask=mask) | {"changing": lambda: again(next(masks))}


def on_a_cache(call: Call, *, by_lengths: bool) -> Ways:
    """A cache of which 300 keys are filled."""
    filled = (torch.arange(call.seqlen, device="cuda") < 300).expand(call.batch, 1, 1, call.seqlen)
    lengths = torch.full((call.batch,), 300, device="cuda", dtype=torch.int32)
    return call.ways(filled, **({"key_lengths": lengths} if by_lengths else {"attn_mask": filled}))


def biased(call: Call, *, items: bool = True, rows: bool = True) -> Ways:
    """A float mask of each head; of each item of the batch; of each query."""
    size = (call.batch if items else 1, call.heads, call.seqlen if rows else 1, call.seqlen)
    bias = torch.randn(size, device="cuda", dtype=call.q.dtype)
    return call.ways(bias, attn_mask=bias)


def of_positions(call: Call) -> Ways:
    """A bias of each head by distance, as T5 makes it: heads next to each other in memory."""
    bias = torch.randn(call.seqlen, call.seqlen, call.heads, device="cuda", dtype=call.q.dtype)
    mask = bias.permute(2, 0, 1)[None]
    return call.ways(mask, attn_mask=mask)


def with_sinks(call: Call, kind: str, **hides: Any) -> Ways:
    """A sink of each head."""
    return call.ways(call.mask(kind), sinks=torch.linspace(-2, 2, call.heads, device="cuda"), **hides)


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


def packed(call: Call, number: int) -> Ways:
    """Causal sequences without padding, beside PyTorch's varlen_attn."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.linspace(0.4, 1, number)
    ends = ((lengths / lengths.sum()).cumsum(0) * call.seqlen).round().int()
    cu = torch.tensor([0, *ends.tolist()], device="cuda", dtype=torch.int32)
    qkv = [each[0].transpose(0, 1).contiguous() for each in (call.q, *call.kv)]
    how, given = inspect.signature(varlen_attn).parameters, (cu, cu, *[int(cu.diff().max())] * 2)
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in how else {"is_causal": True}
    gqa = {"enable_gqa": True} if "enable_gqa" in how else {}
    return {
        "sdpa": lambda: varlen_attn(*qkv, *given, **causal, **gqa),
        "ours": lambda: attnsweep.attention_varlen(*qkv, *given, causal=True),
    }


CALLS = tuple(
    (sizes, kind, partial(masked, kind=kind))
    for sizes, kind in (
        ((4, 32, 8, 2048, 128), "causal, padded right"),
        ((4, 32, 8, 2048, 128), "causal, padded left"),
        ((8, 32, 32, 512, 64), "padded right"),
        ((32, 12, 12, 512, 64), "padded right"),
        ((1, 32, 8, 8192, 128), "window of 1024"),
        ((2, 16, 16, 4096, 128), "window of 512"),
        ((4, 16, 16, 4096, 128), "all"),
        ((8, 32, 32, 512, 64), "all"),
        ((2, 16, 16, 4096, 128), "causal with holes"),
        ((2, 16, 16, 4096, 128), "8 documents"),
        ((1, 12, 12, 256, 64), "padded right"),
    )
)
CACHE = "one query, a cache filled to 300"
ARGUMENTS: tuple[tuple[tuple[int, ...], str, Callable[[Call], Ways]], ...] = (
    ((4, 32, 8, 2048, 128), "causal, key_lengths",
     lambda c: c.ways(c.mask("causal, padded right"), is_causal=True, key_lengths=c.lengths)),
    ((8, 32, 8, 4096, 128), f"{CACHE}: key_lengths", partial(on_a_cache, by_lengths=True)),
    ((8, 32, 8, 4096, 128), f"{CACHE}: its mask", partial(on_a_cache, by_lengths=False)),
    ((1, 32, 8, 8192, 128), "window of 1024", lambda c: c.ways(c.mask("window of 1024"), window=(1023, 0))),
    ((2, 8, 8, 1024, 64), "bias", biased),
    ((1, 16, 16, 2048, 64), "bias of heads", partial(biased, items=False)),
    ((4, 16, 16, 1024, 64), "bias of keys", partial(biased, rows=False)),
    ((32, 12, 12, 512, 64), "bias of keys", partial(biased, rows=False)),
    ((4, 16, 16, 2048, 128), "bias", biased),
    ((16, 16, 16, 512, 64), "bias as of T5", of_positions),
    ((1, 16, 8, 4096, 256), "softcap, causal", lambda c: c.ways(c.mask("causal"), is_causal=True, softcap=50.0)),
    ((1, 64, 8, 4096, 64), "sinks, causal", lambda c: with_sinks(c, "causal", is_causal=True)),
    ((1, 64, 8, 4096, 64), "sinks, window of 128", lambda c: with_sinks(c, "window of 128", window=(127, 0))),
    ((1, 32, 8, 8192, 128), "packed, 8 sequences, causal", partial(packed, number=8)),
    ((1, 12, 12, 32768, 64), "packed, 64 sequences, causal", partial(packed, number=64)),
)  # fmt: skip


def served() -> int:
    """The calls so far that kernels served."""
    return attnsweep.attention_counters().get("kernel", 0)


def timed(sizes: tuple[int, ...], kind: str, ways_of: Callable[[Call], Ways]) -> dict[str, Any]:
    """Medians of each way's times, the median ratio of the first to ours, and how far ours is off."""
    call = Call(*sizes, queries=1 if kind.startswith(CACHE) else None)
    ways, before = ways_of(call), served()
    mine, theirs = ways["ours"]().float(), ways["sdpa"]().float()
    heads = f"{sizes[1]}/{sizes[2]}"
    row = {"call": f"({sizes[0]},{heads},{sizes[3]},{sizes[4]}) {kind}", "served": served() > before}
    row["off"] = float((mine - theirs).norm() / theirs.norm())
    hosts = host_us({name: Way(each) for name, each in ways.items()}, blocks=15, calls=20)
    host = {name: statistics.median(us) for name, us in hosts.items()}
    # More calls than the host enqueues meanwhile would add its time to one way, and not to another.
    counts = {
        name: max(1, int(min(SAMPLE_US / device_us(each, 2, AHEAD_CYCLES), SLEEP_US / 2 / host[name])))
        for name, each in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name in random.sample([*ways], len(ways)):
            times[name].append(device_us(ways[name], counts[name], AHEAD_CYCLES))
    ratios = [a / b for a, b in zip(times["sdpa"], times["ours"], strict=True)]
    row["ratio"] = round(statistics.median(ratios), 3)
    row |= {f"{name}_us": round(statistics.median(us), 1) for name, us in times.items()}
    return row | {f"host_{name}_us".replace("ours_", ""): round(us, 1) for name, us in host.items()}


def main() -> None:
    """Time everything, and write the file after each call if one is named."""
    file, here = options(__doc__).parse_args().file, described()
    found: dict[str, list[dict[str, Any]]] = {"arguments": [], "calls": []}
    for name, calls in (("arguments", ARGUMENTS), ("calls", CALLS)):
        for call in calls:
            found[name].append(timed(*call))
            console.print(found[name][-1])
            torch.cuda.empty_cache()
            write(file, here, found)


if __name__ == "__main__":
    main()

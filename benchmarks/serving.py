"""Steps of a serving engine: calls on a paged cache, and tokens a second of a whole loop.

  python benchmarks/serving.py calls|held_out|loop [FILE.json]

calls: requests that decode beside requests whose prompts are read in pieces, in one call, by
attnsweep, by FlashAttention-3 if it is installed, and by PyTorch behind a gather, in turns; every
output is compared. held_out: mixes that nobody tuned on, drawn before any was timed; a spec cannot
have them, because all its requests have as many queries. loop: continuous batching with a Llama of
random weights, whose attention is the class of docs/how-to/engine.md, by the same three: eager, and
with steps that only decode in CUDA graphs, which a gather cannot have.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from setting import described, options, write_rows
from timing import AHEAD_CYCLES, Way, device_us, turns

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from attnsweep.serve import paged_others, paged_varlen
from attnsweep.serve.paged_attention import counters

# Tokens and keys of a step's requests, heads, heads_kv, head_dim, page size.
LLAMA = (32, 8, 128)
CALLS: dict[str, Any] = {
    "31 decode at 4k, one reads 512 at 8k": ([1] * 31 + [512], [4096] * 31 + [8192], *LLAMA, 16),
    "the same, pages of 64": ([1] * 31 + [512], [4096] * 31 + [8192], *LLAMA, 64),
    "8 read 512 at 8k": ([512] * 8, [8192] * 8, *LLAMA, 16),
    "2 read 2048 at 16k": ([2048] * 2, [16384] * 2, *LLAMA, 16),
    "60 decode at 1k, 2 read 1024 at 1k": ([1] * 60 + [1024] * 2, [1024] * 62, *LLAMA, 16),
    "14 decode at 100 to 9k, 3 read 200 to 700": (
        [1] * 14 + [200, 333, 700],
        [100, 700, 1300, 1900, 2500, 3100, 3700, 4300, 4900, 5500, 6100, 6700, 7900, 9000, 900, 333, 4700],
        *LLAMA,
        16,
    ),
    "8 heads of 70B: 40 decode at 3k, one reads 2000": ([1] * 40 + [2000], [3000] * 40 + [2000], 8, 1, 128, 16),
    "20 check four guesses at 2k, one reads 300": ([5] * 20 + [300], [2000] * 20 + [6000], 28, 4, 128, 16),
    "32 decode at 4k": ([1] * 32, [4096] * 32, *LLAMA, 16),
    "32 decode at 128 or 4k": ([1] * 32, [128] * 16 + [4096] * 16, *LLAMA, 16),
}

HELD_OUT: dict[str, Any] = {
    "9 decode at 2k to 18k, one reads 900 at 3k": ([1] * 9 + [900], [*range(2000, 20000, 2000), 3000], *LLAMA, 16),
    "45 decode at 700, 3 read 256 at 2.5k": ([1] * 45 + [256] * 3, [700] * 45 + [2500] * 3, *LLAMA, 16),
    "5 decode at 24k, 2 read 1500 at 12k": ([1] * 5 + [1500] * 2, [24000] * 5 + [12000] * 2, *LLAMA, 64),
    "26 decode at 50 to 7k, one reads 2048 at 2k": (
        [1] * 26 + [2048],
        [50, 90, 260, 470, 820, 1100, 1900, 2600, 3300, 4100, 5200, 6000, 7000] * 2 + [2048],
        *LLAMA,
        16,
    ),
    "16 check three guesses at 5k, 2 read 400 at 1k": ([4] * 16 + [400] * 2, [5000] * 16 + [1000] * 2, *LLAMA, 16),
    "28 heads: 60 decode at 1.5k, one reads 1024 at 9k": ([1] * 60 + [1024], [1500] * 60 + [9000], 28, 4, 128, 32),
    "8 heads of 70B: 100 decode at 2k, 4 read 128 at 6k": (
        [1] * 100 + [128] * 4,
        [2000] * 100 + [6000] * 4,
        8,
        1,
        128,
        16,
    ),
    "columns of 64: 20 decode at 3k, 3 read 700 at 4k": ([1] * 20 + [700] * 3, [3000] * 20 + [4000] * 3, 16, 4, 64, 16),
}

LOOPS = 10  # the first of each is not counted
SLOW_LOOPS = 3  # of PyTorch behind a gather
LONGEST = 1600  # tokens of a request that graphs of the loop serve


def flash_3(**given: Any) -> Any:
    """FlashAttention-3 on the same arguments."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    how = {"cache_seqlens": given["seqused_k"], "page_table": given["block_table"], "causal": True}
    how |= {name: given[name] for name in ("cu_seqlens_q", "max_seqlen_q")}
    out = paged_others._flash_3()(q, k, v, **how)
    return out[0] if isinstance(out, tuple) else out


def gathered(**given: Any) -> Any:
    """PyTorch's attention behind a gather."""
    how = (None, None, None, None, 0.0, True, (-1, -1), False, given["cu_seqlens_q"], given["max_seqlen_q"])
    names = ("q", "k", "v", "seqused_k", "block_table")
    call = paged_varlen.understood(*(given[name] for name in names), *how)
    return paged_others._unpacked(call, paged_others._by_attention)[0]


def ours(**given: Any) -> Any:
    """Attnsweep, whose kernels must serve."""
    before = counters["kernel"]
    out = paged_varlen.flash_attn_varlen_func(**given, causal=True)
    assert counters["kernel"] == before + 1, dict(counters)
    return out


def providers() -> dict[str, Any]:
    """What is compared."""
    made = {"attnsweep": ours, "torch_gathered": gathered}
    if paged_others.has_flash_3():
        made["flash_attn_3"] = flash_3
    return made


def measured_calls(calls: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each call."""
    from packed_step import Step

    for name, (tokens, keys, heads, heads_kv, dim, page) in calls.items():
        step = Step(tokens, keys, heads, heads_kv, dim, page=page, device="cuda")
        given = {"q": step.q, "k": step.k, "v": step.v, "cu_seqlens_q": step.begins, "seqused_k": step.lengths}
        given |= {"max_seqlen_q": max(tokens), "block_table": step.table.clamp(min=0)}
        ways, outs = {}, {}
        for provider, call in providers().items():
            own = dict(given)
            if provider != "attnsweep":  # NaN behind a length is nothing that these promise to bear
                own |= {each: torch.nan_to_num(given[each]) for each in ("k", "v")}
            ways[provider] = Way(functools.partial(call, **own))
            outs[provider] = ways[provider].call().float()
        largest = outs["torch_gathered"].abs().max()
        apart = {each: float((out - outs["torch_gathered"]).abs().max() / largest) for each, out in outs.items()}
        assert max(apart.values()) < 2**-6, apart
        sample = functools.partial(device_us, calls=10, sleep_cycles=AHEAD_CYCLES)
        times = turns(ways, 15, sample)
        medians = {each: round(statistics.median(own), 2) for each, own in times.items()}
        row = {"call": name, "us": medians, "apart": {each: round(by, 5) for each, by in apart.items()}}
        if "flash_attn_3" in medians:
            pairs = zip(times["flash_attn_3"], times["attnsweep"], strict=True)
            row["over_flash_3"] = round(statistics.median(a / b for a, b in pairs), 3)
        yield row


def measured_loop() -> Iterator[dict[str, Any]]:
    """Tokens a second of a loop, for each way, in turns."""
    from engine import Engine, class_of_guide, llama

    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}
    model = llama("cuda", torch.bfloat16, **sizes, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    of_guide = class_of_guide()
    for guesses, graphed in itertools.product((0, 4), (False, True)):
        rates: dict[str, list[float]] = {}
        for number in range(LOOPS):
            for provider, call in providers().items():
                if provider == "torch_gathered" and (graphed or number >= SLOW_LOOPS):
                    continue
                own = type(provider, (of_guide,), {"attend": _attend(call)})
                rng = random.Random(7)
                how = {"budget": 2048, "guesses": guesses, "most": 32, "graphed": LONGEST * graphed}
                engine = Engine(model, 4000, attention=own, **how)
                for cache in engine.caches:
                    cache.zero_()
                engine.add([1] * 30, 8)
                engine.run()  # a graph is captured before any time is taken
                made = [
                    engine.add([rng.randrange(32000) for _ in range(rng.choice((30, 500, 1500)))], 40)
                    for _ in range(48)
                ]
                torch.cuda.synchronize()
                began = time.perf_counter()
                engine.run()
                torch.cuda.synchronize()
                took = time.perf_counter() - began
                tokens = sum(len(each.made) for each in made)
                rates.setdefault(provider, []).append(tokens / took)
        row = {"guesses": guesses, "graphs": graphed, "steps": engine.steps, "kinds": len(engine.kinds)}
        row["tokens_per_s"] = {each: round(statistics.median(own[1:]), 1) for each, own in rates.items()}
        if "flash_attn_3" in rates:
            pairs = [a / b for a, b in zip(rates["attnsweep"], rates["flash_attn_3"], strict=True)][1:]
            row["over_flash_3"] = round(statistics.median(pairs), 3)
            row["over_flash_3_of_turns"] = [round(each, 3) for each in sorted(pairs)]
        yield row


def _attend(call: Any) -> Any:
    def attend(self: Any, query: Any, k_cache: Any, v_cache: Any, metadata: Any, output: Any) -> None:
        given = {"q": query, "k": k_cache, "v": v_cache, "cu_seqlens_q": metadata.query_start_loc}
        given |= {"max_seqlen_q": metadata.max_query_len, "seqused_k": metadata.seq_lens}
        output.copy_(call(**given, block_table=metadata.block_table))

    return attend


def main() -> None:
    """See the file's text."""
    parser = options(__doc__, "what", ("calls", "held_out", "loop"))
    told = parser.parse_args()
    calls = {"calls": CALLS, "held_out": HELD_OUT}.get(told.what)
    rows = measured_loop() if calls is None else measured_calls(calls)
    write_rows(told.file, described(), rows, torch=torch.__version__)


if __name__ == "__main__":
    main()

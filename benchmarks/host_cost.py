"""Measure what an attention call costs the host: this package's against PyTorch's.

Needs a GPU that attnsweep has winners for. Each call is timed alone, without waiting for the GPU.
Callers take turns in random order, 100 calls a turn, after which the GPU catches up.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from setting import described, options, write_rows
from timing import Way, host_us
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnsweep

TURNS, CALLS = 40, 100
# (batch, heads, seqlen, head_dim), dtype, causal: tuned in the recorded runs.
SHAPES = (
    ((1, 16, 1024, 64), torch.float16, False),
    ((1, 16, 1024, 64), torch.float16, True),
    ((4, 16, 2048, 128), torch.bfloat16, True),
)
ADDRESSES = 1000  # more than the package remembers launches of


def ways_of(shape: Any) -> dict[str, Way]:
    """Everyone who is timed on a shape. Raises SystemExit if attnsweep has no kernel for it."""
    (batch, heads, seqlen, head_dim), dtype, causal = shape
    # As a model has them: views of (batch, seqlen, heads, head_dim).
    made = (torch.randn(batch, seqlen, heads, head_dim, device="cuda").to(dtype) for _ in range(3))
    tensors = [t.transpose(1, 2) for t in made]
    why = attnsweep.explain_attention(*tensors, is_causal=causal)
    if why.kernel is None:
        sys.exit(f"no kernel serves {shape}: {why}")
    attention = partial(attnsweep.attention, is_causal=causal)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    memory = torch.randn(tensors[0].numel() + 8 * ADDRESSES, device="cuda").to(dtype)
    shape = (batch, heads, seqlen, head_dim)
    moved = itertools.cycle(
        [memory[8 * at :][: tensors[0].numel()].view(shape) for _ in range(3)] for at in range(ADDRESSES)
    )

    def called() -> Any:  # as a model calls it
        return F.scaled_dot_product_attention(*tensors, is_causal=causal)

    return {
        "package": Way(lambda: attention(*tensors)),
        "enabled": Way(called, attnsweep.enable),
        "sdpa": Way(called),
        "sdpa_flash": Way(called, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
        "package_new_addresses": Way(lambda: attention(*next(moved))),
        "package_gradients": Way(lambda: attention(*leaves)),
        "sdpa_gradients": Way(lambda: F.scaled_dot_product_attention(*leaves, is_causal=causal)),
    }


def ways_of_mla(batch: int = 128, heads: int = 16, blocks: int = 16) -> dict[str, Way]:
    """Decoding with latent keys. Raises SystemExit if no kernel serves it.

    mla_qv: in FlashAttention-3's form, of views; mla_qv_apart: of queries in two tensors.
    """
    made = partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
    q, kv = made(batch, 1, heads, 576), made(batch * blocks, 64, 1, 576)
    table = torch.arange(batch * blocks, dtype=torch.int32, device="cuda").view(batch, blocks)
    lengths = torch.full((batch,), blocks * 64, dtype=torch.int32, device="cuda")
    plan = attnsweep.mla_plan(lengths, heads)
    if plan is None:
        sys.exit("no kernel serves MLA's decoding here")
    (qv, rope), (v, k) = (x.split((512, 64), -1) for x in (q, kv))
    of_cache: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "softmax_scale": 0.07}
    form = partial(attnsweep.flash_attn_with_kvcache, causal=True, scheduler_metadata=plan, **of_cache)
    decode = partial(attnsweep.mla_decode, q, kv, table, lengths, softmax_scale=0.07)
    return {
        "mla_planned": Way(partial(decode, plan=plan)),
        "mla": Way(decode),
        "mla_qv": Way(partial(form, rope, k, v, qv=qv)),
        "mla_qv_apart": Way(partial(form, rope.clone(), k, v, qv=qv.clone())),
        "mla_plan": Way(lambda: attnsweep.mla_plan(lengths, heads)),
    }


def ways_of_paged(batch: int = 32, heads: int = 32, heads_kv: int = 8, blocks: int = 8) -> dict[str, Way]:
    """Decoding from pages of 16 slots. Raises SystemExit if no kernel serves it.

    paged_scheduled: with a schedule made before; paged_out: into a tensor that is there.
    """
    made = partial(torch.zeros, dtype=torch.bfloat16, device="cuda")
    q, (k, v) = made(batch, 1, heads, 128), made(2, batch * blocks, 16, heads_kv, 128)
    table = torch.arange(batch * blocks, dtype=torch.int32, device="cuda").view(batch, blocks)
    lengths = torch.full((batch,), blocks * 16, dtype=torch.int32, device="cuda")
    call = partial(attnsweep.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, page_table=table, causal=True)
    sizes = (batch, 1, blocks * 16, heads, heads_kv, 128)
    schedule = attnsweep.get_scheduler_metadata(*sizes, lengths, page_size=16, causal=True)
    if schedule is None:
        sys.exit("no kernel serves decoding from pages here")
    scheduled, out = partial(call, scheduler_metadata=schedule), torch.empty_like(q)
    return {
        "paged": Way(call),
        "paged_scheduled": Way(scheduled),
        "paged_out": Way(partial(call, out=out)),
        "paged_scheduled_out": Way(partial(scheduled, out=out)),
        "empty_like": Way(lambda: torch.empty_like(q)),
    }


def cases() -> Iterator[tuple[str, dict[str, Way]]]:
    """Each shape and who is timed on it."""
    for shape in SHAPES:
        yield f"{shape[0]} {str(shape[1]).removeprefix('torch.')} {'causal' if shape[2] else 'full'}", ways_of(shape)
    yield "(32, 32/8, 1x128, 128) bfloat16 paged(16)", ways_of_paged()
    yield "(128, 16/1, 1x1024, 576/512) bfloat16 causal", ways_of_mla()


def rows() -> Iterator[dict[str, Any]]:
    """For each shape and caller the median, and the 10th and 90th percentile, in microseconds."""
    for label, ways in cases():
        callers = {}
        for name, us in host_us(ways, TURNS, CALLS).items():
            low, *_, high = tenths = statistics.quantiles(us, n=10)
            each = {"median_us": tenths[4], "low_us": low, "high_us": high}
            callers[name] = {key: round(value, 3) for key, value in each.items()}
        yield {"shape": label, "callers": callers}


if __name__ == "__main__":
    file = options(__doc__).parse_args().file
    write_rows(file, described(), rows(), "shapes", torch=torch.__version__)

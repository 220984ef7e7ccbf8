"""Measure what an attention call costs the host: this package's against PyTorch's backends.

Usage: python benchmarks/host_cost.py [FILE.json]. Needs a GPU that attnsweep has winners for. Each
call is timed alone, without waiting for the GPU, and its output replaces the one before; every 100
calls the GPU catches up. Callers take turns in random order, 100 calls a turn. Also measured, each
in fresh processes: what importing takes beyond PyTorch, and the first call on a GPU that PyTorch
has used already, with its wait.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from setting import console, described, options, write
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnsweep

TURNS, CALLS = 40, 100
PROCESSES = 5
# (batch, heads, seqlen, head_dim), dtype, causal: tuned in the recorded runs.
SHAPES = (
    ((1, 16, 1024, 64), torch.float16, False),
    ((1, 16, 1024, 64), torch.float16, True),
    ((4, 16, 2048, 128), torch.bfloat16, True),
)
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# More addresses than the package remembers launches of.
ADDRESSES = 5000

IMPORT = """
import time, torch
begin = time.perf_counter()
import attnsweep
attnsweep.attention_counters()
print(time.perf_counter() - begin)
"""
FIRST_CALL = """
import sys, time, torch
import torch.nn.functional as F
import attnsweep
attnsweep.attention_counters()  # imports what attnsweep imports late
q, k, v = (torch.randn(1, 16, 1024, 64, device="cuda").half() for _ in range(3))
expected = F.scaled_dot_product_attention(q, k, v)
torch.cuda.synchronize()
begin = time.perf_counter()
got = attnsweep.attention(q, k, v)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
assert attnsweep.attention_counters() == {"kernel": 1}
assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)
"""


class Caller(NamedTuple):
    """What is timed: gets the number of the call. within: is entered around a turn, untimed."""

    call: Callable[[int], Any]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def host_us(
    callers: dict[str, Caller],
    *,
    turns: int = TURNS,
    calls: int = CALLS,
    wait: Callable[[], Any] = torch.cuda.synchronize,
) -> dict[str, dict[str, float]]:
    """Microseconds of one call by name: the median, and the 10th and 90th percentile.

    The first turn of a caller is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in callers}
    order = list(callers)
    clock = time.perf_counter_ns
    for turn in range(turns + 1):
        random.shuffle(order)
        for name in order:
            call, within = callers[name]
            own, kept = [], None
            with within():
                for number in range(turn * calls, (turn + 1) * calls):
                    begin = clock()
                    kept = call(number)
                    own.append((clock() - begin) / 1e3)
            del kept
            wait()
            times[name] += own if turn else []
    tenths = {name: statistics.quantiles(own, n=10) for name, own in times.items()}
    which = {"median_us": 4, "low_us": 0, "high_us": -1}
    return {name: {key: round(of[n], 3) for key, n in which.items()} for name, of in tenths.items()}


def callers_of(shape: Any) -> dict[str, Caller]:
    """Everyone who is timed on a shape. Raises SystemExit if attnsweep has no kernel for it."""
    (batch, heads, seqlen, head_dim), dtype, causal = shape
    # As a model has them: views of (batch, seqlen, heads, head_dim).
    tensors = [torch.randn(batch, seqlen, heads, head_dim, device="cuda").to(dtype).transpose(1, 2) for _ in range(3)]
    q, k, v = tensors
    why = attnsweep.explain_attention(q, k, v, is_causal=causal)
    if why.kernel is None:
        sys.exit(f"no kernel serves {shape}: {why}")
    attention = attnsweep.attention
    memory = torch.randn(q.numel() + 8 * ADDRESSES, device="cuda").to(dtype)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]

    def moved(number: int) -> torch.Tensor:
        at = 8 * (number % ADDRESSES)
        return memory[at : at + q.numel()].view(batch, heads, seqlen, head_dim)

    def called(number: int) -> Any:  # as a model calls it
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def at_new_addresses(number: int) -> Any:
        view = moved(number)
        return attention(view, view, view, is_causal=causal)

    callers = {
        "package": Caller(lambda _: attention(q, k, v, is_causal=causal)),
        "enabled": Caller(called, attnsweep.enable),
        "sdpa": Caller(called),
        "package_new_addresses": Caller(at_new_addresses),
        "view_of_new_addresses": Caller(moved),
        "package_gradients": Caller(lambda _: attention(*leaves, is_causal=causal)),
        "sdpa_gradients": Caller(lambda _: F.scaled_dot_product_attention(*leaves, is_causal=causal)),
        "empty_like": Caller(lambda _: torch.empty_like(q)),
        "nothing": Caller(lambda _: None),
    }
    for name, backend in BACKENDS.items():
        callers[name] = Caller(called, partial(sdpa_kernel, backend))
    return callers


def seconds_of(code: str) -> float:
    """The median of what a program prints, run in fresh processes."""
    printed = []
    for _ in range(PROCESSES):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        printed.append(float(done.stdout))
    return statistics.median(printed)


def main() -> None:
    """Measure, print, and write the file if one is named."""
    file, here = options(__doc__).parse_args().file, described()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "package": "attnsweep",
        "import_s": round(seconds_of(IMPORT), 4),
        "first_call_ms": round(1e3 * seconds_of(FIRST_CALL), 2),
        "shapes": [],
    }
    console.print(result)
    for shape in SHAPES:
        mask = "causal" if shape[2] else "full"
        label = f"{shape[0]} {str(shape[1]).removeprefix('torch.')} {mask}"
        result["shapes"].append({"shape": label, "callers": host_us(callers_of(shape))})
        console.print_json(data=result["shapes"][-1])
    write(file, here, result)


if __name__ == "__main__":
    main()

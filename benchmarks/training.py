"""Time forward and backward of attention calls, by PyTorch alone and with a package enabled.

Usage: python benchmarks/training.py [FILE.json] [--seconds 240] [--blocks]. Needs a GPU that
attnsweep has winners for: its attention is the package.

q, k and v are (batch, seqlen, heads, head_dim) tensors seen as (batch, heads, seqlen, head_dim), as
models hold them, in bf16; the output is taken as (batch, seqlen, heads * head_dim), and gradients
are asked for all three. `eager`: the call as it is;
`compiled`: by torch.compile, PyTorch alone and the package each compiled apart. The four take turns
in random order, ROUNDS times, while Python collects no garbage.

- step: of steps one after another, none of which waits for the GPU: forward and backward together,
  whichever of host and device takes longer. `ratio` is the median of the rounds' PyTorch over
  package, with the rounds' 2.5th and 97.5th percentiles.
- forward, backward: of the device alone, while it has steps of its own to do before.
- alone: a step that begins and ends with an idle GPU, by the host's clock.
- code: what the package says of the call; a call that it hands over is PyTorch's in both.

With `--blocks` only the host's time of steps, of the shapes whose steps it bounds: BLOCKS blocks of
BLOCK_STEPS steps each, PyTorch alone and the package in turns; the time of each step, from its call
to its return, and their percentiles. The noise of a host is in the upper ones.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from models import device_us, timed_ms
from setting import console, described, options, write

import attnsweep

WHO = {"pytorch": nullcontext, "package": attnsweep.enable}
ROUNDS, SAMPLE_US, MOST_STEPS = 31, 6000, 16
BLOCKS, BLOCK_STEPS, PERCENTILES = 60, 80, (10, 25, 50)
AHEAD_CYCLES = 8_000_000  # the GPU spins while the host queues the steps that follow
# batch, heads, heads_kv, seqlen, head_dim, causal
SHAPES = (
    (2, 32, 8, 4096, 128, True),
    (4, 16, 16, 4096, 128, True),
    (4, 16, 16, 4096, 128, False),
    (1, 16, 16, 16384, 128, True),
    (8, 16, 16, 2048, 128, True),
    (4, 32, 32, 4096, 64, True),
    (2, 16, 16, 4096, 256, True),
    (16, 12, 12, 1024, 64, True),
    (32, 16, 16, 512, 64, False),
    (8, 12, 12, 512, 64, False),
    (1, 16, 16, 1024, 64, True),
    (32, 16, 16, 128, 64, False),
)
HOST_BOUND = SHAPES[7:]  # by the host rather than by the device


def label(shape: tuple[Any, ...]) -> str:
    """`(2,32/8,4096,128) causal`."""
    batch, heads, heads_kv, seqlen, head_dim, causal = shape
    grouped = f"/{heads_kv}" if heads_kv != heads else ""
    mask = "causal" if causal else "full"
    return f"({batch},{heads}{grouped},{seqlen},{head_dim}) {mask}"


class Step:
    """Forward and backward of one call. enabled: returns a context in which the call is made."""

    def __init__(self, shape: tuple[Any, ...], compiled: bool, enabled: Callable[[], Any]) -> None:
        batch, heads, heads_kv, seqlen, head_dim, causal = shape
        draw = torch.Generator("cuda").manual_seed(0)
        sizes = [(batch, seqlen, n, head_dim) for n in (heads, heads_kv, heads_kv, heads)]
        *qkv, grad = (torch.randn(*size, generator=draw, device="cuda", dtype=torch.bfloat16) for size in sizes)
        self.grad = grad.flatten(2)
        self.given = [t.transpose(1, 2).requires_grad_() for t in qkv]
        self.options = {"is_causal": causal, "enable_gqa": heads != heads_kv}

        def attention(q: Any, k: Any, v: Any) -> Any:
            out = F.scaled_dot_product_attention(q, k, v, **self.options)
            return out.transpose(1, 2).flatten(2)

        self.attention = torch.compile(attention) if compiled else attention
        self.enabled = enabled

    def __call__(self, events: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The gradients. events: are recorded before, between and after the two halves."""
        for event in events[:1]:
            event.record()
        out = self.attention(*self.given)
        for event in events[1:2]:
            event.record()
        grads = torch.autograd.grad(out, self.given, self.grad)
        for event in events[2:]:
            event.record()
        return grads

    def code(self) -> str:
        """What the package says of the call."""
        return str(attnsweep.explain_attention(*self.given, **self.options).code)

    def halves_us(self, steps: int = 4) -> tuple[float, float]:
        """Microseconds of forward and of backward on the device, which is busy before them."""
        all_events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(steps)]
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        for events in all_events:
            self(events)
        torch.cuda.synchronize()
        halves = [[float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(events)] for events in all_events]
        forward, backward = (statistics.median(each) for each in zip(*halves, strict=True))
        return forward, backward


def measured(shape: tuple[Any, ...]) -> dict[str, Any]:
    """The row of a shape."""
    torch.compiler.reset()
    callers = {(mode, who): Step(shape, mode == "compiled", WHO[who]) for mode in ("eager", "compiled") for who in WHO}
    for step in callers.values():
        with step.enabled():
            for _ in range(3):
                step()
    count = max(2, min(MOST_STEPS, round(SAMPLE_US / device_us(callers["eager", "pytorch"], 4))))
    names = ("step", "forward", "backward", "alone")
    found: dict[Any, dict[str, list[float]]] = {key: {n: [] for n in names} for key in callers}
    order = list(callers)
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        random.shuffle(order)
        for key in order:
            step = callers[key]
            with step.enabled():
                step()  # Python knows functions anew that `enable` has replaced
                step()
                values = (device_us(step, count), *step.halves_us(), timed_ms(step) * 1e3)
            for name, value in zip(names, values, strict=True):
                found[key][name].append(value)
    gc.enable()
    row: dict[str, Any] = {"shape": label(shape), "code": callers["eager", "package"].code()}
    for mode in ("eager", "compiled"):
        both = {who: found[mode, who] for who in WHO}
        ratios = sorted(a / b for a, b in zip(*(times["step"] for times in both.values()), strict=True))
        edge = len(ratios) * 25 // 1000
        row[mode] = {
            who: {n: round(statistics.median(us), 1) for n, us in times.items()} for who, times in both.items()
        }
        row[mode]["ratio"] = [round(each, 3) for each in (statistics.median(ratios), ratios[edge], ratios[-1 - edge])]
    return row


def in_blocks(shape: tuple[Any, ...]) -> dict[str, Any]:
    """The row of a shape with `--blocks`."""
    torch.compiler.reset()
    modes = {mode: hosts_us(shape, mode == "compiled") for mode in ("eager", "compiled")}
    return {"shape": label(shape), **modes, "code": Step(shape, False, attnsweep.enable).code()}


def hosts_us(shape: tuple[Any, ...], compiled: bool) -> dict[str, list[float]]:
    """Percentiles of the host's microseconds of a step, and of PyTorch's over the package's."""
    steps = {who: Step(shape, compiled, enabled) for who, enabled in WHO.items()}
    steps_us: dict[str, list[float]] = {who: [] for who in steps}
    gc.collect()
    gc.disable()
    for _ in range(BLOCKS):
        for who in random.sample(list(steps), 2):
            step = steps[who]
            with step.enabled():
                for number in range(-BLOCK_STEPS // 4, BLOCK_STEPS):
                    begin = time.perf_counter()
                    step()
                    took_us = (time.perf_counter() - begin) * 1e6
                    if number >= 0:
                        steps_us[who].append(took_us)
            torch.cuda.synchronize()
    gc.enable()
    found = {who: [sorted(us)[len(us) * part // 100] for part in PERCENTILES] for who, us in steps_us.items()}
    pairs = zip(found["pytorch"], found["package"], strict=True)
    row = {who: [round(each, 1) for each in us] for who, us in found.items()}
    return row | {"ratio": [round(theirs / ours, 3) for theirs, ours in pairs]}


def main() -> None:
    """Print a line for each shape and mode; write the file."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--blocks", action="store_true")
    given = parser.parse_args()
    end, rows, left_out = time.monotonic() + given.seconds, [], []
    for shape in HOST_BOUND if given.blocks else SHAPES:
        if time.monotonic() > end:
            left_out.append(label(shape))
            continue
        rows.append((in_blocks if given.blocks else measured)(shape))
        console.print(rows[-1])
    rounds = {"blocks": BLOCKS} if given.blocks else {"rounds": ROUNDS}
    result = {"torch": torch.__version__, **rounds, "rows": rows, "left_out": left_out}
    write(given.file, described(), result)


if __name__ == "__main__":
    main()

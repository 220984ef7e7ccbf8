"""Time forward and backward of attention calls, by PyTorch alone and with a package enabled.

Usage: python benchmarks/training.py [FILE.json] [--package DIR] [--seconds 240] [--only LABEL ...]
[--blocks].
Needs a GPU that the package has winners for (default: the package that comes with attnsweep).

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

With `--blocks` only the host's time of steps, where it is the slower one: BLOCKS blocks of
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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from setting import console, described, options, package_at, write

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
        q, k, v, self.grad = (
            torch.randn(*(batch, seqlen, n, head_dim), generator=draw, device="cuda", dtype=torch.bfloat16).transpose(
                1, 2
            )
            for n in (heads, heads_kv, heads_kv, heads)
        )
        self.grad = self.grad.transpose(1, 2).flatten(2)
        self.given = [t.requires_grad_() for t in (q, k, v)]
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

    def code(self, package: Any) -> str:
        """What the package says of the call."""
        return str(package.explain(*self.given, **self.options).code)

    def us(self, steps: int) -> float:
        """Microseconds of a step, the mean of `steps` in a row."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(steps):
            self()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / steps

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

    def alone_us(self) -> float:
        """Microseconds of a step on an idle GPU, and the wait for its end."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6


def measured(shape: tuple[Any, ...], package: Any) -> dict[str, Any]:
    """The row of a shape."""
    torch.compiler.reset()
    callers = {
        (mode, who): Step(shape, mode == "compiled", package.enable if who == "package" else nullcontext)
        for mode in ("eager", "compiled")
        for who in ("pytorch", "package")
    }
    for step in callers.values():
        with step.enabled():
            for _ in range(3):
                step()
    count = max(2, min(MOST_STEPS, round(SAMPLE_US / callers["eager", "pytorch"].us(4))))
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
                values = (step.us(count), *step.halves_us(), step.alone_us())
            for name, value in zip(names, values, strict=True):
                found[key][name].append(value)
    gc.enable()
    row: dict[str, Any] = {"shape": label(shape)}
    row["code"] = callers["eager", "package"].code(package)
    for mode in ("eager", "compiled"):
        both = {who: found[mode, who] for who in ("pytorch", "package")}
        pairs = zip(both["pytorch"]["step"], both["package"]["step"], strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        row[mode] = {
            who: {name: round(statistics.median(us), 1) for name, us in times.items()} for who, times in both.items()
        }
        row[mode]["ratio"] = [
            round(each, 3)
            for each in (
                statistics.median(ratios),
                ratios[len(ratios) * 25 // 1000],
                ratios[-1 - len(ratios) * 25 // 1000],
            )
        ]
    return row


def in_blocks(shape: tuple[Any, ...], package: Any) -> dict[str, Any]:
    """The row of a shape with `--blocks`."""
    torch.compiler.reset()
    modes = {mode: hosts_us(shape, mode == "compiled", package) for mode in ("eager", "compiled")}
    code = Step(shape, False, package.enable).code(package)
    return {"shape": label(shape), **modes, "code": code}


def hosts_us(shape: tuple[Any, ...], compiled: bool, package: Any) -> dict[str, list[float]]:
    """Percentiles of the host's microseconds of a step, and of PyTorch's over the package's."""
    steps = {who: Step(shape, compiled, nullcontext) for who in ("pytorch", "package")}
    steps_us: dict[str, list[float]] = {who: [] for who in steps}
    gc.collect()
    gc.disable()
    for _ in range(BLOCKS):
        for who in random.sample(list(steps), 2):
            step = steps[who]
            with package.enable() if who == "package" else nullcontext():
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each shape and mode; write the file."""
    parser = options(__doc__)
    parser.add_argument("--package", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", nargs="+", metavar="LABEL", default=[])
    parser.add_argument("--blocks", action="store_true")
    given = parser.parse_args(arguments)
    package = package_at(given.package)
    end, rows, left_out = time.monotonic() + given.seconds, [], []
    for shape in SHAPES:
        if given.only and label(shape) not in given.only:
            continue
        if time.monotonic() > end:
            left_out.append(label(shape))
            continue
        rows.append((in_blocks if given.blocks else measured)(shape, package))
        console.print(rows[-1])
    rounds = {"blocks": BLOCKS} if given.blocks else {"rounds": ROUNDS}
    result = {"torch": torch.__version__, **rounds, "rows": rows, "left_out": left_out}
    write(given.file, described(), result)


if __name__ == "__main__":
    main()

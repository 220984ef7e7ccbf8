"""Time forward and backward of attention calls, by PyTorch alone and with a package enabled.

Needs a GPU that attnsweep has winners for: its attention is the package. q, k and v are (batch,
seqlen, heads, head_dim) tensors seen as (batch, heads, seqlen, head_dim), as models hold them, in
bf16; the output is taken as (batch, seqlen, heads * head_dim), and gradients are asked for all
three. `eager`: the call as it is; `compiled`: by torch.compile, PyTorch alone and the package each
compiled apart. The four take turns in random order, ROUNDS times.

- step: of steps one after another, none of which waits for the GPU: forward and backward together,
  whichever of host and device takes longer. `ratio` is the median of the rounds' PyTorch over
  package, with the rounds' 2.5th and 97.5th percentiles.
- forward, backward: of the device alone, while it has steps of its own to do before.
- code: what the package says of the call; a call that it hands over is PyTorch's in both.

With `--blocks` only the host's time of steps, of the shapes whose steps it bounds: the median of
each step's, from its call to its return.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from setting import described, options, write_rows
from timing import AHEAD_CYCLES, Way, device_us, host_us, without_garbage

import attnsweep

WHO = {"pytorch": nullcontext, "package": attnsweep.enable}
ROUNDS, SAMPLE_US, MOST_STEPS = 31, 6000, 16
BLOCKS, BLOCK_STEPS = 60, 80
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
    (4, 16, 16, 577, 64, False),
    (2, 32, 8, 512, 128, True),
)
HOST_BOUND = SHAPES[7:]  # by the host rather than by the device


def tensors(shape: tuple[Any, ...]) -> tuple[list[Any], Any, dict[str, bool]]:
    """q, k and v, the gradient of the output, and options of a call."""
    batch, heads, heads_kv, seqlen, head_dim, causal = shape
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = [(batch, seqlen, n, head_dim) for n in (heads, heads_kv, heads_kv, heads)]
    *qkv, grad = (torch.randn(*size, generator=draw, device="cuda", dtype=torch.bfloat16) for size in sizes)
    given = [t.transpose(1, 2).requires_grad_() for t in qkv]
    return given, grad.flatten(2), {"is_causal": causal, "enable_gqa": heads != heads_kv}


def step_of(shape: tuple[Any, ...], compiled: bool) -> Callable[..., Any]:
    """Forward and backward of a call: a function that calls `mark` before, between and after."""
    given, grad, options = tensors(shape)

    def attention(q: Any, k: Any, v: Any) -> Any:
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return out.transpose(1, 2).flatten(2)

    forward = torch.compile(attention) if compiled else attention

    def step(mark: Callable[[], None] = lambda: None) -> Any:
        mark()
        out = forward(*given)
        mark()
        grads = torch.autograd.grad(out, given, grad)
        mark()
        return grads

    return step


def halves_us(step: Callable[..., Any], steps: int = 4) -> list[float]:
    """Microseconds of forward and of backward on the device, which is busy before them."""
    events = iter(made := [torch.cuda.Event(enable_timing=True) for _ in range(3 * steps)])
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    for _ in range(steps):
        step(lambda: next(events).record())
    torch.cuda.synchronize()
    halves = [float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(made)]
    return [statistics.median(halves[half::3]) for half in range(2)]


def in_turns(ways: dict[Any, Way]) -> dict[Any, Any]:
    """Medians of each way's times by its mode and by who it is, and ratios of steps."""
    for call, within in ways.values():
        with within():
            for _ in range(3):
                call()
    count = max(2, min(MOST_STEPS, round(SAMPLE_US / device_us(ways["eager", "pytorch"].call, 4))))
    found: dict[Any, list[list[float]]] = {key: [] for key in ways}
    with without_garbage():
        for _ in range(ROUNDS):
            for key in random.sample([*ways], len(ways)):
                call, within = ways[key]
                with within():
                    call()  # Python knows functions anew that `enable` has replaced
                    call()
                    found[key].append([device_us(call, count), *halves_us(call)])
    row: dict[Any, Any] = {"eager": {}, "compiled": {}}
    for (mode, who), rounds in found.items():
        middles = [round(statistics.median(us), 1) for us in zip(*rounds, strict=True)]
        row[mode][who] = dict(zip(("step", "forward", "backward"), middles, strict=True))
    for mode, of in row.items():
        pairs = zip(found[mode, "pytorch"], found[mode, "package"], strict=True)
        ratios = sorted(theirs[0] / ours[0] for theirs, ours in pairs)
        edge = len(ratios) * 25 // 1000
        of["ratio"] = [round(r, 3) for r in (statistics.median(ratios), ratios[edge], ratios[-1 - edge])]
    return row


def in_blocks(ways: dict[Any, Way]) -> dict[Any, Any]:
    """Medians of the host's microseconds of a step, and of PyTorch's over the package's."""
    row: dict[Any, Any] = {}
    for mode in ("eager", "compiled"):
        times = host_us({who: ways[mode, who] for who in WHO}, BLOCKS, BLOCK_STEPS)
        us = {who: statistics.median(each) for who, each in times.items()}
        row[mode] = {who: round(each, 1) for who, each in us.items()}
        row[mode]["ratio"] = round(us["pytorch"] / us["package"], 3)
    return row


def rows(shapes: tuple[Any, ...], measured: Callable[[dict[Any, Way]], dict[Any, Any]]) -> Iterator[dict[str, Any]]:
    """A row of each shape."""
    for shape in shapes:
        torch.compiler.reset()
        batch, heads, heads_kv, seqlen, head_dim, causal = shape
        grouped = f"{heads}/{heads_kv}" if heads_kv != heads else heads
        label = f"({batch},{grouped},{seqlen},{head_dim}) {'causal' if causal else 'full'}"
        given, _, options = tensors(shape)
        ways = {
            (mode, who): Way(step_of(shape, mode == "compiled"), enabled)
            for mode in ("eager", "compiled")
            for who, enabled in WHO.items()
        }
        code = str(attnsweep.explain_attention(*given, **options).code)
        yield {"shape": label, "code": code} | measured(ways)


def main() -> None:
    """Print a line for each shape; write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--blocks", action="store_true", help="the host's time alone")
    given = parser.parse_args()
    found = rows(HOST_BOUND, in_blocks) if given.blocks else rows(SHAPES, in_turns)
    rounds = {"blocks": BLOCKS} if given.blocks else {"rounds": ROUNDS}
    write_rows(given.file, described(), found, torch=torch.__version__, **rounds)


if __name__ == "__main__":
    main()

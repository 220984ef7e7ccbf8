"""What a config must do, counted from its parameters, and figures over many rows.

Claims and pages call these by name. All take recorded rows; times are microseconds.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from records import Book, Row

from attnsweep import Problem
from attnsweep.core.hardware import arch_named
from attnsweep.core.trial import Environment

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from proportions import proportion_interval

__all__ = [
    "at_least",
    "baselines_beside",
    "beside",
    "bounded",
    "gains",
    "log_share",
    "mean_ratio",
    "most_apart",
    "own_and_best",
    "wide",
    "wmma",
]
WAVEFRONT_BYTES = 128  # what shared memory gives an SM in a clock


def up(value: int, step: int) -> int:
    """How many steps cover a value."""
    return -(-value // step)


def clocks(card: Environment) -> float:
    """SM clocks in a microsecond, all SMs together."""
    return card.sm_count * card.clock_hz / 1e6


# -- all pages --------------------------------------------------------------------------------


def log_share(gain: float, gap: float) -> float:
    """What part of a gap a gain is, both ratios: the logarithm of one over that of the other."""
    return math.log(gain) / math.log(gap) if gap > 1 else 0.0


def mean_ratio(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def at_least(count: int, of: int) -> float:
    """The least share that `count` of `of` leaves plausible: Clopper-Pearson, one-sided, 95 %."""
    return proportion_interval(count, of, 0.9)[0]


def bounded(count: float, of: int) -> str:
    """` (at least 84 %)`: what a count leaves plausible."""
    return f" (at least {100 * at_least(round(count), of):.0f} %)"


def beside(rows: Sequence[Row], others: Sequence[Row], axis: str) -> list[dict[str, Any]]:
    """Rows next to those whose variant differs from theirs in one axis only."""

    def rest(row: Row) -> tuple[str, ...]:
        return tuple(name for of, name in row.variant.items() if of != axis)

    there = {rest(row): row for row in others}
    pairs = [(row, there[rest(row)]) for row in rows if rest(row) in there]
    return [{"row": row, "other": other, "ratio": row.us / other.us} for row, other in pairs]


def most_apart(first: Mapping[str, float], second: Mapping[str, float]) -> str:
    """The name under which two records differ most."""
    both = sorted(first.keys() & second.keys())
    return max(both, key=lambda name: abs(first[name] - second[name]))


def baselines_beside(
    book: Book, runs: Sequence[str], kernel: str | list[str] | None, baselines: Sequence[str]
) -> list[dict[str, Any]]:
    """A record for each problem on which a kernel (None: any) and a baseline are ranked.

    baselines: by provider, the noisy ones too. baseline: the base, the fastest known of all
    baselines of the run, noisy or not; ratio, low, high, of: its time over ours, as `rank` tells
    it.
    """
    found = []
    for run, problem in [(name, problem) for name in runs for problem in book.problems(name)]:
        ours = book.find(run, problem=problem, kernel=kernel, take="all")
        timed = book.find(
            run, problem=problem, provider=list(baselines), status=["ok", "noisy"], take="all"
        )
        baseline = base_of(book, ours[0]) if ours else None
        if baseline is not None:
            best = ours[0]
            found.append(
                {
                    "run": run,
                    "problem": problem,
                    "rows": ours,
                    "best": best,
                    "baselines": {row.provider: row for row in timed},
                    "baseline": baseline,
                    "ratio": best.ratio_to_best_baseline,
                    "low": best.ratio_low,
                    "high": best.ratio_high,
                    "of": best.ratio_of,
                }
            )
    return found


def base_of(book: Book, row: Row) -> Row | None:
    """The row of the baseline that × base of a row compares with, noisy or not."""
    if not isinstance(row.ratio_of, str):  # none was timed
        return None
    found: list[Row] = book.find(
        row.run, problem=row.problem, provider=row.best_baseline, status=None, take="all"
    )
    return found[0]


def gains(records: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """For each value of a parameter: where it gains most over the best row without it."""
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        rows = record["rows"]
        values = {row.config.get(name) for row in rows}
        for value in values if len(values) > 1 else ():
            with_it = min(row.us for row in rows if row.config.get(name) == value)
            without = min(row.us for row in rows if row.config.get(name) != value)
            where = f"{record['problem'].label}, {record['card']}"
            found.setdefault(str(value), []).append((without / with_it, where))
    return [
        {
            "value": value,
            "most": max(ratios)[0] - 1,
            "at": max(ratios)[1],
            "won": sum(ratio > 1 for ratio, _ in ratios),
            "of": len(ratios),
        }
        for value, ratios in sorted(found.items())
    ]


# -- wide heads in fp32: system C -------------------------------------------------------------


def wide(book: Book, run: str, rates: Mapping[str, float], baselines: Sequence[str]) -> list[Any]:
    """A record for each problem: winner, baselines, bounds, and where the winner's time goes."""
    return [_wide(book, run, problem, rates, baselines) for problem in book.problems(run)]


def wide_bounds(p: Problem, card: Environment, l2_read: float) -> dict[str, float]:
    """Least time of each unit. l2_read: bytes a second. 3×TF32: three products of TF32 for one."""
    three_tf32 = (
        arch_named(card.arch).tensor_flops_per_clock / 2 / 3 * clocks(card)
    )  # half of fp16's
    return {
        "DRAM": p.min_bytes / card.memory_bytes_per_second * 1e6,
        "L2": p.min_bytes / l2_read * 1e6,
        "FFMA": p.flops / (2 * arch_named(card.arch).fma_per_clock * clocks(card)),
        "3×TF32": p.flops / three_tf32,
    }


def _wide(
    book: Book, run: str, problem: Problem, rates: Mapping[str, float], baselines: Sequence[str]
) -> dict[str, Any]:
    rows = book.find(run, problem=problem, take="all")
    best, card, p = rows[0], book.card(run), problem
    config, parts, blocks = best.config, _partial_scores(best), _slices(best)
    bounds = wide_bounds(p, card, rates["l2_read"])
    unit = bounds["FFMA" if _products(best) == "ffma" else "3×TF32"]
    # wgmma: three products for QKᵀ; for PV one, and one of bf16 pairs that costs as much.
    larger = max(bounds["L2"], unit * (5 / 6 if _products(best) == "wgmma" else 1))
    # Each tile of rows reads K and V again; in a workspace, each block adds all partial scores.
    tiles, row_bytes = up(p.seqlen_q, config["BLOCK_M"]), 4 * p.head_dim * p.batch * p.heads
    partial = 4 * p.batch * p.heads * parts * p.seqlen_q * p.seqlen_k
    read = row_bytes * (p.seqlen_q + 2 * tiles * p.seqlen_k) + partial * blocks[-1]
    written = row_bytes * p.seqlen_q + partial
    tiled = max(larger, 1e6 * max(read / rates["l2_read"], written / rates["l2_write"]))
    launches = best.launch_us or 0.0
    ffma = _least(rows, lambda row: _products(row) == "ffma")
    tensor = _least(rows, lambda row: _products(row) != "ffma")
    baseline = base_of(book, best)
    timed = book.find(run, problem=p, provider=list(baselines), status=None, take="all")

    return {
        "problem": p,
        "label": f"{p.seqlen_q} × {p.head_dim}",
        "rows": rows,
        "best": best,
        "products": _products(best),
        "baseline": baseline,
        "baseline_ratio": best.ratio_to_best_baseline if baseline else None,
        "untimed": sorted(row.provider for row in timed if row.status == "wrong"),
        "over": sorted(row.provider for row in timed if row.over_limit and row.status != "wrong"),
        "bounds": bounds,
        "share": larger / best.us,
        "textbook": max(bounds["DRAM"], bounds["FFMA"]) / best.us,
        "rate": p.min_bytes / best.us / 1e3,
        "parts": {
            "launches": launches,
            "the bound as tiled": tiled,
            "the rest": best.us - launches - tiled,
        },
        "tensor_gain": ffma / tensor if ffma and tensor else None,
        "l2_share": bounds["L2"] / best.us,
    }


def _least(rows: Sequence[Row], test: Callable[[Row], bool]) -> float | None:
    return min((row.us for row in rows if test(row)), default=None)


def _own_wgmma(row: Row) -> bool:
    return bool(row.kernel == "flash_fwd_fp32_wgmma")


def _products(row: Row) -> str:
    """What multiplies: ffma, or tensor cores by mma.sync or wgmma."""
    return "wgmma" if _own_wgmma(row) else str(row.config["MATH"])


def _partial_scores(row: Row) -> int:
    """Partial scores of a head that a second launch adds; 0 if the blocks are one cluster."""
    config = row.config
    if _own_wgmma(row):
        parts = int(config["SLICES"] // config["CLUSTER"])
        return parts if parts > 1 else 0
    return int(config["SLICES"]) if config["SCORES"] == "workspace" else 0


def _slices(row: Row) -> list[int]:
    """Into how many blocks each launch divides a head's columns."""
    first = int(row.config["SLICES"])
    return (
        [first, int(row.config.get("OUTPUT_SLICES") or first)] if _partial_scores(row) else [first]
    )


# -- WMMA with a cp.async pipeline: system E --------------------------------------------------


def wmma(row: Row) -> dict[str, Any]:
    """What a config must do on the card that it was recorded on.

    ways: of the 8 rows of 16 bytes of a matrix of `ldmatrix`, how many lie in the same banks.
    blocks, sms, tiles: blocks, SMs that have one, tiles of keys on the busiest SM. matrix, shared:
    least time of the products on these SMs, and of the busiest SM's wavefronts in shared memory.
    """
    config, p, card = row.config, row.problem, row.card
    blocks = up(p.seqlen_q, config["BLOCK_M"]) * p.batch * p.heads
    sms = min(card.sm_count, blocks, config["CTAS"] or blocks)
    pitch = {1: 2 * p.head_dim + 16, 2: 32}.get(config["LAYOUT"], 2 * p.head_dim)
    starts = [(n * pitch) ^ (16 * n if config["LAYOUT"] == 3 else 0) for n in range(8)]
    ways = max(Counter(start % WAVEFRONT_BYTES for start in starts).values())
    tiles, per_us = _busiest_tiles(row), card.clock_hz / 1e6
    return {
        "ways": ways,
        "conflicts": f"{ways}-way" if ways > 1 else "none",
        "blocks": blocks,
        "sms": sms,
        "tiles": tiles,
        "matrix": p.flops / (arch_named(card.arch).tensor_flops_per_clock * sms * per_us),
        "shared": tiles * _tile_wavefronts(row, ways) / per_us,
    }


def _tile_wavefronts(row: Row, ways: int) -> int:
    """Wavefronts of shared memory that a block needs at least for a tile of keys.

    A warp loads fragments of Q, K and V (4 matrices of 8 rows each), writes its scores, reads them,
    writes probabilities and loads these; an output in shared memory is read and written twice.
    cp.async fills K and V. Only fragments of Q, K and V are taken to meet in banks.
    """
    config, n, d = row.config, row.config["BLOCK_N"], row.problem.head_dim
    fragments = d // 16 + 2 * (n // 16) * (d // 16)
    scores = (16 * n * (4 + 4 + 2)) // WAVEFRONT_BYTES + 4 * (n // 16)
    output = 0 if config["O_IN_REGISTERS"] else 4 * 16 * d * 4 // WAVEFRONT_BYTES
    a_warp = 4 * fragments * ways + scores + output
    return int(config["BLOCK_M"] // 16 * a_warp + 2 * n * d * 2 // WAVEFRONT_BYTES)


def _busiest_tiles(row: Row) -> int:
    """Tiles of keys that the busiest SM goes through at least."""
    config, p, card, step = row.config, row.problem, row.card, row.config["BLOCK_M"]
    ends = range(step, p.seqlen_q + step, step)
    a_head = [
        up(min(p.seqlen_k, end) if p.causal else p.seqlen_k, config["BLOCK_N"]) for end in ends
    ]
    heads, workers = p.batch * p.heads, min(card.sm_count, config["CTAS"] or card.sm_count)
    rounds = up(heads * len(a_head), workers)
    return max(max(a_head), rounds * min(a_head), up(heads * sum(a_head), workers))


def own_and_best(book: Book, run: str, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record for each problem: the fastest row with the authors' settings, and the winner."""
    found = []
    for problem in book.problems(run):
        theirs, rows = (
            book.find(run, problem=problem, config=own),
            book.find(run, problem=problem, take="all"),
        )
        if theirs:
            ratio = theirs.us / rows[0].us
            found.append(
                {
                    "problem": problem,
                    "rows": rows,
                    "theirs": theirs,
                    "best": rows[0],
                    "ratio": ratio,
                }
            )
    return found

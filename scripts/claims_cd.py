"""The part of docs/claims.md about systems C and D: wide fp32 heads, and the ladder.

Every figure is of a recorded run; every verdict follows from figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnsweep.arch import arch_named
from attnsweep.problem import Problem
from attnsweep.ranking import rank
from attnsweep.store import Run, open_run
from attnsweep.trial import Trial

WIDE, LADDER = "wide_head", "ladder"
WIDE_PEERS = ("torch_efficient", "torch_math", "unfused")
RUNGS = {
    "naive": "a thread a row",
    "ladder_1_blocks": "a warp a row",
    "ladder_2_tiles": "tiles in shared memory",
    "ladder_3_tensor_cores": "WMMA products",
    "ladder_4_pipelined": "cp.async, warps that only copy",
    "ladder_5_swizzled": "mma.sync, swizzled, keys split over warps",
}
TARGET_US = 5.0  # at (1,8,512,64), the authors' own
FP32_FLOPS_PER_CLOCK = 256.0  # of an SM: 128 fused multiply-adds


def us(trial: Trial) -> float:
    """Warm time of a call."""
    assert trial.time_us is not None
    return trial.time_us.median


def ranked(run: Run) -> list[Trial]:
    """Timed rows, best first within a problem."""
    rows = rank(run.trials, run.environment).to_dict("records")
    found = [row["trial"] for row in rows if row["rank"] == row["rank"]]
    return [t for t in found if t.time_us is not None]


def source(run: Run, name: str) -> str:
    """Where the figures are from."""
    where = run.environment
    assert where is not None
    return (
        f"[results/h200/{name}](../results/h200/{name}/ranking.md): {where.gpu}, driver "
        f"{where.driver}, {where.date[:10]}"
    )


# -- system C ---------------------------------------------------------------------------------


def wide_bounds(run: Run, problem: Problem, limits: dict[str, float]) -> dict[str, float]:
    """Microseconds that each unit needs at least, the tensors lying in L2."""
    where = run.environment
    assert where is not None
    clocks = where.sm_count * where.clock_hz / 1e6
    tensor = arch_named(where.arch).tensor_flops_per_clock / 2 / 3  # tf32 half of fp16; 3 products
    return {
        "L2": problem.min_bytes / limits["l2_read"] * 1e6,
        "FFMA": problem.flops / (FP32_FLOPS_PER_CLOCK * clocks),
        "3×TF32": problem.flops / (tensor * clocks),
    }


def wide(run: Run, limits: dict[str, float]) -> Iterator[str]:
    """System C's shapes and claims."""
    trials = ranked(run)
    problems = list(dict.fromkeys(t.problem for t in trials))
    yield (
        "| rows × head_dim | µs | products | best peer, µs | × | GB/s | L2 | FFMA | 3×TF32 | "
        "of the larger |"
    )
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    ratios, rates, shares = [], [], []
    for problem in problems:
        own = [t for t in trials if t.problem == problem and t.provider == "attnsweep"]
        peers = [t for t in trials if t.problem == problem and t.provider in WIDE_PEERS]
        if not own:
            continue
        best = own[0]
        bounds = wide_bounds(run, problem, limits)
        unit = "3×TF32" if best.config["MATH"] == "tf32x3" else "FFMA"
        share = 100 * max(bounds["L2"], bounds[unit]) / us(best)
        shares.append(share)
        rates.append(problem.min_bytes / us(best) / 1e3)
        by_math = {
            math: min((us(t) for t in own if t.config["MATH"] == math), default=None)
            for math in ("ffma", "tf32x3")
        }
        if by_math["ffma"] and by_math["tf32x3"]:
            ratios.append(by_math["ffma"] / by_math["tf32x3"])
        whole = len(peers) == len(WIDE_PEERS)
        peer = min(peers, key=us) if whole else None
        against = (
            f"{us(peer):.1f} ({peer.provider}) | {us(peer) / us(best):.1f}" if peer else "– | –"
        )
        cells = " | ".join(f"{value:.2f}" for value in bounds.values())
        yield (
            f"| {problem.seqlen_q} × {problem.head_dim} | **{us(best):.2f}** | "
            f"{best.config['MATH']} | {against} | {rates[-1]:.0f} | {cells} | {share:.0f} % |"
        )
    yield ""
    yield "| claim | measured here | |"
    yield "|---|---|---|"
    slower = "holds" if ratios and max(ratios) < 1 else "does not hold"
    yield (
        "| tensor cores cannot help: 3 to 4× slower | the best of three TF32 products, which keep "
        f"fp32-level error, over the best of FFMA: {min(ratios):.2f} to {max(ratios):.2f}× as fast "
        f"| **{slower}** |"
    )
    yield (
        "| several queries cannot share K and V in shared memory | every candidate shares a tile "
        "of K and V among 16 or 32 queries; right on every case | **does not hold** |"
    )
    limit = "holds" if max(rates) < 2 * 93 else "does not hold"
    yield (
        "| 93 GB/s, 4.7 % of the card's peak, is near the limit | "
        f"{min(rates):.0f} to {max(rates):.0f} GB/s; {min(shares):.0f} to {max(shares):.0f} % of "
        f"the larger bound of L2 and the products | **{limit}** |"
    )


# -- system D ---------------------------------------------------------------------------------


def ladder(run: Run) -> Iterator[str]:
    """System D's table: a row a rung, and the branch-free variant of the last."""
    trials = [t for t in ranked(run) if not t.problem.causal]
    best: dict[str, Trial] = {}
    for trial in trials:
        best.setdefault(trial.kernel, trial)
        if trial.config.get("BRANCHES") == 0:
            best.setdefault(f"{trial.kernel}, no branches", trial)
    path = run.directory / "code.json"
    code = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    flash = us(best["torch_flash"]) if "torch_flash" in best else None
    yield (
        "| rung | | µs | × the rung before | × SDPA flash | over the target of 5 µs | registers | "
        "spill B | cubin B | branches | predicated |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    before = None
    names = [*RUNGS, *(name for name in best if name.endswith(", no branches"))]
    for name in names:
        trial = best.get(name)
        if trial is None:
            continue
        facts = code.get(name, {})
        counted = ("registers", "spill_bytes", "cubin_bytes", "branches", "predicated_branches")
        cells = [
            f"`{name}`" if name in RUNGS else f"`{name.partition(',')[0]}` without branches",
            RUNGS.get(name, "loops unrolled, masks by selection"),
            f"{us(trial):.4g}",
            f"{before / us(trial):.2f}" if before and name in RUNGS else "–",
            f"{flash / us(trial):.2f}" if flash else "–",
            f"{us(trial) - TARGET_US:+.2f}",
            *(f"{facts[key]:.0f}" if key in facts else "–" for key in counted),
        ]
        yield f"| {' | '.join(cells)} |"
        before = us(trial) if name in RUNGS else before
    if code:
        nvrtc = next(iter(code.values()))["nvrtc"]
        yield ""
        yield f"Code by NVRTC {nvrtc} (`benchmarks/ladder_code.py`); times by the run's NVRTC."


def sections(results: Path) -> list[str]:
    """Lines of both systems, of what is recorded in `results`."""
    out: list[str] = []
    limits_path = results / "limits.json"
    if (results / WIDE).is_dir() and limits_path.is_file():
        run = open_run(results / WIDE)
        limits = json.loads(limits_path.read_text(encoding="utf-8"))["rates"]
        out += [
            "# The claims of system C, tested",
            "",
            "fp32, head_dim 512 to 8192, one batch of 4 heads, as many keys as rows: "
            f"{source(run, WIDE)}. Bounds in µs, the tensors in L2.",
            "",
            *wide(run, limits),
            "",
        ]
    if (results / LADDER).is_dir():
        run = open_run(results / LADDER)
        out += [
            "# The ladder of system D",
            "",
            f"(1,8,512,64), fp16, full: {source(run, LADDER)}.",
            "",
            *ladder(run),
            "",
        ]
    return out

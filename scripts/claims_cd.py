"""The part of docs/claims.md about systems C and D: wide fp32 heads, and the ladder.

Every figure is of a recorded run; every verdict follows from figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verdict import FAILS, HOLDS

from attnsweep.choose.ranking import rank
from attnsweep.hardware import arch_named
from attnsweep.problem import Problem
from attnsweep.store.run import Run, open_run
from attnsweep.tools import profile as counters
from attnsweep.trial import Status, Trial

WIDE, LADDER = "wide_head", "ladder"
WIDE_PEERS = ("torch_efficient", "torch_math", "unfused")
WGMMA = "flash_fwd_fp32_wgmma"
WIDEST, AIM_PERCENT = 8192, 40
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
    """Microseconds that each unit needs at least; of device memory, if the tensors lay there."""
    where = run.environment
    assert where is not None
    clocks = where.sm_count * where.clock_hz / 1e6
    tensor = arch_named(where.arch).tensor_flops_per_clock / 2 / 3  # tf32 half of fp16; 3 products
    return {
        "DRAM": problem.min_bytes / where.memory_bytes_per_second * 1e6,
        "L2": problem.min_bytes / limits["l2_read"] * 1e6,
        "FFMA": problem.flops / (FP32_FLOPS_PER_CLOCK * clocks),
        "3×TF32": problem.flops / (tensor * clocks),
    }


def products(trial: Trial) -> str:
    """What multiplies: ffma, or tensor cores by mma.sync or wgmma."""
    return "wgmma" if trial.kernel == WGMMA else str(trial.config["MATH"])


def parts_added(trial: Trial) -> int:
    """Partial scores of a head in a workspace, each of one block or one cluster; 0: no workspace.

    Then it is one launch, whose blocks are a cluster.
    """
    config = dict[str, Any](trial.config)
    if trial.kernel == WGMMA:
        parts = int(config["SLICES"] // config["CLUSTER"])
        return parts if parts > 1 else 0
    return int(config["SLICES"]) if config["SCORES"] == "workspace" else 0


def slices(trial: Trial) -> list[int]:
    """Into how many blocks each launch divides a head's columns."""
    config = dict[str, Any](trial.config)
    second = [config.get("OUTPUT_SLICES") or config["SLICES"]] if parts_added(trial) else []
    return [int(config["SLICES"]), *map(int, second)]


def exchange(trial: Trial) -> str:
    """How the blocks of a head add their scores."""
    parts = parts_added(trial)
    if trial.kernel != WGMMA or not parts:
        return "workspace" if parts else "cluster"
    return f"clusters of {trial.config['CLUSTER']}, then workspace"


def tiled_us(trial: Trial, limits: dict[str, float]) -> float:
    """Microseconds that L2 needs at least for what the blocks of a config read and write.

    Each tile of rows reads K and V again. With the scores exchanged in a workspace, each block adds
    all partial scores.
    """
    p, config = trial.problem, dict[str, Any](trial.config)
    row = 4 * p.head_dim * p.batch * p.heads
    tiles = -(-p.seqlen_q // config["BLOCK_M"])
    read, written = row * (p.seqlen_q + 2 * tiles * p.seqlen_k), row * p.seqlen_q
    partial = 4 * p.batch * p.heads * parts_added(trial) * p.seqlen_q * p.seqlen_k
    read, written = read + partial * slices(trial)[-1], written + partial
    return 1e6 * max(read / limits["l2_read"], written / limits["l2_write"])


class Wide:
    """The rows of a run of wide heads on one problem, beside the bounds."""

    def __init__(self, run: Run, problem: Problem, limits: dict[str, float]) -> None:
        trials = [t for t in ranked(run) if t.problem == problem]
        self.run, self.problem = run, problem
        self.own = [t for t in trials if t.provider == "attnsweep"]
        self.peers = [t for t in trials if t.provider in WIDE_PEERS]
        self.best = self.own[0]
        self.bounds = wide_bounds(run, problem, limits)
        unit = self.bounds["FFMA" if products(self.best) == "ffma" else "3×TF32"]
        # wgmma: three products for Q K^T, but for P V one and one of bf16 pairs that costs as much.
        unit *= 5 / 6 if products(self.best) == "wgmma" else 1
        self.larger = max(self.bounds["L2"], unit)
        self.share = 100 * self.larger / us(self.best)
        self.textbook = 100 * max(self.bounds["DRAM"], self.bounds["FFMA"]) / us(self.best)
        self.rate = problem.min_bytes / us(self.best) / 1e3
        self.tiled = max(tiled_us(self.best, limits), self.larger)
        p, config = problem, dict[str, Any](self.best.config)
        tiles = -(-p.seqlen_q // config["BLOCK_M"])
        of_a_slice = tiles * p.batch * p.heads
        self.blocks = list(dict.fromkeys(n * of_a_slice for n in slices(self.best)))

    def least(self, test: Callable[[Trial], bool]) -> float | None:
        """The best time of candidates that pass."""
        return min((us(t) for t in self.own if test(t)), default=None)

    @property
    def parts(self) -> dict[str, float]:
        """Its time: launches, the bound as tiled, and what is left."""
        launch = self.best.launch_us or 0.0
        rest = us(self.best) - launch - self.tiled
        return {"launches": launch, "the bound as tiled": self.tiled, "the rest": rest}

    @property
    def sms(self) -> str:
        """How many SMs have a block."""
        assert self.run.environment is not None
        count = self.run.environment.sm_count
        return f"{', then '.join(str(min(n, count)) for n in self.blocks)} of {count}"

    @property
    def label(self) -> str:
        """Rows and columns of a head."""
        return f"{self.problem.seqlen_q} × {self.problem.head_dim}"


def wide_rows(run: Run, limits: dict[str, float]) -> list[Wide]:
    """One a problem, in the run's order."""
    timed = [t for t in ranked(run) if t.provider == "attnsweep"]
    return [Wide(run, problem, limits) for problem in dict.fromkeys(t.problem for t in timed)]


def wide(run: Run, limits: dict[str, float]) -> Iterator[str]:
    """System C's shapes and claims."""
    rows = wide_rows(run, limits)
    yield (
        "| rows × head_dim | µs | products | best peer, µs | × | GB/s | DRAM | L2 | FFMA | "
        "3×TF32 | of the larger | of DRAM and FFMA |"
    )
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        wrong = sorted(
            t.provider
            for t in run.trials
            if t.problem == row.problem and t.provider in WIDE_PEERS and t.status is Status.WRONG
        )
        peer = min(row.peers, key=us, default=None)
        out = f"; {', '.join(wrong)} over the error limit" if wrong else ""
        against = (
            f"{us(peer):.1f} ({peer.provider}{out}) | {us(peer) / us(row.best):.1f}"
            if peer
            else "– | –"
        )
        cells = " | ".join(f"{value:.2f}" for value in row.bounds.values())
        yield (
            f"| {row.label} | **{us(row.best):.2f}** | {products(row.best)} | {against} | "
            f"{row.rate:.0f} | {cells} | {row.share:.0f} % | {row.textbook:.0f} % |"
        )
    yield ""
    yield (
        "The larger bound: of L2, where the tensors lie in a warm call, and of the products as the "
        "winner does them. Of DRAM and FFMA: the larger of the two that a textbook's roofline of "
        "fp32 has, which a warm call on tensor cores can fall below."
    )
    yield ""
    yield "| claim | measured here | |"
    yield "|---|---|---|"
    yield from wide_claims(run, rows)
    yield ""
    yield from wide_limits(rows)


def wide_claims(run: Run, rows: list[Wide]) -> Iterator[str]:
    """A row a claim, and one for the aim at the widest head."""
    pairs = [
        (
            row.least(lambda trial: products(trial) == "ffma"),
            row.least(lambda trial: products(trial) != "ffma"),
        )
        for row in rows
    ]
    ratios = [ffma / tensor for ffma, tensor in pairs if ffma and tensor]
    if ratios:
        yield (
            "| tensor cores cannot help: 3 to 4× slower | the best of products in TF32 parts, "
            f"which keep fp32-level error, over the best of FFMA: {min(ratios):.2f} to "
            f"{max(ratios):.2f}× as fast | **{HOLDS if max(ratios) < 1 else FAILS}** |"
        )
    own = [t for t in run.trials if t.provider == "attnsweep"]
    wrong = sum(t.status is Status.WRONG for t in own)
    failed = sum(t.status in (Status.LAUNCH_ERROR, Status.TIMEOUT) for t in own)
    broken = f", and {failed} more did not run" if failed else ""
    timed = [t for row in rows for t in row.own]
    shared = sorted({int(dict[str, Any](t.config)["BLOCK_M"]) for t in timed})
    most = max((t.resources.smem_bytes for t in timed if t.resources), default=0)
    yield (
        "| several queries cannot share K and V in shared memory (48 KB) | "
        f"{len(timed)} candidates share a tile of K and V among {', '.join(map(str, shared))} "
        f"queries, in up to {most / 1024:.0f} KB; {wrong} of them wrong{broken} | "
        f"**{HOLDS if wrong or not timed else FAILS}** |"
    )
    where = run.environment
    assert where is not None
    rates, shares = [row.rate for row in rows], [row.share for row in rows]
    peak = where.memory_bytes_per_second / 1e9
    yield (
        f"| 93 GB/s, 4.7 % of the card's peak, is near the limit | {min(rates):.0f} to "
        f"{max(rates):.0f} GB/s, {100 * min(rates) / peak:.1f} to {100 * max(rates) / peak:.1f} % "
        f"of device memory's peak; {min(shares):.0f} to {max(shares):.0f} % of the larger bound of "
        f"L2 and the products | **{HOLDS if max(rates) < 2 * 93 else FAILS}** |"
    )
    widest = [row for row in rows if row.problem.head_dim == WIDEST]
    if widest:
        told = "; ".join(
            f"{row.share:.0f} % for {row.problem.seqlen_q} rows ({row.textbook:.0f} % of that of "
            "device memory and FFMA), of whose time "
            + ", ".join(f"{name} {100 * t / us(row.best):.0f} %" for name, t in row.parts.items())
            + f", on {row.sms} SMs"
            for row in widest
        )
        held = min(row.share for row in widest) >= AIM_PERCENT
        yield (
            f"| aim: {AIM_PERCENT} % of the larger bound at head_dim {WIDEST} | {told} "
            f"| **{HOLDS if held else FAILS}** |"
        )


def wide_limits(rows: list[Wide]) -> Iterator[str]:
    """Where a row is below its bound: launches, SMs without a block, what tiles read again."""
    yield (
        "What stands between a row and its bound. Launches: an empty kernel with the same grids. "
        "As tiled: the larger bound with K and V read for each tile of rows, and partial scores by "
        "each block. The rest is neither: waiting within a block, for loads, for the other blocks' "
        "scores and between launches. SMs used: at most. By the driver's count, "
        "which no run records, clusters of 8 such blocks find 15 places on this card."
    )
    yield ""
    yield (
        "| rows × head_dim | µs | exchange | blocks | SMs used | occupancy | launches | "
        "as tiled | the rest | each launch alone | best in a cluster | best in two launches |"
    )
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---|---:|---:|"
    for row in rows:
        best, total = row.best, us(row.best)
        alone = ", ".join(f"{name} {time:.1f}" for name, time in best.stages_us.items()) or "–"
        parts = [f"{part:.2f} ({100 * part / total:.0f} %)" for part in row.parts.values()]
        occupied = f"{100 * best.resources.occupancy:.0f} %" if best.resources else "–"
        launches = [
            row.least(lambda t: not parts_added(t)),
            row.least(lambda t: parts_added(t) > 0),
        ]
        yield (
            f"| {row.label} | {total:.2f} | {exchange(best)} | "
            f"{', then '.join(map(str, row.blocks))} | "
            f"{row.sms} | {occupied} | "
            f"{' | '.join(parts)} | {alone} | "
            f"{' | '.join(f'{time:.2f}' if time else '–' for time in launches)} |"
        )
    yield from wide_counters(rows)


def wide_counters(rows: list[Wide]) -> Iterator[str]:
    """What `attnsweep profile` read of each problem's winner."""
    counted = counters.read(rows[0].run.directory) if rows else []
    labels = {row.problem.label: row.label for row in rows}
    counted = [facts for facts in counted if facts["problem"] in labels]
    if not counted:
        return
    yield ""
    yield (
        "Hardware counters of the winners, by `attnsweep profile`, each launch alone. Shares are "
        "of the time in which an SM has a block; warps waited for: warps in that state for each "
        "instruction issued."
    )
    yield ""
    yield "| rows × head_dim | stage | L2, MB | DRAM, MB | tensor | issue | warps waited for |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for facts in counted:
        for stage in facts["stages"]:
            found = stage["figures"]
            traffic = [
                sum(found.get(f"{where}_{way}_bytes", 0.0) for way in ("read", "write")) / 1e6
                for where in ("l2", "dram")
            ]
            shares = [
                f"{found[name]:.0f} %" if name in found else "–"
                for name in ("tensor_percent", "issue_percent")
            ]
            waits = ", ".join(f"{why} {n:.1f}" for why, n in list(stage["stalls"].items())[:3])
            yield (
                f"| {labels[facts['problem']]} | {facts['kernel']}.{stage['stage']} | "
                f"{traffic[0]:.1f} | {traffic[1]:.1f} | {' | '.join(shares)} | {waits} |"
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

"""docs/claims.md: what system A's authors claim of three kernels, beside what we measured.

Every figure is of a recorded run; every verdict follows from figures. Where a run does not hold
what a claim needs, the claim is `not tested`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import claims_cd
import claims_e
from verdict import FAILS, HOLDS, MARGIN, OPEN, Verdict

from attnsweep.choose.ranking import rank
from attnsweep.choose.search import Search
from attnsweep.family.declare import Config, discover
from attnsweep.family.space import Space
from attnsweep.hardware import arch_named
from attnsweep.problem import Problem
from attnsweep.spec.load import load_spec
from attnsweep.spec.plan import plan
from attnsweep.store.run import Run, open_run
from attnsweep.tools import profile as counters
from attnsweep.trial import Status, Trial

SHAPE = Problem(1, 16, 16, 1024, 1024, 64)
CAUSAL = Problem(1, 16, 16, 1024, 1024, 64, "fp16", True)
HEADS = SHAPE.batch * SHAPE.heads

# (tile, softmax) of the authors' table to their µs per head; names are the spec's variants.
TABLE = {
    ("64x128x64", "32 threads, 3 passes"): 1.65,
    ("64x128x64", "256 threads, vectorised"): 1.71,
    ("64x128x64", "16 threads"): 1.84,
    ("64x64x32", "32 threads, 3 passes"): 1.72,
    ("64x128x32", "32 threads, 3 passes"): 1.87,
    ("128x256x64", "32 threads, 3 passes"): 12.8,
}
PEERS = {"torch_flash": ("PyTorch SDPA", 1.62), "unfused": ("unfused PyTorch", 50.0)}
# Where the softmax is, by the spec's names; and what is told of a config.
STATISTICS = {
    "softmax": "a launch of its own",
    "joined": "in qk, joined by a small launch",
    "fused": "in qk, joined by pv: two launches",
}
SHOWN = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "TILES", "THREADS", "VECTOR", "PASSES", "BLOCK")
TUNED = ("QK_BLOCK_M", "QK_BUFFERS", "QK_TURNS", "PV_BLOCK_M", "PV_BLOCK_K", "PV_CLUSTER")


class Recording:
    """The ok rows of a run on one problem, by variant and by peer."""

    def __init__(self, run: Run, problem: Problem) -> None:
        self.run, self.problem = run, problem
        ranked = rank(run.trials, run.environment).to_dict("records")
        rows = [row["trial"] for row in ranked if row["rank"] == row["rank"]]
        rows = [t for t in rows if t.time_us is not None]
        self.ours = [t for t in rows if t.problem == problem and t.provider == "attnsweep"]
        self.peers = {
            t.provider: t for t in rows if t.problem == problem and t.provider != "attnsweep"
        }
        self.counted = {
            tuple(sorted(facts["config"].items())): facts["stages"]
            for facts in counters.read(run.directory)
            if facts["problem"] == problem.label
        }

    @property
    def graphs(self) -> list[Trial]:
        """Calls issued whole, on one stream, from a graph."""
        return [t for t in self.ours if t.variant.get("mode", "graph") == "graph"]

    def best(self, test: Callable[[dict[str, str], dict[str, Any]], bool]) -> Trial | None:
        """The fastest candidate whose variant and config pass."""
        fit = [t for t in self.ours if test(t.variant, dict(t.config))]
        return min(fit, key=us, default=None)

    def variant(self, **wanted: str) -> Trial | None:
        """The fastest candidate of these variants."""
        return self.best(lambda variant, _: all(variant.get(a) == n for a, n in wanted.items()))


def us(trial: Trial) -> float:
    """Median time of one call."""
    assert trial.time_us is not None
    return trial.time_us.median


def head(microseconds: float) -> str:
    """Microseconds per head, as the authors count."""
    return f"{microseconds / HEADS:.2f}"


def verdicts(table: Recording) -> Iterator[Verdict]:
    """The claims that the sweep of tiles, softmaxes and modes tests."""

    def need(claim: str, *trials: Trial | None) -> Verdict | None:
        return Verdict(claim, "", OPEN, "the run lacks a row it needs") if None in trials else None

    winner = table.variant(tile="64x128x64", softmax="32 threads, 3 passes", mode="graph")
    plain = table.variant(mode="graph")
    claim = "64×128×64 with 32 threads is the fastest configuration (1.65 µs/head)"
    if (gap := need(claim, winner, plain)) is not None:
        yield gap
    elif winner and plain:
        holds = us(winner) <= MARGIN * us(plain)
        yield Verdict(
            claim,
            f"{head(us(winner))} µs/head; the best from a graph is {named(plain)} with "
            f"{head(us(plain))}",
            HOLDS if holds else FAILS,
            _stages(winner) + ". " + _stages(plain),
        )

    def tile_area(variant: dict[str, str]) -> int:
        m, n, _ = map(int, variant.get("tile", "0x0x0").split("x"))
        return m * n

    small = table.best(lambda v, _: v.get("mode") == "graph" and 0 < tile_area(v) <= 64 * 128)
    large = table.best(lambda v, _: v.get("mode") == "graph" and tile_area(v) >= 128 * 256)
    claim = "small tiles beat large ones: 1.65 against 12.8 µs/head"
    if (gap := need(claim, small, large)) is not None:
        yield gap
    elif small and large:
        ratio = us(large) / us(small)
        yield Verdict(
            claim,
            f"best up to 64×128: {head(us(small))} ({named(small)}); best from 128×256: "
            f"{head(us(large))} ({named(large)}): {ratio:.2f}×, not {12.8 / 1.65:.1f}×",
            HOLDS if ratio > MARGIN else FAILS,
            _stages(small) + ". " + _stages(large),
        )
        yield Verdict(
            "the reason is launch overhead: 11 µs for large tiles, 0.05 µs/head for small",
            f"launches alone, of an empty kernel with the same grids: {small.launch_us:.1f} µs a "
            f"call for the small tile, {large.launch_us:.1f} for the large",
            HOLDS if (large.launch_us or 0) - (small.launch_us or 0) > 5 else FAILS,
            _slower_stage(small, large),
        )
    for claim, mode, told in (
        ("CUDA graphs change little: 12.8 → 12.5 µs/head with large tiles", "eager", 12.8 / 12.5),
        ("issuing heads on several streams changes little: 12.8 → 12.7", "streams", 12.8 / 12.7),
    ):
        yield _modes(table, claim, mode, told)
    yield from _softmaxes(table, need)
    yield from _against_sdpa(table, plain, need)
    claim = "QKᵀ alone takes 1.54 µs/head (and, in their breakdown, 0.60)"
    if winner and plain:
        first = min(t.stages_us["qk"] for t in table.graphs if "qk" in t.stages_us)
        yield Verdict(
            claim,
            f"{head(winner.stages_us['qk'])} with their tile; the best tile takes {head(first)}",
            FAILS if first / HEADS < 1.54 / MARGIN else HOLDS,
            "two figures of theirs for one kernel; see the bounds below",
        )


def _modes(table: Recording, claim: str, mode: str, told: float) -> Verdict:
    """A mode against a graph on one stream, config by config."""
    graph = {_without_mode(t): t for t in table.ours if t.variant.get("mode") == "graph"}
    pairs = [
        (us(t) / us(graph[_without_mode(t)]), t)
        for t in table.ours
        if t.variant.get("mode") == mode and _without_mode(t) in graph
    ]
    if not pairs:
        return Verdict(claim, "", OPEN, "the run lacks a row it needs")
    ratios = sorted(ratio for ratio, _ in pairs)
    low, middle, high = ratios[0], ratios[len(ratios) // 2], ratios[-1]
    changes_little = max(middle, 1 / middle) <= 1.05
    fastest = min((t for _, t in pairs), key=us)
    beside = graph[_without_mode(fastest)]
    return Verdict(
        claim,
        f"{mode} over graph, of {len(ratios)} configs: {low:.2f} to {high:.2f}, median "
        f"{middle:.2f} (theirs {told:.2f})",
        HOLDS if changes_little else FAILS,
        f"fastest {mode}: {named(fastest)} takes {us(fastest):.1f} µs, {us(beside):.1f} from a "
        f"graph; its launches alone take {fastest.launch_us:.1f} and {beside.launch_us:.1f} µs",
    )


def _softmaxes(table: Recording, need: Callable[..., Verdict | None]) -> Iterator[Verdict]:
    tile = {"tile": "64x128x64", "mode": "graph"}
    narrow = table.variant(**tile, softmax="32 threads, 3 passes")
    for claim, name in (
        (
            "256 threads a row, vectorised, are slower than 32 with three passes",
            "256 threads, vectorised",
        ),
        ("16 threads a row are slower than 32", "16 threads"),
    ):
        other = table.variant(**tile, softmax=name)
        if (gap := need(claim, narrow, other)) is not None:
            yield gap
        elif narrow and other:
            best = min(
                (t for t in table.graphs if "softmax" in t.stages_us),
                key=lambda t: t.stages_us["softmax"],
            )
            yield Verdict(
                claim,
                f"softmax alone {other.stages_us['softmax']:.1f} against "
                f"{narrow.stages_us['softmax']:.1f} µs; the call {us(other):.1f} against "
                f"{us(narrow):.1f}",
                HOLDS if us(other) > MARGIN * us(narrow) else FAILS,
                f"the least softmax is {best.variant.get('softmax')}: "
                f"{best.stages_us['softmax']:.1f} µs. One pass in registers reads the scores once",
            )


def _against_sdpa(
    table: Recording, plain: Trial | None, need: Callable[..., Verdict | None]
) -> Iterator[Verdict]:
    claim = "a three-kernel design cannot beat SDPA (1.65 against 1.62 µs/head)"
    flash, cudnn = table.peers.get("torch_flash"), table.peers.get("torch_cudnn")
    if (gap := need(claim, plain, flash)) is not None:
        yield gap
    elif plain and flash:
        best = min(table.ours, key=us)
        beside = f", SDPA cuDNN {head(us(cudnn))}" if cudnn else ""
        yield Verdict(
            claim,
            f"best of the sweep {head(us(best))} ({named(best)}), SDPA flash "
            f"{head(us(flash))}{beside}",
            FAILS if us(best) * MARGIN < us(flash) else HOLDS,
            _stages(best) + "; see the bounds below",
        )


def _slower_stage(small: Trial, large: Trial) -> str:
    """Where the larger tile loses, or gains, most."""
    more = {
        name: time - small.stages_us[name]
        for name, time in large.stages_us.items()
        if name in small.stages_us
    }
    if not more:
        return ""
    name = max(more, key=lambda stage: abs(more[stage]))
    return (
        f"the largest difference is in {name}: {small.stages_us[name]:.1f} µs for the small tile, "
        f"{large.stages_us[name]:.1f} for the large"
    )


def _without_mode(trial: Trial) -> tuple[object, ...]:
    return tuple(name for axis, name in trial.variant.items() if axis != "mode")


def named(trial: Trial) -> str:
    """The names of its variants."""
    return " / ".join(trial.variant.values()) or trial.kernel


def _stages(trial: Trial) -> str:
    each = ", ".join(f"{name} {time:.1f}" for name, time in trial.stages_us.items())
    alone = f"; launches alone {trial.launch_us:.1f}" if trial.launch_us is not None else ""
    return f"{named(trial)}: {each}{alone} µs"


# -- bounds of the stages -------------------------------------------------------------------


def stage_bounds(
    problem: Problem, limits: dict[str, float], flops_per_us: float
) -> dict[str, dict[str, float]]:
    """Stage to unit to the least microseconds it can take. limits: measured bytes a second.

    L2 reads and writes go side by side, so the larger counts, or both at the rate of a copy.
    """
    matrix = problem.flops / 2 / flops_per_us
    scores = 2.0 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    rows = 2.0 * problem.batch * problem.heads * problem.seqlen_q * problem.head_dim

    def l2(read: float, written: float) -> float:
        both = 2 * min(read, written) / limits["l2_copy"]
        return 1e6 * max(read / limits["l2_read"], written / limits["l2_write"], both)

    return {
        "qk": {"matrix": matrix, "L2": l2(2 * rows, scores)},
        "softmax": {"L2": l2(scores, scores)},
        "pv": {"matrix": matrix, "L2": l2(scores + rows, rows)},
    }


def read_again(stage: str, config: Mapping[str, Any], problem: Problem) -> float:
    """Bytes of Q, K and V that the tiles of a stage read, all blocks together."""
    p, c = problem, config
    heads, row = p.batch * p.heads, 2.0 * p.head_dim
    if stage == "qk":
        tiles = -(-p.seqlen_q // c["QK_BLOCK_M"])
        runs = -(-p.seqlen_k // (c["QK_TILES"] * c["QK_BLOCK_N"]))
        return float(heads * row * (runs * p.seqlen_q + tiles * p.seqlen_k / c["QK_CLUSTER"]))
    if stage == "pv":
        tiles = -(-p.seqlen_q // c["PV_BLOCK_M"])
        return float(heads * row * tiles * p.seqlen_k / c["PV_CLUSTER"])
    return 0.0


def bounds_table(tables: Sequence[Recording], limits: dict[str, float]) -> Iterator[str]:
    """Each stage of the pipeline with a softmax of its own, at its best, beside its bounds."""
    environment = tables[0].run.environment
    assert environment is not None
    problem = tables[0].problem
    rate = arch_named(environment.arch).tensor_flops_per_clock * environment.sm_count
    flops_per_us = rate * environment.clock_hz / 1e6
    yield (
        "| stage | best alone, µs | in the run | with | matrix | L2 | times the larger | "
        "L2 as tiled | times that |"
    )
    yield "|---|---:|---|---|---:|---:|---:|---:|---:|"
    for stage, bounds in stage_bounds(problem, limits, flops_per_us).items():
        timed = [
            (t.stages_us[stage], number, t)
            for number, table in enumerate(tables)
            for t in table.graphs
            if stage in t.stages_us and t.config.get("STATS") == 0
        ]
        if not timed:
            continue
        time_us, number, best = min(timed, key=lambda item: item[:2])
        unit, least = max(bounds.items(), key=lambda item: item[1])
        cells = [f"{bounds[name]:.1f}" if name in bounds else "–" for name in ("matrix", "L2")]
        again = read_again(stage, best.config, problem)
        if stage == "pv":  # beside the scores
            again += 2.0 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
        tiled = max(bounds["L2"], again / limits["l2_read"] * 1e6)
        own = [
            f"{name.partition('_')[2]} {best.config[name]}"
            for name in best.config
            if name.startswith(stage.upper()) and name.partition("_")[2] in SHOWN
        ]
        yield (
            f"| {stage} | {time_us:.1f} | {tables[number].run.directory.name} | {', '.join(own)} | "
            f"{' | '.join(cells)} | {time_us / least:.2f} ({unit}) | {tiled:.1f} | "
            f"{time_us / tiled:.2f} |"
        )


# -- beyond their design --------------------------------------------------------------------


def by_statistics(table: Recording) -> Iterator[str]:
    """The best of each place of the softmax."""
    yield "| softmax | µs | µs/head | stages alone, µs | with |"
    yield "|---|---:|---:|---|---|"
    for name, words in STATISTICS.items():
        fit = [t for t in table.ours if t.variant.get("statistics") == name]
        if not fit:
            continue
        best = min(fit, key=us)
        stages = ", ".join(f"{stage} {time:.1f}" for stage, time in best.stages_us.items())
        config = ", ".join(f"{n} {best.config[n]}" for n in TUNED)
        once = "" if best.time_us is None or best.time_us.rounds else ", timed once"
        yield f"| {words} | {us(best):.1f}{once} | {head(us(best))} | {stages} | {config} |"
    for peer in ("torch_flash", "torch_cudnn", "triton_flash"):
        if peer in table.peers:
            yield f"| {peer} | {us(table.peers[peer]):.1f} | {head(us(table.peers[peer]))} | | |"


def long_context(run: Run) -> Iterator[str]:
    """The best of each pipeline and way to cut it, on every problem of the run."""
    environment = run.environment
    assert environment is not None
    yield "| problem | pipeline | chunks | µs | heads × queries | workspace | × SDPA cuDNN |"
    yield "|---|---|---|---:|---|---:|---:|"
    ranked = rank(run.trials, environment).to_dict("records")
    rows = [row["trial"] for row in ranked if row["rank"] == row["rank"]]
    rows = [t for t in rows if t.time_us is not None]
    for problem in dict.fromkeys(t.problem for t in rows):
        own = [t for t in rows if t.problem == problem]
        peer = next((us(t) for t in own if t.provider == "torch_cudnn"), None)
        seen = set()
        for t in own:
            if t.provider != "attnsweep" or tuple(t.variant.values()) in seen:
                continue
            seen.add(tuple(t.variant.values()))
            cut = t.schedule or {}
            cells = [
                problem.label,
                *(t.variant["pipeline"], t.variant["chunks"], f"{us(t):.0f}"),
                f"{cut['heads']} × {cut['rows']}",
                f"{cut['workspace_bytes'] / 2**20:.0f} MiB",
                f"{peer / us(t):.2f}" if peer else "–",
            ]
            yield f"| {' | '.join(cells)} |"


# -- what strategy staged would have done ---------------------------------------------------


def staged_on(space: Space, rows: dict[Config, Trial]) -> tuple[int, Trial | None]:
    """How many of a space's recorded rows strategy staged would have asked for, and their best."""
    search = Search("staged", space)
    asked: list[Trial] = []
    while (config := search.ask()) is not None:
        trial = rows.get(config)
        if trial is not None:
            asked.append(trial)
            search.tell(trial)
    ok = [t for t in asked if t.status is Status.OK and t.time_us]
    return len(asked), min(ok, key=us, default=None)


def staged_lines(run: Run) -> Iterator[str]:
    """Of each problem of an exhaustive run: what staged search saves, and whether it loses."""
    environment = run.environment
    assert environment is not None
    kernels = discover()
    spec = load_spec(run.directory / "spec.yaml", kernels)
    if spec.search.strategy != "exhaustive" or spec.search.candidates:
        return
    yield "| problem | candidates | tried | best of all, µs | best of those tried, µs |"
    yield "|---|---:|---:|---:|---:|"
    for item in plan(spec, kernels, arch_named(environment.arch)):
        for space in item.spaces:
            rows = {
                Config(t.config): t
                for t in run.trials
                if t.problem == item.problem and t.kernel == space.kernel.name
            }
            if not rows or len(space.kernel.stages) < 2:
                continue
            tried, found = staged_on(space, rows)
            ok = [t for t in rows.values() if t.status is Status.OK and t.time_us]
            best = min(ok, key=us, default=None)
            if best is None or found is None:
                continue
            same = "the same config" if found.key == best.key else f"{us(found) / us(best):.3f}×"
            yield (
                f"| {item.problem.label} | {len(rows)} | {tried} | {us(best):.2f} | "
                f"{us(found):.2f}, {same} |"
            )


# -- the page -------------------------------------------------------------------------------


def table_beside_theirs(table: Recording) -> Iterator[str]:
    """The authors' table with our figures."""
    yield "| configuration | theirs, H100 | here | softmax alone, µs | launches alone, µs |"
    yield "|---|---:|---:|---:|---:|"
    for (tile, softmax), told in TABLE.items():
        trial = table.variant(tile=tile, softmax=softmax, mode="graph")
        ours = ["–", "–", "–"]
        if trial is not None:
            launch = "–" if trial.launch_us is None else f"{trial.launch_us:.1f}"
            ours = [head(us(trial)), f"{trial.stages_us.get('softmax', float('nan')):.1f}", launch]
        yield f"| {tile.replace('x', '×')}, {softmax} | {told:.2f} | {' | '.join(ours)} |"
    for peer, (name, told) in PEERS.items():
        found = table.peers.get(peer)
        yield f"| {name} | {told:.2f} | {head(us(found)) if found else '–'} | | |"


def counter_lines(table: Recording) -> Iterator[str]:
    """What the hardware counters say of the candidates that were profiled."""
    for trial in table.ours:
        stages = table.counted.get(tuple(sorted(trial.config.items())))
        if stages is None:
            continue
        yield f"- **{named(trial)}**, {us(trial):.1f} µs:"
        for stage in stages:
            figures = stage["figures"]
            worst = ", ".join(f"{why} {n:.1f}" for why, n in list(stage["stalls"].items())[:2])
            parts = [
                f"{label} {figures[name] * factor:.0f}{unit}"
                for label, name, factor, unit in (
                    ("L2 read", "l2_read_bytes", 1e-6, " MB"),
                    ("L2 written", "l2_write_bytes", 1e-6, " MB"),
                    ("DRAM read", "dram_read_bytes", 1e-6, " MB"),
                    ("DRAM written", "dram_write_bytes", 1e-6, " MB"),
                    ("tensor cores", "tensor_percent", 1, " %"),
                    ("issue slots", "issue_percent", 1, " %"),
                )
                if name in figures
            ]
            yield f"  - {stage['stage']}: {', '.join(parts)}; warps waited for {worst}"


def figures(results: Path) -> dict[str, str]:
    """What the README tells of system A: µs/head of recorded runs, and µs of the fused call."""
    table = Recording(open_run(results / "three_kernel"), SHAPE)
    tuned = Recording(open_run(results / "three_kernel_h200"), SHAPE)
    theirs = table.variant(tile="64x128x64", softmax="32 threads, 3 passes", mode="graph")
    assert theirs is not None

    def best(name: str) -> float:
        return min(us(t) for t in tuned.ours if t.variant.get("statistics") == name)

    return {
        "table_head": head(us(theirs)),
        "sweep_head": head(min(map(us, table.ours))),
        "tuned_head": head(best("softmax")),
        "fused_head": head(best("fused")),
        "fused": f"{best('fused'):.1f}",
        "sdpa_head": head(us(tuned.peers["torch_flash"])),
        "cudnn_head": head(us(tuned.peers["torch_cudnn"])),
        "unfused_head": head(us(table.peers["unfused"])),
    }


def page(results: Path) -> str | None:
    """The page, or None if the sweep is not recorded in `results`."""
    directory = results / "three_kernel"
    if not directory.is_dir():
        return None
    run = open_run(directory)
    table, causal = Recording(run, SHAPE), Recording(run, CAUSAL)
    where = run.environment
    assert where is not None
    out = [
        "# The claims of system A, tested",
        "",
        "A three-kernel pipeline on Hopper: QKᵀ, softmax, PV at (1,16,1024,64) in fp16. Its "
        "authors' figures are of an H100; ours of the recorded run "
        "[results/h200/three_kernel](../results/h200/three_kernel/ranking.md): "
        f"{where.gpu}, driver {where.driver}, NVRTC {where.nvrtc}, {where.date[:10]}. "
        "µs per head is the time of a call over 16.",
        "",
        "## Their table",
        "",
        *table_beside_theirs(table),
        "",
        "## Claim by claim",
        "",
        "| claim | measured here | | the reason found |",
        "|---|---|---|---|",
        *(f"| {v.claim} | {v.measured} | **{v.verdict}** | {v.reason} |" for v in verdicts(table)),
        "",
    ]
    best = min(causal.ours, key=us, default=None)
    if best is not None:
        out += [f"Causal, which they left open: {head(us(best))} µs/head ({named(best)}).", ""]
    limits_path = results / "limits.json"
    if limits_path.is_file():
        limits = json.loads(limits_path.read_text(encoding="utf-8"))
        tables = [table]
        if (results / "three_kernel_h200").is_dir():
            tables.append(Recording(open_run(results / "three_kernel_h200"), SHAPE))
        said = ", ".join(
            f"{n.replace('_', ' ')} {v / 1e12:.2f} TB/s" for n, v in limits["rates"].items()
        )
        out += [
            "## What each stage could take at best",
            "",
            f"Rates measured by `benchmarks/limits.py` ({limits['where']}): {said}. Matrix "
            "products at the dense peak. As tiled: with what the tiles read of Q, K and V again.",
            "",
            *bounds_table(tables, limits["rates"]),
            "",
        ]
    for title, said, name, lines_of in (
        (
            "Their design tuned, and with the softmax moved into the products",
            "The named future work. Ranked by `configs/three_kernel_h200.yaml`",
            "three_kernel_h200",
            lambda run: by_statistics(Recording(run, SHAPE)),
        ),
        (
            "Long context, in chunks",
            "8K and 32K keys, by `configs/three_kernel_long.yaml`",
            "three_kernel_long",
            long_context,
        ),
        (
            "Stages timed alone, then combined",
            "What `search: {strategy: staged}` asks for, replayed on an exhaustive run of "
            "`configs/three_kernel_stages.yaml`",
            "three_kernel_stages",
            staged_lines,
        ),
    ):
        if not (results / name).is_dir():
            continue
        other = open_run(results / name)
        link = f"[results/h200/{name}](../results/h200/{name}/ranking.md)"
        when = other.environment.date[:10] if other.environment else ""
        out += [f"## {title}", "", f"{said}: {link}, {when}.", "", *lines_of(other), ""]
    counted = [
        line
        for name in ("three_kernel_h200", "three_kernel")
        if (results / name).is_dir()
        for line in counter_lines(Recording(open_run(results / name), SHAPE))
    ]
    if counted:
        out += [
            "## Hardware counters",
            "",
            "By `attnsweep profile`, each launch alone, caches as the launch before left them.",
            "",
            *counted,
            "",
        ]
    out += claims_cd.sections(results) + claims_e.sections(results)
    if (results / claims_e.NAME).is_dir():
        counted = list(counter_lines(Recording(open_run(results / claims_e.NAME), claims_e.SHAPE)))
        out += ["## Hardware counters of system E", "", *counted] if counted else []
    return "\n".join(out).rstrip() + "\n"

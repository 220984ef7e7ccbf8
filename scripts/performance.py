"""docs/performance.md: the fused Hopper kernel beside its peers, and what each parameter gives.

Every figure is of a recorded run. What a parameter was predicted to give is text below; what it
gave is the best time without its values over the best time with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnsweep.choose.ranking import rank
from attnsweep.hardware import arch_named, binding, bounds
from attnsweep.problem import Problem
from attnsweep.store.run import Run, open_run
from attnsweep.trial import Trial

KERNEL = "flash_fwd_wgmma"
PEERS = {"torch_flash": "SDPA flash", "torch_cudnn": "SDPA cuDNN", "triton_flash": "Triton"}
RUNS = {
    "flash_short_h200": "Short calls",
    "flash_h200": "Training and prefill shapes",
    "flash_dims_h200": "Other head dims",
    "flash_long_h200": "Long context",
}
BATCHED = "batched_h100"
# Parameter to what its first value is compared with, and what was expected of it.
TRICKS = {
    "P_SHARED": (
        "P from shared memory, not registers",
        "a wgmma whose A comes from registers takes 8 clocks longer; storing P costs ALU time: "
        "a few per cent either way",
    ),
    "WARPGROUPS": (
        "tiles of 64, 128 or 192 queries",
        "larger tiles read K and V less often; smaller ones fill the card on short problems",
    ),
    "BLOCK_N": ("keys of a tile", "more keys, fewer rounds; fewer keys, more registers to spare"),
    "BLOCKS_PER_SM": (
        "several blocks on an SM",
        "the softmax of one runs beside the products of the other, without turns",
    ),
    "PINGPONG": (
        "warpgroups take turns",
        "up to 10 % where two warpgroups would else do softmax at the same time",
    ),
    "OVERLAP": (
        "softmax beside the product of the tile before",
        "10 % and more; nothing where other warpgroups fill the gaps",
    ),
    "PERSISTENT": (
        "blocks that take turns at tiles",
        "a few per cent: an epilogue runs under the next tile's first loads",
    ),
    "ORDER": ("longest blocks first", "causal problems end together: 5 %"),
    "CLUSTER": (
        "pairs of blocks share their loads",
        "half the L2 reads; nothing where L2 does not bind",
    ),
    "KEY_GROUPS": (
        "warpgroups of a block split the keys",
        "half the rounds for a merge: pays on the shortest problems",
    ),
    "SPLITS": (
        "blocks split the keys, a second launch joins",
        "pays only where tiles of queries are far fewer than SMs",
    ),
    "SPLIT_CLUSTER": (
        "blocks that split the keys join in a cluster",
        "no second launch and no workspace: a microsecond where splits pay",
    ),
    "EXP2_POLY": (
        "a quarter of the exponentials on the FMA units",
        "up to a quarter of the MUFU time where that binds",
    ),
    "NUM_STAGES": ("tiles in flight", "latency hidden where rounds are short"),
    "PDL": (
        "programmatic launch",
        "0.5 to 1 us of launch and prologue hidden a call",
    ),
}


def us(trial: Trial) -> float:
    """Warm time of a call."""
    assert trial.time_us is not None
    return trial.time_us.median


class Recording:
    """Ranked rows of a run, by problem."""

    def __init__(self, run: Run) -> None:
        self.run = run
        rows = rank(run.trials, run.environment).to_dict("records")
        ranked = [row["trial"] for row in rows if row["rank"] == row["rank"]]
        self.trials = [t for t in ranked if t.time_us is not None]
        self.problems = list(dict.fromkeys(t.problem for t in self.trials))

    def ours(self, problem: Problem) -> list[Trial]:
        """Of our kernel, best first."""
        return [t for t in self.trials if t.problem == problem and t.kernel == KERNEL]

    def peers(self, problem: Problem) -> dict[str, Trial]:
        """By provider; without those that were not there."""
        return {
            t.provider: t
            for t in self.trials
            if t.problem == problem and t.provider in (*PEERS, "flash_attn_3")
        }

    def complete(self) -> list[Problem]:
        """Problems with our kernel and at least one peer."""
        return [p for p in self.problems if self.ours(p) and self.peers(p)]


def limit_of(run: Run, trial: Trial) -> str:
    """The unit that binds and its share of the time."""
    environment = run.environment
    assert environment is not None
    found = binding(
        bounds(trial.problem, arch_named(environment.arch), environment),
        trial.problem,
        l2_bytes=environment.l2_bytes,
    )
    launch = trial.launch_us or 0.0
    launched = f", launch {100 * launch / us(trial):.0f} %" if launch > 0.03 * us(trial) else ""
    return f"{found[0]} {100 * found[1] / us(trial):.0f} %{launched}" if found else "–"


def config_of(trial: Trial, varied: Sequence[str]) -> str:
    """What the sweep chose."""
    return " ".join(f"{name}={trial.config[name]}" for name in varied if name in trial.config)


def varied_in(recording: Recording) -> list[str]:
    """Parameters with several values in the run."""
    trials = [t for p in recording.problems for t in recording.ours(p)]
    names = dict.fromkeys(name for t in trials for name in t.config)
    return [n for n in names if len({t.config.get(n) for t in trials}) > 1]


def shapes(recording: Recording) -> Iterator[str]:
    """One row a problem: ours, the peers, the ratio, what was chosen, what binds."""
    varied = varied_in(recording)
    peers_there = " | ".join(PEERS.values())
    yield f"| problem | ours, µs | {peers_there} | × best | TFLOP/s | of it | chosen |"
    yield f"|---|---:|{'---:|' * len(PEERS)}---:|---:|---|---|"
    for problem in recording.complete():
        best, peers = recording.ours(problem)[0], recording.peers(problem)
        times = [f"{us(peers[p]):.4g}" if p in peers else "–" for p in PEERS]
        ratio = min(map(us, peers.values())) / us(best)
        cells = [
            problem.label,
            f"**{us(best):.4g}**",
            *times,
            f"**{ratio:.2f}**",
            f"{problem.flops / us(best) / 1e6:.0f}",
            limit_of(recording.run, best),
            config_of(best, varied),
        ]
        yield f"| {' | '.join(cells)} |"


def batched(recording: Recording) -> Iterator[str]:
    """System B's nine cells: µs a sequence on the device, and a call from the host."""
    yield (
        "| seqlen | batch | device, µs a sequence | a call, µs | issued eagerly, µs | "
        "best peer a sequence | × |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|"
    for problem in sorted(recording.complete(), key=lambda p: (p.seqlen_q, p.batch)):
        best, peers = recording.ours(problem)[0], recording.peers(problem)
        peer = min(peers.values(), key=us)
        eager = f"{best.eager_us:.1f}" if best.eager_us else "–"
        yield (
            f"| {problem.seqlen_q} | {problem.batch} | **{us(best) / problem.batch:.3f}** | "
            f"{us(best):.2f} | {eager} | {us(peer) / problem.batch:.3f} ({peer.provider}) | "
            f"{us(peer) / us(best):.2f} |"
        )


def gains(recordings: Sequence[Recording], name: str) -> Iterator[tuple[str, float, str]]:
    """Value of a parameter, how much its best use gains over the best without, and where."""
    found: dict[str, list[tuple[float, str]]] = {}
    for recording in recordings:
        for problem in recording.complete():
            ours = recording.ours(problem)
            values = {t.config.get(name) for t in ours}
            if len(values) < 2:
                continue
            for value in values:
                with_it = min(us(t) for t in ours if t.config.get(name) == value)
                without = min(us(t) for t in ours if t.config.get(name) != value)
                found.setdefault(str(value), []).append((without / with_it, problem.label))
    for value, ratios in sorted(found.items()):
        best, where = max(ratios)
        wins = sum(ratio > 1 for ratio, _ in ratios)
        yield value, best, f"{wins} of {len(ratios)}, most at {where}"


def tricks(recordings: Sequence[Recording]) -> Iterator[str]:
    """What each parameter was expected to give, and gave."""
    yield "| parameter | | expected | value: most it gained, and on how many problems it won |"
    yield "|---|---|---|---|"
    for name, (what, expected) in TRICKS.items():
        each = [
            f"{value}: {100 * (ratio - 1):+.1f} % ({where})"
            for value, ratio, where in gains(recordings, name)
        ]
        if each:
            yield f"| `{name}` | {what} | {expected} | {'; '.join(each)} |"


def figures(results: Path) -> dict[str, str]:
    """What the README tells of system B."""
    short = Recording(open_run(results / "flash_short_h200"))
    cells = Recording(open_run(results / BATCHED))
    problem = Problem(1, 16, 16, 1024, 1024, 64)
    best, peers = short.ours(problem)[0], short.peers(problem)
    each = [us(cells.ours(p)[0]) / p.batch for p in cells.complete()]
    ratios = [
        min(map(us, cells.peers(p).values())) / us(cells.ours(p)[0]) for p in cells.complete()
    ]
    return {
        "wgmma": f"{us(best):.1f}",
        "wgmma_to_flash": f"{us(peers['torch_flash']) / us(best):.2f}",
        "wgmma_to_cudnn": f"{us(peers['torch_cudnn']) / us(best):.2f}",
        "cells": f"{min(each):.2f} to {max(each):.2f}",
        "cells_ratio": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }


def page(results: Path) -> str | None:
    """The page, or None if nothing of it is recorded in `results`."""
    there = {name: results / name for name in (*RUNS, BATCHED) if (results / name).is_dir()}
    recordings = {name: Recording(open_run(directory)) for name, directory in there.items()}
    recordings = {name: r for name, r in recordings.items() if r.complete()}
    if not recordings:
        return None
    where = next(iter(recordings.values())).run.environment
    assert where is not None
    ratios = [
        min(map(us, r.peers(p).values())) / us(r.ours(p)[0])
        for r in recordings.values()
        for p in r.complete()
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    out = [
        f"# How fast `{KERNEL}` is",
        "",
        f"Recorded on {where.gpu}, driver {where.driver}, NVRTC {where.nvrtc}, PyTorch "
        f"{where.packages.get('torch', '–')}, {where.date[:10]}: CUDA-graph replay of back-to-back "
        "calls, warm L2, peers in the same rounds. Each of our times is of a config that the sweep "
        "chose. × best: time of the fastest peer over ours. Of it: the unit that binds, and the "
        "share of our time that it needs at its peak rate. FlashAttention-2, 3 and 4 were not "
        "installed there, so they are no peers here.",
        "",
        f"Over {len(ratios)} problems: {min(ratios):.2f}× to {max(ratios):.2f}× the fastest peer, "
        f"geometric mean {mean:.2f}×; slower than it on {sum(r < 1 for r in ratios)}.",
        "",
    ]
    for name, title in RUNS.items():
        if name in recordings:
            link = f"[results/h200/{name}](../results/h200/{name}/ranking.md)"
            out += [f"## {title}", "", f"{link}:", "", *shapes(recordings[name]), ""]
    if BATCHED in recordings:
        out += [
            "## System B: short sequences in batches",
            "",
            "8 heads of 64. Its authors reach 0.73 to 4.34 µs a sequence (H100) and find that "
            "launching, 11 µs eager, dominates at batch 1. Here the device time of a call stands "
            f"beside the host's time to issue one: [results/h200/{BATCHED}]"
            f"(../results/h200/{BATCHED}/ranking.md).",
            "",
            *batched(recordings[BATCHED]),
            "",
        ]
    out += [
        "## What each trick gives",
        "",
        "Best time of all configs without a value over the best with it, on the problems above "
        "whose sweep had both. Under 1 % is within what two compilations of the same idea differ.",
        "",
        *tricks(list(recordings.values())),
        "",
        "What was tried and gave nothing: [tried.md](tried.md). Not there: FP8 inputs.",
    ]
    return "\n".join(out).rstrip() + "\n"

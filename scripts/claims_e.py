"""The part of docs/claims.md about system E: a WMMA kernel with a cp.async pipeline.

Every figure is of a recorded run or counted from a row's config; every verdict follows from
figures. `configs/wmma_pipeline.yaml` starts from the authors' settings and changes one at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from claims_cd import LADDER, ranked, source, us
from verdict import FAILS, HOLDS, MARGIN, OPEN, PART, Verdict

from attnsweep.hardware import ARCHS, Arch, arch_named
from attnsweep.problem import Problem
from attnsweep.store.run import Run, open_run
from attnsweep.tools import profile as counters
from attnsweep.trial import Trial

NAME = "wmma_pipeline"
SHAPE = Problem(1, 8, 8, 512, 512, 64)
# The authors' settings, with 2 or 3 stages; the rest of a row's config is what a sweep changes.
OWN = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "PRODUCER_WARPS": 1,
    "EARLY": 0,
    "LAYOUT": 0,
    "O_IN_REGISTERS": 0,
    "CTAS": 0,
}
OWN_STAGES = (2, 3)
SETTINGS = ("STAGES", *OWN)
# Suspects, each a parameter: what changing it removes.
SUSPECTS = {
    "PRODUCER_WARPS": "producer warps, not one",
    "EARLY": "tiles awaited earlier than they must be",
    "STAGES": "stages, not 2 or 3",
    "LAYOUT": "rows of Q, K and V not all in the same banks",
    "O_IN_REGISTERS": "output in registers, scaled and stored once",
    "BLOCK_M": "rows a block, not 64",
    "BLOCK_N": "keys a tile, not 64",
    "CTAS": "persistent blocks",
}
# Their figures in µs, on an L4: 58 SMs, dense fp16 peak of 121 TFLOP/s.
THEIRS = {"scalar": 1750.0, "qk": 1980.0, "both": 1177.0, "overlap": 1162.0, "sdpa": 31.0}
THEIR_SMEM = 69 * 1024
L4, L4_SMS, L4_FLOPS_PER_US = ARCHS["sm_89"], 58, 121e6
LITTLE = 1.05  # a change of less is little
WHOLE, SOME = 0.5, 0.1  # shares of a gap: the cause; a part of it
SATURATED = 0.8
BANK_BYTES = 128  # what shared memory gives in a clock, a wavefront


class Sweep:
    """The rows of a run on one problem."""

    def __init__(self, run: Run, problem: Problem) -> None:
        assert run.environment is not None
        self.problem, self.where = problem, run.environment
        trials = [t for t in ranked(run) if t.problem == problem]
        self.rows = [t for t in trials if t.provider == "attnsweep"]
        self.peers = {t.provider: t for t in trials if t.provider != "attnsweep"}

    @property
    def own(self) -> Trial | None:
        """The authors' settings: the faster of 2 and 3 stages."""
        fit = [t for t in self.rows if not changed(t)]
        return min(fit, key=us, default=None)

    @property
    def best(self) -> Trial:
        """The winner, as ranked: of the equally good the thriftiest, not always the fastest."""
        return self.rows[0]

    def alone(self, name: str) -> Trial | None:
        """The fastest row in which only this setting is not the authors'."""
        fit = [t for t in self.rows if changed(t) == {name}]
        return min(fit, key=us, default=None)

    def with_and_without(self, name: str) -> tuple[Trial, Trial] | None:
        """The fastest row with this setting changed, and with it not, of rows that have both."""
        groups: dict[tuple[object, ...], tuple[list[Trial], list[Trial]]] = {}
        for trial in self.rows:
            rest = tuple(trial.config[other] for other in SETTINGS if other != name)
            groups.setdefault(rest, ([], []))[name not in changed(trial)].append(trial)
        pairs = [pair for pair in groups.values() if all(pair)]
        if not pairs:
            return None
        other, own = (min((t for pair in pairs for t in pair[i]), key=us) for i in (0, 1))
        return other, own


def changed(trial: Trial) -> set[str]:
    """Settings that are not the authors'."""
    config = trial.config
    found = {name for name, value in OWN.items() if config[name] != value}
    return found | ({"STAGES"} if config["STAGES"] not in OWN_STAGES else set())


def steps(sweep: Sweep) -> list[Trial]:
    """From the authors' settings to the best, one at a time, the most helpful next.

    Of 2 and 3 stages to begin with, those from which more is recorded. Ends early where no row of
    a next step is.
    """
    rows = {tuple(t.config[name] for name in SETTINGS): t for t in sweep.rows}

    def walk(start: Trial) -> list[Trial]:
        found = [start]
        while left := [n for n in SETTINGS if found[-1].config[n] != sweep.best.config[n]]:
            targets = [found[-1].config | {name: sweep.best.config[name]} for name in left]
            keys = [tuple(config[name] for name in SETTINGS) for config in targets]
            reached = [rows[key] for key in keys if key in rows]
            if not reached:
                break
            found.append(min(reached, key=us))
        return found

    walks = [walk(t) for t in sweep.rows if not changed(t)]
    return max(walks, key=lambda found: (found[-1] is sweep.best, -us(found[0])), default=[])


def said(trial: Trial, names: Sequence[str]) -> str:
    """Some of a row's settings."""
    return " ".join(f"{name}={trial.config[name]}" for name in names)


# -- what a config must do, counted ------------------------------------------------------------


def conflict_ways(config: Mapping[str, Any], head_dim: int) -> int:
    """How many of the 8 rows of 16 bytes that a matrix of `ldmatrix` has lie in the same banks."""
    layout = config["LAYOUT"]
    pitch = {1: 2 * head_dim + 16, 2: 32}.get(layout, 2 * head_dim)
    starts = [(row * pitch) ^ (16 * row if layout == 3 else 0) for row in range(8)]
    return max(Counter(start % BANK_BYTES for start in starts).values())


def conflicts(trial: Trial, problem: Problem) -> str:
    """The same of a row, in words."""
    ways = conflict_ways(trial.config, problem.head_dim)
    return f"{ways}-way" if ways > 1 else "none"


def tile_wavefronts(config: Mapping[str, Any], head_dim: int) -> int:
    """Wavefronts of shared memory that a block needs for a tile of keys, at least.

    A warp loads fragments of Q, K and V (4 matrices of 8 rows each), writes its scores, reads
    them, writes probabilities and loads these; an output in shared memory is read and written
    twice. cp.async fills K and V. Only fragments of Q, K and V are taken to meet in banks.
    """
    n, d = config["BLOCK_N"], head_dim
    fragments = d // 16 + 2 * (n // 16) * (d // 16)
    scores = (16 * n * (4 + 4 + 2)) // BANK_BYTES + 4 * (n // 16)
    output = 0 if config["O_IN_REGISTERS"] else 4 * 16 * d * 4 // BANK_BYTES
    a_warp = 4 * fragments * conflict_ways(config, d) + scores + output
    return config["BLOCK_M"] // 16 * a_warp + 2 * n * d * 2 // BANK_BYTES


def blocks_of(config: Mapping[str, Any], problem: Problem) -> int:
    """Tiles of queries: a block each, unless CTAS is fewer."""
    return -(-problem.seqlen_q // config["BLOCK_M"]) * problem.batch * problem.heads


def busiest_tiles(config: Mapping[str, Any], problem: Problem, sms: int) -> int:
    """Tiles of keys that the busiest SM goes through, at least."""
    a_head = [
        -(-min(problem.seqlen_k, last if problem.causal else problem.seqlen_k) // config["BLOCK_N"])
        for last in range(
            config["BLOCK_M"], problem.seqlen_q + config["BLOCK_M"], config["BLOCK_M"]
        )
    ]
    heads, workers = problem.batch * problem.heads, min(sms, config["CTAS"] or sms)
    rounds = -(-heads * len(a_head) // workers)
    return max(max(a_head), rounds * min(a_head), -(-heads * sum(a_head) // workers))


def sms_used(config: Mapping[str, Any], problem: Problem, sms: int) -> int:
    """SMs that have a block."""
    blocks = blocks_of(config, problem)
    return min(sms, blocks, config["CTAS"] or blocks)


def bounds(trial: Trial, arch: Arch, sms: int, clocks_per_us: float) -> dict[str, float]:
    """Least microseconds of products, on the SMs that have a block, and of shared memory."""
    problem, used = trial.problem, sms_used(trial.config, trial.problem, sms)
    tiles = busiest_tiles(trial.config, problem, sms)
    return {
        "matrix": problem.flops / (arch.tensor_flops_per_clock * used * clocks_per_us),
        "shared": tiles * tile_wavefronts(trial.config, problem.head_dim) / clocks_per_us,
    }


def bounds_of(sweep: Sweep, trial: Trial) -> dict[str, float]:
    """The same on the card of the recording."""
    where = sweep.where
    return bounds(trial, arch_named(where.arch), where.sm_count, where.clock_hz / 1e6)


# -- claims ------------------------------------------------------------------------------------


def share(gain: float, gap: float) -> float:
    """What part of a gap a gain is, both being ratios: their logarithms over each other."""
    return math.log(gain) / math.log(gap) if gap > 1 else 0.0


def percent(gain: float, gap: float) -> str:
    """The same, in words."""
    return f"{round(100 * share(gain, gap))} %"


def part(share_of_gap: float) -> str:
    """Whether a suspect holds."""
    return HOLDS if share_of_gap >= WHOLE else PART if share_of_gap >= SOME else FAILS


def verdicts(sweeps: list[Sweep], rungs: dict[str, float]) -> Iterator[Verdict]:
    """Their figures and hypotheses, on the shape they measured and on the longest recorded."""
    sweep, longest = sweeps[0], sweeps[-1]
    own, flash = sweep.own, sweep.peers.get("torch_flash")
    scalar, tensor = rungs.get("ladder_2_tiles"), rungs.get("ladder_3_tensor_cores")
    claim = "WMMA for both products is 1.49× as fast as scalar code (1750 → 1177 µs)"
    if scalar and tensor:
        yield Verdict(
            claim,
            f"{scalar:.1f} → {tensor:.1f} µs between these rungs of the ladder: "
            f"{scalar / tensor:.2f}×",
            HOLDS if scalar / tensor > MARGIN else FAILS,
            "`ladder_2_tiles` and `ladder_3_tensor_cores`, each at its best",
        )
    else:
        yield Verdict(claim, "", OPEN, "the ladder lacks a row it needs")
    yield Verdict(
        "WMMA for QKᵀ alone is slower than scalar code (1750 → 1980 µs)",
        "",
        OPEN,
        "no family multiplies QKᵀ on WMMA and PV on scalar units",
    )
    if own is None or flash is None:
        yield Verdict("the four hypotheses", "", OPEN, "the run lacks a row it needs")
        return
    yield _overlap(sweep, own)
    yield _resources(own)
    gap = us(own) / us(flash)
    told = THEIRS["both"] / THEIRS["sdpa"]
    yield Verdict(
        f"PyTorch SDPA is {told:.0f}× as fast (1177 against 31 µs)",
        f"{us(own):.1f} µs in their settings, SDPA flash {us(flash):.1f}: {gap:.2f}×",
        HOLDS if gap > told / 1.5 else FAILS,
        "what is left of it is not in the settings; see the predictions below",
    )
    yield from _hypotheses(sweep, longest, own, gap)
    yield from _planned(sweep, own, gap)
    yield _tenfold(sweeps, rungs)


def _overlap(sweep: Sweep, own: Trial) -> Verdict:
    claim = "cp.async overlap gains little (1177 → 1162 µs: 1.01×)"
    alone = [t for t in sweep.rows if changed(t) == {"STAGES"} and t.config["STAGES"] == 1]
    if not alone:
        return Verdict(claim, "", OPEN, "the run lacks a row it needs")
    ratio = us(alone[0]) / us(own)
    return Verdict(
        claim,
        f"one stage, nothing overlapped: {us(alone[0]):.1f} µs; {own.config['STAGES']} stages: "
        f"{us(own):.1f}: {ratio:.2f}×",
        HOLDS if ratio <= LITTLE else FAILS,
        f"with no overlap at all, copies add {100 * (ratio - 1):.0f} % to the call",
    )


def _resources(own: Trial) -> Verdict:
    assert own.resources is not None
    facts = own.resources
    fit = L4.smem_per_sm // (THEIR_SMEM + L4.smem_reserved_per_block)
    return Verdict(
        "69 to 71 KB of shared memory and 58 to 61 registers make about 2 blocks an SM (L4)",
        f"{facts.smem_bytes / 1024:.0f} KB and {facts.registers} registers a thread; "
        f"{facts.stages['fwd']['blocks_per_sm']:.0f} blocks an SM here",
        HOLDS if fit >= 2 else FAILS,
        f"an SM of an L4 has {L4.smem_per_sm // 1024} KB, so that {fit} block of 69 KB fits",
    )


def _hypotheses(sweep: Sweep, longest: Sweep, own: Trial, gap: float) -> Iterator[Verdict]:
    used = 100 * bounds_of(sweep, own)["matrix"] / us(own)
    layout = sweep.alone("LAYOUT")
    gain = us(own) / us(layout) if layout else 1.0
    yield Verdict(
        "hypothesis: the tensor cores are saturated",
        f"the products need {used:.1f} % of the time at the dense peak of the SMs that have a "
        f"block; rows in other banks, the products the same: {gain:.2f}× as fast",
        HOLDS if used >= 100 * SATURATED and gain <= MARGIN else FAILS,
        "a saturated unit would take as long whatever the layout of shared memory",
    )
    single = [t for t in sweep.rows if changed(t) == {"STAGES"} and t.config["STAGES"] == 1]
    without = ""
    if single:
        longer = us(single[0]) / us(own)
        without = (
            f"one stage, so that nothing overlaps, takes {longer:.2f}× as long: what copies and "
            f"waiting for them cost is {'small' if longer <= LITTLE else 'not small'}"
        )
    for claim, name in (
        ("hypothesis: one producer warp is too few", "PRODUCER_WARPS"),
        ("hypothesis: wait_group waits too early", "EARLY"),
    ):
        alone = sweep.alone(name)
        if alone is None:
            yield Verdict(claim, "", OPEN, "the run lacks a row it needs")
            continue
        ratio = us(own) / us(alone)
        pair = sweep.with_and_without(name)
        assert pair is not None
        yield Verdict(
            claim,
            f"{said(alone, ('STAGES', name))} alone: {us(alone):.1f} µs, {ratio:.2f}×, "
            f"{percent(ratio, gap)} of the gap; of all rows that have both, the fastest takes "
            f"{us(pair[0]):.2f} µs with the change, {us(pair[1]):.2f} without",
            part(share(ratio, gap)),
            without,
        )
    yield _length(sweep, longest, own, gap)
    if layout is not None:
        counted, less = bounds_of(sweep, own)["shared"], bounds_of(sweep, layout)["shared"]
        ways = f"{conflicts(own, sweep.problem)}, then {conflicts(layout, sweep.problem)}"
        yield Verdict(
            "not among them: rows of 128 bytes all begin in the same bank",
            f"{said(layout, ('LAYOUT',))} alone: {us(layout):.1f} µs, {gain:.2f}×, "
            f"{percent(gain, gap)} of the gap",
            part(share(gain, gap)),
            f"bank conflicts of the fragments of Q, K and V: {ways}; counted wavefronts fall "
            f"from {counted:.1f} to {less:.1f} µs, by {counted - less:.1f}; the time falls by "
            f"{us(own) - us(layout):.1f}",
        )


def _length(sweep: Sweep, longest: Sweep, own: Trial, gap: float) -> Verdict:
    claim = "hypothesis: L = 512 is too short"
    far, flash = longest.own, longest.peers.get("torch_flash")
    if far is None or flash is None or longest is sweep:
        return Verdict(claim, "", OPEN, "the run lacks a row it needs")
    there = us(far) / us(flash)
    sms = sweep.where.sm_count
    each = [us(trial) / busiest_tiles(trial.config, trial.problem, sms) for trial in (own, far)]
    fewer = sweep.alone("BLOCK_M")
    used = sms_used(own.config, own.problem, sms)
    idle = share(us(own) / us(fewer), gap) if fewer and used < sms else 0.0
    smaller = (
        f"; at {sweep.problem.seqlen_q} only {used} of {sms} SMs have a block, and "
        f"{said(fewer, ('BLOCK_M',))} alone gives {us(own) / us(fewer):.2f}×, {100 * idle:.0f} % "
        f"of the gap; on the {L4_SMS} SMs of an L4 none was idle"
        if fewer and idle >= SOME
        else ""
    )
    return Verdict(
        claim,
        f"{gap:.2f}× SDPA flash at {sweep.problem.seqlen_q} keys, {there:.2f}× at "
        f"{longest.problem.seqlen_k}; a tile on the busiest SM takes {each[0]:.2f} and "
        f"{each[1]:.2f} µs",
        HOLDS if there < gap / 2 else PART if there < gap / MARGIN or smaller else FAILS,
        f"the gap does not close with length{smaller}"
        if there >= gap
        else f"the gap narrows with length{smaller}",
    )


def _planned(sweep: Sweep, own: Trial, gap: float) -> Iterator[Verdict]:
    for claim, name, values in (
        ("planned: XOR swizzle", "LAYOUT", (3,)),
        ("planned: epilogue fusion", "O_IN_REGISTERS", (1,)),
        ("planned: persistent CTAs", "CTAS", (58, 132, 264)),
    ):
        fit = [t for t in sweep.rows if changed(t) == {name} and t.config[name] in values]
        if not fit:
            yield Verdict(f"{claim} would help", "", OPEN, "the run lacks a row it needs")
            continue
        best = min(fit, key=us)
        ratio = us(own) / us(best)
        yield Verdict(
            f"{claim} would help",
            f"{said(best, (name,))} alone: {us(best):.1f} µs, {ratio:.2f}×, "
            f"{percent(ratio, gap)} of the gap",
            HOLDS if ratio > MARGIN else FAILS,
            {
                "LAYOUT": f"bank conflicts: {conflicts(best, sweep.problem)}, not "
                f"{conflicts(own, sweep.problem)}, at no bytes",
                "O_IN_REGISTERS": "the output stays in fragments until it is divided, converted "
                "and stored",
                "CTAS": f"{blocks_of(own.config, sweep.problem)} blocks for "
                f"{sweep.where.sm_count} SMs; an uneven last round is all that this mends",
            }[name],
        )


def _tenfold(sweeps: list[Sweep], rungs: dict[str, float]) -> Verdict:
    ratios = {s.problem: us(s.own) / us(s.best) for s in sweeps if s.own}
    sweep = sweeps[0]
    assert sweep.own is not None
    target = us(sweep.own) / 10
    others = {name: us(t) for name, t in sweep.peers.items()} | rungs
    name = min(others, key=lambda each: others[each])
    beyond = "less than" if target < others[name] else "more than"
    far = sweeps[-1]
    least = min(bounds_of(far, t)["shared"] for t in far.rows)
    tenth = us(far.own) / 10 if far.own else math.inf
    limit = (
        f"; a tenth at {far.problem.label} is {tenth:.1f}, less than the {least:.1f} that shared "
        "memory takes at least in any row"
        if tenth < least
        else ""
    )
    return Verdict(
        "aim: the best config is 10× as fast as the untuned settings",
        ", ".join(f"{ratio:.2f}× at {p.label}" for p, ratio in ratios.items()),
        HOLDS if min(ratios.values()) >= 10 else FAILS,
        f"a tenth of {us(sweep.own):.1f} µs is "
        f"{target:.2f}, {beyond} the fastest of the ladder and the peers takes "
        f"({name}, {others[name]:.2f}){limit}; what each setting gives is listed below",
    )


# -- tables ------------------------------------------------------------------------------------


def overview(sweeps: list[Sweep]) -> Iterator[str]:
    """A row a problem."""
    yield (
        "| problem | their settings, µs | best, µs | × | SDPA flash, µs | their settings over it | "
        "best over it | fastest peer, µs |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for sweep in sweeps:
        own, best, flash = sweep.own, sweep.best, sweep.peers.get("torch_flash")
        if own is None or flash is None:
            continue
        peer = min(sweep.peers.values(), key=us)
        yield (
            f"| {sweep.problem.label} | {us(own):.2f} | {us(best):.2f} | {us(own) / us(best):.2f} "
            f"| {us(flash):.2f} | {us(own) / us(flash):.2f} | {us(best) / us(flash):.2f} | "
            f"{us(peer):.2f} ({peer.provider}) |"
        )


def alone_table(sweeps: list[Sweep]) -> Iterator[str]:
    """A row a suspect: how much changing it alone gains on each problem."""
    yield f"| changed alone | {' | '.join(s.problem.label for s in sweeps)} |"
    yield f"|---|{'---:|' * len(sweeps)}"
    for name, text in SUSPECTS.items():
        cells = []
        for sweep in sweeps:
            alone = sweep.alone(name)
            gain = f"{us(sweep.own) / us(alone):.2f}×" if alone and sweep.own else "–"
            cells.append(f"{gain}, {name}={alone.config[name]}" if alone else gain)
        yield f"| {text} | {' | '.join(cells)} |"


def fastest_table(sweeps: list[Sweep]) -> Iterator[str]:
    """A row a suspect: the fastest with it changed and with it not, of rows that have both."""
    yield f"| fastest with / without, µs | {' | '.join(s.problem.label for s in sweeps)} |"
    yield f"|---|{'---:|' * len(sweeps)}"
    for name, text in SUSPECTS.items():
        cells = []
        for sweep in sweeps:
            pair = sweep.with_and_without(name)
            cells.append(f"{us(pair[0]):.2f} / {us(pair[1]):.2f}" if pair else "–")
        yield f"| {text} | {' | '.join(cells)} |"


def path_lines(sweeps: list[Sweep]) -> Iterator[str]:
    """How the best is reached from their settings, a line a problem."""
    for sweep in sweeps:
        found = steps(sweep)
        if len(found) < 2:
            continue
        total = us(found[0]) / us(found[-1])
        told = [f"{us(found[0]):.2f} µs"]
        for before, after in pairwise(found):
            (name,) = [n for n in SETTINGS if before.config[n] != after.config[n]]
            gain = us(before) / us(after)
            told.append(
                f"{said(after, (name,))}: {us(after):.2f} ({gain:.2f}×, {percent(gain, total)})"
            )
        rest = "" if found[-1].config == sweep.best.config else "; the rows between are missing"
        yield f"- {sweep.problem.label}, {total:.2f}×: {' → '.join(told)}{rest}"


def bounds_table(sweeps: list[Sweep]) -> Iterator[str]:
    """Their settings, the best layout alone and the best of all, beside what they must do."""
    yield (
        "| problem | row | µs | blocks | SMs used | blocks an SM | occupancy | registers | "
        "smem, KB | conflicts | products | shared memory | of it |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for sweep in sweeps:
        rows = [("theirs", sweep.own), ("banks alone", sweep.alone("LAYOUT")), ("best", sweep.best)]
        for text, trial in rows:
            if trial is None or trial.resources is None:
                continue
            least, facts = bounds_of(sweep, trial), trial.resources
            cells = [
                f"{us(trial):.2f}",
                str(blocks_of(trial.config, sweep.problem)),
                str(sms_used(trial.config, sweep.problem, sweep.where.sm_count)),
                f"{facts.stages['fwd']['blocks_per_sm']:.0f}",
                f"{100 * facts.occupancy:.0f} %",
                str(facts.registers),
                f"{facts.smem_bytes / 1024:.0f}",
                conflicts(trial, sweep.problem),
                f"{least['matrix']:.2f}",
                f"{least['shared']:.2f}",
                f"{100 * least['shared'] / us(trial):.0f} %",
            ]
            yield f"| {sweep.problem.label} | {text} | {' | '.join(cells)} |"


def predicted(sweep: Sweep) -> Iterator[str]:
    """Their card beside ours, by peaks alone: a prediction, and how well it does on SDPA."""
    own, flash = sweep.own, sweep.peers.get("torch_flash")
    if own is None or flash is None:
        return
    where = sweep.where
    peak = arch_named(where.arch).tensor_flops_per_clock * where.sm_count * where.clock_hz / 1e6
    ratio = peak / L4_FLOPS_PER_US
    scaled, sdpa = THEIRS["overlap"] / ratio, THEIRS["sdpa"] / ratio
    yield (
        f"Predicted, by the ratio of dense fp16 peaks ({ratio:.1f}): their 1162 µs on an L4 would "
        f"be {scaled:.0f} µs here, {scaled / us(own):.1f}× what their settings take and "
        f"{scaled / us(sweep.best):.1f}× the best. The peak is a poor measure at this size: their "
        f"SDPA would be {sdpa:.1f} µs, and takes {us(flash):.1f}."
    )
    yield ""
    tiles = busiest_tiles(own.config, sweep.problem, L4_SMS)
    clock = L4_FLOPS_PER_US / (L4.tensor_flops_per_clock * L4_SMS)
    least = bounds(own, L4, L4_SMS, clock)
    here = busiest_tiles(own.config, sweep.problem, where.sm_count)
    guess = us(own) * tiles / here * (where.clock_hz / 1e6) / clock
    yield (
        f"Predicted, by what the busiest SM does: shared memory gives an SM {BANK_BYTES} bytes a "
        f"clock on both cards. {blocks_of(own.config, sweep.problem)} blocks on {L4_SMS} SMs, one "
        f"on an SM at a time, are {tiles} tiles for the busiest instead of {here}: {guess:.0f} µs, "
        f"of which shared memory must take {least['shared']:.0f}, products {least['matrix']:.0f}. "
        f"Their 1162 µs are {THEIRS['overlap'] / guess:.0f}× that, for which no setting swept "
        "here accounts."
    )


def _rungs(results: Path) -> dict[str, float]:
    """Best time of each rung of the ladder on the authors' shape."""
    found: dict[str, float] = {}
    if (results / LADDER).is_dir():
        for trial in ranked(open_run(results / LADDER)):
            if trial.provider == "attnsweep" and trial.problem == SHAPE:
                found.setdefault(trial.kernel, us(trial))
    return found


def sweeps_of(run: Run) -> list[Sweep]:
    """A sweep a problem: the authors' shape first, the longest last."""
    problems = list(dict.fromkeys(t.problem for t in run.trials))
    return [Sweep(run, p) for p in problems if any(t.provider == "attnsweep" for t in run.trials)]


def figures(results: Path) -> dict[str, str]:
    """What the README tells of system E."""
    run = open_run(results / NAME)
    sweep = Sweep(run, SHAPE)
    asked = [v for v in verdicts(sweeps_of(run), {}) if v.claim.startswith("hypothesis")]
    count = Counter(v.verdict for v in asked)
    held = f"{count[HOLDS]} of its {len(asked)} hypotheses hold, {count[PART]} in part"
    own, layout = sweep.own, sweep.alone("LAYOUT")
    assert own is not None
    assert layout is not None
    return {
        "wmma_own": f"{us(own):.1f}",
        "wmma_hypotheses": held,
        "wmma_banks": f"{us(own) / us(layout):.2f}",
        "wmma_best": f"{us(sweep.best):.1f}",
        "wmma_ratio": f"{us(own) / us(sweep.best):.2f}",
        "wmma_flash": f"{us(sweep.peers['torch_flash']):.1f}",
    }


def sections(results: Path) -> list[str]:
    """Lines of system E, if it is recorded in `results`."""
    if not (results / NAME).is_dir():
        return []
    run = open_run(results / NAME)
    sweeps = sweeps_of(run)
    once = [t for s in sweeps for t in s.rows if t.time_us is not None and t.time_us.samples == 1]
    every = sum(len(sweep.rows) for sweep in sweeps)
    missing = (
        "Hardware counters of these rows are not recorded: an `attnsweep profile` of them is still "
        "to be made. What follows rests on times, on what the compiled code uses, and on counting "
        "what a config must do."
    )
    theirs = " ".join(f"{name}={value}" for name, value in OWN.items())
    return [
        "# The claims of system E, tested",
        "",
        "WMMA for both products, a ring filled by cp.async, at (1,8,512,64). Its authors' figures "
        f"are of an L4; ours of {source(run, NAME)}. Their settings are {theirs}, 2 or 3 stages; a "
        "suspect is a setting changed. Best is the ranked winner: of the rows that the rounds of "
        "the finals show to be [equally good](measuring.md), the one with the least shared memory, "
        f"so that another may take a little less time. {len(once)} of {every} rows, slower than "
        "the best, were timed once.",
        "",
        *([] if counters.read(run.directory) else [missing, ""]),
        *overview(sweeps),
        "",
        "| claim | measured here | | the reason found |",
        "|---|---|---|---|",
        *(
            f"| {v.claim} | {v.measured} | **{v.verdict}** | {v.reason} |"
            for v in verdicts(sweeps, _rungs(results))
        ),
        "",
        "A share of a gap is the logarithm of a gain over that of the gap. A hypothesis holds from "
        f"{100 * WHOLE:.0f} %, and in part from {100 * SOME:.0f} %.",
        "",
        "## Each suspect alone, and among all rows",
        "",
        "How many times as fast as their settings, if this alone is changed; then the fastest of "
        "all rows that have a row beside them which differs in this alone.",
        "",
        *alone_table(sweeps),
        "",
        *fastest_table(sweeps),
        "",
        "## From their settings to the best",
        "",
        "One setting at a time, the one that helps most next; shares of the whole gain. It begins "
        "at the stages, 2 or 3, from which more rows are recorded; the tables take the faster "
        "of both.",
        "",
        *path_lines(sweeps),
        "",
        "## What the rows must do",
        "",
        "µs at least: of the products, at the dense peak of the SMs that have a block; of shared "
        "memory, a wavefront of 128 bytes a clock, on the busiest SM. Conflicts are of the 8 rows "
        "that a matrix of a fragment has.",
        "",
        *bounds_table(sweeps),
        "",
        *predicted(sweeps[0]),
        "",
    ]

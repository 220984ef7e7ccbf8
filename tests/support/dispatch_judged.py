"""Measures an exported package's dispatch on shapes that were not tuned.

The table is the one that an export of the tuned runs writes, and the rule is the package's own. A
held-out run swept other shapes on the same kind of GPU, or any on one that the tuned runs' GPU
stands in for; its times say what a choice costs.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnsweep.core.errors import StoreError
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status
from attnsweep.family.discover import discover
from attnsweep.serve.export import outline
from attnsweep.serve.export_code import config_of, gpu_of, is_one_call
from attnsweep.serve.package_kernels import asked_of, held_for, is_sdpa, lost_sdpa
from attnsweep.serve.runtime.cost_model import tiling
from attnsweep.serve.runtime.dispatch import choose
from attnsweep.serve.runtime.families import family_of, has_rival, kind_of_code, refused_by
from attnsweep.serve.runtime.table import TABLE, CompiledKernel, GpuKey, TunedGpu, known, read_table
from attnsweep.store.run import open_run

SLOWER = 1 / 1.03


@dataclass(frozen=True)
class Swept:
    """A shape as a run timed it: microseconds of each config and of PyTorch's backends."""

    run: str
    problem: Problem
    configs_us: Mapping[str, float]
    sdpa_us: Mapping[str, float]

    @property
    def best_us(self) -> float:
        """The least time that the run knows."""
        return min(*self.configs_us.values(), *self.sdpa_us.values())


@dataclass(frozen=True)
class Judged:
    """How good a package's choice for a shape is; regret and gain are None if it was not timed."""

    run: str
    shape: str
    code: str
    config: str | None
    regret: float | None
    gain: float | None
    served: float
    expected_gain: float
    reason: str


def tuned(runs: Sequence[Path], slower: float = 0.0) -> dict[GpuKey, TunedGpu]:
    """The table that an export of these runs has. slower: see `export.export`."""
    with tempfile.TemporaryDirectory() as place:
        table = json.dumps(outline(runs, discover(), slower=slower))
        (Path(place) / TABLE).write_text(table, encoding="utf-8")
        return dict(read_table(Path(place)).gpus)


def key_of(run: Path) -> GpuKey:
    """The kind of GPU of a run."""
    return gpu_of(open_run(run))[0]


def swept(run: Path) -> list[Swept]:
    """The shapes that a run can judge: with correct candidates, and with times of PyTorch's."""
    families = discover()
    ours: dict[Problem, dict[str, float]] = {}
    theirs: dict[Problem, dict[str, float]] = {}
    opened = open_run(run)
    for trial in opened.trials:
        if trial.status is not Status.OK or trial.time_us is None:
            continue
        problem, time_us = trial.problem.at_any_scale, trial.time_us.median
        if not has_rival(problem):
            continue
        family = families[family_of(problem)]
        if is_sdpa(trial):
            theirs.setdefault(problem, {})[trial.provider] = time_us
        elif (trial.provider, trial.kernel) == (OURS, family.name) and is_one_call(trial, family):
            ours.setdefault(problem, {})[config_of(trial, family).label] = time_us
    both = ours.keys() & (theirs.keys() - lost_sdpa(opened, theirs).keys())
    return [Swept(run.name, each, us, theirs[each]) for each, us in ours.items() if each in both]


def without(gpu: TunedGpu, problem: Problem) -> TunedGpu:
    """The table without the shape, and without its twin in the other dtype.

    Neither on this GPU nor on the one that stands in for it.
    """
    winners = tuple(w for w in gpu.winners if replace(w.problem, dtype=problem.dtype) != problem)
    won = {w.kernel.config for w in winners}
    held = {_key(w.kernel) for w in winners}
    shapes = Counter(asked_of(w.problem) for w in winners)
    for w in winners:
        timed = ((w.kernel, w.time_us), *w.others)
        times_us = {k.config: us for k, us in timed}
        cuts = {k.config: tiling(k) for k, _ in timed}
        kind, own = (w.problem.head_dim, w.problem.variant), w.kernel.config
        here = [config for *of, config in held if (*of,) == kind]
        chosen = held_for(times_us, own, won, shapes[asked_of(w.problem)], kind[1], cuts=cuts, here=here)
        held |= {(*kind, config) for config in chosen}
    made = [w.kernel for w in gpu.winners] + [*gpu.twins]
    twins = tuple(kernel for kernel in made if _key(kernel) in held)
    left = [replace(w, others=tuple((k, us) for k, us in w.others if _key(k) in held)) for w in winners]
    other = None if gpu.stand_in is None else without(gpu.stand_in, problem)
    return replace(gpu, winners=tuple(left), twins=twins, stand_in=other)


def _key(kernel: CompiledKernel) -> tuple[int, str, str]:
    return (kernel.head_dim, kernel.mask, kernel.config)


def judge(gpu: TunedGpu, one: Swept) -> Judged:
    """Compare the package's choice on a shape with the shape's own sweep."""
    choice = choose(gpu, one.problem)
    sdpa_us = min(one.sdpa_us.values())
    config = choice.kernel.config if choice.kernel is not None else None
    time_us = sdpa_us if config is None else one.configs_us.get(config)
    known_of = [gpu, *([gpu.stand_in] if gpu.stand_in is not None else [])]
    made = [k for each in known_of for k in (*(w.kernel for w in each.winners), *each.twins)]
    code = kind_of_code(one.problem)
    held = [
        one.configs_us[k.config]
        for k in made
        if k.kind == code
        and k.config in one.configs_us
        and refused_by(k.declaration, k.values, one.problem, gpu.key.sm_count) is None
    ]
    return Judged(
        one.run,
        one.problem.label,
        choice.code,
        config,
        None if time_us is None else time_us / one.best_us - 1,
        None if time_us is None else sdpa_us / time_us,
        min([*held, sdpa_us]) / one.best_us - 1,
        choice.gain,
        choice.reason,
    )


def judged(
    runs: Sequence[Path], held_out: Sequence[Path] = (), *, leave_one_out: bool = False, slower: float = 0.0
) -> Iterator[Judged]:
    """Every shape of the held-out runs that was not tuned on their kind of GPU.

    leave_one_out: every shape, by a table without it; of the tuned runs if no other is held out.
    """
    gpus = tuned(runs, slower)
    for run in held_out or runs:
        gpu = known(gpus, key_of(run))
        if gpu is None:
            raise StoreError(
                "no tuned run is of its kind of GPU, or of one that stands in for it",
                where=str(run),
                hint="name runs of this GPU before --held-out",
            )
        shapes = {winner.problem for winner in gpu.winners}
        for one in swept(run):
            if leave_one_out or not held_out:
                yield judge(without(gpu, one.problem), one)
            elif one.problem not in shapes:
                yield judge(gpu, one)


def summary(rows: Sequence[Judged]) -> dict[str, Any]:
    """Median, 95th percentile and worst of the regrets; how often PyTorch serves; least gain.

    expected_gain_error: of the expected gain over the measured one, less 1, where a kernel serves.
    of_kernels: regrets and gains there alone.
    """
    known = [row for row in rows if row.regret is not None and row.gain is not None]
    if not known:
        raise StoreError(
            "no shape can be judged",
            where="the held-out runs",
            hint="sweep shapes that were not tuned, with baselines: [torch_flash, torch_cudnn]",
        )
    kernels = [row for row in known if row.config is not None]
    errors = [abs(row.expected_gain / row.gain - 1) for row in kernels if row.gain]
    codes = Counter(row.code for row in rows)
    return {
        "shapes": len(rows),
        "not_timed": len(rows) - len(known),
        "codes": dict(sorted(codes.items())),
        "to_sdpa": sum(row.config is None for row in rows),
        **_of(known),
        "regret_of_the_best_held": _three([row.served for row in known]),
        "expected_gain_error": _three(errors or [0.0]),
        "of_kernels": {"timed": len(kernels)} | (_of(kernels) if kernels else {}),
        "slower_than_sdpa_by_3_percent": sum((row.gain or 0) < SLOWER for row in known),
    }


def _of(rows: Sequence[Judged]) -> dict[str, Any]:
    """Regrets and gains of timed choices."""
    gains = np.array([row.gain for row in rows])
    two = {"median": round(float(np.median(gains)), 4), "least": round(float(gains.min()), 4)}
    return {"regret": _three([row.regret for row in rows]), "gain": two}


def _three(values: Sequence[float | None]) -> dict[str, float]:
    quantiles = zip(("median", "p95", "worst"), (0.5, 0.95, 1.0), strict=True)
    return {name: round(float(np.quantile(np.array(values), at)), 4) for name, at in quantiles}

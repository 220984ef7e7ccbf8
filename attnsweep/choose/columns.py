"""Computes a table row's columns: a trial's facts, and figures that follow from its time.

Time against error: the candidates that no other surpasses in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attnsweep.choose.baseline_ratio import Base, below_ranking
from attnsweep.choose.pace import settings, time_kind
from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import arch_named, binding, bounds
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Status, Trial, over_limit
from attnsweep.specs.model import PLAIN_READ
from attnsweep.store.rows import trial_of

_FLOAT, _TEXT, _BOOL, WHOLE = "float64", "object", "bool", "Int64"
COLUMNS = {
    "problem": _TEXT, "rank": WHOLE, "tied": _BOOL, "winner": _BOOL, "baseline": _BOOL,
    "provider": _TEXT, "kernel": _TEXT, "config": _TEXT, "variant": _TEXT, "status": _TEXT,
    "detail": _TEXT, "time_us": _FLOAT, "spread_us": _FLOAT, "rounds": WHOLE, "cycles": _FLOAT,
    "timed_as": _TEXT, "warm_us": _FLOAT, "cold_us": _FLOAT, "eager_us": _FLOAT,
    "launch_us": _FLOAT, "energy_uj": _FLOAT, "energy_spread_uj": _FLOAT, "power_w": _FLOAT,
    "ranked_as": _TEXT, "us_per_head": _FLOAT, "us_per_sequence": _FLOAT, "tflops": _FLOAT,
    "gbytes_per_s": _FLOAT, "bound_us": _FLOAT, "bound": _TEXT, "light": _FLOAT, "light_by": _TEXT,
    "light_mhz": _FLOAT, "ratio_to_best_baseline": _FLOAT, "ratio_low": _FLOAT,
    "ratio_high": _FLOAT, "ratio_of": _TEXT, "best_baseline": _TEXT, "rel_err": _FLOAT,
    "limit": _FLOAT, "over_limit": _BOOL, "registers": WHOLE, "spill_bytes": WHOLE,
    "smem_bytes": WHOLE, "occupancy": _FLOAT, "recorded": _BOOL, "recorded_on": _TEXT,
    "trial": _TEXT,
}  # fmt: skip
"""The columns of a ranking, and their types in a DataFrame."""
_UNKNOWN: dict[str, Any] = dict.fromkeys(COLUMNS)


class ProblemContext:
    """The references of a problem's rows: the card, its bounds and the fastest baseline.

    trials: what gives the problem's rows, in the order of the run; it may read them again. base:
    the fastest baseline, which is set once the rows are judged.
    """

    def __init__(
        self,
        problem: Problem,
        environment: Environment | None,
        trials: Callable[[], Sequence[Trial]],
    ):
        self.problem, self.environment, self.label = problem, environment, problem.label
        self.trials = trials
        self.flops, self.min_bytes = problem.flops, problem.min_bytes
        self.base: Base | None = None
        self._limits: dict[tuple[object, ...], dict[str, float]] = {}
        self._bounds: dict[tuple[object, ...], tuple[str, float] | None] = {}

    def _bounds_of(self, trial: Trial) -> dict[str, float]:
        """`bounds_of` the row, cached: all rows of one recording have the same.

        But a plain read, which computes nothing, has the memory's alone.
        """
        reads = trial.provider == PLAIN_READ
        key = (trial.recorded, trial.recorded_on, reads)
        if key not in self._limits:
            limits = bounds_of(trial, self.environment).items()
            self._limits[key] = {unit: us for unit, us in limits if unit == "memory" or not reads}
        return self._limits[key]

    def binding(self, trial: Trial, l2: str) -> tuple[str, float] | None:
        """The unit that binds the row's time with a warm or cold L2, and its bound in us."""
        where = self.environment
        if where is None:
            return None
        key = (trial.recorded, trial.recorded_on, trial.provider == PLAIN_READ, l2)
        if key not in self._bounds:
            limits = self._bounds_of(trial)
            self._bounds[key] = binding(limits, self.problem, l2_bytes=where.l2_bytes, l2=l2)
        return self._bounds[key]

    def light(self, trial: Trial) -> dict[str, Any]:
        """The share of the speed of light, the unit that sets it, and the SM clock it is of.

        The speed of light is the bound that `hardware.bounds` has, at the clock that NVML reported
        in the rounds; without one, at the boost clock. The memory's is the card's own. Empty if the
        bound is not known.
        """
        where = self.environment
        mhz = where and (_clock_mhz(trial) or where.clock_hz / 1e6)
        if where is None or not mhz:
            return {}
        us, l2 = _device_us(trial)
        key = (trial.recorded, trial.recorded_on, trial.provider == PLAIN_READ, l2, mhz)
        if key not in self._bounds:
            slower = where.clock_hz / 1e6 / mhz
            limits = self._bounds_of(trial).items()
            now = {unit: least if unit == "memory" else least * slower for unit, least in limits}
            self._bounds[key] = binding(now, self.problem, l2_bytes=where.l2_bytes, l2=l2)
        binds = self._bounds[key]
        if binds is None:
            return {}
        return {"light": binds[1] / us, "light_by": binds[0], "light_mhz": mhz}

    def faster_than_light(self, trial: Trial) -> str | None:
        """Why a time cannot be one: it is below the bound at the clock of its rounds."""
        found = self.light(trial) if _clock_mhz(trial) else {}
        if not found or not found["light"] > _FASTER_THAN_LIGHT:
            return None
        return f"says ok, but is faster than light: {light_text(found)}"


# What every row holds, in this order: the rest follows from its trial and its problem.
_HELD = (
    *("rank", "tied", "winner", "baseline", "provider", "kernel", "status", "detail", "time_us"),
    *("rounds", "timed_as", "over_limit", "recorded", "machine"),
)
_AT = {name: at for at, name in enumerate(_HELD)}


class Row(Mapping[str, Any]):
    """One trial of a ranking, by COLUMNS; None stands for an unknown value.

    What follows from its time is found when it is asked for: of most rows of a large run it is not.
    Nor does a row hold its trial, which the run may read again, unless it won.
    """

    __slots__ = ("_context", "_facts", "_held", "_paced_us", "_whole", "number")

    def __init__(
        self,
        trial: Trial,
        number: int,
        context: ProblemContext,
        paced_us: float | None,
        verdict: tuple[Status, str | None],
        place: tuple[int | None, bool, bool],
    ) -> None:
        """number: which of the context's trials it is. paced_us: its time at the rounds' pace.

        place: its rank, whether others share it, and whether the row is the winner.
        """
        time, (status, detail) = trial.time_us, verdict
        self.number, self._context, self._paced_us = number, context, paced_us
        self._whole: dict[str, Any] | None = None
        self._held = (
            *place,
            trial.provider != OURS,
            trial.provider,
            trial.kernel,
            status.value,
            detail,
            time.median if time is not None and time.median > 0 else None,
            len(time.rounds) if time is not None else None,
            time_kind(trial),
            over_limit(trial),
            trial.recorded,
            trial.machine,
        )
        *_, won = place
        self._facts = trial if won else None

    def __getitem__(self, name: str) -> Any:
        if (at := _AT.get(name)) is not None:
            return self._held[at]
        if name == "trial":
            return trial_of(self.facts)
        if name == "problem":
            return self._context.label
        if name == "best_baseline":
            return self._context.base and self._context.base.trial.provider
        if name not in COLUMNS:
            raise KeyError(name)
        if self._whole is None:
            self._whole = self.columns(named(self.facts.config))
        return self._whole[name]

    @property
    def facts(self) -> Any:
        """The row's trial, or a cheaper object with the same attributes: see store.rows."""
        return self._facts or self._context.trials()[self.number]

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)

    def columns(self, config: object) -> dict[str, Any]:
        """All columns, in order, but no trial. config: stands for it, whose text takes time."""
        trial: Trial = self.facts
        whole = _UNKNOWN | dict(zip(_HELD, self._held, strict=True))
        del whole["machine"]
        whole["problem"], whole["best_baseline"] = self["problem"], self["best_baseline"]
        accuracy, used = trial.accuracy, trial.resources
        whole["config"], whole["recorded_on"] = config, trial.recorded_on
        whole["variant"] = " ".join(trial.variant.values())
        whole["ranked_as"] = whole["timed_as"]
        if used is not None:
            whole["registers"], whole["spill_bytes"] = used.registers, used.spill_bytes
            whole["smem_bytes"] = used.smem_bytes
        figures = self._figures(trial, whole["time_us"] or math.nan, whole["timed_as"])
        if accuracy is not None:
            figures["rel_err"], figures["limit"] = accuracy.rel_err, accuracy.limit
        if used is not None:
            figures["occupancy"] = used.occupancy
        if (energy := trial.energy_uj) is not None:
            figures["energy_uj"] = energy.median
            figures["energy_spread_uj"] = (energy.high - energy.low) / 2
            whole["ranked_as"] = "energy" if energy.ranks else whole["timed_as"]
        for name, value in figures.items():
            if value == value:  # NaN is unknown
                whole[name] = value
        return whole

    def _figures(self, trial: Trial, median: float, kind: str) -> dict[str, Any]:
        """The times, and what follows from them; NaN or absent if unknown."""
        context, problem, time = self._context, trial.problem, trial.time_us
        found: dict[str, Any] = {
            "warm_us": median if kind == "warm" else trial.warm_us,
            "cold_us": trial.cold_us,
            "eager_us": trial.eager_us,
            "launch_us": trial.launch_us,
            "power_w": trial.power_w,
        }
        device_us, l2 = _device_us(trial)
        if (binds := context.binding(trial, l2)) is not None:
            found["bound"], found["bound_us"] = binds
        if time is not None:
            if time.samples > 1:
                found["spread_us"] = (time.high - time.low) / 2
            found |= {
                "cycles": time.cycles,
                "us_per_head": median / (problem.batch * problem.heads),
                "us_per_sequence": median / problem.batch,
                "tflops": context.flops / device_us / 1e6,
                "gbytes_per_s": context.min_bytes / device_us / 1e3,
                **context.light(trial),
            }
            if context.base is not None and below_ranking(trial) is None:
                ratio = context.base.ratio(trial, self._paced_us)
                found["ratio_to_best_baseline"], found["ratio_of"] = ratio.value, ratio.of
                found["ratio_low"], found["ratio_high"] = ratio.low, ratio.high
        return found


# A clock is sampled once a round, and a time errs by a little.
_FASTER_THAN_LIGHT = 1.02


def light_text(row: Mapping[str, Any]) -> str:
    """`61 % of the speed of light (matrix, 1755 MHz)`."""
    of = f"{row['light_by']}, {row['light_mhz']:.0f} MHz"
    return f"{100 * row['light']:.0f} % of the speed of light ({of})"


def _clock_mhz(trial: Trial) -> float | None:
    """The SM clock that NVML reported in the rounds, or None."""
    mhz = trial.conditions.get("sm_mhz")
    return float(mhz) if isinstance(mhz, int | float) and mhz > 0 else None


def _device_us(trial: Trial) -> tuple[float, str]:
    """The time of a call on the device, and whether its L2 is warm or cold."""
    time, kind = trial.time_us, time_kind(trial)
    # The host's cost of a call says nothing about the device's rates.
    if kind == "eager":
        return math.nan if trial.warm_us is None else trial.warm_us, "warm"
    l2 = "warm" if kind == "chain" else kind  # inputs were just written
    return (time.median if time is not None and time.median > 0 else math.nan), l2


def named(config: Mapping[str, object]) -> str:
    """`BLOCK_M=64 BLOCK_N=128`, in the order of the mapping."""
    return settings(tuple(config.items()))


def chosen_by(trial: Trial) -> dict[str, str]:
    """The names and values by which a user chooses a candidate."""
    variant = {axis: text.replace(" ", "_") for axis, text in trial.variant.items()}
    config = {name: value_text(value) for name, value in trial.config.items()}
    return {"kernel": trial.kernel, **variant, **config}


def value_text(value: object) -> str:
    """A parameter's value as -D writes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def bounds_of(trial: Trial, environment: Environment | None) -> dict[str, float]:
    """The bounds of the trial's problem in microseconds.

    Empty if the GPU or its architecture is unknown, or if the row was recorded on another GPU.
    """
    if environment is None:
        return {}
    if trial.recorded and environment.gpu not in (trial.recorded_on or environment.gpu):
        return {}
    try:
        return bounds(trial.problem, arch_named(environment.arch), environment)
    except SpecError:
        return {}


# Errors closer than this are one: the largest of many rows depends on luck a little.
_SAME = 0.98


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The candidates that none surpasses in both time and error, the fastest first.

    Of right candidates with a time; a time of rounds and a first time count alike.
    """
    timed = [
        (trial.time_us.median, trial.accuracy.error, trial)
        for trial in trials
        if trial.provider == OURS and trial.status is Status.OK
        if trial.time_us is not None and trial.accuracy is not None
        if trial.accuracy.error is not None
    ]
    found: list[Trial] = []
    least = float("inf")
    for _, error, trial in sorted(timed, key=lambda item: item[:2]):
        if error < _SAME * least:
            found.append(trial)
            least = error
    return found

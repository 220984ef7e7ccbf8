"""The columns of one row: a trial's facts, and figures that follow from its time.

Time against error: which candidates a spec's max_error leaves, and which no other surpasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnsweep.choose.baseline_ratio import Base, Ratio, below_ranking, over_limit
from attnsweep.choose.drift import settings, time_kind
from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import arch_named, binding, bounds
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Status, Trial

_FLOAT, _TEXT, _BOOL, _WHOLE = "float64", "object", "bool", "Int64"
COLUMNS = {
    "problem": _TEXT, "rank": _WHOLE, "tied": _BOOL, "winner": _BOOL, "baseline": _BOOL,
    "provider": _TEXT, "kernel": _TEXT, "config": _TEXT, "variant": _TEXT, "status": _TEXT,
    "detail": _TEXT, "time_us": _FLOAT, "spread_us": _FLOAT, "rounds": _WHOLE, "cycles": _FLOAT,
    "timed_as": _TEXT, "warm_us": _FLOAT, "cold_us": _FLOAT, "eager_us": _FLOAT,
    "launch_us": _FLOAT, "energy_uj": _FLOAT, "energy_spread_uj": _FLOAT, "power_w": _FLOAT,
    "ranked_as": _TEXT, "us_per_head": _FLOAT, "us_per_sequence": _FLOAT, "tflops": _FLOAT,
    "gbytes_per_s": _FLOAT, "bound_us": _FLOAT, "bound": _TEXT, "bound_share": _FLOAT,
    "light": _FLOAT, "light_by": _TEXT, "light_mhz": _FLOAT, "ratio_to_best_baseline": _FLOAT,
    "ratio_low": _FLOAT, "ratio_high": _FLOAT, "ratio_of": _TEXT, "best_baseline": _TEXT,
    "rel_err": _FLOAT, "limit": _FLOAT, "over_limit": _BOOL, "registers": _WHOLE,
    "spill_bytes": _WHOLE, "smem_bytes": _WHOLE, "occupancy": _FLOAT, "recorded": _BOOL,
    "recorded_on": _TEXT, "trial": _TEXT,
}  # fmt: skip
"""The columns of a ranking, and their types in a DataFrame."""


class Ground:
    """What a problem's rows are set against: the card, its bounds and the fastest baseline."""

    def __init__(self, problem: Problem, environment: Environment | None, base: Base | None):
        self.problem, self.environment, self.base = problem, environment, base
        self.label, self.base_name = problem.label, base.trial.provider if base else None
        self.flops, self.min_bytes = problem.flops, problem.min_bytes
        self._bounds: dict[tuple[object, ...], tuple[str, float] | None] = {}

    def binding(self, trial: Trial, l2: str) -> tuple[str, float] | None:
        """The unit that binds the row's time with a warm or cold L2, and its bound in us."""
        where = self.environment
        if where is None:
            return None
        key = (trial.recorded, trial.recorded_on, l2)
        if key not in self._bounds:
            limits = bounds_of(trial, where)
            self._bounds[key] = binding(limits, self.problem, l2_bytes=where.l2_bytes, l2=l2)
        return self._bounds[key]


class Row(Mapping[str, Any]):
    """One trial of a ranking, by COLUMNS; None stands for an unknown value.

    What follows from its time is found when it is asked for: of most rows of a large run it is not.
    """

    __slots__ = ("_facts", "_ground", "_paced_us")

    def __init__(
        self,
        trial: Trial,
        ground: Ground,
        paced_us: float | None,
        verdict: tuple[Status, str | None],
        place: tuple[int | None, bool, bool],
    ) -> None:
        """paced_us: its time at the pace of the rounds, for a ratio without common rounds.

        place: its rank, whether others share it, and whether the row is the winner.
        """
        time, (rank, tied, winner), (status, detail) = trial.time_us, place, verdict
        self._ground, self._paced_us = ground, paced_us
        self._facts: dict[str, Any] = {
            "problem": ground.label,
            "rank": rank,
            "tied": tied,
            "winner": winner,
            "baseline": trial.provider != OURS,
            "provider": trial.provider,
            "kernel": trial.kernel,
            "status": status.value,
            "detail": detail,
            "time_us": time.median if time is not None and time.median > 0 else None,
            "rounds": len(time.rounds) if time is not None else None,
            "timed_as": time_kind(trial),
            "best_baseline": ground.base_name,
            "over_limit": over_limit(trial),
            "recorded": trial.recorded,
            "trial": trial,
        }

    def __getitem__(self, name: str) -> Any:
        facts = self._facts
        if name not in facts and name in COLUMNS:
            facts |= self._figures() | {"config": named(facts["trial"].config)}
        return facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)

    def columns(self, config: object) -> dict[str, Any]:
        """All columns, in order. config: what stands for the config, whose text takes time."""
        whole: dict[str, Any] = dict.fromkeys(COLUMNS)
        whole.update(self._facts)
        whole.update(self._figures(), config=config)
        return whole

    def _figures(self) -> dict[str, Any]:
        """The columns that take time."""
        trial, ground, ratio = self._facts["trial"], self._ground, Ratio()
        problem, time, used = trial.problem, trial.time_us, trial.resources
        accuracy, energy, kind = trial.accuracy, trial.energy_uj, self._facts["timed_as"]
        median = self._facts["time_us"] or math.nan
        device_us, l2 = _device_us(trial)
        bound, bound_us = ground.binding(trial, l2) or (None, math.nan)
        if ground.base is not None and below_ranking(trial) is None:
            ratio = ground.base.ratio(trial, self._paced_us)
        found = {
            "variant": " ".join(trial.variant.values()),
            "spread_us": (time.high - time.low) / 2 if time and time.samples > 1 else None,
            "cycles": time.cycles if time is not None else None,
            "warm_us": median if kind == "warm" else trial.warm_us,
            "cold_us": trial.cold_us,
            "eager_us": trial.eager_us,
            "launch_us": trial.launch_us,
            "energy_uj": energy.median if energy is not None else None,
            "energy_spread_uj": (energy.high - energy.low) / 2 if energy is not None else None,
            "power_w": trial.power_w,
            "ranked_as": "energy" if energy is not None and energy.ranks else kind,
            "us_per_head": median / (problem.batch * problem.heads),
            "us_per_sequence": median / problem.batch,
            "tflops": ground.flops / device_us / 1e6,
            "gbytes_per_s": ground.min_bytes / device_us / 1e3,
            "bound_us": bound_us,
            "bound": bound,
            "bound_share": bound_us / device_us,
            **light_of(trial, ground.environment),
            "ratio_to_best_baseline": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "ratio_of": ratio.of,
            "rel_err": accuracy.rel_err if accuracy is not None else None,
            "limit": accuracy.limit if accuracy is not None else None,
            "registers": used.registers if used is not None else None,
            "spill_bytes": used.spill_bytes if used is not None else None,
            "smem_bytes": used.smem_bytes if used is not None else None,
            "occupancy": used.occupancy if used is not None else None,
            "recorded_on": trial.recorded_on,
        }
        found.update(dict.fromkeys([name for name, value in found.items() if value != value]))
        return found


# A clock is sampled once a round, and a time errs by a little.
_FASTER_THAN_LIGHT = 1.02
_DARK = {"light": math.nan, "light_by": None, "light_mhz": math.nan}


def light_of(trial: Trial, environment: Environment | None) -> Mapping[str, Any]:
    """The share of the speed of light at the SM clock of the rounds, its unit, and that clock.

    The speed of light is the bound that `hardware.bounds` has, at the clock that NVML reported in
    the rounds in the place of the boost clock; the memory's is the card's own.
    """
    mhz = trial.conditions.get("sm_mhz")
    if environment is None or not mhz or not isinstance(mhz, int | float) or not mhz > 0:
        return _DARK
    us, l2 = _device_us(trial)
    slower = environment.clock_hz / 1e6 / mhz
    limits = bounds_of(trial, environment).items()
    now = {unit: least if unit == "memory" else least * slower for unit, least in limits}
    binds = binding(now, trial.problem, l2_bytes=environment.l2_bytes, l2=l2)
    if binds is None:
        return _DARK
    return {"light": binds[1] / us, "light_by": binds[0], "light_mhz": float(mhz)}


def faster_than_light(trial: Trial, environment: Environment | None) -> str | None:
    """Why a time cannot be one: it is below the bound at the clock of its rounds."""
    found = light_of(trial, environment)
    if not found["light"] > _FASTER_THAN_LIGHT:
        return None
    return f"says ok, but is faster than light: {light_text(found)}"


def light_text(row: Mapping[str, Any]) -> str:
    """`61 % of light (matrix, 1755 MHz)`."""
    return f"{100 * row['light']:.0f} % of light ({row['light_by']}, {row['light_mhz']:.0f} MHz)"


def _device_us(trial: Trial) -> tuple[float, str]:
    """The time of a call on the device, and whether its L2 is warm or cold."""
    time, kind = trial.time_us, time_kind(trial)
    # The host's cost of a call says nothing about the device's rates.
    if kind == "eager":
        return _number(trial.warm_us), "warm"
    l2 = "warm" if kind == "chain" else kind  # inputs were just written
    return (time.median if time is not None and time.median > 0 else math.nan), l2


def _number(value: float | None) -> float:
    return math.nan if value is None else value


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


def held_to(trial: Trial, max_error: float | None) -> Trial:
    """The row under a spec's max_error: a right candidate whose error is larger is INACCURATE.

    It keeps its times, and is neither ranked nor timed in rounds. Baselines are left as they are.
    """
    accuracy = trial.accuracy
    if trial.provider != OURS or accuracy is None or trial.status not in _RIGHT:
        return trial
    if accuracy.max_error is None is max_error:
        return trial
    row = trial.with_(accuracy=accuracy.model_copy(update={"max_error": max_error}))
    detail = too_inaccurate(row)
    if detail is not None:
        return row.with_(status=Status.INACCURATE, detail=detail)
    if trial.status is Status.INACCURATE:  # of a run with another bound
        return row.with_(status=Status.OK, detail=None)
    return row


_RIGHT = (Status.OK, Status.NOISY, Status.INACCURATE)


def too_inaccurate(trial: Trial) -> str | None:
    """Why a right candidate is not ranked: its error exceeds the max_error that it was held to."""
    accuracy = trial.accuracy
    if trial.provider != OURS or accuracy is None or accuracy.max_error is None:
        return None
    error = accuracy.error
    if error is not None and error <= accuracy.max_error:
        return None
    said = "unknown" if error is None else f"{error:.2e}"
    return f"error {said} exceeds measure: max_error {accuracy.max_error:.2e}"


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The candidates that none surpasses in both time and error, the fastest first.

    Of right candidates with a time, ranked or not; a time of rounds and a first time count alike.
    """
    timed = [
        (trial.time_us.median, trial.accuracy.error, trial)
        for trial in trials
        if trial.provider == OURS and trial.status in (Status.OK, Status.INACCURATE)
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

"""The columns of one row: a trial's facts, and figures that follow from its time.

Time against error: which candidates a spec's max_error leaves, and which no other surpasses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnsweep.choose.baseline_ratio import Base, Ratio, below_ranking, over_limit
from attnsweep.choose.drift import time_kind
from attnsweep.core.errors import SpecError
from attnsweep.core.hardware import arch_named, binding, bounds
from attnsweep.core.trial import OURS, Environment, Status, Trial

COLUMNS = (
    *("problem", "rank", "tied", "winner", "baseline", "provider", "kernel", "config", "variant"),
    *("status", "detail", "time_us", "spread_us", "rounds", "cycles", "timed_as", "warm_us"),
    *("cold_us", "eager_us", "launch_us", "energy_uj", "energy_spread_uj", "power_w", "ranked_as"),
    *("us_per_head", "us_per_sequence", "tflops", "gbytes_per_s", "bound_us", "bound"),
    *(
        "bound_share",
        "light",
        "light_by",
        "light_mhz",
        "ratio_to_best_baseline",
        "ratio_low",
        "ratio_high",
        "ratio_of",
    ),
    *("best_baseline", "rel_err", "limit", "over_limit", "registers", "spill_bytes", "smem_bytes"),
    *("occupancy", "recorded", "recorded_on", "trial"),
)
Row = dict[str, Any]


def facts(
    trial: Trial, environment: Environment | None, base: Base | None, paced_us: float | None
) -> Row:
    """The columns of one trial, and figures that follow from its time.

    paced_us: its time at the pace of the rounds, for a ratio to the base without common rounds.
    """
    problem, time, used = trial.problem, trial.time_us, trial.resources
    median = time.median if time is not None and time.median > 0 else math.nan
    kind = time_kind(trial)
    warm = median if kind == "warm" else _number(trial.warm_us)
    device_us, l2 = _device_us(trial)
    limits = bounds_of(trial, environment)
    bound = None
    if environment is not None:
        bound = binding(limits, problem, l2_bytes=environment.l2_bytes, l2=l2)
    accuracy, energy = trial.accuracy, trial.energy_uj
    error = accuracy.rel_err if accuracy is not None else None
    ratio = Ratio()
    if base is not None and below_ranking(trial) is None:
        ratio = base.ratio(trial, paced_us)
    return {
        "problem": problem.label,
        "baseline": trial.provider != OURS,
        "provider": trial.provider,
        "kernel": trial.kernel,
        "config": named(trial.config),
        "variant": " ".join(trial.variant.values()),
        "time_us": median,
        "spread_us": (time.high - time.low) / 2 if time and time.samples > 1 else math.nan,
        "rounds": len(time.rounds) if time is not None else None,
        "cycles": _number(time.cycles if time is not None else None),
        "timed_as": kind,
        "warm_us": warm,
        "cold_us": _number(trial.cold_us),
        "eager_us": _number(trial.eager_us),
        "launch_us": _number(trial.launch_us),
        "energy_uj": energy.median if energy is not None else math.nan,
        "energy_spread_uj": (energy.high - energy.low) / 2 if energy is not None else math.nan,
        "power_w": _number(trial.power_w),
        "ranked_as": "energy" if energy is not None and energy.ranks else kind,
        "us_per_head": median / (problem.batch * problem.heads),
        "us_per_sequence": median / problem.batch,
        "tflops": problem.flops / device_us / 1e6,
        "gbytes_per_s": problem.min_bytes / device_us / 1e3,
        "bound_us": bound[1] if bound else math.nan,
        "bound": bound[0] if bound else None,
        "bound_share": bound[1] / device_us if bound else math.nan,
        **light_of(trial, environment),
        "ratio_to_best_baseline": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "ratio_of": ratio.of,
        "best_baseline": base.trial.provider if base is not None else None,
        "rel_err": _number(error),
        "limit": accuracy.limit if accuracy is not None else math.nan,
        "over_limit": over_limit(trial),
        "registers": used.registers if used is not None else None,
        "spill_bytes": used.spill_bytes if used is not None else None,
        "smem_bytes": used.smem_bytes if used is not None else None,
        "occupancy": used.occupancy if used is not None else math.nan,
        "recorded": trial.recorded,
        "recorded_on": trial.recorded_on,
        "trial": trial,
    }


# A clock is sampled once a round, and a time errs by a little.
_FASTER_THAN_LIGHT = 1.02


def light_of(trial: Trial, environment: Environment | None) -> Row:
    """The share of the speed of light at the SM clock of the rounds, its unit, and that clock.

    The speed of light is the bound that `hardware.bounds` has, at the clock that NVML reported in
    the rounds in the place of the boost clock; the memory's is the card's own.
    """
    mhz, (us, l2) = trial.conditions.get("sm_mhz"), _device_us(trial)
    none = {"light": math.nan, "light_by": None, "light_mhz": math.nan}
    if environment is None or not isinstance(mhz, int | float) or not mhz > 0:
        return none
    slower = environment.clock_hz / 1e6 / mhz
    limits = bounds_of(trial, environment).items()
    now = {unit: least if unit == "memory" else least * slower for unit, least in limits}
    binds = binding(now, trial.problem, l2_bytes=environment.l2_bytes, l2=l2)
    if binds is None:
        return none
    return {"light": binds[1] / us, "light_by": binds[0], "light_mhz": float(mhz)}


def faster_than_light(trial: Trial, environment: Environment | None) -> str | None:
    """Why a time cannot be one: it is below the bound at the clock of its rounds."""
    found = light_of(trial, environment)
    if not found["light"] > _FASTER_THAN_LIGHT:
        return None
    return f"says ok, but is faster than light: {light_text(found)}"


def light_text(row: Row) -> str:
    """`61 % of light (matrix, 1755 MHz)`."""
    return f"{100 * row['light']:.0f} % of light ({row['light_by']}, {row['light_mhz']:.0f} MHz)"


def _device_us(trial: Trial) -> tuple[float, str]:
    """The time of a call on the device, and whether its L2 is warm or cold."""
    time, kind = trial.time_us, time_kind(trial)
    # The host's cost of a call says nothing about the device's rates.
    if kind == "eager":
        return _number(trial.warm_us), "warm"
    return (time.median if time is not None and time.median > 0 else math.nan), kind


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def named(config: Mapping[str, object]) -> str:
    """`BLOCK_M=64 BLOCK_N=128`, in the order of the mapping."""
    return " ".join(f"{name}={value_text(value)}" for name, value in config.items())


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

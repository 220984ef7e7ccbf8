"""The row that all rooms share: one candidate or baseline, and its fate.

`Trial` is one line of trials.jsonl. The format is stable: fields are added, never renamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from attnsweep.core.problem import Problem, Value

PROTOCOL = 4
"""Raise it if a change of checking or timing makes older rows incomparable; they are then redone.

4: every element is judged on the device, inputs change between replays, and a call has ordinary
dependencies on the call before it.
"""
OURS = "attnsweep"
"""The provider of candidates; a baseline's provider is its own name."""


THIS_BINARY, THIS_SHAPE = "this binary", "this shape alone"
"""What the proof of a call covers: problems on which it launches the code of the timed one."""


class Status(StrEnum):
    """The fate of a candidate. Every candidate ends as a row; none ends the sweep."""

    OK = "ok"
    PRUNED = "pruned"
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    TIMEOUT = "timeout"
    WRONG = "wrong"
    NOISY = "noisy"
    DAMAGED = "damaged"  # a row that cannot be as it says, for the ranking or the strict judge
    NO_RECORD = "no_record"  # device: replay, and the recording does not hold this config
    SKIPPED = "skipped"  # a baseline that cannot run here; detail says why


class _Row(BaseModel):
    """Base of the stored models. It keeps unknown keys, so that older versions keep newer facts."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Measurement(_Row):
    """Time of one call over interleaved rounds, in microseconds. low, high: quartiles of rounds."""

    median: float
    low: float
    high: float
    samples: int
    l2: str = "warm"
    """Kind of time: a call with a `warm` or `cold` L2, `eager`, the host's cost of one call, or
    `chain`, a call of the strict judge, whose inputs follow from the output before.
    """
    rounds: list[float] = Field(default_factory=list)
    """One value a round; the rounds of all finalists of one problem are paired by position."""
    first_round: int = 0
    """Position of its first round among the problem's, if it was timed again after the others."""
    discarded: list[float] = Field(default_factory=list)
    """Rounds of a noisy baseline that quieter ones replaced, in microseconds."""
    cycles: float | None = None
    """Median over the rounds of the time multiplied by the SM clock that NVML reported then."""


class Energy(_Row):
    """Energy of one warm call in microjoules, of the whole board. low, high: quartiles."""

    median: float
    low: float
    high: float
    samples: int
    rounds: list[float] = Field(default_factory=list)
    """One value a stretch; those of all finalists of one problem are paired by position."""
    ranks: bool = False
    """Whether it ranks the problem's rows in place of their times."""


class Accuracy(_Row):
    """Largest row-wise relative error against float64, and the limit that it must not exceed."""

    rel_err: float | None
    limit: float
    case: str | None = None
    """The shape and input whose error was the largest share of its limit."""
    output: str | None = None
    """The output with that error, if a call has several."""
    shares: dict[str, float] = Field(default_factory=dict)
    """Each measure of the error in that case, as a share of its limit: see measures.Measures."""
    seed: int | None = None
    """Seed of the inputs and of the rows that proved the reference."""
    timed_err: float | None = None
    """Largest error of a row of the timed problem; None of older rows."""
    format_err: float | None = None
    """In FP8, the error of exact maths on the rounded inputs against those before rounding.

    It is what the format costs, on the timed problem; timed_err is what the kernel adds.
    """
    total_err: float | None = None
    """In FP8, the output's largest error of a row against the inputs before rounding."""
    judged: float | None = None
    """Share of the timed problem's rows that were compared with float64; None if all were.

    Float64 takes longer than the sweep where a call takes tens of ms: see docs/measuring.md.
    """
    where: dict[str, int] | None = None
    """`batch`, `head` and `row` of the worst row, of an output that was refused for it."""
    hints: list[str] = Field(default_factory=list)
    """What a wrong output is right for, or which rows are wrong: where to look for the mistake."""
    calls: int | None = None
    """Calls whose whole outputs were compared with the checked one, one by one."""

    @property
    def error(self) -> float | None:
        """The error on the timed problem; of older rows rel_err."""
        return self.rel_err if self.timed_err is None else self.timed_err


class Resources(_Row):
    """Resources that the compiled code uses. Several stages: the largest of each, spills summed."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    occupancy: float
    """Resident warps over the SM's maximum, of the stage with the fewest."""
    stages: dict[str, dict[str, float]] = Field(default_factory=dict)
    limiters: dict[str, str] = Field(default_factory=dict)
    """Stage name to the resource of an SM that limits its blocks, such as `shared memory`."""


class Trial(_Row):
    """One line of trials.jsonl. Times are microseconds of one call."""

    kernel: str
    provider: str
    config: dict[str, Value]
    problem: Problem
    status: Status
    detail: str | None = None
    time_us: Measurement | None = None
    first_us: float | None = None
    """The first, cheap time. Strategies learn it; races and finals replace only time_us."""
    first_mhz: float | None = None
    """SM clock in MHz when first_us was taken, if NVML reported it."""
    tried_s: float | None = None
    """Seconds from the problem's beginning until first_us, or the reason why there is none, stood.

    A run that goes on counts from the seconds of its earlier rows. None of baselines, and of rows
    of before this was kept.
    """
    first_us_before: float | None = None
    """A first time that rounds contradicted by a factor of two or more; first_us replaced it."""
    warm_us: float | None = None
    """Time with a warm L2; every finalist has it, also if time_us is the cold or eager time."""
    cold_us: float | None = None
    chained_us: float | None = None
    """Time of a call that may begin before the one before it ends, by a programmatic launch.

    A baseline's calls have no such form, so it is never ranked. None if calls cannot be chained.
    """
    eager_us: float | None = None
    """Host time to issue one call eagerly, without waiting for the device."""
    energy_uj: Energy | None = None
    """Energy of a call, by NVML's counter; None if it was not asked for, or the card has none."""
    power_w: float | None = None
    """Mean power of the board while energy_uj was measured: the median of the stretches."""
    stages_us: dict[str, float] = Field(default_factory=dict)
    """Stage name to the time of that stage of a pipeline, replayed on its own."""
    once_us: dict[str, float] = Field(default_factory=dict)
    """The same of stages that calls have in common, as of a mask: no part of a call's time."""
    launch_us: float | None = None
    """Time of the same launches with an empty kernel, issued in the same way."""
    schedule: dict[str, int] = Field(default_factory=dict)
    """How a call is issued: chunks, heads and rows of a chunk, streams, workspace_bytes."""
    variant: dict[str, str] = Field(default_factory=dict)
    """Axis to the name of the variant that gave the config; empty without variants in the spec."""
    candidate: bool = False
    """Whether a callable is judged here, and is no baseline that others are compared with."""
    issued: str | None = None
    """Why no CUDA graph holds a callable's calls: its time then includes the host's."""
    strict: dict[str, Any] = Field(default_factory=dict)
    """What the strict judge adds of a callable, whose `time_us` is then of chains.

    `trusted_us`: a call by the judge's clock. `ratio`: the time of `base`, the fastest baseline of
    the same chains, over its own.
    """
    accuracy: Accuracy | None = None
    resources: Resources | None = None
    call: dict[str, Any] = Field(default_factory=dict)
    """What a row says of a candidate that calls a user's function; empty for other rows.

    `function`, digest of the user's files (`closure`), versions, and what its proof `covers`: this
    binary, this shape alone or any length; or why it could not be traced. `other_lengths`: why
    not any length.
    """
    conditions: dict[str, Any] = Field(default_factory=dict)
    """State of the card during the rounds, from NVML.

    Clocks, power, temperature, throttle reasons and other processes: over all rounds, and of each
    round under `rounds`. `strays` lists the rounds in which the card's state differed from that of
    most rounds, and how.
    """
    race: dict[str, Any] = Field(default_factory=dict)
    """The candidate's race: entrants, its rounds and launches, and whether it survived.

    Also the interval of the ratio of its time to the time of the entrant that eliminated it, or to
    that of the leader. Empty if the candidate did not race.
    """
    machine: dict[str, Any] = Field(default_factory=dict)
    """The card and the host that measured the row: see Environment.machine."""
    fingerprint: str | None = None
    """Hash of the row's inputs: machine code, launches, problem, protocol, GPU, driver."""
    recorded: bool = False
    recorded_on: str | None = None
    """GPU and date of a recorded row."""

    @property
    def screened_us(self) -> float | None:
        """The time that a search learns: first_us; in older rows, which lack it, time_us if ok.

        A rerun thus tells a strategy the same times as the first run, whatever the finals changed.
        """
        if self.first_us is not None or self.status is not Status.OK or self.time_us is None:
            return self.first_us
        return self.time_us.median

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the candidate; a later row with the same key replaces this one."""
        return key_of(self.problem, self.provider, self.kernel, self.config)

    def with_(self, **changes: Any) -> Trial:
        """A copy with some fields replaced."""
        return self.model_copy(update=changes)


def key_of(
    problem: Problem, provider: str, kernel: str, config: Mapping[str, Value]
) -> tuple[object, ...]:
    """See Trial.key."""
    return problem, provider, kernel, _in_order(tuple(config.items()))


@lru_cache(maxsize=2**14)
def _in_order(settings: tuple[tuple[str, Value], ...]) -> tuple[tuple[str, Value], ...]:
    """The settings of a config by name. Rows with one config share it: it is large for a key."""
    return tuple(sorted(settings))


def race_ratio(race: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The interval of a race's ratio to the other in it; None: a side has no limit, or is odd."""
    ratio = race.get("ratio")
    if not isinstance(ratio, list | tuple) or len(ratio) != 2:
        return None, None
    low, high = (side if type(side) in (int, float) else None for side in ratio)
    return low, high


def over_limit(trial: Trial) -> bool:
    """Whether a baseline's error exceeds the limit of candidates. It is timed all the same."""
    accuracy = trial.accuracy
    if trial.provider == OURS or accuracy is None or accuracy.rel_err is None:
        return False
    return accuracy.limit < accuracy.rel_err < math.inf


def unsound(trial: Trial) -> tuple[Status, str] | None:
    """The status and reason of an ok row whose facts contradict it; None for a sound row."""
    if trial.status is not Status.OK:
        return None
    time, accuracy = trial.time_us, trial.accuracy
    if accuracy is not None:
        error = math.nan if accuracy.rel_err is None else accuracy.rel_err
        # A comparison with NaN is false, so NaN fails.
        if not error <= accuracy.limit and not over_limit(trial):
            said = f"says ok, but its error {error:.2e} exceeds {accuracy.limit:.2e}"
            return Status.WRONG, said
    if time is None:
        return Status.DAMAGED, "says ok, but has no time"
    for us in (*_span(time), *time.rounds, *_times(trial), *trial.stages_us.values()):
        if us is not None and not 0 < us < math.inf:
            return Status.DAMAGED, f"says ok, but {odd_time(trial)}"
    if time.first_round < 0:
        return Status.DAMAGED, f"says ok, but its first round is {time.first_round}"
    if trial.energy_uj is not None and (odd := odd_time(trial)):
        return Status.DAMAGED, f"says ok, but {odd}"
    if time.rounds and not abs(time.median / (middle := median(time.rounds)) - 1) < _CONTRADICTS:
        told = f"says ok, but its median is {time.median:g} and that of its rounds {middle:g}"
        return Status.DAMAGED, told
    return None


# A median is that of its rounds, which are stored to four digits: 1e-4 of the shortest.
_CONTRADICTS = 1e-3
_SPAN = ("median", "low", "high")
_TIMES = ("first_us", "warm_us", "cold_us", "eager_us", "launch_us")
_span, _times = attrgetter(*_SPAN), attrgetter(*_TIMES)


def odd_time(trial: Trial) -> str | None:
    """The time or energy of a row that no sweep writes. NaN is none: it compares as false."""
    named: dict[str, float | None] = {}
    for name, part in (("time_us", trial.time_us), ("energy_uj", trial.energy_uj)):
        if part is not None:
            named |= {f"{name}.{of}": getattr(part, of) for of in _SPAN}
            named |= {f"{name}.rounds[{number}]": us for number, us in enumerate(part.rounds)}
        if name == "time_us":
            named |= dict(zip(_TIMES, _times(trial), strict=True))
            named |= {f"stages_us.{stage}": us for stage, us in trial.stages_us.items()}
    if trial.energy_uj is not None:
        named["power_w"] = math.nan if trial.power_w is None else trial.power_w
    odd = (n for n, us in named.items() if us is not None and not 0 < us < math.inf)
    return next((f"{name} is {named[name]}" for name in odd), None)


def cards_of(trials: Iterable[Trial]) -> list[str]:
    """The hashed UUIDs of the cards that measured these rows; older rows name none."""
    return list(dict.fromkeys(t.machine["uuid"] for t in trials if t.machine.get("uuid")))


class Environment(_Row):
    """Where a run was measured; written to environment.json and shown next to its numbers."""

    gpu: str
    arch: str
    driver: str
    cuda: str
    nvrtc: str
    attnsweep: str
    python: str
    date: str
    host_cores: int
    packages: dict[str, str] = Field(default_factory=dict)
    sm_count: int
    clock_hz: float
    memory_bytes: int
    memory_bytes_per_second: float
    l2_bytes: int
    protocol: int | None = None
    """The PROTOCOL of its rows; None of runs before protocol 4."""
    uuid: str | None = None
    """The card's UUID, hashed: it tells cards apart and names none."""
    sku: str | None = None
    """PCI device and subsystem, and the board's part number if the card tells it."""
    power_limit_w: float | None = None
    energy_counter: bool | None = None
    """Whether NVML counts the card's energy; None of runs that did not ask."""
    host: str | None = None
    """CPU model, and the host's name, hashed."""

    @property
    def machine(self) -> dict[str, Any]:
        """The card and the host that measured a row, as rows keep them."""
        names = ("gpu", "uuid", "sku", "sm_count", "l2_bytes", "power_limit_w", "driver", "host")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def slug(self) -> str:
        """Directory name under results/: `NVIDIA H100 80GB HBM3` gives `h100-80gb-hbm3`."""
        words = self.gpu.lower().replace("nvidia", "").split()
        return "-".join(words) or "gpu"

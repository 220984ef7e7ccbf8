"""The row that everything shares: one candidate or baseline, whatever became of it.

`Trial` is one line of trials.jsonl (stable: fields are added, never renamed).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from attnsweep.problem import Problem

Value = int | bool | str
"""A parameter's value; integral, since it reaches the preprocessor."""
OURS = "attnsweep"
"""The provider of candidates; that of a baseline is its name."""


class Status(StrEnum):
    """What became of a candidate. Every one ends as a row; none ends the sweep."""

    OK = "ok"
    PRUNED = "pruned"
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    TIMEOUT = "timeout"
    WRONG = "wrong"
    NOISY = "noisy"
    NO_RECORD = "no_record"  # device: replay, and the recording does not hold this config
    SKIPPED = "skipped"  # a baseline that cannot run here; detail says why


class _Row(BaseModel):
    """Unknown keys are kept, so that rows of a newer attnsweep survive being read by an older."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Measurement(_Row):
    """Time of one call over interleaved rounds, in microseconds. low, high: quartiles of rounds."""

    median: float
    low: float
    high: float
    samples: int
    l2: str = "warm"
    """What was timed: a call with a warm or a cold L2, or `eager`, the host's cost of one."""
    rounds: list[float] = Field(default_factory=list)
    """One value a round; the rounds of all finalists of one problem are paired by position."""
    cycles: float | None = None
    """Median over the rounds of time times the SM clock that NVML told in the round."""


class Accuracy(_Row):
    """Largest row-wise relative error against float64, and the limit it had to keep."""

    rel_err: float | None
    limit: float
    case: str | None = None
    """The shape and input on which the largest share of the limit was used."""


class Resources(_Row):
    """What the compiled code uses. Of several stages: the largest of each, spills summed."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    occupancy: float
    """Resident warps over the SM's maximum, of the stage with the fewest."""
    stages: dict[str, dict[str, float]] = Field(default_factory=dict)
    limiters: dict[str, str] = Field(default_factory=dict)
    """Stage name to what of an SM runs out first: registers, shared memory, threads or blocks."""


class Trial(_Row):
    """One line of trials.jsonl. Times in microseconds of one call."""

    kernel: str
    provider: str
    config: dict[str, Value]
    problem: Problem
    status: Status
    detail: str | None = None
    time_us: Measurement | None = None
    first_us: float | None = None
    """The first, cheap time. Races and finals replace time_us, not this, which strategies learn."""
    warm_us: float | None = None
    """As cold_us and eager_us, where time_us is one of these; a finalist has it always."""
    cold_us: float | None = None
    eager_us: float | None = None
    """Host time to issue one call eagerly, without waiting for the device."""
    stages_us: dict[str, float] = Field(default_factory=dict)
    """Each stage of a pipeline replayed on its own."""
    launch_us: float | None = None
    """What the same launches take if their kernel is empty, issued in the same way."""
    at_least_us: float | None = None
    """Of a candidate pruned for it: what it takes at least, by its stages in other configs."""
    schedule: dict[str, int] = Field(default_factory=dict)
    """How a call is issued: chunks, the heads and rows of one, streams, workspace_bytes."""
    variant: dict[str, str] = Field(default_factory=dict)
    """Of a spec with variants: axis to the name of the variant that gave the config."""
    accuracy: Accuracy | None = None
    resources: Resources | None = None
    conditions: dict[str, Any] = Field(default_factory=dict)
    """Clocks, power, temperature, throttle reasons and other processes (NVML): of the rounds, and
    under `rounds` of each. `strays`: rounds in another state of the card than most, and in what.
    """
    race: dict[str, Any] = Field(default_factory=dict)
    """Of a candidate that raced: entrants, its rounds and launches, whether it survived, and the
    interval of its time's ratio to the one that it was eliminated by, or to the leader.
    """
    fingerprint: str | None = None
    """What the row depends on: machine code, launches, problem, protocol, GPU, driver."""
    recorded: bool = False
    recorded_on: str | None = None
    """GPU and date of a recorded row."""

    @property
    def screened_us(self) -> float | None:
        """The time that a search learns of: the first, or else, of older rows that are ok, time_us.

        A rerun then tells a strategy what the first run told it, whatever finals made of the row.
        """
        if self.first_us is not None or self.status is not Status.OK or self.time_us is None:
            return self.first_us
        return self.time_us.median

    @property
    def key(self) -> tuple[object, ...]:
        """Which candidate this row is about; a later row with the same key replaces it."""
        return (self.problem, self.provider, self.kernel, *sorted(self.config.items()))

    def with_(self, **changes: Any) -> Trial:
        """A copy with some fields replaced."""
        return self.model_copy(update=changes)


class Environment(_Row):
    """Where a run was measured; beside every number. Written to environment.json."""

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

    @property
    def slug(self) -> str:
        """Directory name under results/: `NVIDIA H100 80GB HBM3` gives `h100-80gb-hbm3`."""
        words = self.gpu.lower().replace("nvidia", "").split()
        return "-".join(words) or "gpu"

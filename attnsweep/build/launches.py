"""What the parent sends to the process that owns the GPU: cubins and launches, no declarations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnsweep.family.declare import Launch
from attnsweep.problem import Problem
from attnsweep.trial import Value


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """One launch of a call, ready to load: its stage, cubin path, stream, and where it works."""

    name: str
    cubin: str
    launch: Launch
    stream: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Bytes from the start of a buffer, by its name."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Everything needed to run one config on one problem, stage by stage."""

    problem: Problem
    stages: tuple[CompiledStage, ...]
    """In the order of issue; of a call in chunks, each stage once a chunk."""
    workspaces: Mapping[str, int]
    """Buffer name to bytes."""
    streams: int = 1
    eager: bool = False
    """Timed as launched by the host, not from a graph."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config on its timed problem, and on the smaller shapes it must first be right on."""

    kernel: str
    config: Mapping[str, Value]
    timed: Launches
    checks: tuple[Launches, ...]
    rounds_scores: int
    empty: Launches | None = None
    """The timed launches with an empty kernel in every launch."""
    deterministic: bool = True
    """Whether a call that differs from another in a bit is wrong."""


@dataclass(frozen=True, slots=True)
class FirstTimes:
    """What one look at a candidate gave, in microseconds a call; stages only of a pipeline."""

    time_us: float
    stages_us: Mapping[str, float]
    launch_us: float | None

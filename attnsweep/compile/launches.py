"""Cubins and launches that the parent sends to the GPU process; it sends no declarations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem, Value
from attnsweep.family.family import Launch


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """One launch of a call, ready to load: its stage, cubin path, stream and buffer offsets."""

    name: str
    cubin: str
    launch: Launch
    stream: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Buffer name to the bytes from the buffer's start."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything needed to run one config on one problem, stage by stage."""

    problem: Problem
    stages: tuple[CompiledStage, ...]
    """In the order of issue; a call in chunks has each stage once per chunk."""
    workspaces: Mapping[str, int]
    """Buffer name to bytes."""
    streams: int = 1
    eager: bool = False
    """Whether to time launches by the host instead of a graph."""
    chains: bool = False
    """Whether calls can be chained: the first launch may then begin before the last call ends."""
    lse: bool = False
    """Whether a call writes the log-sum-exp of every row, float32, to the workspace `lse`."""
    turned: bool = False
    """Whether its tensors lie as (batch, seqlen, heads, head_dim): see Family.order."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A callable of the user's, called with a config on one problem.

    call: as an Asked has it. cache: Triton's folder of the kernels that its trace compiled.
    expects: their hashes; none of a call that could not be traced, which may launch any. lse:
    whether it returns the log-sum-exp of every row, which is known once it was called.
    """

    problem: Problem
    call: str
    config: Mapping[str, Value]
    cache: str
    expects: frozenset[str]
    lse: bool = False
    stages: tuple[CompiledStage, ...] = ()
    chains: bool = False

    @property
    def workspaces(self) -> dict[str, int]:
        """Memory for what it returns beside its output."""
        return {"lse": 4 * math.prod(self.problem.shape_of("lse"))} if self.lse else {}


Plan = LaunchPlan | CallPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config on its timed problem, and on the smaller shapes that check it first."""

    kernel: str
    config: Mapping[str, Value]
    timed: Plan
    checks: tuple[Plan, ...]
    rounds_scores: int
    empty: LaunchPlan | None = None
    """The timed launches, each with an empty kernel."""
    deterministic: bool = True
    """Whether a call that differs from another in a bit is wrong."""
    turns: LaunchPlan | None = None
    """On many short turns, which are proved after the rounds; None if one launch cannot take them.
    See inputs.short_turns."""
    cases: tuple[Case, ...] | None = None
    """The cases of `checks`, of a family that does not serve all of the problem's; None: they are
    the problem's."""


@dataclass(frozen=True, slots=True)
class FirstTimes:
    """First times of a candidate, in microseconds a call; stages only of a pipeline."""

    time_us: float
    stages_us: Mapping[str, float]
    launch_us: float | None
    sm_mhz: float | None = None
    """SM clock right after time_us."""
    once_us: Mapping[str, float] = field(default_factory=dict)
    """Stages that calls have in common, which time_us leaves out."""

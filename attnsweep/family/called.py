"""A family whose candidates are calls of the user's launcher, and not launches of a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnsweep.core.layouts import EXAMPLES as LAYOUTS
from attnsweep.core.ops import DTYPE_BYTES, OPS
from attnsweep.core.problem import Value
from attnsweep.core.scores import KINDS as SCORES
from attnsweep.family.family import Config, Family
from attnsweep.family.launch import Launch
from attnsweep.family.params import Param

_HEAD_DIMS = range(8, 1025, 8)


@dataclass
class CalledFamily(Family):
    """A callable of the user's and the values of its parameters; it says itself what it supports.

    call: `FILE.py:FUNCTION`, as an Asked has it. Its kernels are compiled by what Python they are
    written in: see compile.trace. So there are no stages, and limits of a launch are known once it
    is compiled.
    """

    dtypes: tuple[str, ...] = tuple(DTYPE_BYTES)
    head_dims: tuple[int, ...] | range = _HEAD_DIMS
    head_dims_v: tuple[int, ...] | range = _HEAD_DIMS
    masks: tuple[str, ...] = ("full", "causal", "window", "boolean")
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    scores: tuple[str, ...] = tuple(SCORES)
    empty_rows: bool = True
    ops: tuple[str, ...] = tuple(OPS)
    call: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        place, _, _ = self.call.partition("?")[0].rpartition(":")
        self.source, self.declared_at = Path(place), place

    @property
    def modes(self) -> tuple[Param, ...]:
        """None: a call is never cut into chunks."""
        return ()

    @property
    def mode_rules(self) -> dict[str, str]:
        """None, as there are no modes."""
        return {}

    def finish(self) -> None:
        """Nothing is missing: the declaration is a call."""

    def excess(self, *_: object) -> None:
        """None: what a launch takes is known once it is compiled."""
        return

    def launches(self, *_: object) -> dict[str, Launch]:
        """None before it is traced."""
        return {}

    def of_today(self, recorded: Mapping[str, Value]) -> Config:
        """The recorded config: whether the function still takes it shows when it is traced."""
        return Config(recorded)

    def changed_since(self, recorded: Mapping[str, Value]) -> str | None:  # noqa: ARG002
        """None: see `of_today`."""
        return None

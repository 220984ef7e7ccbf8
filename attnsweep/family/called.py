"""A family whose candidates are calls of the user's launcher, and not launches of a template."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnsweep.core.callables import CALLABLE, Asked
from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import Arch
from attnsweep.core.layouts import EXAMPLES as LAYOUTS
from attnsweep.core.ops import DTYPE_BYTES, OPS
from attnsweep.core.problem import Problem, Value
from attnsweep.core.scores import KINDS as SCORES
from attnsweep.family.family import Config, Family
from attnsweep.family.launch import Launch
from attnsweep.family.params import Param

# Options of a launch, with the values that Triton gives a config that does not name them. Those
# that no config of an autotuner changes are no parameters of its.
USUAL: dict[str, Value] = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
_HEAD_DIMS = range(8, 1025, 8)


@dataclass(frozen=True, slots=True)
class Tuning:
    """An autotuner that a call launches: its configs as they stand, and those it keeps.

    A name that another one of the call has too begins with the kernel's, as `dq.BLOCK_M`.
    """

    name: str
    configs: Sequence[dict[str, Value]]
    kept: Sequence[dict[str, Value]]


def called(
    function: str | Callable[..., Any],
    values: Mapping[str, Sequence[Value]] | None = None,
    *,
    widen: bool = False,
) -> CalledFamily:
    """The family of a callable: `FILE.py:FUNCTION`, or the function itself, with these values.

    It is named by the label, or else by the file and the function. Raises KernelError.
    """
    if not isinstance(function, str):
        file, name = inspect.getsourcefile(function), getattr(function, "__name__", "")
        if file is None or not name.isidentifier():
            hint = "define it at the top of a file, with a name"
            raise KernelError(f"no file has {function!r}", hint=hint)
        function = f"{file}:{name}"
        if CALLABLE.fullmatch(function) is None:
            hint = "a file with letters, digits, `_`, `-` and `.` in its path"
            raise KernelError(f"cannot be named: {function}", hint=hint)
    asked = Asked.of(function)
    place, _, attribute = asked.call.rpartition(":")
    name = asked.label or f"{Path(place.removesuffix('.py')).name}_{attribute}"
    params = tuple(Param(param, tuple(own), "") for param, own in (values or {}).items())
    call = str(replace(asked, label=""))
    name = name.rpartition(".")[2].lower()
    return CalledFamily(name, call, params, call=call, widen=widen)


@dataclass
class CalledFamily(Family):
    """A callable of the user's and the values of its parameters; it says itself what it supports.

    call: `FILE.py:FUNCTION`, as an Asked has it. widen: neighbours of its autotuner's configs are
    configs too. Its kernels are compiled by what Python they are written in: see compile.trace. So
    there are no stages, and limits of a launch are known once it is compiled.
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
    closure: str = field(default="", kw_only=True)
    """Digest of the user's files, once they are traced."""
    widen: bool = field(default=False, kw_only=True)
    refused: Mapping[Problem, str] = field(default_factory=dict, kw_only=True)
    """Problems that the function takes no call of, and why."""

    def __post_init__(self) -> None:
        place, _, _ = self.call.partition("?")[0].rpartition(":")
        self.source, self.declared_at = Path(place), place

    def with_(self, **facts: Any) -> CalledFamily:
        """The family with other facts, and its rules."""
        made = replace(self, **facts)
        made.rules |= self.rules
        return made

    @property
    def modes(self) -> tuple[Param, ...]:
        """None: a call is never cut into chunks."""
        return ()

    @property
    def mode_rules(self) -> dict[str, str]:
        """None, as there are no modes."""
        return {}

    def finish(self) -> None:
        """Check nothing: a family that is a call has no declaration to complete."""

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        """See Family: what the function itself says, too."""
        return super().refusal(problem, arch) or self.refused.get(problem)

    def launches(self, *_: object) -> dict[str, Launch]:
        """None before it is traced: so no limit of a launch is known either."""
        return {}

    def outdated(self, call: Mapping[str, Any]) -> str | None:
        """Why a row of this call is of other code, or None."""
        if call.get("function") != self.call:
            return f"{self.name} calls {self.call} now"
        return None if call.get("closure") == self.closure else f"files of {self.call} changed"

    def of_today(self, recorded: Mapping[str, Value]) -> Config:
        """The recorded config: whether the function still takes it shows when it is traced."""
        return Config(recorded)

    def changed_since(self, recorded: Mapping[str, Value]) -> str | None:  # noqa: ARG002
        """None: see `of_today`."""
        return None

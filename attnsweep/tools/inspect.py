"""Resources and instructions of one compiled config of a family.

Needs NVRTC and no GPU; counting the instructions needs nvdisasm too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnsweep.choose.ranking import rank, winners
from attnsweep.compile.candidate import Build
from attnsweep.compile.cubin import resources, with_instructions
from attnsweep.compile.nvrtc import Compiler, nvrtc_version
from attnsweep.core.errors import KernelError, SpaceError, StoreError, ToolchainError
from attnsweep.core.hardware import Arch, bounds
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import Environment, Resources, Trial
from attnsweep.family.chunks import MODES
from attnsweep.family.family import SMS, Config, Family, Launch, Param, values_in
from attnsweep.family.space import Selection, Space
from attnsweep.reports.terminal import GLUE, aligned, wrap
from attnsweep.specs.require import INSTRUCTIONS
from attnsweep.specs.yaml_file import nearest
from attnsweep.store.run import ENVIRONMENT, Run, find_runs

_HEADERS = {
    "registers": "registers",
    "spill_bytes": "spill B",
    "smem_bytes": "smem B",
    "threads": "threads",
    "blocks_per_sm": "blocks/SM",
    "occupancy": "occupancy",
}


@dataclass(frozen=True, slots=True)
class _OneSm:
    """A chip of one SM at 1 MHz; its microseconds are clocks of an SM."""

    sm_count: int = 1
    clock_hz: float = 1e6
    memory_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result. uncounted: None, or the reason why instructions were not counted."""

    kernel: Family
    config: Config
    problem: Problem
    arch: Arch
    used: Resources
    launches: Mapping[str, Launch]
    uncounted: str | None
    card: Environment | None
    """A recorded card of this architecture, whose clock and SMs the bound uses."""

    @property
    def limits(self) -> dict[str, float]:
        """The least time of each unit: µs on the card, or clocks of one SM without a card."""
        return bounds(self.problem, self.arch, self.card or _OneSm())

    def waves(self, stage: str) -> float | None:
        """How many times the blocks of a stage's grid fill the card's SMs."""
        blocks = self.used.stages[stage]["blocks_per_sm"]
        if self.card is None or not blocks:
            return None
        return math.prod(self.launches[stage].grid) / (blocks * self.card.sm_count)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data; unknown values are None."""
        major, minor = nvrtc_version()
        return {
            "kernel": self.kernel.name,
            "config": dict(self.config),
            "problem": self.problem.facts,
            "label": self.problem.label,
            "arch": self.arch.name,
            "nvrtc": f"{major}.{minor}",
            "stages": {
                name: {
                    **stage,
                    "limited_by": self.used.limiters[name],
                    "grid": list(self.launches[name].grid),
                    "waves": self.waves(name),
                }
                for name, stage in self.used.stages.items()
            },
            "uncounted": self.uncounted,
            "card": self.card.gpu if self.card else None,
            "bounds_us": self.limits if self.card else None,
            "bounds_sm_clocks": bounds(self.problem, self.arch, _OneSm()),
        }

    def lines(self, width: int) -> list[str]:
        """The result as text, no line wider than `width` unless names need it."""
        major, minor = nvrtc_version()
        out = wrap(f"{self.kernel.name} {self.config.label}".rstrip(), width)
        out += wrap(f"{self.problem.label} · {self.arch.name} · NVRTC {major}.{minor}", width)
        out += ["", *self._table(self._resource_rows(), width)]
        if self.uncounted is None:
            out += ["", *self._table(self._instruction_rows(), width)]
            out += wrap("Each instruction counts once, however often a loop runs it.", width)
        else:
            out += ["", *wrap(f"no instructions: {self.uncounted}", width)]
        unit, where = ("µs", f"on {self.card.gpu}, as recorded") if self.card else (
            "SM clocks",
            "over all SMs; a recorded run of this architecture gives µs",
        )  # fmt: skip
        each = [f"{name} {_plain(us)}{GLUE}{unit}" for name, us in self.limits.items()]
        return [*out, "", *wrap(f"bound of the problem: {', '.join(each)} {where}", width)]

    def _resource_rows(self) -> list[list[str]]:
        header = ["stage", *_HEADERS.values(), "limited by", "cubin B", "grid"]
        rows = [[*header, *(["waves"] if self.card else [])]]
        for name, stage in self.used.stages.items():
            cells = [f"{stage[key]:.0f}" for key in _HEADERS if key != "occupancy"]
            cells.append(f"{100 * stage['occupancy']:.0f} %")
            cells += [self.used.limiters[name], f"{stage['cubin_bytes']:.0f}"]
            cells.append("×".join(map(str, self.launches[name].grid)))
            waves = self.waves(name)
            rows.append([name, *cells, *([f"{waves:.2f}" if waves else "-"] if self.card else [])])
        return rows

    def _instruction_rows(self) -> list[list[str]]:
        names = [name.replace("_", " ") if "_" in name else name for name in INSTRUCTIONS]
        upper = [n.upper() if len(n) <= 5 else n for n in names]
        rows = [["stage", *upper]]
        for name, stage in self.used.stages.items():
            rows.append([name, *(f"{stage[kind]:.0f}" for kind in INSTRUCTIONS)])
        return rows

    def _table(self, rows: list[list[str]], width: int) -> list[str]:
        """A line per stage; if that is too wide, a line per fact."""
        lines = aligned(rows, "l" + "r" * (len(rows[0]) - 1), 10**6)
        if max(map(len, lines)) <= width:
            return lines
        turned = [list(column) for column in zip(*rows, strict=True)]
        return aligned(turned, "l" + "r" * (len(turned[0]) - 1), 10**6)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def inspect(
    kernel: Family,
    given: str,
    problem: Problem | None,
    arch: Arch,
    *,
    card: Environment | None = None,
) -> Inspection:
    """Compile one config for `arch` and inspect it.

    given: parameters as `BLOCK_M=64 BLOCK_N=128`; the others come from the first config that the
    family's rules keep. Raises KernelError for an unknown parameter or value, SpaceError if the
    family cannot run the problem or no config is left, CompileError, and ToolchainError without
    NVRTC.
    """
    problem = problem or _usual_problem(kernel)
    refusal = kernel.refusal(problem, arch)
    if refusal is not None:
        raise SpaceError(
            f"{kernel.name} cannot run {problem.label} on {arch.name}: {refusal}",
            hint="choose another with --problem or --arch",
        )
    config = _config(kernel, given, problem, arch)
    compiler = Compiler(arch)
    try:
        build = Build.of(kernel, config, problem, compiler)
        build.submit()
        cubins = build.cubins()
        used = resources([(n, cubins[n], launch) for n, launch in build.launches.items()], arch)
        uncounted = None
        try:
            used = with_instructions(used, build.cubins(), build.launches)
        except ToolchainError as error:
            uncounted = error.render()
        return Inspection(kernel, config, problem, arch, used, build.launches, uncounted, card)
    finally:
        compiler.close()


def winner_of(run: Run, problem: Problem | None) -> Trial:
    """The winner of a run on a problem, or on its first one. Raises StoreError if it has none."""
    found = {trial.problem: trial for trial in winners(rank(run.trials, run.environment))}
    if problem is None and found:
        return next(iter(found.values()))
    if problem not in found:
        there = "\n  ".join(["it has those of:", *(known.label for known in found)])
        what = "no winner" if problem is None else f"no winner of {problem.label}"
        raise StoreError(what, where=str(run.directory), hint=there if found else None)
    return found[problem]


def texts(config: Mapping[str, Value]) -> dict[str, str]:
    """A recorded config as `inspect` takes one: without modes, which no cubin depends on."""
    modes = {param.name for param in MODES}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in config.items()
        if name not in modes
    }


def card_of(arch: Arch, results: Path) -> Environment | None:
    """The card of the first recorded run for `arch` below `results`, or None."""
    for directory in find_runs(results):
        with contextlib.suppress(OSError, ValueError):
            found = Environment.model_validate_json((directory / ENVIRONMENT).read_bytes())
            if found.arch == arch.name:
                return found
    return None


def _usual_problem(kernel: Family) -> Problem:
    head_dim = 64 if 64 in kernel.head_dims else kernel.head_dims[0]
    dtype: Any = kernel.dtypes[0]
    seqlen = 1024 if head_dim <= 256 else 64  # kernels for wide heads take few rows
    return Problem(1, 16, 16, seqlen, seqlen, head_dim, dtype)


def _config(kernel: Family, given: str, problem: Problem, arch: Arch) -> Config:
    declared = {param.name: param for param in kernel.params}
    values: dict[str, tuple[Value, ...]] = {}
    for name, text in values_in(given).items():
        if name not in declared:
            raise KernelError(
                f"{kernel.name} has no parameter {name!r}", hint=nearest(name, declared)
            )
        values[name] = (_value(declared[name], text),)
    space = Space.build(kernel, problem, arch, Selection(values))
    if not space.configs:
        removed = ", ".join(
            f"{name} ({kernel.rules[name][0]})" if name in kernel.rules else name
            for name, count in space.removed.items()
            if count
        )
        raise SpaceError(
            f"{kernel.name} has no config {given or 'at all'} for {problem.label} on {arch.name}",
            hint=f"ruled out by: {removed}",
        )
    return space.configs[0]


def _value(param: Param, text: str) -> Value:
    """The text as a value of the parameter's type. Raises KernelError for a wrong one."""
    if text == SMS and param.counts_sms:
        return SMS
    sample = param.values[-1] if param.values[0] == SMS else param.values[0]
    if isinstance(sample, str):
        if text not in param.values:
            raise KernelError(
                f"{param.name} cannot be {text!r}", hint=nearest(text, map(str, param.values))
            )
        return text
    if isinstance(sample, bool) and text in ("true", "false", "1", "0"):
        return text in ("true", "1")
    own = ", ".join(map(str, param.values))
    if text.isascii() and text.isdigit() and not isinstance(sample, bool):
        wrong = param.why_not(int(text))
        if wrong:
            raise KernelError(wrong, hint=f"its own values: {own}")
        return int(text)
    raise KernelError(f"{param.name} cannot be {text!r}", hint=f"its own values: {own}")

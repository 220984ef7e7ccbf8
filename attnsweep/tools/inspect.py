"""Resources and instructions of one compiled config of a family, or of those of a callable.

A template needs NVRTC, a callable PyTorch and Triton, neither a GPU; counting the instructions
needs nvdisasm too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnsweep.choose.ranking import rank, winners
from attnsweep.compile.calls import build_of, configs_with, machine_code
from attnsweep.compile.cubin import resources, with_instructions
from attnsweep.compile.nvrtc import Compiler, nvrtc_version
from attnsweep.compile.trace import Tracers
from attnsweep.core.errors import CompileError, KernelError, SpaceError, StoreError, ToolchainError
from attnsweep.core.hardware import Arch, bounds
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import Environment, Trial
from attnsweep.family.family import SMS, Config, Family, Param, values_in
from attnsweep.family.params import config_in
from attnsweep.family.space import Selection, Space
from attnsweep.reports.terminal import GLUE, aligned, wrap
from attnsweep.specs.load import refusal
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
    """A card of one SM at 1 MHz, so that microseconds count the clocks of an SM."""

    sm_count: int = 1
    clock_hz: float = 1e6
    memory_bytes_per_second: float = 0.0


def inspect(
    kernel: Family,
    given: str,
    problem: Problem | None,
    arch: Arch,
    *,
    card: Environment | None = None,
) -> dict[str, Any]:
    """Compile one config for `arch` and inspect it: plain data; unknown values are None.

    given: parameters as `BLOCK_M=64 BLOCK_N=128`; the others come from the first config that the
    family's rules keep. card: a recorded one of this architecture, whose clock and SMs the bound
    and the waves use: how many times a stage's blocks fill its SMs. Raises KernelError for an
    unknown parameter or value, SpaceError if the family cannot run the problem or no config is
    left, CompileError, and ToolchainError without NVRTC.
    """
    problem = problem or _usual_problem(kernel)
    if (why := kernel.refusal(problem, arch)) is not None:
        raise SpaceError(
            f"{kernel.name} cannot run {problem.label} on {arch.name}: {why}",
            hint="choose another with --problem or --arch",
        )
    config = config_of(kernel, given, problem, arch)
    with Compiler(arch) as compiler:
        build = build_of(kernel, config, problem, compiler)
        build.submit()
        cubins = build.cubins()
        used = resources([(n, cubins[n], launch) for n, launch in build.launches.items()], arch)
        uncounted = None
        try:
            used = with_instructions(used, cubins, build.launches)
        except ToolchainError as error:
            uncounted = error.render()
    sms = card.sm_count if card else 0
    stages = {}
    for name, stage in used.stages.items():
        grid, blocks = build.launches[name].grid, stage["blocks_per_sm"] * sms
        # Of a kernel of one shape the host alone knows the grid, and its dynamic shared memory.
        own = {"limited_by": used.limiters[name], "grid": list(grid) if any(grid) else None}
        stages[name] = {**stage, **own, "waves": math.prod(grid) / blocks if blocks else None}
    return {
        "kernel": kernel.name,
        "config": dict(config),
        "problem": problem.facts,
        "label": problem.label,
        "arch": arch.name,
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "stages": stages,
        "uncounted": uncounted,
        "card": card.gpu if card else None,
        "bounds_us": bounds(problem, arch, card) if card else None,
        "bounds_sm_clocks": bounds(problem, arch, _OneSm()),
    }


def lines(found: Mapping[str, Any], width: int) -> list[str]:
    """An inspection as text, no line wider than `width` unless names need it."""
    stages, card = found["stages"], found["card"]
    out = wrap(f"{found['kernel']} {Config(found['config']).label}".rstrip(), width)
    out += wrap(f"{found['label']} · {found['arch']} · NVRTC {found['nvrtc']}", width)
    rows = [["stage", *_HEADERS.values(), "limited by", "cubin B", "grid", "waves"]]
    for name, stage in stages.items():
        cells = {key: f"{stage[key]:.0f}" for key in _HEADERS}
        cells["occupancy"] = f"{100 * stage['occupancy']:.0f} %"
        grid, waves = "×".join(map(str, stage["grid"] or "-")), stage["waves"]
        fit = f"{waves:.2f}" if waves else "-"
        size = f"{stage['cubin_bytes']:.0f}"
        rows.append([name, *cells.values(), stage["limited_by"], size, grid, fit])
    out += ["", *_table(rows if card else [row[:-1] for row in rows], width)]
    if found["uncounted"] is None:
        kinds = [
            kind.upper() if len(kind) <= 5 else kind.replace("_", " ") for kind in INSTRUCTIONS
        ]
        rows = [["stage", *kinds]]
        rows += [[n, *(f"{s[kind]:.0f}" for kind in INSTRUCTIONS)] for n, s in stages.items()]
        out += ["", *_table(rows, width)]
        out += wrap("Each instruction counts once, however often a loop runs it.", width)
    else:
        out += ["", *wrap(f"no instructions: {found['uncounted']}", width)]
    limits, unit, where = found["bounds_us"], "µs", f"on {card}, as recorded"
    if not card:
        limits, unit = found["bounds_sm_clocks"], "SM clocks"
        where = "over all SMs; a recorded run of this architecture gives µs"
    each = [
        f"{name} {f'{us:,.0f}' if us >= 1000 else f'{us:.3g}'}{GLUE}{unit}"
        for name, us in limits.items()
    ]
    return [*out, "", *wrap(f"bound of the problem: {', '.join(each)} {where}", width)]


def inspect_call(
    call: str, given: str, problem: Problem | None, arch: Arch, cache_dir: Path | None = None
) -> dict[str, Any]:
    """Compile the configs of a callable that its file keeps and that have these values: plain data.

    A config's `as` is the number of the first of the same machine code, and `failed` how many do
    not compile. See `inspect`.
    """
    problem = problem or Problem(1, 16, 16, 1024, 1024, 64, "bf16")
    with Tracers(arch, cache_dir) as tracers:
        tracer = tracers.of(call)
        space, asked = configs_with(config_in(given), tracer, problem)
        if why := space.kernel.refusal(problem, arch):
            raise SpaceError(f"{call} cannot run {problem.label}: {why}", hint="see --problem")
        made = [(config, tracer.submit(problem, config, cases=False)) for config in asked]
        configs: list[dict[str, Any]] = []
        codes: dict[object, int] = {}
        failed = 0
        for number, (config, traced) in enumerate(made, 1):
            facts: dict[str, Any] = {"config": dict(config), "error": None, "stages": {}}
            configs.append(facts)
            try:
                compiled = traced.result()
            except CompileError as error:
                facts["error"] = error.what
                failed += 1
                continue
            if compiled.why:
                facts["error"] = f"it compiles when it is first called: {compiled.why}"
                continue
            stages, used = compiled.stages, resources(compiled.stages, arch)
            facts["as"] = codes.setdefault(machine_code(compiled), number)
            with contextlib.suppress(ToolchainError):
                cubins = {name: cubin for name, cubin, _ in stages}
                launches = {name: launch for name, _, launch in stages}
                used = with_instructions(used, cubins, launches)
            facts["stages"] = used.stages
        return {
            "call": call,
            "label": problem.label,
            "arch": arch.name,
            "versions": tracer.versions,
            "total": space.total,
            "configs": configs,
            "failed": failed,
            "removed": {
                f"{n}: {space.kernel.rules[n][0]}": k for n, k in space.removed.items() if k
            },
        }


def lines_of_call(found: Mapping[str, Any], width: int) -> list[str]:
    """An inspection of a callable as text: a line for each launch of a config."""
    # The others are variables of the environment.
    versions = " ".join(f"{name} {of}" for name, of in found["versions"].items() if name.islower())
    facts = {name: _HEADERS[name] for name in ("registers", "spill_bytes", "smem_bytes")}
    facts |= {"blocks_per_sm": "blocks/SM", **{kind: kind.upper() for kind in ("hgmma", "hmma")}}
    facts |= {"ffma": "FFMA", "mufu": "MUFU", "instructions": "SASS"}
    rows, faults = [["#", *facts.values(), "config"]], []
    for number, each in enumerate(found["configs"], 1):
        label = Config(each["config"]).label
        if each["error"]:
            faults += wrap(
                f"{' '.join(filter(None, (str(number), label)))}: {each['error']}", width
            )
        for name, stage in each["stages"].items():
            same = f" = {each['as']}" * (each["as"] != number)
            cells = [f"{stage[fact]:.0f}" if fact in stage else "-" for fact in facts]
            own = f"{label} {name}" if len(each["stages"]) > 1 else label
            rows.append([f"{number}{same}", *cells, own])
    out = wrap(f"{found['call']} · {found['label']} · {found['arch']} · {versions}", width)
    if len(rows) > 1:
        out += ["", *aligned(rows, f"l{'r' * len(facts)}l", width)]
    out += ["", *faults, *wrap(f"{len(found['configs'])} of {found['total']} configs", width)]
    for rule, count in found["removed"].items():
        out += wrap(f"{count} removed by {rule}", width)
    if any(each.get("as", number) != number for number, each in enumerate(found["configs"], 1)):
        out += wrap("= a number: its machine code and launches are equal to that config's", width)
    return out


def _table(rows: list[list[str]], width: int) -> list[str]:
    """A line per stage; if that is too wide, a line per fact."""
    lines = aligned(rows, "l" + "r" * (len(rows[0]) - 1), 10**6)
    if max(map(len, lines)) <= width:
        return lines
    turned = [list(column) for column in zip(*rows, strict=True)]
    return aligned(turned, "l" + "r" * (len(turned[0]) - 1), 10**6)


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


def texts(config: Mapping[str, Value], family: Family | None) -> dict[str, str]:
    """A recorded config as `inspect` takes one: without modes, which no cubin depends on."""
    modes = {mode.name for mode in family.modes} if family is not None else set()
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


def config_of(kernel: Family, given: str, problem: Problem, arch: Arch) -> Config:
    """The first config with the given parameters that the family's rules keep; see `inspect`."""
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
    value: Value = text
    if isinstance(sample, bool):
        value = {"true": True, "1": True, "false": False, "0": False}.get(text, text)
    elif isinstance(sample, int) and text.isascii() and text.isdigit():
        value = int(text)
    if (refused := refusal(param, value)) is not None:
        raise KernelError(refused[0], hint=refused[1])
    return value

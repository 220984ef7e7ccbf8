"""Reasons not to run a compiled candidate: warnings, limits, requirements, lack of room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attnsweep.build import sass
from attnsweep.build.cubin import compiler_warnings
from attnsweep.build.nvrtc import Compiler, Cubin
from attnsweep.family.declare import Launch
from attnsweep.hardware import Arch
from attnsweep.spec import require
from attnsweep.spec.load import SweepSpec
from attnsweep.trial import Resources


def why_not(
    cubins: Mapping[str, Cubin],
    used: Resources,
    spec: SweepSpec,
    *,
    workspace_bytes: int,
    allowed_bytes: int | None,
) -> str | None:
    """Why a candidate with these stages is not worth running, or None."""
    for cubin in cubins.values():
        for warning in compiler_warnings(cubin.log):
            return f"ptxas {warning}"
    limits = spec.limits
    if limits.spill_bytes is not None and used.spill_bytes > limits.spill_bytes:
        return f"spills {used.spill_bytes} bytes, the spec allows {limits.spill_bytes}"
    for name, stage in used.stages.items():
        if stage["blocks_per_sm"] < 1:
            return f"stage {name} does not fit an SM"
    broken = require.broken(spec.require, used.stages)
    if broken is not None:
        return broken
    if allowed_bytes is not None and workspace_bytes > allowed_bytes:
        needed, allowed = workspace_bytes / 2**30, allowed_bytes / 2**30
        return f"needs {needed:.1f} GiB of workspace, {allowed:.1f} allowed"
    return None


def with_instructions(
    used: Resources, cubins: Mapping[str, Cubin], launches: Mapping[str, Launch]
) -> Resources:
    """The same resources, each stage with its instructions by kind. Raises ToolchainError."""
    stages = {
        name: stage | sass.counts(cubins[name])[launches[name].function]
        for name, stage in used.stages.items()
    }
    return used.model_copy(update={"stages": stages})


def compiler_for(spec: SweepSpec, arch: Arch, cache_dir: Path | None = None) -> Compiler:
    """A Compiler that also disassembles, in its threads, if the spec's `require` needs it.

    Raises ToolchainError before anything is compiled if a tool is missing.
    """
    if not require.needs_sass(spec.require):
        return Compiler(arch, cache_dir)
    sass.nvdisasm()
    return Compiler(arch, cache_dir, after=sass.counts)

"""What compiled code uses (registers, spills, occupancy, parameters), and reasons not to run it.

The compile log tells all but the parameters, which only the cubin tells.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from elftools.elf.elffile import ELFFile

from attnsweep.compile import elf, sass
from attnsweep.compile.nvrtc import Compiler, Cubin
from attnsweep.core.errors import CompileError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import ceil_div
from attnsweep.core.trial import Resources
from attnsweep.family.family import Launch
from attnsweep.specs import require
from attnsweep.specs.load import SweepSpec

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
# ptxas messages about code that runs, but not as written: wgmma serialised, setmaxnreg ignored.
_WARNING = re.compile(r"(?:warning|info)\s*:\s*\((C75\d\d)\) (.+)")


def functions(log: str) -> dict[str, dict[str, int]]:
    """Per entry function of a ptxas -v log: registers, spill_bytes and static smem_bytes."""
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            current = found.setdefault(match["name"], {"smem_bytes": 0, "spill_bytes": 0})
        elif match := _SPILLS.search(line):
            current["spill_bytes"] = int(match[1]) + int(match[2])
        elif match := _REGISTERS.search(line):
            current["registers"] = int(match[1])
            smem = _SMEM.search(line)
            current["smem_bytes"] = int(smem[1]) if smem else 0
    return found


def check_arguments(stage: str, cubin: Cubin, launch: Launch) -> None:
    """Raise CompileError if a launch's arguments differ from its function's in number or size.

    On the GPU a missing argument would be an illegal address. An int passed for a float is not
    found: both have the same size.
    """
    takes = _parameters(cubin.path, cubin.digest, launch.function)
    passes = launch.arg_bytes
    if takes is not None and takes != passes:
        raise CompileError(
            f"stage {stage!r}: the template's {launch.function} takes {_listed(takes, 'parameter')}"
            f", the declaration's Launch.args are {_listed(passes, 'argument')}; number, order "
            "and size must agree",
            log=cubin.log,
        )


def _listed(sizes: Sequence[int], what: str) -> str:
    plural = "" if len(sizes) == 1 else "s"
    of = f" of {', '.join(map(str, sizes))} bytes" if sizes else ""
    return f"{len(sizes)} {what}{plural}{of}"


@cache
def _parameters(cubin: Path, digest: str, function: str) -> tuple[int, ...] | None:
    """Bytes of each parameter of a function; None if the cubin encodes them in an unknown way.

    digest: hash of the file's content; part of the cache's key.
    """
    with cubin.open("rb") as file:
        known = [*elf.attributes(ELFFile(file), f".nv.info.{function}")]
    if not known:
        return None
    places: dict[int, tuple[int, int]] = {}
    end = 0
    for kind, value, payload in known:
        if kind == elf.ALL_PARAMETERS:
            end = value
        elif kind in (elf.PARAMETER, elf.PARAMETER_V2):
            number, offset, size = struct.unpack_from("<4xHHI", payload)
            places[number] = offset, size >> 18 if kind == elf.PARAMETER else size & 0xFFFF
    if end != max((sum(place) for place in places.values()), default=0):
        return None  # an unknown encoding
    return tuple(size for _, (_, size) in sorted(places.items()))


def stack_bytes(cubin: Path) -> dict[str, int]:
    """Function name to the bytes of a thread's stack: spilled registers, and arrays not in them."""
    with cubin.open("rb") as file:
        return elf.of_functions(ELFFile(file), elf.STACK)


def compiler_warnings(log: str) -> list[str]:
    """ptxas warnings that the machine code is not what the template asked for."""
    return [f"{code}: {text.strip()}" for code, text in _WARNING.findall(log)]


def residency(arch: Arch, registers: int, threads: int, smem_bytes: int) -> tuple[int, str]:
    """Resident blocks of one SM, and the resource that limits them, such as `shared memory`.

    As the driver's occupancy calculator counts them: a warp takes registers in units of 256, and
    each of an SM's four sub-partitions has its own. A block takes shared memory in units of 128
    bytes, plus what the driver reserves for it.
    """
    if threads > arch.max_threads_per_block or smem_bytes > arch.smem_per_block:
        return 0, "threads" if threads > arch.max_threads_per_block else "shared memory"
    warps = ceil_div(threads, 32)
    registers_per_warp = ceil_div(max(registers, 1) * 32, 256) * 256
    warps_by_registers = arch.registers_per_sm // 4 // registers_per_warp * 4
    per_block = ceil_div(smem_bytes + arch.smem_reserved_per_block, 128) * 128
    allowed = {
        "registers": warps_by_registers // warps,
        "shared memory": arch.smem_per_sm // per_block,
        "threads": arch.max_threads_per_sm // 32 // warps,
        "blocks": arch.max_blocks_per_sm,
    }
    limiter = min(allowed, key=lambda name: allowed[name])
    return allowed[limiter], limiter


def resources(stages: Sequence[tuple[str, Cubin, Launch]], arch: Arch) -> Resources:
    """Resources of a whole pipeline from (stage name, Cubin, Launch) of each stage.

    Raises CompileError if a cubin lacks the function that its launch names.
    """
    rows: dict[str, dict[str, float]] = {}
    limiters: dict[str, str] = {}
    for name, cubin, launch in stages:
        defined = functions(cubin.log)
        facts = defined.get(launch.function)
        if facts is None:
            raise CompileError(
                f"stage {name!r} launches {launch.function!r}, which its template does not define "
                f'as extern "C" __global__; it defines: {", ".join(defined) or "none"}',
                log=cubin.log,
            )
        smem_bytes = facts["smem_bytes"] + launch.smem_bytes
        blocks, limiters[name] = residency(arch, facts["registers"], launch.threads, smem_bytes)
        rows[name] = {
            "registers": facts["registers"],
            "spill_bytes": facts["spill_bytes"],
            "smem_bytes": smem_bytes,
            "static_smem_bytes": facts["smem_bytes"],
            "threads": launch.threads,
            "blocks_per_sm": blocks,
            "occupancy": blocks * ceil_div(launch.threads, 32) * 32 / arch.max_threads_per_sm,
            "cubin_bytes": cubin.path.stat().st_size,
        }
    return Resources(
        registers=int(max(row["registers"] for row in rows.values())),
        spill_bytes=int(sum(row["spill_bytes"] for row in rows.values())),
        smem_bytes=int(max(row["smem_bytes"] for row in rows.values())),
        occupancy=min(row["occupancy"] for row in rows.values()),
        stages=rows,
        limiters=limiters,
    )


def why_not(
    cubins: Mapping[str, Cubin],
    used: Resources,
    spec: SweepSpec,
    *,
    workspace_bytes: int,
    allowed_bytes: int | None,
    as_written: bool = True,
) -> str | None:
    """Why a candidate with these stages is not worth running, or None.

    as_written: whether its author wrote the instructions, so that others are a fault; a kernel that
    Python compiles is as slow as it is.
    """
    for cubin in cubins.values() if as_written else ():
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

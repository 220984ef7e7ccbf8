"""State of this machine: pip, driver, GPU, NVRTC, CuPy, baselines, cache."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from attnsweep import __version__
from attnsweep.baselines.backend import TORCH, Package
from attnsweep.baselines.registry import BACKENDS
from attnsweep.compile import cache
from attnsweep.compile.nvrtc import CACHE_VARIABLE, default_cache_dir, nvrtc_version
from attnsweep.core.errors import AttnsweepError, NoGpuError
from attnsweep.core.files import install_command, why_pip_misses
from attnsweep.device.cuda import driver_cuda
from attnsweep.device.environment import driver_version
from attnsweep.reports.terminal import aligned, counted
from attnsweep.reports.views import with_tails
from attnsweep.tools.target import described

_CACHE_FIX = f"set {CACHE_VARIABLE} to a writable directory"


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One line of `attnsweep doctor`. `needed`: a run on a GPU cannot do without it."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    needed: bool = True


def examine() -> list[MachineCheck]:
    """Every check in turn; none of them raises."""
    cuda = driver_cuda()
    extra = "compile" if cuda is None else "cuda12" if cuda < (13, 0) else "cuda13"
    install = install_command(extra)
    base = [
        MachineCheck(
            "attnsweep", True, f"{__version__}, Python {platform.python_version()}", needed=False
        ),
        _pip(),
        _driver(cuda),
        _nvrtc(install, cuda),
    ]
    on_gpu = [
        _package("CuPy", Package(("cupy-cuda13x", "cupy-cuda12x", "cupy"), install), needed=True),
        MachineCheck("GPU", False, "none without a driver") if cuda is None else _gpu(),
        _package("NVML", Package(("nvidia-ml-py",), install)),
        _package("PyTorch", TORCH),
        *(_package(name, BACKENDS[name].package) for name in _BASELINES),
    ]
    if cuda is None:  # without a driver no package helps to use a GPU
        on_gpu = [replace(finding, fix=None, needed=False) for finding in on_gpu]
    extras = [
        _package("nvdisasm", Package(("nvidia-cuda-nvdisasm",), install_command("inspect"))),
        _package("HTML page", Package(("vl-convert-python",), install_command("html"))),
        _package("JUnit XML", Package(("junitparser",), install_command("ci"))),
    ]
    return [*base, *on_gpu, *extras, _cache()]


def why_no_compiling() -> str | None:
    """How to make `compile` work here, or None if it does: it needs NVRTC and a cache."""
    try:
        nvrtc_version()
    except AttnsweepError:
        return install_command("compile")
    return None if cache.fault(default_cache_dir()) is None else _CACHE_FIX


def verdict(findings: Sequence[MachineCheck]) -> str:
    """One line: the things that this machine can do as it is."""
    if all(finding.ok for finding in findings if finding.needed):
        return "ready to measure"
    fix = why_no_compiling()
    if fix is None:
        return "cannot measure here; compile, report and replay work"
    return f"cannot measure here; report and replay work; for compile: {fix}"


def lines_of(rows: Sequence[MachineCheck], width: int) -> list[Text]:
    """The lines of `doctor`; a command that fixes something stays on one line."""
    marks = ["ok" if row.ok else "missing" if row.needed else "-" for row in rows]
    lines = aligned([*zip(marks, (row.name for row in rows), strict=True)], "ll", width)
    tails = with_tails(lines, [row.detail for row in rows], width)
    out = []
    for row, mark, (first, *rest) in zip(rows, marks, tails, strict=True):
        text = Text(first)
        text.stylize({"ok": "green", "missing": "red"}.get(mark, ""), 0, len(mark))
        out += [text, *map(Text, rest)]
        if row.fix and not row.ok:
            out.append(Text(" " * (max(map(len, lines)) + 2) + row.fix, "cyan"))
    return out


def without_gpu(error: NoGpuError, rows: Sequence[tuple[str, str]], width: int) -> NoGpuError:
    """The error with advice, and the commands that work without a GPU, which are never broken.

    rows: each command, and its purpose, which is next to it or below it.
    """
    able = [row for row in rows if not row[0].startswith("attnsweep compile ")]
    fix = why_no_compiling() if len(able) < len(rows) else None
    if fix is not None:
        rows, fix = able, f"To compile here, without a GPU: {fix}"
    rows = [*rows, ("attnsweep doctor", "what is missing, and how to fix it")]
    longest, purpose = (max(map(cell_len, column)) for column in zip(*rows, strict=True))
    lines = [line for command, what in rows for line in (command, f"    {what}")]
    if longest + 2 + purpose <= width - 4:
        lines = aligned(rows, "ll", width - 4)
    said = [error.hint, fix, "What works here:", *(f"  {line}" for line in lines)]
    hint = "\n  ".join(filter(None, said))
    return NoGpuError(f"{error.what}. Nothing was measured.", hint=hint)


def _pip() -> MachineCheck:
    """Whether the commands that fix something install into the Python that runs attnsweep."""
    missing = why_pip_misses()
    if missing is None:
        return MachineCheck("pip", True, f"installs into {sys.prefix}", needed=False)
    return MachineCheck("pip", False, *missing, needed=False)


def _driver(cuda: tuple[int, int] | None) -> MachineCheck:
    if cuda is None:
        return MachineCheck(
            "driver",
            False,
            "no NVIDIA driver (libcuda.so.1 cannot be loaded)",
            "install NVIDIA's driver, on a machine with its GPU",
        )
    detail = f"{driver_version() or 'present'}, supports CUDA {cuda[0]}.{cuda[1]}"
    if cuda < (12, 0):
        return MachineCheck(
            "driver", False, detail, "update it: attnsweep needs CUDA 12 (driver 525)"
        )
    return MachineCheck("driver", True, detail)


def _nvrtc(install: str, cuda: tuple[int, int] | None) -> MachineCheck:
    try:
        version = nvrtc_version()
    except AttnsweepError as error:
        return MachineCheck("NVRTC", False, error.what, install)
    detail = f"{version[0]}.{version[1]}"
    if cuda is not None and version[0] > cuda[0]:
        return MachineCheck(
            "NVRTC", False, f"{detail}, but the driver loads only CUDA {cuda[0]} code", install
        )
    return MachineCheck("NVRTC", True, detail)


def _gpu() -> MachineCheck:
    try:
        found = described()
    except AttnsweepError as error:
        return MachineCheck("GPU", False, error.what, error.hint)
    memory = found.memory_bytes / 2**30
    detail = f"{found.gpu}, {found.arch}, {found.sm_count} SMs, {memory:.0f} GiB"
    return MachineCheck("GPU", True, detail)


# Baselines that packages of their own bring; the others come with PyTorch.
_BASELINES = ("cudnn", "triton_flash", "flash_attn_2", "flash_attn_3", "flash_attn_4")


def _package(label: str, package: Package, *, needed: bool = False) -> MachineCheck:
    installed, fix = package.installed(), package.fix
    if not installed:
        return MachineCheck(label, False, "not installed", fix, needed)
    if label == "CuPy" and len(installed) > 1:
        both = " and ".join(installed)
        remedy = f"pip uninstall -y {' '.join(package.names)}; {fix}"
        return MachineCheck(label, False, f"{both} overwrite each other", remedy, needed)
    return MachineCheck(label, True, ", ".join(installed), needed=needed)


def _cache() -> MachineCheck:
    path = default_cache_dir()
    why = cache.fault(path)
    if why is not None:
        return MachineCheck("cache", False, f"{path} cannot be written ({why})", _CACHE_FIX)
    found = cache.entries(path)
    size = sum(entry.size_bytes for entry in found) / 2**20
    return MachineCheck(
        "cache", True, f"{path}: {counted(len(found), 'cubin')}, {size:.0f} MiB", needed=False
    )

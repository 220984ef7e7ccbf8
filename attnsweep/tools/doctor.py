"""State of this machine: pip, driver, GPU, NVRTC, CuPy, baselines, cache."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from attnsweep import __version__
from attnsweep.baselines.backend import Package
from attnsweep.baselines.registry import BACKENDS
from attnsweep.compile import cache
from attnsweep.compile.nvrtc import CACHE_VARIABLE, default_cache_dir, nvrtc_version
from attnsweep.core.errors import AttnsweepError, NoGpuError
from attnsweep.core.files import install_command, why_pip_misses
from attnsweep.device.cuda import driver_cuda
from attnsweep.device.environment import driver_version
from attnsweep.reports.terminal import aligned, counted
from attnsweep.reports.views import what_works, with_tails
from attnsweep.tools.target import described

_CACHE_FIX = f"set {CACHE_VARIABLE} to a writable directory"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `attnsweep doctor`. `needed`: a run on a GPU cannot do without it."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    needed: bool = True


def examine() -> list[Finding]:
    """Every check in turn; none of them raises."""
    cuda = driver_cuda()
    extra = "compile" if cuda is None else "cuda12" if cuda < (13, 0) else "cuda13"
    install = install_command(extra)
    base = [
        Finding(
            "attnsweep", True, f"{__version__}, Python {platform.python_version()}", needed=False
        ),
        _pip(),
        _driver(cuda),
        _nvrtc(install, cuda),
    ]
    on_gpu = [
        _package(("cupy-cuda13x", "cupy-cuda12x", "cupy"), "CuPy", install, needed=True),
        Finding("GPU", False, "none without a driver") if cuda is None else _gpu(),
        _package(("nvidia-ml-py",), "NVML", install, needed=False),
        _package(("torch",), "PyTorch", install_command("torch"), needed=False),
        *(_baseline(name) for name in _BASELINES),
    ]
    if cuda is None:  # without a driver no package helps to use a GPU
        on_gpu = [replace(finding, fix=None, needed=False) for finding in on_gpu]
    extras = [
        _package(("nvidia-cuda-nvdisasm",), "nvdisasm", install_command("inspect"), needed=False),
        _package(("vl-convert-python",), "HTML page", install_command("html"), needed=False),
        _package(("junitparser",), "JUnit XML", install_command("ci"), needed=False),
    ]
    return [*base, *on_gpu, *extras, _cache()]


def why_no_compiling() -> str | None:
    """How to make `compile` work here, or None if it does: it needs NVRTC and a cache."""
    try:
        nvrtc_version()
    except AttnsweepError:
        return install_command("compile")
    return None if cache.fault(default_cache_dir()) is None else _CACHE_FIX


def verdict(findings: Sequence[Finding]) -> str:
    """One line: the things that this machine can do as it is."""
    if all(finding.ok for finding in findings if finding.needed):
        return "ready to measure"
    fix = why_no_compiling()
    if fix is None:
        return "cannot measure here; compile, report and replay work"
    return f"cannot measure here; report and replay work; for compile: {fix}"


def lines_of(rows: Sequence[Finding], width: int) -> list[Text]:
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


def without_gpu(
    error: NoGpuError,
    spec: Path,
    arch: str | None,
    kernels: Path | None,
    width: int,
    options: Sequence[str] = (),
) -> str:
    """Advice about the missing GPU, and the commands that work for this spec without one.

    options: what else was asked for, and the other commands take as well.
    """
    common = shlex.join([str(spec), "--arch", arch or "sm_90a", *options])
    if kernels is not None:
        common += f" --kernels {shlex.quote(str(kernels))}"
    rows = [
        ("attnsweep run quickstart", "replay a recorded run"),
        (f"attnsweep run --dry-run {common}", "count the candidates"),
        (f"attnsweep compile {common}", "compile, prune, resources"),
        ("attnsweep doctor", "what is missing, and how to fix it"),
    ]
    if (fix := why_no_compiling()) is not None:
        del rows[2]
        fix = f"To compile here, without a GPU: {fix}"
    return what_works([error.hint, fix], rows, width)


def _pip() -> Finding:
    """Whether the commands that fix something install into the Python that runs attnsweep."""
    missing = why_pip_misses()
    if missing is None:
        return Finding("pip", True, f"installs into {sys.prefix}", needed=False)
    return Finding("pip", False, *missing, needed=False)


def _driver(cuda: tuple[int, int] | None) -> Finding:
    if cuda is None:
        return Finding(
            "driver",
            False,
            "no NVIDIA driver (libcuda.so.1 cannot be loaded)",
            "install NVIDIA's driver, on a machine with its GPU",
        )
    detail = f"{driver_version() or 'present'}, supports CUDA {cuda[0]}.{cuda[1]}"
    if cuda < (12, 0):
        return Finding("driver", False, detail, "update it: attnsweep needs CUDA 12 (driver 525)")
    return Finding("driver", True, detail)


def _nvrtc(install: str, cuda: tuple[int, int] | None) -> Finding:
    try:
        version = nvrtc_version()
    except AttnsweepError as error:
        return Finding("NVRTC", False, error.what, install)
    detail = f"{version[0]}.{version[1]}"
    if cuda is not None and version[0] > cuda[0]:
        return Finding(
            "NVRTC", False, f"{detail}, but the driver loads only CUDA {cuda[0]} code", install
        )
    return Finding("NVRTC", True, detail)


def _gpu() -> Finding:
    try:
        found = described()
    except AttnsweepError as error:
        return Finding("GPU", False, error.what, error.hint)
    memory = found.memory_bytes / 2**30
    detail = f"{found.gpu}, {found.arch}, {found.sm_count} SMs, {memory:.0f} GiB"
    return Finding("GPU", True, detail)


# Baselines that packages of their own bring; the others come with PyTorch.
_BASELINES = ("cudnn", "triton_flash", "flash_attn_2", "flash_attn_3", "flash_attn_4")


def _baseline(name: str) -> Finding:
    package = BACKENDS[name].package
    installed = package.installed()
    if installed:
        return Finding(name, True, ", ".join(installed), needed=False)
    return Finding(name, False, "not installed", package.fix, needed=False)


def _package(names: tuple[str, ...], label: str, fix: str, *, needed: bool) -> Finding:
    installed = Package(names, fix).installed()
    if not installed:
        return Finding(label, False, "not installed", fix, needed)
    if label == "CuPy" and len(installed) > 1:
        both = " and ".join(installed)
        remedy = f"pip uninstall -y {' '.join(names)}; {fix}"
        return Finding(label, False, f"{both} overwrite each other", remedy, needed)
    return Finding(label, True, installed[0], needed=needed)


def _cache() -> Finding:
    path = default_cache_dir()
    why = cache.fault(path)
    if why is not None:
        return Finding("cache", False, f"{path} cannot be written ({why})", _CACHE_FIX)
    found = cache.entries(path)
    size = sum(entry.size_bytes for entry in found) / 2**20
    return Finding(
        "cache", True, f"{path}: {counted(len(found), 'cubin')}, {size:.0f} MiB", needed=False
    )

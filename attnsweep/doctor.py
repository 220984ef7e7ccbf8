"""What this machine can do: driver, GPU, NVRTC, CuPy, peers, cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from attnsweep import __version__
from attnsweep.compiler import default_cache_dir, nvrtc_version
from attnsweep.errors import AttnsweepError
from attnsweep.trial import Status
from attnsweep.workers import Worker, WorkerError, driver_version


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `attnsweep doctor`. `needed`: a GPU run cannot do without it."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    needed: bool = True


def examine() -> list[Finding]:
    """Every check in turn; none of them raises."""
    cuda = _driver_cuda()
    extra = "cuda12" if cuda is not None and cuda < (13, 0) else "cuda13"
    install = f"pip install 'attnsweep[{extra}]'"
    checks: list[Callable[[], Finding]] = [
        lambda: Finding(
            "attnsweep", True, f"{__version__}, Python {platform.python_version()}", needed=False
        ),
        lambda: _driver(cuda),
        lambda: _nvrtc(install, cuda),
        lambda: _package(("cupy-cuda13x", "cupy-cuda12x", "cupy"), "CuPy", install, needed=True),
        _gpu,
        lambda: _package(("nvidia-ml-py",), "NVML", install, needed=False),
        lambda: _package(("torch",), "PyTorch", "pip install 'attnsweep[torch]'", needed=False),
        lambda: _package(("flash-attn",), "flash_attn_2", "pip install flash-attn", needed=False),
        lambda: _package(
            ("flash-attn-3", "flash_attn_3"),
            "flash_attn_3",
            "build it from FlashAttention's hopper/ directory",
            needed=False,
        ),
        _cache,
    ]
    return [check() for check in checks]


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA the driver supports, or None without a driver."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value:
            return version.value // 1000, version.value % 1000 // 10
    return None


def _driver(cuda: tuple[int, int] | None) -> Finding:
    if cuda is None:
        return Finding(
            "driver",
            False,
            "no NVIDIA driver (libcuda.so.1 cannot be loaded)",
            "install NVIDIA's driver; on a machine without a GPU use `compile` and `replay` specs",
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
        with Worker(timeout_s=60) as worker:
            found = worker.describe()
    except AttnsweepError as error:
        return Finding("GPU", False, error.what, error.hint)
    except WorkerError as error:
        why = "did not answer" if error.status is Status.TIMEOUT else error.detail
        return Finding("GPU", False, why, "see that nvidia-smi works, then try again")
    memory = found.memory_bytes / 2**30
    detail = f"{found.gpu}, {found.arch}, {found.sm_count} SMs, {memory:.0f} GiB"
    return Finding("GPU", True, detail)


def _package(names: tuple[str, ...], label: str, fix: str, *, needed: bool) -> Finding:
    installed = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed.append(f"{name} {metadata.version(name)}")
    if not installed:
        return Finding(label, False, "not installed", fix, needed)
    if label == "CuPy" and len(installed) > 1:
        both = " and ".join(installed)
        remedy = f"pip uninstall -y {' '.join(names)}; {fix}"
        return Finding(label, False, f"{both} share one folder", remedy, needed)
    return Finding(label, True, installed[0], needed=needed)


def _cache() -> Finding:
    path = default_cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding(
            "cache",
            False,
            f"{path} cannot be written ({error.strerror})",
            "set ATTNSWEEP_CACHE_DIR to a writable directory",
        )
    entries = list(path.glob("*/*/*/stage.cubin"))
    size = sum(_size(entry) for entry in entries)
    return Finding(
        "cache", True, f"{path}: {len(entries)} cubins, {size / 2**20:.0f} MiB", needed=False
    )


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0

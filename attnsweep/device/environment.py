"""The machine's facts in a run besides the card's: driver, CPU and packages."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

from attnsweep.device.cards import text

# Packages whose versions a run records: they do the timing, or are baselines.
PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "numpy", "torch", "triton", "nvidia-cudnn-cu13"),
    *("flash-attn", "flash-attn-3", "fa3-fwd", "tokenspeed-fa3", "xformers"),
    *("flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend"),
)


def cpu_model() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """The NVIDIA driver's version from NVML, or None without nvidia-ml-py or a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # ImportError, or any of NVML's own errors
        return None


def installed_packages() -> dict[str, str]:
    """The version of each of PACKAGES that is installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

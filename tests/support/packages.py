"""Small tables of exported packages, without compiling."""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnsweep.core.layouts import DENSE, Padded
from attnsweep.core.problem import CAUSAL, FULL, Problem, Scores
from attnsweep.family.family import Config
from attnsweep.serve import export
from attnsweep.serve.runtime.families import WGMMA, WGMMA_BACKWARD, WIDE
from attnsweep.serve.runtime.table import (
    CUBINS,
    FORMAT,
    TABLE,
    Code,
    CompiledKernel,
    GpuKey,
    Guard,
    Table,
    TunedGpu,
    Winner,
)

H100 = GpuKey((9, 0), 132, 52428800)
H100_MEMORY = 3_352_320.0
"""Bytes in a microsecond, at most."""
_FIRST = {param.name: param.values[0] for param in WGMMA.kernel.params} | {"LSE": 0}


def label(**changes: int) -> str:
    """The label of a config of the family: its first values, but for these."""
    return Config(_FIRST | {"WARPGROUPS": 2, "NUM_STAGES": 2} | changes).label


PLAIN = CompiledKernel(64, "bf16", "full", label(), {})
SPLIT = replace(PLAIN, config=label(SPLITS=2, PDL=2))
_FIRST_BACKWARD = {param.name: param.values[0] for param in WGMMA_BACKWARD.kernel.params}
PLAIN_BACKWARD = CompiledKernel(*(64, "bf16", "full backward", Config(_FIRST_BACKWARD).label, {}, "flash_bwd_wgmma"))
_FIRST_WIDE = {param.name: param.values[0] for param in WIDE.kernel.params}
PLAIN_WIDE = CompiledKernel(512, "bf16", "full", Config(_FIRST_WIDE).label, {}, "flash_fwd_wide_wgmma")
RECOMPUTED = replace(PLAIN_BACKWARD, config=Config(_FIRST_BACKWARD | {"RECOMPUTE": 1}).label)


def with_config(kernel: CompiledKernel, **changes: int) -> CompiledKernel:
    """The kernel with another config."""
    return replace(kernel, config=Config({**kernel.values, **changes}).label)


def shape(
    batch: int = 1,
    heads: int = 4,
    seqlen: int = 256,
    *,
    heads_kv: int | None = None,
    seqlen_k: int | None = None,
    head_dim: int = 64,
    dtype: Any = "bf16",
    causal: bool = False,
    boolean: tuple[str, ...] | None = None,
    padded: bool = False,
    bias: tuple[str, ...] | None = None,
    head_dim_v: int | None = None,
) -> Problem:
    """A shape with the defaults of PLAIN. boolean, bias: of what a mask is its own; None: none.

    padded: its items have lengths, as those count that the device alone knows.
    """
    sizes = (batch, heads, heads_kv or heads, seqlen, seqlen_k or seqlen, head_dim)
    own = CAUSAL if causal else FULL
    mask = own if boolean is None else own.as_boolean(boolean)
    layout = Padded("right", 100) if padded else DENSE
    return Problem(*sizes, dtype, mask, layout, Scores(bias=bias), head_dim_v=head_dim_v)


def with_code(kernel: CompiledKernel, directory: Path) -> CompiledKernel:
    """The kernel with cubins of a few bytes on the disk, other ones for each stage."""
    (directory / CUBINS).mkdir(parents=True, exist_ok=True)

    def code(stage: str) -> Code:
        data = f"{kernel.config} {stage} {kernel.mask} {kernel.dtype}".encode()
        digest = hashlib.sha256(data).hexdigest()
        file = f"{digest[:16]}.cubin"
        (directory / CUBINS / file).write_bytes(data)
        suffix = "" if stage == "fwd" else f"_{stage}"
        return Code(file, digest, f"{kernel.family}{suffix}")

    if kernel.family == WGMMA_BACKWARD.kernel.name:
        first = ("queries", "keys") if kernel.values.RECOMPUTE else ("delta", "keys", "convert")
        return replace(kernel, stages={name: code(name) for name in first})
    if kernel.family == WIDE.kernel.name:
        names = ("fwd", "combine") if kernel.values.SPLITS > 1 else ("fwd",)
        return replace(kernel, stages={name: code(name) for name in names})
    scan: tuple[str, ...] = ("mask",) if kernel.values.ITEM_KEYS else ("mask", "order")
    scan = () if kernel.mask.split()[0] in ("full", "causal") else scan
    names = (*scan, "fwd", *(("combine",) if WGMMA.combines(kernel.values) else ()))
    return replace(kernel, stages={name: code(name) for name in names})


def winner(of: Problem, kernel: CompiledKernel = PLAIN, gain: float = 1.2, low: float | None = None) -> Winner:
    """A winner whose kernel is made for the shape's head_dim, dtype and mask."""
    own = replace(kernel, head_dim=of.head_dim, dtype=of.dtype, mask=of.variant)
    return Winner(of, own, 10.0, 10.0 * gain, gain, gain if low is None else low)


def gpu(*winners: Winner, guard: Guard | None = None) -> TunedGpu:
    """An H100 with these winners. Their times are short, and served all the same."""
    guard = guard or Guard(short_us=0.0, scan_us=0.0)
    return TunedGpu(H100, ("NVIDIA H100 80GB HBM3",), guard, winners, H100_MEMORY)


def table(directory: Path, *winners: Winner) -> Table:
    """A table for an H100 whose kernels have cubins on the disk."""
    known = gpu(*(replace(w, kernel=with_code(w.kernel, directory)) for w in winners))
    return Table(directory, "0.0", "0" * 64, {H100: known})


def written(place: Path, name: str, *winners: Winner) -> Path:
    """A package on the disk, as `attnsweep export` writes it, with cubins of a few bytes."""
    directory = place / name
    for path, text in export.sources(name).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return tabled(directory, *winners)


def tabled(directory: Path, *winners: Winner) -> Path:
    """Write the table and the cubins of a package."""
    directory.mkdir(parents=True, exist_ok=True)
    made = table(directory, *winners).gpus[H100]
    kernels = [
        {"head_dim": k.head_dim, "dtype": k.dtype, "mask": k.mask, "config": number, "family": k.family}
        | {"stages": {name: code.sha256 for name, code in k.stages.items()}}
        for number, k in enumerate(winner.kernel for winner in made.winners)
    ]
    rows = [
        {"kernel": number, "problem": winner.problem.label, "others": []}
        | {name: getattr(winner, name) for name in ("time_us", "sdpa_us", "gain", "gain_low")}
        for number, winner in enumerate(made.winners)
    ]
    known: dict[str, Any] = {"names": made.names, "guard": asdict(made.guard), "winners": rows}
    known["memory_bytes_per_us"] = made.memory_bytes_per_us
    configs = [winner.kernel.config for winner in made.winners]
    raw = {"format": FORMAT, "attnsweep": "0.0", "configs": configs, "kernels": kernels}
    (directory / TABLE).write_text(json.dumps(raw | {"gpus": [H100._asdict() | known]}))
    return directory


def imported(place: Path, name: str, driver: Any, *winners: Winner) -> Any:
    """A package as a program imports it, for tensors of the CPU and this driver."""
    module = _imported(written(place, name, *winners))
    on_cpu(module, driver)
    return module


def package_of(place: Path, driver: Any, *winners: Winner) -> Any:
    """As `imported`, but its code is imported once for a process, which takes half a second."""
    module = _package()
    on_cpu(module, driver, tabled(place / "tuned", *winners))
    return module


@cache
def _package() -> Any:
    place = TemporaryDirectory()
    atexit.register(place.cleanup)
    return _imported(written(Path(place.name), "tuned"))


def _imported(directory: Path) -> Any:
    sys.path.insert(0, str(directory.parent))
    try:
        module: Any = importlib.import_module(directory.name)
    finally:
        sys.path.remove(str(directory.parent))
    assert Path(module.__file__).parent == directory
    return module


def on_cpu(module: Any, driver: Any, directory: Path | None = None) -> Any:
    """Have an imported package serve tensors of the CPU by this driver; returns its operator.

    The CPU counts as the first GPU of its table, if that has one. directory: of another table.
    """
    operator, table = (importlib.import_module(f"{module.__name__}.{name}") for name in ("operator", "table"))
    known = table.read_table(directory or Path(module.__file__).parent)
    made = operator.Operator(known, f"{module.__name__}_cpu", driver, devices=("cpu",))
    made.planner.gpus.update(enumerate([*known.gpus.values()][:1]))
    module.serve_by(made)
    return made

"""The families that a package serves, by their declarations: launches and rules on a shape."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnsweep.core.files import shipped
from attnsweep.core.hardware import ARCHS, Arch
from attnsweep.core.problem import LOG2E, Problem
from attnsweep.family.family import Config, Family, Launch
from attnsweep.family.launch import Arg, TensorMap


def _declared(name: str) -> Any:
    """The module of a declaration: its `kernel`, and what it says of a config."""
    path = shipped("kernels") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{__package__}.{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WGMMA = _declared("flash_fwd_wgmma")
WGMMA_BACKWARD = _declared("flash_bwd_wgmma")
WIDE = _declared("flash_fwd_wide_wgmma")
FP8 = _declared("flash_fwd_fp8_wgmma")
DECLARED: Mapping[str, Any] = {
    each.kernel.name: each for each in (WGMMA, WGMMA_BACKWARD, FP8, WIDE)
}
"""The declarations by the family's name."""
WITHOUT_RIVAL = (FP8.kernel.name,)
"""Families of calls that PyTorch's own attention does not compute."""
# Code for scales of heads also serves scales of tensors.
_SAME_CODE = {"e4m3_tensor": "e4m3"}
_CONTIGUOUS: Mapping[str, tuple[int, ...]] = {}
_ARCH = ARCHS[WGMMA.kernel.min_arch]


def family_of(problem: Problem) -> str:
    """Name of the family that a package calls for a problem."""
    own = [each.kernel for each in DECLARED.values() if problem.op.name in each.kernel.ops]
    takes = (e for e in own if problem.dtype in e.dtypes and problem.head_dim in e.head_dims)
    return str(next(takes, own[0]).name)


def has_rival(problem: Problem) -> bool:
    """Whether PyTorch's own attention computes such calls, so that winners are compared with it."""
    return family_of(problem) not in WITHOUT_RIVAL


def takes_strides(family: Family) -> bool:
    """Whether the template takes tensors of any strides, as models have them."""
    return any(stage.strided for stage in family.stages.values())


def kind_of_code(problem: Problem) -> tuple[int, str, str]:
    """head_dim, dtype and kind of mask of the code of a problem: see `Problem.variant`."""
    dtype = _SAME_CODE.get(problem.dtype, problem.dtype)
    return problem.head_dim, dtype, problem.variant


@functools.cache
def config_of(declaration: Any, label: str) -> Config:
    """The config of a label. Raises ValueError or LookupError for a label of another family."""
    family: Family = declaration.kernel
    texts = dict(part.split("=") for part in label.split())
    values = {param.name: int(texts.pop(param.name)) for param in family.params}
    faults = [fault for p in family.params if (fault := p.why_not(values[p.name])) is not None]
    if texts or faults:
        raise ValueError("; ".join(faults) or f"{family} has no {', '.join(texts)}")
    return Config(values)


def has_lse(variant: str) -> bool:
    """Whether code of a `Problem.variant` writes the log-sum-exp, in the calls that want it.

    A backward has none, and PyTorch records the gradients, if any are recorded, of packed
    sequences, of masks, and of changed scores.
    """
    kind, *others = variant.split()
    changed = {"backward", "bias", "sinks", "softcap"} & {*others}
    return kind not in ("packed", "boolean") and not changed


@functools.cache
def arch_of(sm_count: int) -> Arch:
    """The architecture of a card."""
    return replace(_ARCH, sm_count=sm_count)


def refused_by(declaration: Any, config: Config, problem: Problem, sm_count: int) -> str | None:
    """Name of the family's rule that a problem breaks, for a config that won another, or None."""
    family: Family = declaration.kernel
    refused = family.refused_on(config, problem, arch_of(sm_count))
    return refused or ("block_limits" if beyond_limits(declaration, config, problem) else None)


def beyond_limits(declaration: Any, config: Config, problem: Problem) -> bool:
    """Whether a grid is larger than CUDA's largest: all that `Family.excess` finds by shape."""
    grids = [launch.grid for launch in _launches(declaration, config, problem).values()]
    return any(x >= 2**31 or max(y, z) > 65535 for x, y, z in grids)


def rows_of(declaration: Any, config: Config, problem: Problem) -> tuple[Config, Problem]:
    """The config and the problem of the code that serves a call.

    Packed queries of grouped heads (PACK_GQA) lie one behind the other in a sweep's memory, but not
    in a model's. There q and o are viewed so that they are the queries of one head, and the code is
    that of such a call.
    """
    if not config.get("PACK_GQA"):
        return config, problem
    return Config({**config, "PACK_GQA": 0}), declaration.in_tiles(config, problem)


@functools.lru_cache(maxsize=64)
def _launches(declaration: Any, config: Config, problem: Problem) -> dict[str, Launch]:
    """The launches as they are declared. The export has looked for faults in them."""
    config, problem = rows_of(declaration, config, problem)
    stages = declaration.kernel.stages.values()
    found = [(stage.name, stage.launch(config, problem, _ARCH)) for stage in stages]
    return {name: launch for name, launch in found if launch is not None}


def launches(
    declaration: Any,
    config: Config,
    problem: Problem,
    scale: float,
    *,
    lse: bool = False,
    strides: Mapping[str, tuple[int, ...]] = _CONTIGUOUS,
    mask_strides: tuple[int, ...] = (),
    bias_rows: int = 0,
    raw_scale: bool = False,
) -> dict[str, Launch]:
    """The launches of one attention call, by stage, in order; first those that scan its mask.

    scale: of the scores. lse: whether the kernel writes or reads the log-sum-exp, float32 (batch,
    heads, seqlen_q), contiguous; otherwise its pointer is null, named ``. strides: elements from
    batch to batch, head to head and row to row of each tensor that a stage's `strided` names, as
    `rows_of` has it, for code that was compiled with STRIDED. mask_strides: the same of a mask, in
    bytes, and from key to key. bias_rows: of a bias; one is for all queries. raw_scale: whether
    launches also have the scale itself and its inverse; a forward may have a softcap like these.
    """
    scales = {problem.scale * LOG2E: scale * LOG2E}
    if raw_scale:
        scales |= {problem.scale: scale, 1 / problem.scale: 1 / scale}

    def here(arg: Arg) -> Arg:
        if isinstance(arg, float):
            return scales.get(arg, arg)
        if isinstance(arg, TensorMap) and arg.buffer == "bias" and bias_rows == 1:
            return replace(arg, box=(arg.box[0], 1, *arg.box[2:]))
        return "" if arg == "lse" and not lse else arg

    made: dict[str, Launch] = {}
    _, rows = rows_of(declaration, config, problem)
    for name, launch in _launches(declaration, config, problem).items():
        args = [here(arg) for arg in launch.args]
        # The first one follows a launch of PyTorch's, which lets nobody begin early.
        behind = any(each.once == launch.once for each in made.values())
        programmatic = launch.programmatic and behind
        if launch.once:
            if mask_strides and "mask" in args:
                args[-4:] = mask_strides
            made[name] = replace(launch, args=tuple(args), programmatic=programmatic)
            continue
        if bias_rows and name == "fwd":
            args[-1] = int(bias_rows > 1)
        for each in declaration.kernel.stages[name].strided if strides else ():
            args += strides[each][:3] if each in strides else [getattr(rows, each)]
        made[name] = replace(launch, args=tuple(args), programmatic=programmatic)
    return made


def workspaces(declaration: Any, config: Config, problem: Problem) -> Mapping[str, int]:
    """Floats of each workspace by name, but for the log-sum-exp."""
    sizes: Mapping[str, int] = declaration.kernel.workspace_of(
        *rows_of(declaration, config, problem)
    )
    return {name: size // 4 for name, size in sizes.items() if name != "lse"}

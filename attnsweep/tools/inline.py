"""Families of the user's own: of one kernel in Python (attnsweep.tune), or written by `init`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnsweep.compile.nvrtc import default_cache_dir
from attnsweep.core.errors import KernelError
from attnsweep.core.files import shipped
from attnsweep.core.hardware import Arch
from attnsweep.core.ops import ORDERS
from attnsweep.core.problem import SIZES, Problem, Value
from attnsweep.family.family import Config, Family, Launch, Param, Rule

NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|__launch_bounds__\s*\([^)]*\)|\\\n", re.DOTALL)
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(([^)]*)\)')
_NAMES = {name: name for name in (*SIZES, "value_dim", "scale")} | {"seqlen": "seqlen_q"}
"""What stands for a number of the problem, and its attribute."""

Given = int | float | str | Callable[[Config, Problem], Any]
"""A number; a parameter's, a size's or a buffer's name; or a function of config and problem."""


def family_of(
    source: str | Path,
    problems: Sequence[Problem],
    *,
    params: Mapping[str, Sequence[Value]],
    args: Sequence[Given] | None,
    grid: Sequence[Given] | Callable[[Config, Problem], Any],
    threads: Given,
    smem_bytes: Given,
    rules: Mapping[str, Rule],
    **declared: Any,
) -> Family:
    """The family of the one kernel in `source`, CUDA text or its file, for such problems.

    args: default: what the kernel's parameters are called. Raises KernelError.
    """
    path = Path(str(source)) if "__global__" not in str(source) else None
    try:
        text = str(source) if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "give CUDA source, or the path of a .cu file"
        raise KernelError(
            f"cannot be read: {error.strerror}", where=str(path), hint=hint
        ) from error
    name, names = kernel_in(text)

    def each(fact: Callable[[Problem], Any]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(map(fact, problems)))

    facts: dict[str, Any] = {
        "masks": each(lambda p: p.mask.kind),
        "layouts": each(lambda p: p.layout.kind),
        "scores": tuple(dict.fromkeys(kind for p in problems for kind in p.scores.kinds)),
        "dtypes": each(lambda p: p.dtype),
        "head_dims": each(lambda p: p.head_dim),
        "head_dims_v": tuple(filter(None, each(lambda p: p.head_dim_v))),
        "ops": each(lambda p: p.op.name),
        "empty_rows": any(p.has_empty_rows or p.kind in _MAY_BE_EMPTY for p in problems),
    }
    own = tuple(Param(param, tuple(values), "") for param, values in params.items())
    kernel = Family(name, "tuned from Python", own, **facts | declared)
    if path is None:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = default_cache_dir() / "sources" / digest / f"{name}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    kernel.source = path.resolve()
    kernel.keep_if(*((f"rule_{n}", *rule) for n, rule in enumerate(rules.items())))
    # A partial has no line of its own, so that errors name the call of tune.
    given = names if args is None else list(args)
    kernel.stage("tuned")(partial(_launch, name, given, grid, threads, smem_bytes))
    kernel.finish()
    return kernel


def kernel_in(source: str) -> tuple[str, list[str]]:
    """The name of the one kernel in CUDA text, and what its parameters are called.

    Raises KernelError.
    """
    found = _KERNEL.findall(NOISE.sub(" ", source))
    if len(found) != 1:
        what = f"{len(found)} kernels in the source; it needs one"
        raise KernelError(what, hint='declare it as extern "C" __global__ void name(...)')
    name, parameters = found[0]
    return name, [re.split(r"\W+", p.strip())[-1] for p in parameters.split(",") if p.strip()]


_MAY_BE_EMPTY = ("padded", "packed", "boolean")


def _launch(
    function: str,
    args: Sequence[Given],
    grid: Sequence[Given] | Callable[[Config, Problem], Any],
    threads: Given,
    smem_bytes: Given,
    config: Config,
    problem: Problem,
    arch: Arch,
) -> Launch:
    def value(given: Any) -> Any:
        given = given(config, problem) if callable(given) else given
        if isinstance(given, str) and given in config:
            return config[given]
        return getattr(problem, _NAMES[given]) if given in _NAMES else given

    blocks = grid(config, problem) if callable(grid) else grid
    sizes = [value(size) for size in (blocks if isinstance(blocks, Sequence) else [blocks])]
    return Launch(
        function,
        tuple([*sizes, 1, 1][:3]),
        value(threads),
        tuple(map(value, args)),
        value(smem_bytes),
    )


_EXAMPLE = "naive"
# What the smallest family has otherwise where rows lie before heads.
_TURNED = {
    "(batch, heads, seqlen_q, HEAD_DIM)": "(batch, seqlen_q, heads, HEAD_DIM)",
    "(batch, heads_kv, seqlen_k, HEAD_DIM)": "(batch, seqlen_k, heads_kv, HEAD_DIM)",
    "static_cast<long long>(batch * heads_kv + head_kv) * seqlen_k *": (
        "(static_cast<long long>(batch) * seqlen_k * heads_kv + head_kv) *"
    ),
    "(static_cast<long long>(blockIdx.y) * seqlen_q + row)": (
        "((static_cast<long long>(batch) * seqlen_q + row) * heads + blockIdx.y % heads)"
    ),
    "static_cast<long long>(j) * HEAD_DIM": "static_cast<long long>(j) * heads_kv * HEAD_DIM",
}


def template(name: str, source: Path | None, order: str = ORDERS[0]) -> str:
    """The user's own text, or that of the smallest family under another name, for an order."""
    path = source or shipped("kernels") / f"{_EXAMPLE}.cu"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"cannot be read: {error}", where=str(path)) from error
    if source is None and order != ORDERS[0]:
        for one, other in _TURNED.items():
            text = text.replace(one, other)
    return text if source else re.sub(rf"\b{_EXAMPLE}\b", name, text)


def declaration(name: str, order: str = ORDERS[0]) -> str:
    """The declaration of the smallest family's copy."""
    own = (shipped("kernels") / f"{_EXAMPLE}.py").read_text(encoding="utf-8")
    return with_order(re.sub(rf"\b{_EXAMPLE}\b", name, own), order)


def with_order(text: str, order: str) -> str:
    """A declaration whose tensors have this order."""
    if order == ORDERS[0]:
        return text
    own = f'    order="{order}",  # tensors are (batch, seqlen, heads, head_dim)\n)\n\n\n@'
    return text.replace(")\n\n\n@", own, 1)

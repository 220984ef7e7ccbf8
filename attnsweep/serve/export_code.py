"""A winner's config compiled for a model: any strides, with and without the log-sum-exp."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from attnsweep.compile.cubin import check_arguments, functions
from attnsweep.compile.nvrtc import Compiler, Cubin, source_closure
from attnsweep.core.hardware import Arch, arch_named
from attnsweep.core.ops import FORWARD, of_heads
from attnsweep.core.problem import FULL, SIZES, Problem
from attnsweep.core.trial import Environment, Trial
from attnsweep.family.family import Config, Family
from attnsweep.serve.runtime import families
from attnsweep.serve.runtime.cost_model import FEW_QUERIES
from attnsweep.serve.runtime.table import GpuKey
from attnsweep.store.run import Run, environment_of

FAMILY = families.WGMMA.kernel.name
"""The family that a package calls for most problems."""
Families = Mapping[str, Family]
"""Families by name."""
CODE = 1
"""The revision of machine code in a table, raised when earlier code was wrong (absent: 0)."""
_WRONG_BEFORE = {
    1: ({"bias", "padded", "packed", "boolean"}, "finite masks, or NaN beyond an item's keys,")
}
"""By revision: the masks whose kernels were wrong before it, and what made them NaN."""

Strides = Mapping[str, tuple[int, int, int]]
"""Tensor to elements from batch to batch, head to head, and row to row."""


def wrong_kernels(table: Mapping[str, Any]) -> list[str]:
    """The faults of a package's kernels that later kernels correct; mostly none."""
    masks = {word for kernel in table.get("kernels", ()) for word in kernel["mask"].split()}
    later = ((code, of) for code, of in _WRONG_BEFORE.items() if code > table.get("code", 0))
    return [f"{what} give NaN in its kernels" for _, (wrong, what) in later if wrong & masks]


def order_of(problem: Problem) -> tuple[object, ...]:
    """A problem's place in a table: by its sizes, and those without a mask first."""
    sizes = (getattr(problem, name) for name in SIZES)
    return (*sizes, problem.dtype, *kind_of_mask(problem), problem.label)


def kind_of_mask(problem: Problem) -> tuple[bool, str]:
    """The kind of its mask, in the order of a table."""
    return problem.variant != "full", problem.variant


def contiguous(problem: Problem) -> Strides:
    """The strides of contiguous (batch, heads, seqlen, head_dim) tensors."""
    return {
        name: (heads * seqlen * head_dim, seqlen * head_dim, head_dim)
        for name, (_, heads, seqlen, head_dim) in of_heads(problem).items()
    }


def config_of(trial: Trial, family: Family) -> Config:
    """The family's own parameters, in declared order; LSE is chosen per call."""
    config = family.of_today(trial.config)
    own = {p.name: config[p.name] for p in family.params}
    return Config(own | ({"LSE": 0} if trial.problem.op == FORWARD else {}))


def is_one_call(trial: Trial, family: Family) -> bool:
    """Whether the time of a row is that of one launch for a whole call, of today's parameters."""
    whole = trial.time_us is not None and trial.schedule.get("chunks", 1) == 1
    return whole and family.changed_since(trial.config) is None


def why_not_today(best: Trial, family: Family, arch: Arch) -> str | None:
    """Why a package cannot hold a winner: its form, or what the family has become since."""
    if best.schedule.get("chunks", 1) > 1:
        return "its calls are cut into chunks"
    changed = family.changed_since(best.config)
    if changed is not None:
        return changed
    own = config_of(best, family)
    unpacked = why_unpacked(own, best.problem)
    if unpacked is not None:
        return unpacked
    refused = family.refusal(best.problem, arch) or family.refused_by(own, best.problem, arch)
    return f"today's rules refuse its config: {refused}" if refused else None


def why_unpacked(config: Config, problem: Problem) -> str | None:
    """Why a package cannot pack the grouped heads of a problem, if its config does.

    Packed rows are the queries of one head there (`families.rows_of`), so a mask would be another
    one, unless an item has one for all queries. With FEW_QUERIES or more, other kernels serve
    whatever lies in memory as models have it.
    """
    alike = problem.mask == FULL or config.get("ITEM_KEYS")
    if not config.get("PACK_GQA") or (problem.seqlen_q < FEW_QUERIES and alike):
        return None
    kind = f"fewer than {FEW_QUERIES} queries without a mask"
    return f"its config packs grouped heads (PACK_GQA=1), which a package does of {kind}"


@dataclass(frozen=True)
class Compiling:
    """One config on its way to a package.

    futures: by stage.
    """

    config: Config
    problem: Problem
    futures: Mapping[str, Future[Cubin]]

    def done(self) -> tuple[dict[str, str], dict[str, bytes], int]:
        """SHA-256 of each stage's cubin, cubins by file name, and bytes of all spills.

        Raises CompileError if a stage does not compile, or if a launch does not fit its template.
        """
        files: dict[str, bytes] = {}
        stages: dict[str, str] = {}
        spills = 0
        launches = families.launches(
            families.DECLARED[families.family_of(self.problem)],
            *(self.config, self.problem, self.problem.scale),
            lse=True,
            strides=contiguous(self.problem),
        )
        for name, future in self.futures.items():
            cubin = future.result()
            check_arguments(name, cubin, launches[name])
            spills += sum(f["spill_bytes"] for f in functions(cubin.log).values())
            data = cubin.path.read_bytes()
            stages[name] = hashlib.sha256(data).hexdigest()
            files[cubin_file(stages[name])] = data
        return stages, files, spills


def cubin_file(sha256: str) -> str:
    """The name of the file of a cubin of this SHA-256."""
    return f"{sha256[:16]}.cubin"


def source_digest(family: Family) -> str:
    """The SHA-256 of all text that the family's machine code is compiled of."""
    closure = sorted(source_closure(family.source).items())
    return hashlib.sha256(repr(closure).encode()).hexdigest()


def gpu_of(run: Run) -> tuple[GpuKey, Environment]:
    """The kind of GPU that a run was measured on. Raises StoreError if it does not say so."""
    environment = environment_of(run)
    capability = arch_named(environment.arch).compute_capability
    return GpuKey(capability, environment.sm_count, environment.l2_bytes), environment


def gpu_row(key: GpuKey, names: Iterable[str]) -> dict[str, Any]:
    """A GPU's facts in a table, without its winners."""
    return key._asdict() | {"names": sorted(names)}


def compile_for_models(
    family: Family, config: Config, problem: Problem, compiler: Compiler
) -> Compiling:
    """Start to compile a config for tensors with any strides, if its template takes them.

    See Compiling.done.
    """
    own, rows = families.rows_of(families.DECLARED[family.name], config, problem)
    strides = families.takes_strides(family)  # a call of a model, which may want the log-sum-exp
    lse = int(strides and families.has_lse(problem.variant))
    chosen = Config({**own, "LSE": lse}) if problem.op == FORWARD else own
    strided = {"STRIDED": "1"} if strides else {}
    launches = family.launches(chosen, rows, compiler.arch)
    futures = {
        name: compiler.submit(
            family.source, family.stages[name].defines(chosen, rows, launch) | strided
        )
        for name, launch in launches.items()
    }
    return Compiling(config, problem, futures)

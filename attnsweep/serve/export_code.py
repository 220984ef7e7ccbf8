"""A winner's config compiled for a model: any strides, with and without the log-sum-exp."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from attnsweep.compile.cubin import check_arguments, functions
from attnsweep.compile.nvrtc import Compiler, Cubin, source_closure
from attnsweep.core.hardware import Arch, arch_named
from attnsweep.core.ops import BACKWARD, FORWARD, Op
from attnsweep.core.problem import FULL, SIZES, Problem
from attnsweep.core.trial import Environment, Trial
from attnsweep.family.chunks import changed_since, of_today
from attnsweep.family.family import Config, Family
from attnsweep.serve.runtime import served
from attnsweep.serve.runtime.cost_model import FEW_QUERIES
from attnsweep.serve.runtime.table import GpuKey
from attnsweep.store.run import Run, environment_of

FAMILY = "flash_fwd_wgmma"
"""The family that a package can call: its template takes strides, and its launches are known."""
BACKWARD_FAMILY = "flash_bwd_wgmma"
"""The same of gradients."""
Families = Mapping[Op, Family]
"""The families that a package can call, by what they compute."""

Strides = Mapping[str, tuple[int, int, int]]
"""Tensor to elements from batch to batch, head to head, and row to row."""


def callable_of(families: Mapping[str, Family]) -> Families:
    """Those of all families that a package can call."""
    named = {FORWARD: FAMILY, BACKWARD: BACKWARD_FAMILY}
    return {op: families[name] for op, name in named.items() if name in families}


def order_of(problem: Problem) -> tuple[object, ...]:
    """A problem's place in a table: by its sizes, and those without a mask first."""
    sizes = (getattr(problem, name) for name in SIZES)
    return (*sizes, problem.dtype, *kind_of_mask(problem), problem.label)


def kind_of_mask(problem: Problem) -> tuple[bool, str]:
    """The kind of its mask, in the order of a table."""
    return problem.variant != "full", problem.variant


def contiguous(problem: Problem) -> Strides:
    """The strides of contiguous (batch, heads, seqlen, head_dim) tensors."""
    found = {}
    for tensor in ("q", "k", "v", "o", *(("do", "dq") if problem.op == BACKWARD else ())):
        _, heads, seqlen, head_dim = problem.shape_of(tensor)
        found[tensor] = (heads * seqlen * head_dim, seqlen * head_dim, head_dim)
    return found


def config_of(trial: Trial, family: Family) -> Config:
    """The family's own parameters, in declared order; LSE is chosen per call."""
    config = of_today(family, trial.config)
    own = {p.name: config[p.name] for p in family.params}
    return Config(own | ({"LSE": 0} if trial.problem.op == FORWARD else {}))


def time_of(trial: Trial) -> float:
    """Microseconds of a trial, or infinity if it was not timed."""
    return trial.time_us.median if trial.time_us is not None else float("inf")


def why_not_today(best: Trial, family: Family, arch: Arch) -> str | None:
    """Why a package cannot hold a winner: its form, or what the family has become since."""
    if best.schedule.get("chunks", 1) > 1:
        return "its calls are cut into chunks"
    changed = changed_since(family, Config(best.config))
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

    Packed rows are the queries of one head there (`served.rows_of`), so a mask would be another
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
        backward = self.problem.op == BACKWARD
        launches = served.launches(
            served.DECLARED[BACKWARD_FAMILY if backward else FAMILY],
            *(self.config, self.problem, self.problem.scale),
            lse=backward or served.has_lse(self.problem.variant),
            strides=contiguous(self.problem),
        )
        for name, future in self.futures.items():
            cubin = future.result()
            check_arguments(name, cubin, launches[name])
            spills += sum(f["spill_bytes"] for f in functions(cubin.log).values())
            stages[name], file, data = named(cubin)
            files[file] = data
        return stages, files, spills


def source_digest(*families: Family) -> str:
    """The SHA-256 of all text that the families' machine code is compiled of."""
    texts = {file: text for each in families for file, text in source_closure(each.source).items()}
    closure = sorted(texts.items())
    return hashlib.sha256(repr(closure).encode()).hexdigest()


def gpu_of(run: Run) -> tuple[GpuKey, Environment]:
    """The kind of GPU that a run was measured on. Raises StoreError if it does not say so."""
    environment = environment_of(run)
    capability = arch_named(environment.arch).compute_capability
    return GpuKey(capability, environment.sm_count, environment.l2_bytes), environment


def gpu_row(key: GpuKey, names: Sequence[str]) -> dict[str, Any]:
    """What a table says of a GPU, before its winners."""
    return key._asdict() | {"names": list(names)}


def named(cubin: Cubin) -> tuple[str, str, bytes]:
    """A cubin's SHA-256, its file's name in a package, and its bytes."""
    data = cubin.path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return digest, f"{digest[:16]}.cubin", data


def compile_for_models(
    family: Family,
    config: Config,
    problem: Problem,
    compiler: Compiler,
) -> Compiling:
    """Start to compile a config for tensors with any strides. See Compiling.done."""
    own, rows = served.rows_of(served.WGMMA, config, problem)
    lse = int(served.has_lse(problem.variant))
    chosen = Config({**own, "LSE": lse}) if problem.op == FORWARD else own
    launches = family.launches(chosen, rows, compiler.arch)
    futures = {
        name: compiler.submit(
            family.source, family.stages[name].defines(chosen, rows, launch) | {"STRIDED": "1"}
        )
        for name, launch in launches.items()
    }
    return Compiling(config, problem, futures)

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
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Trial
from attnsweep.family.chunks import changed_since, of_today
from attnsweep.family.family import Config, Kernel, Launch, TensorMap
from attnsweep.serve.runtime import launch as geometry
from attnsweep.serve.runtime.table import Code, GpuKey, Shape
from attnsweep.serve.runtime.table import Kernel as Compiled
from attnsweep.store.run import Run, environment_of

FAMILY = "flash_fwd_wgmma"
"""The family that a package can call: its template takes strides, and its launches are known."""

Strides = Mapping[str, tuple[int, int, int]]
"""Tensor to elements from batch to batch, head to head, and row to row."""


def shape_of(problem: Problem) -> Shape:
    """A problem as a table has it."""
    sizes = (problem.batch, problem.heads, problem.heads_kv, problem.seqlen_q, problem.seqlen_k)
    return Shape(*sizes, problem.head_dim, problem.dtype, problem.causal)


def contiguous(problem: Problem) -> Strides:
    """The strides of contiguous (batch, heads, seqlen, head_dim) tensors."""
    found = {}
    for tensor in ("q", "k", "v", "o"):
        _, heads, seqlen, head_dim = problem.shape_of(tensor)
        found[tensor] = (heads * seqlen * head_dim, seqlen * head_dim, head_dim)
    return found


def facts(
    family: Kernel,
    config: Config,
    problem: Problem,
    arch: Arch,
    stages: tuple[Mapping[str, Code], Mapping[str, Code]] = ({}, {}),
) -> Compiled:
    """What a table says of a config of FAMILY; its launches are worked out from this alone."""
    launches = family.launches(config, problem, arch)
    fwd, join = launches["fwd"], launches.get("combine")
    plain = Config({**config, "LSE": 0})
    return Compiled(
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        causal=problem.causal,
        block_m=64 * config.WARPGROUPS // config.KEY_GROUPS,
        block_n=config.BLOCK_N,
        key_groups=config.KEY_GROUPS,
        num_stages=config.NUM_STAGES,
        blocks_per_sm=config.BLOCKS_PER_SM,
        order=config.ORDER,
        persistent=config.PERSISTENT,
        splits=config.SPLITS,
        split_cluster=config.SPLIT_CLUSTER,
        cluster=config.CLUSTER,
        pdl=config.PDL,
        threads=fwd.threads,
        smem_bytes=fwd.smem_bytes,
        combine_threads=join.threads if join is not None else 0,
        config=plain.label,
        stages=stages,
    )


def config_of(trial: Trial, family: Kernel) -> Config:
    """The family's own parameters, in declared order; LSE is chosen per call."""
    config = of_today(family, trial.config)
    return Config({p.name: config[p.name] for p in family.params} | {"LSE": 0})


def why_not_today(best: Trial, family: Kernel, arch: Arch) -> str | None:
    """Why a package cannot hold a winner: its form, or what the family has become since."""
    if best.schedule.get("chunks", 1) > 1:
        return "its calls are cut into chunks"
    changed = changed_since(family, Config(best.config))
    if changed is not None:
        return changed
    own = config_of(best, family)
    if own.get("PACK_GQA"):
        return "its config packs grouped heads (PACK_GQA=1), which a package cannot: strides vary"
    refused = family.refusal(best.problem, arch) or family.refused_by(own, best.problem, arch)
    return f"today's rules refuse its config: {refused}" if refused else None


def launches_of(
    compiled: Compiled, problem: Problem, strides: Strides, *, lse: bool
) -> dict[str, Launch]:
    """The runtime's launches on tensors with these strides, as a family declares launches."""
    shape = shape_of(problem)
    calls = geometry.calls(compiled, shape, problem.scale, lse, strides["o"])

    def arg(given: geometry.Arg) -> str | int | float | TensorMap:
        if isinstance(given, geometry.Pointer):
            return given.buffer or "o"  # a null pointer has the size of any other
        if not isinstance(given, geometry.Map):
            return given
        batch, heads, seqlen, head_dim = problem.shape_of(given.buffer)
        of_batch, of_head, of_row = (2 * stride for stride in strides[given.buffer])
        return TensorMap(
            given.buffer,
            dims=(head_dim, seqlen, heads, batch),
            strides=(of_row, of_head, of_batch),
            box=(*given.box, 1, 1),
        )

    return {
        call.stage: Launch(
            function="flash_fwd_wgmma" + ("_combine" if call.stage == "combine" else ""),
            grid=call.grid,
            threads=call.threads,
            args=tuple(map(arg, call.args)),
            smem_bytes=call.smem_bytes,
            programmatic=call.programmatic,
        )
        for call in calls
    }


@dataclass(frozen=True)
class Compiling:
    """One config on its way to a package. futures: without and with the log-sum-exp, by stage."""

    family: Kernel
    config: Config
    problem: Problem
    arch: Arch
    futures: tuple[Mapping[str, Future[Cubin]], Mapping[str, Future[Cubin]]]

    def done(self) -> tuple[Compiled, dict[str, bytes], int]:
        """What the table says, cubins by file name, and bytes of spills of all stages.

        Raises CompileError if a stage does not compile, or if a launch does not fit its template.
        """
        files: dict[str, bytes] = {}
        stages: list[Mapping[str, Code]] = []
        spills = 0
        for lse, futures in enumerate(self.futures):
            compiled = facts(self.family, self.config, self.problem, self.arch)
            strides = contiguous(self.problem)
            launches = launches_of(compiled, self.problem, strides, lse=bool(lse))
            codes = {}
            for name, future in futures.items():
                cubin, launch = future.result(), launches[name]
                check_arguments(name, cubin, launch)
                spills += sum(f["spill_bytes"] for f in functions(cubin.log).values())
                data = cubin.path.read_bytes()
                code = Code(**named(data), function=launch.function)
                codes[name] = code
                files[code.file] = data
            stages.append(codes)
        done = facts(self.family, self.config, self.problem, self.arch, (stages[0], stages[1]))
        return done, files, spills


def source_digest(family: Kernel) -> str:
    """The SHA-256 of all text that the family's machine code is compiled of."""
    closure = sorted(source_closure(family.source).items())
    return hashlib.sha256(repr(closure).encode()).hexdigest()


def gpu_of(run: Run) -> tuple[GpuKey, Environment]:
    """The kind of GPU that a run was measured on. Raises StoreError if it does not say so."""
    environment = environment_of(run)
    capability = arch_named(environment.arch).compute_capability
    return GpuKey(capability, environment.sm_count, environment.l2_bytes), environment


def gpu_row(key: GpuKey, names: Sequence[str]) -> dict[str, Any]:
    """What a table says of a GPU, before its winners."""
    return key._asdict() | {"names": list(names)}


def named(data: bytes) -> dict[str, str]:
    """A cubin's file name and SHA-256, as Code has them."""
    digest = hashlib.sha256(data).hexdigest()
    return {"file": f"{digest[:16]}.cubin", "sha256": digest}


def compile_for_models(
    family: Kernel, config: Config, problem: Problem, compiler: Compiler
) -> Compiling:
    """Start to compile a config for tensors with any strides. See Compiling.done."""
    both = []
    for lse in (0, 1):
        chosen = Config({**config, "LSE": lse})
        launches = family.launches(chosen, problem, compiler.arch)
        both.append(
            {
                name: compiler.submit(
                    family.source,
                    family.stages[name].defines(chosen, problem, launch) | {"STRIDED": "1"},
                )
                for name, launch in launches.items()
            }
        )
    return Compiling(family, config, problem, compiler.arch, (both[0], both[1]))

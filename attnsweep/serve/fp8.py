"""FP8 winners of recorded runs on their way to a package: configs, machine code, the table's rows.

They need no time of PyTorch's own attention, which has no FP8 that they could be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attnsweep.choose.ranking import rank
from attnsweep.compile.cubin import check_arguments, functions
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import Arch, arch_named, arch_on
from attnsweep.core.problem import FULL, SCALE_BLOCK, Problem
from attnsweep.core.trial import OURS, Environment, Trial
from attnsweep.family.family import Config, Family
from attnsweep.serve.export_code import (
    config_of,
    gpu_row,
    kind_of_mask,
    named,
    order_of,
    source_digest,
    time_of,
    why_not_today,
)
from attnsweep.serve.runtime import served
from attnsweep.serve.runtime.table import GpuKey
from attnsweep.store.run import Run

FAMILY = "flash_fwd_fp8_wgmma"
"""The family whose FP8 kernels a package can call."""

CodeKey = tuple[object, ...]


@dataclass(frozen=True)
class Winner:
    """What a package takes of one FP8 problem of a run on one kind of GPU."""

    gpu: GpuKey
    problem: Problem
    config: Config
    time_us: float


@dataclass(frozen=True)
class Selected:
    """What a package takes of runs. codes: config and a problem of each machine code, in order.

    names: of the GPUs. spare: keys of the codes that serve where no winner may run.
    """

    winners: Sequence[Winner]
    names: Mapping[GpuKey, Sequence[str]]
    codes: Mapping[CodeKey, tuple[Config, Problem]]
    spare: Sequence[CodeKey]


NOTHING = Selected((), {}, {}, ())


def winners(
    run: Run, environment: Environment, key: GpuKey, family: Family, left_out: list[str]
) -> list[Winner]:
    """The ranking's winner of each FP8 problem of a run; why there is none goes to `left_out`.

    A spec's measure.max_error rules the ranking, as it does in a report.
    """
    found = []
    scaled = [trial for trial in run.trials if trial.problem.scaled]
    ranking, arch = rank(scaled, environment), arch_on(environment)
    for problem in dict.fromkeys(trial.problem for trial in scaled):
        rows = ranking[ranking["rank"].notna() & (ranking["problem"] == problem.label)]
        best = _best(rows, family)
        reason = _why_not(best, family, arch)
        if reason is not None or best is None or best.time_us is None:
            left_out.append(f"{problem.label} ({run.directory.name}): {reason}")
        else:
            found.append(Winner(key, problem, config_of(best, family), best.time_us.median))
    return found


def _best(rows: Any, family: Family) -> Trial | None:
    won = [t for t in rows.loc[rows["winner"], "trial"] if t.kernel == family.name]
    own = [t for t in rows["trial"] if t.provider == OURS and t.kernel == family.name]
    found: Trial | None = next(iter(won), None) or min(own, key=time_of, default=None)
    return found


def _why_not(best: Trial | None, family: Family, arch: Arch) -> str | None:
    if best is None or best.time_us is None:
        return f"no correct candidate of {FAMILY}, the family of a package's FP8 kernels"
    return why_not_today(best, family, arch)


def _scale_block(problem: Problem) -> int:
    return SCALE_BLOCK if problem.dtype == "e4m3_block" else 0


def _code_key(config: Config, problem: Problem) -> CodeKey:
    """What tells machine code from other. Scales of heads and of tensors have the same."""
    values = tuple(sorted((name, str(value)) for name, value in config.items()))
    return (problem.head_dim, kind_of_mask(problem), _scale_block(problem), values)


def select(found: Sequence[Winner], names: Mapping[GpuKey, set[str]], family: Family) -> Selected:
    """The fastest winner of each GPU and problem, and the machine code of all."""
    fastest: dict[tuple[GpuKey, Problem], Winner] = {}
    for winner in sorted(found, key=lambda w: (w.time_us, w.config.label), reverse=True):
        fastest[winner.gpu, winner.problem] = winner
    won = sorted(fastest.values(), key=lambda w: (w.gpu, order_of(w.problem)))
    codes: dict[CodeKey, tuple[Config, Problem]] = {}
    spare: dict[CodeKey, tuple[Config, Problem]] = {}
    kinds: dict[CodeKey, Winner] = {}
    for winner in won:
        key = _code_key(winner.config, winner.problem)
        codes.setdefault(key, (winner.config, winner.problem))
        kinds.setdefault(key[:3], winner)
    arch = arch_named(family.min_arch)
    for winner in kinds.values():
        for config, problem in spares(winner.config, winner.problem, family, arch):
            spare.setdefault(_code_key(config, problem), (config, problem))
    every = spare | codes
    return Selected(
        won,
        {key: sorted(names[key]) for key in sorted({winner.gpu for winner in won})},
        {key: every[key] for key in sorted(every, key=repr)},
        sorted(spare, key=repr),
    )


def spares(
    config: Config, problem: Problem, family: Family, arch: Arch
) -> list[tuple[Config, Problem]]:
    """Configs that the rules allow on nearly any shape, which round as `config` does if they can.

    Each with a problem where they hold: without a mask one config; with one, a config for calls of
    one block of queries, and one for longer ones. They have blocks of 64 queries, or where those
    do not fit (head_dim 256) of 128, which no rule allows for 64 queries or fewer.
    """
    for warpgroups in (1, 2):
        block_m = 64 * warpgroups
        lengths = [(block_m - 63, 0)] + ([(block_m + 1, 1)] if problem.mask != FULL else [])
        found = []
        for seqlen, order in lengths:
            small = replace(problem, seqlen_q=seqlen, seqlen_k=seqlen)
            small = replace(small, batch=1, heads=1, heads_kv=1)
            fixed = {"WARPGROUPS": warpgroups, "BLOCKS_PER_SM": 2 // warpgroups, "ORDER": order}
            fixed |= {"PINGPONG": 0, "PERSISTENT": 0, "PDL": 0, "NUM_STAGES": 2}
            for interval, block_n, v_stages in product(
                (config.INTERVAL, 64, 0), (96, 64), (config.V_STAGES, 1)
            ):
                tile = {"INTERVAL": interval, "BLOCK_N": block_n, "V_STAGES": v_stages}
                made = Config({**config, **fixed, **tile})
                if family.refused_by(made, small, arch) is None:
                    found.append((made, small))
                    break
        if len(found) == len(lengths):
            return found
    return []


# ---- machine code ----
def row(config: Config, problem: Problem, configs: Mapping[str, int]) -> dict[str, Any]:
    """What a table says of a config of FAMILY, but for its code. configs: numbers by label."""
    kind = {"head_dim": problem.head_dim, "mask": problem.kind}
    return kind | {"scale_block": _scale_block(problem), "config": configs[config.label]}


def compiled(
    selected: Selected,
    family: Family,
    compiler: Compiler,
    notes: list[str],
    configs: Mapping[str, int],
    tell: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Rows of the table's kernels, and cubins by file name; spills go to `notes`.

    configs: their numbers by label. tell: is called after each kernel. The machine code is that of
    a sweep: its tensors are contiguous. Raises CompileError.
    """
    asked = []
    for config, problem in selected.codes.values():
        launch = family.launches(config, problem, compiler.arch)["fwd"]
        defines = family.stages["fwd"].defines(config, problem, launch)
        asked.append((config, problem, compiler.submit(family.source, defines)))
    rows: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for config, problem, future in asked:
        cubin = future.result()
        launches = served.launches(served.FP8, config, problem, problem.scale)
        check_arguments("fwd", cubin, launches["fwd"])
        spills = sum(f["spill_bytes"] for f in functions(cubin.log).values())
        if spills:
            notes.append(f"{config.label}: {spills} bytes of spills")
        digest, file, data = named(cubin)
        files[file] = data
        rows.append(row(config, problem, configs) | {"code": digest})
        tell()
    return rows, files


def section(selected: Selected, family: Family, kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's part on FP8. source: a digest of the text its machine code is compiled of."""
    numbers = {key: number for number, key in enumerate(selected.codes)}
    return {
        "source": source_digest(family),
        "kernels": kernels,
        "gpus": [
            gpu_row(key, names)
            | {
                "winners": [
                    {
                        "problem": winner.problem.label,
                        "kernel": numbers[_code_key(winner.config, winner.problem)],
                        "time_us": round(winner.time_us, 4),
                    }
                    for winner in selected.winners
                    if winner.gpu == key
                ],
                "spare": [numbers[spare] for spare in selected.spare],
            }
            for key, names in selected.names.items()
        ],
    }

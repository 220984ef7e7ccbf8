"""`attnsweep verify`: kernels on the CPU, by a simulator that sees what a sanitizer sees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.text import Text

from attnsweep.cli import completion, options
from attnsweep.cli.app import GUARD, app, examples, print_result
from attnsweep.core.errors import KernelError, ToolchainError
from attnsweep.reports.terminal import counted, errors

if TYPE_CHECKING:
    from attnsweep.core.cases import Case
    from attnsweep.family.family import Config, Family


@app.command(
    rich_help_panel=GUARD,
    epilog=examples(
        "attnsweep verify naive",
        "attnsweep verify mine.py BLOCK_M=64 --causal --dtype bf16",
        "attnsweep verify mine --problem 1,2/1,97x161,64 --asan --seeds 8",
    ),
)
def verify(
    kernel: Annotated[
        Path,
        typer.Argument(
            metavar="KERNEL",
            help="A shipped family, a declaration (NAME.py), or a directory of them.",
            autocompletion=completion.families,
        ),
    ],
    config: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG", help="NAME=VALUE …; others have their first value."),
    ] = None,
    problem: Annotated[
        list[str] | None,
        typer.Option(
            "--problem", metavar="SHAPE", help="In place of the small cases; may be repeated."
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option("--head-dim", help="head_dim of the small cases (default: 64, or its least)."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="dtype of the small cases (default: its first).")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Mask every shape.")] = False,
    inputs: Annotated[
        str, typer.Option("--inputs", help="Inputs of --problem: normal, large_scores and so on.")
    ] = "normal",
    arch: Annotated[str, options.arch("One of {}.")] = "sm_90a",
    seeds: Annotated[
        int, typer.Option("--seeds", min=0, help="Random schedules, besides the two fixed ones.")
    ] = 0,
    asan: Annotated[
        bool, typer.Option("--asan", help="Build with g++'s address sanitizer; slower.")
    ] = False,
    json_: options.Json = False,
) -> None:
    """Run a kernel's template on the CPU, thread by thread, and report what is wrong; needs g++.

    Finds reads and writes out of bounds, with buffer, block and lane; deadlocks; races between
    threads; barriers and copies that are used wrongly; and results that are over the limits of
    error. Each finding is a paragraph. The exit code is 1 if there is one, 2 if a kernel
    cannot be built. It times nothing, and sees no PTX: a pass is no run on a GPU.
    """
    from attnsweep.core.hardware import arch_named
    from attnsweep.tools import simulator

    if simulator.COMPILER is None:
        raise ToolchainError("g++ is not installed", hint="apt install g++, or conda install gxx")
    families, target = _families(kernel), arch_named(arch)
    how: dict[str, Any] = {"arch": target, "asan": asan}
    how["schedules"] = (*simulator.SCHEDULES, *range(2, 2 + seeds))
    findings: list[dict[str, str]] = []
    ran, begin = 0, time.monotonic()
    with simulator.Simulator() as machine:
        for family in families:
            try:
                chosen = simulator.config_of(family, " ".join(config or ()))
            except simulator.SimtError as error:
                raise KernelError(str(error), where=family.declared_at) from error
            for case in _cases(family, problem or (), head_dim, dtype, causal, inputs):
                ran += 1
                said = _finding(machine, family, chosen, case, how)
                if said is None:
                    continue
                where = f"{family.name} {chosen.label}: {case.label}"
                findings.append(
                    {"kernel": family.name, "config": chosen.label} | {"case": case.label}
                )
                findings[-1]["finding"] = said
                if not json_:
                    print_result([Text(f"{where}:\n{said}\n")], None, False)
    found = counted(len(findings), "finding")
    last = f"{found} in {counted(ran, 'case')} of {counted(len(families), 'kernel')}"
    if json_:
        print_result([], {"cases": ran, "findings": findings}, True)
    errors.print(Text(f"{last}, {time.monotonic() - begin:.1f} s on the CPU"), soft_wrap=True)
    raise typer.Exit(1 if findings else 0)


def _finding(
    machine: Any, family: Family, config: Config, case: Case, how: dict[str, Any]
) -> str | None:
    """What is wrong with a case, or None. Raises KernelError if it cannot be built."""
    from attnsweep.tools.simulator import BuildError, SimtError

    try:
        found = machine.check(family, config, case, **how)
    except BuildError as error:
        hint = (
            "the simulator knows the headers of kernels/common and the family's own; it takes "
            "neither CUDA's headers, nor asm, nor static __shared__ arrays"
        )
        raise KernelError(str(error), where=str(family.source), hint=hint) from error
    except SimtError as error:
        refused = family.refused_by(config, case.problem, how["arch"])
        return f"{error}" + (f"\n(the rule {refused} refuses this config here)" if refused else "")
    return None if found.ok else f"wrong: {found}"


def _families(path: Path) -> list[Family]:
    """The families that are meant. Raises KernelError if there is none."""
    from attnsweep.family.discover import declarations, discover, load_kernel

    if path.suffix == ".py":
        return [load_kernel(path)]
    shipped = discover()
    if str(path) in shipped:
        return [shipped[str(path)]]
    if not path.is_dir():
        hint = f"there are {', '.join(shipped)}; or give a declaration NAME.py, or a directory"
        raise KernelError("no such kernel", where=str(path), hint=hint)
    return [load_kernel(each) for each in declarations(path)]


def _cases(
    family: Family,
    problems: Sequence[str],
    head_dim: int | None,
    dtype: str | None,
    causal: bool,
    inputs: str,
) -> Sequence[Case]:
    """The problems that are asked for, or the small cases that the family serves."""
    from attnsweep.core.cases import Case, Inputs, served_cases, small_cases
    from attnsweep.core.errors import SpecError
    from attnsweep.core.ops import OPS
    from attnsweep.core.problem import Problem
    from attnsweep.specs.shapes import read_shapes

    if inputs not in get_args(Inputs):
        raise SpecError(f"--inputs is one of {', '.join(get_args(Inputs))}, not {inputs!r}")
    dtype = dtype or family.dtypes[0]
    op = OPS[family.ops[0]]
    if problems:
        read = read_shapes(problems, dtype=dtype, causal=causal, option="--problem")
        return [Case(replace(each, op=op), inputs) for each in read]  # type: ignore[arg-type]
    dim = head_dim or (64 if 64 in family.head_dims else family.some_head_dims[0])
    whole = Problem(1, 8, 8, 1024, 1024, dim, dtype, causal=causal, op=op)  # type: ignore[arg-type]
    cases = served_cases(small_cases(whole), whole, family.serves)
    if not cases:
        what = "serves none of the small cases"
        raise KernelError(what, where=family.declared_at, hint="give --problem")
    return cases

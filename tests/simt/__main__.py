"""python -m tests.simt KERNEL 'NAME=VALUE …': one config of a family, on the CPU. See README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnsweep.core.cases import Case, served_cases, small_cases
from attnsweep.core.errors import AttnsweepError
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover, load_kernel
from attnsweep.family.family import Family

from .harness import SCHEDULES, BuildError, SimtError, Simulator, config_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simt", description=__doc__)
    parser.add_argument("kernel", help="a shipped family, or the path of a declaration")
    parser.add_argument("config", nargs="*", help="'BLOCK_M=64 …'; others: first value")
    parser.add_argument(
        "--problem",
        action="append",
        help="batch,heads[/heads_kv],seqlen_q[xseqlen_k],head_dim[/head_dim_v] as "
        "`(1,4/2,97x161,64)`, or six numbers batch,heads,heads_kv,seqlen_q,seqlen_k,"
        "head_dim; without it, the small cases",
    )
    parser.add_argument("--head-dim", type=int, default=64, help="of the small cases")
    parser.add_argument("--inputs", default="normal")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--asan", action="store_true", help="build with the address sanitizer")
    parser.add_argument("--seeds", type=int, default=0, help="random schedules, besides 0 and 1")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        path = Path(chosen.kernel)
        kernel = load_kernel(path) if path.suffix == ".py" else _shipped(chosen.kernel)
        config = config_of(kernel, " ".join(chosen.config))
        cases = _cases(chosen)
        if kernel.supports and not chosen.problem:
            cases = served_cases(cases, cases[2].problem, kernel.serves)
    except (SimtError, AttnsweepError) as error:
        print(error)
        return 2
    schedules = (*SCHEDULES, *range(2, 2 + chosen.seeds))
    arch = arch_named(chosen.arch)
    print(f"{kernel.name} {config.label}")
    failed = 0
    with Simulator() as simulator:
        for case in cases:
            refused = kernel.refused_by(config, case.problem, arch)
            note = f" (which the rule {refused} refuses)" if refused else ""
            begin = time.perf_counter()
            try:
                found = simulator.check(
                    kernel, config, case, arch=arch, asan=chosen.asan, schedules=schedules
                )
            except (BuildError, AttnsweepError) as error:
                print(error)
                return 2
            except SimtError as error:
                failed += 1
                print(f"FAILED {case.label}{note}:\n{error}")
                continue
            failed += not found.ok
            print(
                f"{'ok' if found.ok else 'WRONG':6} {case.label}{note}: {found}, "
                f"{time.perf_counter() - begin:.1f} s"
            )
    return 1 if failed else 0


def _shipped(name: str) -> Family:
    families = discover()
    if name not in families:
        raise SimtError(f"no family {name!r}: there are {', '.join(families)}, or a path to a .py")
    return families[name]


def _cases(chosen: argparse.Namespace) -> tuple[Case, ...]:
    facts = {"dtype": chosen.dtype, "causal": chosen.causal}
    if chosen.problem:
        return tuple(Case(_problem(text, facts), chosen.inputs) for text in chosen.problem)
    return small_cases(Problem(1, 8, 8, 1024, 1024, chosen.head_dim, **facts))


def _problem(text: str, facts: dict[str, object]) -> Problem:
    parts = text.strip("()").split(",")
    if len(parts) == 6:
        return Problem(*map(int, parts), **facts)  # type: ignore[arg-type]
    return replace(Problem.parse(text), **facts)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())

"""python -m tests.simt KERNEL 'NAME=VALUE …': one config of a family, on the CPU. See README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attnsweep.arch import arch_named
from attnsweep.errors import AttnsweepError
from attnsweep.kernel import Config, Kernel, Space, Value, discover, load_kernel
from attnsweep.numerics import Case, small_cases
from attnsweep.problem import Problem

from .harness import SCHEDULES, SimtError, Simulator


def config_of(kernel: Kernel, words: str) -> Config:
    """Every Param of the family: as `words` say, else its first value."""
    values: dict[str, Value] = {param.name: param.values[0] for param in kernel.params}
    for word in words.split():
        name, _, text = word.partition("=")
        if name not in values:
            raise SystemExit(f"{kernel.name} has no parameter {name}: it has {', '.join(values)}")
        values[name] = int(text) if text.lstrip("-").isdigit() else text
    return Config(values)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simt", description=__doc__)
    parser.add_argument("kernel", help="a shipped family, or the path of a declaration")
    parser.add_argument("config", nargs="?", default="", help="'BLOCK_M=64 …'; others: first value")
    parser.add_argument(
        "--problem",
        action="append",
        help="batch,heads[/heads_kv],seqlen_q[xseqlen_k],head_dim as `(1,4/2,97x161,64)`, or six "
        "numbers batch,heads,heads_kv,seqlen_q,seqlen_k,head_dim; without it, the small cases",
    )
    parser.add_argument("--head-dim", type=int, default=64, help="of the small cases")
    parser.add_argument("--inputs", default="normal")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--asan", action="store_true", help="build with the address sanitizer")
    parser.add_argument("--seeds", type=int, default=0, help="random schedules, besides 0 and 1")
    chosen = parser.parse_args(arguments)
    path = Path(chosen.kernel)
    kernel = load_kernel(path) if path.suffix == ".py" else discover()[chosen.kernel]
    config = config_of(kernel, chosen.config)
    facts = {"dtype": chosen.dtype, "causal": chosen.causal}
    if chosen.problem:
        cases = tuple(Case(_problem(text, facts), chosen.inputs) for text in chosen.problem)
    else:
        cases = small_cases(Problem(1, 8, 8, 1024, 1024, chosen.head_dim, **facts))
    schedules = (*SCHEDULES, *range(2, 2 + chosen.seeds))
    arch = arch_named(chosen.arch)
    print(f"{kernel.name} {config.label}")
    failed = 0
    with Simulator() as simulator:
        for case in cases:
            refused = kernel.refused_by(config, case.problem, arch)
            begin = time.perf_counter()
            try:
                found = simulator.check(
                    kernel, config, case, arch=arch, asan=chosen.asan, schedules=schedules
                )
            except (SimtError, AttnsweepError) as error:
                failed += 1
                print(f"FAILED {case.label}:\n{error}")
                continue
            failed += not found.ok
            note = f"; the rule {refused} refuses this config here" if refused else ""
            print(
                f"{'ok' if found.ok else 'WRONG':6} {case.label}: error {found.error:.2e}, "
                f"limit {found.limit:.2e}, {time.perf_counter() - begin:.1f} s{note}"
            )
    return 1 if failed else 0


def _problem(text: str, facts: dict[str, object]) -> Problem:
    parts = text.strip("()").split(",")
    if len(parts) == 6:
        return Problem(*map(int, parts), **facts)  # type: ignore[arg-type]
    batch, heads, seqlen, head_dim = parts
    heads_q, _, heads_kv = heads.partition("/")
    seqlen_q, _, seqlen_k = seqlen.partition("x")
    numbers = (batch, heads_q, heads_kv or heads_q, seqlen_q, seqlen_k or seqlen_q, head_dim)
    return Problem(*map(int, numbers), **facts)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())

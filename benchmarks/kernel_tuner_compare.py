"""Compare wall-clock from an empty cache: attnsweep, Kernel Tuner, and 100 ms for every candidate.

Usage: python benchmarks/kernel_tuner_compare.py [FILE.json] [--limit N]. Each tool tunes the same
configs of one kernel on one problem and one GPU, in a fresh process with empty caches of its own:

- attnsweep: `attnsweep run`, with its checks, race and finals, from its process's start to its end.
- kernel_tuner: brute force with the CuPy backend and its own settings (7 runs a config, no check of
  the output). It is given which configs exist, and their grid, threads, shared memory and macros.
  By itself it launches at most 48 KiB of dynamic shared memory, so the limit is raised for it;
  `beyond_48_kib` counts the configs that need this. Its time begins with its import.
- hundred_ms: all cores compile every config, then each one is timed for 100 ms.

--limit: the two others get this many configs, drawn evenly; attnsweep always does all. Their time
for all configs is then the time before the first config plus the rest in proportion, and marked
`extrapolated`. Kernel Tuner is no dependency of attnsweep: pip install kernel-tuner.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from setting import console, described, label_of, options, spec_of, write

from attnsweep import Config, Space, Worker, arch_named, builds, open_run, plan, winners

SPEC = """
name: compare
problems: [{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}]
kernels:
  flash_fwd_mma:
    BLOCK_M: [32, 64, 96, 128]
    BLOCK_N: [32, 48, 64, 96, 128, 192]
    NUM_WARPS: [2, 4, 8]
    NUM_STAGES: [1, 2, 3]
baselines: []
"""
HUNDRED_MS_US = 100_000.0
SMEM_WITHOUT_ASKING = 48 * 1024


def every_nth(configs: tuple[Config, ...], limit: int | None) -> tuple[Config, ...]:
    """`limit` of them, evenly spread; all of them without a limit."""
    if limit is None or limit >= len(configs):
        return configs
    return tuple(configs[number * len(configs) // limit] for number in range(limit))


def tunable(space: Space, configs: tuple[Config, ...], arch_name: str) -> dict[str, Any]:
    """The configs in Kernel Tuner's terms: parameters, valid combinations, and what each implies.

    `facts` holds grid, threads, smem_bytes and macros of each config by its values in the order of
    `params`. block_size_x is one of them, since that is where Kernel Tuner takes threads from.
    """
    kernel, problem, arch = space.kernel, space.problem, arch_named(arch_name)
    facts = {}
    for config in configs:
        ((name, launch),) = kernel.launches(config, problem, arch).items()
        defines = kernel.stages[name].defines(config, problem, launch)
        facts[(*config.values(), launch.threads)] = {
            "grid": launch.grid,
            "smem_bytes": launch.smem_bytes,
            "defines": defines,
        }
    names = (*configs[0], "block_size_x")
    params = {name: sorted({key[i] for key in facts}) for i, name in enumerate(names)}
    ((stage, launch),) = kernel.launches(configs[0], problem, arch).items()
    return {
        "params": params,
        "facts": facts,
        "macros": sorted(kernel.stages[stage].defines(configs[0], problem, launch)),
        "function": launch.function,
        "args": launch.args,
    }


def row(tool: str, wall_s: float, first_s: float, done: int, total: int) -> dict[str, Any]:
    """Row of a tool that took `wall_s`, of which `first_s` before its first config."""
    whole = done >= total
    each = (wall_s - first_s) / max(1, done)
    return {
        "tool": tool,
        "wall_s": round(wall_s, 2),
        "configs": done,
        "of": total,
        "extrapolated": not whole,
        "all_s": round(wall_s if whole else first_s + each * total, 2),
    }


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Each other tool's time for all configs as a multiple of attnsweep's.

    A tool that failed is left out: the time until then says nothing.
    """
    own = rows["attnsweep"]
    if own.get("failed"):
        return {}
    others = {name: r for name, r in rows.items() if r is not own and not r.get("failed")}
    return {name: round(r["all_s"] / own["all_s"], 2) for name, r in others.items()}


# -- the tools, each in a process of its own; each returns its row and what it found best ---------


def by_attnsweep(directory: Path, space: Space, arch: str, limit: int | None) -> dict[str, Any]:
    """`attnsweep run`, which does all."""
    del arch, limit
    command = [sys.executable, "-m", "attnsweep", "run", str(directory / "compare.yaml")]
    begun = time.monotonic()
    subprocess.run([*command, "--results", str(directory / "results")], check=True, stdout=subprocess.DEVNULL)
    wall_s, count = time.monotonic() - begun, len(space.configs)
    (found,) = (directory / "results").glob("*/compare")
    (won,) = winners(open_run(found))
    best_us = won.time_us.median if won.time_us else None
    return row("attnsweep", wall_s, 0.0, count, count) | {"best": Config(won.config).label, "best_us": best_us}


def by_kernel_tuner(directory: Path, space: Space, arch: str, limit: int | None) -> dict[str, Any]:
    """Kernel Tuner's brute force."""
    del directory
    given, begun = tunable(space, every_nth(space.configs, limit), arch), time.monotonic()

    import kernel_tuner
    from kernel_tuner.backends.cupy import CupyFunctions
    from kernel_tuner.observers.observer import BenchmarkObserver

    facts, names = given["facts"], tuple(given["params"])

    def of(params: Mapping[str, Any]) -> dict[str, Any]:
        return facts[tuple(params[name] for name in names)]

    def exists(params: Mapping[str, Any]) -> bool:  # Kernel Tuner reads the source of a lambda
        return tuple(params[name] for name in names) in facts

    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties

    def with_uuid(device: int) -> dict[str, Any]:
        # Kernel Tuner 1.5 expects 16 bytes; CuPy 14 ends them at the first zero byte.
        found = properties(device)
        return found | {"uuid": bytes(found["uuid"])[:16].ljust(16, b"\0")}

    cupy.cuda.runtime.getDeviceProperties = with_uuid
    compiled = CupyFunctions.compile

    def compile_and_allow(self: Any, instance: Any) -> Any:
        function = compiled(self, instance)
        smem_bytes = of(instance.params)["smem_bytes"]
        if smem_bytes > SMEM_WITHOUT_ASKING:
            function.max_dynamic_shared_size_bytes = smem_bytes
        return function

    CupyFunctions.compile = compile_and_allow
    first_s: list[float] = []

    class First(BenchmarkObserver):
        """Keeps when the first config is timed."""

        def before_start(self) -> None:
            first_s.append(time.monotonic() - begun)

        def get_results(self) -> dict[str, Any]:
            return {}

    problem = space.problem
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(problem.shape_of(name)).astype(np.float16) for name in "qkv"} | {
        "o": np.zeros(problem.shape_of("o"), np.float16)
    }
    kinds = {int: np.int32, float: np.float32}
    arguments = [tensors[arg] if isinstance(arg, str) else kinds[type(arg)](arg) for arg in given["args"]]
    results, _ = kernel_tuner.tune_kernel(
        given["function"],
        str(space.kernel.source),
        lambda params: of(params)["grid"],
        arguments,
        given["params"],
        grid_div_x=[],
        grid_div_y=[],
        grid_div_z=[],
        restrictions=exists,
        smem_args={"size": lambda params: of(params)["smem_bytes"]},
        defines={name: (lambda params, name=name: of(params)["defines"][name]) for name in given["macros"]},
        compiler_options=["-std=c++17", "-default-device", f"-I{space.kernel.source.parent}"],
        lang="CUPY",
        observers=[First()],
        quiet=True,
    )
    wall_s = time.monotonic() - begun
    timed = [r for r in results if isinstance(r["time"], float)]
    best = min(timed, key=lambda r: r["time"], default=None)
    found = {
        "failed_configs": len(facts) - len(timed),
        "beyond_48_kib": sum(f["smem_bytes"] > SMEM_WITHOUT_ASKING for f in facts.values()),
        "best": best and Config({n: best[n] for n in names[:-1]}).label,
        "best_us": best and 1e3 * best["time"],
    }
    return row("kernel_tuner", wall_s, min(first_s, default=wall_s), len(facts), len(space.configs)) | found


def by_hundred_ms(directory: Path, space: Space, arch: str, limit: int | None) -> dict[str, Any]:
    """Each config for 100 ms, one after the other."""
    begun = time.monotonic()
    # Everything is compiled whatever the limit, so that compiling is timed and not extrapolated.
    found = builds(spec_of(SPEC, directory, "compare"), arch=arch)
    first_s, chosen = time.monotonic() - begun, every_nth(tuple(found), limit)  # type: ignore[arg-type,type-var]
    times_us: dict[str, float] = {}
    with Worker(timeout_s=60) as worker:
        worker.open(space.problem, replay_us=1000.0, seed=0)
        for build in chosen:
            name = label_of(build)
            worker.add(name, build.candidate(), cold=False)
            spent_us, times = 0.0, []
            while spent_us < HUNDRED_MS_US:
                time_us, launched = worker.race(name, HUNDRED_MS_US / 10, "warm")
                spent_us += time_us * launched
                times.append(time_us)
            worker.drop(name)
            times_us[name] = statistics.median(times)
    # Configs of the same machine code are timed once, as in a sweep.
    total = len(space.configs)
    done = total if len(chosen) == len(found) else len(chosen) * total // len(found)
    best = min(times_us, key=lambda name: times_us[name])
    wall_s = time.monotonic() - begun
    return row("hundred_ms", wall_s, first_s, done, total) | {"best": best, "best_us": times_us[best]}


TOOLS = {"attnsweep": by_attnsweep, "kernel_tuner": by_kernel_tuner, "hundred_ms": by_hundred_ms}


def timed(tool: str, arch: str, limit: int | None) -> dict[str, Any]:
    """Run a tool in a fresh process with empty caches; its row."""
    with tempfile.TemporaryDirectory() as place:
        caches = {"ATTNSWEEP_CACHE_DIR": f"{place}/cubins", "CUPY_CACHE_DIR": f"{place}/cupy"}
        command = [sys.executable, __file__, f"{place}/{tool}.json", "--one", tool, "--arch", arch]
        command += [] if limit is None else ["--limit", str(limit)]
        done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return {"tool": tool, "failed": f"exit code {done.returncode}"}
        found: dict[str, Any] = json.loads(Path(f"{place}/{tool}.json").read_text())
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each tool and write the file."""
    parser = options(__doc__, "kernel_tuner.json")
    parser.add_argument("--limit", type=int, help="configs for kernel_tuner and hundred_ms")
    parser.add_argument("--one", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--arch", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    environment = None if asked.one else described()
    arch = asked.arch or environment.arch
    with tempfile.TemporaryDirectory() as place:
        (item,) = plan(spec_of(SPEC, Path(place), "compare"), arch=arch)
        (space,) = item.spaces
        if asked.one:
            write(asked.file, None, TOOLS[asked.one](Path(place), space, arch, asked.limit))
            return
    rows = {}
    for tool in TOOLS:
        rows[tool] = timed(tool, arch, asked.limit)
        console.print(rows[tool])
    result = {"space": SPEC, "configs": len(space.configs), "tools": rows}
    write(asked.file, environment, result | {"times_attnsweep": ratios(rows)})


if __name__ == "__main__":
    main()

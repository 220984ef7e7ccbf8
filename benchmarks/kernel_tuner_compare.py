"""Compare wall-clock from an empty cache: attnsweep, Kernel Tuner, and 100 ms for every candidate.

Usage: python benchmarks/kernel_tuner_compare.py [FILE.json] [--limit N] [--cap-s S] [--tools …]
Each tool tunes the same configs of one kernel on one problem and one GPU, in a fresh process with
empty caches of its own:

- attnsweep: `attnsweep run`, with its checks, race and finals, from its process's start to its end.
- kernel_tuner: brute force with the CuPy backend and its own settings (7 runs a config, no check of
  the output). It is given which configs exist, and their grid, threads, shared memory and macros.
  By itself it launches at most 48 KiB of dynamic shared memory, so the limit is raised for it;
  `beyond_48_kib` counts the configs that need this. Its time begins with its import.
- hundred_ms: all cores compile every config, then each one is timed for 100 ms.

--limit: the two others get this many configs, drawn evenly; attnsweep always does all. Their time
for all configs is then the time before the first config plus the rest in proportion, and marked
`extrapolated`. --cap-s: a tool is stopped after this many seconds, and its row says so. Kernel
Tuner is no dependency of attnsweep: pip install kernel-tuner.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import setting
from setting import console

from attnsweep import Config, Space, SweepSpec, Worker, arch_named, builds, open_run, plan, winners

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
TOOLS = ("attnsweep", "kernel_tuner", "hundred_ms")
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


def row(tool: str, wall_s: float, first_s: float, done: int, total: int, stopped: bool) -> dict[str, Any]:
    """Row of a tool that took `wall_s`, of which `first_s` before its first config."""
    whole = done >= total
    each = (wall_s - first_s) / max(1, done)
    return {
        "tool": tool,
        "wall_s": round(wall_s, 2),
        "configs": done,
        "of": total,
        "stopped_by_cap": stopped,
        "extrapolated": not whole,
        "all_s": round(wall_s if whole else first_s + each * total, 2),
    }


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Each other tool's time for all configs as a multiple of attnsweep's.

    A tool that failed is left out: the time until then says nothing.
    """
    own = rows["attnsweep"]
    if own.get("exit_code"):
        return {}
    others = {name: r for name, r in rows.items() if r is not own and not r.get("exit_code")}
    return {name: round(r["all_s"] / own["all_s"], 2) for name, r in others.items()}


# -- the tools, each in a process of its own --------------------------------------------------


def _say(**facts: Any) -> None:
    """Tell the parent what is done so far, so that a stopped tool still has a row."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _space(spec: SweepSpec, arch_name: str) -> Space:
    (item,) = plan(spec, arch=arch_name)
    (space,) = item.spaces
    return space


def _run_attnsweep(directory: Path, arch_name: str, limit: int | None, begun: float) -> None:
    del limit  # attnsweep does all
    spec = setting.spec_of(SPEC, directory, "compare")
    harness_s = time.monotonic() - begun
    _say(configs=0, harness_s=harness_s)
    command = [sys.executable, "-m", "attnsweep", "run", str(directory / "compare.yaml")]
    subprocess.run([*command, "--results", str(directory / "results")], check=True, stdout=subprocess.DEVNULL)
    ended = time.monotonic()
    (found,) = (directory / "results").glob("*/compare")
    run = open_run(found)
    (won,) = winners(run)
    counts: dict[str, int] = {}
    for trial in run.trials:
        counts[trial.status.value] = counts.get(trial.status.value, 0) + 1
    _say(
        configs=len(_space(spec, arch_name).configs),
        best=Config(won.config).label,
        best_us=won.time_us.median if won.time_us else None,
        statuses=counts,
        harness_s=harness_s + time.monotonic() - ended,
    )


def _run_kernel_tuner(directory: Path, arch_name: str, limit: int | None, begun: float) -> None:
    spec = setting.spec_of(SPEC, directory, "compare")
    space = _space(spec, arch_name)
    given = tunable(space, every_nth(space.configs, limit), arch_name)
    harness_s = time.monotonic() - begun

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
    done = [0]

    class Counts(BenchmarkObserver):
        """Tells the parent how far the tuner is."""

        def get_results(self) -> dict[str, Any]:
            done[0] += 1
            _say(configs=done[0])
            return {}

    problem = space.problem
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(problem.shape_of(name)).astype(np.float16) for name in "qkv"} | {
        "o": np.zeros(problem.shape_of("o"), np.float16)
    }
    kinds = {int: np.int32, float: np.float32}
    arguments = [tensors[arg] if isinstance(arg, str) else kinds[type(arg)](arg) for arg in given["args"]]
    _say(configs=0, harness_s=harness_s)
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
        observers=[Counts()],
        quiet=True,
    )
    timed = [r for r in results if isinstance(r["time"], float)]
    best = min(timed, key=lambda r: r["time"], default=None)
    _say(
        configs=len(facts),
        timed=len(timed),
        failed=len(facts) - len(timed),
        beyond_48_kib=sum(f["smem_bytes"] > SMEM_WITHOUT_ASKING for f in facts.values()),
        best=best and Config({n: best[n] for n in names[:-1]}).label,
        best_us=best and 1e3 * best["time"],
    )


def _run_hundred_ms(directory: Path, arch_name: str, limit: int | None, begun: float) -> None:
    del begun
    spec = setting.spec_of(SPEC, directory, "compare")
    # Everything is compiled whatever the limit, so that compiling is timed and not extrapolated.
    found = builds(spec, arch=arch_name)
    total = len(_space(spec, arch_name).configs)
    _say(configs=0, distinct=len(found))
    chosen = every_nth(tuple(found), limit)  # type: ignore[arg-type,type-var]
    best: tuple[float, str] | None = None
    with Worker(timeout_s=60) as worker:
        worker.open(spec.problems[0].problem, replay_us=1000.0, seed=0)
        for done, build in enumerate(chosen, 1):
            name = setting.label_of(build)
            worker.add(name, build.candidate(), cold=False)
            spent, times = 0.0, []
            while spent < HUNDRED_MS_US:
                time_us, launched = worker.race(name, HUNDRED_MS_US / 10, "warm")
                spent += time_us * launched
                times.append(time_us)
            worker.drop(name)
            middle = sorted(times)[len(times) // 2]
            best = min(best or (middle, name), (middle, name))
            # Configs of the same machine code are timed once, as in a sweep.
            _say(configs=total if done == len(found) else done * total // len(found))
    if best is not None:
        _say(
            configs=total if len(chosen) == len(found) else len(chosen) * total // len(found),
            best=best[1],
            best_us=best[0],
        )


RUN = {"attnsweep": _run_attnsweep, "kernel_tuner": _run_kernel_tuner, "hundred_ms": _run_hundred_ms}


def timed(tool: str, arch_name: str, limit: int | None, cap_s: float, total: int) -> dict[str, Any]:
    """Run a tool in a fresh process with empty caches; its row."""
    with tempfile.TemporaryDirectory() as place:
        caches = {"ATTNSWEEP_CACHE_DIR": f"{place}/cubins", "CUPY_CACHE_DIR": f"{place}/cupy"}
        command = [sys.executable, __file__, "--one", tool, "--arch", arch_name, "--place", place]
        command += [] if limit is None else ["--limit", str(limit)]
        begun = time.monotonic()
        command += ["--begun", repr(begun)]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | caches, start_new_session=True
        )
        facts: dict[str, Any] = {"configs": 0}
        first_s, stopped = None, threading.Event()

        def stop() -> None:
            stopped.set()
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started

        timer = threading.Timer(cap_s, stop)
        timer.start()
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    facts |= json.loads(line)
                    if first_s is None:
                        first_s = time.monotonic() - begun
        child.wait()
        wall_s = time.monotonic() - begun
        timer.cancel()
    done, harness_s = facts.pop("configs"), facts.pop("harness_s", 0.0)
    wall_s, first_s = wall_s - harness_s, max((first_s or 0.0) - harness_s, 0.0)
    failed = {} if stopped.is_set() or child.returncode == 0 else {"exit_code": child.returncode}
    return {**row(tool, wall_s, first_s, done, total, stopped.is_set()), **facts, **failed}


def main() -> None:
    """Time each tool and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("kernel_tuner.json"))
    parser.add_argument("--limit", type=int, help="configs for kernel_tuner and hundred_ms")
    parser.add_argument("--cap-s", type=float, default=180.0, help="for each tool")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--one", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--arch", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        RUN[arguments.one](arguments.place, arguments.arch, arguments.limit, arguments.begun)
        return
    with Worker(timeout_s=60) as worker:
        environment = worker.describe()
    with tempfile.TemporaryDirectory() as place:
        total = len(_space(setting.spec_of(SPEC, Path(place)), environment.arch).configs)
    rows = {}
    for tool in arguments.tools:
        rows[tool] = timed(tool, environment.arch, arguments.limit, arguments.cap_s, total)
        console.print("  ".join(f"{name} {value}" for name, value in rows[tool].items()))
    result: dict[str, Any] = {"space": SPEC, "configs": total, "tools": rows}
    if "attnsweep" in rows:
        result["times_attnsweep"] = ratios(rows)
    setting.write(arguments.file, environment, result)


if __name__ == "__main__":
    main()

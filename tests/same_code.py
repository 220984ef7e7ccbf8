"""Compares the machine code of two trees' kernels: python -m tests.same_code OLD_TREE [NEW_TREE].

Both trees are compiled with the NVRTC at hand: the winner of each family on each recorded problem,
and with --spread configs of every Hopper family that together take each value of its parameters.
Configs that need a parameter which the old tree has not are left out.
Prints each stage, and where two differ the registers, spilled bytes and instructions of both.
Exit code 1 if any differ.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from attnsweep.compile import sass
from attnsweep.compile.cubin import functions
from attnsweep.compile.nvrtc import Compiler, Cubin
from attnsweep.core.hardware import ARCHS, Arch, arch_named
from attnsweep.core.problem import Problem
from attnsweep.family.chunks import schedule_of
from attnsweep.family.discover import load_kernel
from attnsweep.family.family import Config, Kernel
from attnsweep.family.space import Space
from tests.simt.recorded import winners
from tests.simt.unusual import FLASH_FWD_WGMMA, THREE_KERNEL_WGMMA

ROOT = Path(__file__).resolve().parent.parent
TRIES = 3
# Values that no config of a default space has, next to those that cover the spaces.
UNUSUAL = {
    "flash_fwd_wgmma": FLASH_FWD_WGMMA,
    "three_kernel_wgmma": THREE_KERNEL_WGMMA,
}


@dataclass(frozen=True)
class Job:
    """A config of a family on a problem, and where it comes from."""

    source: str
    kernel: str
    config: Config
    problem: Problem
    arch: str = "sm_90a"


def recorded(families: dict[str, Kernel], results: Path) -> Iterator[Job]:
    """The first of each family in the ranking of each recorded problem."""
    for each in winners(families, results):
        yield Job(each.run, each.kernel, each.config, each.problem, each.arch)


def spread(families: dict[str, Kernel]) -> Iterator[Job]:
    """Configs of each Hopper family that together take every value in use, and unusual ones."""
    arch = ARCHS["sm_90a"]
    for kernel in families.values():
        if kernel.min_arch != arch.name:
            continue
        dims = kernel.some_head_dims
        base = Problem(1, 16, 16, 1024, 1024, dims[0], kernel.dtypes[0])
        for number, head_dim in enumerate(dims):
            for causal in (False, True):
                dtype = kernel.dtypes[(number + causal) % len(kernel.dtypes)]
                problem = replace(base, head_dim=head_dim, dtype=dtype, causal=causal)
                configs = Space.build(kernel, problem, arch).configs
                left = {item for config in configs for item in config.items()}
                while left and number < 2:
                    config = max(configs, key=lambda config: len(left & set(config.items())))
                    left -= set(config.items())
                    yield Job("spread", kernel.name, config, problem)
                for at in range(0, len(configs), len(configs) // 3 + 1):
                    yield Job("spread", kernel.name, configs[at], problem)
        first = {param.name: param.values[0] for param in kernel.params}
        for number, words in enumerate(UNUSUAL.get(kernel.name, ())):
            values = {name: int(value) for name, value in (w.split("=") for w in words.split())}
            problem = replace(base, dtype=kernel.dtypes[number % 2], causal="CLUSTER" not in words)
            yield Job("spread", kernel.name, Config(first | values), problem)


def says_more(job: Job, old: Kernel, new: Kernel) -> bool:
    """Whether the config needs a parameter that the old family has not, so that it has no code."""
    known = {param.name for param in old.params}
    return any(p.name not in known and job.config[p.name] != p.absent for p in new.params)


def stages(kernel: Kernel, job: Job, compiler: Compiler) -> dict[str, tuple[str, dict[str, str]]]:
    """Stage name to its function and its -D."""
    widest = schedule_of(kernel, job.config, job.problem).widest
    launches = kernel.launches(job.config, widest, compiler.arch)
    return {
        name: (launch.function, kernel.stages[name].defines(job.config, widest, launch))
        for name, launch in launches.items()
    }


@cache
def code(path: Path, digest: str) -> str:
    """The instructions of a cubin, kept next to it under the digest of the machine code."""
    kept = path.with_name(f"{digest}.sass")
    if not kept.is_file():
        command = [str(sass.nvdisasm()), "-c", "-hex", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # Instruction words alone: labels and section names say what the code does not.
        kept.write_text("\n".join(re.findall(r"/\* (0x[0-9a-f]{16}) \*/", text)))
    return kept.read_text()


def again(
    arch: Arch,
    defines: tuple[dict[str, str], dict[str, str]],
    old: dict[str, Kernel],
    new: dict[str, Kernel],
    name: str,
) -> bool:
    """Whether both trees give the same code in some of TRIES: of one source NVRTC gives several."""
    seen: tuple[set[str], set[str]] = (set(), set())
    for _ in range(TRIES):
        for which, tree in enumerate((old, new)):
            with TemporaryDirectory() as place:
                compiler = Compiler(arch, Path(place), threads=1)
                made = compiler.compile(tree[name].source, defines[which])
                seen[which].add(code(made.path, made.digest))
        if seen[0] & seen[1]:
            return True
    return False


def facts(cubin: Cubin, function: str) -> str:
    """Registers, spilled bytes and instructions of a stage."""
    found = functions(cubin.log)[function]
    count = sass.counts(cubin)[function]["instructions"]
    return f"{found['registers']} registers, {found['spill_bytes']} spilled, {count} instructions"


def main() -> int:
    """Compile both trees, compare, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--spread", action="store_true", help="also configs that were not recorded")
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    new = {kernel.name: kernel for kernel in discover_in(chosen.new)}
    old = {kernel.name: kernel for kernel in discover_in(chosen.old)}
    new = {name: kernel for name, kernel in new.items() if chosen.only in name and name in old}
    jobs = list(recorded(new, chosen.new / "results"))
    if chosen.spread:
        jobs += spread(new)
    jobs = [job for job in jobs if not says_more(job, old[job.kernel], new[job.kernel])]
    compilers = {
        name: Compiler(arch_named(name), threads=chosen.threads) for name in {j.arch for j in jobs}
    }
    asked, seen = [], set()
    for job in jobs:
        compiler = compilers[job.arch]
        for name, (function, defines) in stages(new[job.kernel], job, compiler).items():
            before = stages(old[job.kernel], job, compiler)[name][1]
            what = (job.kernel, job.arch, tuple(sorted(defines.items())))
            if what not in seen:
                seen.add(what)
                of_old = compiler.submit(old[job.kernel].source, before)
                asked.append((job, name, function, of_old, before, defines))
    differ = 0
    futures = [compilers[job.arch].submit(new[job.kernel].source, d) for job, *_, d in asked]
    for (job, stage, function, of_old, old_defines, defines), of_new in zip(
        asked, futures, strict=True
    ):
        was, now = of_old.result(), of_new.result()
        same = was.digest == now.digest or code(was.path, was.digest) == code(now.path, now.digest)
        same = same or again(arch_named(job.arch), (old_defines, defines), old, new, job.kernel)
        differ += not same
        print(f"{job.source} · {job.problem.label} · {job.kernel} · {stage} · ", end="")
        print("same" if same else f"DIFFERS · {job.config.label}", flush=True)
        if not same:
            print(f"    was {facts(was, function)}\n    now {facts(now, function)}", flush=True)
    print(f"{len(asked)} stages, {differ} differ")
    return 1 if differ else 0


def discover_in(tree: Path) -> list[Kernel]:
    """The families of a tree."""
    names = sorted((tree / "kernels").glob("*.py"))
    return [load_kernel(path) for path in names if not path.name.startswith("_")]


if __name__ == "__main__":
    sys.exit(main())

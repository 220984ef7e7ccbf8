"""Check that the recorded winners have the machine code that they had at a git revision.

Usage: python -m scripts.same_sass REVISION [--only FAMILY] [--few] [--spread] [--threads N]. It
compiles the kernels of both without a GPU, prints each stage, and, where two differ, registers,
spilled bytes and instructions of both. --few takes one config of each family, head_dim and mask.
Exit code 1 if any stage differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from elftools.elf.elffile import ELFFile

from attnsweep import find_runs
from attnsweep.compile import sass
from attnsweep.compile.cubin import functions
from attnsweep.compile.nvrtc import Compiler, Cubin
from attnsweep.core.hardware import ARCHS, Arch, arch_named
from attnsweep.core.ops import OPS
from attnsweep.core.problem import Problem
from attnsweep.family.chunks import schedule_of
from attnsweep.family.discover import load_kernel
from attnsweep.family.family import Config, Family
from attnsweep.family.space import Space
from tests.simt.recorded import RESULTS, winners_of
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


def recorded(families: dict[str, Family]) -> Iterator[Job]:
    """The first of each family in the ranking of each recorded problem."""
    for run in find_runs(RESULTS):
        for each in winners_of(run, families):
            yield Job(each.run, each.kernel, each.config, each.problem, each.arch)


def spread(families: dict[str, Family]) -> Iterator[Job]:
    """Configs of each Hopper family that together take every value in use, and unusual ones."""
    arch = ARCHS["sm_90a"]
    for kernel in families.values():
        if kernel.min_arch != arch.name:
            continue
        dims = kernel.some_head_dims
        op = OPS[kernel.ops[0]]
        base = Problem(1, 16, 16, 1024, 1024, dims[0], kernel.dtypes[0], op=op)
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


def says_more(job: Job, old: Family, new: Family) -> bool:
    """Whether it needs a parameter or a head_dim that the old family has not, and has no code."""
    known = {param.name for param in old.params}
    if job.problem.head_dim not in old.head_dims:
        return True
    if job.problem.head_dim_v and not old.head_dims_v:
        return True
    return any(p.name not in known and job.config[p.name] != p.absent for p in new.params)


def stages(kernel: Family, job: Job, compiler: Compiler) -> dict[str, tuple[str, dict[str, str]]]:
    """Stage name to its function and its -D."""
    widest = schedule_of(kernel, job.config, job.problem).widest
    launches = kernel.launches(job.config, widest, compiler.arch)
    return {
        name: (launch.function, kernel.stages[name].defines(job.config, widest, launch))
        for name, launch in launches.items()
    }


@cache
def code(path: Path) -> bytes:
    """The instructions of a cubin's functions."""
    with path.open("rb") as file:
        sections = ELFFile(file).iter_sections()
        return b"".join(each.data() for each in sections if each.name.startswith(".text."))


def again(
    arch: Arch,
    defines: tuple[dict[str, str], dict[str, str]],
    old: dict[str, Family],
    new: dict[str, Family],
    name: str,
) -> bool:
    """Whether both trees give the same code in some of TRIES: of one source NVRTC gives several."""
    seen: tuple[set[bytes], set[bytes]] = (set(), set())
    for _ in range(TRIES):
        for which, tree in enumerate((old, new)):
            with TemporaryDirectory() as place:
                compiler = Compiler(arch, Path(place), threads=1)
                made = compiler.compile(tree[name].source, defines[which])
                seen[which].add(code.__wrapped__(made.path))
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
    parser.add_argument("revision")
    parser.add_argument("--few", action="store_true", help="one of each family, head_dim and mask")
    parser.add_argument("--spread", action="store_true", help="also configs that were not recorded")
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    with TemporaryDirectory() as place:
        archive = subprocess.check_output(["git", "archive", chosen.revision, "kernels"], cwd=ROOT)
        subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
        return compare(Path(place), chosen)


def compare(old_tree: Path, chosen: argparse.Namespace) -> int:
    """Compile what was chosen of the old tree and of this one; 1 if a stage differs."""
    old = {kernel.name: kernel for kernel in discover_in(old_tree)}
    new = {kernel.name: kernel for kernel in discover_in(ROOT) if kernel.name in old}
    new = {name: kernel for name, kernel in new.items() if chosen.only in name}
    jobs = list(recorded(new))
    if chosen.few:
        kinds = {(j.kernel, j.problem.head_dim, j.problem.causal, j.arch): j for j in jobs}
        jobs = list(kinds.values())
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
                of_new = compiler.submit(new[job.kernel].source, defines)
                asked.append((job, name, function, (before, defines), of_old, of_new))
    differ = 0
    for job, stage, function, defines, of_old, of_new in asked:
        was, now = of_old.result(), of_new.result()
        same = was.digest == now.digest or code(was.path) == code(now.path)
        same = same or again(arch_named(job.arch), defines, old, new, job.kernel)
        differ += not same
        print(f"{job.source} · {job.problem.label} · {job.kernel} · {stage} · ", end="")
        print("same" if same else f"DIFFERS · {job.config.label}", flush=True)
        if not same:
            print(f"    was {facts(was, function)}\n    now {facts(now, function)}", flush=True)
    print(f"{len(asked)} stages, {differ} differ")
    return 1 if differ else 0


def discover_in(tree: Path) -> list[Family]:
    """The families of a tree."""
    names = sorted((tree / "kernels").glob("*.py"))
    return [load_kernel(path) for path in names if not path.name.startswith("_")]


if __name__ == "__main__":
    sys.exit(main())

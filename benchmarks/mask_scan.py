"""Time what a boolean mask costs once: the scan of its bytes, and the list of tiles made from it.

Usage: python benchmarks/mask_scan.py [KERNELS ...]. Needs a Hopper GPU. KERNELS: directories with
another flash_fwd_wgmma.py, such as an older revision's; all are timed in turns.

Each round takes, in random order, a graph of scans and one of scans with their lists, one after the
other, of each directory: `warm` of one mask, `cold` of masks that together are three times the L2.
Times are medians, microseconds a mask; `list_us` is the median of what the list adds. `floor_us` is
the time of the mask's bytes at the memory's speed. `same`: bits and list are the first directory's.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from setting import console

from attnsweep import Build
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.files import shipped
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.device.buffers import Buffer
from attnsweep.device.cuda import CudaSession
from attnsweep.family.discover import load_kernel
from attnsweep.family.family import Config

ROUNDS, CALLS = 31, 24
NAME = "flash_fwd_wgmma.py"
CONFIG = {"BLOCK_N": 64, "WARPGROUPS": 2, "PERSISTENT": 132, "MAXIMA": 2}
# Each with the share of its keys that are hidden at random, so that no tile is seen whole.
MASKS = (
    ("(1,1,4096,128) bf16 boolean(causal)", 0.0),
    ("(1,1,4096,128) bf16 boolean(causal)", 0.1),
    ("(4,1,2048,128) bf16 boolean(causal,item)", 0.0),
    ("(32,1,512,128) bf16 boolean(full,item)", 0.0),
    ("(1,1,8192,128) bf16 boolean(causal)", 0.0),
    ("(2,16,2048,128) bf16 boolean(causal,item,head)", 0.0),
    ("(4,1,2047,128) bf16 boolean(causal,item)", 0.0),
)


class Scan:
    """The launches of one directory's scan on masks of a problem."""

    def __init__(self, session: CudaSession, compiler: Compiler, kernels: Path, problem: Problem) -> None:
        family = load_kernel(kernels / NAME)
        config = Config({p.name: p.values[0] for p in family.params} | CONFIG)
        build = Build.of(family, config, problem, compiler)
        build.submit()
        plan = build.launches_for(problem)
        self.session, self.stages = session, [s for s in plan.stages if s.launch.once]
        self.made = {name: Buffer(size) for name, size in plan.workspaces.items()}

    def graph(self, masks: list[Buffer], stages: int) -> Callable[[], None]:
        """CALLS times the first launches, each time of the next mask."""
        bound = [[self.session.bind(s, self.made | {"mask": mask}) for s in self.stages[:stages]] for mask in masks]

        def issue() -> None:
            for call in range(CALLS):
                for launch in bound[call % len(bound)]:
                    launch()

        return self.session.capture(issue)

    def result(self) -> tuple[bytes, list[bytes]]:
        """The bits of the last mask, and the entries of its list, sorted."""
        left = {name: np.empty(buffer.nbytes, np.uint8) for name, buffer in self.made.items()}
        self.session.synchronize()
        for name, array in left.items():
            self.made[name].download(array)
        self.session.synchronize()
        (work,) = (array for name, array in left.items() if name.startswith("work"))
        entries = work.view(np.int32).reshape(self.stages[0].launch.grid[1] * self.tiles, -1)
        for entry in entries:  # behind its tiles of keys nothing is written
            entry[4 + 4 * CONFIG["WARPGROUPS"] + entry[3] :] = 0
        return left["bits"].tobytes(), sorted(map(bytes, entries))

    @property
    def tiles(self) -> int:
        """Tiles of queries of a mask."""
        return -(-self.stages[0].launch.grid[0] // CONFIG["WARPGROUPS"])


def time_mask(session: CudaSession, compiler: Compiler, text: str, hidden: float) -> list[dict[str, Any]]:
    """A row of each directory."""
    problem = Problem.parse(text)
    shape = problem.shape_of("mask")
    drawn = np.random.default_rng(0)
    i, j = np.arange(shape[2])[:, None], np.arange(shape[3])
    seen = (i >= j) if "causal" in text else (j < 0.7 * shape[3]) | (i < 0)
    bits = np.broadcast_to(seen, shape) & (drawn.random(shape, np.float32) >= hidden)
    count = 3 * session.gpu.l2_bytes // bits.nbytes + 2
    masks = [Buffer(bits.nbytes) for _ in range(min(count, CALLS))]
    for mask in masks:
        mask.upload(np.ascontiguousarray(bits, np.uint8))
    found = {str(place): Scan(session, compiler, place, problem) for place in places()}
    graphs: dict[tuple[str, str, int], Callable[[], None]] = {}
    for place, scan in found.items():
        for kind, which in (("warm", masks[:1]), ("cold", masks)):
            graphs |= {(place, kind, stages): scan.graph(which, stages) for stages in (1, 2)}
    times: dict[tuple[str, str, int], list[float]] = {key: [] for key in graphs}
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for number in range(ROUNDS + 2):
        for key in random.sample([*graphs], len(graphs)):
            with session.stream:
                begin.record(session.stream)
                graphs[key]()
                end.record(session.stream)
            end.synchronize()
            if number > 1:
                times[key].append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / CALLS)
    first = next(iter(found.values())).result()
    floor = bits.nbytes / session.gpu.memory_bytes_per_second * 1e6
    rows = []
    for place, scan in found.items():
        row = {"mask": f"{text}, {hidden:.0%} hidden", "kernels": place, "floor_us": round(floor, 2)}
        for kind in ("warm", "cold"):
            alone, both = times[place, kind, 1], times[place, kind, 2]
            added = statistics.median(b - a for a, b in zip(alone, both, strict=True))
            row |= {
                f"{kind}_scan_us": round(statistics.median(alone), 2),
                f"{kind}_list_us": round(added, 2),
                f"{kind}_both_us": round(statistics.median(both), 2),
            }
        rows.append(row | {"same": scan.result() == first})
    return rows


def places() -> list[Path]:
    """The directories that are timed."""
    return [shipped("kernels"), *map(Path, sys.argv[1:])]


def main() -> None:
    """Time every mask, and print a row of each directory."""
    session = CudaSession()
    compiler = Compiler(ARCHS["sm_90a"])
    console.print(session.gpu)
    for text, hidden in MASKS:
        for row in time_mask(session, compiler, text, hidden):
            console.print(row)
        cupy.get_default_memory_pool().free_all_blocks()
    compiler.close()


if __name__ == "__main__":
    main()

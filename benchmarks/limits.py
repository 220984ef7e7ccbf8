"""Measure what the card's memories give: L2 reads and writes, device memory reads and copies.

Usage: python benchmarks/limits.py [FILE.json]. Bounds in reports that name a rate take it from the
file. A figure is the time that further passes over the same bytes add to a launch, so that
launching and ramping up are not in it, from the best of 20 graph replays of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attnsweep.build.launches import CompiledStage, Launches
from attnsweep.build.nvrtc import Compiler
from attnsweep.family.declare import Launch
from attnsweep.gpu.device import Buffer, Pipeline, Session
from attnsweep.gpu.worker import Worker
from attnsweep.hardware import arch_named
from attnsweep.problem import Problem
from attnsweep.show.terminal import console

SOURCE = Path(__file__).with_name("limits.cu")
MB = 10**6
# What is measured: function, bytes of one buffer, bytes moved for each of them.
CASES = {
    "l2_read": ("read_all", 32 * MB, 1),  # the scores of (1, 16, 1024, 64) are 33.5 MB
    "l2_write": ("write_all", 32 * MB, 1),
    "l2_copy": ("copy_all", 16 * MB, 2),
    "dram_read": ("read_all", 2000 * MB, 1),
    "dram_copy": ("copy_all", 2000 * MB, 2),
}


def main() -> None:
    """Measure, print, and write the file if one is named."""
    with Worker(timeout_s=60) as worker:
        here = worker.describe()
    compiler = Compiler(arch_named(here.arch))
    cubin = str(compiler.submit(SOURCE, {}).result().path)
    compiler.close()
    session = Session()
    rates = {}
    for name, (function, nbytes, times) in CASES.items():
        buffers = {"q": Buffer(nbytes), "o": Buffer(nbytes)}
        for buffer in buffers.values():
            buffer.poison()
        few, many = (1, 3) if name.startswith("dram") else (4, 36)
        best = 0.0
        for blocks_per_sm in (2, 3, 4):
            time_us = {}
            for passes in (few, many):
                grid = (here.sm_count * blocks_per_sm, 1, 1)
                launch = Launch(function, grid, 512, ("q", "o", nbytes // 16, passes))
                plan = Launches(
                    Problem(1, 1, 1, 1, 1, 64), (CompiledStage("s", cubin, launch),), {}
                )
                replay = Pipeline(session, plan, [buffers]).capture(4)
                replay()
                with session.stream:
                    time_us[passes] = min(session.time_us(replay) for _ in range(20)) / 4
            added = time_us[many] - time_us[few]
            best = max(best, nbytes * times * (many - few) / added * 1e6)
        rates[name] = best
        console.print(f"{name:10} {best / 1e12:6.2f} TB/s")
    if len(sys.argv) > 1:
        where = f"{here.gpu}, driver {here.driver}, {here.date[:10]}"
        facts = {"where": where, "rates": {n: round(rate, -9) for n, rate in rates.items()}}
        Path(sys.argv[1]).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

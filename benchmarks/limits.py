"""Measure how fast the card's L2 is read, written and copied in.

The bounds in reports that name a rate take it from the file. A rate follows from the time that
further passes over the same bytes add to a launch, so that launching and ramping up are not in it.
A time is the shortest of 20 replays of a graph.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from setting import described, options, write

from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import arch_named

SOURCE = Path(__file__).with_name("limits.cu")
MB = 10**6
# Name to function, bytes of one buffer, and bytes moved for each of them.
CASES = {
    "l2_read": ("read_all", 32 * MB, 1),  # the scores of (1, 16, 1024, 64) are 33.5 MB
    "l2_write": ("write_all", 32 * MB, 1),
    "l2_copy": ("copy_all", 16 * MB, 2),
}
FEW, MANY = 4, 36  # passes over a buffer
THREADS, LAUNCHES, REPLAYS, POISON = 512, 4, 20, 0xFF


def launch_us(stream: Any, function: Any, blocks: int, arguments: tuple[Any, ...]) -> float:
    """Time one launch: the shortest replay of a graph of several, in microseconds of each."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    stream.begin_capture()
    for _ in range(LAUNCHES):
        function((blocks, 1, 1), (THREADS, 1, 1), arguments)
    graph = stream.end_capture()
    graph.upload(stream)
    graph.launch(stream)
    times_us = []
    for _ in range(REPLAYS):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times_us.append(1e3 * cupy.cuda.get_elapsed_time(begin, end))
    return min(times_us) / LAUNCHES


def main() -> None:
    """Measure, and write the file if one is named."""
    asked, here = options(__doc__).parse_args(), described()
    with contextlib.closing(Compiler(arch_named(here.arch))) as compiler:
        module = cupy.RawModule(path=str(compiler.compile(SOURCE, {}).path))
    rates = {}
    for name, (function, nbytes, times) in CASES.items():
        kernel, best = module.get_function(function), 0.0
        with cupy.cuda.Stream(non_blocking=True) as stream:
            buffers = [cupy.cuda.alloc(nbytes) for _ in range(2)]
            for buffer in buffers:
                buffer.memset_async(POISON, nbytes)
            given = (*(np.uint64(buffer.ptr) for buffer in buffers), np.int32(nbytes // 16))
            for blocks in (2 * here.sm_count, 3 * here.sm_count, 4 * here.sm_count):
                few, many = (launch_us(stream, kernel, blocks, (*given, np.int32(n))) for n in (FEW, MANY))
                best = max(best, nbytes * times * (MANY - FEW) / (many - few) * 1e6)
        rates[name] = round(best, -9)
    where = f"{here.gpu}, driver {here.driver}, {here.date[:10]}"
    write(asked.file, None, {"where": where, "rates": rates})


if __name__ == "__main__":
    main()

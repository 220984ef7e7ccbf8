"""Problems, rows, runs and environments that several tests need."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Environment, Measurement, Resources, Status, Trial
from attnsweep.store.run import Run
from attnsweep.store.store import Store

H200 = Environment(
    gpu="NVIDIA H200",
    arch="sm_90a",
    driver="580.95.05",
    cuda="13.0",
    nvrtc="13.0",
    attnsweep="1.0",
    python="3.11",
    date="2026-07-26T10:00:00Z",
    host_cores=16,
    sm_count=132,
    clock_hz=1.98e9,
    memory_bytes=150 << 30,
    memory_bytes_per_second=4.8e12,
    l2_bytes=50 << 20,
)
TEST_GPU = H200.model_copy(update={"gpu": "NVIDIA Test 1", "date": "2026-01-01T00:00:00Z"})
"""The GPU of a sweep on FakeGpu: its run is in results/test-1."""
PROBLEM = Problem(4, 16, 16, 1024, 1024, 64)
NVRTC_LOG = """k.cu(3): warning #177-D: variable "a" was declared but never referenced
  int a;
      ^

k.cu(5): error: identifier "y" is undefined
      int x = y;
              ^

k.cu(6): error: identifier "foo" is undefined
      o[0] = foo(x);
             ^

2 errors detected in the compilation of "k.cu".
"""


def numbered(number: int, **changes: object) -> Trial:
    """A row that a store keeps, told from others by its BLOCK_M."""
    row = Trial(
        kernel="flash",
        provider="attnsweep",
        config={"BLOCK_M": number, "SWIZZLE": True, "LAYOUT": "row"},
        problem=Problem(1, 16, 16, 1024, 1024, 64),
        status=Status.OK,
        time_us=Measurement(median=7.5, low=7.4, high=7.6, samples=3, rounds=[7.4, 7.5, 7.6]),
        accuracy=Accuracy(rel_err=2.7e-4, limit=5.6e-4),
    )
    return row.with_(**changes)


def once(time_us: float) -> Measurement:
    """A time that was taken once."""
    return Measurement(median=time_us, low=time_us, high=time_us, samples=1)


def timed(rounds: Sequence[float], **changes: object) -> Measurement:
    """A time of these rounds."""
    ordered, count = sorted(rounds), len(rounds)
    low, high = ordered[count // 4], ordered[3 * count // 4]
    facts: Any = {"median": statistics.median(ordered), "low": low, "high": high, "samples": count}
    return Measurement(**facts, rounds=list(rounds)).model_copy(update=changes)


def built(name: str, kernel: str = "k") -> Any:
    """The part of a Build that a race and the finals need."""
    return SimpleNamespace(
        kernel=SimpleNamespace(name=kernel), config=SimpleNamespace(label=name), candidate=lambda: None
    )


def rounds_of(time_us: float, wobble: float = 0.01) -> Measurement:
    """Twelve rounds in one pattern: rows of different time are never a tie."""
    rounds = [time_us + wobble * (i % 4 - 1.5) for i in range(12)]
    return Measurement(median=time_us, low=time_us - wobble, high=time_us + wobble, samples=12, rounds=rounds)


def candidate(kernel: str, time_us: float | None, **config: int) -> Trial:
    return Trial(
        kernel=kernel,
        provider="attnsweep",
        config={**config},
        problem=PROBLEM,
        status=Status.OK,
        time_us=None if time_us is None else rounds_of(time_us),
        cold_us=None if time_us is None else time_us + 1,
        accuracy=Accuracy(rel_err=2.71e-4, limit=5.6e-4),
        resources=Resources(registers=168, spill_bytes=0, smem_bytes=98304, occupancy=0.25),
    )


def failed(kernel: str, status: Status, detail: str, **config: int) -> Trial:
    return candidate(kernel, None, **config).with_(status=status, detail=detail)


def unrecorded(kernel: str, **config: int) -> Trial:
    """What a replay says of a config that its recording does not hold."""
    return failed(kernel, Status.NO_RECORD, "not in results/h200", **config).with_(
        accuracy=None, resources=None, recorded=True, recorded_on="NVIDIA H200, 2026-07-26"
    )


def baseline(name: str, time_us: float) -> Trial:
    row = candidate(name, time_us)
    return row.with_(provider=name, resources=None, cold_us=None)


def full_run(directory: Path = Path("results/h200/h100"), **changes: object) -> Run:
    trials = [
        candidate("flash_fwd_wgmma", 30 + m / 64 + n / 100, BLOCK_M=m, BLOCK_N=n, NUM_WARPS=8)
        for m in (64, 128, 192)
        for n in range(16, 128, 16)
    ]
    fast = candidate("three_kernel_wgmma", 28.1, QK_BLOCK_M=128, PV_BLOCK_M=64, SOFTMAX_THREADS=128)
    trials += [
        fast.with_(stages_us={"qk": 10.1, "softmax": 9.0, "pv": 8.2}),
        candidate("three_kernel_wgmma", 33.3, QK_BLOCK_M=64, PV_BLOCK_M=64, SOFTMAX_THREADS=128),
        *(
            failed("flash_fwd_wgmma", Status.PRUNED, f"spills {n} bytes, the spec allows 0", BLOCK_M=n)
            for n in range(1, 7)
        ),
        failed("flash_fwd_wgmma", Status.PRUNED, "same machine code as flash BLOCK_M=64", BLOCK_M=9),
        *(
            failed("flash_fwd_wgmma", Status.WRONG, f"relative error {n}e-01 over the limit", BLOCK_M=n)
            for n in range(10, 14)
        ),
        failed("naive", Status.COMPILE_ERROR, "\nnaive.cu(3): error: no [bold] luck\nlots more"),
        failed("naive", Status.TIMEOUT, "no answer in 20 s", N=2),
        failed("naive", Status.LAUNCH_ERROR, "invalid argument", N=3),
        baseline("torch_cudnn", 57.4),
        baseline("unfused", 280.6),
        baseline("flash_attn_3", 1.0).with_(
            status=Status.SKIPPED, time_us=None, detail="FlashAttention-3 is not installed"
        ),
    ]
    facts = {"trials": trials, "environment": H200, "spec_text": None, "warnings": [], **changes}
    return Run(directory, **facts)  # type: ignore[arg-type]


def numbers(trials: list[Trial]) -> list[object]:
    """What `numbered` gave each of them."""
    return [row.config["BLOCK_M"] for row in trials]


def filled(directory: Path, count: int) -> Path:
    """The file of a run that has `count` rows."""
    with Store.open(directory) as store:
        for number in range(count):
            store.append(numbered(number))
    return directory / "trials.jsonl"

"""Rows of a problem in FP8, whose candidates differ in accuracy."""

from __future__ import annotations

from samples import baseline, candidate, full_run

from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Trial
from attnsweep.store.run import Run


def fp8_run() -> Run:
    """Four candidates that differ in accuracy, and a baseline."""
    problem = Problem(1, 16, 16, 4096, 4096, 128, "e4m3", causal=True)

    def row(us: float, error: float, **config: int) -> Trial:
        accuracy = Accuracy(rel_err=error, limit=0.1, timed_err=error, format_err=0.07, total_err=0.075)
        made = candidate("flash_fwd_fp8_wgmma", us, **config)
        return made.with_(problem=problem, accuracy=accuracy)

    other = baseline("flash_attn_3_fp8", 101.0)
    errs = Accuracy(rel_err=0.06, limit=0.1, timed_err=0.06)
    trials = [
        row(100.0, 0.05, INTERVAL=0, BLOCK_N=128),
        row(104.0, 0.026, INTERVAL=4, BLOCK_N=128),
        row(109.0, 0.027, INTERVAL=2, BLOCK_N=128),
        row(120.0, 0.02, INTERVAL=1, BLOCK_N=64),
        other.with_(problem=problem, accuracy=errs),
    ]
    return full_run(trials=trials)

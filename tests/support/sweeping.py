"""A spec of three candidates and two baselines, and what a fake GPU measures of them."""

from __future__ import annotations

from typing import Any

from attnsweep.core.trial import Trial

TIMES = {"THREADS=32": 30.0, "THREADS=64": 20.0, "THREADS=128": 40.0, "torch_flash": 25.0}

SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: 256, head_dim: 64}
kernels: {naive: {THREADS: [32, 64, 128]}}
baselines: [torch_flash, flash_attn_3]
measure: {rounds: 4}
"""


def by_config(outcome: Any) -> dict[Any, Trial]:
    """The rows of a sweep by the values of their config, or the provider of a baseline."""
    return {tuple(t.config.values()) or t.provider: t for t in outcome.run.trials}

"""A spec of three candidates and two baselines, and what a fake GPU measures of them."""

from __future__ import annotations

from typing import Any

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu

from attnsweep.core.observer import Observer
from attnsweep.core.trial import Trial
from attnsweep.sweep import session, start
from attnsweep.tools import target

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


class Notes(Observer):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def use_fake_compiler(patch: pytest.MonkeyPatch) -> None:
    """Have sweeps compile nothing."""
    patch.setattr(
        start, "compiler_for", lambda spec, arch, cache_dir: FakeCompiler(arch, cache_dir)
    )


def use(patch: pytest.MonkeyPatch, gpu: FakeGpu) -> FakeGpu:
    """Have sweeps and commands run on this GPU, and compile nothing."""
    patch.setattr(session, "Worker", gpu)
    patch.setattr(target, "Worker", gpu)
    use_fake_compiler(patch)
    return gpu

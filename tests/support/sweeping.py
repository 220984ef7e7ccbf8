"""A spec of three candidates and two baselines, and what a fake GPU measures of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu

from attnsweep.core.observer import Observer
from attnsweep.core.trial import Trial
from attnsweep.regress import live
from attnsweep.sweep import check_cards, session
from attnsweep.tools import compile as compile_tool
from attnsweep.tools import judge, target

FAMILIES = Path(__file__).parent.parent / "families"
TIMES = {"THREADS=32": 30.0, "THREADS=64": 20.0, "THREADS=128": 40.0, "torch_flash": 25.0}

SPEC = f"""
kernel_dir: {FAMILIES}
problems:
  - {{batch: 1, heads: 2, seqlen: 256, head_dim: 64}}
kernels: {{simple: {{THREADS: [32, 64, 128]}}}}
baselines: [torch_flash, flash_attn_3]
measure: {{rounds: 4}}
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


def compiler_for(spec: Any, arch: Any, cache_dir: Path | None = None) -> FakeCompiler:
    """A compiler for any spec, that compiles nothing."""
    return FakeCompiler(arch, cache_dir)


def use_fake_compiler(patch: pytest.MonkeyPatch) -> None:
    """Have commands compile nothing."""
    for place in (session, live, check_cards, compile_tool):
        patch.setattr(place, "compiler_for", compiler_for)
    FakeCompiler.as_new()


def use_gpu(patch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    """Have commands run on this GPU."""
    for place in (session, target, live, judge):
        patch.setattr(place, "Worker", gpu)
    for place in (session, compile_tool):
        patch.setattr(place, "installed_arch", lambda: gpu.installed)


def use(patch: pytest.MonkeyPatch, gpu: FakeGpu) -> FakeGpu:
    """Have commands run on this GPU, and compile nothing."""
    use_gpu(patch, gpu)
    use_fake_compiler(patch)
    return gpu

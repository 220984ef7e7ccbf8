"""Shared by the benchmarks: a console, a spec from text, and a result file with its origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from attnsweep import Build, Environment, SweepSpec, load_spec

RESULTS = Path(__file__).parent.parent / "results"
console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)


def spec_of(text: str, directory: Path, name: str = "bench") -> SweepSpec:
    """Write `text` as a spec to a directory, and read it."""
    path = directory / f"{name}.yaml"
    path.write_text(text)
    return load_spec(path)


def recorded(name: str, results: Path = RESULTS / "h200") -> Path:
    """Find a spec's recorded run: under its name, or under the one that the spec had before."""
    before = json.loads((RESULTS / "renamed.json").read_text())
    return results / (name if (results / name).is_dir() else before.get(name, name))


def label_of(build: Build) -> str:
    """Name a candidate as its row in a ranking does."""
    return f"{build.kernel.name} {build.config.label}"


def write(path: Path, environment: Environment, result: dict[str, Any]) -> None:
    """Write the result as JSON next to GPU, driver, versions and date; say where it lies."""
    facts = {"environment": environment.model_dump(mode="json"), **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"written: {path}")

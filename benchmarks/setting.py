"""What the benchmarks share: a spec's candidates compiled, and a result with where it is from."""

from __future__ import annotations

import json
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from attnsweep.build.candidate import Build, builds_of, compiled_row
from attnsweep.build.nvrtc import Compiler
from attnsweep.family.declare import discover
from attnsweep.hardware import arch_named
from attnsweep.show.terminal import console
from attnsweep.spec.load import SweepSpec, load_spec
from attnsweep.spec.plan import plan
from attnsweep.trial import Environment, Status


def spec_of(text: str, directory: Path, name: str = "bench") -> SweepSpec:
    """The spec written in `text`."""
    path = directory / f"{name}.yaml"
    path.write_text(text)
    return load_spec(path, discover())


def builds(spec: SweepSpec, compiler: Compiler, limit: int | None = None) -> list[Build]:
    """Every candidate of the spec's one problem that compiles and fits, one of each machine code.

    limit: of the first so many only.
    """
    (item,) = plan(spec, discover(), arch_named(compiler.arch.name))
    found = [b for space in item.spaces for b in builds_of(space, space.configs, compiler, None)]
    for build in found[:limit]:
        build.submit()
    for build in found[:limit]:
        wait(build.futures.values())
    distinct: dict[tuple[object, ...], Build] = {}
    for build in found[:limit]:
        if compiled_row(build, spec).status is Status.OK:
            distinct.setdefault(build.machine_code(), build)
    return list(distinct.values())


def write(path: Path, environment: Environment | None, result: dict[str, Any]) -> None:
    """The result as JSON beside GPU, driver, versions and date; and a line that says where."""
    where = environment.model_dump(mode="json") if environment else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": where, **result}, indent=1) + "\n")
    console.print(f"written: {path}")

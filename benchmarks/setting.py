"""Shared by the benchmarks: options, a console, a spec from text, a result file with its origin."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

import attnsweep
from attnsweep import Family, Status, Trial, load_spec, open_run
from attnsweep.bench.worker import Worker
from attnsweep.compile.calls import build_of, builds_of, tracers_of, with_calls
from attnsweep.compile.candidate import Build, compiled_row, workspace_limit
from attnsweep.compile.cubin import compiler_for
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import NoGpuError
from attnsweep.core.hardware import Arch, arch_named
from attnsweep.core.trial import Environment
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import plan

RESULTS = Path(__file__).parent.parent / "results"
console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)


def options(doc: str | None, *words: Any) -> argparse.ArgumentParser:
    """A parser that takes the file to write; its --help is the program's text.

    words: the name of a word that comes before the file, and its values.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    if words:
        parser.add_argument(words[0], choices=words[1])
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.json")
    return parser


def described() -> Environment:
    """GPU, driver, versions and date; without a GPU the program ends, and says so."""
    with Worker(timeout_s=60) as worker:
        try:
            return worker.describe()
        except NoGpuError as error:
            sys.exit(f"{error.render()}. Nothing was measured.")


def package_at(directory: Path | None) -> Any:
    """The package that `attnsweep export --out directory` wrote; None: what attnsweep comes with.

    Both have enable and counters.
    """
    if directory is None:
        return SimpleNamespace(enable=attnsweep.enable, counters=attnsweep.attention_counters)
    found = sorted(directory.glob("*/table.json"))
    if len(found) != 1:
        raise SystemExit(f"{directory}: is not what `attnsweep export --out` wrote")
    sys.path.insert(0, str(directory.resolve()))
    return importlib.import_module(found[0].parent.name)


def spec_of(text: str, directory: Path, name: str = "bench") -> SweepSpec:
    """Write `text` as a spec to a directory, and read it."""
    path = directory / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path)


def builds(spec: SweepSpec, arch: str, *, limit: int | None = None) -> list[Build]:
    """Compile a spec's candidates for a `Worker` to time: one build for each machine code.

    Candidates that do not compile, or that the spec's limits prune, are left out. limit: at most
    this many candidates per family and problem.
    """
    target = arch_named(arch)
    compiler = compiler_for(spec, target)
    spec = with_calls(spec, tracers_of(compiler))
    distinct: dict[tuple[object, ...], Build] = {}
    try:
        found = [
            build
            for item in plan(spec, target)
            for space in item.spaces
            for build in builds_of(
                space, space.configs[: limit or spec.search.candidates], compiler, workspace_limit(spec)
            )
        ]
        for build in found:
            build.submit()
        for build in found:
            if compiled_row(build, spec).status is Status.OK:
                distinct.setdefault((build.problem, *build.machine_code()), build)
    finally:
        compiler.close()
    return list(distinct.values())


def rebuild(trials: Iterable[Trial], kernels: Mapping[str, Family], arch: Arch) -> list[Build]:
    """Compile the configs of recorded rows from today's kernels, in the same order.

    A row is left out if its family is gone, has other parameters now, or cannot run the config on
    `arch`. A build whose code does not compile raises CompileError when it is used.
    """
    compiler, found = Compiler(arch), []
    try:
        for trial in trials:
            kernel = kernels.get(trial.kernel)
            if kernel is None or kernel.changed_since(trial.config) is not None:
                continue
            config, problem = kernel.of_today(trial.config), trial.problem
            if not (kernel.refusal(problem, arch) or kernel.refused_by(config, problem, arch)):
                found.append(build_of(kernel, config, problem, compiler))
                found[-1].submit()
        for build in found:
            wait(build.futures.values())
    finally:
        compiler.close()
    return found


def recorded(name: str) -> Path:
    """Find a spec's recorded run on an H200: under its name, or the one that the spec had before."""
    before = json.loads((RESULTS / "renamed.json").read_text(encoding="utf-8"))
    place = RESULTS / "h200" / name
    return place if place.is_dir() else place.with_name(before.get(name, name))


def recorded_on(directories: Iterable[Path]) -> str:
    """The GPUs of the runs, and the days on which they were recorded."""
    cards = (open_run(place).environment for place in directories if any(place.glob("trials.jsonl*")))
    return " and ".join(sorted({f"{card.gpu}, {card.date[:10]}" for card in cards if card}))


def label_of(build: Build) -> str:
    """Name a candidate as its row in a ranking does."""
    return f"{build.kernel.name} {build.config.label}"


def write(path: Path | None, environment: Environment | None, result: dict[str, Any]) -> None:
    """Write the result as JSON, next to where it was measured, if a file is named."""
    if path is None:
        return
    facts = {} if environment is None else {"environment": environment.model_dump(mode="json")}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts | result, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    console.print(f"written: {path}")


def write_rows(
    path: Path | None, environment: Environment | None, rows: Iterable[dict[str, Any]], key: str = "rows", **facts: Any
) -> None:
    """Print rows as they come, and write the file anew with each: an interrupted program has some."""
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        console.print(row)
        write(path, environment, facts | {key: found})

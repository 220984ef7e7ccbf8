"""Builds a family's stages with g++ and runs them on the CPU as fibers. See README.md."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from attnsweep.build.numerics import (
    HALF_ULP,
    Case,
    error_limit,
    from_bits,
    make_inputs,
    reference,
    row_error,
)
from attnsweep.family.declare import Config, Kernel, Launch, TensorMap
from attnsweep.hardware import ARCHS, Arch
from attnsweep.trial import Value

HERE = Path(__file__).parent / "cuda"
COMPILER = shutil.which("g++")
# The arch that every family runs on.
ARCH = ARCHS["sm_90a"]
FLAGS = ("-std=c++17", "-g1", "-fmax-errors=5")
# Registers that nothing wrote are no zeros; kernels look at bits through pointers of other types.
TEMPLATE_FLAGS = ("-O1", "-ftrivial-auto-var-init=pattern", "-fno-strict-aliasing")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr")
POISON = 0xFF
SCHEDULES = (0, 1)


class SimtError(Exception):
    """A run ended with a report, which this is."""


class BuildError(SimtError):
    """A template that g++ or the harness refuses."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one case: the largest error under any schedule, or the first too large."""

    case: Case
    error: float
    limit: float
    """Half an ulp, the least that it can be, if the error is no larger."""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def config_of(kernel: Kernel, words: str) -> Config:
    """Every Param of the family: as `words` say, else its first value."""
    values: dict[str, Value] = {param.name: param.values[0] for param in kernel.params}
    for word in words.split():
        name, _, text = word.partition("=")
        if name not in values:
            raise SimtError(f"{kernel.name} has no parameter {name}: it has {', '.join(values)}")
        values[name] = int(text) if text.lstrip("-").isdigit() else text
    return Config(values)


# PTX that a template writes itself, and its twin.
_RAW_PTX = (
    (
        re.compile(r'asm volatile\("bar\.sync %0, %1;" ::"r"\((.*?)\), "n"\((.*?)\) : "memory"\)'),
        r"simt_bar_sync(\1, \2)",
    ),
)
_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")


_INCLUDE = re.compile(r'^#include "([\w/]+\.cuh)"$', re.MULTILINE)


def template(kernel: Kernel) -> str:
    """The template's text, with the headers it includes that have no twin in place."""

    def included(match: re.Match[str]) -> str:
        if (HERE / match[1]).is_file():
            return match[0]
        text = (kernel.source.parent / match[1]).read_text().replace("#pragma once\n", "")
        line = match.string[: match.start()].count("\n") + 2
        return f'#line 1 "{match[1]}"\n{text}#line {line} "{kernel.source.name}"'

    return _INCLUDE.sub(included, kernel.source.read_text())


def _place(before: str, name: str) -> str:
    """file:line of what follows `before`, by the #line directives in it."""
    marks = list(re.finditer(r'^#line (\d+) "(.*)"\n', before, re.MULTILINE))
    if not marks:
        return f"{name}:{before.count(chr(10)) + 1}"
    last = marks[-1]
    return f"{last[2]}:{int(last[1]) + before[last.end() :].count(chr(10))}"


def translate(source: str, name: str) -> str:
    """The template as g++ takes it: dynamic shared memory is a pointer, raw PTX a call."""
    text = _SHARED.sub(r"\1* \2 = static_cast<\1*>(simt::dynamic_smem());", source)
    for pattern, twin in _RAW_PTX:
        text = pattern.sub(twin, text)
    code = re.sub(r"//.*", "", text)
    for word, advice in (
        (r"\basm\b", "PTX in a template: move it into kernels/common/ and give it a twin"),
        (r"__shared__", "static __shared__ has no twin: use dynamic shared memory"),
    ):
        found = re.search(word, code)
        if found:
            raise BuildError(f"{_place(code[: found.start()], name)}: {advice}")
    return text


class Simulator:
    """Builds, each once, and runs. `jobs` builds or runs go on at the same time."""

    def __init__(self, jobs: int = 2) -> None:
        self._place = TemporaryDirectory(prefix="attnsweep-simt-")
        self.root = Path(self._place.name)
        self._pool, self._callers = ThreadPoolExecutor(jobs), ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._built: dict[tuple[Any, ...], Future[Path]] = {}
        self._runs = 0

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Future[Any]]:
        """The function's result for each item; `jobs` at once, beside the builds they wait for."""
        return [self._callers.submit(function, item) for item in items]

    def close(self) -> None:
        """Stops, and removes all files."""
        self._callers.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        self._place.cleanup()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _once(self, key: tuple[Any, ...], build: Any, *args: Any) -> Future[Path]:
        with self._lock:
            if key not in self._built:
                self._built[key] = self._pool.submit(build, *args)
            return self._built[key]

    def _runtime(self, asan: bool) -> list[Future[Path]]:
        sources = sorted(HERE.glob("*.cpp"))
        return [self._once((path, asan), self._build_runtime, path, asan) for path in sources]

    def _build_runtime(self, source: Path, asan: bool) -> Path:
        made = self.root / f"{source.stem}{int(asan)}.o"
        flags = [*FLAGS, "-O2", "-Wall", "-Werror", *(["-fsanitize=address"] if asan else [])]
        _compile([*flags, "-c", str(source), "-o", str(made)])
        return made

    def _stage(
        self, kernel: Kernel, source: str, function: str, defines: Mapping[str, str], asan: bool
    ) -> Future[Path]:
        key = (source, function, tuple(defines.items()), asan)
        runtime = self._runtime(asan)
        return self._once(key, self._build_stage, kernel, source, function, defines, asan, runtime)

    def _build_stage(
        self,
        kernel: Kernel,
        source: str,
        function: str,
        defines: Mapping[str, str],
        asan: bool,
        runtime: Sequence[Future[Path]],
    ) -> Path:
        text = translate(source, kernel.source.name)
        digest = hashlib.sha256(repr((text, function, defines, asan)).encode()).hexdigest()[:16]
        wrapper, made = self.root / f"{digest}.cpp", self.root / digest
        wrapper.write_text(
            f'#include "simt.hpp"\n#line 1 "{kernel.source.name}"\n{text}\n#line 1 "launch"\n'
            f"void simt_kernel(void* const* args) {{ simt::invoke(&{function}, args); }}\n"
            f"const char* simt_signature() {{ return simt::signature(&{function}); }}\n"
        )
        _compile(
            [
                *FLAGS,
                *TEMPLATE_FLAGS,
                *(SANITIZE if asan else ()),
                # Twins first: an include of a file that has none finds the real one.
                *("-I", str(HERE), "-I", str(kernel.source.parent)),
                *(f"-D{name}={value}" for name, value in defines.items()),
                *(str(wrapper), *(str(part.result()) for part in runtime), "-o", str(made)),
            ]
        )
        return made

    def build(
        self,
        kernel: Kernel,
        config: Config,
        case: Case,
        *,
        arch: Arch = ARCH,
        source: Mapping[str, str] | None = None,
        asan: bool = False,
    ) -> dict[str, tuple[Launch, Future[Path]]]:
        """Starts the builds of all stages; `source`: other text than the template's for some."""
        text = template(kernel)
        problem = case.problem
        launches = kernel.launches(config, problem, arch)
        return {
            name: (
                launch,
                self._stage(
                    kernel,
                    (source or {}).get(name, text),
                    launch.function,
                    kernel.stages[name].defines(config, problem, launch),
                    asan,
                ),
            )
            for name, launch in launches.items()
        }

    def check(
        self,
        kernel: Kernel,
        config: Config,
        case: Case,
        *,
        arch: Arch = ARCH,
        source: Mapping[str, str] | None = None,
        asan: bool = False,
        schedules: Sequence[int] = SCHEDULES,
        seed: int = 1,
        timeout_s: float = 120,
    ) -> Result:
        """Runs the case under each schedule; a run that fails raises SimtError with its report."""
        stages = self.build(kernel, config, case, arch=arch, source=source, asan=asan)
        problem = case.problem
        inputs = make_inputs(case, seed)
        expected = reference(inputs, problem, np.arange(problem.seqlen_q))
        sizes = kernel.workspaces(config, problem)
        worst, limit = 0.0, HALF_ULP[problem.dtype]
        first = None
        for schedule in schedules:
            with self._lock:
                self._runs += 1
                place = self.root / f"run{self._runs}"
            place.mkdir()
            out = np.full_like(inputs["q"], np.iinfo(inputs["q"].dtype).max)
            for name, array in {**inputs, "o": out}.items():
                array.tofile(place / name)
            for name, nbytes in sizes.items():
                np.full(nbytes, POISON, np.uint8).tofile(place / name)
            kinds = {**dict.fromkeys(inputs, "input"), "o": "output"}
            kinds |= dict.fromkeys(sizes, "workspace")
            for name, (launch, made) in stages.items():
                request = _request(launch, kinds, place, schedule)
                (place / f"{name}.request").write_text(request)
                _run(made.result(), place / f"{name}.request", timeout_s)
            got = np.fromfile(place / "o", out.dtype).reshape(out.shape)
            shutil.rmtree(place)
            error = row_error(from_bits(got, problem.dtype).astype(np.float64), expected)
            if not error <= limit:  # only then: it takes longer than a small run
                limit = error_limit(case, kernel.rounds_scores)
            if not error <= limit:
                return Result(case, error, limit)
            worst = max(worst, error)
            first = got if first is None else first
            if kernel.deterministic and (differing := np.count_nonzero(got != first)):
                raise SimtError(f"a race: {differing} outputs differ between schedules")
        return Result(case, worst, limit)


def _request(launch: Launch, kinds: Mapping[str, str], place: Path, schedule: int) -> str:
    lines = [
        f"kernel {launch.function}",
        f"grid {' '.join(map(str, launch.grid))}",
        f"threads {launch.threads}",
        f"smem {launch.smem_bytes}",
        f"schedule {schedule}",
        f"programmatic {int(launch.programmatic)}",
        f"cluster {launch.defines.get('CLUSTER', 1)}",  # blocks, which __cluster_dims__ declares
    ]
    for name, kind in kinds.items():
        path = place / name
        lines.append(f"buffer {name} {kind} {path.stat().st_size} {path}")
    for arg in launch.args:
        if isinstance(arg, TensorMap):
            shape = " ".join(map(str, (*arg.dims, *arg.strides, *arg.box)))
            lines.append(f"map {arg.buffer} {len(arg.dims)} {arg.swizzle_bytes} {shape}")
        elif isinstance(arg, str):
            lines.append(f"pointer {arg}")
        elif isinstance(arg, float):
            lines.append(f"float {float(np.float32(arg)).hex()}")
        else:
            lines.append(f"int {arg}")
    return "\n".join(lines) + "\n"


def _compile(arguments: Sequence[str]) -> None:
    if COMPILER is None:
        raise BuildError("g++ is not installed")
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"g++ refuses it:\n{done.stderr[:6000]}")


def _run(program: Path, request: Path, timeout_s: float) -> None:
    options = "detect_leaks=0:exitcode=2:detect_stack_use_after_return=0"
    try:
        # On kernels that randomize addresses widely, a sanitizer may find its own place taken.
        for _ in range(20):
            done = subprocess.run(
                [program, request],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={"ASAN_OPTIONS": options},
            )
            if "Shadow memory range interleaves" not in done.stderr:
                break
    except subprocess.TimeoutExpired as error:
        raise SimtError(f"{request.stem}: still running after {timeout_s:.0f} s") from error
    if done.returncode:
        report = done.stderr.strip() or f"ended with status {done.returncode} and no report"
        raise SimtError(f"{request.stem}: {report[:6000]}")

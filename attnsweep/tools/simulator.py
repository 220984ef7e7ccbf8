"""Builds a family's stages with g++ and runs them on the CPU as fibers.

tests/simt/README.md says what it sees, and what it cannot.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock

from attnsweep.compile.nvrtc import default_cache_dir, source_closure
from attnsweep.core.cases import Case
from attnsweep.core.files import shipped
from attnsweep.core.hardware import ARCHS, Arch
from attnsweep.core.ops import of_heads
from attnsweep.core.problem import Value
from attnsweep.family.family import Config, Family, Launch, TensorMap
from attnsweep.family.params import config_in
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.limits import HALF_ULP
from attnsweep.verify.measures import apart, row_error
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.rounded import log_sum_exp

_IN_WHEEL = shipped("simt")
HERE = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_WHEEL.parent / "tests" / "simt" / "cuda"
COMPILER = shutil.which("g++")
# The arch that every family runs on.
ARCH = ARCHS["sm_90a"]
FLAGS = ("-std=c++17", "-fmax-errors=5")
# Registers that nothing wrote are no zeros; kernels look at bits through pointers of other types. A
# GPU refuses a load or store of several words, which a CPU does not, at no multiple of its bytes.
TEMPLATE_FLAGS = (
    *("-Og", "-ftrivial-auto-var-init=pattern", "-fno-strict-aliasing"),
    *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr")
POISON = 0xFF
# The host's <cmath> declares functions of the names of some of CUDA's: it comes first, if at all.
_MATHS = re.compile(r"^\s*#\s*include\s*<(?:cmath|math\.h)>", re.MULTILINE)
_BEFORE = "#include <cmath>\n#include <math.h>\n" + "".join(
    f"#define __{name}f simt_{name}f\n" for name in ("exp", "log", "log2", "pow", "sin", "cos")
)
# Comments of a template may be in another encoding, and paths in the locale's: their bytes stay.
_BYTES: Any = {"encoding": "utf-8", "errors": "surrogateescape"}
# Largest error of a log-sum-exp, relative if it is above 1: twice what exp2's polynomial errs by.
LSE_LIMIT = 1.5e-4
# The fixed ones; from the next number on they are drawn at random.
SCHEDULES = (0, 1, 2)


class SimtError(Exception):
    """A run ended with a report, which this is."""


class BuildError(SimtError):
    """g++ or the harness refused the template."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case: its largest error of all schedules, or the first too large."""

    case: Case
    error: float
    limit: float
    """As much of it as shows that the error is no larger: half an ulp is the least it can be."""
    output: str
    """The output that has this error."""
    lse_error: float = 0.0
    """Error of the log-sum-exp, relative where that is above 1; 0 if the config writes none."""

    @property
    def ok(self) -> bool:
        """Whether no error is over its limit."""
        return self.error <= self.limit and self.lse_error <= LSE_LIMIT

    def __str__(self) -> str:
        lse = f", of lse {self.lse_error:.2e}" if self.lse_error else ""
        return f"error of {self.output} {self.error:.2e}, limit {self.limit:.2e}{lse}"


def config_of(kernel: Family, words: str) -> Config:
    """Every Param of the family: as `words` say, else its first value."""
    values: dict[str, Value] = {param.name: param.values[0] for param in kernel.params}
    given = config_in(words)
    for name in given:
        if name not in values:
            raise SimtError(f"{kernel.name} has no parameter {name}: it has {', '.join(values)}")
    return Config(values | dict(given))


_PC = re.compile(r"@pc (0x[0-9a-f]+)\n")
_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")
# A static array: what stands before the type, the type, and what is declared of it.
_STATIC = re.compile(
    r"(?:\bstatic\s+)?__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([^;={}()]+?)\s*;"
)
_DECLARED = re.compile(r"(.*?)(\w+)\s*((?:\[[^\]]*\]\s*)*)$", re.DOTALL)
_TWINS = frozenset(
    str(path.relative_to(HERE)) for path in HERE.rglob("*") if path.suffix in (".cuh", ".h")
)


def sources(kernel: Family) -> dict[str, str]:
    """The template and the headers it includes that have no twin here: name to text."""
    closure = source_closure(kernel.source)
    return {name: text.decode(**_BYTES) for name, text in closure.items() if name not in _TWINS}


def _static_arrays(found: re.Match[str]) -> str:
    """`__shared__ float a[32], b[8]` as references to what the simulator has for them."""
    out, of = [], ""
    for declared in re.split(r",(?![^<\[]*[>\]])", found[1]):
        parts = _DECLARED.fullmatch(declared.strip())
        if parts is None:
            return found[0]
        of = parts[1].strip() or of
        name, size = parts[2], parts[3].strip()
        out.append(
            f"using simt_of_{name} = {of} {size}; static char simt_key_{name}; auto& {name} = "
            f"*static_cast<simt_of_{name}*>(simt::static_smem(&simt_key_{name}, "
            f'"{name}", sizeof(simt_of_{name})));'
        )
    return " ".join(out) + "\n" * found[0].count("\n")


def translate(source: str, name: str) -> str:
    """A source as g++ takes it: shared memory is pointers and references.

    Raises BuildError, which names all that is in the way.
    """
    text = _SHARED.sub(r"\1* \2 = static_cast<\1*>(simt::dynamic_smem());", source)
    text = _STATIC.sub(_static_arrays, text)
    code = re.sub(r"//.*", "", text)
    obstacles = [
        f"{name}:{code.count(chr(10), 0, found.start()) + 1}: {advice}"
        for word, advice in _OBSTACLES.items()
        if (found := re.search(word, code))
    ]
    if obstacles:
        raise BuildError("\n".join(obstacles))
    return f'#line 1 "{name}"\n{text}'


_OBSTACLES = {
    r"\basm\b": "inline PTX cannot run on the CPU: call what common/ptx/*.cuh has",
    r"__shared__": "this __shared__ declaration is not understood: write TYPE NAME[SIZE];",
    r"#\s*include\s*[<\"]cooperative_groups": "cooperative_groups.h is not here: use "
    "__syncthreads and __shfl_*_sync",
    r"#\s*include\s*[<\"]cuda/": "libcu++ is not here: plain loads and __syncthreads do the same",
}


@cache
def _toolchain() -> str:
    """What every program depends on beside its sources: g++, its flags, the runtime and twins."""
    version = subprocess.run(
        [str(COMPILER), "--version"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    ).stdout
    files = sorted(path for path in HERE.rglob("*") if path.is_file())
    texts = [(str(path.relative_to(HERE)), path.read_text(encoding="utf-8")) for path in files]
    return repr((version, FLAGS, TEMPLATE_FLAGS, SANITIZE, texts))


class Simulator:
    """Builds each program once, keeps it by its content, and runs it; `jobs` at the same time."""

    def __init__(self, jobs: int = 2) -> None:
        self._place = TemporaryDirectory(prefix="attnsweep-simt-")
        self.root = Path(self._place.name)
        self.kept = default_cache_dir() / "simt"
        self.kept.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._built: dict[str, Future[Path]] = {}
        # By id of a stage's build: what builds it with a table of lines.
        self._again: dict[int, Callable[[], Future[Path]]] = {}
        self._runs = 0

    def close(self) -> None:
        """Stops, and removes all files."""
        self._pool.shutdown(cancel_futures=True)
        self._place.cleanup()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kept_file(self, what: object, build: Callable[[Path], None], suffix: str) -> Future[Path]:
        """The file that `build` writes, which `what` and the toolchain determine."""
        digest = hashlib.sha256(repr((what, _toolchain())).encode()).hexdigest()[:24]
        made = self.kept / f"{digest}{suffix}"

        def obtain() -> Path:
            with FileLock(f"{made}.lock"):  # processes of one session want the same
                if not made.is_file():
                    with TemporaryDirectory(dir=self.kept) as place:
                        build(Path(place) / "made")
                        (Path(place) / "made").replace(made)
            return made

        with self._lock:
            if digest not in self._built:
                self._built[digest] = self._pool.submit(obtain)
            return self._built[digest]

    def _runner(self, asan: bool) -> Future[Path]:
        """The program that runs stages: simt's runtime."""
        flags = [*FLAGS, "-g1", "-Wall", "-Werror", "-rdynamic", "-pthread"]
        # g++ takes longer to optimize it for the sanitizer than it then runs.
        flags += ["-O0", "-fsanitize=address"] if asan else ["-O3"]
        runtime = sorted(HERE.glob("*.cpp"))
        return self.kept_file(
            ("runner", flags), lambda to: compile_as_one(runtime, to, [*flags, "-ldl"]), ""
        )

    def stage(
        self,
        kernel: Family,
        texts: Mapping[str, str],
        function: str,
        defines: Mapping[str, str],
        asan: bool,
        lines: bool = False,
    ) -> Future[Path]:
        """A stage as a library for the runner. texts: of its sources by name. asan: sanitized.

        lines: with a table of lines, which changes no instruction.
        """
        translated = {name: translate(text, name) for name, text in texts.items()}
        maths = any(map(_MATHS.search, texts.values()))

        def build(to: Path) -> None:
            for name, text in translated.items():
                (to.parent / name).parent.mkdir(parents=True, exist_ok=True)
                (to.parent / name).write_text(text, **_BYTES)
            wrapper = to.parent / "wrapper.cpp"
            wrapper.write_text(
                f'{_BEFORE if maths else ""}#include "simt.hpp"\n#include "{kernel.source.name}"\n'
                f'extern "C" void simt_stage(void* const* args)'
                f" {{ simt::invoke(&{function}, args); }}\n"
                f'extern "C" const char* simt_stage_signature()'
                f" {{ return simt::signature(&{function}); }}\n",
                **_BYTES,
            )
            compile_cpp(
                [
                    *(*FLAGS, *TEMPLATE_FLAGS, "-shared", "-fPIC"),
                    *(("-g1", "-O0", *SANITIZE) if asan else ("-g1",) if lines else ()),
                    *("-I", str(HERE), "-I", str(to.parent)),
                    *(f"-D{name}={value}" for name, value in defines.items() if name[0] != "-"),
                    *(str(wrapper), "-o", str(to)),
                ]
            )

        what = (translated, function, dict(defines), asan, *([_BEFORE] if maths else []))
        what += ("lines",) if lines else ()
        made = self.kept_file(what, build, ".so")
        if not (lines or asan):
            same = (kernel, texts, function, defines)
            self._again[id(made)] = lambda: self.stage(*same, asan=False, lines=True)
        return made

    def build(
        self,
        kernel: Family,
        config: Config,
        case: Case,
        *,
        arch: Arch = ARCH,
        changed: Mapping[str, Mapping[str, str]] | None = None,
        asan: bool = False,
    ) -> dict[str, tuple[Launch, Future[Path]]]:
        """Starts the builds of all stages; `changed`: other sources for some stages."""
        texts = sources(kernel)
        problem = case.problem
        launches = kernel.launches(config, problem, arch)
        for name, launch in launches.items():
            if launch.smem_bytes > arch.smem_per_block:
                raise BuildError(
                    f"{name} asks for {launch.smem_bytes} bytes of shared memory, and a block of "
                    f"{arch.name} has at most {arch.smem_per_block}"
                )
        return {
            name: (
                launch,
                self.stage(
                    kernel,
                    (changed or {}).get(name, texts),
                    launch.function,
                    kernel.stages[name].defines(config, problem, launch),
                    asan,
                ),
            )
            for name, launch in launches.items()
        }

    def run(
        self,
        stages: Mapping[str, tuple[Launch, Future[Path]]],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, int],
        workspaces: Mapping[str, int],
        *,
        schedule: int = 0,
        calls: int = 1,
        asan: bool = False,
        timeout_s: float = 120,
    ) -> dict[str, Any]:
        """Run launches one after the other, and return the bytes that each buffer then holds.

        stages: as `build` starts them. inputs: arrays. outputs, workspaces: numbers of bytes.
        calls: how many follow each other with the same workspaces; launches that are `once` come
        before the first.
        """
        with self._lock:
            self._runs += 1
            place = self.root / f"run{self._runs}"
        place.mkdir()
        for name, array in inputs.items():
            np.asarray(array).tofile(place / name)
        left = {**outputs, **workspaces}
        for name, nbytes in workspaces.items():
            np.full(nbytes, POISON, np.uint8).tofile(place / name)
        kinds = dict.fromkeys(inputs, "input") | dict.fromkeys(outputs, "output")
        kinds |= dict.fromkeys(workspaces, "workspace")
        for call in range(calls):
            for name, nbytes in outputs.items():
                np.full(nbytes, POISON, np.uint8).tofile(place / name)
            for name, (launch, made) in stages.items():
                if call > 0 and launch.once:
                    continue
                request = place / f"{name}.request"
                request.write_text(_request(launch, kinds, place, schedule), **_BYTES)
                try:
                    _run((self._runner(asan).result(), made.result()), request, timeout_s)
                except SimtError as error:
                    raise self._at_line(error, made) from error
        found = {name: np.fromfile(place / name, np.uint8) for name in left}
        shutil.rmtree(place)
        return found

    def _at_line(self, error: SimtError, made: Future[Path]) -> SimtError:
        """The report with file and line in place of the address in a stage's library."""
        found = _PC.search(str(error))
        again = self._again.get(id(made))
        if found is None or again is None:
            return error
        library = again().result()
        try:
            told = subprocess.run(
                ["addr2line", "-i", "-e", str(library), found[1]],
                capture_output=True,
                text=True,
                encoding="utf-8",
                check=True,
                timeout=30,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            told = ""
        # Of inlined functions the innermost comes first; those of the simulator say nothing.
        named = [line.split(" ")[0] for line in told.splitlines() if "??" not in line]
        own = [line for line in named if str(HERE) not in line and not line.startswith("/usr")]
        place = f"  at {Path(own[0]).name}\n" if own else ""
        return SimtError(_PC.sub(place, str(error)))

    def check(
        self,
        kernel: Family,
        config: Config,
        case: Case,
        *,
        arch: Arch = ARCH,
        changed: Mapping[str, Mapping[str, str]] | None = None,
        asan: bool = False,
        schedules: Sequence[int] = SCHEDULES,
        seed: int = 1,
        timeout_s: float = 120,
        inputs: Mapping[str, Any] | None = None,
    ) -> Result:
        """Runs the case under each schedule; a run that fails raises SimtError with its report.

        inputs: others than those that the case draws.
        """
        self._runner(asan)  # compiles beside the stages
        stages = self.build(kernel, config, case, arch=arch, changed=changed, asan=asan)
        problem, oracle = case.problem, oracle_of(case.problem)
        inputs = oracle.make_inputs(case, seed) if inputs is None else dict(inputs)
        expected, least = oracle.exact(inputs, problem)
        rows = np.arange(problem.seqlen_q)
        # What calls leave for each other is seen in a second one, under the last schedule.
        stateful = any(launch.once for launch, _ in stages.values())
        # By its name and this parameter: a workspace of other configs is not read.
        lse = log_sum_exp(inputs, problem, rows) if config.get("LSE") else None
        sizes = kernel.workspaces(config, problem)
        worst, limit, worst_lse = 0.0, HALF_ULP[problem.out_dtype], 0.0
        first, (name, *_) = None, problem.outputs
        wrong: Result | None = None  # others of its schedules tell a race from a wrong formula
        for schedule in schedules:
            turned = of_heads(problem) if kernel.turned else {}
            given = {
                name: np.asarray(x).swapaxes(1, 2) if name in turned else x
                for name, x in inputs.items()
            }
            outputs = {name: problem.bytes_of(name) for name in expected}
            how: Any = {"schedule": schedule, "asan": asan, "timeout_s": timeout_s}
            how["calls"] = 2 if stateful and schedule == schedules[-1] else 1
            left = self.run(stages, given, outputs, sizes, **how)
            kind = np.uint32 if problem.dtype == "fp32" else np.uint16
            got = {}
            for name in expected:
                batch, heads, of_rows, columns = problem.shape_of(name)
                shape = (
                    (batch, of_rows, heads, columns) if turned else (batch, heads, of_rows, columns)
                )
                got[name] = left[name].view(kind).reshape(shape)
                got[name] = got[name].swapaxes(1, 2) if turned else got[name]
            if lse is not None:
                written = left["lse"].view(np.float32).reshape(lse.shape)
                lse_error = error_of_lse(written, lse)
                if not lse_error <= LSE_LIMIT:
                    return Result(case, worst, limit, name, lse_error)
                worst_lse = max(worst_lse, lse_error)
            errors = {}
            for name, exact in expected.items():
                with np.errstate(invalid="ignore"):  # a wrong kernel may leave a NaN that signals
                    values = from_bits(got[name], problem.out_dtype).astype(np.float64)
                errors[name] = row_error(values, exact, least[name])
            first = got if first is None else first
            differing = sum(np.count_nonzero(got[name] != first[name]) for name in got)
            if kernel.is_deterministic(config) and differing:
                raise SimtError(
                    f"schedules disagree on {differing} outputs: a barrier is missing, or threads "
                    f"race ({_order(schedules[0])}, then {_order(schedule)})"
                )
            if wrong is None:
                name, error, limit = judged(errors, limit, case, kernel.rounds_scores)
                worst = error if len(errors) > 1 else max(worst, error)
                wrong = None if error <= limit else Result(case, error, limit, name)
        return wrong or Result(case, worst, limit, name, worst_lse)


def _order(schedule: int) -> str:
    """In which order threads go under a schedule, in words."""
    return {0: "low warps first", 1: "high warps first"}.get(schedule, "another order of threads")


def error_of_lse(written: Any, lse: Any) -> float:
    """The largest error of log-sum-exps, relative where they are above 1."""
    size = np.maximum(1, np.abs(np.where(np.isfinite(lse), lse, 1)))
    return float(np.max(apart(written, lse) / size))


def judged(
    errors: Mapping[str, float], limit: float, case: Case, rounds_scores: int
) -> tuple[str, float, float]:
    """The output whose error is the worst, that error, and as much of its limit as it needs.

    limit: as much of it as is known.
    """
    (name, *others), oracle = errors, oracle_of(case.problem)
    if not others and errors[name] <= limit:  # to know more takes longer than a small run
        return name, errors[name], limit
    for same in oracle.each_draw(case, rounds_scores):
        most = oracle.limits(case, rounds_scores, same)
        shares = {each: error / most[each].row for each, error in errors.items()}
        name = max(shares, key=lambda of: (shares[of] != shares[of], shares[of]))
        limit = most[name].row
        if errors[name] <= limit:  # of as many draws as it takes
            break
    return name, errors[name], limit


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


def compile_cpp(arguments: Sequence[str]) -> None:
    """Run g++. Raises BuildError with what it says."""
    if COMPILER is None:
        raise BuildError("g++ is not installed")
    done = subprocess.run(
        [COMPILER, *arguments], capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise BuildError(f"g++ refuses it:\n{done.stderr[:6000]}")


def compile_as_one(files: Sequence[Path], to: Path, flags: Sequence[str]) -> None:
    """Several files in one: what they all include is parsed once, which takes half of the time."""
    whole = to.with_suffix(".cpp")
    whole.write_text("".join(f'#include "{path}"\n' for path in files), **_BYTES)
    compile_cpp([str(whole), *flags, "-o", str(to)])


def _run(program: tuple[Path, Path], request: Path, timeout_s: float) -> None:
    options = "detect_leaks=0:exitcode=2:detect_stack_use_after_return=0"
    try:
        # On kernels that randomize addresses widely, a sanitizer may find its own place taken.
        for _ in range(20):
            done = subprocess.run(
                [*program, request],
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
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

"""NVRTC to cubin: offline, in threads, through a content-addressed cache on disk.

Needs no GPU. A cache entry is a directory named by the SHA-256 of everything that the machine code
depends on: the template, the headers it includes, flags, architecture and NVRTC version.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import platformdirs

from attnsweep.core.errors import CompileError, ToolchainError
from attnsweep.core.files import install_command, shipped
from attnsweep.core.hardware import Arch

if TYPE_CHECKING:
    from attnsweep.compile.trace import Tracers

CACHE_VARIABLE = "ATTNSWEEP_CACHE_DIR"
STANDARD = Path(__file__).parent / "std"
"""Headers of the C++ standard library, as far as a kernel needs them."""
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
_HEADERS_OF = {
    r"(cute|cutlass)/": "nvidia-cutlass",
    r"(cuda|nv|cub|thrust)/": "nvidia-cuda-cccl",
    r"(cu\w+|mma|sm_\w+|crt/\w+|cooperative_groups.*)\.h(pp)?$": "nvidia-cuda-runtime",
}
# Headers of the standard library, whose names in CCCL are others.
_OF_C = re.compile(r"(ctype|errno|inttypes|stdio|stdlib|string|time)\.h")
_OF_CPP = re.compile(r"[a-z]\w*")


_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """How many cores this process may use: a container or a scheduler may give it few of many."""
    count = os.cpu_count() or 1
    if sys.platform == "linux":
        count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # `max 100000` is no limit
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def default_cache_dir() -> Path:
    """$ATTNSWEEP_CACHE_DIR, or the user's cache directory."""
    return Path(
        os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("attnsweep") / "cubins"
    )


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compiled stage on disk. `digest` identifies the machine code; `log` is from ptxas -v."""

    path: Path
    digest: str
    log: str
    seconds: float
    cached: bool


def _install() -> str:
    return f"{install_command('compile')} (or [cuda12], [cuda13] on a GPU machine)"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(
            f"NVRTC's Python binding is missing ({error})", hint=_install()
        ) from error
    return nvrtc


def _call(result: tuple[Any, ...], doing: str) -> Any:
    status, *values = result
    if int(status):
        raise ToolchainError(f"NVRTC failed while {doing}: {status.name}")
    return values[0] if len(values) == 1 else values


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that will compile. Raises ToolchainError if there is none."""
    nvrtc = _nvrtc()
    try:
        major, minor = _call(nvrtc.nvrtcVersion(), "asking its version")
    except RuntimeError as error:  # the binding is there, the library is not
        raise ToolchainError(
            f"the NVRTC library cannot be loaded ({str(error).splitlines()[0]})", hint=_install()
        ) from error
    return int(major), int(minor)


def check_toolchain(arch: Arch) -> None:
    """Raise ToolchainError unless NVRTC is here and can compile for `arch`."""
    major, minor = nvrtc_version()
    supported = _call(_nvrtc().nvrtcGetSupportedArchs(), "asking its architectures")
    if int(re.sub(r"\D", "", arch.name)) not in {int(number) for number in supported}:
        raise ToolchainError(
            f"NVRTC {major}.{minor} cannot compile for {arch.name}",
            hint="install a newer NVRTC: pip install -U nvidia-cuda-nvrtc",
        )


def include_dirs(source: Path) -> tuple[Path, ...]:
    """Folders where NVRTC looks first for headers: the template's, then the shipped kernels/."""
    return source.parent, shipped("kernels")


@cache
def installed_headers() -> tuple[Path, ...]:
    """Folders where NVRTC looks last: CUDA, CCCL and CUTLASS, from packages or the toolkit.

    Then our own standard library, since NVRTC has none: see std/README.md.
    """
    major = nvrtc_version()[0]
    wheels = [f"nvidia/cu{major}/include", f"nvidia/cu{major}/include/cccl"]
    if major == 12:
        wheels += ["nvidia/cuda_runtime/include", "nvidia/cuda_cccl/include"]
    wheels += ["cutlass_library/source/include", f"cupy/_core/include/cupy/_cuda/cuda-{major}.*"]
    wheels += ["cupy/_core/include/cupy/_cccl/libcudacxx"]
    found = [path for part in wheels for place in sys.path for path in Path(place).glob(part)]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found += [Path(toolkit, "include"), Path(toolkit, "include/cccl"), STANDARD]
    return tuple(dict.fromkeys(path.resolve() for path in found if path.is_dir()))


def _places(source: Path, defines: Mapping[str, str]) -> tuple[Path, ...]:
    """All of them in NVRTC's order, with a family's own, which are the defines that begin by -I."""
    own = (Path(name[2:]) for name in defines if name.startswith("-I"))
    return *include_dirs(source), *own, *installed_headers()


def source_closure(source: Path, more: Sequence[Path] = ()) -> dict[str, bytes]:
    """The template and every file that it includes, by name: all text that the code depends on.

    Names are looked up as NVRTC does, next to the including file, then in include_dirs and in
    `more`. NVRTC itself reports a file that is in none of them, with file and line.
    """
    roots = [*include_dirs(source), *more]
    found: dict[str, bytes] = {}
    queue = [source]
    while queue:
        path = queue.pop()
        holding = [root for root in roots if path.is_relative_to(root)]
        root = max(holding, key=lambda root: len(root.parts), default=None)
        name = str(path.relative_to(root)) if root else str(path)
        if name in found:
            continue
        found[name] = path.read_bytes()
        for included in _INCLUDE.findall(found[name].decode(errors="replace")):
            places = ((place / included).resolve() for place in (path.parent, *roots))
            queue += [place for place in places if place.is_file()][:1]
    return found


NOW, SOON, LATER, PERHAPS = range(4)
"""Turns of what is compiled: asked for, likely to be asked for next; and the same of problems to
come."""


class _Waiting(NamedTuple):
    turn: int
    number: int
    future: Future[Cubin]
    given: tuple[str, Path, dict[str, str]]


class Compiler:
    """Compiles stages for one architecture. Processes may share a cache.

    threads: concurrent NVRTC programs (default: cores), which scale, since NVRTC releases the GIL.
    after: called in the same thread with each Cubin, before it is handed out. templates: whether it
    gets any; one for calls alone needs no NVRTC.
    """

    def __init__(
        self,
        arch: Arch,
        cache_dir: Path | None = None,
        threads: int | None = None,
        after: Callable[[Cubin], object] | None = None,
        *,
        templates: bool = True,
    ) -> None:
        if templates:
            check_toolchain(arch)
        self.arch = arch
        self.cache_dir = cache_dir or default_cache_dir()
        self.threads = threads or cores()
        self._pool = ThreadPoolExecutor(self.threads, "nvrtc", _step_back)
        self._futures: dict[str, Future[Cubin]] = {}
        self._turns: dict[str, int] = {}
        self._count = itertools.count()
        self._waiting: list[_Waiting] = []
        """A heap of what no thread has begun. What was asked for again, sooner, is in it twice."""
        self._closures: dict[tuple[Path, ...], dict[str, bytes]] = {}
        self._lock = threading.Lock()
        self._after = after
        self.tracers: Tracers | None = None
        """What traces callables of the user's, for who compiles them: see compile.calls."""

    @property
    def version(self) -> str:
        """NVRTC's version."""
        return "{}.{}".format(*nvrtc_version())

    def flags(self, defines: Mapping[str, str]) -> list[str]:
        """NVRTC options, complete but for the include directories, whose contents are hashed.

        A define whose name begins with a hyphen is an option as it is.
        """
        flags = [f"-arch={self.arch.name}", "-std=c++17", "-default-device"]
        flags += ["--ptxas-options=-v", "-diag-suppress=177"]
        if nvrtc_version() >= (13, 0):
            flags.append("--no-cache")  # NVRTC's own cache would return an empty log
        flags += [f"-D{n}={value}" for n, value in sorted(defines.items()) if n[0] != "-"]
        return flags + [name for name in defines if name[0] == "-" and name[:2] != "-I"]

    def closure(self, source: Path, defines: Mapping[str, str]) -> dict[str, bytes]:
        """The texts that a key stands for, read once: see source_closure."""
        places = _places(source, defines)
        with self._lock:
            closure = self._closures.get((source, *places)) or source_closure(source, places[2:])
            self._closures[source, *places] = closure
        return closure

    def key(self, source: Path, defines: Mapping[str, str]) -> str:
        """Content address of one stage: equal keys give equal machine code."""
        closure = self.closure(source, defines)
        digest = hashlib.sha256()
        parts: list[bytes] = [repr(nvrtc_version()).encode()]
        parts += [os.fsencode(flag) for flag in self.flags(defines)]
        for name, text in sorted(closure.items()):
            parts += [os.fsencode(name), text]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def submit(self, source: Path, defines: Mapping[str, str], turn: int = NOW) -> Future[Cubin]:
        """Compile in a thread; a stage asked for twice is compiled once, in the sooner turn."""
        key = self.key(source, defines)
        with self._lock:
            future = self._futures.setdefault(key, Future())
            before = self._turns.get(key, PERHAPS + 1)
            if turn < before and not (future.running() or future.done()):
                self._pool.submit(self._next)  # first: it raises once the pool is closed
                self._turns[key] = turn
                one = _Waiting(turn, next(self._count), future, (key, source, dict(defines)))
                heapq.heappush(self._waiting, one)
            return future

    def compile(self, source: Path, defines: Mapping[str, str]) -> Cubin:
        """Compile now. Raises CompileError with the whole log."""
        return self.submit(source, defines).result()

    def close(self) -> None:
        """Drop waiting compilations; one that NVRTC has begun cannot be stopped."""
        if self.tracers is not None:
            self.tracers.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [one.future for one in self._waiting]
        for future in left:  # not locked: who waits for one may ask for another
            future.cancel()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the threads ---------------------------------------------------------------------

    def _next(self) -> None:
        """Compile what has the soonest turn, unless it was asked for again, sooner."""
        with self._lock:
            one = heapq.heappop(self._waiting)
            again_sooner = one.turn > self._turns[one.given[0]]
            if again_sooner or not one.future.set_running_or_notify_cancel():
                return
        try:
            made = self._obtain(*one.given)
        except BaseException as error:  # as a pool's future has it
            one.future.set_exception(error)
        else:
            one.future.set_result(made)

    def _obtain(self, key: str, source: Path, defines: Mapping[str, str]) -> Cubin:
        entry = self.cache_dir / self.arch.name / key[:2] / key
        begin = time.perf_counter()
        cached = _read_entry(entry)
        if cached is None:
            places = (f"-I{place}" for place in _places(source, defines))
            cubin, log = _compile(source, [*self.flags(defines), *places])
            _write_entry(entry, cubin, log)
            digest = hashlib.sha256(cubin).hexdigest()
        else:
            digest, log = cached
        seconds = time.perf_counter() - begin
        made = Cubin(entry / "stage.cubin", digest, log, seconds, cached is not None)
        if self._after is not None:
            self._after(made)
        return made


def _step_back() -> None:
    """Lower this thread's priority, so that the sweep and its GPU process go first.

    Compiled candidates pass through those two one at a time, and the others wait.
    """
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _read_entry(entry: Path) -> tuple[str, str] | None:
    """(digest, log) if the entry is whole, otherwise None: a damaged entry is compiled again."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        digest = hashlib.sha256((entry / "stage.cubin").read_bytes()).hexdigest()
        if meta["digest"] == digest:
            return digest, str(meta["log"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write_entry(entry: Path, cubin: bytes, log: str) -> None:
    """Write elsewhere, fsync, rename: a reader in another process sees all of it or nothing."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
        try:
            meta = json.dumps({"digest": hashlib.sha256(cubin).hexdigest(), "log": log})
            for name, data in (("stage.cubin", cubin), ("meta.json", meta.encode())):
                with open(aside / name, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            if entry.exists() and _read_entry(entry) is None:
                shutil.rmtree(entry, ignore_errors=True)
            os.replace(aside, entry)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            if _read_entry(entry) is None:  # no faster process has written it
                raise
    except OSError as error:
        raise unwritable(error, entry.parent) from error


def unwritable(error: OSError, place: Path) -> ToolchainError:
    """The error that ends what compiles, if the cache cannot be written."""
    return ToolchainError(
        f"the cubin cache cannot be written ({error.strerror})",
        where=str(place),
        hint=f"free some space, or set {CACHE_VARIABLE} to a writable directory",
    )


def _compile(source: Path, flags: list[str]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = _call(
        nvrtc.nvrtcCreateProgram(source.read_bytes(), os.fsencode(source), 0, [], []),
        "creating a program",
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [*map(os.fsencode, flags)])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if int(status):
            first = next((line for line in log.splitlines() if "error" in line), status.name)
            raise CompileError(first.strip() + _where_it_is(first), log=log)
        size = _call(nvrtc.nvrtcGetCUBINSize(program), "reading the cubin")
        cubin = bytearray(size)
        _call(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the cubin")
        return bytes(cubin), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _where_it_is(error: str) -> str:
    """How to get a header that NVRTC does not find; nothing for another error."""
    if (missing := re.search(r'cannot open source file "([^"]+)"', error)) is None:
        return ""
    for names, package in _HEADERS_OF.items():
        if re.match(names, missing[1]):
            return f"; pip install {package}"
    if (of_c := _OF_C.fullmatch(missing[1])) or _OF_CPP.fullmatch(missing[1]):
        name = f"c{of_c[1]}" if of_c else missing[1]
        return f"; write <cuda/std/{name}>, of CCCL: pip install nvidia-cuda-cccl"
    return "; name its directory in the family's include_dirs"


def _text(size_of: Any, read: Any, program: Any) -> str:
    # A bytearray: NVRTC writes into the buffer, and `b" " * 1` is a shared constant of CPython.
    buffer = bytearray(_call(size_of(program), "reading the log"))
    _call(read(program, buffer), "reading the log")
    return buffer.rstrip(b"\0").decode(errors="replace")

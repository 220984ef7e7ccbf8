"""Compiles a callable of the user's, whose kernels Python compiles, for each config; needs no GPU.

A process a callable imports the user's file (compile.traced.server); here are what it is asked,
what it answers, and the cache of both. An entry of the cache has what `Traced` says, the cubins,
and `triton`, Triton's own cache folder of these kernels: a process that has it as its own launches
the code that was compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from attnsweep.compile.nvrtc import Cubin, cores, default_cache_dir, unwritable
from attnsweep.core.callables import Asked
from attnsweep.core.cases import Case
from attnsweep.core.errors import CompileError, CompilerLost, KernelError
from attnsweep.core.files import write_file
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, Value
from attnsweep.core.user_code import source_digest
from attnsweep.family.called import Tuning
from attnsweep.family.launch import Launch
from attnsweep.family.params import Config

_TREE = str(Path(__file__).parents[2])
# Files of the working directory must not stand for modules of ours: it comes when all are imported.
_START = (
    f"import sys; {_TREE!r} in sys.path or sys.path.insert(0, {_TREE!r}); "
    "from attnsweep.compile.traced.server import main; main()"
)
# Seconds that a config may take to be traced and compiled.
_LIMIT_S = 120.0
_FORMAT = 5
"""Format of an entry; others are made again."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A config's launches on one problem, compiled. cache: Triton's cache folder of them.

    stages: name, machine code and launch of each, in the order of issue. host: digest of the tensor
    operations of a call. closure: digest of the user's files. cases: small cases on which a call
    launches the same code; None if they were not asked for. why: why it cannot be traced; what it
    launches is then compiled when it is first called.
    """

    stages: tuple[tuple[str, Cubin, Launch], ...]
    hashes: frozenset[str]
    host: str
    closure: str
    cache: Path
    cases: tuple[Case, ...] | None = ()
    why: str = ""


class Tracer:
    """Traces one callable for one architecture. Processes may share the cache.

    call: as an Asked has it. Its process starts when it is first asked for what the cache lacks; it
    raises KernelError then if the file cannot be imported. interpreted: its kernels run, in the
    interpreter of Triton.
    """

    _popen: Callable[..., Any] = subprocess.Popen

    def __init__(
        self,
        call: str,
        arch: Arch,
        cache_dir: Path | None = None,
        jobs: int | None = None,
        *,
        interpreted: bool = False,
    ) -> None:
        self.call, self.arch, self._interpreted = call, arch, interpreted
        self._cache_dir = (cache_dir or default_cache_dir()) / "traced" / arch.name
        self._jobs = jobs or cores()
        self.versions = _versions(call)
        """Versions of PyTorch and Triton, and variables that change what Triton compiles."""
        self._process: Any = None
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        """What is not answered yet, by number."""
        self._numbers = itertools.count(1)
        self._ended = threading.Event()
        """Set when no more answers come: what is asked from then on is lost at once."""
        self._running: dict[tuple[str, bool], Future[Traced]] = {}
        """What is being traced, by key and whether with cases: none is compiled twice at once."""

    def _start(self) -> dict[str, str]:
        """Start the process; returns SHA-256 of each file that it has imported."""
        facts = self.call, self.arch.name, str(self.arch.sm_count), str(self._jobs)
        self._ended.clear()
        self._asked[0] = ready = Future[Any]()
        self._process = None if self._interpreted else _begun.taken()
        if self._process is None:
            self._process = _started(facts, interpreted=self._interpreted)
        else:
            with contextlib.suppress(OSError):  # it has ended, and said why
                self._process.stdin.write(json.dumps(facts).encode() + b"\n")
                self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            files: dict[str, str] = ready.result()
        except CompileError as error:
            self.close()
            self._process = None  # whoever asks again hears the same
            raise KernelError(said_of(self.call, error.what)) from error
        self._keep(self._known_files, files)
        self._keep(_seen(self._cache_dir.parent, self.call), True)
        return files

    @cached_property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file of the user's that is imported."""
        known = self._kept(self._known_files)
        return known if known and _are(known) else self._start()

    @cached_property
    def _known_files(self) -> Path:
        """Where the files stand that were imported when this callable was last traced."""
        return self._place("files", os.getcwd(), self.call)

    def _place(self, *parts: Any) -> Path:
        """Where an answer is kept."""
        key = _digest([_FORMAT, self.arch.name, self.arch.sm_count, self.versions, *parts])
        return self._cache_dir / key[:2] / f"{key}.json"

    def _kept(self, place: Path) -> Any:
        """An answer of an earlier process, or None."""
        try:
            return json.loads(place.read_bytes())
        except (OSError, ValueError):
            return None

    def _keep(self, place: Path, answer: Any) -> None:
        """Keep an answer, if the cache can be written."""
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_file(place, json.dumps(answer).encode())

    @property
    def closure(self) -> str:
        """Digest of the user's files: of their texts, wherever they lie."""
        return _digest(sorted(self.files.values()))

    def space(self, problem: Problem, *, widen: bool = False) -> tuple[Tuning, ...]:
        """The autotuners that a call launches. Raises CompileError if there is none.

        widen: with all combinations of the values of their configs and of neighbours of these.
        """
        found = self._answer("space", problem=problem.label, widen=widen)
        return tuple(Tuning(**each) for each in found)

    def keep(
        self, problems: Sequence[Problem], configs: Sequence[Mapping[str, Value]]
    ) -> dict[tuple[str, Config], str | None] | None:
        """Why the user's `keep` rules a config out on a problem, or None; None if there is none."""
        labels = [problem.label for problem in problems]
        answers = self._told("keep", problems=labels, configs=[dict(c) for c in configs])
        if answers is None:
            return None
        pairs = itertools.product(labels, map(Config, configs))
        return dict(zip(pairs, answers, strict=True))

    def refusals(
        self, problems: Sequence[Problem], *, unless_said: bool = True
    ) -> dict[Problem, str]:
        """The problems that the callable takes no call of, and why.

        unless_said: without `supports`, it takes calls of all that its parameters fit; otherwise
        only of what most functions do.
        """
        labels = [problem.label for problem in problems]
        answers = self._told("refusals", problems=labels, unless_said=unless_said)
        return {p: why for p, why in zip(problems, answers, strict=True) if why}

    def _told(self, do: str, **asked: Any) -> Any:
        """Ask functions of the user's file. Raises KernelError if they fail."""
        try:
            return self._answer(do, **asked)
        except CompileError as error:
            raise KernelError(error.what, where=self.call) from error

    def _answer(self, do: str, **asked: Any) -> Any:
        """Ask the process, or return its cached answer for the same files."""
        place = self._place(self.closure, self.call.rpartition(":")[2], do, asked)
        if (kept := self._kept(place)) is not None:
            return kept["value"]
        value = self._ask(do, **asked).result()
        self._keep(place, {"value": value})
        return value

    def interpret(
        self, problem: Problem, values: Mapping[str, Value], inputs: Path, folder: Path
    ) -> Future[Any]:
        """Call it in Triton's interpreter: outputs of the inputs in a folder go to another one.

        Its result raises CompileError with what went wrong.
        """
        own: dict[str, Any] = {"problem": problem.label, "values": dict(values)}
        return self._ask("interpret", **own, inputs=str(inputs), folder=str(folder))

    def key(self, problem: Problem, values: Mapping[str, Value]) -> str:
        """The address of a config's entry in the cache."""
        parts = [_FORMAT, self.call.rpartition(":")[2], self.arch.name, self.arch.sm_count]
        return _digest([*parts, self.versions, self.closure, problem.label, dict(values)])

    def read_later(self, key: str) -> str:
        """Digest, as they are now, of the files that a config's trace imported, if it is there.

        A launcher may import files when it is called: the address of its trace lacks these.
        """
        try:
            text = (self._cache_dir / key[:2] / key / "trace.json").read_bytes()
            files = json.loads(text)["files"]
            return _digest([hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in files])
        except (OSError, ValueError, KeyError):
            return ""

    def submit(
        self, problem: Problem, values: Mapping[str, Value], *, cases: bool = True
    ) -> Future[Traced]:
        """Trace and compile a config. Its result raises CompileError with what went wrong.

        cases: with the small cases that a sweep proves it on, a sixth of the time.
        """
        key = self.key(problem, values)
        if (running := self._running.get((key, cases))) is not None:
            return running
        entry = self._cache_dir / key[:2] / key
        config: dict[str, Any] = {"problem": problem.label, "values": dict(values)}
        kept = self._read(entry)
        if kept is not None and (kept.cases is not None or not cases):
            done: Future[Traced] = Future()
            done.set_result(kept)
            return done
        if kept is not None:
            asked = self._ask("cases", **config, folder=str(entry))
            return _then(asked, partial(self._with_cases, entry, kept))
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            aside = tempfile.mkdtemp(prefix=".new-", dir=entry.parent)
        except OSError as error:
            raise unwritable(error, entry.parent) from error
        asked = self._ask("trace", **config, folder=aside, cases=cases)
        made = _then(asked, partial(self._published, entry, aside))
        self._running[key, cases] = made

        def end(_: Future[Traced]) -> None:
            self._running.pop((key, cases), None)
            shutil.rmtree(aside, ignore_errors=True)

        made.add_done_callback(end)
        return made

    def _published(self, entry: Path, aside: str, found: dict[str, Any]) -> Traced:
        """The entry of an answer, whose cubins are in another folder."""
        text = json.dumps({"format": _FORMAT, **found})
        try:
            Path(aside, "trace.json").write_text(text, encoding="utf-8")
            for group in Path(aside).rglob("__grp__*"):  # which has whole paths of its files
                moved = group.read_text(encoding="utf-8").replace(aside, str(entry))
                group.write_text(moved, encoding="utf-8")
        except OSError as error:
            raise unwritable(error, entry.parent) from error
        if entry.exists() and self._read(entry) is None:  # damaged, or of other files
            shutil.rmtree(entry, ignore_errors=True)
        with contextlib.suppress(OSError):  # a faster process has written it
            os.replace(aside, entry)
        made = self._read(entry)
        if made is None:
            raise CompileError("what was compiled cannot be read again", log=str(entry))
        # What was faster may be there without the cases that were asked for here.
        own = _cases(found)
        return made if own is None else replace(made, cases=own)

    def _with_cases(self, entry: Path, kept: Traced, cases: Any) -> Traced:
        """An entry that was made without cases, with these from now on."""
        if (found := self._kept(entry / "trace.json")) is not None:  # or it was removed meanwhile
            self._keep(entry / "trace.json", {**found, "cases": cases})
        return replace(kept, cases=_cases({"cases": cases}))

    def close(self) -> None:
        """End the process; what is not traced by then never is."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener is not None and self._listener.is_alive():  # or Ctrl-C came before
            self._listener.join()
        self._process.stdout.close()

    def _ask(self, do: str, **facts: Any) -> Future[Any]:
        with self._lock:
            if self._process is None:
                self._start()
            number = next(self._numbers)
            asked = self._asked[number] = Future()
            line = {"number": number, "limit_s": _LIMIT_S, "do": do, **facts}
            try:
                self._process.stdin.write(json.dumps(line).encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):  # it has ended, or was closed
                self._lose(number)
            if self._ended.is_set():  # what it has started may hold the pipe open
                self._lose(number)
        return asked

    def _lose(self, number: int) -> None:
        """Answer a request that nothing else answers any more."""
        if (asked := self._asked.pop(number, None)) is not None:
            asked.set_exception(CompilerLost("the process that traces has ended"))

    def _listen(self) -> None:
        with contextlib.suppress(ValueError, KeyError):  # an answer amid which it was killed
            for line in self._process.stdout:
                reply = json.loads(line)
                asked = self._asked.pop(reply["number"])
                if "failed" in reply:
                    what, _, log = str(reply["failed"]).partition("\n")
                    lost = "killed" in reply
                    asked.set_exception(CompilerLost(what) if lost else CompileError(what, log=log))
                else:
                    asked.set_result(reply["value"])
        self._ended.set()
        for number in [*self._asked]:
            self._lose(number)

    def _read(self, entry: Path) -> Traced | None:
        """Read a cache entry; None if it is damaged or the user's files have changed."""
        begin = time.perf_counter()
        try:
            found = json.loads((entry / "trace.json").read_bytes())
            if found["format"] != _FORMAT or not _are(found.get("files", {})):
                return None
            stages = []
            for number, launch in enumerate(found["launches"]):
                path = entry / f"{number}.cubin"
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                seconds = time.perf_counter() - begin
                cubin = Cubin(path, digest, launch["log"], seconds, cached=True)
                made = Launch(
                    launch["function"],
                    tuple(launch["grid"]),
                    launch["threads"],
                    tuple(launch["args"]),
                    launch["smem_bytes"],
                )
                stages.append((_stage(launch["function"], number, found["launches"]), cubin, made))
            hashes = frozenset(launch["hash"] for launch in found["launches"])
            own = tuple(stages), hashes, found["host"], self.closure, entry / "triton"
            return Traced(*own, _cases(found), found["why"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _started(facts: Sequence[str], *, interpreted: bool = False) -> Any:
    """A process that traces; without facts it waits to be told them."""
    return Tracer._popen(
        [sys.executable, "-Pc", _START, *facts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TRITON_INTERPRET": str(int(interpreted))},
    )


class _Begun:
    """A process that traces, begun before it is known what: it imports PyTorch meanwhile."""

    def __init__(self) -> None:
        self._process: Any = None
        self._where: Any = None

    def begin(self) -> None:
        """Start it, if it is not there."""
        if self._process is None:
            self._process, self._where = _started(()), self._here()

    def taken(self) -> Any:
        """The process, which is the caller's now; None if it was not begun, or elsewhere.

        None too if it was killed meanwhile, as where memory was short.
        """
        if self._process is None or self._where != self._here():
            return None
        if (self._process.poll() or 0) < 0:
            return self.end()
        process, self._process = self._process, None
        return process

    def end(self) -> None:
        """End it if nobody has taken it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    @staticmethod
    def _here() -> tuple[str, dict[str, str]]:
        """Where it is begun: the directory, and what variables say of code."""
        return os.getcwd(), _variables((*_VARIABLES, *_OF_FACTORIES))


_begun = _Begun()


def begin(calls: Iterable[str]) -> Callable[[], None]:
    """Start what traces before its architecture is known, if a callable was not traced as it is.

    The next Tracer has it. Returns what ends it if none did.
    """
    folder = default_cache_dir() / "traced"
    # Not Path.exists, which raises where the folder may not be looked into.
    if not all(os.path.exists(_seen(folder, call)) for call in calls):
        _begun.begin()
    return _begun.end


def _seen(folder: Path, call: str) -> Path:
    """What is there if a callable was traced as its file is now, on any card."""
    return folder / "seen" / _digest([os.getcwd(), call, source_digest(call)])


def _then(asked: Future[Any], make: Callable[[Any], Traced]) -> Future[Traced]:
    """What is made of an answer, once it is there."""
    made: Future[Traced] = Future()

    def answered(answer: Future[Any]) -> None:
        try:
            made.set_result(make(answer.result()))
        except BaseException as error:
            made.set_exception(error)

    asked.add_done_callback(answered)
    return made


def said_of(call: str, what: str) -> str:
    """What is wrong with a callable, with its name once."""
    return what if call in what else f"{call}: {what}"


class Tracers:
    """The tracers of an architecture, by callable; each begins when it is first asked for."""

    def __init__(self, arch: Arch, cache_dir: Path | None = None) -> None:
        self._arch, self._cache_dir = arch, cache_dir
        self._of: dict[str, Tracer] = {}

    def of(self, call: str) -> Tracer:
        """The tracer of a callable. Raises KernelError if its file cannot be imported."""
        if call not in self._of:
            self._of[call] = Tracer(call, self._arch, self._cache_dir)
        return self._of[call]

    def close(self) -> None:
        """End their processes."""
        for tracer in self._of.values():
            tracer.close()

    def __enter__(self) -> Tracers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cases(found: Mapping[str, Any]) -> tuple[Case, ...] | None:
    """The small cases of an entry; None if they were not asked for."""
    cases = found["cases"]
    return None if cases is None else tuple(Case(Problem.parse(p), how) for p, how in cases)


def _stage(function: str, number: int, launches: list[dict[str, Any]]) -> str:
    """A launch's name: the kernel's, with a number if a call launches it more than once.

    CuTe DSL writes the types of all arguments behind it.
    """
    same = [at for at, each in enumerate(launches) if each["function"] == function]
    own = re.sub(r"^kernel_cutlass_(.+?)_(tensor|ptr|CUstream).*", r"\1", function)
    return own if len(same) == 1 else f"{own}_{same.index(number) + 1}"


def _are(files: Mapping[str, str]) -> bool:
    """Whether files have these digests."""
    try:
        return all(
            hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest
            for path, digest in files.items()
        )
    except OSError:
        return False


_VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "PTXAS_", "DISABLE_")
_OF_FACTORIES = ("TILELANG_", "TL_", "CUTE_DSL_")
_NONE_OF_CODE = (
    *("TRITON_CACHE_DIR", "TRITON_DUMP_PTXAS_LOG", "TRITON_INTERPRET"),
    *("TILELANG_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_ARCH"),
)


def _variables(begin: Sequence[str]) -> dict[str, str]:
    """Variables whose names begin so, and that change what is compiled."""
    own = (n for n in os.environ if n.startswith((*begin,)) and n not in _NONE_OF_CODE)
    return {name: os.environ[name] for name in own}


def _versions(call: str) -> dict[str, str]:
    begin, packages = [*_VARIABLES], ["triton", "torch"]
    if Asked.of(call).factory:
        begin += _OF_FACTORIES
        packages += ["tilelang", "nvidia-cutlass-dsl"]
    told = _variables(begin)
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | dict(sorted(told.items()))


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

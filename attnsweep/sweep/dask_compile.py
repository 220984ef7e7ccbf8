"""Hosts without a GPU compile: workers of a Dask cluster that do not have the resource GPU.

A task is the text of a stage's source and headers, its defines and the architecture; the answer is
the machine code, which the asker writes to its own cache under the same address as its own. The
workers take stages from the asker's queue while its own threads do, so each is compiled once. Only
JSON text travels.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnsweep import __version__
from attnsweep.compile.nvrtc import (
    Compiler,
    NotCompiled,
    Stage,
    check_toolchain,
    include_dirs,
    nvrtc_version,
)
from attnsweep.core.errors import AttnsweepError, CompileError
from attnsweep.core.hardware import arch_named

# How often the workers of the cluster are looked at.
_LOOK_S = 0.5
# How long a worker may take for one stage; the slowest of the shipped ones takes a few seconds.
ANSWER_S = 120.0
# A stage that this many workers have failed with is compiled here.
_TRIES = 2
# A worker that fails this often in a row is left out.
_STRIKES = 3
_INSTALL = f"pip install 'attnsweep[cluster,compile]=={__version__}'"
# What the log says if a header is missing.
_NOT_FOUND = "open source file"
# An include that a closure of texts may lack: its name is made by the preprocessor.
_COMPUTED = re.compile(rb'^\s*#\s*include\s+[^"<\s]|__has_include', re.MULTILINE)


# -- on a worker ------------------------------------------------------------------------------


def introduce(arch: str) -> str:
    """What compiles on this worker, or why nothing does."""
    from distributed import get_worker

    if get_worker().state.total_resources.get("GPU"):
        return json.dumps({"why": "it has a GPU, whose host is left to the measurements"})
    try:
        check_toolchain(arch_named(arch))
    except AttnsweepError as error:
        return json.dumps({"why": f"{error.what}; there: {error.hint}"})
    return json.dumps({"attnsweep": __version__, "NVRTC": _nvrtc()})


def compile_stage(task: str) -> str:
    """Compile a stage on this worker, through its cache; errors are returned, not raised."""
    asked = json.loads(task)
    try:
        with tempfile.TemporaryDirectory(prefix="attnsweep-") as directory:
            place = Path(directory).resolve()
            for name, text in asked["texts"].items():
                path = (place / name).resolve()
                if not path.is_relative_to(place):
                    return json.dumps({"why": f"a text's name leads elsewhere: {name}"})
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode(errors="surrogateescape"))
            answer = _compiled(place / asked["source"], asked)
            return json.dumps({**answer, "place": str(place)})
    except (AttnsweepError, OSError) as error:
        return json.dumps({"why": getattr(error, "what", str(error))})


def _compiled(source: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    compiler = Compiler(arch_named(asked["arch"]), threads=1)
    try:
        if compiler.key(source, asked["defines"]) != asked["key"]:
            return {"other": True}
        cubin = compiler.compile(source, asked["defines"])
    except CompileError as error:
        return {"error": error.what, "log": error.log}
    finally:
        compiler.close()
    data = base64.b64encode(cubin.path.read_bytes()).decode()
    return {"cubin": data, "digest": cubin.digest, "log": cubin.log}


def _nvrtc() -> str:
    return "{}.{}".format(*nvrtc_version())


# -- where the sweep was asked for ------------------------------------------------------------


class _Failed(NotCompiled):
    """A worker failed with a stage. strike: that speaks against the worker."""

    def __init__(self, why: str, *, strike: bool = True) -> None:
        self.why, self.strike = why, strike
        super().__init__(why)


class _Here(NotCompiled):
    """Raised for a stage that only this host can compile."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A process of a worker; one that its nanny starts again has another address."""

    name: str
    address: str
    threads: int
    serving: bool = True
    told: bool = False
    """Whether it was said why it serves no more."""


@contextmanager
def shared(client: Any, compiler: Compiler, note: Callable[[str], None]) -> Iterator[None]:
    """Have workers without a GPU help a compiler, those too that come later.

    note: told, in any thread, which worker is left out and why, and at the end who compiled.
    """
    helpers = _Helpers(client, compiler, note)
    try:
        yield
    finally:
        helpers.close()


class _Helpers:
    """A thread here for each thread of the workers; it waits for one answer at a time."""

    def __init__(self, client: Any, compiler: Compiler, note: Callable[[str], None]) -> None:
        self._client, self._compiler, self._note = client, compiler, note
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._there: frozenset[str] = frozenset()
        self._met: dict[str, _Worker] = {}
        self._left_out: set[str] = set()
        self._strikes: Counter[str] = Counter()
        self._made: Counter[str] = Counter()
        self._elsewhere: set[Path] = set()
        """Sources whose texts make another stage there."""
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    def close(self) -> None:
        """Stop asking workers; what they are compiling is dropped."""
        self._ended.set()
        for thread in [*self._threads]:
            thread.join(2 * _LOOK_S)
        if self._made:
            each = ", ".join(f"{count} on {name}" for name, count in sorted(self._made.items()))
            self._note(f"compiled by workers without a GPU: {each}")

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self) -> None:
        """Meet workers that come, and notice those that leave."""
        while not self._ended.is_set():
            try:
                workers = self._client.scheduler_info(n_workers=-1)["workers"]
            except Exception:  # the scheduler is lost, which ends the cards' part too
                self._there = frozenset()
                return
            found = {
                address: _Worker(str(facts["name"]), address, int(facts["nthreads"]))
                for address, facts in workers.items()
                if not facts.get("resources", {}).get("GPU", 0)
            }
            self._there = frozenset(found)
            for address in self._met.keys() - self._there:
                self._met.pop(address).serving = False
            for address, worker in found.items():
                if address not in self._met and worker.name not in self._left_out:
                    self._met[address] = worker
                    self._start(self._meet, worker)
            self._ended.wait(_LOOK_S)

    def _meet(self, worker: _Worker) -> None:
        """Ask a worker what it compiles with, then give it stages."""
        try:
            facts = self._asked(worker, introduce, self._compiler.arch.name)
            refused = facts.get("why") or _unlike(facts)
        except _Failed as error:
            refused = error.why
        if self._ended.is_set():
            return
        if refused is not None:
            self._leave_out(worker, refused)
            return
        for _ in range(worker.threads - 1):
            self._start(self._serve, worker)
        self._serve(worker)

    def _serve(self, worker: _Worker) -> None:
        """Have one thread of a worker compile, one stage after the other."""
        while self._serves(worker):
            stage = self._compiler.take(_LOOK_S)
            if stage is None:
                continue
            if not self._serves(worker):  # it left while this thread waited
                self._compiler.give_back(stage)
                return
            try:
                self._compiler.finish(stage, partial(self._compile, worker, stage))
            except _Here:
                stage.here = True
                self._compiler.give_back(stage)
            except _Failed as error:
                stage.tries += 1
                stage.here = stage.tries >= _TRIES
                self._compiler.give_back(stage)
                if not self._ended.is_set():
                    self._failed(worker, error)

    def _serves(self, worker: _Worker) -> bool:
        return worker.serving and worker.address in self._there and not self._ended.is_set()

    def _failed(self, worker: _Worker, error: _Failed) -> None:
        with self._lock:
            if worker.told:
                return  # by another of its threads
            self._strikes[worker.name] += 1
            out = error.strike or self._strikes[worker.name] >= _STRIKES
            worker.serving = worker.serving and not out and worker.address in self._there
            worker.told = not worker.serving
        if out:
            self._leave_out(worker, error.why)
        else:
            self._note(f"worker {worker.name}: {error.why}; its stages are compiled elsewhere")

    def _leave_out(self, worker: _Worker, why: str) -> None:
        self._left_out.add(worker.name)
        self._note(f"worker {worker.name} compiles nothing for this sweep: {why}")

    def _compile(self, worker: _Worker, stage: Stage) -> tuple[bytes, str]:
        """Machine code and log of a stage. Raises CompileError, _Failed or _Here."""
        texts = self._compiler.closure(stage.source, stage.defines)
        unfit = any(Path(name).is_absolute() or _COMPUTED.search(t) for name, t in texts.items())
        if unfit or stage.source in self._elsewhere:
            raise _Here
        task = {
            "key": stage.key,
            "arch": self._compiler.arch.name,
            "source": stage.source.name,
            "defines": stage.defines,
            "texts": {name: t.decode(errors="surrogateescape") for name, t in texts.items()},
        }
        match self._asked(worker, compile_stage, json.dumps(task)):
            case {"cubin": str(data), "digest": str(digest), "log": str(log), "place": str(place)}:
                with contextlib.suppress(ValueError):
                    cubin = base64.b64decode(data, validate=True)
                    if hashlib.sha256(cubin).hexdigest() == digest:
                        self._strikes[worker.name] = 0
                        self._made[worker.name] += 1
                        return cubin, _from_here(log, place, stage.source, texts)
                raise _Failed("machine code arrived damaged", strike=False)
            case {"error": str(what), "log": str(log), "place": str(place)}:
                if _NOT_FOUND in log:  # the compiler here may find it, or says where it is missing
                    raise _Here
                self._made[worker.name] += 1
                what = _from_here(what, place, stage.source, texts)
                raise CompileError(what, log=_from_here(log, place, stage.source, texts))
            case {"other": True}:
                self._elsewhere.add(stage.source)
                raise _Here
            case {"why": str(why)}:
                raise _Failed(why, strike=False)
        raise _Failed("it sent an invalid message")

    def _asked(self, worker: _Worker, what: Callable[[str], str], text: str) -> dict[str, Any]:
        """The answer of a worker. Raises _Failed if there is none."""
        ends = time.monotonic() + ANSWER_S
        future: Any = None
        try:
            future = self._client.submit(
                what, text, key=f"attnsweep-compile-{uuid.uuid4().hex}",
                workers=[worker.address], allow_other_workers=False, pure=False, retries=0,
            )  # fmt: skip
            while True:
                with contextlib.suppress(TimeoutError):
                    answer = json.loads(future.result(timeout=_LOOK_S))
                    if isinstance(answer, dict):
                        return answer
                    raise _Failed("it sent an invalid message")
                if self._ended.is_set():
                    raise _Failed("the sweep ended", strike=False)
                if worker.address not in self._there:
                    raise _Failed("it left the cluster", strike=False)
                if time.monotonic() > ends:
                    raise _Failed(f"no answer for {ANSWER_S:g} s")
        except _Failed:
            raise
        except Exception as error:  # Dask raises many kinds, and what the worker could not load
            gone = worker.address not in self._there
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, ImportError):
                why += f"; there: {_INSTALL}"
            raise _Failed("it left the cluster" if gone else why, strike=not gone) from error
        finally:
            if future is not None:
                with contextlib.suppress(Exception):
                    future.release()


def _unlike(facts: Mapping[str, Any]) -> str | None:
    """How a worker's compiler differs from the one here, or None."""
    here = {"attnsweep": __version__, "NVRTC": _nvrtc()}
    install = {"attnsweep": _INSTALL, "NVRTC": f"pip install 'nvidia-cuda-nvrtc=={_nvrtc()}.*'"}
    for name, version in here.items():
        if facts.get(name) != version:
            return f"it has {name} {facts.get(name)}, not {version}; there: {install[name]}"
    return None


def _from_here(text: str, place: str, source: Path, names: Mapping[str, bytes]) -> str:
    """A compiler's text with the paths of the files as they are here."""
    for name in sorted(names, key=len, reverse=True):
        found = (root / name for root in include_dirs(source) if (root / name).is_file())
        text = text.replace(f"{place}/{name}", str(next(found, source.parent / name)))
    return text

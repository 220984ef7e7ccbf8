"""The one compiler for tests whose point is not machine code: it needs no NVRTC and no time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import ClassVar

from attnsweep.compile.nvrtc import Cubin, default_cache_dir, source_closure
from attnsweep.compile.trace import Tracers
from attnsweep.core.files import shipped, write_file
from attnsweep.core.hardware import Arch

REGISTERS = 32
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:[A-Z_]+\s+)?(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
# An ELF file of no sections: what a cubin is to code that reads it with pyelftools.
_EMPTY_ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xbe\x00\x01\x00\x00\x00"
_EMPTY_ELF += bytes(28) + b"\x40\x00" + b"\x38\x00\x00\x00" + b"\x40\x00\x00\x00\x00\x00"


_KERNELS = shipped("kernels").resolve()


def _read(source: Path) -> tuple[str, list[str]]:
    texts = source_closure(source)
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()
    return digest, [name for text in texts.values() for name in _ENTRY.findall(text.decode())]


_shipped = cache(_read)


def _known(closures: dict[Path, tuple[str, list[str]]], source: Path) -> tuple[str, list[str]]:
    """The digest of a template with its headers, and its entry functions; read once."""
    if source not in closures:
        own = source.is_relative_to(_KERNELS)  # which no test edits
        closures[source] = (_shipped if own else _read)(source)
    return closures[source]


class FakeCompiler:
    """Stands in for `nvrtc.Compiler`: each stage is ready at once, in REGISTERS registers.

    Other source or other defines give other machine code, as with NVRTC. Entry functions are found
    by a pattern that suits the families the tests use, not any macro between `void` and the name.
    """

    version = "0.0"
    tracers: Tracers | None = None
    threads = 2
    submitted = 0
    """Stages asked for, by any of them."""
    made: ClassVar[list[Arch]] = []
    """Architectures of those that were made in a test."""
    errors: ClassVar[dict[str, BaseException]] = {}
    """What compiling a template raises, by its file name; empty at the start of a test."""
    edited: Mapping[str, str] | None = None
    """Defines of which the source is another one since; none at the start of a test."""
    hangs = False
    """Whether no stage is ever ready; not at the start of a test."""

    @classmethod
    def as_new(cls) -> None:
        """Forget what a test asked of every compiler."""
        cls.made.clear()
        cls.errors.clear()
        cls.hangs, cls.edited = False, None

    def __init__(self, arch: Arch, cache_dir: Path | None = None, threads: int | None = None) -> None:
        self.arch = arch
        self.made.append(arch)
        self.cache_dir = cache_dir or default_cache_dir() / "fake"
        self._closures: dict[Path, tuple[str, list[str]]] = {}

    def key(self, source: Path, defines: Mapping[str, str]) -> str:
        """Content address, as `Compiler.key` without NVRTC's version."""
        parts = [self.arch.name, sorted(defines.items()), _known(self._closures, source)[0]]
        edited = FakeCompiler.edited  # a stand-in elsewhere calls this, too
        if edited is not None and edited.items() <= defines.items():
            parts.append("edited")
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def submit(self, source: Path, defines: Mapping[str, str], turn: int = 0) -> Future[Cubin]:
        """A future that is done."""
        type(self).submitted += 1
        future: Future[Cubin] = Future()
        if self.hangs:
            return future
        if source.name in self.errors:
            future.set_exception(self.errors[source.name])
            return future
        key = self.key(source, defines)
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        path = self.cache_dir / f"{key}.cubin"
        code = _EMPTY_ELF + key.encode()
        if not path.is_file():  # another thread or process may be reading it
            write_file(path, code)
        log = "".join(
            f"ptxas info    : Compiling entry function '{name}' for '{self.arch.name}'\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            f"ptxas info    : Used {REGISTERS} registers, 400 bytes cmem[0]\n"
            for name in _known(self._closures, source)[1]
        )
        future.set_result(Cubin(path, hashlib.sha256(code).hexdigest(), log, 0.0, cached=False))
        return future

    def compile(self, source: Path, defines: Mapping[str, str]) -> Cubin:
        """Compile now."""
        return self.submit(source, defines).result()

    def __enter__(self) -> FakeCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Nothing: what it compiled is read after it is closed."""

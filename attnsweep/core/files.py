"""Files that come with attnsweep, and writing a file in one step."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import lzma
import os
import secrets
import shutil
import stat
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
ENVIRONMENT = "python3 -m venv .venv && . .venv/bin/activate"
"""What makes a virtual environment here and activates it."""
ARCHIVE = "cubins.tar.xz"
"""The machine code of a packed run's winners."""


def shipped(folder: str) -> Path:
    """`kernels` or `configs`: inside the wheel, or next to the package in a source tree."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def read_code(path: str | Path) -> bytes:
    """Read a cubin; inside a run it is the compressed file `NAME.xz`. Raises OSError.

    A packed run has those of all its winners in one archive, beside where that file was.
    """
    path = Path(path)
    if path.suffix != ".xz":
        return path.read_bytes()
    if not path.exists() and path.stem in (code := packed_code(path.parent)):
        return code[path.stem]
    return _unpacked(path, path.read_bytes())


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        return lzma.decompress(data)
    except (lzma.LZMAError, EOFError) as error:
        raise OSError(errno.EIO, f"damaged: {error}", str(path)) from error


def packed_code(folder: Path) -> Mapping[str, bytes]:
    """Cubins by name from the folder's archive; empty without one. Raises OSError."""
    archive = folder / ARCHIVE
    return _members(archive, archive.stat().st_mtime_ns) if archive.is_file() else {}


@functools.lru_cache(maxsize=1)
def _members(archive: Path, written_ns: int) -> dict[str, bytes]:
    import tarfile

    data = io.BytesIO(_unpacked(archive, archive.read_bytes()))
    try:
        with tarfile.open(fileobj=data, mode="r:") as file:
            opened = ((one.name, file.extractfile(one)) for one in file)
            return {name: one.read() for name, one in opened if one is not None}
    except (tarfile.TarError, KeyError) as error:
        raise OSError(errno.EIO, f"damaged: {error}", str(archive)) from error


def pack_code(folder: Path) -> None:
    """Pack the cubins of a run's folder, if there are any; equal ones give equal bytes.

    Winners of a run are alike: all that are recorded take a third of the bytes. Raises OSError.
    """
    import tarfile

    names, made = {path.stem for path in folder.glob("*.cubin.xz")}, io.BytesIO()
    if not names:
        return
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name in sorted({*packed_code(folder), *names}):
            data = read_code(folder / f"{name}.xz")
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    # Instructions have 16 bytes, and files begin at multiples of them.
    aligned = {"lc": 0, "lp": 4, "pb": 4, "dict_size": max(2**12, made.tell())}
    how = [{"id": lzma.FILTER_LZMA2, "preset": 6, **aligned}]
    write_file(folder / ARCHIVE, lzma.compress(made.getvalue(), filters=how), durable=True)
    for name in names:
        (folder / f"{name}.xz").unlink()


def install_command(extra: str) -> str:
    """The command that installs an extra: from the source tree if there is one, or by name.

    It begins with an environment where the system refuses to install into this Python.
    """
    tree = _PACKAGE.parent
    before = f"{ENVIRONMENT} && " if system_managed() else ""
    if not (tree / "pyproject.toml").is_file():
        return f"{before}pip install 'attnsweep[{extra}]'"
    where = "." if tree == Path.cwd() else tree
    return f"{before}pip install -e '{where}[{extra}]'"


def system_managed() -> bool:
    """Whether pip refuses to install into this Python (PEP 668), as Debian's and Ubuntu's does."""
    if sys.prefix != sys.base_prefix:
        return False
    return Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()


def why_pip_misses() -> tuple[str, str] | None:
    """Why a plain `pip install` does not install into this Python, and the fix; None if it does."""
    if system_managed():
        return "the system manages this Python, and pip refuses to install into it", ENVIRONMENT
    if sys.prefix == sys.base_prefix:
        return None
    own = Path(sys.prefix, "bin", "pip")
    found = shutil.which("pip")
    if found is not None and Path(found).absolute() == own.absolute():
        return None
    there = f"pip on the PATH is {found}" if found else "no pip is on the PATH"
    why = f"{there}, and attnsweep runs in {sys.prefix}"
    fix = f". {sys.prefix}/bin/activate"
    return why, fix if own.is_file() else f"{fix}; then write `uv pip` for `pip`"


def utf8(text: str) -> bytes:
    """Encode text as UTF-8, as in every file we write; lone surrogates become question marks.

    Python keeps the bytes of a file name as surrogates in a locale that does not know them.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeEncodeError):  # of another kind: a compiler's log
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode()
        return text.encode("utf-8", "replace")


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Give `path` this content in one step: write a file next to it, then rename that file.

    durable: the content and the rename reach the disk before this returns. A killed process may
    leave a file `.NAME.*.tmp`, which nothing reads. A device, a pipe or /dev/stdout is written to:
    a rename by root would put a file in its place. Raises OSError.
    """
    if _is_stream(path):
        with path.open("wb") as stream:
            stream.write(data)
        return
    if not path.name:  # `.` and `/`
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Not mkstemp: its files need a chmod with the umask, and reading the umask sets it for a
        # moment in all threads.
        with aside.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def _is_stream(path: Path) -> bool:
    try:
        kind = path.stat().st_mode
        return not stat.S_ISREG(kind) or (path.is_symlink() and os.readlink(path)[:6] == "/proc/")
    except OSError:
        return False


def sync_folder(folder: Path) -> None:
    """Flush renames and new names in a folder to the disk, where the system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)

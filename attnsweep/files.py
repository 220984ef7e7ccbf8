"""Files that come with attnsweep, and writing a file in one step."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """`kernels` or `configs`: inside the wheel, or next to the package in a source tree."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def install_command(extra: str) -> str:
    """The command that installs an extra: from the source tree if there is one, or by name."""
    tree = _PACKAGE.parent
    if not (tree / "pyproject.toml").is_file():
        return f"pip install 'attnsweep[{extra}]'"
    where = "." if tree == Path.cwd() else tree
    return f"pip install -e '{where}[{extra}]'"


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Give `path` this content in one step: write a file next to it, then rename that file.

    durable: the content and the rename reach the disk before this returns. A killed process may
    leave a file `.NAME.*.tmp`, which nothing reads. Raises OSError.
    """
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

"""The files that declare kernel families, in a directory that a user names."""

from __future__ import annotations

import os
from pathlib import Path

from attnsweep.errors import KernelError

_DECLARATIONS = "[!_]*.py"


def declarations(directory: Path) -> list[Path]:
    """The declarations in a directory, sorted.

    Raises KernelError if it is no directory or has none, OSError if it may not be read.
    """
    if not directory.is_dir():
        raise KernelError("no such directory of kernels", where=str(directory))
    os.scandir(directory).close()  # glob takes a directory that may not be read for empty
    found = sorted(directory.glob(_DECLARATIONS))
    if not found:
        below = next(iter(sorted(directory.glob(f"*/{_DECLARATIONS}"))), None)
        hint = "give the directory of NAME.py and NAME.cu"
        raise KernelError(
            "has no kernel families: no NAME.py, of which _NAME.py is none",
            where=str(directory),
            hint=f"{hint}; there are .py files in {below.parent}" if below else hint,
        )
    return found

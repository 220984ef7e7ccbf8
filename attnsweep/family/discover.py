"""Find the kernel families of a directory and load their declarations."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from attnsweep.core.errors import KernelError
from attnsweep.core.files import shipped
from attnsweep.core.problem import Value
from attnsweep.core.trial import OURS, Trial
from attnsweep.family.family import Family, _named

_DECLARATIONS = "[!_]*.py"
# What a declaration has somewhere: a file without it may be a stranger's, and is not imported.
_DECLARES = re.compile(rb"\bFamily\b|^kernel\b|^from\b.*\bkernel\b", re.MULTILINE)


def declarations(directory: Path) -> list[Path]:
    """The declarations in a directory, sorted: the .py files that name a family.

    Raises KernelError if it is no directory or has none, OSError if it may not be read.
    """
    if not directory.is_dir():
        raise KernelError("no such directory of kernels", where=str(directory))
    os.scandir(directory).close()  # glob takes a directory that may not be read for empty
    there = sorted(directory.glob(_DECLARATIONS))
    found = [path for path in there if path.is_file() and _DECLARES.search(path.read_bytes())]
    if not found:
        below = next(iter(sorted(directory.glob(f"*/{_DECLARATIONS}"))), None)
        hint = "give the directory of NAME.py and NAME.cu"
        raise KernelError(
            "has no kernel families: no NAME.py with `kernel = Family(...)`",
            where=str(directory),
            hint=f"{hint}; there are .py files in {below.parent}" if below else hint,
        )
    return found


def load_kernel(path: Path) -> Family:
    """The `kernel` that one declaration file builds. Raises KernelError with the fault."""
    path = path.resolve()
    if not path.is_file():
        raise KernelError("no such declaration", where=str(path))
    name = f"attnsweep_family_{path.stem}_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KernelError("cannot be imported", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (KernelError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's file may raise anything, or exit
        # Find the declaration's own deepest line: it may have called something that raised.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        at = f"{path}:{lines[-1]}" if lines else str(path)
        raise KernelError(_named(error), where=at) from error
    kernel = getattr(module, "kernel", None)
    if not isinstance(kernel, Family):
        raise KernelError(
            "defines no `kernel = Family(...)`",
            where=f"{path}:1",
            hint=f"of a callable, name the function: {path.name}:FUNCTION; the name of another "
            "file without a family must begin with `_`",
        )
    kernel.finish()
    return kernel


def discover(extra: Path | None = None) -> dict[str, Family]:
    """Every family in the shipped kernels/ and in `extra`, by name, sorted.

    Files whose names begin with `_`, or that name no `Family`, are not read. Raises KernelError if
    a declaration is broken or repeated, or if `extra` is not a directory or has none; OSError if it
    may not be read.
    """
    found: dict[str, Family] = {}
    for directory in [shipped("kernels")] + ([extra] if extra else []):
        for path in declarations(directory):
            kernel = load_kernel(path)
            if kernel.name in found:
                raise KernelError(
                    f"family {kernel.name!r} is already declared, in {found[kernel.name].source}",
                    where=str(path),
                )
            found[kernel.name] = kernel
    return dict(sorted(found.items()))


def families_at(path: Path) -> list[Family]:
    """The families of a declaration or a directory, or the shipped one of that name.

    Raises KernelError if there is none.
    """
    if path.suffix == ".py":
        return [load_kernel(path)]
    there = discover()
    if str(path) in there:
        return [there[str(path)]]
    if not path.is_dir():
        hint = f"there are {', '.join(there)}; or give a declaration NAME.py, or a directory"
        raise KernelError("no such kernel", where=str(path), hint=hint)
    return [load_kernel(each) for each in declarations(path)]


def rows_of_today(families: Mapping[str, Family]) -> Callable[[Trial], Trial]:
    """Gives a recorded row its config as Family.of_today says it, if its family is among these.

    Each config is converted once.
    """
    known: dict[tuple[str, int], tuple[dict[str, Value], dict[str, Value] | None]] = {}

    def of_today(row: Trial) -> Trial:
        family = families.get(row.kernel) if row.provider == OURS else None
        if family is None:
            return row
        key = row.kernel, id(row.config)
        if key not in known:  # the config is kept, since its id stands for it
            own = dict(family.of_today(row.config))
            same = [*own.items()] == [*row.config.items()]
            known[key] = row.config, None if same else own
        changed = known[key][1]
        return row if changed is None else row.with_(config=changed)

    return of_today

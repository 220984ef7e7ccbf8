"""Names that a shell completes: specs, runs, families and architectures.

Each function takes what is typed so far. A fault of a file only completes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from attnsweep.core.errors import AttnsweepError
from attnsweep.core.hardware import ARCHS

_MOST = 200


def archs(incomplete: str) -> list[str]:
    """Architecture names that begin with what is typed."""
    return _beginning(incomplete, ARCHS)


def specs(incomplete: str) -> list[str]:
    """Shipped specs by name, and YAML files and directories below what is typed."""
    from attnsweep.specs.shipped import shipped_specs

    return [*_beginning(incomplete, shipped_specs()), *_paths(incomplete, (".yaml", ".yml"))]


def tables(incomplete: str) -> list[str]:
    """CSV files, which `tune` takes in place of a shape."""
    return _paths(incomplete, (".csv", ".tsv"))


def families(incomplete: str) -> list[str]:
    """Shipped kernel families; their declarations are not run for it."""
    from attnsweep.core.files import shipped

    return _beginning(incomplete, (path.stem for path in shipped("kernels").glob("[!_]*.py")))


def runs(incomplete: str) -> list[str]:
    """Runs below the directory that is typed, or below results/."""
    from attnsweep.store.run import find_runs

    root = Path(incomplete)
    with contextlib.suppress(OSError, AttnsweepError):
        if not root.is_dir():
            root = root.parent if "/" in incomplete else Path("results")
        return _beginning(incomplete, map(str, find_runs(root)))
    return []


def specs_and_runs(incomplete: str) -> list[str]:
    """Specs, and runs: `check` takes both."""
    return [*specs(incomplete), *runs(incomplete)]


def families_and_runs(incomplete: str) -> list[str]:
    """Families, and runs: `inspect` takes both."""
    return [*families(incomplete), *runs(incomplete)]


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if word.startswith(incomplete))[:_MOST]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    base = Path(incomplete)
    folder = base if incomplete.endswith("/") else base.parent
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                found.append(f"{path}/")
            elif path.suffix in suffixes:
                found.append(str(path))
    return _beginning(incomplete, found)

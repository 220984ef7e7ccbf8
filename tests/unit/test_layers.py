"""The shape of the package: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import attnsweep
from attnsweep.files import shipped

PACKAGE = Path(attnsweep.__file__).parent
# Lowest first: a room imports lower rooms and its own files. A room in none of them either
# imports nothing of the package (errors, files), or nothing imports it (cli).
LAYERS = (
    *("problem", "hardware", "trial", "family", "spec", "build"),
    *(
        "gpu",
        "store",
        "choose",
        "show",
        "tools",
        "use",
        "replay",
        "resume",
        "sweep",
        "watch",
        "check",
        "fleet",
    ),
)
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
CODE = [path for path in FILES if path.name not in ("__init__.py", "__main__.py")]


def room(path: Path) -> str:
    """The first folder of a path in the package, or the file's own name."""
    return path.parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is only for type checking) of every import statement."""
    tree = ast.parse((PACKAGE / path).read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "attnsweep":
            found += [(f"attnsweep.{alias.name}", node in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node in typing_only))
    return found


def imported_rooms(path: Path) -> set[str]:
    """Other rooms that a file imports at run time."""
    rooms = {room(other) for other in FILES}
    names = {
        name.split(".")[1]
        for name, only in imports(path)
        if name.startswith("attnsweep.") and not only
    }
    return (names & rooms) - {room(path)}


@pytest.mark.parametrize("path", CODE, ids=str)
def test_a_file_imports_only_lower_rooms(path):
    if room(path) not in LAYERS:
        return
    for other in imported_rooms(path) & set(LAYERS):
        assert LAYERS.index(other) < LAYERS.index(room(path)), f"{path} imports {other}"


def test_what_is_in_no_layer_is_below_all_or_above_all():
    imported = {name for path in CODE for name in imported_rooms(path)}
    for path in CODE:
        if room(path) not in LAYERS:
            assert not imported_rooms(path) or room(path) not in imported, path


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("cupy", {"gpu"}),
        ("torch", {"gpu", "use"}),
        ("triton", {"gpu"}),
        ("cuda", {"build", "gpu", "use"}),
    ],
)
def test_gpu_libraries_stay_where_they_belong(package, allowed):
    users = {
        room(path) for path in CODE for name, _ in imports(path) if name.split(".")[0] == package
    }
    assert users == allowed


KERNELS = [
    path for path in sorted(shipped("kernels").rglob("*")) if path.suffix in (".cu", ".cuh", ".py")
]
TESTS = sorted(Path(__file__).parent.parent.rglob("*.py"))


@pytest.mark.parametrize(
    "path", [*(PACKAGE / path for path in CODE), *KERNELS, *TESTS], ids=lambda p: p.name
)
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= 800

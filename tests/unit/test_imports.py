"""Programs and tests that need a GPU import names that exist: nothing here imports them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path
    for folder in ("tests/gpu", "benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.py")
)


def names_of(module):
    """What a module's file defines or imports by name, and the modules beside it; None: no file."""
    place = ROOT.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.is_file():
        return None
    found = {each.stem for each in place.iterdir()} if place.is_dir() else set()
    text = (path.with_suffix(".pyi") if module == "attnsweep" else path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing(text):
    """Names of attnsweep that a program imports and that are not there."""
    asked = [
        (node.module, each.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "attnsweep"
        for each in node.names
    ]
    return [f"{module}.{name}" for module, name in asked if name not in (names_of(module) or ())]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_a_program_imports_is_there(path):
    assert missing(path.read_text()) == []


def test_a_name_that_has_moved_is_found():
    assert missing("from attnsweep.verify import cases, limits") == ["attnsweep.verify.cases"]
    assert missing("from attnsweep.nowhere import x") == ["attnsweep.nowhere.x"]
    assert missing("from attnsweep import Kernel") == ["attnsweep.Kernel"]

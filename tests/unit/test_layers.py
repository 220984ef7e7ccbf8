"""The shape of the package: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import attnsweep

PACKAGE = Path(attnsweep.__file__).parent
LAYERS = [
    {"errors", "console", "race", "paired"},
    {"problem", "arch", "document", "shipped", "ending"},
    {"kernel", "bounds", "fields", "policy"},
    {"trial", "schedule"},
    {"space"},
    {"spec", "search", "compiler", "numerics"},
    {"analysis", "device", "triton_flash", "schema"},
    {"baselines", "sass"},
    {"candidates", "measure"},
    {"store", "workers"},
    {"ranking", "turns", "doctor", "inspection", "plots"},
    {"section", "counters", "rounds", "baseline"},
    {"report", "skipping"},
    {"replay", "page", "regress"},
    {"sweep"},
    {"view", "progress", "gate"},
    {"cli"},
    {"__main__"},
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is only for type checking) of every import statement."""
    tree = ast.parse(path.read_text())
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


def test_every_module_has_a_layer():
    assert set(MODULES) == set(LAYER)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_lower_layers(module):
    for name, typing_only in imports(PACKAGE / f"{module}.py"):
        if name.startswith("attnsweep.") and not typing_only:
            other = name.split(".")[1]
            if other in LAYER:  # else a name of attnsweep/__init__.py
                assert LAYER[other] < LAYER[module], f"{module} imports {other}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("cupy", {"device"}),
        ("torch", {"baselines"}),
        ("triton", {"triton_flash"}),
        ("cuda", {"compiler", "device"}),
    ],
)
def test_gpu_libraries_stay_where_they_belong(package, allowed):
    users = {
        module
        for module in MODULES
        for name, _ in imports(PACKAGE / f"{module}.py")
        if name.split(".")[0] == package
    }
    assert users == allowed


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_long(module):
    assert len((PACKAGE / f"{module}.py").read_text().splitlines()) <= 500

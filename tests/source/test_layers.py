"""The shape of the package: which room may import which, and which libraries stay where."""

import ast
from functools import cache
from pathlib import Path

import pytest

import attnsweep

PACKAGE = Path(attnsweep.__file__).parent
# A room imports its own files and lower rooms: those before a `<`.
LAYERS = (
    "core < family < specs < compile < device, store < verify, baselines < bench < choose < reports"
    " < tools, regress, serve < sweep < cli, api"
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS.split(" < ")) for room in rooms.split(", ")}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
CODE = [path for path in FILES if path.name not in ("__init__.py", "__main__.py")]


def room(path: Path) -> str:
    """The first folder of a path in the package, or the file's own name."""
    return path.parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[str]:
    """Modules of every import statement, also those that are only for type checking."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "attnsweep":
            found += [f"attnsweep.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", CODE, ids=str)
def test_a_file_imports_only_lower_rooms(path):
    assert room(path) in LEVEL, f"{path} is in no room of LAYERS"
    names = {name.split(".")[1] for name in imports(path) if name.startswith("attnsweep.")}
    for other in (names & LEVEL.keys()) - {room(path)}:
        assert LEVEL[other] < LEVEL[room(path)], f"{path} imports {other}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("cupy", {"device", "verify", "bench", "tools"}),
        ("torch", {"baselines", "serve", "compile/traced"}),
        ("triton", {"baselines", "compile/traced"}),
        ("cuda", {"compile", "device", "serve", "baselines"}),
    ],
)
def test_gpu_libraries_stay_where_they_belong(package, allowed):
    users = [path for path in CODE for name in imports(path) if name.split(".")[0] == package]
    assert not [path for path in users if not any(path.is_relative_to(place) for place in allowed)]


def graph() -> dict[Path, set[Path]]:
    """The files that each file imports while it is imported itself."""
    by_module = {".".join(("attnsweep", *p.with_suffix("").parts)): p for p in CODE}
    found: dict[Path, set[Path]] = {}
    for path in CODE:
        tree = ast.parse((PACKAGE / path).read_text())
        names = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[path] = {by_module[name] for name in names & by_module.keys()} - {path}
    return found


def test_no_files_import_each_other_in_a_circle():
    left = graph()
    while free := [path for path, needs in left.items() if not needs & left.keys()]:
        for path in free:
            del left[path]
    assert not left


@pytest.mark.parametrize("path", [p for p in CODE if room(p) in ("device", "verify", "baselines", "bench")], ids=str)
def test_rooms_of_the_gpu_process_keep_nothing_between_problems(path):
    """What outlasts a problem is in bench.process_state: hidden state made one problem depend on others."""
    tree = ast.parse((PACKAGE / path).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            assert ast.unparse(node.value) not in ("{}", "[]", "set()", "threading.local()"), node


# ---- programs and tests that need a GPU import names that exist: nothing here imports them ----
ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for folder in ("tests/gpu", "benchmarks", "scripts") for path in (ROOT / folder).glob("*.py"))


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

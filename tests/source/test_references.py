"""What comments and docstrings refer to exists: `see choose.ranking.rank` is a function there."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import attnsweep

PACKAGE = Path(attnsweep.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
SUFFIXES = ("py", "md", "cu", "cuh", "json", "jsonl", "yaml", "toml", "csv")
ELSEWHERE = ("nvml.h", "NAME.py")
# `see NAME`, and a dotted name in brackets. Words of one piece are sentences, but for CamelCase and snake_case.
DOTTED = r"[A-Za-z_]\w*(?:[./][A-Za-z_]\w*)+"
REFERENCE = re.compile(rf"\bsee ({DOTTED}|_?[A-Z][a-z]+[A-Z]\w*|[a-z]+_\w+)|\(([a-z_]+\.[a-z]+_\w+)\)")


def comments(source: str) -> list[str]:
    """The docstrings of a file, and its comments, those of successive lines as one."""
    tree, said, last = ast.parse(source), [], -1
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said.append(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] == last + 1:
                said[-1] += token.string[1:]
            else:
                said.append(token.string[1:])
            last = token.start[0]
    return said


@cache
def known() -> dict[str, set[str]]:
    """The names that each module and each class of the package has, by the last part of its own name."""
    found = defaultdict(set, {"attnsweep": set(attnsweep.__all__)})
    for path in FILES:
        module = path.parent.name if path.stem == "__init__" else path.stem
        found[path.parent.name].add(path.stem)
        for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
            for child in ast.iter_child_nodes(node):
                name = getattr(child, "name", None) or getattr(getattr(child, "target", None), "id", None)
                names = [name, *(getattr(each, "id", None) for each in getattr(child, "targets", ()))]
                names += [child.attr] if isinstance(child, ast.Attribute) else []
                for each in filter(None, names):
                    found[module].add(each)
                    if isinstance(node, ast.ClassDef):
                        found[node.name].add(each)
    return found


def exists(reference: str) -> bool:
    """Whether the package, or the repository, has what a reference names."""
    if reference in ELSEWHERE:
        return True
    if "/" in reference or reference.rpartition(".")[2] in SUFFIXES:
        return any((place / reference).exists() for place in (ROOT, ROOT / "docs")) or any(PACKAGE.rglob(reference))
    *before, name = reference.split(".")
    if before:
        return name in known().get(before[-1], ())
    return name in known() or any(name in names for names in known().values())


def references(text: str) -> list[str]:
    """What a comment or docstring refers to."""
    return [(a or b).rstrip(".") for a, b in REFERENCE.findall(text)]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_what_a_comment_refers_to_exists(path):
    source = (PACKAGE / path).read_text(encoding="utf-8")
    assert [each for text in comments(source) for each in references(text) if not exists(each)] == []


@pytest.mark.parametrize(
    "text", ["see numerics.limits", "aligned (drift.at_pace).", "see choose.base.below_ranking", "see NoSuchClass"]
)
def test_a_stale_reference_is_found(text):
    (found,) = references(text)
    assert not exists(found)


@pytest.mark.parametrize(
    "text", ["see core/ops.py", "see Trial.key", "see rows_of_today", "(pace.at_pace)", "see CHANGELOG.md"]
)
def test_a_reference_resolves(text):
    assert references(text)
    assert all(map(exists, references(text)))

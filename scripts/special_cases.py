"""Count the files of the package that ask for a special case: an op, FP8, chunks, a layout.

It reads syntax and not text, so that renaming does not help: a function that only answers the
question under another name (`return problem.op is BACKWARD`) asks it wherever it is called. An
import alone asks nothing, and no docstring does. `python scripts/special_cases.py [--list]`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "attnsweep"
Question = Callable[[ast.AST], bool]


def _word(node: ast.AST) -> str | None:
    """The name that an expression ends in: `BACKWARD` of `ops.BACKWARD`."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _any_name(node: ast.AST) -> str | None:
    """The name that a node uses or gives, whatever it is of."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return name
        case ast.keyword(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return None


def _compares_with(node: ast.AST, word: str) -> bool:
    return isinstance(node, ast.Compare) and word in map(_text, [node.left, *node.comparators])


def _asks_for_backward(node: ast.AST) -> bool:
    return _word(node) == "BACKWARD" or _compares_with(node, "backward")


def _asks_for_fp8(node: ast.AST) -> bool:
    return bool(re.match("e4m3", _text(node) or "", re.IGNORECASE))


def _asks_for_chunks(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):  # what stands in the file of chunks is about them
        return "chunk" in (node.module or "")
    # Names of transformers and of FlashAttention-3 for windows side by side.
    name = (_any_name(node) or _text(node) or "").lower()
    return "chunk" in name and name not in ("attention_chunk_size", "attention_chunk")


def _asks_for_layout(node: ast.AST) -> bool:
    layouts = {"padded", "packed"}
    return _word(node) in {"Padded", "Packed"} or any(_compares_with(node, w) for w in layouts)


@dataclass(frozen=True)
class SpecialCase:
    """What asks for it, and how much of the package may."""

    name: str
    asks: Question
    most: int
    """Files at most that may ask, or lines."""
    lines: bool = False
    aliases: bool = True
    """Whether a function that answers only this question asks it in the name of its callers."""


SPECIAL_CASES = (
    SpecialCase("backward", _asks_for_backward, 8),
    SpecialCase("fp8", _asks_for_fp8, 8),
    SpecialCase("chunks", _asks_for_chunks, 5, aliases=False),
    SpecialCase("layout", _asks_for_layout, 14),
    SpecialCase('"o"', lambda node: _text(node) == "o", 10, lines=True, aliases=False),
)


class Source:
    """A file of the package: what can ask in it, docstrings left out, and what can be an alias."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        every = list(ast.walk(tree))
        told = {
            id(n.value) for n in every if isinstance(n, ast.Expr) and _text(n.value) is not None
        }
        self.nodes = [n for n in every if isinstance(n, _ASKING) and id(n) not in told]
        self.aliases = [n for n in every if isinstance(n, ast.FunctionDef | ast.Assign)]


_ASKING = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.arg, ast.keyword),
    *(ast.FunctionDef, ast.ClassDef, ast.ImportFrom),
)


@cache
def sources() -> tuple[Source, ...]:
    """All files of the package."""
    return tuple(
        Source(str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    )


def _answers_only(node: ast.AST, asks: Question) -> bool:
    """Whether an expression is the question itself: an ask, a comparison with one, its denial."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _answers_only(node.operand, asks)
    if isinstance(node, ast.Call):
        what = node.func
        begins = isinstance(what, ast.Attribute) and what.attr == "startswith"
        return asks(what) or (begins and any(map(asks, node.args)))
    if isinstance(node, ast.Compare):
        return asks(node) or any(map(asks, [node.left, *node.comparators]))
    return asks(node)


def _alias(node: ast.AST, asks: Question) -> str | None:
    """The name of a function, or of a value, that answers this question and no other."""
    match node:
        case ast.FunctionDef(name=name, body=[*_, ast.Return(value=ast.expr() as value)] as body):
            rest = [each for each in body[:-1] if not isinstance(each, ast.Expr)]
            return name if not rest and _answers_only(value, asks) else None
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda(body=value)):
            return name if _answers_only(value, asks) else None
    return None


def asked(case: SpecialCase) -> Mapping[str, list[int]]:
    """The lines that ask for a special case, by file."""
    names: set[str] = set()

    def asks(node: ast.AST) -> bool:
        return case.asks(node) or _word(node) in names

    while case.aliases:
        found = {
            name
            for s in sources()
            for node in s.aliases
            if (name := _alias(node, asks)) is not None
        }
        if found <= names:
            break
        names |= found
    by_file = {}
    for source in sources():
        lines = {getattr(node, "lineno", 0) for node in source.nodes if asks(node)}
        if lines:
            by_file[source.path] = sorted(lines)
    return by_file


def count(case: SpecialCase) -> int:
    """How many files ask, or lines."""
    by_file = asked(case)
    return sum(map(len, by_file.values())) if case.lines else len(by_file)


def main(arguments: list[str]) -> None:
    """Print the counts; with --list, the lines too."""
    for case in SPECIAL_CASES:
        what = "lines" if case.lines else "files"
        print(f"{case.name:9} {count(case):3} {what}, at most {case.most}")
        if "--list" in arguments:
            for path, lines in asked(case).items():
                print(f"    {path}: {', '.join(map(str, lines))}")


if __name__ == "__main__":
    main(sys.argv[1:])

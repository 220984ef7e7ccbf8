"""The specs that come with attnsweep."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from attnsweep.core.errors import SpecError
from attnsweep.core.files import shipped
from attnsweep.specs.yaml_file import closest


def shipped_specs() -> dict[str, Path]:
    """Every shipped spec by name, sorted."""
    return {path.stem: path for path in sorted(shipped("configs").glob("*.yaml"))}


def about(path: Path) -> str:
    """The first sentence of the comment that a spec begins with; empty if it has none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    own = [line for line in lines if not line.startswith("# yaml-language-server")]
    comment = itertools.takewhile(lambda line: line.startswith("#"), own)
    text = " ".join(line.lstrip("# ") for line in comment)
    return re.split(r"(?<=[^.])\. (?=[A-Z`])", text)[0].rstrip(".")


def shipped_hint(word: str = "") -> str:
    """A guess which shipped spec `word` meant, and the command that lists them."""
    close = closest(word, shipped_specs())
    asked = f"did you mean {close!r}? " if close else ""
    return f"{asked}attnsweep list --specs: those that there are; attnsweep init: write one"


def find(path: Path) -> Path:
    """`path`, or the shipped spec of its name. Raises SpecError if it is neither."""
    file, _, function = str(path).partition(":")
    if file.endswith(".py"):
        call = f"{file}:{function or 'FUNCTION'}"
        hint = (
            f"attnsweep tune --kernel {call} SHAPE sweeps it, attnsweep inspect {call} compiles it"
        )
        raise SpecError("a kernel, and no spec", where=str(path), hint=hint)
    if path.exists():
        return path
    if path.parent in (Path(), Path("configs")):
        shipped = shipped_specs().get(path.name.removesuffix(".yaml"))
        if shipped is not None:
            return shipped
    raise SpecError("no such file", where=str(path), hint=shipped_hint(path.stem))

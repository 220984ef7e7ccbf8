"""Instructions in a cubin's machine code, counted by kind, with nvdisasm.

Counts are static: each instruction once, however often a loop runs it. Disassembling takes about
0.35 s a cubin, so it is done on demand, and the counts are kept next to the cubin in the cache.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attnsweep.compile.nvrtc import Cubin
from attnsweep.core.errors import ToolchainError
from attnsweep.core.files import install_command, write_file

WHEEL = "nvidia-cuda-nvdisasm"
# Opcode without modifiers to the kind that it is counted as. QGMMA is HGMMA of FP8.
_KINDS = {name.upper(): name for name in ("hgmma", "hmma", "ffma", "mufu", "ldl", "stl", "bar")}
_KINDS["QGMMA"] = "hgmma"
_BRANCHES = {"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"}
_PREDICATE = re.compile(r"!?U?P\d")
_TIMEOUT_S = 60.0
_KEPT = "sass.json"
_FORMAT = 3
"""Format of the kept counts; other formats are disassembled again."""


@cache
def nvdisasm() -> Path:
    """The disassembler: from its wheel, otherwise from the PATH. Raises ToolchainError."""
    try:
        for file in metadata.files(WHEEL) or ():
            if file.name in ("nvdisasm", "nvdisasm.exe"):
                path = Path(str(file.locate()))
                if path.is_file():
                    return path
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("nvdisasm")
    if found is None:
        raise ToolchainError(
            "counting machine instructions needs nvdisasm, which is not installed",
            hint=install_command("inspect"),
        )
    return Path(found)


def counts(cubin: Cubin) -> dict[str, dict[str, int]]:
    """Function name to its instructions of each kind, which spec.require.INSTRUCTIONS lists.

    Raises ToolchainError if nvdisasm is missing or cannot read the cubin.
    """
    kept = cubin.path.with_name(_KEPT)
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        if (found["digest"], found["format"]) == (cubin.digest, _FORMAT):
            return {str(name): dict(each) for name, each in found["functions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    functions = disassemble(cubin.path)
    data = {"digest": cubin.digest, "format": _FORMAT, "functions": functions}
    write_file(kept, json.dumps(data).encode())
    return functions


def disassemble(cubin: Path) -> dict[str, dict[str, int]]:
    """Count the instructions of a cubin file, of each function, by kind."""
    command = [str(nvdisasm()), "-json", str(cubin)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        # For an older cubin, a warning comes first.
        text = done.stdout.decode(errors="replace")
        _, functions = json.loads(text[text.index("[") :])
        return {each["function-name"]: count(each["sass-instructions"]) for each in functions}
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        said = "" if isinstance(error, OSError) else "it printed no JSON"
        if isinstance(error, subprocess.TimeoutExpired):
            said = f"no answer in {_TIMEOUT_S:.0f} s"
        elif not isinstance(error, OSError) and done.stderr:
            said = done.stderr.decode(errors="replace").strip().splitlines()[0]
        raise ToolchainError(
            f"nvdisasm cannot read this cubin: {said or error}",
            where=str(cubin),
            hint=f"nvdisasm must know the architecture: pip install -U {WHEEL}",
        ) from error


def count(instructions: list[Mapping[str, Any]]) -> dict[str, int]:
    """Number of instructions of each kind.

    Instructions that can never run do not count: those under `@!PT`, and the endless loop after the
    end.
    """
    found: Counter[str] = Counter()
    beside: int | None = None  # exponentials since a wait for wgmma, if no product began since
    for index, instruction in enumerate(instructions):
        predicate = str(instruction.get("predicate", ""))
        opcode = str(instruction["opcode"]).split(".")[0]
        operands = str(instruction.get("operands", ""))
        if predicate in ("@!PT", "@!UPT") or opcode == "NOP":
            continue
        # Instructions are 16 bytes; branches to themselves fill the space after the last EXIT.
        if opcode == "BRA" and operands == hex(16 * index):
            continue
        found["instructions"] += 1
        if opcode in _KINDS:
            found[_KINDS[opcode]] += 1
        if instruction["opcode"] == "MUFU.EX2" and beside is not None:
            beside += 1
        elif _KINDS.get(opcode) == "hgmma":
            beside = None
        elif str(instruction["opcode"]).startswith("WARPGROUP.DEPBAR"):
            found["ex2_before_wait"] += beside or 0
            beside = 0
        if opcode in _BRANCHES:
            found["branches"] += 1
            if predicate or _PREDICATE.search(operands):
                found["predicated_branches"] += 1
    kinds = ("instructions", *_KINDS.values(), "ex2_before_wait", "branches", "predicated_branches")
    return {kind: found[kind] for kind in dict.fromkeys(kinds)}

"""The run directory: trials that survive a crash, their provenance, and reading them back.

    results/<gpu>/<spec>/  spec.yaml  environment.json  spaces.json  trials.jsonl  ranking.csv
                           ranking.md  cubins/

Only the parent process writes, through one `Store` that holds the directory's lock. Readers take no
lock: they see a row once its line is whole, and drop a torn last line.

A run to be kept is packed: it has trials.jsonl.xz instead, and no tables. It can be read, ranked,
shown and checked like any other. A sweep does not resume it: its rows were measured on another
card, so a sweep in its directory starts without rows.
"""

from __future__ import annotations

import errno
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from attnsweep.core.errors import StoreError, reason
from attnsweep.core.files import pack_code, write_file
from attnsweep.core.trial import Environment, Trial
from attnsweep.store.rows import _printable, first_fault, read_rows, row_bytes

TRIALS = "trials.jsonl"
PACKED = "trials.jsonl.xz"
ROWS = (TRIALS, PACKED)  # of a run with both, the first is read
SPEC = "spec.yaml"
ENVIRONMENT = "environment.json"
SPACES = "spaces.json"
CUBINS = "cubins"
LOCK = ".lock"
_HINT_DAMAGED = "copy the run again, or restore the file from version control"


def read_trials(path: Path) -> tuple[Sequence[Trial], list[str]]:
    """The rows of a trials.jsonl, plain or packed, in order of first appearance, and warnings.

    A later row with the same key replaces the earlier one in its place. A torn last line is
    dropped; a line that is no Trial is skipped; a row that says ok and cannot be so, as with a time
    that is NaN, is kept and not ranked. Each gives one warning, `file:line: reason`. Raises
    StoreError if the file cannot be read.
    """
    try:
        return read_rows(_opened(path), path)
    except (EOFError, lzma.LZMAError) as error:
        what = f"the packed trials are damaged: {error}"
        raise StoreError(what, where=str(path), hint=_HINT_DAMAGED) from error
    except OSError as error:
        raise _store_error(error, path, "cannot read the trials") from error


# From this size on, packed rows are unpacked into a temporary file.
_UNPACKED_BYTES = 2**25


def _opened(path: Path) -> BinaryIO:
    if path.suffix != ".xz":
        return path.open("rb")
    unpacked: Any = tempfile.SpooledTemporaryFile(_UNPACKED_BYTES)  # noqa: SIM115
    try:
        with lzma.open(path) as packed:
            shutil.copyfileobj(packed, unpacked)
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return cast(BinaryIO, unpacked)


def _store_error(error: OSError, path: Path, doing: str, hint: str | None = None) -> StoreError:
    if hint is None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space there, then run the same command again: it resumes"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "check its permissions, or choose another place with --results"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            hint = "the name is taken: move that file away, or use --results"
    return StoreError(f"{doing}: {reason(error)}", where=str(path), hint=hint)


@dataclass(frozen=True)
class Run:
    """A run as it was when read. Reading takes no lock, so the run may still be going on."""

    directory: Path
    trials: Sequence[Trial] = field(repr=False)
    """A list, or the StoredRows of a large file."""
    environment: Environment | None = field(repr=False)
    spec_text: str | None = field(repr=False)
    warnings: list[str]
    spaces: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Candidates per family and problem (spec.plan.plan_facts), and why a search `ended`."""


def open_run(path: Path) -> Run:
    """Read a run: its directory, or a trials file in it (even an older trials.<UTC time>.jsonl).

    Raises StoreError if no such run exists, if `path` is not one, or if it holds no trial yet.
    """
    if not path.exists():
        raise StoreError(
            "no such run", where=str(path), hint="give a run directory, results/<gpu>/<spec>"
        )
    trials_path = trials_of(path) if path.is_dir() else path
    if path.is_dir() and not trials_path.is_file():
        within = [str(run) for run in find_runs(path)]
        some = ", ".join(within[:5]) + (" …" if len(within) > 5 else "")
        raise StoreError(
            f"not a run directory: it has no {TRIALS}",
            where=str(path),
            hint=f"runs below it: {some}" if within else "give one that `attnsweep run` wrote",
        )
    if not trials_path.name.endswith((".jsonl", ".jsonl.xz")):
        beside = trials_of(trials_path.parent).is_file()
        raise StoreError(
            f"not a run: neither a directory nor a {TRIALS}",
            where=str(path),
            hint=f"give its run: {trials_path.parent}" if beside else None,
        )
    directory = trials_path.parent
    trials, warnings = read_trials(trials_path)
    if not trials:
        spec_path = directory / SPEC
        again = f"attnsweep run {spec_path if spec_path.is_file() else 'SPEC'}"
        if warnings:
            what = f"none of its rows can be read ({warnings[0]})"
            raise StoreError(what, where=str(path), hint=f"restore it, or record it again: {again}")
        raise StoreError("nothing is recorded yet", where=str(path), hint=f"run: {again}")
    return _described(directory, trials, warnings)


def _described(directory: Path, trials: Sequence[Trial], warnings: list[str]) -> Run:
    """The run with the files next to its trials; a file that cannot be read is a warning."""
    environment, odd_environment = _read(
        directory / ENVIRONMENT, Environment.model_validate_json, None
    )
    spec, odd_spec = _read(directory / SPEC, _text, None)
    none: list[dict[str, Any]] = []
    spaces, odd_spaces = _read(directory / SPACES, _spaces, none)
    warnings += [odd for odd in (odd_environment, odd_spec, odd_spaces) if odd]
    return Run(directory, trials, environment, spec, warnings, spaces)


def trials_of(directory: Path) -> Path:
    """The file with a run's rows: trials.jsonl, or the packed one if only that exists."""
    paths = (directory / name for name in ROWS)
    return next((path for path in paths if path.is_file()), directory / TRIALS)


T = TypeVar("T")


def _read(path: Path, parse: Callable[[bytes], T], missing: T) -> tuple[T, str | None]:
    """The content of a file next to the trials, and a warning if it is damaged."""
    try:
        return parse(_printable(path.read_bytes())), None
    except FileNotFoundError:
        return missing, None
    except OSError as error:
        return missing, f"{path}: cannot be read: {error.strerror}"
    except ValidationError as error:
        return missing, f"{path}: not an environment: {first_fault(error)}"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return missing, f"{path}: not JSON: {error}"
    except RecursionError:
        return missing, f"{path}: not JSON: nested too deeply"
    except ValueError as error:
        return missing, f"{path}: {error}"


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot be read: {error}") from None


def _spaces(data: bytes) -> list[dict[str, Any]]:
    facts = json.loads(data)
    if not isinstance(facts, list) or not all(isinstance(fact, dict) for fact in facts):
        raise ValueError("not a list of objects")
    try:
        for fact in facts:
            _Space.model_validate(fact)
    except ValidationError as error:
        raise ValueError(f"not what a run counts: {first_fault(error)}") from None
    return facts


class _Space(BaseModel):
    """What reports read of an entry of spaces.json: see specs.plan.plan_facts."""

    model_config = ConfigDict(strict=True)
    problem: str = ""
    kernel: str
    candidates: int = 0
    configs: int = 0
    removed: dict[str, int] = {}
    serves: list[str] = []
    refused: str = ""
    ended: str = ""


def find_runs(results_dir: str | Path) -> list[Path]:
    """Every run directory at or below `results_dir`, sorted by path."""
    found = {path.parent for name in ROWS for path in Path(results_dir).rglob(name)}
    return sorted(directory for directory in found if trials_of(directory).is_file())


def latest_run(results_dir: str | Path) -> Run:
    """The run below `results_dir` whose trials were written last; of equals, the last by path.

    Runs without rows do not count. Raises StoreError if there is none, OSError as `os.scandir`.
    """
    if Path(results_dir).is_dir():
        os.scandir(results_dir).close()  # find_runs takes one that may not be read for empty
    written = []
    for directory in find_runs(results_dir):
        with suppress(OSError):
            stat = trials_of(directory).stat()
            if stat.st_size:
                written.append((stat.st_mtime_ns, directory))
    if not written:
        hint = "run: attnsweep run SPEC, or give the directory of a run"
        raise StoreError("no runs here", where=str(results_dir), hint=hint)
    return open_run(max(written)[1])


def environment_of(run: Run) -> Environment:
    """Where a run was measured. Raises StoreError if the file is missing, or damaged."""
    if run.environment is not None:
        return run.environment
    path, odd = run.directory / ENVIRONMENT, damage(run)
    if odd is None:
        hint = "copy the run whole, or sweep it again: attnsweep run SPEC --fresh"
        what = f"no {ENVIRONMENT}, so its GPU is unknown"
        raise StoreError(what, where=str(run.directory), hint=hint)
    what = f"damaged, so the GPU is unknown: {odd}"
    raise StoreError(what, where=str(path), hint=_HINT_DAMAGED)


def damage(run: Run) -> str | None:
    """Why a run's environment.json is unusable; None if the file is missing."""
    begins = f"{run.directory / ENVIRONMENT}: "
    odd = (warning for warning in run.warnings if warning.startswith(begins))
    return next((warning.removeprefix(begins) for warning in odd), None)


# `attnsweep report` makes these from the rows again.
DERIVED = ("ranking.csv", "ranking.md", "report.html")


def pack(directory: Path) -> int:
    """Pack rows and machine code of a run, in place; returns the bytes of its compressed rows.

    Packing drops replaced rows, lines that are not rows, and fingerprints, which only a resume
    reads. The same rows give the same bytes. A packed run stays as it is. Raises StoreError if the
    run cannot be read or written.
    """
    try:
        pack_code(directory / CUBINS)
    except OSError as error:
        raise StoreError(f"cannot pack: {error.strerror}", where=str(directory)) from error
    if trials_of(directory).name == PACKED:
        return (directory / PACKED).stat().st_size
    trials, _ = read_trials(trials_of(directory))
    rows = b"".join(row_bytes(trial.with_(fingerprint=None)) for trial in trials)
    data = lzma.compress(rows, preset=7 | lzma.PRESET_EXTREME)  # two thirds of gzip's bytes
    try:
        write_file(directory / PACKED, data, durable=True)
        for name in (TRIALS, *DERIVED):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot pack: {error.strerror}", where=str(directory)) from error
    return len(data)

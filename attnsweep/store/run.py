"""The run directory: trials that survive a crash, their provenance, and reading them back.

    results/<gpu>/<spec>/  spec.yaml  environment.json  spaces.json  trials.jsonl  ranking.csv
                           ranking.md  cubins/

A recorded run that is kept has trials.jsonl.gz instead, and no tables: see pack.py.

Only the parent process writes, through one `Store` that holds the directory's lock. Readers take no
lock: they see a row once its line is whole, and drop a torn last line.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError
from pydantic_core import to_json

from attnsweep.errors import AttnsweepError, StoreError
from attnsweep.files import sync_folder, write_file
from attnsweep.problem import Problem
from attnsweep.trial import Environment, Trial

TRIALS = "trials.jsonl"
PACKED = "trials.jsonl.gz"
SPEC = "spec.yaml"
ENVIRONMENT = "environment.json"
SPACES = "spaces.json"
_OLD_SPACES = "planned.json"  # the same file in runs of an older version
CUBINS = "cubins"
LOCK = ".lock"
_HINT_DAMAGED = "copy the run again, or restore the file from version control"
# Without a limit, a foreign file would give one warning per line.
MAX_WARNINGS = 20


def read_trials(path: Path) -> tuple[list[Trial], list[str]]:
    """The rows of a trials.jsonl, plain or packed, in order of first appearance, and warnings.

    A later row with the same key replaces the earlier one in its place. A torn last line is
    dropped; a line that is no Trial is skipped. Each gives one warning, `file:line: reason`. Raises
    StoreError if the file cannot be read.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            # An empty file was cut, although gzip reads it as an archive of nothing.
            data = gzip.decompress(data or b"\x1f\x8b")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"the packed trials are damaged: {error}"
        raise StoreError(what, where=str(path), hint=_HINT_DAMAGED) from error
    except OSError as error:
        raise _store_error(error, path, "cannot read the trials") from error
    trials, warnings, _ = _parse_trials(data, path)
    return list(trials.values()), warnings


def _parse_trials(
    data: bytes, path: Path
) -> tuple[dict[tuple[object, ...], Trial], list[str], int]:
    """Trials by key, warnings, and the number of whole rows, including replaced ones."""
    trials: dict[tuple[object, ...], Trial] = {}
    warnings: list[str] = []
    rows = 0
    *whole, last = data.split(b"\n")
    for number, line in enumerate([*whole, last], start=1):
        if not line.strip():
            continue
        parsed = _parse_row(line)
        if isinstance(parsed, Trial):
            trials[parsed.key] = parsed
            rows += 1
        elif number > len(whole):
            warnings.append(
                f"{path}:{number}: dropped the incomplete last line "
                "(its run was killed, or is still writing)"
            )
        else:
            warnings.append(f"{path}:{number}: skipped, not a trial: {parsed}")
    if len(warnings) > MAX_WARNINGS:
        rest = len(warnings) - MAX_WARNINGS
        warnings = [*warnings[:MAX_WARNINGS], f"{path}: and {rest} more lines like these"]
    return trials, warnings, rows


def _parse_row(line: bytes) -> Trial | str:
    """The Trial in one line, or the reason why there is none."""
    try:
        return Trial.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else first["msg"]
    except AttnsweepError as error:
        return error.what
    except AttributeError as error:
        # A Problem accepts no other fields, so one more means a shape that this version misreads.
        return f"written by another version of attnsweep? {error}"


def row_bytes(trial: Trial) -> bytes:
    """One line of strict JSON with its newline; NaN and infinity are strings, which read back."""
    if trial.detail is not None:
        # Compiler logs may hold bytes that are not UTF-8 and arrive as lone surrogates.
        trial = trial.with_(detail=trial.detail.encode("utf-8", "replace").decode("utf-8"))
    return to_json(trial.model_dump(mode="json"), inf_nan_mode="strings") + b"\n"


def _store_error(error: OSError, path: Path, doing: str, hint: str | None = None) -> StoreError:
    reason = error.strerror or str(error)
    if hint is None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space there, then run the same command again: it resumes"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "check its permissions, or choose another place with --results"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            hint = "the name is taken: move that file away, or use --results"
    return StoreError(f"{doing}: {reason}", where=str(path), hint=hint)


def _write_all(fd: int, data: bytes) -> None:
    """One os.write. A short write means that the disk is full, so raise ENOSPC for it."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, data: bytes) -> None:
    try:
        write_file(path, data, durable=True)
    except OSError as error:
        raise _store_error(error, path, "cannot write") from error


@dataclass(frozen=True)
class Run:
    """A run as it was when read. Reading takes no lock, so the run may still be going on."""

    directory: Path
    trials: list[Trial]
    environment: Environment | None
    spec_text: str | None
    warnings: list[str]
    spaces: list[dict[str, Any]] = field(default_factory=list)
    """Candidates per family and problem (spec.plan.plan_facts), and why a search `ended`."""


class Store:
    """The writer of one run directory, a context manager. Holds its lock until closed.

    warnings: faults of the trials found there. rows: number of rows safely in the file, including
    replaced ones.
    """

    def __init__(self, directory: Path, lock: FileLock, *, fresh: bool, derived: bool) -> None:
        """Use `Store.open`, which takes the lock."""
        self.directory = directory
        self.path = directory / TRIALS
        self._lock = lock
        self._spaces: list[dict[str, Any]] = []
        if fresh:
            self._move_aside()
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
            flags |= os.O_TRUNC if derived else 0
            self._fd = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise _store_error(error, self.path, "cannot open the trials for writing") from error
        try:
            data = self.path.read_bytes()
        except OSError as error:
            os.close(self._fd)
            raise _store_error(error, self.path, "cannot read the trials") from error
        self._trials, self.warnings, self.rows = _parse_trials(data, self.path)
        self._of: dict[Problem, dict[tuple[object, ...], Trial]] = {}
        for trial in self._trials.values():
            self._of.setdefault(trial.problem, {})[trial.key] = trial
        sync_folder(directory)

    @classmethod
    def open(cls, directory: Path, *, fresh: bool = False, derived: bool = False) -> Store:
        """Create or resume the run in `directory`, for this process alone.

        fresh: move earlier trials to trials.<UTC time>.jsonl, and start with none. derived: drop
        them, as a replay makes them again. Raises StoreError if the run cannot be created or
        written, or if another process is writing there.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _store_error(error, directory, "cannot create the run directory") from error
        lock = FileLock(directory / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise StoreError(
                "another attnsweep run is writing here",
                where=str(directory),
                hint="wait until it ends, or choose another place with --results",
            ) from error
        except (OSError, NotImplementedError) as error:
            reason = error if isinstance(error, OSError) else OSError(str(error))
            raise _store_error(reason, directory, "cannot lock the run directory") from error
        try:
            return cls(directory, lock, fresh=fresh, derived=derived)
        except BaseException:
            lock.release()
            raise

    def _move_aside(self) -> None:
        aside = self._aside()
        try:
            if not self.path.exists() or self.path.stat().st_size == 0:
                return
            self.path.rename(aside)
        except OSError as error:
            raise _store_error(error, self.path, f"cannot move to {aside.name}") from error

    def _aside(self) -> Path:
        """A free name for rows that are set aside."""
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
        paths = (self.path.with_name(f"trials.{name}.jsonl") for name in names)
        return next(path for path in paths if not path.exists())

    def set_aside(self, problem: Problem) -> None:
        """Move a problem's rows to trials.<UTC time>.jsonl. Raises StoreError.

        A process that is killed meanwhile leaves them in both files.
        """
        out: list[bytes] = []
        rest: list[bytes] = []
        for line in self.path.read_bytes().splitlines(keepends=True):
            row = _parse_row(line)
            (out if isinstance(row, Trial) and row.problem == problem else rest).append(line)
        if not out:
            return
        _replace(self._aside(), b"".join(out))
        _replace(self.path, b"".join(rest))
        os.close(self._fd)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
        self.rows -= len(out)
        for key in self._of.pop(problem, {}):
            del self._trials[key]

    @property
    def trials(self) -> list[Trial]:
        """The directory's rows, in order of first appearance, including appended ones."""
        return list(self._trials.values())

    def rows_of(self, problem: Problem) -> list[Trial]:
        """Those of one problem, in the same order, without a look at the others."""
        return list(self._of.get(problem, {}).values())

    def append(self, trial: Trial) -> None:
        """Add one row durably: when this returns, the whole row is on disk, and otherwise nothing.

        Raises StoreError, which says how many rows are safe and how to go on.
        """
        data = row_bytes(trial)
        length: int | None = None
        try:
            length = self._end_last_line()
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError as error:
            if length is not None:
                with suppress(OSError):
                    os.ftruncate(self._fd, length)
            raise _store_error(
                error,
                self.path,
                "cannot store a row",
                hint=f"{self.rows} rows are safe; once this is fixed, "
                "run the same command again: it resumes after them",
            ) from error
        self.rows += 1
        self._trials[trial.key] = trial
        self._of.setdefault(trial.problem, {})[trial.key] = trial

    def _end_last_line(self) -> int:
        """The file's length, after ensuring that the file is empty or ends in a newline.

        A torn last line is cut off. A last line that lacks only its newline, which readers accept,
        gets one.
        """
        length = os.lseek(self._fd, 0, os.SEEK_END)
        if length == 0:
            return 0
        os.lseek(self._fd, length - 1, os.SEEK_SET)
        if os.read(self._fd, 1) == b"\n":
            return length
        data = self.path.read_bytes()
        start = data.rfind(b"\n") + 1
        if isinstance(_parse_row(data[start:]), Trial):
            _write_all(self._fd, b"\n")
            return length + 1
        os.ftruncate(self._fd, start)
        return start

    def describe(
        self, spec: str, environment: Environment, spaces: Sequence[Mapping[str, Any]] | None = ()
    ) -> None:
        """Write the resolved spec.yaml, environment.json and spaces.json (None: keep that one)."""
        self._write_text(SPEC, spec)
        self._write_text(ENVIRONMENT, environment.model_dump_json(indent=2) + "\n")
        if spaces is not None:
            self._spaces = [dict(facts) for facts in spaces]
            self._write_spaces()

    def end_searches(self, problem: str, endings: Mapping[str, str]) -> None:
        """Note in spaces.json why the searches of a problem ended, by family."""
        for facts in self._spaces:
            if facts.get("problem") == problem and facts.get("kernel") in endings:
                facts["ended"] = endings[facts["kernel"]]
        if endings:
            self._write_spaces()

    def _write_spaces(self) -> None:
        lines = ",\n".join(json.dumps(facts, ensure_ascii=False) for facts in self._spaces)
        self._write_text(SPACES, f"[\n{lines}\n]\n")

    def finish(self, render: Callable[[Run], Mapping[str, str]] | None = None) -> Run:
        """The run as it is now. render: makes names and texts of files from it, which are written.

        `store.finish(tables.files)` writes ranking.csv and ranking.md.
        """
        run = _described(self.directory, self.trials, list(self.warnings))
        for name, text in (render(run) if render else {}).items():
            self._write_text(name, text)
        return run

    def keep_cubin(self, path: Path, name: str) -> Path:
        """Copy a winner's cubin to cubins/`name` and return its path."""
        try:
            return self.keep(name, path.read_bytes())
        except OSError as error:
            raise _store_error(error, path, "cannot read the cubin to keep") from error

    def keep(self, name: str, data: bytes) -> Path:
        """Write cubins/`name`, part of a winner's code, and return its path."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise StoreError(f"cannot keep a cubin as {name!r}", where=str(self.directory))
        kept = self.directory / CUBINS / name
        try:
            kept.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise _store_error(error, kept.parent, "cannot create") from error
        _replace(kept, data)
        return kept

    def _write_text(self, name: str, text: str) -> None:
        _replace(self.directory / name, text.encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the trials and release the lock. Closing again is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
    if not trials_path.name.endswith((".jsonl", ".jsonl.gz")):
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
        because = f" ({warnings[0]})" if warnings else ""
        raise StoreError(f"nothing is recorded yet{because}", where=str(path), hint=f"run: {again}")
    return _described(directory, trials, warnings)


def _described(directory: Path, trials: list[Trial], warnings: list[str]) -> Run:
    """The run with the files next to its trials; a file that cannot be read is a warning."""
    environment, odd_environment = _read_environment(directory / ENVIRONMENT)
    spec, odd_spec = _read_spec(directory / SPEC)
    named = SPACES if (directory / SPACES).exists() else _OLD_SPACES
    spaces, odd_spaces = _read_spaces(directory / named)
    warnings += [odd for odd in (odd_environment, odd_spec, odd_spaces) if odd]
    return Run(directory, trials, environment, spec, warnings, spaces)


def trials_of(directory: Path) -> Path:
    """The file with a run's rows: trials.jsonl, or the packed one if only that exists."""
    plain, packed = directory / TRIALS, directory / PACKED
    return packed if packed.is_file() and not plain.is_file() else plain


def _read_spaces(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The facts in spaces.json, empty if the file is missing, and a warning if it is damaged."""
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], f"{path}: cannot be read: {error.strerror}"
    except ValueError as error:
        return [], f"{path}: not JSON: {error}"
    if not isinstance(facts, list) or not all(isinstance(fact, dict) for fact in facts):
        return [], f"{path}: not a list of objects"
    return facts, None


def _read_spec(path: Path) -> tuple[str | None, str | None]:
    """The text of spec.yaml, None if it is missing, and a warning if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8"), None
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path}: cannot be read: {error}"


def _read_environment(path: Path) -> tuple[Environment | None, str | None]:
    """The environment, None if the file is missing, and a warning if it is damaged."""
    try:
        return Environment.model_validate_json(path.read_bytes()), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path}: cannot be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place}: {first['msg']}" if place else first["msg"]
        return None, f"{path}: not an environment: {what}"


def find_runs(results_dir: Path) -> list[Path]:
    """Every run directory at or below `results_dir`, sorted by path."""
    found = {path.parent for name in (TRIALS, PACKED) for path in results_dir.rglob(name)}
    return sorted(directory for directory in found if trials_of(directory).is_file())


def latest_run(results_dir: Path) -> Run:
    """The run below `results_dir` whose trials were written last; of equals, the last by path.

    Runs without rows do not count. Raises StoreError if there is none, OSError as `os.scandir`.
    """
    if results_dir.is_dir():
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

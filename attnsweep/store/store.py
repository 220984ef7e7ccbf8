"""Writers of a sweep's rows: into a run directory, or through a pipe to its owner."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout

from attnsweep.core.errors import StoreError
from attnsweep.core.files import sync_folder, utf8, write_file
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Trial, unsound
from attnsweep.store.rows import RowReader, parse_trials, row_bytes
from attnsweep.store.run import (
    CUBINS,
    ENVIRONMENT,
    LOCK,
    SPACES,
    SPEC,
    TRIALS,
    _described,
    _store_error,
)

if TYPE_CHECKING:
    from attnsweep.store.run import Run


class Writer(Protocol):
    """The rows and the winners' code of a run; `Store` is the one that writes a directory."""

    @property
    def directory(self) -> Path:
        """The run directory."""

    def rows_of(self, problem: Problem) -> list[Trial]:
        """A problem's rows so far, in the order in which their keys first came."""

    def append(self, trial: Trial) -> None:
        """Add one row."""

    def set_aside(self, problem: Problem) -> None:
        """Take a problem's rows out of the run, into a file next to it."""

    def end_searches(self, problem: str, endings: Mapping[str, str]) -> None:
        """Note why the searches of a problem ended, by family."""

    def keep(self, name: str, data: bytes) -> object:
        """Keep part of a winner's code as `name`."""


def _write_all(fd: int, data: bytes) -> None:
    """One os.write. A short write means that the disk is full, so raise ENOSPC for it."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, data: bytes) -> None:
    try:
        write_file(path, data, durable=True)
    except OSError as error:
        raise _store_error(error, path, "cannot write") from error


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
            with self.path.open("rb") as lines:
                found, self.warnings, self.rows = parse_trials(lines, self.path)
                # One that cannot be as it says is measured again, as if it were not there.
                self._trials = {key: row for key, row in found.items() if unsound(row) is None}
        except OSError as error:
            os.close(self._fd)
            raise _store_error(error, self.path, "cannot read the trials") from error
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
        reader = RowReader()
        for line in self.path.read_bytes().splitlines(keepends=True):
            row = reader.row(line)
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
        """The rows of one problem, in order; other rows are not parsed."""
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
        if isinstance(RowReader().row(data[start:]), Trial):
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
        _replace(self.directory / name, utf8(text))

    def close(self) -> None:
        """Close the trials and release the lock. Closing again is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

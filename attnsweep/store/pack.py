"""Pack a run to be kept: one compressed row a candidate, and nothing that can be made from it.

A packed run is read, ranked, shown and checked like any other. It is not resumed: a sweep in its
directory begins with no rows, since its rows were measured on another card.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from attnsweep.errors import StoreError
from attnsweep.files import write_file
from attnsweep.store.run import PACKED, TRIALS, read_trials, row_bytes, trials_of

# Written again from the rows by `attnsweep report`.
DERIVED = ("ranking.csv", "ranking.md", "report.html")


def pack(directory: Path) -> int:
    """Pack the run in a directory, in place; returns the bytes of its rows, compressed.

    Rows that a later one replaced are left out, and fingerprints, which only a resume reads. Lines
    that are no rows are left out too. The same rows give the same bytes. A run that is packed
    already stays as it is. Raises StoreError if it cannot be read or written.
    """
    if trials_of(directory).name == PACKED:
        return (directory / PACKED).stat().st_size
    trials, _ = read_trials(directory / TRIALS)
    rows = b"".join(row_bytes(trial.with_(fingerprint=None)) for trial in trials)
    data = gzip.compress(rows, mtime=0)
    try:
        write_file(directory / PACKED, data, durable=True)
        for name in (TRIALS, *DERIVED):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot pack: {error.strerror}", where=str(directory)) from error
    return len(data)

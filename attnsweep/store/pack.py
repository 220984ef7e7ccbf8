"""Pack a run to be kept: one compressed row per candidate, without files made from the rows.

A packed run can be read, ranked, shown and checked like any other. A sweep does not resume it: its
rows were measured on another card, so a sweep in its directory starts without rows.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from attnsweep.errors import StoreError
from attnsweep.files import write_file
from attnsweep.store.run import PACKED, TRIALS, read_trials, row_bytes, trials_of

# `attnsweep report` makes these from the rows again.
DERIVED = ("ranking.csv", "ranking.md", "report.html")


def pack(directory: Path) -> int:
    """Pack the run in a directory, in place; returns the size of its compressed rows in bytes.

    Packing drops replaced rows, lines that are not rows, and fingerprints, which only a resume
    reads. The same rows give the same bytes. A packed run stays as it is. Raises StoreError if the
    run cannot be read or written.
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

"""Candidates that compile to the same machine code: one is measured and stands for all."""

from __future__ import annotations

from collections.abc import Sequence

from attnsweep.build.candidate import Build
from attnsweep.trial import Status, Trial

_MEASURED = ("status", "detail", "accuracy", "time_us", "first_us", "stages_us", "launch_us")
_KEPT = ("resources", "schedule", "fingerprint", "first_us", "tried_s")


class Twins:
    """The candidates of one problem, by their machine code."""

    def __init__(self) -> None:
        self._measured: dict[tuple[object, ...], tuple[Build, Trial]] = {}
        self._order: dict[int, int] = {}

    def asked(self, builds: Sequence[Build]) -> None:
        """Note the order in which candidates were asked for."""
        for build in builds:
            self._order.setdefault(id(build), len(self._order))

    def add(self, build: Build, trial: Trial) -> None:
        """Remember a candidate that ran, if it is the first of its twins."""
        if trial.status in (Status.OK, Status.NOISY, Status.INACCURATE):
            self._measured.setdefault(build.machine_code(), (build, trial))

    def of(self, build: Build) -> tuple[Build, Trial] | None:
        """The candidate with the same machine code that ran, and its row."""
        return self._measured.get(build.machine_code()) if build.compiled else None

    def replace(self, build: Build, row: Trial) -> list[tuple[Build, Trial]]:
        """The rows of a candidate whose twin ran. row: its own, compiled and not pruned.

        The candidate that was asked for first gets the measured row. Chance decides which of two
        twins is compiled first, and chance must not name the winner, so a twin may hand over its
        measurement.
        """
        twin, measured = self._measured[build.machine_code()]
        if self._order[id(build)] > self._order[id(twin)]:
            return [(build, same_code(row, twin))]
        heir = row.with_(**{name: getattr(measured, name) for name in _MEASURED})
        self._measured[build.machine_code()] = (build, heir)
        # Keep its first_us: the search was told that time, and is told it again after a resume.
        left = twin.row(status=measured.status, **{name: getattr(measured, name) for name in _KEPT})
        return [(twin, same_code(left, build)), (build, heir)]


def same_code(row: Trial, as_: Build) -> Trial:
    """The row of a candidate that another one stands for."""
    same = f"same machine code as {as_.kernel.name} {as_.config.label}"
    return row.with_(status=Status.PRUNED, detail=same)

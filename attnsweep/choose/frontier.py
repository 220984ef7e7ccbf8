"""Time against error: which candidates a spec's max_error leaves, and which no other surpasses."""

from __future__ import annotations

from collections.abc import Sequence

from attnsweep.trial import OURS, Status, Trial

# Errors closer than this are one: the largest of many rows depends on luck a little.
_SAME = 0.98


def held_to(trial: Trial, max_error: float | None) -> Trial:
    """The row under a spec's max_error: a right candidate whose error is larger is INACCURATE.

    It keeps its times, and is neither ranked nor timed in rounds. Peers are left as they are.
    """
    accuracy = trial.accuracy
    if trial.provider != OURS or accuracy is None or trial.status not in _RIGHT:
        return trial
    if accuracy.max_error is None is max_error:
        return trial
    row = trial.with_(accuracy=accuracy.model_copy(update={"max_error": max_error}))
    detail = too_inaccurate(row)
    if detail is not None:
        return row.with_(status=Status.INACCURATE, detail=detail)
    if trial.status is Status.INACCURATE:  # of a run with another bound
        return row.with_(status=Status.OK, detail=None)
    return row


_RIGHT = (Status.OK, Status.NOISY, Status.INACCURATE)


def too_inaccurate(trial: Trial) -> str | None:
    """Why a right candidate is not ranked: its error exceeds the max_error that it was held to."""
    accuracy = trial.accuracy
    if trial.provider != OURS or accuracy is None or accuracy.max_error is None:
        return None
    error = accuracy.error
    if error is not None and error <= accuracy.max_error:
        return None
    said = "unknown" if error is None else f"{error:.2e}"
    return f"error {said} exceeds measure: max_error {accuracy.max_error:.2e}"


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The candidates that none surpasses in both time and error, the fastest first.

    Of right candidates with a time, ranked or not; a time of rounds and a first time count alike.
    """
    timed = [
        (trial.time_us.median, trial.accuracy.error, trial)
        for trial in trials
        if trial.provider == OURS and trial.status in (Status.OK, Status.INACCURATE)
        if trial.time_us is not None and trial.accuracy is not None
        if trial.accuracy.error is not None
    ]
    found: list[Trial] = []
    least = float("inf")
    for _, error, trial in sorted(timed, key=lambda item: item[:2]):
        if error < _SAME * least:
            found.append(trial)
            least = error
    return found

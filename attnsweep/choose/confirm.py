"""After the finals' rounds, our entries are checked again: the one that wins for longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

from attnsweep.choose.ranking import winner_of
from attnsweep.gpu.worker import Gpu, WorkerError
from attnsweep.trial import OURS, Trial

# Microseconds of calls one by one, of the winner and of every other candidate. The winner's call of
# 10 µs is then made 7,000 times, which shows a race of one call in a thousand with 99.9 %.
_WINNER_US = 200_000.0
_OTHERS_US = 2_000.0


def confirm(
    entries: MutableMapping[str, Trial],
    rows: Callable[[], Mapping[str, Trial]],
    gpu: Gpu,
    fail: Callable[[str, Trial, WorkerError], None],
) -> None:
    """Check each of our entries again, and count the calls in its row.

    rows: the rows of the entries as they would be ranked now. fail: told of an entry that is wrong,
    which then leaves `entries`; if it won, the next winner is checked for as long.
    """
    at_length, briefly = set[str](), set[str]()
    entered = -1
    while len(entries) != entered:  # one that leaves may change who wins
        entered, now = len(entries), rows()
        winner = winner_of([*now.values()])
        for name, row in now.items():
            if row is winner and name not in at_length:
                at_length.add(name)
                longest_us = _WINNER_US
            elif row.provider == OURS and name not in at_length | briefly:
                briefly.add(name)
                longest_us = _OTHERS_US
            else:
                continue
            trial = entries[name]
            try:
                calls = gpu.confirm(name, longest_us)
            except WorkerError as error:
                fail(name, entries.pop(name), error)
                continue
            if trial.accuracy is not None:
                counted = {"calls": calls + (trial.accuracy.calls or 0)}
                accuracy = trial.accuracy.model_copy(update=counted)
                entries[name] = trial.with_(accuracy=accuracy)

"""The race and the finals of a problem's candidates, as a sweep has them, without baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnsweep.bench.gpu import Gpu
from attnsweep.choose.finals import Finals
from attnsweep.choose.race import Pair, race
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Trial
from attnsweep.specs.load import SweepSpec


def select(checked: Sequence[Pair], spec: SweepSpec, gpu: Gpu) -> list[Trial]:
    """A row for each of `checked`, candidates with first times, for `rank`."""
    rows = {trial.key: trial for _, trial in checked}

    def put(row: Trial) -> None:
        rows[row.key] = row

    observer = Observer()
    raced = race(checked, spec, gpu, put=put, observer=observer)
    how: dict[str, Any] = {"seed": spec.search.seed, "put": put, "keep": put}
    Finals(spec.measure, gpu, **how, observer=observer).run(raced, [])
    return list(rows.values())

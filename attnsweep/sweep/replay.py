"""A sweep without a GPU: it looks up the spec's candidates in a recorded run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from attnsweep.choose.search import Search, search_of
from attnsweep.core.errors import StoreError
from attnsweep.core.hardware import arch_on
from attnsweep.core.observer import Observer
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.family.discover import rows_of_today
from attnsweep.family.space import Space
from attnsweep.reports import tables
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import Shard, candidate_counts, plan, plan_facts, run_name
from attnsweep.store.run import Run, environment_of, open_run
from attnsweep.store.store import Store


def _shown(path: Path) -> str:
    """The path as a user in this directory would write it."""
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def replay(spec: SweepSpec, results: Path, observer: Observer, shard: Shard | None = None) -> Run:
    """Sweep a recorded run: every row is marked recorded, and none is invented.

    With a strategy that stops by itself, every candidate that the recording holds is taken: where
    the run stopped depends on the history that it began with, and another one might miss its best.
    """
    assert spec.recording is not None  # load_spec checks it
    recording = open_run(spec.recording)
    environment = environment_of(recording)
    planned = plan(spec, arch_on(environment))
    planned = planned if shard is None else shard.take(planned)
    observer.planned(candidate_counts(planned, spec.search.candidates), finals=False)
    by_key = {row.key: row for row in map(rows_of_today(spec.families), recording.trials)}
    where = f"{environment.gpu}, {environment.date[:10]}"
    directory = results / "replay" / run_name(spec, shard)
    if directory.resolve() == recording.directory.resolve():
        hint = "choose another place with --results, or give the spec another name"
        what = "the recording is the run that its replay would write over"
        raise StoreError(what, where=str(directory), hint=hint)
    store = Store.open(directory, derived=True)
    try:
        store.describe(spec.resolved(store.directory), environment, plan_facts(planned))

        def stored(trial: Trial) -> Trial:
            found = by_key.get(trial.key)
            if found is None:
                row = trial.with_(detail=f"not in {_shown(recording.directory)}")
            else:
                row = found.with_(recorded=True, recorded_on=where)
            store.append(row)
            observer.tried(row)
            return row

        for item in planned:
            [count] = candidate_counts([item], spec.search.candidates)
            observer.opening(item.problem, count, 0)
            missing = {"problem": item.problem, "status": Status.NO_RECORD}
            for space in item.spaces:
                asked = {"kernel": space.kernel.name, "provider": OURS}
                search = _search(spec, space, by_key, missing | asked)
                while (config := search.ask()) is not None:
                    row = Trial.model_validate(missing | asked | {"config": dict(config)})
                    search.tell(stored(row))
            for name in (*spec.baselines, *spec.candidates):
                baseline = {"kernel": name, "provider": name, "config": {}}
                stored(Trial.model_validate(missing | baseline))
        return store.finish(tables.files)
    finally:
        store.close()


def _search(
    spec: SweepSpec,
    space: Space,
    recorded: Collection[tuple[object, ...]],
    facts: Mapping[str, object],
) -> Search:
    """The spec's search; of a model, every candidate that is recorded. facts: of its rows."""
    if spec.search.strategy != "gp":
        return search_of(spec, space)
    rows = (Trial.model_validate({**facts, "config": dict(config)}) for config in space.configs)
    held = [config for config, row in zip(space.configs, rows, strict=True) if row.key in recorded]
    there = replace(space, configs=tuple(held) or space.configs)
    return Search("exhaustive", there, candidates=spec.search.candidates)

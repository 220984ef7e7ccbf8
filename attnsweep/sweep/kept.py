"""Resume: rows of an earlier run that still hold, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsweep.choose.ranking import winner_of
from attnsweep.compile.candidate import Build
from attnsweep.core.callables import CALLABLE
from attnsweep.core.errors import StoreError
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, PROTOCOL, THIS_BINARY, Environment, Status, Trial
from attnsweep.core.user_code import source_digest
from attnsweep.family.family import Family
from attnsweep.regress.verdicts import other_machine
from attnsweep.specs.load import SweepSpec
from attnsweep.store.run import ROWS, TRIALS, open_run
from attnsweep.store.store import Store, Writer


class Kept:
    """The stored rows that still hold: same code, launches, problem, settings, GPU, driver."""

    def __init__(self, spec: SweepSpec, environment: Environment, store: Writer) -> None:
        self._spec, self._environment, self._store = spec, environment, store

    def rows(self, builds: Sequence[Build]) -> dict[int, Trial]:
        """The rows of these candidates that hold, by id of the build.

        What was not compiled since its compiler was killed, holds never.
        """
        stored = self._stored(builds[0].problem) if builds else {}
        kept: dict[int, Trial] = {}
        for build in builds:
            trial = stored.get(build.key)
            if trial is None or trial.conditions.get("compiler_lost"):
                continue
            if trial.fingerprint == self.fingerprint(build):
                kept[id(build)] = trial
        return kept

    def whole(self, problem: Problem, builds: Sequence[Build]) -> bool:
        """Whether nothing of a problem is left to measure: all these candidates, and the rounds.

        And whether a call that wins is known to be right on any length, or not to be.
        """
        kept = self.rows(builds)
        if len(kept) < len(builds):
            return False
        stored = self._stored(problem)
        for row in self.baselines(problem):
            old = stored.get(row.key)
            if old is None or old.fingerprint != row.fingerprint:
                return False
        timed = [t for t in kept.values() if t.status is Status.OK]
        if timed and not self._all_rounds(problem, [*kept.values()]):
            return False
        if all(t.call.get("covers") != THIS_BINARY for t in timed):
            return True
        call = {} if (best := winner_of([*stored.values()])) is None else best.call
        return call.get("covers") != THIS_BINARY or "other_lengths" in call

    def _all_rounds(self, problem: Problem, kept: Sequence[Trial]) -> bool:
        """Whether the last rounds of these rows are there, with all rows that took part in them.

        Rows without that fact, of earlier versions, are believed to be all.
        """
        names = {_together(row).get("name") for row in kept if row.time_us and row.time_us.rounds}
        if len(names) != 1:  # no rounds, or some of an earlier run that was added to
            return False
        (name,) = names
        stored = self._store.rows_of(problem)
        found = [_together(t) for t in stored if t.time_us and t.time_us.rounds]
        same = [facts for facts in found if facts.get("name") == name]
        return name is None or all(facts.get("rows") == len(same) for facts in same)

    def _stored(self, problem: Problem) -> dict[tuple[object, ...], Trial]:
        return {trial.key: trial for trial in self._store.rows_of(problem)}

    def baselines(self, problem: Problem) -> list[Trial]:
        """A row for each baseline, with the status for a baseline that cannot run."""
        packages = sorted(self._environment.packages.items())
        return [
            Trial(
                kernel=name,
                provider=name,
                config={},
                problem=problem,
                status=Status.SKIPPED,
                candidate=name in self._spec.candidates,
                fingerprint=self._digest(problem, name, packages, *_source(name)),
                machine=self._environment.machine,
            )
            for name in (*self._spec.baselines, *self._spec.candidates)
        ]

    def stamp(self, build: Build) -> dict[str, Any]:
        """The fields of a new row that say what it depends on, and which machine measured it."""
        return {"fingerprint": self.fingerprint(build), "machine": self._environment.machine}

    def fingerprint(self, build: Build) -> str:
        """Hash of everything that the row of a candidate depends on."""
        issued = [] if build.schedule.whole else [repr(build.schedule)]
        issued += [build.kernel.order] if build.kernel.turned else []
        issued += [build.read_later] if build.read_later else []
        if self._spec.require:
            issued.append(repr(sorted(self._spec.require.items())))
        return self._digest(build.problem, build.keys, sorted(build.launches.items()), *issued)

    def _digest(self, *parts: object) -> str:
        """Hash of `parts`, and of protocol, settings, GPU and driver."""
        environment = self._environment
        settings = self._spec.measure
        card = (environment.gpu, environment.driver, environment.cuda)
        how = (settings.rank_by, settings.rounds, settings.replay_us, settings.cold, settings.eager)
        parts += ("energy",) if settings.energy else ()
        return hashlib.sha256(repr((PROTOCOL, card, how, parts)).encode()).hexdigest()[:32]


def _source(baseline: str) -> tuple[str | None, ...]:
    """What a baseline depends on beside the packages that are installed."""
    return (source_digest(baseline),) if CALLABLE.fullmatch(baseline) else ()


def _together(row: Trial) -> Mapping[str, Any]:
    facts = row.conditions.get("together")
    return facts if isinstance(facts, dict) else {}


def retire(store: Store, families: Mapping[str, Family], observer: Observer) -> None:
    """Prune rows of configs that their family no longer has; otherwise they would be ranked."""
    packed = next((name for name in ROWS[1:] if (store.directory / name).is_file()), None)
    if packed and not store.trials:
        observer.note(f"{packed} stays there; this run's rows are in {TRIALS} and are read first")
    retired = 0
    for trial in store.trials:
        if trial.provider != OURS or trial.status is Status.PRUNED or trial.kernel not in families:
            continue
        family = families[trial.kernel]
        modes = {param.name for param in family.modes}
        changed = (set(trial.config) - modes) ^ {param.name for param in family.params}
        what = family.outdated(trial.call) if trial.call else None
        if changed:
            what = f"{trial.kernel} changed since: {', '.join(sorted(changed))}"
        if what is not None:
            row = trial.with_(status=Status.PRUNED, detail=what, time_us=None, race={})
            store.append(row)
            retired += 1
    if retired:
        observer.note(f"pruned {retired} earlier rows: their kernels no longer have these configs")


def measured_elsewhere(directory: Path, now: Environment) -> str | None:
    """The GPU, driver and CUDA of an earlier run in `directory`, if they are not today's.

    Another card of the same kind is another GPU: cards differ, and a problem's rows are compared.
    So is the same card with another power limit, or a part of it.
    """
    if not (directory / TRIALS).is_file() or not (directory / TRIALS).stat().st_size:
        return None
    try:
        before = open_run(directory).environment
    except StoreError:
        return None  # no rows to set aside
    today = (now.gpu, now.driver, now.cuda)
    if before is None:
        return None
    if (before.gpu, before.driver, before.cuda) != today:
        return f"{before.gpu}, driver {before.driver}, CUDA {before.cuda}"
    if None not in (before.uuid, now.uuid) and before.uuid != now.uuid:
        return f"another {before.gpu}"
    if (unlike := other_machine(before.machine, now.machine)) is not None:
        return unlike.removeprefix("measured with ")
    return None


def of_these_cards(environment: Environment, uuids: Iterable[str | None]) -> Environment:
    """The environment of a run of several cards: it names no card, since each row names its own."""
    several = {uuid for uuid in (environment.uuid, *uuids) if uuid is not None} - {environment.uuid}
    return environment.model_copy(update={"uuid": None, "sku": None}) if several else environment

"""The rounds: the best candidates of a problem and its baselines take turns, in random order."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence

from attnsweep.candidates import Build, Observer
from attnsweep.spec import SweepSpec
from attnsweep.store import Store
from attnsweep.trial import Measurement, Status, Trial
from attnsweep.workers import Worker, WorkerError

# Rounds before the first that counts: clocks rise and caches fill.
_WARMUP_ROUNDS = 2
# The best of each family always enters the rounds, so that every family's best is well measured.
_FINALISTS_PER_FAMILY = 2
# Interquartile range over median above which a time is not to be trusted.
_NOISY_SPREAD = 0.15


class Rounds:
    """One problem's finalists on the worker's GPU. What is measured replaces rows in the store."""

    def __init__(self, spec: SweepSpec, worker: Worker, store: Store, observer: Observer) -> None:
        self._spec, self._worker, self._store, self._observer = spec, worker, store, observer

    def run(
        self, checked: Sequence[tuple[Build, Trial]], peers: Sequence[Trial]
    ) -> list[tuple[Build, Trial]]:
        """Time the best of `checked` and all peers in turns; replace their rows.

        peers: the row of each baseline, as it is if the baseline cannot run. Returns who of
        `checked` was a finalist.
        """
        entries: dict[str, Trial] = {}
        finalists = []
        for build, trial in self._finalists(checked):
            name = f"{build.kernel.name} {build.config.label}"
            try:
                self._worker.call("admit", name, build.candidate(), keep=True, slow=True)
                entries[name] = trial
                finalists.append((build, trial))
            except WorkerError as error:
                self._lose(trial, error)
        for row in peers:
            try:
                accuracy = self._worker.call("admit_baseline", row.provider, keep=True, slow=True)
                entries[row.provider] = row.with_(status=Status.OK, accuracy=accuracy)
            except WorkerError as error:
                row = row.with_(status=error.status, detail=error.detail, accuracy=error.payload)
                self._store.append(row)
                self._observer.tried(row)
        for _, trial in checked:  # rounds of an earlier session do not pair with today's
            if trial.time_us and trial.time_us.rounds and trial not in entries.values():
                alone = trial.time_us.model_copy(update={"rounds": []})
                self._store.append(trial.with_(time_us=alone))
        samples = self._rounds(entries)
        conditions: dict[str, object] = {}
        with contextlib.suppress(WorkerError):
            conditions = self._worker.call("conditions") if entries else {}
        for name, trial in entries.items():
            final = _measured_row(trial, samples[name]).with_(conditions=conditions)
            self._store.append(final)
            self._observer.tried(final)
        return finalists

    def _finalists(self, checked: Sequence[tuple[Build, Trial]]) -> list[tuple[Build, Trial]]:
        def first_time(pair: tuple[Build, Trial]) -> float:
            return pair[1].time_us.median if pair[1].time_us else float("inf")

        ordered = sorted(checked, key=first_time)
        chosen = ordered[: self._spec.measure.finalists]
        for _, family in itertools.groupby(
            sorted(ordered, key=lambda pair: pair[0].kernel.name),
            key=lambda pair: pair[0].kernel.name,
        ):
            best = sorted(family, key=first_time)[:_FINALISTS_PER_FAMILY]
            chosen += [pair for pair in best if pair not in chosen]
        return chosen

    def _rounds(self, entries: dict[str, Trial]) -> dict[str, dict[str, list[float]]]:
        """Name to kind to samples. An entry that fails leaves `entries` and becomes its row."""
        settings = self._spec.measure
        rng = random.Random(self._spec.search.seed)
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in entries}
        kinds = [("warm", settings.rounds)]
        if settings.cold:
            kinds.append(("cold", max(3, settings.rounds // 3)))
        kinds.append(("stages", 3))
        total = sum(rounds + _WARMUP_ROUNDS for _, rounds in kinds)
        done = 0
        for kind, rounds in kinds:
            for number in range(-_WARMUP_ROUNDS, rounds):
                for name in rng.sample(sorted(entries), len(entries)):
                    resources = entries[name].resources
                    stages = resources.stages if resources else {}
                    wanted = [kind]
                    if kind == "stages":
                        wanted = list(stages) if len(stages) > 1 else []
                    for what in wanted:
                        try:
                            time_us = self._worker.call("replay", name, what)
                        except WorkerError as error:
                            self._lose(entries.pop(name), error, name)
                            break
                        if number >= 0:
                            samples[name].setdefault(what, []).append(time_us)
                done += 1
                self._observer.timing(done, total)
        if settings.eager:
            for name in list(entries):
                try:
                    samples[name]["eager"] = [self._worker.call("eager_us", name)]
                except WorkerError as error:
                    self._lose(entries.pop(name), error, name)
        return samples

    def _lose(self, trial: Trial, error: WorkerError, name: str | None = None) -> None:
        """A finalist that failed after it passed: its row says so, the others go on."""
        if name is not None:
            self._worker.forget(name)
        row = trial.with_(status=error.status, detail=f"while timing: {error.detail}")
        self._store.append(row)
        self._observer.tried(row)


def _measured_row(trial: Trial, samples: Mapping[str, list[float]]) -> Trial:
    """The finalist's row with its rounds."""
    warm = samples["warm"]
    low, middle, high = statistics.quantiles(warm, n=4) if len(warm) > 1 else warm * 3
    middle = statistics.median(warm)
    changes: dict[str, object] = {
        "time_us": Measurement(
            median=middle,
            low=low,
            high=high,
            samples=len(warm),
            rounds=[round(x, 4) for x in warm],
        ),
        "stages_us": {
            name: statistics.median(times)
            for name, times in samples.items()
            if name not in ("warm", "cold", "eager")
        },
    }
    if "cold" in samples:
        changes["cold_us"] = statistics.median(samples["cold"])
    if "eager" in samples:
        changes["eager_us"] = samples["eager"][0]
    if (high - low) / middle > _NOISY_SPREAD:
        changes["status"] = Status.NOISY
        changes["detail"] = f"quartiles of {len(warm)} rounds {low:.2f} to {high:.2f} us"
    return trial.with_(**changes)

"""A sweep from its spec to its stored run, on one card."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from attnsweep.bench.worker import Worker
from attnsweep.compile.advice import spilling, unused_parameters
from attnsweep.core.errors import CardLostError
from attnsweep.core.observer import Observer
from attnsweep.core.trial import OURS, Status, cards_of
from attnsweep.device.lock import held
from attnsweep.family.family import Kernel
from attnsweep.reports import tables
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import Shard, candidate_counts, input_seed, plan_facts, run_name
from attnsweep.store.run import Run
from attnsweep.store.store import Store
from attnsweep.sweep.kept import measured_elsewhere, of_these_cards, retire
from attnsweep.sweep.loop import Sweep
from attnsweep.sweep.replay import replay
from attnsweep.sweep.start import start


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a sweep."""

    run: Run
    interrupted: bool
    unmeasured: tuple[str, ...] = ()
    """Labels of problems that no card could measure to the end."""
    no_card: bool = False
    """Whether that is because every card was lost."""

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; 3 if all cards were lost; 1 if a problem has no result; otherwise 0."""
        if self.interrupted or self.no_card:
            return 130 if self.interrupted else 3
        if self.unmeasured:
            return 1
        trials = [t for t in self.run.trials if t.provider == OURS]
        problems = {t.problem for t in trials}
        ok = {t.problem for t in trials if t.status in (Status.OK, Status.NOISY)}
        return 0 if problems and ok == problems else 1


def run(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    *,
    results: Path,
    fresh: bool = False,
    limit: int | None = None,
    shard: Shard | None = None,
    cache_dir: Path | None = None,
    wait: bool = False,
    observer: Observer | None = None,
) -> Outcome:
    """Run a sweep and store it under `results`/<gpu>/<spec name>. Same spec again: resume.

    limit: at most this many candidates per family and problem. shard: sweep this part of the
    problems alone, and store it under `results`/<gpu>/<spec name>-<part>. wait: for another run
    that times on the card; otherwise BusyError. Ctrl-C, and a card that is lost, return an Outcome
    with the rows measured so far. Raises NoGpuError, SpaceError, StoreError or ToolchainError.
    """
    observer = observer or Observer()
    if limit is not None:
        cap = min(limit, spec.search.candidates or limit)
        spec = replace(spec, search=spec.search.model_copy(update={"candidates": cap}))
    if spec.device == "replay":
        return Outcome(replay(spec, kernels, results, observer, shard), False)
    with (
        ExitStack() as locks,  # until the worker has stopped
        Worker(spec.measure.timeout_s, cache_dir=cache_dir) as gpu,
        ExitStack() as at_end,
    ):
        seed = input_seed(spec)
        environment, planned, compiler = start(
            spec, kernels, gpu, cache_dir, at_end, seed, shard=shard
        )
        card = held(environment.uuid, environment.gpu, wait=wait, say=observer.note)
        locks.enter_context(card)
        observer.planned(candidate_counts(planned, spec.search.candidates))
        for warning in unused_parameters(
            (space for item in planned for space in item.spaces), compiler.arch
        ):
            observer.note(warning)
        directory = results / environment.slug / run_name(spec, shard)
        elsewhere = not fresh and measured_elsewhere(directory, environment)
        if elsewhere:
            observer.note(f"set aside earlier rows, measured with {elsewhere}")
        store = at_end.enter_context(Store.open(directory, fresh=fresh or bool(elsewhere)))
        where = of_these_cards(environment, cards_of(store.trials))
        store.describe(spec.resolved(store.directory), where, plan_facts(planned))
        retire(store, kernels, observer)
        sweep = Sweep(spec, gpu, environment, store, observer, seed)
        began = time.monotonic()
        interrupted, lost = False, False
        try:
            interrupted = sweep.run(planned, compiler)
        except CardLostError as error:
            if not store.trials:
                raise
            lost = True
            observer.note(error.what)
            compiler.close()
        if proof_s := gpu.proof_s:
            observer.note(_said_of_proof(time.monotonic() - began, proof_s))
        sweep.keep_winners(missing=not interrupted and not lost)
        spills = spilling(store.trials, spec)
        if spills is not None:
            observer.note(spills)
        left = [item.problem.label for item in planned if item.problem not in sweep.finished]
        return Outcome(store.finish(tables.files), interrupted, tuple(left) if lost else (), lost)


def _said_of_proof(took_s: float, proof_s: Mapping[str, float]) -> str:
    most = sorted(proof_s.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {spent_s:.1f}" for name, spent_s in most if spent_s >= 0.05)
    in_all = sum(proof_s.values())
    return f"took {took_s:.0f} s; {in_all:.1f} s of them proved outputs right ({parts})"

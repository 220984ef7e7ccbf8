"""The card that `tune` and `init` make a spec for: this machine's, a recorded one, or one named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.hardware import ARCHS, arch_named, arch_on
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Status
from attnsweep.family.family import Family
from attnsweep.specs.load import load_spec
from attnsweep.specs.plan import refuse_too_large
from attnsweep.specs.shipped import shipped_specs
from attnsweep.specs.starter import Target, what_runs
from attnsweep.specs.yaml_file import nearest
from attnsweep.store.run import environment_of, open_run


def target_of(
    families: Mapping[str, Family],
    arch: str | None = None,
    problems: Sequence[Problem] = (),
    replay: Path | None = None,
) -> Target:
    """The card to tune for: a recorded run's, an architecture's usual one, or this machine's."""
    if replay is not None:
        return recorded(replay, problems)
    return here(families, problems) if arch is None else named(arch, families)


def named(arch: str, families: Mapping[str, Family]) -> Target:
    """A card of this architecture. Raises SpecError, which says what runs on which."""
    try:
        return Target(arch_named(arch))
    except SpecError as error:
        hint = f"{nearest(arch, ARCHS)}\n  {what_runs(families)}"
        raise SpecError(error.what, where=f"--arch {arch}", hint=hint) from error


def described() -> Environment:
    """The environment of this machine's card. Raises NoGpuError, also if it does not answer."""
    try:
        with Worker(timeout_s=60) as worker:
            return worker.describe()
    except WorkerError as error:
        why = "did not answer" if error.status is Status.TIMEOUT else f"failed: {error.detail}"
        hint = "check that nvidia-smi works, then try again"
        raise NoGpuError(f"the GPU {why}", hint=hint) from error


def here(families: Mapping[str, Family], problems: Iterable[Problem] = ()) -> Target:
    """This machine's card.

    Raises NoGpuError if there is none, if it is too old or too new, or too small for a problem.
    """
    try:
        found = described()
    except NoGpuError as error:
        if "compute capability" not in error.what:
            raise
        raise NoGpuError(error.what, hint=what_runs(families)) from error
    refuse_too_large(problems, found)
    return Target(arch_on(found), found.gpu)


def recorded(run: Path, problems: Sequence[Problem]) -> Target:
    """The card of a recorded run, or of the one that a shipped spec of that name replays.

    Raises SpecError if the run lacks one of the problems, StoreError if it is no run.
    """
    specs = shipped_specs()
    if not run.exists() and run.name in specs:
        recording = load_spec(specs[run.name]).recording
        if recording is None:
            raise SpecError(
                "is a spec that measures", where=f"--replay {run}", hint="give a recorded run"
            )
        run = recording
    read = open_run(run)
    card = environment_of(read)
    there = list(dict.fromkeys(trial.problem for trial in read.trials))
    for problem in problems:
        if problem not in there:
            alike = {known: how for known in there if (how := _differs(known, problem))}
            there = [*alike, *(known for known in there if known not in alike)]
            labels = [f"{k.label} ({alike[k]})" if k in alike else k.label for k in there]
            some = "\n  ".join(labels[:8])
            more = f"\n  and {len(there) - 8} more" if len(there) > 8 else ""
            raise SpecError(
                f"{problem.label} is not recorded there",
                where=f"--replay {run}",
                hint=f"it has:\n  {some}{more}",
            )
    return Target(arch_on(card), card.gpu, run.resolve())


def _differs(known: Problem, asked: Problem) -> str:
    """The options of `tune` by which a problem of the same shape is asked for; `` of others."""
    if replace(known, dtype=asked.dtype, mask=asked.mask) != asked:
        return ""
    options = [f"--dtype {known.dtype}"] if known.dtype != asked.dtype else []
    if known.causal != asked.causal:
        options.append("--causal" if known.causal else "without --causal")
    return " ".join(options)

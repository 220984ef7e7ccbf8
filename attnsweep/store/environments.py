"""The environment of a run that cannot do without it, and why one has none."""

from __future__ import annotations

from attnsweep.errors import StoreError
from attnsweep.store.run import ENVIRONMENT, Run
from attnsweep.trial import Environment


def environment_of(run: Run) -> Environment:
    """Where a run was measured. Raises StoreError if the file is missing, or damaged."""
    if run.environment is not None:
        return run.environment
    path, odd = run.directory / ENVIRONMENT, damage(run)
    if odd is None:
        hint = "copy the run whole, or sweep it again: attnsweep run SPEC --fresh"
        what = f"no {ENVIRONMENT}, so its GPU is unknown"
        raise StoreError(what, where=str(run.directory), hint=hint)
    hint = "copy the run again, or restore the file from version control"
    raise StoreError(f"damaged, so the GPU is unknown: {odd}", where=str(path), hint=hint)


def damage(run: Run) -> str | None:
    """What is wrong with the file of a run without an environment; None if it is missing."""
    begins = f"{run.directory / ENVIRONMENT}: "
    odd = (warning for warning in run.warnings if warning.startswith(begins))
    return next((warning.removeprefix(begins) for warning in odd), None)

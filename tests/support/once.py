"""What tests and checks ask of recorded runs again and again, made once for a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dispatch_judged

from attnsweep.serve import export, package_kernels
from attnsweep.store import run as store

RESULTS = Path(__file__).parent.parent.parent / "results"


@contextmanager
def once() -> Iterator[None]:
    """Rows of recorded runs, their winners and tables, what rules say of these; neither may change meanwhile."""
    read, rows_of = store.read_trials, {}
    choose, chosen = export.chosen_of, {}
    runs, running = package_kernels._runs, {}
    tuned = cache(lambda runs, slower, made=dispatch_judged.tuned: made(runs, slower))

    def read_once(path: Path) -> Any:
        if not path.resolve().is_relative_to(RESULTS):
            return read(path)
        if path not in rows_of:
            rows_of[path] = read(path)
        trials, warnings = rows_of[path]
        return [*trials], [*warnings]

    def choosing(run: Any, environment: Any, key: Any, families: Any, left_out: list[str], slower: float = 0.0) -> Any:
        if not run.directory.resolve().is_relative_to(RESULTS):
            return choose(run, environment, key, families, left_out, slower)
        of = (run.directory, slower, *(each.source for each in families.values()))
        if of not in chosen:
            left: list[str] = []
            chosen[of] = choose(run, environment, key, families, left, slower), left
        left_out += chosen[of][1]
        return chosen[of][0]

    def runs_once(family: Any, config: Any, problem: Any) -> bool:
        of = (family.source, config, problem)
        if of not in running:
            running[of] = runs(family, config, problem)
        return running[of]

    with (
        patch.object(package_kernels, "_asked_for", cache(package_kernels._asked_for)),
        patch.object(package_kernels, "_runs", runs_once),
        patch.object(export, "_code_key", cache(export._code_key)),
        patch.object(store, "read_trials", read_once),
        patch.object(dispatch_judged, "tuned", lambda runs, slower=0.0: tuned((*runs,), slower)),
        patch.object(export, "chosen_of", choosing),
    ):
        yield
